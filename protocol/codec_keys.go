package protocol

// AppendAs appends m as the payload of EXISTS, DELETE, PIN or UNPIN, of Keys' first element alone, or of one of
// their batches, as t says.
func (m *KeysRequest) AppendAs(b []byte, t Type) []byte {
	e := enc{b: b}
	s := e.open()
	e.oneOrKeys(m.Keys, t)
	e.mutation(&m.Mutation)
	e.optStr("kind", m.Pin.Kind)
	e.optStr("owner", m.Pin.Owner)
	e.optUint("ttl_ms", m.Pin.TTLMS)
	e.optUint("region_id", m.RegionID)
	e.optUint("kv_offset", m.KVOffset)
	e.close(s)
	return e.b
}

// DecodeAs replaces m by what b, the payload of a message of type t, holds; keys alias b. Its error is a
// *DecodeError.
func (m *KeysRequest) DecodeAs(b []byte, t Type) error {
	pin := m.Pin
	*m = KeysRequest{Keys: m.Keys[:0]}
	single, have := !t.Batch(), uint(0)
	d := dec{b: b}
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "key", "keys":
			have |= d.oneOrKeys(len(name) == len("key"), single, &m.Keys)
		case "kind":
			m.Pin.Kind = d.str(pin.Kind, MaxNameBytes)
		case "owner":
			m.Pin.Owner = d.str(pin.Owner, MaxNameBytes)
		case "ttl_ms":
			m.Pin.TTLMS = d.uint()
		case "region_id":
			m.RegionID = d.uint()
		case "kv_offset":
			m.KVOffset = d.uint()
		default:
			d.mutation(name, &m.Mutation)
		}
	}
	d.needKeys(have, single)
	return d.end()
}

// outcome is the name of the bool that answers a request of type t for one key.
func outcome(t Type) string {
	if t &^= ReplyBit; t == TypeExists || t == TypePin {
		return "exists"
	}
	return "success"
}

// AppendAs appends m as the payload of the reply to a request of type t; for one key, Results has one element.
func (m *KeysReply) AppendAs(b []byte, t Type) []byte {
	e := enc{b: b}
	s := e.open()
	if t.Batch() {
		e.bools("results", m.Results)
	} else {
		e.bool(outcome(t), len(m.Results) > 0 && m.Results[0])
	}
	e.optUint("free_after_ms", m.FreeAfterMS)
	e.optPages("freed", m.Freed)
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

// DecodeAs replaces m by what b, the payload of the reply to a request of type t, holds; keys alias b. Its error is
// a *DecodeError.
func (m *KeysReply) DecodeAs(b []byte, t Type) error {
	*m = KeysReply{Results: m.Results[:0], Freed: m.Freed[:0]}
	want := outcome(t)
	if t.Batch() {
		want = "results"
	}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		name := d.name()
		switch string(name) {
		case want:
			if t.Batch() {
				m.Results = d.bools(m.Results)
			} else {
				m.Results = append(m.Results[:0], d.bool())
			}
			have |= 1
		case "free_after_ms":
			m.FreeAfterMS = d.uint()
		case "freed":
			m.Freed = d.pages("freed", m.Freed)
		default:
			d.fault(name, &m.Error)
		}
	}
	return d.endReply(&m.Error, have, want)
}

// Append appends m as the payload of PREFIX_MATCH.
func (m *PrefixMatchRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.context(&m.Context)
	e.uints("hashes", m.Hashes)
	e.optUint("members", m.Members)
	e.optBool("want_keys", m.WantKeys)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds. Its error is a *DecodeError.
func (m *PrefixMatchRequest) Decode(b []byte) error {
	old := m.Context
	*m = PrefixMatchRequest{Hashes: m.Hashes[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "context":
			m.Context = old
			d.context(&m.Context)
		case "hashes":
			m.Hashes = d.uints(m.Hashes, MaxBatch)
			have |= 1
		case "members":
			m.Members = d.uint()
		case "want_keys":
			m.WantKeys = d.bool()
		default:
			d.skip()
		}
	}
	d.need(have, "hashes")
	return d.end()
}

// Append appends m as the payload of PREFIX_MATCH's reply.
func (m *PrefixMatchReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.uint("matched", m.Matched)
	e.optKeys("keys", m.Keys)
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds; keys alias b. Its error is a *DecodeError.
func (m *PrefixMatchReply) Decode(b []byte) error {
	*m = PrefixMatchReply{Keys: m.Keys[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "matched":
			m.Matched = d.uint()
			have |= 1
		case "keys":
			m.Keys = d.keys(m.Keys)
		default:
			d.fault(name, &m.Error)
		}
	}
	return d.endReply(&m.Error, have, "matched")
}

// Append appends m as the payload of CLEAR.
func (m *ClearRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.mutation(&m.Mutation)
	e.optBool("all", m.All)
	e.optKey("prefix", m.Prefix)
	if m.Context != nil {
		e.context(m.Context)
	}
	e.optStr("tenant", m.Tenant)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds; Prefix aliases b, and what m.Context pointed to is overwritten. Its error is a
// *DecodeError, also if b does not name exactly one scope: no mistake of a client may clear more than it asked for.
func (m *ClearRequest) Decode(b []byte) error {
	context := m.Context
	*m = ClearRequest{}
	d := dec{b: b}
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "all":
			m.All = d.bool()
		case "prefix":
			m.Prefix = d.key()
		case "context":
			if context == nil {
				context = new(Context)
			}
			m.Context = context
			d.context(context)
		case "tenant":
			m.Tenant = d.label()
		default:
			d.mutation(name, &m.Mutation)
		}
	}
	scopes := 0
	for _, set := range [...]bool{m.All, len(m.Prefix) > 0, m.Context != nil, m.Tenant != ""} {
		if set {
			scopes++
		}
	}
	if scopes != 1 {
		d.failAt("", "%d scopes are set: set exactly one of all, prefix, context and tenant", scopes)
	}
	return d.end()
}

// Append appends m as the payload of Cleared.
func (m *ClearedPush) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.uint("index", m.Index)
	e.optBool("all", m.All)
	e.optKey("prefix", m.Prefix)
	if m.Context != nil {
		e.context(m.Context)
	}
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds; Prefix aliases b, and what m.Context pointed to is overwritten. Its error is a
// *DecodeError.
func (m *ClearedPush) Decode(b []byte) error {
	context := m.Context
	*m = ClearedPush{}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "index":
			m.Index = d.uint()
			have |= 1
		case "all":
			m.All = d.bool()
		case "prefix":
			m.Prefix = d.key()
		case "context":
			if context == nil {
				context = new(Context)
			}
			m.Context = context
			d.context(context)
		default:
			d.skip()
		}
	}
	d.need(have, "index")
	return d.end()
}

// Append appends m as the payload of LIST_KEYS.
func (m *ListKeysRequest) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.optKey("prefix", m.Prefix)
	e.optUint("cursor", m.Cursor)
	e.optUint("limit", m.Limit)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds; Prefix aliases b. Its error is a *DecodeError.
func (m *ListKeysRequest) Decode(b []byte) error {
	*m = ListKeysRequest{}
	d := dec{b: b}
	for n := d.top(); d.next(&n); {
		switch string(d.name()) {
		case "prefix":
			m.Prefix = d.key()
		case "cursor":
			m.Cursor = d.uint()
		case "limit":
			m.Limit = d.uint()
			if m.Limit > MaxBatch {
				d.fail(CodeLimit, "%d is over the limit of %d", m.Limit, MaxBatch)
			}
		default:
			d.skip()
		}
	}
	return d.end()
}

// Append appends m as the payload of LIST_KEYS' reply.
func (m *ListKeysReply) Append(b []byte) []byte {
	e := enc{b: b}
	s := e.open()
	e.array("keys", len(m.Keys))
	for i := range m.Keys {
		k := &m.Keys[i]
		row := e.open()
		e.key("key", k.Key)
		e.location(&k.Location)
		e.optUint("pins", k.Pins)
		e.optStr("class", k.Class)
		e.close(row)
	}
	e.optUint("cursor", m.Cursor)
	e.fault(&m.Error)
	e.close(s)
	return e.b
}

// Decode replaces m by what b holds; keys alias b. Its error is a *DecodeError.
func (m *ListKeysReply) Decode(b []byte) error {
	*m = ListKeysReply{Keys: m.Keys[:0]}
	d := dec{b: b}
	have := uint(0)
	for n := d.top(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "keys":
			m.Keys = d.keyInfos(m.Keys)
			have |= 1
		case "cursor":
			m.Cursor = d.uint()
		default:
			d.fault(name, &m.Error)
		}
	}
	return d.endReply(&m.Error, have, "keys")
}

func (d *dec) keyInfos(s []KeyInfo) []KeyInfo {
	for v := range elements(d, &s, MaxBatch, "keys") {
		d.keyInfo(v)
	}
	return s
}

func (d *dec) keyInfo(k *KeyInfo) {
	class := k.Class
	*k = KeyInfo{}
	have := uint(0)
	for n := d.element(); d.next(&n); {
		switch name := d.name(); string(name) {
		case "key":
			k.Key = d.key()
			have |= 1
		case "pins":
			k.Pins = d.uint()
		case "class":
			k.Class = d.str(class, MaxNameBytes)
		default:
			if !d.locationField(name, &k.Location) {
				d.skip()
			}
		}
	}
	d.need(have, "key")
}
