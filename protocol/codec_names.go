package protocol

// nameKey and nameValue read the parts of a name, which alias the input.
func (d *dec) nameKey() []byte   { return d.bytes(MaxNameKeyBytes, CodeKeyTooLong) }
func (d *dec) nameValue() []byte { return d.bytes(MaxNameValueBytes, CodeLimit) }

// Append appends m as the payload of PUT_NAME.
func (m *PutNameRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.mutation(&m.Mutation)
	e.key("key", m.Key)
	e.optKey("value", m.Value)
	e.optBool("check", m.Check)
	e.optUint("revision", m.Revision)
	e.optBool("lease", m.Lease)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds; key and value alias b. Its error is a *DecodeError.
func (m *PutNameRequest) Decode(b []byte) error {
	*m = PutNameRequest{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "key":
			m.Key = d.nameKey()
			have |= 1
		case "value":
			m.Value = d.nameValue()
		case "check":
			m.Check = d.bool()
		case "revision":
			m.Revision = d.uint()
		case "lease":
			m.Lease = d.bool()
		default:
			d.mutation(name, &m.Mutation)
		}
	}
	d.need(have, "key")
	return d.end()
}

// Append appends m as the payload of DELETE_NAME.
func (m *DeleteNameRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.mutation(&m.Mutation)
	e.key("key", m.Key)
	e.optBool("check", m.Check)
	e.optUint("revision", m.Revision)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds; the key aliases b. Its error is a *DecodeError.
func (m *DeleteNameRequest) Decode(b []byte) error {
	*m = DeleteNameRequest{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "key":
			m.Key = d.nameKey()
			have |= 1
		case "check":
			m.Check = d.bool()
		case "revision":
			m.Revision = d.uint()
		default:
			d.mutation(name, &m.Mutation)
		}
	}
	d.need(have, "key")
	return d.end()
}

// Append appends m as the payload of the reply to PUT_NAME or DELETE_NAME.
func (m *NameReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.bool("success", m.Success)
	e.optUint("created", m.Created)
	e.optUint("modified", m.Modified)
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *NameReply) Decode(b []byte) error {
	*m = NameReply{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "success":
			m.Success = d.bool()
			have |= 1
		case "created":
			m.Created = d.uint()
		case "modified":
			m.Modified = d.uint()
		default:
			d.fault(name, &m.Error)
		}
	}
	return d.endReply(&m.Error, have, "success")
}

// Append appends m as the payload of LIST_NAMES.
func (m *ListNamesRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.optKey("key", m.Key)
	e.optKey("prefix", m.Prefix)
	e.optKey("after", m.After)
	e.optUint("limit", m.Limit)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds; keys alias b. Its error is a *DecodeError.
func (m *ListNamesRequest) Decode(b []byte) error {
	*m = ListNamesRequest{}
	d := dec{b: b}
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "key":
			m.Key = d.nameKey()
		case "prefix":
			m.Prefix = d.nameKey()
		case "after":
			m.After = d.nameKey()
		case "limit":
			m.Limit = d.uint()
		default:
			d.skip()
		}
	}
	return d.end()
}

func (e *enc) names(field string, list []NameInfo) {
	e.array(field, len(list))
	for i := range list {
		v := &list[i]
		s := e.open()
		e.key("key", v.Key)
		e.optKey("value", v.Value)
		e.uint("created", v.Created)
		e.uint("modified", v.Modified)
		e.optUint("session", v.Session)
		e.optBool("deleted", v.Deleted)
		e.close(s)
	}
}

func (d *dec) names(field string, s []NameInfo) []NameInfo {
	for v := range elements(d, &s, MaxNames, field) {
		d.nameInfo(v)
	}
	return s
}

func (d *dec) nameInfo(v *NameInfo) {
	*v = NameInfo{}
	have := uint(0)
	for n := d.element(); d.next(&n); {
		switch string(d.name()) {
		case "key":
			v.Key = d.nameKey()
			have |= 1
		case "value":
			v.Value = d.nameValue()
		case "created":
			v.Created = d.uint()
			have |= 2
		case "modified":
			v.Modified = d.uint()
			have |= 4
		case "session":
			v.Session = d.uint()
		case "deleted":
			v.Deleted = d.bool()
		default:
			d.skip()
		}
	}
	d.need(have, "key", "created", "modified")
}

// Append appends m as the payload of LIST_NAMES' reply.
func (m *ListNamesReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.names("names", m.Names)
	e.optUint("revision", m.Revision)
	e.optBool("more", m.More)
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds; keys and values alias b. Its error is a *DecodeError.
func (m *ListNamesReply) Decode(b []byte) error {
	*m = ListNamesReply{Names: m.Names[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "names":
			m.Names = d.names("names", m.Names)
			have |= 1
		case "revision":
			m.Revision = d.uint()
		case "more":
			m.More = d.bool()
		default:
			d.fault(name, &m.Error)
		}
	}
	return d.endReply(&m.Error, have, "names")
}

// Append appends m as the payload of WATCH_NAMES.
func (m *WatchNamesRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.optKey("prefix", m.Prefix)
	e.uint("after", m.After)
	e.optUint("timeout_ms", m.TimeoutMS)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds; the prefix aliases b. Its error is a *DecodeError.
func (m *WatchNamesRequest) Decode(b []byte) error {
	*m = WatchNamesRequest{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "prefix":
			m.Prefix = d.nameKey()
		case "after":
			m.After = d.uint()
			have |= 1
		case "timeout_ms":
			m.TimeoutMS = d.uint()
		default:
			d.skip()
		}
	}
	d.need(have, "after")
	return d.end()
}

// Append appends m as the payload of WATCH_NAMES' reply.
func (m *WatchNamesReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.names("changes", m.Changes)
	e.optUint("revision", m.Revision)
	e.optBool("compacted", m.Compacted)
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds; keys and values alias b. Its error is a *DecodeError.
func (m *WatchNamesReply) Decode(b []byte) error {
	*m = WatchNamesReply{Changes: m.Changes[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "changes":
			m.Changes = d.names("changes", m.Changes)
			have |= 1
		case "revision":
			m.Revision = d.uint()
		case "compacted":
			m.Compacted = d.bool()
		default:
			d.fault(name, &m.Error)
		}
	}
	return d.endReply(&m.Error, have, "changes")
}
