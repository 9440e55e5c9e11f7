package protocol

func (e *enc) endpoint(v *Endpoint) {
	e.field("endpoint")
	s := e.open()
	e.optStr("engine", v.Engine)
	e.optStr("host", v.Host)
	e.optStrs("rails", v.Rails)
	e.optStrs("nics", v.NICs)
	e.optUint("buffer", v.Buffer)
	e.optUint("buffer_generation", v.BufferGeneration)
	e.optUint("offset", v.Offset)
	e.optBool("storage", v.Storage)
	e.close(s)
}

// optEndpoint appends v if it says anything.
func (e *enc) optEndpoint(v *Endpoint) {
	if v.Engine != "" || v.Host != "" || len(v.Rails) > 0 || len(v.NICs) > 0 || v.Buffer != 0 || v.BufferGeneration != 0 ||
		v.Offset != 0 || v.Storage {
		e.endpoint(v)
	}
}

// endpoint reads an Endpoint, whose strings are made anew, for the caller to keep.
func (d *dec) endpoint(v *Endpoint) {
	*v = Endpoint{}
	for n := d.mapHead(); d.next(&n); {
		switch string(d.name()) {
		case "engine":
			v.Engine = d.label()
		case "host":
			v.Host = d.label()
		case "rails":
			v.Rails = d.strs(nil, MaxPlaces, MaxTextBytes)
		case "nics":
			v.NICs = d.strs(nil, MaxNICs, MaxTextBytes)
		case "buffer":
			v.Buffer = d.uint()
		case "buffer_generation":
			v.BufferGeneration = d.uint()
		case "offset":
			v.Offset = d.uint()
		case "storage":
			v.Storage = d.bool()
		default:
			d.skip()
		}
	}
	d.inside("endpoint", -1)
}

// Append appends m as the payload of ATTACH.
func (m *AttachRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.mutation(&m.Mutation)
	e.str("uuid", m.UUID)
	e.optStr("path", m.Path)
	e.optStr("node", m.Node)
	e.optUint("numa", m.NUMA)
	e.optStr("tier", m.Tier)
	e.optStr("coherence", m.Coherence)
	e.optUint("size", m.Size)
	e.optUint("data_offset", m.DataOffset)
	e.optUint("align", m.Align)
	e.optBool("volatile", m.Volatile)
	e.optStr("boot_id", m.BootID)
	e.optUint("generation", m.Generation)
	e.optBool("ready", m.Ready)
	e.optBool("expose", m.Expose)
	e.optEndpoint(&m.Endpoint)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *AttachRequest) Decode(b []byte) error {
	*m = AttachRequest{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "uuid":
			m.UUID = d.label()
			have |= 1
		case "path":
			m.Path = d.text()
		case "node":
			m.Node = d.label()
		case "tier":
			m.Tier = d.label()
		case "coherence":
			m.Coherence = d.label()
		case "volatile":
			m.Volatile = d.bool()
		case "boot_id":
			m.BootID = d.label()
		case "ready":
			m.Ready = d.bool()
		case "expose":
			m.Expose = d.bool()
		case "endpoint":
			d.endpoint(&m.Endpoint)
		default:
			m.decodeNumber(&d, name)
		}
	}
	d.need(have, "uuid")
	return d.end()
}

// decodeNumber reads those fields that are plain numbers, and those of the mutation.
func (m *AttachRequest) decodeNumber(d *dec, name []byte) {
	switch string(name) {
	case "numa":
		m.NUMA = d.uint()
	case "size":
		m.Size = d.uint()
	case "data_offset":
		m.DataOffset = d.uint()
	case "align":
		m.Align = d.uint()
	case "generation":
		m.Generation = d.uint()
	default:
		d.mutation(name, &m.Mutation)
	}
}

// Append appends m as the payload of ATTACH's reply.
func (m *AttachReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.uint("device", m.Device)
	e.optUint("generation", m.Generation)
	e.optBool("fresh", m.Fresh)
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *AttachReply) Decode(b []byte) error {
	*m = AttachReply{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "device":
			m.Device = d.uint()
			have |= 1
		case "generation":
			m.Generation = d.uint()
		case "fresh":
			m.Fresh = d.bool()
		default:
			d.fault(name, &m.Error)
		}
	}
	return d.endReply(&m.Error, have, "device")
}

// Append appends m as the payload of ACCESS.
func (m *AccessRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.uint("region_id", m.RegionID)
	e.uint("epoch", m.Epoch)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *AccessRequest) Decode(b []byte) error {
	*m = AccessRequest{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "region_id":
			m.RegionID = d.uint()
			have |= 1
		case "epoch":
			m.Epoch = d.uint()
			have |= 2
		default:
			d.skip()
		}
	}
	d.need(have, "region_id", "epoch")
	return d.end()
}

// Append appends m as the payload of ACCESS' reply.
func (m *AccessReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.endpoint(&m.Endpoint)
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *AccessReply) Decode(b []byte) error {
	*m = AccessReply{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "endpoint":
			d.endpoint(&m.Endpoint)
			have |= 1
		default:
			d.fault(name, &m.Error)
		}
	}
	return d.endReply(&m.Error, have, "endpoint")
}

// Append appends m as the payload of Grant.
func (m *GrantPush) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.uint("id", m.ID)
	e.uint("region_id", m.RegionID)
	e.uint("epoch", m.Epoch)
	e.uint("device", m.Device)
	e.uint("offset", m.Offset)
	e.uint("length", m.Length)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *GrantPush) Decode(b []byte) error {
	*m = GrantPush{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "id":
			m.ID = d.uint()
			have |= 1
		case "region_id":
			m.RegionID = d.uint()
			have |= 2
		case "epoch":
			m.Epoch = d.uint()
			have |= 4
		case "device":
			m.Device = d.uint()
			have |= 8
		case "offset":
			m.Offset = d.uint()
			have |= 16
		case "length":
			m.Length = d.uint()
			have |= 32
		default:
			d.skip()
		}
	}
	d.need(have, "id", "region_id", "epoch", "device", "offset", "length")
	return d.end()
}

// Append appends m as the payload of GRANTED.
func (m *GrantedRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.uint("id", m.ID)
	e.optEndpoint(&m.Endpoint)
	e.optStr("fault", errorText(m.Fault))
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *GrantedRequest) Decode(b []byte) error {
	*m = GrantedRequest{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "id":
			m.ID = d.uint()
			have |= 1
		case "endpoint":
			d.endpoint(&m.Endpoint)
		case "fault":
			m.Fault = d.text()
		default:
			d.skip()
		}
	}
	d.need(have, "id")
	return d.end()
}

// Append appends m as the payload of Fence.
func (m *FencePush) Append(b []byte) []byte { return appendFence(b, m.RegionID, m.Epoch, m.Device) }

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *FencePush) Decode(b []byte) error {
	*m = FencePush{}
	return decodeFence(b, &m.RegionID, &m.Epoch, &m.Device)
}

// Append appends m as the payload of FENCED.
func (m *FencedRequest) Append(b []byte) []byte { return appendFence(b, m.RegionID, m.Epoch, m.Device) }

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *FencedRequest) Decode(b []byte) error {
	*m = FencedRequest{}
	return decodeFence(b, &m.RegionID, &m.Epoch, &m.Device)
}

func appendFence(b []byte, region, epoch, device uint64) []byte {
	e := enc{b: b}
	s := e.open()
	e.uint("region_id", region)
	e.uint("epoch", epoch)
	e.uint("device", device)
	e.close(s)
	return e.b
}

func decodeFence(b []byte, region, epoch, device *uint64) error {
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "region_id":
			*region = d.uint()
			have |= 1
		case "epoch":
			*epoch = d.uint()
			have |= 2
		case "device":
			*device = d.uint()
			have |= 4
		default:
			d.skip()
		}
	}
	d.need(have, "region_id", "epoch", "device")
	return d.end()
}
