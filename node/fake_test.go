package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
	"larder/transfer"
)

// patience bounds every wait of a test for what must happen.
const patience = 30 * time.Second

// masters are a pool's masters, as devices see them.
type masters struct {
	t *testing.T

	mu       sync.Mutex
	poolID   [16]byte
	devices  map[string]*indexed // by uuid
	sessions []*fakeSession
	next     uint64
	attaches int
	tasks    []protocol.Task
	done     []protocol.TaskDoneRequest
	asked    []taskAsk
	canceled map[uint64]bool
	copies   func(items []protocol.TaskItem) (copied, error)
}

// indexed is a device in the index.
type indexed struct {
	id, generation uint64
	ready          protocol.AttachRequest // the last that was
	readies        int
	fresh          bool
}

func newMasters(t *testing.T) *masters {
	t.Helper()
	return &masters{t: t, poolID: [16]byte{1, 2, 3}, devices: map[string]*indexed{}, canceled: map[uint64]bool{}, next: 100}
}

// fakeSession is one device's session.
type fakeSession struct {
	m      *masters
	cfg    sessionConfig
	h      home
	number uint64
	closed bool
}

func (m *masters) open(_ context.Context, cfg *sessionConfig, h home) (session, error) {
	m.mu.Lock()
	m.next++
	s := &fakeSession{m: m, cfg: *cfg, h: h, number: m.next}
	m.sessions = append(m.sessions, s)
	m.mu.Unlock()
	h.connected(s.number)
	return s, nil
}

// last is the session that was opened last.
func (m *masters) last() *fakeSession {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.sessions[len(m.sessions)-1]
}

// of is the session of the device with a uuid.
func (m *masters) of(uuid string) *fakeSession {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range m.sessions {
		if strings.HasSuffix(s.cfg.instance, uuid) {
			return s
		}
	}
	return nil
}

// expire ends a session; its client opens another one by itself.
func (s *fakeSession) expire() {
	s.m.mu.Lock()
	s.m.next++
	s.number = s.m.next
	n := s.number
	s.m.mu.Unlock()
	s.h.connected(n)
}

func (s *fakeSession) pool() ([16]byte, uint64) { return s.m.poolID, 1 }

func (s *fakeSession) attach(_ context.Context, req *protocol.AttachRequest) (*protocol.AttachReply, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	s.m.attaches++
	d := s.m.devices[req.UUID]
	if d == nil {
		s.m.next++
		d = &indexed{id: s.m.next, generation: req.Generation}
		s.m.devices[req.UUID] = d
	}
	if d.generation == 0 || req.Generation == 0 && !req.Ready {
		s.m.next++
		d.generation, d.fresh = s.m.next, true
	}
	if req.Ready && req.Generation == d.generation {
		d.ready = *req
		d.readies++
	}
	return &protocol.AttachReply{Device: d.id, Generation: d.generation, Fresh: d.fresh}, nil
}

func (s *fakeSession) tasks(_ context.Context, device, after, items uint64) (*protocol.TasksReply, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	s.m.asked = append(s.m.asked, taskAsk{device, items})
	reply := &protocol.TasksReply{LeaseMS: 1000}
	for _, t := range s.m.tasks {
		if t.ID > after {
			t.Items = append([]protocol.TaskItem(nil), t.Items[t.Done:min(t.Total, t.Done+items)]...)
			reply.Tasks = append(reply.Tasks, t)
			break
		}
	}
	return reply, nil
}

// taskAsk is a question for tasks.
type taskAsk struct{ device, items uint64 }

func (s *fakeSession) taskDone(_ context.Context, req *protocol.TaskDoneRequest) (bool, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	s.m.done = append(s.m.done, *req)
	i := slices.IndexFunc(s.m.tasks, func(t protocol.Task) bool { return t.ID == req.Task })
	t := &s.m.tasks[i]
	if t.Done = req.Done; t.Done == t.Total || s.m.canceled[req.Task] {
		s.m.tasks = slices.Delete(s.m.tasks, i, i+1)
	}
	return !s.m.canceled[req.Task], nil
}

func (s *fakeSession) copyIn(_ context.Context, _ *protocol.Task, items []protocol.TaskItem, _ int64, _ uint64) (copied, error) {
	return s.m.copies(items)
}

func (s *fakeSession) close(context.Context) error {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	s.closed = true
	return nil
}

// device returns what the index has under a uuid, "" for the only one.
func (m *masters) device(uuid string) indexed {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, d := range m.devices {
		if uuid == "" || id == uuid {
			return *d
		}
	}
	return indexed{}
}

// start runs a node until the test ends, or stop is called, which returns what Run did.
func (m *masters) start(cfg Config) (n *Node, stop func() error) {
	m.t.Helper()
	cfg.Masters, cfg.open, cfg.Host = []string{"fake:1"}, m.open, "here"
	if cfg.Listen == nil {
		cfg.Listen = []string{"127.0.0.1:0"}
	}
	n, err := New(cfg)
	require.NoError(m.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	stop = sync.OnceValue(func() error {
		cancel()
		return errors.Join(<-ended, n.Close())
	})
	m.t.Cleanup(func() { _ = stop() })
	return n, stop
}

// within waits until try returns nil.
func within(t *testing.T, try func() error) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		if err = try(); err == nil {
			return
		}
	}
	require.NoError(t, err)
}

// ready waits until the node's devices are.
func ready(t *testing.T, n *Node) Status {
	t.Helper()
	var s Status
	within(t, func() error {
		if s = n.Status(); !s.Ready() {
			return fmt.Errorf("not ready: %+v", s)
		}
		return nil
	})
	return s
}

// peer is another process of the pool, which reaches devices by transfer.
type peer struct {
	t *testing.T
	e *transfer.Engine
}

func newPeer(t *testing.T) *peer {
	t.Helper()
	e, err := transfer.New(transfer.Config{Transports: []string{transfer.TransportTCP}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	return &peer{t, e}
}

// do moves bytes to or from a place in a device.
func (p *peer) do(op transfer.Op, e *protocol.Endpoint, at uint64, b []byte) error {
	p.t.Helper()
	seg, err := p.e.OpenDescriptor(transfer.Descriptor{Engine: e.Engine, Host: e.Host, Rails: e.Rails})
	require.NoError(p.t, err)
	defer seg.Close() //nolint:errcheck // it cannot fail
	batch, err := p.e.Submit([]transfer.Request{{
		Op: op, Segment: seg, Buffer: transfer.Handle{ID: uint32(e.Buffer), Generation: e.BufferGeneration},
		Offset: at - e.Offset, Local: b,
	}}, patience)
	if err != nil {
		return err
	}
	return batch.Wait(p.t.Context())
}

func (p *peer) read(e *protocol.Endpoint, at uint64, n int) ([]byte, error) {
	p.t.Helper()
	b := make([]byte, n)
	err := p.do(transfer.Read, e, at, b)
	return b, err
}
