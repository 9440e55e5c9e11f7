package protocol

// Append appends m as the payload of REQUEST_ALLOC.
func (m *AllocRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.str("instance_id", m.InstanceID)
	e.uint("size", m.Size)
	e.mutation(&m.Mutation)
	e.optUint("page_size", m.PageSize)
	e.optUint("need_pages", m.NeedPages)
	e.optUint("run_pages", m.RunPages)
	e.optStr("tier", m.Tier)
	e.optBool("evict", m.Evict)
	e.optBool("whole", m.Whole)
	e.optKeys("keys", m.Keys)
	e.optUint("free_pages", m.FreePages)
	e.optUint("timeout_ms", m.TimeoutMS)
	e.optStrs("near", m.Near)
	e.optStrs("avoid", m.Avoid)
	e.optUint("device", m.Device)
	e.optBool("promote", m.Promote)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds; keys alias b. Its error is a *DecodeError.
func (m *AllocRequest) Decode(b []byte) error {
	instance, tier := m.InstanceID, m.Tier
	*m = AllocRequest{Keys: m.Keys[:0], Near: m.Near[:0], Avoid: m.Avoid[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "instance_id":
			m.InstanceID = d.str(instance, MaxNameBytes)
			have |= 1
		case "size":
			m.Size = d.uint()
			have |= 2
		case "page_size":
			m.PageSize = d.uint()
		case "need_pages":
			m.NeedPages = d.uint()
		case "run_pages":
			m.RunPages = d.uint()
		case "tier":
			m.Tier = d.str(tier, MaxNameBytes)
		case "evict":
			m.Evict = d.bool()
		case "whole":
			m.Whole = d.bool()
		case "keys":
			m.Keys = d.keys(m.Keys)
		case "free_pages":
			m.FreePages = d.uint()
		case "timeout_ms":
			m.TimeoutMS = d.uint()
		default:
			m.decodePlace(&d, name)
		}
	}
	d.need(have, "instance_id", "size")
	return d.end()
}

// decodePlace reads those fields that say where, and those of the mutation.
func (m *AllocRequest) decodePlace(d *dec, name []byte) {
	switch string(name) {
	case "near":
		m.Near = d.strs(m.Near, MaxPlaces, MaxNameBytes)
	case "avoid":
		m.Avoid = d.strs(m.Avoid, MaxPlaces, MaxNameBytes)
	case "device":
		m.Device = d.uint()
	case "promote":
		m.Promote = d.bool()
	default:
		d.mutation(name, &m.Mutation)
	}
}

// Append appends m as the payload of REQUEST_ALLOC's reply. A Region without Length is left out.
func (m *AllocReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.bool("success", m.Success)
	if m.Region.Length > 0 {
		e.region(&m.Region)
	}
	if m.Device != nil {
		e.field("device_info")
		e.device(m.Device)
	}
	e.optPages("evicted", m.Evicted)
	e.optBools("found", m.Found)
	e.optUint("phase", m.Phase)
	e.optUint("occupied", m.Occupied)
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds; keys alias b, and what m.Device pointed to is overwritten. Its error is a
// *DecodeError.
func (m *AllocReply) Decode(b []byte) error {
	device := m.Device
	*m = AllocReply{Evicted: m.Evicted[:0], Found: m.Found[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "success":
			m.Success = d.bool()
			have |= 1
		case "device_info":
			if device == nil {
				device = new(Device)
			}
			m.Device = device
			d.device(device, d.mapHead())
			d.inside("device_info", -1)
		case "evicted":
			m.Evicted = d.pages("evicted", m.Evicted)
		case "found":
			m.Found = d.bools(m.Found)
		case "phase":
			m.Phase = d.uint()
		case "occupied":
			m.Occupied = d.uint()
		default:
			if !d.regionField(name, &m.Region) {
				d.fault(name, &m.Error)
			}
		}
	}
	return d.endReply(&m.Error, have, "success")
}

// Append appends m as the payload of RETURN_ALLOC.
func (m *ReturnAllocRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.str("instance_id", m.InstanceID)
	e.uint("region_id", m.RegionID)
	e.optUint("epoch", m.Epoch)
	e.mutation(&m.Mutation)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *ReturnAllocRequest) Decode(b []byte) error {
	instance := m.InstanceID
	*m = ReturnAllocRequest{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "instance_id":
			m.InstanceID = d.str(instance, MaxNameBytes)
			have |= 1
		case "region_id":
			m.RegionID = d.uint()
			have |= 2
		case "epoch":
			m.Epoch = d.uint()
		default:
			d.mutation(name, &m.Mutation)
		}
	}
	d.need(have, "instance_id", "region_id")
	return d.end()
}

// Append appends m as the payload of LIST_ALLOCATIONS.
func (m *ListAllocationsRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.optStr("exclude_instance_id", m.ExcludeInstanceID)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *ListAllocationsRequest) Decode(b []byte) error {
	*m = ListAllocationsRequest{}
	d := dec{b: b}
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "exclude_instance_id":
			m.ExcludeInstanceID = d.label()
		default:
			d.skip()
		}
	}
	return d.end()
}

// Append appends m as the payload of LIST_ALLOCATIONS' reply.
func (m *ListAllocationsReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.bool("success", m.Success)
	e.array("allocations", len(m.Allocations))
	for i := range m.Allocations {
		r := &m.Allocations[i]
		row := e.open()
		e.handle(&r.Handle)
		e.regionExtras(r)
		e.close(row)
	}
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *ListAllocationsReply) Decode(b []byte) error {
	*m = ListAllocationsReply{Allocations: m.Allocations[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "success":
			m.Success = d.bool()
			have |= 1
		case "allocations":
			m.Allocations = d.allocations(m.Allocations)
			have |= 2
		default:
			d.fault(name, &m.Error)
		}
	}
	return d.endReply(&m.Error, have, "success", "allocations")
}

func (d *dec) allocations(s []Region) []Region {
	for v := range elements(d, &s, MaxList, "allocations") {
		d.allocation(v)
	}
	return s
}

func (d *dec) allocation(r *Region) {
	*r = Region{}
	have := uint(0)
	for n := d.element(); d.next(&n); {
		name := d.name()
		bit := d.handleField(name, &r.Handle)
		if bit == 0 && (string(name) == "handle" || !d.regionField(name, r)) {
			d.skip()
		}
		have |= bit
	}
	d.need(have, "region_id", "offset", "length", "auth_token")
}
