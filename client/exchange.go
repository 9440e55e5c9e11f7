package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"larder/protocol"
)

// exchange is a request and the reply to it.
type exchange interface {
	message
	// decode reads a reply. The error of the protocol is nil or has a code; err says that it cannot be read. The payload
	// is used again afterwards, unless decode puts another buffer in its place.
	decode(payload *[]byte) (pe *protocol.Error, err error)
}

// mutator is an exchange that changes state in a session.
type mutator interface {
	exchange
	// mutation is the part of the request that is filled in here.
	mutation() *protocol.Mutation
	// orphan is called once if the caller gives up while the outcome is unknown. The function it returns is called when
	// the outcome is known, in another goroutine; it must use nothing of the caller's.
	orphan() outcome
}

// outcome hears what became of an orphaned mutation: the reply's payload; or nil, and then whether the request is known
// never to be carried out. It is not if the session ended first, which ends whatever the request was about.
type outcome func(payload []byte, canceled bool)

// roundTrip sends a request until it is answered with success, or an error that a repetition does not mend. Within a
// session s, if that is not nil. It returns when the answered request was sent. If it fails, unknown says whether the
// request may have been carried out, now or later.
func (c *Client) roundTrip(ctx context.Context, s *session, t protocol.Type, ex exchange, wait int64) (
	sentAt int64, unknown bool, err error,
) {
	cl := newCall(t, ex, c.cfg.CallTimeout.Nanoseconds()+wait)
	defer freeCall(cl)
	// The first attempt needs no context of its own: the connection's timeout bounds it.
	cn := c.ready(s)
	if cn != nil {
		sent, err := c.attempt(ctx, cn, cl, ex)
		if err == nil {
			return cl.sentAt, false, nil
		}
		unknown = sent
		if final(err) || ctx.Err() != nil {
			return cl.sentAt, unknown && !answeredNo(err), err
		}
		if answeredNo(err) {
			unknown = false
		}
	}
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.cfg.Timeout)
		defer cancel()
	}
	more, err := c.retry(ctx, s, cl, ex, err)
	// What the last attempt was answered says nothing of the others, which may be waiting to be read.
	return cl.sentAt, unknown || more, err
}

// ready returns a connection of the session, or of any if s is nil; nil if there is none now.
func (c *Client) ready(s *session) *conn {
	l := c.link.Load()
	if l == nil {
		return nil
	}
	cn := l.pick()
	if s != nil && cn.sess.Load() != s {
		return nil
	}
	return cn
}

// retry repeats an attempt, until it succeeds, fails for good, or ctx is over.
func (c *Client) retry(ctx context.Context, s *session, cl *call, ex exchange, last error) (unknown bool, err error) {
	for n := 0; ; n++ {
		if last != nil {
			c.counters.retries.Add(1)
			if err := sleep(ctx, pause(last, n)); err != nil {
				return unknown, timedOut(err, last)
			}
		}
		cn, err := c.conn(ctx)
		if err != nil {
			return unknown, timedOut(err, last)
		}
		if s != nil && cn.sess.Load() != s {
			return unknown, ErrSessionExpired
		}
		sent, err := c.attempt(ctx, cn, cl, ex)
		if err == nil {
			return false, nil
		}
		unknown = unknown || sent && !answeredNo(err)
		if final(err) {
			return unknown, err
		}
		if ctx.Err() != nil {
			return unknown, timedOut(ctx.Err(), err)
		}
		last = err
	}
}

// attempt sends a request once, and acts on answers that concern the whole connection.
func (c *Client) attempt(ctx context.Context, cn *conn, cl *call, ex exchange) (sent bool, err error) {
	sent, err = cn.do(ctx, cl)
	if err != nil {
		return sent, err
	}
	pe, err := ex.decode(&cl.buf)
	if err != nil {
		cn.close(err)
		return true, err //nolint:wrapcheck // typed
	}
	s := cn.sess.Load()
	if pe == nil || pe.Code == protocol.CodeOK {
		cn.noLeader.Store(0)
		if byLeader(cl.typ) {
			s.answered(cl.sentAt)
			c.lastAnswer.Store(cl.sentAt)
		}
		return true, nil
	}
	c.counters.serverErrors.Add(1)
	switch pe.Code {
	case protocol.CodeNotLeader:
		c.redirect(cn, pe.Leader)
	case protocol.CodeUnavailable:
		if cn.unavailable() {
			cn.close(pe) // it may be cut off from the others, which may have a leader
		}
	case protocol.CodeSessionExpired:
		cn.close(pe) // the connector finds out whether the session can be resumed
	default:
		if !pe.Code.Retryable() && byLeader(cl.typ) {
			s.answered(cl.sentAt)
		}
	}
	e := *pe
	return true, &e
}

// byLeader reports whether only a leader answers requests of a type with success. What others answer says nothing of the
// session, whose deadline is the leader's.
func byLeader(t protocol.Type) bool {
	switch t {
	case protocol.TypeExists, protocol.TypeBatchExists, protocol.TypePrefixMatch, protocol.TypeListKeys,
		protocol.TypeListBlocks, protocol.TypeListAllocations, protocol.TypeGetStats, protocol.TypeGetUsage, protocol.TypeReportStats:
		return false
	default:
		return true
	}
}

// final reports whether a repetition of the same request cannot succeed.
func final(err error) bool {
	if errors.Is(err, errConnLost) || errors.Is(err, errCallTimeout) || errors.Is(err, errBacklog) {
		return false
	}
	if e, ok := errors.AsType[*protocol.Error](err); ok {
		return !e.Code.Retryable() && e.Code != protocol.CodeSessionExpired
	}
	return true
}

// answeredNo reports whether a master's answer says that the request has not been carried out, and is not going to be
// unless it is sent again.
func answeredNo(err error) bool {
	e, ok := errors.AsType[*protocol.Error](err)
	if !ok {
		return false
	}
	switch e.Code {
	case protocol.CodeNotLeader, protocol.CodeUnavailable, protocol.CodeTimeout, protocol.CodeInternal,
		protocol.CodePending, protocol.CodeTooOld, protocol.CodeSessionExpired:
		return false // it may be in a log that a new leader brings to an end
	default:
		return true
	}
}

// pause is how long to wait after an error before attempt n+1.
func pause(err error, n int) time.Duration {
	if e, ok := errors.AsType[*protocol.Error](err); ok {
		if e.RetryAfterMS > 0 {
			return min(time.Duration(millis(e.RetryAfterMS)), time.Second)
		}
		if e.Code == protocol.CodePending {
			return minBackoff // the master has waited already
		}
	}
	return backoff(n)
}

// timedOut says that ctx ended, and why the call had not succeeded until then.
func timedOut(err, last error) error {
	if last == nil {
		return err
	}
	return fmt.Errorf("%w (the last attempt: %w)", err, last)
}

// mutate makes a request that changes state, under the next sequence number of session s. wait is how long the master
// may take to decide, in nanoseconds. When it fails with an unknown outcome the request is undone in the background,
// and m.orphan hears how that went.
func (c *Client) mutate(ctx context.Context, s *session, t protocol.Type, m mutator, wait int64) error {
	seq, err := s.window.take(ctx, s.gone)
	if err != nil {
		return err
	}
	*m.mutation() = protocol.Mutation{Seq: seq, Acked: s.window.acked()}
	_, unknown, err := c.roundTrip(ctx, s, t, m, wait)
	if err == nil || !unknown {
		s.window.release(seq)
		return err
	}
	c.counters.unknown.Add(1)
	o := &orphan{s: s, seq: seq, typ: t, payload: m.appendTo(nil), told: m.orphan()}
	if !c.spawn(func() { c.settle(o) }) {
		o.told(nil, false)
	}
	return err
}

// orphan is a mutation whose caller gave up.
type orphan struct {
	s       *session
	seq     uint64
	typ     protocol.Type
	payload []byte // the request's
	reply   []byte
	told    outcome
}

// settle finds out what became of an orphan: first its sequence number is canceled; if it had been applied before,
// the master still remembers the answer. Until then the number counts as unanswered, so that it stays remembered.
func (c *Client) settle(o *orphan) {
	defer o.s.window.release(o.seq)
	cancel := &cancelMsg{req: protocol.CancelRequest{Seqs: []uint64{o.seq}}}
	for c.life.Err() == nil {
		cancel.req.Acked = o.s.window.acked()
		if _, _, err := c.roundTrip(c.life, o.s, protocol.TypeCancel, cancel, 0); err != nil {
			if errors.Is(err, ErrSessionExpired) || final(err) {
				break
			}
			continue
		}
		if len(cancel.rep.Applied) == 1 && !cancel.rep.Applied[0] {
			o.told(nil, true)
			return
		}
		if _, _, err := c.roundTrip(c.life, o.s, o.typ, o, 0); err == nil {
			o.told(o.reply, false)
			return
		} else if errors.Is(err, ErrSessionExpired) || final(err) {
			break
		}
	}
	o.told(nil, false)
}

func (o *orphan) appendTo(b []byte) []byte { return append(b, o.payload...) }

// decode keeps a reply whose contents o.told reads. All replies keep their error in the same fields.
func (o *orphan) decode(p *[]byte) (*protocol.Error, error) {
	var r protocol.HeartbeatReply
	if err := r.Decode(*p); err != nil {
		return nil, err //nolint:wrapcheck // typed
	}
	o.reply = append(o.reply[:0], *p...)
	return &r.Error, nil
}
