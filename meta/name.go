package meta

import (
	"cmp"
	"encoding/binary"
	"slices"
	"strings"

	"larder/protocol"
)

// Limits of names. What processes tell each other of themselves is small: a pool that needs more of them is used as a
// database, which it is not.
const (
	// MaxNames and MaxNamesBytes bound the names of a pool, and the bytes of their keys and values.
	MaxNames      = 65536
	MaxNamesBytes = 64 << 20
	// MaxTenantNames and MaxTenantNamesBytes bound those of one tenant, so that there is room for others'.
	MaxTenantNames      = MaxNames / 2
	MaxTenantNamesBytes = MaxNamesBytes / 2
	// MaxSessionNames bounds those that a session holds, since they go in one command when it ends.
	MaxSessionNames = 4096
	// maxNameEvents and maxNameEventBytes bound the changes that are remembered for watchers: a few seconds of a pool whose
	// processes all start at once.
	maxNameEvents     = 8192
	maxNameEventBytes = 16 << 20
)

// PutName sets a name of the session's tenant. With Check its revision must be Revision, 0 for a name that must not be there.
// With Lease it ends with the session, without it belongs to nobody, whoever held it before.
type PutName struct {
	Key, Value []byte
	Check      bool
	Revision   uint64
	Lease      bool
}

// DeleteName removes a name; see PutName for Check.
type DeleteName struct {
	Key      []byte
	Check    bool
	Revision uint64
}

// NameResult is the result of PutName and DeleteName. Code is CodeConflict if the revision was another, and CodeNotFound if
// there was nothing to delete: the revisions are then those of the name as it is, 0 if there is none.
type NameResult struct {
	Code     protocol.Code
	Created  uint64 // the revision that made the name
	Modified uint64 // the one that changed it last
}

// NameInfo describes a name. Key and Value are the machine's, and never change.
type NameInfo struct {
	Key      string
	Value    []byte
	Created  uint64
	Modified uint64
	Session  SessionID // that it ends with; 0 = none
}

// NameEvent is a change of a name. Of one that is deleted Modified is the revision that did it, and there is no Value.
type NameEvent struct {
	NameInfo
	Deleted bool
	tenant  *tenant
}

// nameRecord is one name.
type nameRecord struct {
	object
	tenant   *tenant
	key      string
	value    []byte // replaced as a whole: events and readers share it
	created  uint64
	modified uint64
	owner    *session // nil = nobody's
}

func (n *nameRecord) info() NameInfo {
	return NameInfo{n.key, n.value, n.created, n.modified, n.owner.sid()}
}

func (n *nameRecord) bytes() int { return len(n.key) + len(n.value) }

// nameTable is what there is one of for all names. It has a record from the first name on.
type nameTable struct {
	object
	revision uint64 // of the last change
	count    int
	bytes    int

	// Not in the record. What is remembered differs from member to member, which nothing depends on.
	events     []NameEvent
	eventBytes int
	from       uint64 // all changes after this revision are in events
}

// tell remembers a change for watchers, and forgets the oldest.
func (x *nameTable) tell(e NameEvent) {
	x.events = append(x.events, e)
	x.eventBytes += len(e.Key) + len(e.Value)
	for len(x.events) > maxNameEvents || x.eventBytes > maxNameEventBytes {
		old := &x.events[0]
		x.eventBytes -= len(old.Key) + len(old.Value)
		x.from = old.Modified
		*old = NameEvent{}
		x.events = x.events[1:]
	}
}

// forget has watchers begin anew.
func (x *nameTable) forget() { x.events, x.eventBytes, x.from = nil, 0, x.revision }

// findName returns where a tenant's name is or would be.
func (t *tenant) findName(key string) (int, bool) {
	return slices.BinarySearchFunc(t.names, key, func(n *nameRecord, key string) int { return strings.Compare(n.key, key) })
}

func (t *tenant) nameOf(key []byte) *nameRecord {
	if i, ok := t.findName(string(key)); ok {
		return t.names[i]
	}
	return nil
}

// addName enters a name that is not there yet.
func (m *Machine) addName(n *nameRecord) bool {
	t := n.tenant
	i, taken := t.findName(n.key)
	if taken {
		return false
	}
	t.names = slices.Insert(t.names, i, n)
	m.countName(n, 1)
	return true
}

// countName keeps the sums when a name comes (1) or goes (-1).
func (m *Machine) countName(n *nameRecord, by int) {
	m.names.count += by
	m.names.bytes += by * n.bytes()
	n.tenant.nameBytes += by * n.bytes()
	if n.owner != nil {
		n.owner.names += by
	}
}

// nextRevision is that of the change that is being made. Those of the first name begin, as all ids do, where no incarnation
// before can have come: there may have been names in a history that was cut off.
func (m *Machine) nextRevision() uint64 {
	if m.names.revision == 0 {
		m.names.revision = m.head.epochs >> idBits << idBits
	}
	m.names.revision++
	m.changed(&m.names)
	return m.names.revision
}

func (m *Machine) applyPutName(s *session, c *PutName, out *Results) {
	t := m.tenantFor(s)
	n := t.nameOf(c.Key)
	switch {
	case m.settings.Version < VersionTiers:
		out.fail(protocol.CodeUnsupported)
	case len(c.Key) == 0 || len(c.Key) > protocol.MaxNameKeyBytes || len(c.Value) > protocol.MaxNameValueBytes || c.Lease && s == nil:
		out.fail(protocol.CodeBadRequest)
	case c.Check && c.Revision != n.revision():
		out.name(protocol.CodeConflict, n)
	case !m.roomForName(t, s, n, c):
		out.fail(protocol.CodeLimit)
	default:
		out.name(0, m.putName(t, s, n, c))
	}
}

// roomForName reports whether a name may be set within the limits.
func (m *Machine) roomForName(t *tenant, s *session, old *nameRecord, c *PutName) bool {
	count, bytes, held := 1, len(c.Key)+len(c.Value), 1
	if old != nil {
		count, bytes = 0, bytes-old.bytes()
		if old.owner == s {
			held = 0
		}
	}
	return m.names.count+count <= MaxNames && len(t.names)+count <= MaxTenantNames &&
		(bytes <= 0 || m.names.bytes+bytes <= MaxNamesBytes && t.nameBytes+bytes <= MaxTenantNamesBytes) &&
		(!c.Lease || s.names+held <= MaxSessionNames)
}

func (m *Machine) putName(t *tenant, s *session, n *nameRecord, c *PutName) *nameRecord {
	revision := m.nextRevision()
	if n == nil {
		n = &nameRecord{tenant: t, key: string(c.Key), created: revision}
		m.addName(n)
	}
	m.countName(n, -1)
	n.value, n.modified, n.owner = clone(c.Value), revision, nil
	if c.Lease {
		n.owner = s
	}
	m.countName(n, 1)
	m.changed(n)
	m.names.tell(NameEvent{NameInfo: n.info(), tenant: t})
	return n
}

func (m *Machine) applyDeleteName(s *session, c *DeleteName, out *Results) {
	t := m.tenantFor(s)
	n := t.nameOf(c.Key)
	switch {
	case m.settings.Version < VersionTiers:
		out.fail(protocol.CodeUnsupported)
	case len(c.Key) == 0 || len(c.Key) > protocol.MaxNameKeyBytes:
		out.fail(protocol.CodeBadRequest)
	case c.Check && c.Revision != n.revision():
		out.name(protocol.CodeConflict, n)
	case n == nil:
		out.name(protocol.CodeNotFound, nil)
	default:
		i, _ := t.findName(n.key)
		t.names = slices.Delete(t.names, i, i+1)
		m.endName(n)
		out.name(0, n)
	}
}

// endName takes note that a name is gone; its tenant's list is the caller's.
func (m *Machine) endName(n *nameRecord) {
	m.countName(n, -1)
	n.modified = m.nextRevision()
	n.value, n.owner = nil, nil
	m.gone(n)
	m.names.tell(NameEvent{NameInfo: n.info(), Deleted: true, tenant: n.tenant})
}

// endNames removes the names of a tenant that end with a session (nil = with any), in the order of their keys.
func (m *Machine) endNames(t *tenant, s *session) {
	if s != nil && s.names == 0 {
		return
	}
	t.names = slices.DeleteFunc(t.names, func(n *nameRecord) bool {
		ends := n.owner != nil && (s == nil || n.owner == s)
		if ends {
			m.endName(n)
		}
		return ends
	})
}

// endAllNames removes the names that end with sessions when all of those do, and has revisions go on from base, so that
// none of a history that was cut off is taken for one of this.
func (m *Machine) endAllNames(base uint64) {
	if m.names.revision == 0 {
		return // there has been none
	}
	if m.names.revision < base {
		m.names.revision = base
		m.changed(&m.names)
	}
	tenants := make([]*tenant, 0, len(m.tenants))
	for _, t := range m.tenants {
		tenants = append(tenants, t)
	}
	slices.SortFunc(tenants, func(a, b *tenant) int { return cmp.Compare(a.name, b.name) })
	for _, t := range tenants {
		m.endNames(t, nil)
	}
	m.names.forget()
}

// revision is a name's, 0 if it is not there.
func (n *nameRecord) revision() uint64 {
	if n == nil {
		return 0
	}
	return n.modified
}

// NamesRevision returns the revision of the last change of any name.
func (m *Machine) NamesRevision() uint64 { return m.names.revision }

// NamesTotal returns how many names there are, and the bytes of their keys and values.
func (m *Machine) NamesTotal() (count, bytes int) { return m.names.count, m.names.bytes }

// Name returns a tenant's name.
func (m *Machine) Name(id TenantID, key []byte) (NameInfo, bool) {
	if n := m.tenantByID(id).nameOf(key); n != nil {
		return n.info(), true
	}
	return NameInfo{}, false
}

// EachName calls fn with the names of a tenant whose keys have a prefix and are greater than after, in the order of their
// keys, until it returns false.
func (m *Machine) EachName(id TenantID, prefix, after string, fn func(n NameInfo) bool) {
	t := m.tenantByID(id)
	i, found := t.findName(max(prefix, after))
	if found && t.names[i].key == after {
		i++
	}
	for ; i < len(t.names) && strings.HasPrefix(t.names[i].key, prefix); i++ {
		if !fn(t.names[i].info()) {
			return
		}
	}
}

// NamesSince calls fn with the changes after a revision of a tenant's names whose keys have a prefix, in their order, until it
// returns false. It reports false, and calls nothing, if not all of them are remembered.
func (m *Machine) NamesSince(id TenantID, prefix string, after uint64, fn func(e *NameEvent) bool) bool {
	x, t := &m.names, m.tenantByID(id)
	if after < x.from || after > x.revision {
		return false
	}
	i, _ := slices.BinarySearchFunc(x.events, after+1, func(e NameEvent, at uint64) int { return cmp.Compare(e.Modified, at) })
	for ; i < len(x.events); i++ {
		if e := &x.events[i]; e.tenant == t && strings.HasPrefix(e.Key, prefix) && !fn(e) {
			break
		}
	}
	return true
}

// tenantByID is the tenant that an id stands for.
func (m *Machine) tenantByID(id TenantID) *tenant {
	if id.t == nil {
		return m.tenants[DefaultTenant]
	}
	return id.t
}

// name writes the result of PutName or DeleteName.
func (r *Results) name(code protocol.Code, n *nameRecord) {
	r.code(0)
	r.uvarint(uint64(code))
	if n == nil {
		n = &nameRecord{}
	}
	r.uvarint(n.created)
	r.uvarint(n.modified)
}

// DecodeName reads the result of PutName and DeleteName, after its code.
func DecodeName(b []byte) (NameResult, error) {
	d := decoder{b: b}
	r := NameResult{Code: d.code(), Created: d.uvarint(), Modified: d.uvarint()}
	return r, d.end()
}

func (x *nameTable) appendKey(b []byte) []byte   { return append(b, recNames) }
func (x *nameTable) appendValue(b []byte) []byte { return binary.AppendUvarint(b, x.revision) }
func (x *nameTable) load(_, value *decoder)      { x.revision = value.uvarint() }

func (n *nameRecord) appendKey(b []byte) []byte {
	return append(appendBytes(append(b, recName), n.tenant.name), n.key...)
}

func (n *nameRecord) appendValue(b []byte) []byte {
	for _, v := range [...]uint64{n.created, n.modified, uint64(n.owner.sid())} {
		b = binary.AppendUvarint(b, v)
	}
	return append(b, n.value...)
}

// load reads a name; its tenant and owner are left to the caller.
func (n *nameRecord) load(key, value *decoder) {
	n.tenant = &tenant{name: key.string()}
	n.key, key.b = string(key.b), nil
	n.created, n.modified = value.uvarint(), value.uvarint()
	if id := SessionID(value.uvarint()); id != 0 {
		n.owner = &session{id: id}
	}
	n.value, value.b = clone(value.b), nil
}

func (m *Machine) loadNames(store Store) error {
	if err := scan(m, store, recNames, func() *nameTable { return &m.names }, func(x *nameTable) error {
		x.from = x.revision
		return nil
	}); err != nil {
		return err
	}
	return scan(m, store, recName, func() *nameRecord { return &nameRecord{} }, func(n *nameRecord) error {
		n.tenant = m.tenants[n.tenant.name]
		if n.owner != nil {
			n.owner = m.sessions[n.owner.id]
			if n.owner == nil || !n.owner.open || n.owner.tenant != n.tenant {
				return ErrCorrupt
			}
		}
		if n.tenant == nil || n.key == "" || len(n.key) > protocol.MaxNameKeyBytes || len(n.value) > protocol.MaxNameValueBytes ||
			n.created == 0 || n.created > n.modified || n.modified > m.names.revision || !m.addName(n) {
			return ErrCorrupt
		}
		return nil
	})
}

func (c *PutName) appendTo(b []byte) []byte {
	b = appendBytes(appendBytes(b, c.Key), c.Value)
	return appendBool(binary.AppendUvarint(appendBool(b, c.Check), c.Revision), c.Lease)
}

func (c *PutName) decode(d *decoder) {
	c.Key, c.Value, c.Check, c.Revision, c.Lease = d.bytes(), d.bytes(), d.bool(), d.uvarint(), d.bool()
}

func (c *DeleteName) appendTo(b []byte) []byte {
	return binary.AppendUvarint(appendBool(appendBytes(b, c.Key), c.Check), c.Revision)
}

func (c *DeleteName) decode(d *decoder) {
	c.Key, c.Check, c.Revision = d.bytes(), d.bool(), d.uvarint()
}

// Kind implements Command.
func (*PutName) Kind() Kind    { return KindPutName }
func (*DeleteName) Kind() Kind { return KindDeleteName } //nolint:revive // see Command
