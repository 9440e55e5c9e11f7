package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"larder/client"
	"larder/protocol"
)

// answerTime bounds the answer to a push: the leader repeats a FENCE, and an owner asks again.
const answerTime = 5 * time.Second

// clientSession is a session that a client holds.
type clientSession struct {
	c      *client.Client
	h      home
	logger *slog.Logger
	ready  chan struct{} // closed when c is set: pushes may come before Open has returned
}

// openClient implements opener.
func openClient(ctx context.Context, cfg *sessionConfig, h home) (session, error) {
	s := &clientSession{h: h, logger: cfg.logger, ready: make(chan struct{})}
	ccfg := client.Config{
		Addrs: cfg.masters, Instance: cfg.instance, PageSize: cfg.pageSize, RegionSize: cfg.regionSize, Transfer: cfg.engine,
		Home: true, Logger: cfg.logger,
		OnSession: func(bool) { s.connected() }, OnGrant: s.onGrant, OnFence: s.onFence,
		OnTasks: func(protocol.TasksPush) { h.work() },
	}
	if cfg.discards {
		ccfg.Discard = h.discard
	}
	c, err := client.Open(ctx, ccfg)
	if err != nil {
		close(s.ready)
		return nil, err //nolint:wrapcheck // says what to do
	}
	s.c = c
	close(s.ready)
	s.connected()
	return s, nil
}

// connected passes on which session it is now.
func (s *clientSession) connected() {
	<-s.ready
	if s.c != nil {
		s.h.connected(s.c.Session())
	}
}

// onGrant answers a GRANT. What cannot be granted is said so, and why.
func (s *clientSession) onGrant(p protocol.GrantPush) {
	if <-s.ready; s.c == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), answerTime)
	defer cancel()
	req := protocol.GrantedRequest{ID: p.ID}
	e, err := s.h.grant(ctx, &p)
	if err != nil {
		req.Fault = err.Error()
		s.logger.Info("a grant is refused", slog.Uint64("region_id", p.RegionID), slog.Uint64("epoch", p.Epoch), slog.Any("error", err))
	}
	req.Endpoint = e
	if err := s.c.Granted(ctx, req); err != nil {
		s.logger.Info("a grant is not answered: its owner asks again", slog.Uint64("region_id", p.RegionID), slog.Any("error", err))
	}
}

// onFence answers a FENCE once it is true.
func (s *clientSession) onFence(p protocol.FencePush) {
	if <-s.ready; s.c == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), settleTime+answerTime)
	defer cancel()
	err := s.h.fence(ctx, &p)
	if err == nil {
		err = s.c.Fenced(ctx, protocol.FencedRequest(p))
	}
	if err != nil {
		s.logger.Info("a fence is not answered: it is repeated", slog.Uint64("region_id", p.RegionID), slog.Any("error", err))
	}
}

func (s *clientSession) pool() ([16]byte, uint64) { return s.c.Pool() }

func (s *clientSession) attach(ctx context.Context, req *protocol.AttachRequest) (*protocol.AttachReply, error) {
	reply, err := s.c.Attach(ctx, *req)
	if err != nil {
		return nil, err //nolint:wrapcheck // the caller wraps
	}
	s.c.UseDevice(reply.Device)
	return &reply, nil
}

func (s *clientSession) tasks(ctx context.Context, device, after, items uint64) (*protocol.TasksReply, error) {
	reply, err := s.c.Tasks(ctx, protocol.TasksRequest{Device: device, After: after, Limit: 1, Items: items})
	return &reply, err //nolint:wrapcheck // says what and why
}

func (s *clientSession) taskDone(ctx context.Context, req *protocol.TaskDoneRequest) (bool, error) {
	wanted, err := s.c.TaskDone(ctx, *req)
	if f, ok := errors.AsType[*client.Error](err); ok && f.Code == protocol.CodeCanceled {
		return false, nil
	}
	return wanted, err //nolint:wrapcheck // says what and why
}

func (s *clientSession) copyIn(
	ctx context.Context, t *protocol.Task, items []protocol.TaskItem, askedAt int64, leaseMS uint64,
) (got copied, err error) {
	list := make([]client.CopyItem, len(items))
	for i := range items {
		it := &items[i]
		list[i] = client.CopyItem{
			Key: it.Key, Version: it.Version, Slot: it.Slot, MoveFrom: t.MoveFrom,
			Lease: it.Lease, LeaseMS: leaseMS, AskedAt: askedAt,
			From: append([]protocol.Location{it.Location}, it.Copies...),
		}
	}
	results, err := s.c.CopyIn(ctx, list)
	if err != nil {
		return got, err //nolint:wrapcheck // says what and why
	}
	for i := range results {
		switch r := &results[i]; {
		case r.Outcome == client.CopyDone:
			got.copied++
			got.bytes += r.Bytes
		case r.Outcome == client.CopySkipped:
			got.skipped++
		case errors.Is(r.Err, client.ErrLease):
			return copied{}, r.Err // what has been copied is there already when it is tried again
		default:
			got.failed++
			s.logger.Debug("an entry is not copied", slog.Uint64("task", t.ID), slog.Any("error", r.Err))
		}
	}
	return got, nil
}

func (s *clientSession) close(ctx context.Context) error {
	if err := s.c.Close(ctx); err != nil {
		return fmt.Errorf("node: %w", err)
	}
	return nil
}
