package protocol

// Append appends m as the payload of HANDSHAKE.
func (m *HandshakeRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.optUint("client_version", m.ClientVersion)
	e.optStr("instance_id", m.InstanceID)
	e.optUint("protocol", m.Protocol)
	e.optStr("tenant", m.Tenant)
	e.optUint("ttl_ms", m.TTLMS)
	e.optUint("features", m.Features)
	e.optUint("session", m.Session)
	e.optUint("secret", m.Secret)
	e.optUint("replaces", m.Replaces)
	e.optUint("replaces_secret", m.ReplacesSecret)
	e.optStr("boot_id", m.BootID)
	e.optUint("pid_ns", m.PIDNamespace)
	e.optUint("pid", m.PID)
	e.optUint("pid_start", m.PIDStart)
	e.optBool("devices_only", m.DevicesOnly)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *HandshakeRequest) Decode(b []byte) error {
	*m = HandshakeRequest{}
	d := dec{b: b}
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "client_version":
			m.ClientVersion = d.uint()
		case "instance_id":
			m.InstanceID = d.label()
		case "protocol":
			m.Protocol = d.uint()
		case "tenant":
			m.Tenant = d.label()
		case "ttl_ms":
			m.TTLMS = d.uint()
		case "features":
			m.Features = d.uint()
		case "session":
			m.Session = d.uint()
		case "secret":
			m.Secret = d.uint()
		case "replaces":
			m.Replaces = d.uint()
		case "replaces_secret":
			m.ReplacesSecret = d.uint()
		case "boot_id":
			m.BootID = d.label()
		case "pid_ns":
			m.PIDNamespace = d.uint()
		case "pid":
			m.PID = d.uint()
		case "pid_start":
			m.PIDStart = d.uint()
		case "devices_only":
			m.DevicesOnly = d.bool()
		default:
			d.skip()
		}
	}
	return d.end()
}

// Append appends m as the payload of HANDSHAKE's reply.
func (m *HandshakeReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.bool("success", m.Success)
	e.optStr("rm_address", m.RMAddress)
	e.fault(&m.Error)
	e.optStr("server_version", m.ServerVersion)
	e.optUint("protocol", m.Protocol)
	e.optUint("features", m.Features)
	e.optUint("session", m.Session)
	e.optUint("secret", m.Secret)
	e.optBool("resumed", m.Resumed)
	e.optUint("ttl_ms", m.TTLMS)
	e.optUint("default_lease_ms", m.DefaultLeaseMS)
	e.optUint("max_lease_ms", m.MaxLeaseMS)
	e.optUint("quarantine_ms", m.QuarantineMS)
	e.optStr("pool", m.Pool)
	e.optUint("incarnation", m.Incarnation)
	e.optUint("leader_id", m.Leader)
	e.optMembers(m.Members)
	e.optDevices(m.Devices)
	e.optOwned(m.Regions)
	e.close(s)
	return e.b
}

func (e *enc) optMembers(members []Member) {
	if len(members) == 0 {
		return
	}
	e.array("members", len(members))
	for i := range members {
		v := &members[i]
		s := e.open()
		e.uint("id", v.ID)
		e.optStr("addr", v.Addr)
		e.optStr("socket", v.Socket)
		e.optStr("admin", v.Admin)
		e.optBool("learner", v.Learner)
		e.close(s)
	}
}

func (e *enc) optDevices(devices []Device) {
	if len(devices) == 0 {
		return
	}
	e.array("devices", len(devices))
	for i := range devices {
		e.device(&devices[i])
	}
}

func (e *enc) optOwned(regions []OwnedRegion) {
	if len(regions) == 0 {
		return
	}
	e.array("regions", len(regions))
	for i := range regions {
		v := &regions[i]
		s := e.open()
		e.region(&v.Region)
		e.optBool("revoking", v.Revoking)
		e.optUints("occupied", v.Occupied)
		e.close(s)
	}
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *HandshakeReply) Decode(b []byte) error {
	*m = HandshakeReply{Members: m.Members[:0], Devices: m.Devices[:0], Regions: m.Regions[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "success":
			m.Success = d.bool()
			have |= 1
		case "rm_address":
			m.RMAddress = d.text()
		case "server_version":
			m.ServerVersion = d.label()
		case "pool":
			m.Pool = d.label()
		case "resumed":
			m.Resumed = d.bool()
		case "members":
			m.Members = d.members(m.Members)
		case "devices":
			m.Devices = d.devices(m.Devices)
		case "regions":
			m.Regions = d.owned(m.Regions)
		default:
			m.decodeNumber(&d, name)
		}
	}
	return d.endReply(&m.Error, have, "success")
}

// decodeNumber reads those fields that are plain numbers, and those of the error.
func (m *HandshakeReply) decodeNumber(d *dec, name []byte) {
	switch string(name) {
	case "protocol":
		m.Protocol = d.uint()
	case "features":
		m.Features = d.uint()
	case "session":
		m.Session = d.uint()
	case "secret":
		m.Secret = d.uint()
	case "ttl_ms":
		m.TTLMS = d.uint()
	case "default_lease_ms":
		m.DefaultLeaseMS = d.uint()
	case "max_lease_ms":
		m.MaxLeaseMS = d.uint()
	case "quarantine_ms":
		m.QuarantineMS = d.uint()
	case "incarnation":
		m.Incarnation = d.uint()
	case "leader_id":
		m.Leader = d.uint()
	default:
		d.fault(name, &m.Error)
	}
}

func (d *dec) members(s []Member) []Member {
	for v := range elements(d, &s, MaxBatch, "members") {
		d.member(v)
	}
	return s
}

func (d *dec) member(v *Member) {
	*v = Member{}
	have := uint(0)
	for n := d.element(); d.next(&n); {
		switch string(d.name()) {
		case "id":
			v.ID = d.uint()
			have |= 1
		case "addr":
			v.Addr = d.text()
		case "socket":
			v.Socket = d.text()
		case "admin":
			v.Admin = d.text()
		case "learner":
			v.Learner = d.bool()
		default:
			d.skip()
		}
	}
	d.need(have, "id")
}

func (d *dec) devices(s []Device) []Device {
	for v := range elements(d, &s, MaxBatch, "devices") {
		d.device(v, d.element())
	}
	return s
}

func (d *dec) owned(s []OwnedRegion) []OwnedRegion {
	for v := range elements(d, &s, MaxList, "regions") {
		d.ownedRegion(v)
	}
	return s
}

func (d *dec) ownedRegion(v *OwnedRegion) {
	*v = OwnedRegion{Occupied: v.Occupied[:0]}
	have := uint(0)
	for n := d.element(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "handle":
			d.handle(&v.Handle)
			have |= 1
		case "revoking":
			v.Revoking = d.bool()
		case "occupied":
			v.Occupied = d.uints(v.Occupied, MaxList)
		default:
			if !d.regionField(name, &v.Region) {
				d.skip()
			}
		}
	}
	d.need(have, "handle")
}

// Append appends m as the payload of GOODBYE.
func (m *GoodbyeRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.mutation(&m.Mutation)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *GoodbyeRequest) Decode(b []byte) error {
	*m = GoodbyeRequest{}
	d := dec{b: b}
	for n := d.top(); d.next(&n); {
		d.mutation(d.name(), &m.Mutation)
	}
	return d.end()
}

// Append appends m as the payload of Revoke.
func (m *RevokePush) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.uint("region_id", m.RegionID)
	e.uint("epoch", m.Epoch)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *RevokePush) Decode(b []byte) error {
	*m = RevokePush{}
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

// Append appends m as the payload of RevokeDone.
func (m *RevokeDoneRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.mutation(&m.Mutation)
	e.uint("region_id", m.RegionID)
	e.uint("epoch", m.Epoch)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *RevokeDoneRequest) Decode(b []byte) error {
	*m = RevokeDoneRequest{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "region_id":
			m.RegionID = d.uint()
			have |= 1
		case "epoch":
			m.Epoch = d.uint()
			have |= 2
		default:
			d.mutation(name, &m.Mutation)
		}
	}
	d.need(have, "region_id", "epoch")
	return d.end()
}

// Append appends m as the payload of Freed.
func (m *FreedPush) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.uint("id", m.ID)
	e.optPages("pages", m.Pages)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds; keys alias b. Its error is a *DecodeError.
func (m *FreedPush) Decode(b []byte) error {
	*m = FreedPush{Pages: m.Pages[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "id":
			m.ID = d.uint()
			have |= 1
		case "pages":
			m.Pages = d.pages("pages", m.Pages)
		default:
			d.skip()
		}
	}
	d.need(have, "id")
	return d.end()
}

// Append appends m as the payload of FreedAck.
func (m *FreedAckRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.uint("id", m.ID)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *FreedAckRequest) Decode(b []byte) error {
	*m = FreedAckRequest{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "id":
			m.ID = d.uint()
			have |= 1
		default:
			d.skip()
		}
	}
	d.need(have, "id")
	return d.end()
}

// Append appends m as the payload of CANCEL.
func (m *CancelRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.mutation(&m.Mutation)
	e.uints("seqs", m.Seqs)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *CancelRequest) Decode(b []byte) error {
	*m = CancelRequest{Seqs: m.Seqs[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "seqs":
			m.Seqs = d.uints(m.Seqs, MaxBatch)
			have |= 1
		default:
			d.mutation(name, &m.Mutation)
		}
	}
	d.need(have, "seqs")
	return d.end()
}

// Append appends m as the payload of CANCEL's reply.
func (m *CancelReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.bool("success", m.Success)
	e.optBools("applied", m.Applied)
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *CancelReply) Decode(b []byte) error {
	*m = CancelReply{Applied: m.Applied[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "success":
			m.Success = d.bool()
			have |= 1
		case "applied":
			m.Applied = d.bools(m.Applied)
		default:
			d.fault(name, &m.Error)
		}
	}
	return d.endReply(&m.Error, have, "success")
}

// Append appends m as the payload of RENEW or RELEASE.
func (m *LeasesRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.uints("leases", m.Leases)
	e.optUint("lease_ms", m.LeaseMS)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *LeasesRequest) Decode(b []byte) error {
	*m = LeasesRequest{Leases: m.Leases[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "leases":
			m.Leases = d.uints(m.Leases, MaxBatch)
			have |= 1
		case "lease_ms":
			m.LeaseMS = d.uint()
		default:
			d.skip()
		}
	}
	d.need(have, "leases")
	return d.end()
}

// Append appends m as the payload of the reply to RENEW or RELEASE.
func (m *LeasesReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.bool("success", m.Success)
	e.optBools("results", m.Results)
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *LeasesReply) Decode(b []byte) error {
	*m = LeasesReply{Results: m.Results[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "success":
			m.Success = d.bool()
			have |= 1
		case "results":
			m.Results = d.bools(m.Results)
		default:
			d.fault(name, &m.Error)
		}
	}
	return d.endReply(&m.Error, have, "success")
}

// Append appends m as the payload of a reply.
func (m *SuccessReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.bool("success", m.Success)
	e.optUint("free_after_ms", m.FreeAfterMS)
	e.optUint("count", m.Count)
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *SuccessReply) Decode(b []byte) error {
	*m = SuccessReply{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "success":
			m.Success = d.bool()
			have |= 1
		case "free_after_ms":
			m.FreeAfterMS = d.uint()
		case "count":
			m.Count = d.uint()
		default:
			d.fault(name, &m.Error)
		}
	}
	return d.endReply(&m.Error, have, "success")
}

// AppendErrorReply appends the payload of a reply that says nothing but e. It fits every request: no field of a
// reply is required beside an error.
func AppendErrorReply(b []byte, f *Error) []byte {
	e := enc{b: b}
	s := e.open()
	e.fault(f)
	e.close(s)
	return e.b
}

// AppendEmpty appends the payload of a message without fields: HEARTBEAT, its reply, GET_STATS, GET_USAGE.
func AppendEmpty(b []byte) []byte { return append(b, 0x80) }
