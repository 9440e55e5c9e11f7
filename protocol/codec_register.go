package protocol

// AppendAs appends m as the payload of REGISTER_KV, of Entries' first element alone, or of BATCH_REGISTER_KV, as t
// says.
func (m *RegisterRequest) AppendAs(b []byte, t Type) []byte {
	e := enc{b: b}
	s := e.open()
	if t.Batch() {
		e.mutation(&m.Mutation)
		if m.Context != nil {
			e.context(m.Context)
		}
		e.array("entries", len(m.Entries))
		for i := range m.Entries {
			row := e.open()
			e.registerEntry(&m.Entries[i])
			e.close(row)
		}
	} else {
		if len(m.Entries) > 0 {
			e.registerEntry(&m.Entries[0])
		}
		e.mutation(&m.Mutation)
		if m.Context != nil {
			e.context(m.Context)
		}
	}
	e.close(s)
	return e.b
}

func (e *enc) registerEntry(v *RegisterEntry) {
	e.key("key", v.Key)
	if v.Touch {
		e.optUint("region_id", v.RegionID)
		e.optUint("kv_offset", v.KVOffset)
		e.optUint("kv_length", v.KVLength)
		e.bool("touch", true)
	} else {
		e.uint("region_id", v.RegionID)
		e.uint("kv_offset", v.KVOffset)
		e.uint("kv_length", v.KVLength)
	}
	e.optUint("epoch", v.Epoch)
	e.optUint("checksum", v.Checksum)
	e.optUint("ttl_ms", v.TTLMS)
	if v.HasPrefix {
		e.uint("hash", v.Hash)
		e.optUint("parent", v.Parent)
		e.optUint("index", v.Index)
	}
	e.optUint("group", v.Group)
	if v.Copy {
		e.bool("copy", true)
		e.optUint("of", v.Of)
		e.optUint("slot", v.Slot)
		e.optUint("move_from", v.MoveFrom)
	}
	e.optUint("replicas", v.Replicas)
}

// DecodeAs replaces m by what b, the payload of a message of type t, holds; keys alias b, and what m.Context pointed
// to is overwritten. Its error is a *DecodeError.
func (m *RegisterRequest) DecodeAs(b []byte, t Type) error {
	context, entries := m.Context, m.Entries[:0]
	*m = RegisterRequest{}
	single, have := !t.Batch(), uint(0)
	if single {
		entries = append(entries, RegisterEntry{})
	}
	d := dec{b: b}
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "seq", "acked":
			d.mutation(name, &m.Mutation)
		case "context":
			if context == nil {
				context = new(Context)
			}
			m.Context = context
			d.context(context)
		case "entries":
			if single {
				d.skip()
				continue
			}
			entries = d.registerEntries(entries)
			have |= 1
		default:
			if single {
				have |= d.registerField(name, &entries[0])
			} else {
				d.skip()
			}
		}
	}
	m.Entries = entries
	if single {
		d.needEntry(have, &entries[0])
	} else {
		d.need(have, "entries")
	}
	return d.end()
}

func (d *dec) registerEntries(s []RegisterEntry) []RegisterEntry {
	s = s[:0]
	for n := d.arrayHead(MaxBatch); d.next(&n); {
		s = append(s, RegisterEntry{})
		v := &s[len(s)-1]
		have, fields := d.quickEntry(v, d.element())
		for d.next(&fields) {
			have |= d.registerField(d.name(), v)
		}
		d.needEntry(have, v)
		d.inside("entries", len(s)-1)
	}
	return s
}

const (
	haveKey = 1 << iota
	haveRegion
	haveEntryOffset
	haveEntryLength
	haveEntry = haveKey | haveRegion | haveEntryOffset | haveEntryLength
)

func (d *dec) needEntry(have uint, v *RegisterEntry) {
	if v.Touch {
		have |= haveRegion | haveEntryOffset | haveEntryLength
	}
	d.need(have, "key", "region_id", "kv_offset", "kv_length")
}

// registerField reads a field of a RegisterEntry, or skips another one, and returns its bit if it is required.
func (d *dec) registerField(name []byte, v *RegisterEntry) uint {
	switch string(name) {
	case "key":
		v.Key = d.key()
		return haveKey
	case "region_id":
		v.RegionID = d.uint()
		return haveRegion
	case "kv_offset":
		v.KVOffset = d.uint()
		return haveEntryOffset
	case "kv_length":
		v.KVLength = d.uint()
		return haveEntryLength
	case "epoch":
		v.Epoch = d.uint()
	case "checksum":
		v.Checksum = d.uint()
	case "ttl_ms":
		v.TTLMS = d.uint()
	case "hash":
		v.Hash, v.HasPrefix = d.uint(), true
	case "parent":
		v.Parent = d.uint()
	case "index":
		v.Index = d.uint()
	case "group":
		v.Group = d.uint()
	case "touch":
		v.Touch = d.bool()
	case "copy":
		v.Copy = d.bool()
	case "of":
		v.Of = d.uint()
	case "slot":
		v.Slot = d.uint()
	case "move_from":
		v.MoveFrom = d.uint()
	case "replicas":
		v.Replicas = d.uint()
	default:
		d.skip()
	}
	return 0
}

// told reports whether r says more than that it is not new: only native sessions are told more.
func (r *RegisterResult) told() bool {
	return !r.IsNew && (r.Code != CodeOK || r.Existing.Length > 0 || len(r.ExistingKey) > 0)
}

// AppendAs appends m as the payload of the reply to REGISTER_KV, which has Results' first element, or to
// BATCH_REGISTER_KV, as t, the request's type, says. An Existing whose region has no Length is left out.
func (m *RegisterReply) AppendAs(b []byte, t Type) []byte {
	e := enc{b: b}
	s := e.open()
	e.bool("success", m.Success)
	if t.Batch() {
		e.registerResults(m.Results)
	} else if len(m.Results) > 0 {
		r := &m.Results[0]
		e.bool("is_new", r.IsNew)
		if r.told() {
			e.optUint("entry_code", uint64(r.Code))
			e.optKey("existing_key", r.ExistingKey)
			e.existing(&r.Existing)
		}
	}
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

func (e *enc) registerResults(results []RegisterResult) {
	e.array("results", len(results))
	told := 0
	for i := range results {
		e.b = appendBool(e.b, results[i].IsNew)
		if results[i].told() {
			told++
		}
	}
	if told == 0 {
		return
	}
	e.array("existing", told)
	for i := range results {
		r := &results[i]
		if !r.told() {
			continue
		}
		s := e.open()
		e.uint("index", uint64(i))
		e.optUint("code", uint64(r.Code))
		e.optKey("key", r.ExistingKey)
		e.existing(&r.Existing)
		e.close(s)
	}
}

func (e *enc) existing(l *Location) {
	if l.Length > 0 {
		e.location(l)
	}
}

// DecodeAs replaces m by what b, the payload of the reply to a request of type t, holds; keys alias b. Its error is
// a *DecodeError.
func (m *RegisterReply) DecodeAs(b []byte, t Type) error {
	*m = RegisterReply{Results: m.Results[:0]}
	d := dec{b: b}
	if t.Batch() {
		m.decodeBatch(&d)
	} else {
		m.decodeSingle(&d)
	}
	return d.end()
}

func (m *RegisterReply) decodeSingle(d *dec) {
	var r RegisterResult
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "success":
			m.Success = d.bool()
			have |= 1
		case "is_new":
			r.IsNew = d.bool()
			have |= 2
		case "entry_code":
			r.Code = d.code()
		case "existing_key":
			r.ExistingKey = d.key()
		default:
			if !d.locationField(name, &r.Existing) {
				d.fault(name, &m.Error)
			}
		}
	}
	if have&2 != 0 {
		m.Results = append(m.Results, r)
	}
	d.needReply(&m.Error, have, "success", "is_new")
}

func (m *RegisterReply) decodeBatch(d *dec) {
	have := uint(0)
	existing := dec{} // read last, whatever the order of the fields
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "success":
			m.Success = d.bool()
			have |= 1
		case "results":
			m.Results = m.Results[:0]
			for k := d.arrayHead(MaxBatch); d.next(&k); {
				m.Results = append(m.Results, RegisterResult{IsNew: d.bool()})
			}
			have |= 2
		case "existing":
			existing = *d
			d.skip()
		default:
			d.fault(name, &m.Error)
		}
	}
	d.needReply(&m.Error, have, "success", "results")
	if existing.b == nil || d.err != nil {
		return
	}
	i := 0
	for n := existing.arrayHead(MaxBatch); existing.next(&n); i++ {
		m.decodeExisting(&existing)
		existing.inside("existing", i)
	}
	if existing.err != nil {
		d.err = existing.err
	}
}

// decodeExisting reads an element of "existing" into the result that it is of.
func (m *RegisterReply) decodeExisting(d *dec) {
	var r RegisterResult
	index, have := uint64(0), uint(0)
	for n := d.element(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "index":
			index = d.uint()
			have |= 1
		case "code":
			r.Code = d.code()
		case "key":
			r.ExistingKey = d.key()
		default:
			if !d.locationField(name, &r.Existing) {
				d.skip()
			}
		}
	}
	d.need(have, "index")
	if d.err != nil {
		return
	}
	if index >= uint64(len(m.Results)) {
		d.failAt("", "index %d is beyond the %d results", index, len(m.Results))
		return
	}
	r.IsNew = m.Results[index].IsNew
	m.Results[index] = r
}
