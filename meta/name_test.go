package meta

import (
	"bytes"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// checkNames verifies that names are in order and counted, and that each is of a session that is open or of nobody.
func (p *pool) checkNames() {
	t, m := p.tb, p.m
	count, size, held := 0, 0, map[*session]int{}
	for _, x := range m.tenants {
		own := 0
		for i, n := range x.names {
			require.True(t, i == 0 || x.names[i-1].key < n.key)
			require.Same(t, x, n.tenant)
			require.True(t, n.created > 0 && n.created <= n.modified && n.modified <= m.names.revision)
			count, own = count+1, own+n.bytes()
			if n.owner != nil {
				require.True(t, n.owner.open && m.sessions[n.owner.id] == n.owner)
				held[n.owner]++
			}
		}
		require.Equal(t, own, x.nameBytes)
		size += own
	}
	require.Equal(t, count, m.names.count)
	require.Equal(t, size, m.names.bytes)
	for _, s := range m.sessions {
		require.Equal(t, held[s], s.names)
	}
	size = 0
	for _, e := range m.names.events {
		size += len(e.Key) + len(e.Value)
	}
	require.Equal(t, size, m.names.eventBytes)
}

// name sets or removes some name.
func (g *generator) name(id SessionID) {
	key := fmt.Appendf(nil, "%c/%d", 'a'+rune(g.r.IntN(3)), g.r.IntN(8))
	n, _ := g.p.m.Name(g.p.m.Tenant([]string{"", "acme"}[g.r.IntN(2)]), key)
	revision := n.Modified * g.r.Uint64N(2)
	if g.r.IntN(4) == 0 {
		g.p.do(id, &DeleteName{Key: key[:g.r.IntN(len(key)+1)], Check: g.r.IntN(2) == 0, Revision: revision})
		return
	}
	g.p.do(id, &PutName{
		Key: key, Value: bytes.Repeat([]byte{'v'}, g.r.IntN(40)), Check: g.r.IntN(2) == 0, Revision: revision, Lease: g.r.IntN(3) > 0,
	})
}

// nameWatcher keeps a copy of a tenant's names by what it is told of their changes.
type nameWatcher struct {
	tb    testing.TB
	m     *Machine
	at    uint64
	names map[string]NameInfo
	lists int
}

func newNameWatcher(tb testing.TB, m *Machine) *nameWatcher {
	tb.Helper()
	return &nameWatcher{tb: tb, m: m, names: map[string]NameInfo{}}
}

func (w *nameWatcher) look() {
	last := w.at
	ok := w.m.NamesSince(TenantID{}, "", w.at, func(e *NameEvent) bool {
		require.Greater(w.tb, e.Modified, last)
		last = e.Modified
		old, had := w.names[e.Key]
		if e.Deleted {
			require.True(w.tb, had, "what is deleted was there")
			require.Equal(w.tb, old.Created, e.Created)
			delete(w.names, e.Key)
			return true
		}
		require.Equal(w.tb, had && old.Created == e.Created, e.Created != e.Modified)
		w.names[e.Key] = e.NameInfo
		return true
	})
	if !ok {
		w.lists++
		w.names = w.all()
	}
	w.at = w.m.NamesRevision()
}

func (w *nameWatcher) all() map[string]NameInfo {
	all := map[string]NameInfo{}
	w.m.EachName(TenantID{}, "", "", func(n NameInfo) bool {
		all[n.Key] = n
		return true
	})
	return all
}

func (w *nameWatcher) same() {
	w.look()
	require.Equal(w.tb, w.all(), w.names)
}

func namesPool(tb testing.TB) *pool {
	tb.Helper()
	p := newPool(tb)
	s := DefaultSettings()
	s.Version = ClusterVersion
	code, _ := p.apply(Header{}, &SetSettings{s})
	require.Zero(tb, code)
	return p
}

func (p *pool) putName(id SessionID, c *PutName) (protocol.Code, NameResult) {
	code, body := p.do(id, c)
	if code != 0 {
		return code, NameResult{}
	}
	r, err := DecodeName(body)
	require.NoError(p.tb, err)
	return r.Code, r
}

// Before the cluster's version has names, and of what is no name, nothing is kept.
func TestNamesThatAreRefused(t *testing.T) {
	p := newPool(t)
	a := p.open("a")
	code, _ := p.putName(a, &PutName{Key: []byte("k")})
	require.Equal(t, protocol.CodeUnsupported, code)
	code, _ = p.do(a, &DeleteName{Key: []byte("k")})
	require.Equal(t, protocol.CodeUnsupported, code)
	p = namesPool(t)
	a = p.open("a")
	long := make([]byte, protocol.MaxNameValueBytes+1)
	for _, c := range []*PutName{{}, {Key: long[:protocol.MaxNameKeyBytes+1]}, {Key: []byte("k"), Value: long}} {
		code, _ = p.putName(a, c)
		require.Equal(t, protocol.CodeBadRequest, code)
	}
	code, _ = p.apply(Header{}, &PutName{Key: []byte("k"), Lease: true})
	require.Equal(t, protocol.CodeBadRequest, code, "nobody's names end with no session")
	count, size := p.m.NamesTotal()
	require.Zero(t, count+size)
	require.Zero(t, p.m.NamesRevision())
}

// What a session, a tenant and the pool may have of names is bounded, and given back.
func TestLimitsOfNames(t *testing.T) {
	p := namesPool(t)
	a, b := p.open("a"), p.open("b")
	for i := range MaxSessionNames {
		code, _ := p.putName(a, &PutName{Key: fmt.Append(nil, "a", i), Lease: true})
		require.Zero(t, code)
	}
	code, _ := p.putName(a, &PutName{Key: []byte("more"), Lease: true})
	require.Equal(t, protocol.CodeLimit, code)
	code, _ = p.putName(a, &PutName{Key: []byte("a1"), Value: []byte("again"), Lease: true})
	require.Zero(t, code, "one that it holds may change")
	code, _ = p.putName(b, &PutName{Key: []byte("a1"), Lease: true})
	require.Zero(t, code)
	code, _ = p.putName(a, &PutName{Key: []byte("more"), Lease: true})
	require.Zero(t, code, "another one holds a1 now")

	big := make([]byte, protocol.MaxNameValueBytes)
	n := 0
	for ; code == 0; n++ {
		code, _ = p.putName(b, &PutName{Key: fmt.Append(nil, "b", n), Value: big})
	}
	require.Equal(t, protocol.CodeLimit, code)
	_, size := p.m.NamesTotal()
	require.Greater(t, size, MaxTenantNamesBytes-2*len(big))
	require.LessOrEqual(t, size, MaxTenantNamesBytes)
	code, _ = p.putName(b, &PutName{Key: []byte("b0")})
	require.Zero(t, code, "less is always taken")
	code, _ = p.putName(p.openOf("other", "c"), &PutName{Key: []byte("k"), Value: big})
	require.Zero(t, code, "another tenant has room")
	p.check()
	p.rebuilt()
}

// A session's end takes its names with it, in the order of their keys, and those of nobody else.
func TestNamesEndWithTheirSession(t *testing.T) {
	for _, end := range []string{"close", "replace", "incarnation"} {
		t.Run(end, func(t *testing.T) {
			p := namesPool(t)
			p.apply(Header{}, &NewIncarnation{Incarnation: 1})
			a, b := p.open("a"), p.open("b")
			for _, k := range []string{"z", "x", "y"} {
				p.putName(a, &PutName{Key: []byte(k), Lease: true})
			}
			p.putName(b, &PutName{Key: []byte("x"), Lease: true})
			p.putName(b, &PutName{Key: []byte("free")})
			at := p.m.NamesRevision()
			w := p.twin()
			switch end {
			case "close":
				p.apply(Header{}, &CloseSession{ID: a})
			case "replace":
				info, _ := p.m.Session(a)
				p.apply(Header{}, &OpenSession{Instance: "a", Secret: 1, Replaces: a, Proof: info.Secret})
			case "incarnation":
				p.apply(Header{}, &NewIncarnation{Incarnation: 2})
				require.Equal(t, uint64(2)<<idBits+3, p.m.NamesRevision(), "no revision of before is used again")
				require.False(t, p.m.NamesSince(TenantID{}, "", at, func(*NameEvent) bool { return true }))
				at = p.m.NamesRevision() - 3
			}
			w.same()
			left := strings.Join(keysOfNames(p.m), " ")
			require.Equal(t, map[string]string{"close": "free x", "replace": "free x", "incarnation": "free"}[end], left)
			var gone []string
			p.m.NamesSince(TenantID{}, "", at, func(e *NameEvent) bool {
				require.True(t, e.Deleted)
				gone = append(gone, e.Key)
				return true
			})
			if end != "incarnation" {
				require.Equal(t, []string{"y", "z"}, gone)
			}
			p.check()
		})
	}
}

func keysOfNames(m *Machine) (keys []string) {
	m.EachName(TenantID{}, "", "", func(n NameInfo) bool {
		keys = append(keys, n.Key)
		return true
	})
	return keys
}

// What is remembered of changes is bounded; who comes for more is told that it is not all there.
func TestNameEventsAreForgotten(t *testing.T) {
	p := namesPool(t)
	a := p.open("a")
	value := make([]byte, 8<<10)
	for range maxNameEventBytes/len(value) + 50 {
		p.putName(a, &PutName{Key: []byte("k"), Value: value})
	}
	require.LessOrEqual(t, p.m.names.eventBytes, maxNameEventBytes)
	require.False(t, p.m.NamesSince(TenantID{}, "", 1, nil))
	for range maxNameEvents + 50 {
		p.putName(a, &PutName{Key: []byte("k")})
	}
	require.Len(t, p.m.names.events, maxNameEvents)
	last := p.m.NamesRevision()
	n := 0
	count := func(*NameEvent) bool { n++; return true }
	require.False(t, p.m.NamesSince(TenantID{}, "", last-maxNameEvents-1, count))
	require.True(t, p.m.NamesSince(TenantID{}, "", last-maxNameEvents, count))
	require.Equal(t, maxNameEvents, n)
	require.True(t, p.m.NamesSince(TenantID{}, "", last, count))
	require.False(t, p.m.NamesSince(TenantID{}, "", last+1, count), "of another history")
	require.Equal(t, maxNameEvents, n)
	require.False(t, p.rebuilt().NamesSince(TenantID{}, "", last-1, count), "a rebuilt machine remembers none")
	p.checkNames()
}

// TestOpenRefusesNamesThatNoMachineWrote: records that decode, and are not of this pool.
func TestOpenRefusesNamesThatNoMachineWrote(t *testing.T) {
	p := namesPool(t)
	a, b := p.open("a"), p.openOf("other", "b")
	p.putName(a, &PutName{Key: []byte("k"), Value: []byte("v"), Lease: true})
	p.flush()
	sound := p.m.tenants[DefaultTenant].names[0]
	for name, change := range map[string]func(n *nameRecord){
		"another tenant's session": func(n *nameRecord) { n.owner = p.m.sessions[b] },
		"no session":               func(n *nameRecord) { n.owner = &session{id: 99} },
		"a revision to come":       func(n *nameRecord) { n.modified = 9 },
		"made after it changed":    func(n *nameRecord) { n.created = 2 },
		"a long key":               func(n *nameRecord) { n.key = strings.Repeat("k", protocol.MaxNameKeyBytes+1) },
		"an unknown tenant":        func(n *nameRecord) { n.tenant = &tenant{name: "unknown"} },
	} {
		t.Run(name, func(t *testing.T) {
			n := &nameRecord{tenant: sound.tenant, key: sound.key, value: sound.value, created: 1, modified: 1, owner: sound.owner}
			change(n)
			store := newMemStore()
			maps.Copy(store.records, p.store.records)
			delete(store.records, string(sound.appendKey(nil)))
			store.records[string(n.appendKey(nil))] = n.appendValue(nil)
			_, err := Open(store)
			require.ErrorIs(t, err, ErrCorrupt)
		})
	}
}
