package simtest

import (
	"testing"

	"larder/maru"
	"larder/meta"
)

// maruHistory is what the log has led to for Maru's keys.
type maruHistory struct {
	changes map[string][]maruChange
}

// maruChange is that a key is found from a time on as a version, 0 = not found.
type maruChange struct {
	at      int64
	version uint64
}

// canonical is a key as the index has it.
func canonical(key string) []byte {
	var q maru.Request
	payload := append([]byte{0x81, 0xa3, 'k', 'e', 'y', 0xa0 | byte(len(key))}, key...)
	if err := q.Decode(maru.Header{Type: maru.Lookup}, payload); err != nil {
		panic(err)
	}
	return q.Keys[0]
}

// noteMaru takes note of what an entry of the log has done to Maru's keys.
func (h *history) noteMaru(term uint64, data []byte) {
	s := h.s
	if len(s.maruKeys) == 0 {
		return
	}
	group, err := meta.DecodeGroup(data)
	if err != nil {
		s.fail("log", "a committed entry does not decode: %v", err)
		return
	}
	for i := range group.Commands {
		c, ok := group.Commands[i].Command.(*meta.Maru)
		if !ok || c.Op != meta.MaruRegister {
			continue
		}
		code, rest, err := meta.DecodeCode(h.results.Bytes(&h.results.Spans[i]))
		if err != nil || code != 0 {
			continue
		}
		out := meta.DecodeMaru(rest)
		for j := range c.Entries {
			op := s.maruOps[c.Entries[j].Length.Abs]
			if out.Bool() && op.applied == 0 {
				op.applied, op.term = s.now, term
				if op.late() {
					s.cover.MaruLate++
				}
			}
		}
	}
	if h.maru.changes == nil {
		h.maru.changes = map[string][]maruChange{}
	}
	for _, key := range s.maruKeys {
		version := h.state.MaruLookup(canonical(key)).Length.Abs
		list := h.maru.changes[key]
		if len(list) == 0 || list[len(list)-1].version != version {
			h.maru.changes[key] = append(list, maruChange{s.now, version})
		}
	}
}

// late reports whether it was applied when its client may have given up. Clocks run at different speeds.
func (op *maruOp) late() bool {
	return op.applied > op.arrived+op.stalls+int64(maru.Patience)*101/100
}

// maruTold checks that a REGISTER_KV which was acknowledged has been applied.
func (s *sim) maruTold(op *maruOp) {
	if op.applied == 0 {
		s.fail("maru", "client %d is told that %q is registered, and the log has never done that", op.owner.n, op.key)
	}
}

// maruRead checks what a LOOKUP_KV that began at a time was told by the leader of a term: it must have been so at some time
// since. What was registered too late is nowhere to be seen as long as the leader that logged it leads.
func (s *sim) maruRead(key string, begun int64, term, version uint64) {
	s.cover.MaruReads++
	op := s.maruOps[version]
	if version != 0 && (op == nil || op.key != key) {
		s.fail("maru", "a LOOKUP_KV of %q finds what was not registered as that", key)
		return
	}
	if version != 0 && op.term == term && op.late() {
		s.fail("maru", "a LOOKUP_KV of %q finds what was registered %d ms after it was asked for, by a leader that knows", key,
			(op.applied-op.arrived)/ms)
	}
	list := s.log.maru.changes[key]
	for i, x := range list {
		until := s.now
		if i+1 < len(list) {
			until = list[i+1].at
		}
		if until < begun {
			continue
		}
		if x.version == version || version == 0 && s.hiddenMaru(x.version) {
			return
		}
	}
	if version != 0 || len(list) > 0 {
		s.fail("maru", "a LOOKUP_KV of %q since %.3f s finds version %d, and in that time the log has led to %v", key, float64(begun)/1e9, version, list)
	}
}

// hiddenMaru reports whether a version may be hidden, since it was registered late.
func (s *sim) hiddenMaru(version uint64) bool {
	op := s.maruOps[version]
	return op != nil && op.applied > op.arrived+int64(maru.Patience)/2
}

// maruCopied checks what a reader has copied, pinned or in the time of its lease. Who uses a page again whose REGISTER_KV it has
// given up on may find that it was registered nevertheless, if the leader died: Maru's protocol has no remedy for that.
func (s *sim) maruCopied(c *maruClient, x *maruCopy, got stamp) {
	op := s.maruOps[x.version]
	switch {
	case op.givenUp:
	case x.pinned && (got.key != x.key || got.version != x.version):
		s.fail("bytes", "client %d of Maru's reads %q, pinned, and takes %v for it", c.n, x.key, got)
	case got.writer != op.owner.pid:
		s.fail("bytes", "client %d of Maru's reads %q in the time of its lease, where somebody else has written %v", c.n, x.key, got)
	}
	s.cover.PagesRead++
}

// maruOf is a run in which version 5 of a key was asked for at one second, and applied a while later in term 2.
func maruOf(s *sim, later int64) *maruOp {
	s.maruKeys = []string{"k"}
	op := &maruOp{owner: &maruClient{client: &client{s: s, n: 1, pid: 1}}, key: "k", arrived: sec, applied: sec + later, term: 2}
	s.maruOps[5] = op
	s.log.maru.changes = map[string][]maruChange{"k": {{0, 0}, {sec + later, 5}}}
	if s.now > 8*sec {
		s.log.maru.changes["k"] = append(s.log.maru.changes["k"], maruChange{8 * sec, 0})
	}
	return op
}

func TestOraclesOfMaruFail(t *testing.T) {
	reads := func(later, begun int64, term, version uint64) func(s *sim) {
		return func(s *sim) { s.now = begun + ms; maruOf(s, later); s.maruRead("k", begun, term, version) }
	}
	told := func(applied int64) func(s *sim) {
		return func(s *sim) { op := maruOf(s, sec); op.applied = applied; s.maruTold(op) }
	}
	copied := func(pinned, givenUp bool, got stamp) func(s *sim) {
		return func(s *sim) {
			op := maruOf(s, sec)
			op.givenUp = givenUp
			s.maruCopied(op.owner, &maruCopy{key: "k", version: 5, pinned: pinned}, got)
		}
	}
	lent := func(givenUp bool) func(s *sim) {
		return func(s *sim) {
			owner, r := own(s, 1, 0, 4)
			l := s.leaseBegins(&client{s: s, n: 2, clock: clock{s: s}}, r.mem, 1, 1, sec, "k")
			l.maru = &maruOp{givenUp: givenUp}
			s.write(owner, r, 1, stamp{key: "j"})
		}
	}
	right, others, newer := stamp{"k", 5, 1}, stamp{"k", 6, 2}, stamp{"j", 6, 1}
	checkOracles(t, map[string]lie{
		"a key that was acknowledged and is not in the log": {"maru", told(0), told(sec)},
		"a key that is gone is found":                       {"maru", reads(sec, 9*sec, 3, 5), reads(sec, 7*sec, 3, 5)},
		"a key that is there is not found":                  {"maru", reads(ms, 3*sec, 3, 0), reads(ms, 9*sec, 3, 0)},
		"a key that nobody registered":                      {"maru", reads(ms, 3*sec, 3, 7), reads(ms, 3*sec, 3, 5)},
		"a late key is seen":                                {"maru", reads(3*sec, 5*sec, 2, 5), reads(3*sec, 5*sec, 3, 5)},
		"a late key is hidden":                              {"maru", reads(sec/2, 5*sec, 2, 0), reads(3*sec, 5*sec, 2, 0)},
		"a pinned page is written":                          {"bytes", copied(true, false, newer), copied(true, false, right)},
		"a page is given away under a lease":                {"bytes", copied(false, false, others), copied(false, false, newer)},
		"a pinned page is written, while it is read":        {"lease", lent(false), lent(true)},
		"a page that was given up":                          {"bytes", copied(true, false, others), copied(true, true, others)},
	})
}
