package meta

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/meta/policy"
	"larder/protocol"
)

const page = 64 << 10

func TestRegisterLookupDelete(t *testing.T) {
	p := newPool(t)
	p.device(16 * page)
	a := p.open("a")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: 8 * page, PageSize: page})
	require.True(t, r.Given)
	require.Equal(t, uint64(8*page), r.RegionLength)

	res := p.register(a, nil, entryAt("k", r, 0))
	require.True(t, res[0].New)
	slot, ok := p.m.Find(TenantID{}, []byte("k"))
	require.True(t, ok)
	var l Location
	p.m.Location(slot, &l)
	require.Equal(t, r.Region, l.Region)
	require.Equal(t, uint64(page), l.Length)

	again := p.register(a, nil, entryAt("k", r, 1))
	require.False(t, again[0].New, "the first writer wins")
	require.Equal(t, l, again[0].Existing, "and the second learns where it lies")

	code, body := p.do(a, &Delete{Keys: [][]byte{[]byte("k"), []byte("none")}})
	require.Zero(t, code)
	d, err := DecodeDelete(body)
	require.NoError(t, err)
	require.Equal(t, []protocol.Code{0, protocol.CodeNotFound}, d.Codes)
	require.Equal(t, r.Region, d.Freed[0].Region)
	_, ok = p.m.Find(TenantID{}, []byte("k"))
	require.False(t, ok)
	p.rebuilt()
}

func TestRegisterRefusals(t *testing.T) {
	p := newPool(t)
	dev := p.device(16 * page)
	a, b := p.open("a"), p.open("b")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: 4 * page, PageSize: page})
	p.register(a, nil, entryAt("taken", r, 0))
	long := string(make([]byte, protocol.MaxKeyBytes+1))
	for _, c := range []struct {
		name string
		by   SessionID
		edit func(e *protocol.RegisterEntry)
		code protocol.Code
	}{
		{"beyond the region", a, func(e *protocol.RegisterEntry) { e.KVOffset = 4 * page }, protocol.CodeOutOfRegion},
		{"across the end", a, func(e *protocol.RegisterEntry) { e.KVLength = 4 * page }, protocol.CodeOutOfRegion},
		{"offset 2^63", a, func(e *protocol.RegisterEntry) { e.KVOffset = 1 << 63 }, protocol.CodeOutOfRegion},
		{"no bytes", a, func(e *protocol.RegisterEntry) { e.KVLength = 0 }, protocol.CodeBadRequest},
		{"a group of 2^32", a, func(e *protocol.RegisterEntry) { e.Group = 1 << 32 }, protocol.CodeBadRequest},
		{"a group of too many", a, func(e *protocol.RegisterEntry) { e.Group = MaxGroupMembers + 1 }, protocol.CodeBadRequest},
		{"2^63 bytes", a, func(e *protocol.RegisterEntry) { e.KVLength = 1 << 63 }, protocol.CodeBadRequest},
		{"between pages", a, func(e *protocol.RegisterEntry) { e.KVOffset = page + 1 }, protocol.CodeMisaligned},
		{"on another entry", a, func(e *protocol.RegisterEntry) { e.KVOffset = 0 }, protocol.CodeOverlap},
		{"old epoch", a, func(e *protocol.RegisterEntry) { e.Epoch++ }, protocol.CodeStaleEpoch},
		{"no such region", a, func(e *protocol.RegisterEntry) { e.RegionID = 77 }, protocol.CodeStaleEpoch},
		{"somebody else's region", b, func(*protocol.RegisterEntry) {}, protocol.CodeNotOwner},
		{"key too long", a, func(e *protocol.RegisterEntry) { e.Key = []byte(long) }, protocol.CodeKeyTooLong},
		{"touch of nothing", a, func(e *protocol.RegisterEntry) { e.Touch = true }, protocol.CodeNotFound},
	} {
		e := entryAt("new", r, 1)
		c.edit(&e)
		require.Equal(t, c.code, p.register(c.by, nil, e)[0].Code, c.name)
	}
	code, _ := p.apply(Header{}, &Retire{Device: dev, Generation: 8})
	require.Zero(t, code)
	require.Equal(t, protocol.CodeRevoking, p.register(a, nil, entryAt("new", r, 1))[0].Code, "lost device")
	require.Equal(t, uint64(1), p.m.Stats().Entries, "nothing that was refused is there")
}

// Every mutation that is repeated under its seq is answered as before and not applied again; a canceled one is refused.
func TestExactlyOnce(t *testing.T) {
	p := newPool(t)
	p.device(64 * page)
	a := p.open("a")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: 8 * page, PageSize: page})
	reg := &Register{Entries: []protocol.RegisterEntry{entryAt("k", r, 0)}}
	h := Header{Session: a, Seq: 5, Acked: 2}
	code1, body1 := p.apply(h, reg)
	hash := p.m.orderSum
	code2, body2 := p.apply(h, reg)
	require.Equal(t, code1, code2)
	require.Equal(t, body1, body2, "is_new again, since it is the same request")
	require.Equal(t, hash, p.m.orderSum, "a repetition is not a use")

	_, body := p.apply(Header{Session: a, Seq: 6, Acked: 2}, &Cancel{Seqs: []uint64{5, 7}})
	applied, err := DecodeCodes(body)
	require.NoError(t, err)
	require.Equal(t, []protocol.Code{1, 0}, applied)
	code, _ := p.apply(Header{Session: a, Seq: 7, Acked: 2}, &Register{Entries: []protocol.RegisterEntry{entryAt("x", r, 1)}})
	require.Equal(t, protocol.CodeCanceled, code)

	m := p.rebuilt()
	res, state := m.Remembered(a, 5)
	require.Equal(t, SeqAnswered, state, "answers survive a restart")
	require.NotEmpty(t, res)
	code, _ = p.apply(Header{Session: a, Seq: 8, Acked: 6}, &ReturnRegion{Region: 99})
	require.Equal(t, protocol.CodeNotFound, code)
	code, _ = p.apply(h, reg)
	require.Equal(t, protocol.CodeTooOld, code)
	code, _ = p.apply(Header{Session: a, Seq: 6 + protocol.Window, Acked: 6}, reg)
	require.Equal(t, protocol.CodeTooManyUnacked, code)
}

// The four steps of REQUEST_ALLOC, in order.
func TestAllocPhases(t *testing.T) {
	p := newPool(t)
	p.device(8 * page)
	a, b := p.open("a"), p.open("b")
	ask := &protocol.AllocRequest{Size: 4 * page, PageSize: page, NeedPages: 1, Evict: true}

	_, ra := p.alloc(a, ask)
	_, rb := p.alloc(b, ask)
	require.Equal(t, uint8(0), ra.Phase)
	require.True(t, rb.Given)
	for i := range 4 {
		p.register(a, nil, entryAt(fmt.Sprintf("a%d", i), ra, i))
		p.register(b, nil, entryAt(fmt.Sprintf("b%d", i), rb, i))
	}
	_, e := p.alloc(a, ask)
	require.Equal(t, uint8(1), e.Phase, "own entries first")
	require.Equal(t, "a0", string(e.Evicted[0].Key), "the coldest of them")
	p.register(a, nil, entryAt("a4", ra, 0))

	code, _ := p.do(b, &ReturnRegion{Region: rb.Region})
	require.Zero(t, code)
	_, ok := p.m.Find(TenantID{}, []byte("b2"))
	require.True(t, ok, "what a departed client stored is served")
	c := p.open("c")
	plan, given := p.alloc(c, ask)
	require.Equal(t, uint8(2), plan.Cmd.Phase, "a departed owner's region")
	require.Equal(t, rb.Region, given.Region)
	require.NotEqual(t, rb.Epoch, given.Epoch)
	_, ok = p.m.Find(TenantID{}, []byte("b2"))
	require.False(t, ok)

	p.now += 60_000
	d := p.open("d")
	plan, _ = p.alloc(d, ask)
	require.Equal(t, PlanMark, plan.Kind, "another live client's, who is asked first")
	require.Equal(t, given.Region, plan.Region, "the region with the fewest entries")
	code, _ = p.apply(Header{}, &Mark{Region: plan.Region, For: d})
	require.Zero(t, code)
	plan, _ = p.alloc(d, ask)
	require.Equal(t, PlanWait, plan.Kind, "until the owner has let go")
	code, _ = p.do(c, &RevokeDone{Region: given.Region, Epoch: given.Epoch})
	require.Zero(t, code)
	_, taken := p.alloc(d, ask)
	require.Equal(t, uint8(3), taken.Phase)
	require.Equal(t, given.Region, taken.Region)
	require.Equal(t, protocol.CodeNotOwner, p.register(c, nil, entryAt("late", taken, 0))[0].Code)
	p.rebuilt()
}

// A batch store evicts what its stores would have evicted one after the other, so an LRU pool of n pages is an LRU
// cache of n blocks.
func TestBatchStoreIsSequentialLRU(t *testing.T) {
	for _, n := range []int{7, 64} {
		requests := randomRequests(300, 40, 6)
		require.Equal(t, lruHits(requests, n), poolHits(t, requests, n, "lru", true), "%d pages", n)
	}
}

func randomRequests(n, ids, longest int) [][]int {
	r := rand.New(rand.NewPCG(3, 4))
	out := make([][]int, n)
	for i := range out {
		seen := map[int]bool{}
		for range 1 + r.IntN(longest) {
			if id := int(float64(ids) * r.Float64() * r.Float64()); !seen[id] {
				seen[id] = true
				out[i] = append(out[i], id)
			}
		}
	}
	return out
}

// lruHits is the reference: a slice in order of use.
func lruHits(requests [][]int, n int) int {
	var order []int
	hits := 0
	for _, req := range requests {
		for _, id := range req {
			at := -1
			for i, x := range order {
				if x == id {
					at = i
				}
			}
			if at >= 0 {
				hits++
				order = append(order[:at], order[at+1:]...)
			} else if len(order) == n {
				order = order[1:]
			}
			order = append(order, id)
		}
	}
	return hits
}

// poolHits stores requests through a pool of n pages as a client does: one REQUEST_ALLOC with the keys, one REGISTER
// with what was not held and touches of what was.
func poolHits(tb testing.TB, requests [][]int, n int, name string, check bool) int {
	tb.Helper()
	p := newPool(tb)
	s := DefaultSettings()
	s.Policy = name
	code, _ := p.apply(Header{}, &SetSettings{s})
	require.Zero(tb, code)
	p.device(uint64(n) * page)
	a := p.open("a")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: uint64(n) * page, PageSize: page})
	require.Equal(tb, uint64(n)*page, r.RegionLength)
	var free []uint64
	for i := range n {
		free = append(free, uint64(i)*page)
	}
	hits := 0
	for i, req := range requests {
		ask := &protocol.AllocRequest{PageSize: page, Evict: true, FreePages: uint64(len(free))}
		for _, id := range req {
			ask.Keys = append(ask.Keys, fmt.Appendf(nil, "block-%d", id))
		}
		plan, got := p.alloc(a, ask)
		for _, e := range got.Evicted {
			free = append(free, e.Offset)
		}
		var entries []protocol.RegisterEntry
		for j, key := range ask.Keys {
			if plan.Kind == PlanNothing && plan.Found[j] || plan.Kind == PlanCommand && got.FoundKey(j) {
				hits++
				entries = append(entries, protocol.RegisterEntry{Key: key, Touch: true})
				continue
			}
			entries = append(entries, protocol.RegisterEntry{
				Key: key, RegionID: uint64(r.Region), Epoch: r.Epoch, KVOffset: free[0], KVLength: page,
			})
			free = free[1:]
		}
		for _, x := range p.register(a, nil, entries...) {
			require.Zero(tb, x.Code)
		}
		p.log = nil
		if check && i%50 == 0 {
			p.m = p.rebuilt()
		}
	}
	return hits
}

// With LARDER_TRACE naming the published conversation trace, the pool's hit ratios are those of an exact LRU.
func TestPublishedTrace(t *testing.T) {
	path := os.Getenv("LARDER_TRACE")
	if path == "" {
		t.Skip("set LARDER_TRACE to the conversation trace to compare hit ratios with the published ones")
	}
	f, err := os.Open(path)
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	var requests [][]int
	total := 0
	for sc := bufio.NewScanner(f); sc.Scan(); {
		var line struct {
			HashIDs []int `json:"hash_ids"`
		}
		require.NoError(t, json.Unmarshal(sc.Bytes(), &line))
		requests = append(requests, line.HashIDs)
		total += len(line.HashIDs)
	}
	for _, name := range policy.Names() {
		for _, n := range []int{1000, 5859, 10000, 30000, 50000} {
			t.Logf("%-14s %6d blocks: %.4f", name, n, float64(poolHits(t, requests, n, name, false))/float64(total))
		}
	}
}

// A session is replaced only by who knows its secret.
func TestReplacingNeedsTheSecret(t *testing.T) {
	p := newPool(t)
	a := p.open("a")
	code, _ := p.apply(Header{}, &OpenSession{Instance: "a", TTLMS: 1000, Secret: 7, Replaces: a, Proof: 1})
	require.Equal(t, protocol.CodeDuplicate, code)
	require.True(t, p.m.SessionOpen(a))
	info, _ := p.m.Session(a)
	code, _ = p.apply(Header{}, &OpenSession{Instance: "a", TTLMS: 1000, Secret: 7, Replaces: a, Proof: info.Secret})
	require.Zero(t, code)
	require.False(t, p.m.SessionOpen(a))
	again, body := p.apply(Header{}, &OpenSession{Instance: "a", TTLMS: 1000, Secret: 7})
	require.Zero(t, again)
	r, err := DecodeSession(body)
	require.NoError(t, err)
	require.True(t, p.m.SessionOpen(r.ID), "an opening that is repeated gets the session of the first")
}
