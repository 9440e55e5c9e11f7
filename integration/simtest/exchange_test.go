package simtest

import "larder/protocol"

// Errors that no master sends.
const (
	codeLost    protocol.Code = 1000 + iota // no answer came
	codeQuit                                // the caller gave up
	codeExpired                             // the session ended
)

// reader reads a reply and returns its error, with code 0 for success.
type reader func(body []byte) (*protocol.Error, error)

// readError reads a reply of which only the error matters.
func readError(body []byte) (*protocol.Error, error) {
	var r protocol.HeartbeatReply
	err := r.Decode(body)
	return &r.Error, err
}

// readSuccess reads a SuccessReply.
func readSuccess(body []byte) (*protocol.Error, error) {
	var r protocol.SuccessReply
	err := r.Decode(body)
	return &r.Error, err
}

// final reports whether a repetition cannot succeed.
func final(e *protocol.Error) bool {
	return e.Code < 1000 && !e.Code.Retryable() && e.Code != protocol.CodeSessionExpired || e.Code >= codeQuit
}

// answeredNo reports whether an answer says that the request has not been carried out, and is not going to be.
func answeredNo(e *protocol.Error) bool {
	switch e.Code {
	case protocol.CodeNotLeader, protocol.CodeUnavailable, protocol.CodeTimeout, protocol.CodeInternal,
		protocol.CodePending, protocol.CodeTooOld, protocol.CodeSessionExpired, codeLost, codeQuit, codeExpired:
		return false // it may be in a log that a new leader brings to an end
	default:
		return true
	}
}

// attempt sends a request once. sent says that a master may have got it.
func (c *client) attempt(p *proc, x *clientConn, t protocol.Type, body []byte, wait int64, read reader) (
	sentAt int64, e *protocol.Error,
) {
	ss := c.sess
	cl := x.do(p, t, body, wait)
	if cl.body == nil {
		return cl.sentAt, &protocol.Error{Code: codeLost, Message: cl.lost}
	}
	e, err := read(cl.body)
	if err != nil {
		c.s.fail("wire", "a reply to %v does not decode: %v", t, err)
		x.lost("malformed")
		return cl.sentAt, &protocol.Error{Code: codeLost}
	}
	switch {
	case e.Code == 0:
		x.noLeader = 0
		if t != protocol.TypeExists && t != protocol.TypeBatchExists {
			ss.answered(cl.sentAt)
			c.lastAnswer = cl.sentAt
		}
		return cl.sentAt, nil
	case e.Code == protocol.CodeNotLeader:
		c.hint = c.s.memberAt(e.Leader)
		x.lost("redirected")
	case e.Code == protocol.CodeSessionExpired:
		x.lost("session expired")
	case e.Code == protocol.CodeUnavailable:
		if x.unavailable() {
			x.lost("knows of no leader")
		}
	case !e.Code.Retryable():
		ss.answered(cl.sentAt)
	}
	c.s.cover.Errors[e.Code.String()]++
	return cl.sentAt, e
}

// roundTrip repeats a request until it is answered for good, the session ends, or the caller's patience does. unknown
// says that it may have been carried out, now or later; or, of one that succeeded, by an earlier attempt.
func (c *client) roundTrip(p *proc, ss *csession, t protocol.Type, body func() []byte, wait, patience int64, read reader) (
	sentAt int64, unknown bool, e *protocol.Error,
) {
	until := c.s.now + patience
	for n := 0; ; n++ {
		if !p.waitFor(func() bool { return c.conn != nil && (ss == nil || c.sess == ss) || ss != nil && ss.ended }, until-c.s.now) {
			return 0, unknown, &protocol.Error{Code: codeQuit}
		}
		if ss != nil && (ss.ended || c.sess != ss) {
			return 0, unknown, &protocol.Error{Code: codeExpired}
		}
		sentAt, e = c.attempt(p, c.conn, t, body(), wait, read)
		if e == nil {
			return sentAt, unknown, nil
		}
		unknown = unknown || !answeredNo(e)
		if final(e) {
			return sentAt, unknown, e
		}
		if c.s.now >= until {
			return sentAt, unknown, &protocol.Error{Code: codeQuit}
		}
		c.s.cover.Retries++
		pause := c.backoff(n)
		if e.RetryAfterMS > 0 {
			pause = min(int64(e.RetryAfterMS)*ms, sec)
		}
		p.sleep(pause)
	}
}

// patience is how long a caller waits. Some clients give up soon, while faults last.
func (c *client) patience() int64 {
	if c.quits && c.s.faulty(clientQuits) && c.rng.IntN(6) == 0 && c.s.fires(clientQuits) {
		return c.rng.Int64N(1500 * ms)
	}
	return callerPatience
}

// callerPatience is how long a call goes on, as by the client package's default.
const callerPatience = 30 * sec

// mutation is a request that changes state.
type mutation struct {
	typ    protocol.Type
	mut    *protocol.Mutation
	body   func() []byte
	wait   int64
	read   reader
	what   []string // keys that it registers, or deletes
	del    bool
	op     *operation                       // what it is to do, for the oracle
	orphan func(body []byte, canceled bool) // hears of the outcome if the caller gave up
	left   bool                             // it did
}

// mutate makes a request under the next sequence number of a session. If the caller gives up, the outcome is found out
// in the background.
func (c *client) mutate(p *proc, ss *csession, m *mutation) *protocol.Error {
	if !p.waitFor(func() bool { return ss.ended || ss.nextSeq-ss.acked() < protocol.Window }, 1<<50) || ss.ended {
		return &protocol.Error{Code: codeExpired}
	}
	seq := ss.nextSeq
	ss.nextSeq++
	ss.open[seq] = true
	*m.mut = protocol.Mutation{Seq: seq, Acked: ss.acked()}
	c.s.asked(ss.id, seq, m)
	if m.op != nil {
		m.op.tries = append(m.op.tries, seqKey{ss.id, seq})
	}
	_, unknown, e := c.roundTrip(p, ss, m.typ, m.body, m.wait, c.patience(), m.keep(c, ss.id, seq))
	if e == nil || !unknown {
		delete(ss.open, seq)
		c.pool.doubtful = c.pool.doubtful || unknown
		return e
	}
	m.left = true
	c.s.cover.Unknown++
	body := m.body()
	c.later(func(p *proc) { c.settle(p, ss, seq, m, body) })
	return e
}

// keep lets the oracle of answers see each.
func (m *mutation) keep(c *client, session, seq uint64) reader {
	return func(body []byte) (*protocol.Error, error) {
		e, err := m.read(body)
		if err == nil {
			c.s.answered(session, seq, m, e, body)
		}
		return e, err
	}
}

// settle finds out what became of a request that was given up.
func (c *client) settle(p *proc, ss *csession, seq uint64, m *mutation, body []byte) {
	defer delete(ss.open, seq)
	told := func(b []byte, canceled bool) {
		if m.orphan != nil {
			m.orphan(b, canceled)
		}
		c.wakeAll()
	}
	for !ss.ended {
		var rep protocol.CancelReply
		cancel := func() []byte {
			req := protocol.CancelRequest{Seqs: []uint64{seq}}
			req.Acked = ss.acked()
			return req.Append(nil)
		}
		_, _, e := c.roundTrip(p, ss, protocol.TypeCancel, cancel, 0, 1<<50, func(b []byte) (*protocol.Error, error) {
			err := rep.Decode(b)
			return &rep.Error, err
		})
		c.s.cover.op("cancel", e)
		if e != nil {
			break
		}
		if len(rep.Applied) == 1 && !rep.Applied[0] {
			c.s.canceled(ss.id, seq)
			told(nil, true)
			return
		}
		var answer []byte
		read := m.keep(c, ss.id, seq)
		_, _, e = c.roundTrip(p, ss, m.typ, func() []byte { return body }, 0, 1<<50, func(b []byte) (*protocol.Error, error) {
			answer = b
			return read(b)
		})
		if e == nil {
			c.pool.doubtful = true
			told(answer, false)
			return
		}
		if final(e) {
			break
		}
	}
	told(nil, false)
}
