package simtest

import (
	"bytes"
	"slices"

	"larder/meta"
	"larder/protocol"
)

// question is a mutation as its client asked it.
type question struct {
	m        *mutation
	answers  int
	canceled bool
	first    []byte // what was answered for good, without what may differ
}

// asked notes a mutation before it is sent.
func (s *sim) asked(session, seq uint64, m *mutation) {
	s.questions[seqKey{session, seq}] = &question{m: m}
}

// canceled notes that a request is promised never to be carried out.
func (s *sim) canceled(session, seq uint64) {
	k := seqKey{session, seq}
	if q := s.questions[k]; q != nil {
		q.canceled = true
	}
	if a, done := s.log.answers[k]; done {
		s.fail("once", "request %d of session %d is said to be canceled, and entry %d carried it out", seq, session, a.index)
	}
}

// answered compares an answer that a client got with what the log says, and with earlier answers.
func (s *sim) answered(session, seq uint64, m *mutation, e *protocol.Error, body []byte) {
	k := seqKey{session, seq}
	q := s.questions[k]
	if q == nil || e.Code != 0 && !ofNames(m.typ, e.Code) {
		return
	}
	a, done := s.log.answers[k]
	got := essence(m.typ, body)
	if !done {
		if m.typ == protocol.TypeRequestAlloc && planned(body) || m.typ == protocol.TypeGoodbye {
			return // nothing was logged, and nothing given
		}
		if m.typ == protocol.TypeTaskDone && !succeeded(body) {
			return // the task was canceled
		}
		s.fail("once", "request %d of session %d (%v) was acknowledged, and no committed entry carries it out", seq, session, m.typ)
		return
	}
	if q.answers++; q.answers > 1 && !bytes.Equal(q.first, got) {
		s.fail("once", "request %d of session %d (%v) was answered in two ways: %x and %x", seq, session, m.typ, q.first, got)
	}
	q.first = got
	s.cover.Answers++
	s.compare(k, m, a, body)
}

func succeeded(body []byte) bool {
	var r protocol.SuccessReply
	return r.Decode(body) == nil && r.Success
}

// planned reports whether the reply to a REQUEST_ALLOC says that nothing was needed.
func planned(body []byte) bool {
	var r protocol.AllocReply
	return r.Decode(body) == nil && r.Region.Length == 0 && len(r.Evicted) == 0
}

// essence is what of a reply must be the same each time.
func essence(t protocol.Type, body []byte) []byte {
	switch t {
	case protocol.TypeRequestAlloc:
		var r protocol.AllocReply
		if r.Decode(body) != nil {
			return body
		}
		for i := range r.Evicted {
			r.Evicted[i].FreeAfterMS = 0
		}
		r.Device = nil
		return r.Append(nil)
	case protocol.TypeBatchDelete:
		var r protocol.KeysReply
		if r.DecodeAs(body, t) != nil {
			return body
		}
		for i := range r.Freed {
			r.Freed[i].FreeAfterMS = 0
		}
		r.FreeAfterMS = 0
		return r.AppendAs(nil, t)
	case protocol.TypeReturnAlloc, protocol.TypeRevokeDone:
		var r protocol.SuccessReply
		if r.Decode(body) != nil {
			return body
		}
		r.FreeAfterMS = 0
		return r.Append(nil)
	default:
		return slices.Clone(body)
	}
}

// compare checks that an answer says what the log led to.
func (s *sim) compare(k seqKey, m *mutation, a answer, body []byte) {
	code, rest, err := meta.DecodeCode(a.result)
	if err != nil {
		s.fail("once", "the result of request %d of session %d does not decode", k.seq, k.session)
		return
	}
	if code != 0 {
		s.fail("once", "request %d of session %d was acknowledged, and entry %d refused it with %v", k.seq, k.session, a.index, code)
		return
	}
	switch m.typ {
	case protocol.TypeBatchRegister:
		var r protocol.RegisterReply
		it := meta.DecodeRegister(rest)
		if r.DecodeAs(body, m.typ) != nil || it.Len() != len(r.Results) {
			s.fail("once", "the answer to request %d of session %d has another length than its result", k.seq, k.session)
			return
		}
		var x meta.RegisterResult
		for i := 0; it.Next(&x); i++ {
			if x.New != r.Results[i].IsNew || x.Code != r.Results[i].Code {
				s.fail("once", "request %d of session %d was answered %v, and entry %d says %v", k.seq, k.session, r.Results[i].IsNew,
					a.index, x.New)
			}
		}
	case protocol.TypeRequestAlloc:
		var r protocol.AllocReply
		x, err := meta.DecodeAlloc(rest)
		if err != nil || r.Decode(body) != nil || x.Given != (r.Region.Length > 0) || len(x.Evicted) != len(r.Evicted) ||
			x.Given && (uint64(x.Region) != r.Region.RegionID || x.Epoch != r.Region.Epoch) {
			s.fail("once", "the answer to REQUEST_ALLOC %d of session %d is not what entry %d says", k.seq, k.session, a.index)
		}
	case protocol.TypePutName, protocol.TypeDeleteName:
		s.compareName(k, a, rest, body)
	default: // their results are too simple to differ
	}
}

// tally counts what a group did to keys by request, and finds out what the system itself removed.
func (h *history) tally(before map[string]int64) {
	s := h.s
	made, gone := map[string]int{}, map[string]int{}
	for i := range h.results.Spans {
		x := &h.results.Spans[i]
		q := s.questions[seqKey{uint64(x.Session), x.Seq}]
		code, rest, err := meta.DecodeCode(h.results.Bytes(x))
		if err == nil && code == 0 && x.Kind == meta.KindAlloc && !x.Remembered {
			if a, err := meta.DecodeAlloc(rest); err == nil {
				s.evicted(h.last(), &a)
			}
		}
		if err != nil || code != 0 || x.Remembered || q == nil {
			continue
		}
		if q.canceled {
			s.fail("once", "request %d of session %d was canceled, and is carried out all the same", x.Seq, x.Session)
		}
		switch x.Kind {
		case meta.KindRegister:
			it := meta.DecodeRegister(rest)
			var r meta.RegisterResult
			for j := 0; it.Next(&r); j++ {
				if r.New && j < len(q.m.what) {
					made[q.m.what[j]]++
				}
			}
		case meta.KindDelete:
			d, err := meta.DecodeDelete(rest)
			for j := range d.Codes {
				if err == nil && d.Codes[j] == 0 && j < len(q.m.what) {
					gone[q.m.what[j]]++
				}
			}
		default:
		}
	}
	for _, key := range s.keys {
		n := made[key] - gone[key]
		since, was := before[key]
		if was {
			n++
		} else {
			since = s.now
		}
		if _, is := h.keys[key]; is {
			n--
		}
		switch h.moved[key] {
		case -1:
			s.linear.hide(key, h.proposed)
			continue
		case 1:
			s.linear.back(key, h.proposed)
			continue
		}
		if _, hidden := h.hidden[key]; hidden && gone[key] > 0 {
			delete(h.hidden, key)
			n++
		}
		if _, is := h.keys[key]; made[key] > 0 && !is && n == 1 {
			h.unseen[key] = true // perhaps on a device that is away
			s.linear.hide(key, h.proposed)
			continue
		}
		if n < 0 && h.unseen[key] {
			delete(h.unseen, key)
			s.linear.back(key, h.proposed)
			continue
		}
		if n < 0 {
			s.fail("durable", "%q is there, and nobody has registered it", key)
		}
		for range n {
			h.s.linear.drop(key, h.proposed, since)
		}
	}
}

// pushLog is the oracle of pushes.
type pushLog struct {
	s    *sim
	last map[*clientConn]uint64
	done map[*clientConn]map[[2]uint64]bool
}

func newPushLog(s *sim) *pushLog {
	return &pushLog{s: s, last: map[*clientConn]uint64{}, done: map[*clientConn]map[[2]uint64]bool{}}
}

// freed checks a FREED: ids ascend on a connection, and no page is named twice in one.
func (l *pushLog) freed(x *clientConn, p *protocol.FreedPush) {
	l.s.cover.Freed++
	if p.ID <= l.last[x] {
		l.s.fail("push", "FREED %d comes after %d", p.ID, l.last[x])
	}
	l.last[x] = p.ID
	seen := map[[2]uint64]bool{}
	for i := range p.Pages {
		k := [2]uint64{p.Pages[i].RegionID, p.Pages[i].KVOffset}
		if seen[k] {
			l.s.fail("push", "FREED %d names page %d of region %d twice", p.ID, k[1], k[0])
		}
		seen[k] = true
	}
}

// revoke checks a REVOKE: none comes over a connection on which it has been acknowledged, and answered.
func (l *pushLog) revoke(x *clientConn, p *protocol.RevokePush) {
	l.s.cover.Revokes++
	if l.done[x][[2]uint64{p.RegionID, p.Epoch}] {
		l.s.fail("push", "REVOKE of region %d, epoch %d comes again after it was acknowledged", p.RegionID, p.Epoch)
	}
}

// revoked notes that the acknowledgement of a REVOKE was answered.
func (l *pushLog) revoked(x *clientConn, region, epoch uint64) {
	if x == nil {
		return
	}
	if l.done[x] == nil {
		l.done[x] = map[[2]uint64]bool{}
	}
	l.done[x][[2]uint64{region, epoch}] = true
}
