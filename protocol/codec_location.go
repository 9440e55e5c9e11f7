package protocol

func (e *enc) handle(h *Handle) {
	e.uint("region_id", h.RegionID)
	e.uint("offset", h.Offset)
	e.uint("length", h.Length)
	e.uint("auth_token", h.AuthToken)
}

// region appends r's handle as a map, and its other fields beside it.
func (e *enc) region(r *Region) {
	e.field("handle")
	s := e.open()
	e.handle(&r.Handle)
	e.close(s)
	e.regionExtras(r)
}

func (e *enc) regionExtras(r *Region) {
	e.optUint("device", r.Device)
	e.optUint("generation", r.Generation)
	e.optUint("epoch", r.Epoch)
	e.optUint("page_size", r.PageSize)
}

// location appends l in the order in which Maru sends what it knows of it.
func (e *enc) location(l *Location) {
	e.field("handle")
	s := e.open()
	e.handle(&l.Handle)
	e.close(s)
	e.uint("kv_offset", l.KVOffset)
	e.uint("kv_length", l.KVLength)
	e.regionExtras(&l.Region)
	e.optUint("checksum", l.Checksum)
}

const (
	haveRegionID = 1 << iota
	haveOffset
	haveLength
	haveAuthToken
)

// handleField reads a field of a handle, and returns its bit.
func (d *dec) handleField(name []byte, h *Handle) uint {
	switch string(name) {
	case "region_id":
		h.RegionID = d.uint()
		return haveRegionID
	case "offset":
		h.Offset = d.uint()
		return haveOffset
	case "length":
		h.Length = d.uint()
		return haveLength
	case "auth_token":
		h.AuthToken = d.uint()
		return haveAuthToken
	}
	return 0
}

func (d *dec) handle(h *Handle) {
	*h = Handle{}
	have := uint(0)
	for n := d.mapHead(); d.next(&n); {
		bit := d.handleField(d.name(), h)
		if bit == 0 {
			d.skip()
		}
		have |= bit
	}
	d.need(have, "region_id", "offset", "length", "auth_token")
	d.inside("handle", -1)
}

// regionField reads a field of a Region, and reports whether it was one.
func (d *dec) regionField(name []byte, r *Region) bool {
	switch string(name) {
	case "handle":
		d.handle(&r.Handle)
	case "device":
		r.Device = d.uint()
	case "generation":
		r.Generation = d.uint()
	case "epoch":
		r.Epoch = d.uint()
	case "page_size":
		r.PageSize = d.uint()
	default:
		return false
	}
	return true
}

// locationField reads a field of a Location, and reports whether it was one.
func (d *dec) locationField(name []byte, l *Location) bool {
	switch string(name) {
	case "kv_offset":
		l.KVOffset = d.uint()
	case "kv_length":
		l.KVLength = d.uint()
	case "checksum":
		l.Checksum = d.uint()
	default:
		return d.regionField(name, &l.Region)
	}
	return true
}

func (e *enc) context(c *Context) {
	e.field("context")
	e.contextMap(c)
}

func (e *enc) contextMap(c *Context) {
	s := e.open()
	e.optStr("model", c.Model)
	e.optStr("lora", c.LoRA)
	e.optStr("salt", c.Salt)
	e.optUint("block_size", c.BlockSize)
	e.optUint("seed", c.Seed)
	e.close(s)
}

// context reads a Context into c. Strings that are the same as before are kept: batch after batch of a client has
// the same context.
func (d *dec) context(c *Context) {
	old := *c
	*c = Context{}
	for n := d.mapHead(); d.next(&n); {
		switch string(d.name()) {
		case "model":
			c.Model = d.str(old.Model, MaxNameBytes)
		case "lora":
			c.LoRA = d.str(old.LoRA, MaxNameBytes)
		case "salt":
			c.Salt = d.str(old.Salt, MaxNameBytes)
		case "block_size":
			c.BlockSize = d.uint()
		case "seed":
			c.Seed = d.uint()
		default:
			d.skip()
		}
	}
	d.inside("context", -1)
}

func (e *enc) optPages(name string, pages []Page) {
	if len(pages) == 0 {
		return
	}
	e.array(name, len(pages))
	for i := range pages {
		p := &pages[i]
		s := e.open()
		e.optKey("key", p.Key)
		e.uint("region_id", p.RegionID)
		e.uint("kv_offset", p.KVOffset)
		e.uint("kv_length", p.KVLength)
		e.optUint("free_after_ms", p.FreeAfterMS)
		e.close(s)
	}
}

func (d *dec) pages(name string, s []Page) []Page {
	for v := range elements(d, &s, MaxList, name) {
		d.page(v)
	}
	return s
}

func (d *dec) page(p *Page) {
	*p = Page{}
	have := uint(0)
	for n := d.element(); d.next(&n); {
		switch string(d.name()) {
		case "key":
			p.Key = d.key()
		case "region_id":
			p.RegionID = d.uint()
			have |= 1
		case "kv_offset":
			p.KVOffset = d.uint()
			have |= 2
		case "kv_length":
			p.KVLength = d.uint()
			have |= 4
		case "free_after_ms":
			p.FreeAfterMS = d.uint()
		default:
			d.skip()
		}
	}
	d.need(have, "region_id", "kv_offset", "kv_length")
}

func (e *enc) device(v *Device) {
	s := e.open()
	e.uint("id", v.ID)
	e.optStr("path", v.Path)
	e.optStr("uuid", v.UUID)
	e.optStr("tier", v.Tier)
	e.optStr("coherence", v.Coherence)
	e.optUint("size", v.Size)
	e.optUint("generation", v.Generation)
	e.optStr("node", v.Node)
	e.optUint("numa", v.NUMA)
	if v.Endpoint != nil {
		e.endpoint(v.Endpoint)
	}
	e.close(s)
}

// device reads the fields of a Device, of which n follow. Its Endpoint is made anew, for the caller to keep.
func (d *dec) device(v *Device, n int) {
	old := *v
	*v = Device{}
	have := uint(0)
	for d.next(&n) {
		switch string(d.name()) {
		case "id":
			v.ID = d.uint()
			have |= 1
		case "path":
			v.Path = d.str(old.Path, MaxTextBytes)
		case "uuid":
			v.UUID = d.str(old.UUID, MaxNameBytes)
		case "tier":
			v.Tier = d.str(old.Tier, MaxNameBytes)
		case "coherence":
			v.Coherence = d.str(old.Coherence, MaxNameBytes)
		case "size":
			v.Size = d.uint()
		case "generation":
			v.Generation = d.uint()
		case "node":
			v.Node = d.str(old.Node, MaxNameBytes)
		case "numa":
			v.NUMA = d.uint()
		case "endpoint":
			v.Endpoint = new(Endpoint)
			d.endpoint(v.Endpoint)
		default:
			d.skip()
		}
	}
	d.need(have, "id")
}
