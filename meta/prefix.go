package meta

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"

	"larder/meta/policy"
	"larder/protocol"
)

// DefaultTenant is the tenant of sessions that name none.
const DefaultTenant = "default"

// contextRecord is an interned Context. Its id is given up when nothing refers to it any more.
type contextRecord struct {
	object
	Context
	id ContextID

	// Not in the record.
	tenant *tenant
	handle handle
	refs   uint64 // entries; a tenant's base context also counts one for the tenant
}

// stableKeyHash is the hash of a key that policies see: the same on every replica and after every restart.
func stableKeyHash(key []byte) uint64 { return xxh3.Hash(key) }

// tenantOf returns a tenant by name, made when first needed; false when there are too many contexts.
func (m *Machine) tenantOf(name string) (*tenant, bool) {
	if t := m.tenants[name]; t != nil {
		return t, true
	}
	if len(m.contexts) >= MaxContexts {
		return nil, false
	}
	t := newTenant(name)
	m.tenants[name] = t
	c := m.addContext(Context{Tenant: name}, t)
	c.refs++ // tenants stay: they are few, and carry counters
	t.base = c.id
	return t, true
}

// tenantFor returns the tenant that a command acts for.
func (m *Machine) tenantFor(s *session) *tenant {
	if s != nil {
		return s.tenant
	}
	t, _ := m.tenantOf(DefaultTenant) // exists from the start
	return t
}

func (m *Machine) addContext(c Context, t *tenant) *contextRecord {
	m.head.nextContext++
	x := &contextRecord{Context: c, id: m.head.nextContext, tenant: t}
	m.contexts[x.id] = x
	x.handle = m.contextAt.put(x)
	m.contextIDs[c] = x.id
	m.changed(x)
	return x
}

// contextFor interns the context of a REGISTER; nil when there are too many.
func (m *Machine) contextFor(s *session, c *protocol.Context) *contextRecord {
	t := m.tenantFor(s)
	if c == nil || *c == (protocol.Context{}) {
		return m.contexts[t.base]
	}
	full := ContextOf(t.name, c)
	if id, ok := m.contextIDs[full]; ok {
		return m.contexts[id]
	}
	if len(m.contexts) >= MaxContexts {
		return nil
	}
	return m.addContext(full, t)
}

// releaseContext undoes one reference.
func (m *Machine) releaseContext(c *contextRecord) {
	c.refs--
	if c.refs == 0 {
		delete(m.contexts, c.id)
		m.contextAt.drop(c.handle)
		delete(m.contextIDs, c.Context)
		m.gone(c)
	}
}

// prefixKey is the key of the prefix index. It is a bijection of the hash within a context, and seeded per process
// across contexts, so that nobody can choose colliding ones.
func (m *Machine) prefixKey(ctx handle, hash uint64) uint64 {
	return mix(hash ^ mix(uint64(ctx)^m.prefixSeed))
}

func (m *Machine) prefixInsert(slot Slot, x *entry) {
	k := m.prefixKey(x.ctx, x.hash)
	x.pnext = None
	if first, ok := m.prefixes[k]; ok {
		x.pnext = first
	}
	m.prefixes[k] = slot
}

func (m *Machine) prefixRemove(slot Slot, x *entry) {
	k := m.prefixKey(x.ctx, x.hash)
	switch first := m.prefixes[k]; {
	case first != slot:
		p := m.table.at(first)
		for p.pnext != slot {
			p = m.table.at(p.pnext)
		}
		p.pnext = x.pnext
	case x.pnext != None:
		m.prefixes[k] = x.pnext
	default:
		delete(m.prefixes, k)
	}
}

// eachPrefix calls fn with the live entries of a prefix hash until it returns false. Which come first
// depends on the history of this process, so what is done with them must not.
func (m *Machine) eachPrefix(ctx handle, hash uint64, fn func(s Slot, x *entry) bool) {
	s, ok := m.prefixes[m.prefixKey(ctx, hash)]
	if !ok {
		return
	}
	for s != None {
		x := m.table.at(s)
		next := x.pnext
		if x.ctx == ctx && x.hash == hash && m.alive(x) && !fn(s, x) {
			return
		}
		s = next
	}
}

// prefixTwin returns the entry that already holds a prefix hash for the same group member: the oldest one.
func (m *Machine) prefixTwin(ctx handle, hash uint64, group uint32) (Slot, bool) {
	return m.oldest(ctx, hash, func(x *entry) bool { return x.group == group })
}

// prefixParent returns the entry of the parent block, None if it is not there.
func (m *Machine) prefixParent(ctx handle, hash uint64, group uint32) Slot {
	s, ok := m.oldest(ctx, hash, func(x *entry) bool { return x.group == group })
	if !ok {
		return None
	}
	return s
}

func (m *Machine) oldest(ctx handle, hash uint64, match func(*entry) bool) (Slot, bool) {
	best, birth := None, uint64(0)
	m.eachPrefix(ctx, hash, func(s Slot, x *entry) bool {
		if match(x) && (best == None || x.birth < birth) {
			best, birth = s, x.birth
		}
		return true
	})
	return best, best != None
}

// validParent returns an entry's parent if it is still the one that was there when the entry was registered.
func (m *Machine) validParent(x *entry) Slot {
	if x.parent == None || !m.table.live(x.parent) || m.table.at(x.parent).birth > x.birth {
		return None
	}
	return x.parent
}

func (m *Machine) childAdded(parent Slot) {
	p := m.table.at(parent)
	p.children++
	if p.pins == 0 {
		m.policyOf(p).ChildAdded(parent)
	}
}

func (m *Machine) childGone(parent Slot, order policy.Order) {
	p := m.table.at(parent)
	p.children--
	if p.pins == 0 {
		m.policyOf(p).ChildGone(parent, order)
	}
}

// MaxGroupMembers bounds the members of a group, so that a match keeps them in a fixed bitmap.
const MaxGroupMembers = 1024

// PrefixMatch is Reading.PrefixMatch as of the last stamped log time.
func (m *Machine) PrefixMatch(ctx *Context, hashes []uint64, members uint64, keys func(key []byte)) int {
	r := m.At(m.head.now)
	return r.PrefixMatch(ctx, hashes, members, keys)
}

// PrefixMatch returns how many of the hashes, from the first on, are held without a gap. With members > 0 a block
// counts only if all that many members of its group are held. keys, if not nil, is called with the key of one entry of
// each matched block; the key is valid during the call.
func (r *Reading) PrefixMatch(ctx *Context, hashes []uint64, members uint64, keys func(key []byte)) int {
	m := r.m
	id, ok := m.contextIDs[*ctx]
	if !ok || members > MaxGroupMembers {
		return 0
	}
	for i, h := range hashes {
		slot, ok := r.prefixHeld(m.contexts[id].handle, h, members)
		if !ok {
			return i
		}
		if keys != nil {
			keys(m.Key(slot))
		}
	}
	return len(hashes)
}

// prefixHeld reports whether a block is held by all members of its group, and returns one entry of it.
func (r *Reading) prefixHeld(ctx handle, hash, members uint64) (Slot, bool) {
	var seen [MaxGroupMembers / 64]uint64
	count := uint64(0)
	found, birth := None, uint64(0)
	r.m.eachPrefix(ctx, hash, func(s Slot, x *entry) bool {
		if r.over(x) {
			return true
		}
		if found == None || x.birth < birth {
			found, birth = s, x.birth
		}
		member := uint64(x.group >> 16)
		if members == 0 || uint64(x.group&0xffff) != members || member >= members {
			return true
		}
		if bit := uint64(1) << (member % 64); seen[member/64]&bit == 0 {
			seen[member/64] |= bit
			count++
		}
		return true
	})
	return found, found != None && count >= members
}

func (c *contextRecord) appendKey(b []byte) []byte {
	return binary.BigEndian.AppendUint32(append(b, recContext), uint32(c.id))
}

func (c *contextRecord) appendValue(b []byte) []byte {
	return c.appendTo(b)
}

func (c *contextRecord) load(key, value *decoder) {
	c.id = ContextID(key.be32())
	c.decode(value)
}
