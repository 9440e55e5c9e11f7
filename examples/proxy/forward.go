package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"time"
)

const (
	// maxAttempts is how many instances are tried with a request before its answer begins: one of them may be down, two hardly
	// ever, and a request that kills instances must not go round all of them.
	maxAttempts = 3
	// instanceCooloff is how long an instance that could not be reached is passed over, as long as there is another.
	instanceCooloff = 5 * time.Second
	// maxAnswer bounds answers that are read at once: tokens, and where KV caches are; 64 MiB is 8 million tokens.
	maxAnswer = 64 << 20
	maxFault  = 64 << 10 // bytes of an answer with status 500 and above
	piece     = 32 << 10 // that is read and passed on at once
)

// call is a request to instances.
type call struct {
	q    *request
	path string
	body []byte
	at   *instance // the first to be tried
	role role      // of those that are tried after it
	rt   *route    // nil if this is not what was scheduled
	// whole has the answer read to its end before it counts as begun.
	whole bool
}

// stream is an answer that has begun: its first piece has come.
type stream struct {
	*job

	answer *http.Response
	buf    []byte // the next piece
	err    error  // what comes after it

	ctx    context.Context //nolint:containedctx // of the call, which ends with the answer
	watch  *time.Timer
	cancel context.CancelCauseFunc
}

// fault is an answer that another instance might give better.
type fault struct{ answer *answer }

// Error implements error.
func (e *fault) Error() string { return fmt.Sprintf("it answers with status %d", e.answer.status) }

// The reasons for which answers are given up.
var (
	errSilent  = errors.New("it was silent for too long")
	errTooLong = fmt.Errorf("its answer has more than %d bytes", maxAnswer)
)

// errGone says that the client has gone. Its status is nginx's, and seen by nobody.
var errGone = &apiError{status: 499, kind: "client_gone", message: "the client has gone"}

// begin calls an instance, and if it fails before the first piece of its answer others, within bounds.
func (p *Proxy) begin(ctx context.Context, c call) (*stream, error) {
	var tried []*instance
	for x := c.at; ; {
		s, err := p.try(ctx, c, x)
		if err == nil {
			return s, nil
		}
		p.failed(c.rt, x)
		if ctx.Err() != nil {
			return nil, errGone
		}
		p.blame(ctx, x, err)
		tried = append(tried, x)
		next := p.fleet.pick(c.role, tried, outstanding)
		if next == nil || len(tried) == maxAttempts {
			return nil, fmt.Errorf("%d instances failed, %s at last: %w", len(tried), x.id, err)
		}
		p.metrics.retries.WithLabelValues(x.id).Inc()
		x = next
	}
}

// blame passes over an instance for a while that could not be reached or broke off.
func (p *Proxy) blame(ctx context.Context, x *instance, err error) {
	if _, ok := errors.AsType[*fault](err); ok {
		return // it answers
	}
	if x.down.begin(instanceCooloff) {
		p.log.LogAttrs(ctx, slog.LevelWarn, "an instance fails", slog.String("instance", x.id), slog.Any("error", err))
	}
}

// try calls one instance.
func (p *Proxy) try(ctx context.Context, c call, x *instance) (*stream, error) {
	s := &stream{job: x.begin(), buf: make([]byte, piece)}
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	s.watch = after(p.cfg.FirstByteTimeout, func() { s.cancel(errSilent) })
	err := s.start(p.client, c)
	if err == nil && c.whole {
		err = s.readAll(p.cfg.StallTimeout)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	x.down.end()
	return s, nil
}

// start sends the request and reads the first piece of the answer.
func (s *stream) start(client *http.Client, c call) error {
	r, err := http.NewRequestWithContext(s.ctx, http.MethodPost, s.at.url+c.path, bytes.NewReader(c.body))
	if err != nil {
		return err
	}
	r.Header = c.q.header.Clone()
	r.Header["Idempotency-Key"] = nil             // not sent: it lets net/http try again if the connection was being closed as it was used
	if s.answer, err = client.Do(r); err != nil { //nolint:bodyclose // close does
		return s.cause(err)
	}
	if s.answer.StatusCode >= http.StatusInternalServerError {
		b, err := io.ReadAll(io.LimitReader(s.answer.Body, maxFault))
		if err != nil {
			return s.cause(err)
		}
		return &fault{&answer{s.answer.StatusCode, s.answer.Header.Get("Content-Type"), b}}
	}
	// vLLM sends the header of a stream before it has computed anything: the answer begins with its first byte.
	n, err := s.answer.Body.Read(s.buf)
	for n == 0 && err == nil {
		n, err = s.answer.Body.Read(s.buf)
	}
	s.watch.Stop()
	if n == 0 && errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if n == 0 {
		return s.cause(err)
	}
	s.first()
	s.buf, s.err = s.buf[:n], err
	return nil
}

// next reads another piece, if there is one: its error is io.EOF if not.
func (s *stream) next(stall time.Duration) error {
	if s.err != nil {
		return s.cause(s.err)
	}
	s.watch.Reset(stall)
	n, err := s.answer.Body.Read(s.buf[:cap(s.buf)])
	s.watch.Stop()
	if s.buf, s.err = s.buf[:n], err; n > 0 {
		return nil
	}
	return s.cause(err)
}

// readAll reads the answer to its end.
func (s *stream) readAll(stall time.Duration) error {
	all := bytes.Clone(s.buf)
	for {
		err := s.next(stall)
		if errors.Is(err, io.EOF) {
			s.buf = all
			return nil
		}
		if err != nil {
			return err
		}
		if all = append(all, s.buf...); len(all) > maxAnswer {
			return errTooLong
		}
	}
}

// cause is why the call was given up, if it was, and else the error. An answer that has ended has ended.
func (s *stream) cause(err error) error {
	if cause := context.Cause(s.ctx); cause != nil && !errors.Is(err, io.EOF) {
		return cause
	}
	return err
}

// close ends the answer, whether or not it has been read whole.
func (s *stream) close() {
	s.watch.Stop()
	s.cancel(nil)
	if s.answer != nil {
		_ = s.answer.Body.Close() // it has been read, or does not matter
	}
	s.end()
}

// exchange calls instances and gives the first whole answer, and who has given it.
func (p *Proxy) exchange(ctx context.Context, c call) (*answer, *job, error) {
	c.whole = true
	s, err := p.begin(ctx, c)
	if err != nil {
		return nil, nil, err
	}
	defer s.close()
	return &answer{s.answer.StatusCode, s.answer.Header.Get("Content-Type"), s.buf}, s.job, nil
}
