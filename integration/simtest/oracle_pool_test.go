package simtest

import (
	"testing"

	"larder/meta"
	"larder/protocol"
)

// poolOf is a pool in the state that the log has led to: a client owns a region, and an entry lies in its first page.
type poolOf struct {
	s     *sim
	c     *client
	r     *cregion
	given meta.AllocResult
}

// logs has a command committed, and returns its result.
func (s *sim) logs(h meta.Header, cmd meta.Command) []byte {
	s.committed(&member{id: 1}, s.log.last()+1, 2, meta.AppendCommand(meta.BeginGroup(nil, 1, nil), h, cmd))
	code, rest, err := meta.DecodeCode(s.log.results.Bytes(&s.log.results.Spans[0]))
	if err != nil || code != 0 {
		panic(code.String())
	}
	return rest
}

func newPoolOf(s *sim) *poolOf {
	d := s.devices[0]
	d.mem.generation = 7
	s.logs(meta.Header{}, &meta.AddDevice{
		UUID: d.uuid, Path: "/pool", Node: "host", Tier: "cxl", Coherence: "hardware", Size: d.size, DataOffset: headerSpan,
		Align: pageSize, Generation: d.mem.generation, Volatile: true, BootID: hostBoot,
	})
	opened, err := meta.DecodeSession(s.logs(meta.Header{}, &meta.OpenSession{Instance: "i1", Secret: 1, TTLMS: 1000}))
	if err != nil {
		panic(err)
	}
	c := &client{s: s, n: 1, pid: 1, life: s.newActor("client 1"), clock: clock{s: s}}
	c.sess = &csession{id: uint64(opened.ID), nextSeq: 1}
	p := &poolOf{s: s, c: c}
	c.pool.c = c
	p.given, err = meta.DecodeAlloc(s.logs(p.next(), &meta.Alloc{Device: 1, Size: 8 * pageSize, PageSize: pageSize}))
	if err != nil {
		panic(err)
	}
	g := &p.given
	p.r = &cregion{
		id: uint64(g.Region), epoch: g.Epoch, generation: g.Generation, offset: g.RegionOffset, length: g.RegionLength,
		mem: d.mem, state: make([]byte, 8), key: make([]string, 8),
	}
	c.pool.list = []*cregion{p.r}
	s.clients = []*client{c}
	p.register(s.keys[0], 0)
	return p
}

func (p *poolOf) next() meta.Header {
	ss := p.c.sess
	ss.nextSeq++
	return meta.Header{Session: meta.SessionID(ss.id), Seq: ss.nextSeq - 1, Acked: ss.nextSeq - 1}
}

// register has an entry of one page registered. The client's books are not changed.
func (p *poolOf) register(key string, page uint64) {
	h := p.next()
	p.s.asked(uint64(h.Session), h.Seq, &mutation{typ: protocol.TypeBatchRegister, what: []string{key}})
	p.s.logs(h, &meta.Register{Entries: []protocol.RegisterEntry{{
		Key: []byte(key), RegionID: p.r.id, Epoch: p.r.epoch, KVOffset: page * pageSize, KVLength: pageSize,
	}}})
}

// lent has another client read a page under a lease of a second.
func (p *poolOf) lent(page uint64) *poolOf {
	reader := &client{s: p.s, n: 2, clock: clock{s: p.s}}
	p.s.leaseBegins(reader, p.r.mem, p.r.at(int(page)), 1, reader.clock.Boottime()+sec, "k")
	return p
}

// evicts says that a REQUEST_ALLOC took an entry's page.
func (p *poolOf) evicts(page uint64) {
	g := p.given
	p.s.evicted(9, &meta.AllocResult{Evicted: []meta.Page{{Region: g.Region, Offset: page * pageSize, Length: pageSize}}})
}

func (p *poolOf) books(state ...byte) {
	copy(p.r.state, state)
	p.s.mix.push = true
	p.s.compareBooks()
}

// TestOraclesOfThePoolFail is TestOraclesFail for those that go by what the log has led to.
func TestOraclesOfThePoolFail(t *testing.T) {
	checkOracles(t, map[string]lie{
		"a page that holds an entry is written": {
			"reuse",
			func(s *sim) { p := newPoolOf(s); s.write(p.c, p.r, 0, stamp{key: "b"}) },
			func(s *sim) { p := newPoolOf(s); s.write(p.c, p.r, 1, stamp{key: "b"}) },
		},
		"a page is evicted under a lease": {
			"evicted",
			func(s *sim) { newPoolOf(s).lent(0).evicts(0) },
			func(s *sim) { newPoolOf(s).lent(1).evicts(0) },
		},
		"a page is evicted after its lease, and before": {
			"evicted",
			func(s *sim) { p := newPoolOf(s).lent(0); s.now += sec - ms; p.evicts(0) },
			func(s *sim) { p := newPoolOf(s).lent(0); s.now += sec; p.evicts(0) },
		},
		"a region is given away under a lease": {
			"evicted",
			func(s *sim) { p := newPoolOf(s).lent(3); s.evicted(9, &p.given) },
			func(s *sim) { p := newPoolOf(s); s.evicted(9, &p.given) },
		},
		"an entry where its owner sees none": {
			"books",
			func(s *sim) { newPoolOf(s).books(pageFree) },
			func(s *sim) { newPoolOf(s).books(pageUsed) },
		},
		"an owner who was not told that an entry is gone": {
			"books",
			func(s *sim) { newPoolOf(s).books(pageUsed, pageUsed) },
			func(s *sim) { newPoolOf(s).books(pageUsed, pageTaken) },
		},
		"two entries in a page": {
			"overlap",
			func(s *sim) { p := newPoolOf(s); s.log.at[place{1, p.r.at(1)}] = s.keys[0]; p.register(s.keys[1], 1) },
			func(s *sim) { newPoolOf(s).register(s.keys[1], 1) },
		},
		"the version goes back": {
			"version",
			func(s *sim) { s.versionSet(meta.ClusterVersion-1, protocol.CodeOK) },
			func(s *sim) {
				s.versionSet(meta.ClusterVersion, protocol.CodeOK)
				s.versionSet(meta.ClusterVersion-1, protocol.CodeBadRequest)
			},
		},
	})
}
