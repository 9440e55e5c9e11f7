package raft

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"larder/cxl"
)

// Timing of a Node.
const (
	defaultTick       = 100 * time.Millisecond
	defaultFlushTicks = 5 // the state machine's flush interval: half a second of replay after a crash
	spaceTicks        = 2 // free space is measured every 200 ms: writes of 1 GB/s take 200 MB then, below the minimum
	// witnessInterval bounds how long entries under load are durable before the witness knows of them.
	witnessInterval = 50 * time.Millisecond
	// gatherMax bounds the pause before a sync, on slow disks too.
	gatherMax = 500 * time.Microsecond
	// stallLimit is how long a write to the disk may take before the member stops itself: long past every election, so
	// that the cluster went on without it, and so short that it has stopped within 20 s of the stall.
	stallLimit = 15 * time.Second
)

// Transport moves messages between members. TCP is the one for production;
// tests and simulators bring their own.
type Transport interface {
	// Start begins to receive.
	Start(h Handler) error
	// SetMembers names everybody who can be sent to; connections to others end.
	SetMembers(members []Member)
	// Send queues messages without blocking, or drops them and calls Handler.Unreachable.
	Send(msgs []*pb.Message)
	// SendSnapshot delivers m, whose stream write produces, and returns when the receiver has verified it.
	SendSnapshot(ctx context.Context, m *pb.Message, write func(io.Writer) error) error
	// Stop ends everything; no call of the Handler is running afterwards.
	Stop()
}

// Handler takes what a Transport receives. It is safe for concurrent use.
type Handler interface {
	// Receive takes a message. An error concerns its sender: close the connection.
	Receive(m *pb.Message) error
	// ReceiveSnapshot takes a MsgSnap and its stream.
	ReceiveSnapshot(m *pb.Message, r io.Reader) error
	// Unreachable says that messages to a member were lost.
	Unreachable(id uint64)
	// IsRemoved says that a member was removed and must be told so.
	IsRemoved(id uint64) bool
	// Expelled says that another member told us that we were removed.
	Expelled()
}

// NodeConfig configures a Node.
type NodeConfig struct {
	// Core configures the member. Send and OnRead are the Node's own.
	Core CoreConfig
	// Store holds the member's data. The caller closes it after Stop.
	Store *Store
	// Transport connects the members. Nil is allowed for a cluster of one only.
	Transport Transport
	// Tick is the length of a tick, 0 for 100 ms. The election timeout is Core.ElectionTicks of these.
	Tick time.Duration
	// Ticks delivers ticks about every Tick; nil for a ticker of the Node's own. A tick that comes while the loop is
	// busy is dropped: a stall must not be followed by a burst.
	Ticks <-chan time.Time
	// Boottime is CLOCK_BOOTTIME in nanoseconds; nil for the system's.
	Boottime func() int64
	// FlushTicks is the interval at which the Machine flushes; 0 for 5.
	FlushTicks int
	// Ahead is called by the loop of a leader each time that it is about to look for work: when the disk has become free,
	// entries that it has just written are still to be committed and applied. It may Propose; it must not block. May be
	// nil.
	Ahead func()
	// OnStop is called once, on a goroutine of its own, when the member stops because it must: ErrRemoved, a
	// LostDataError, a CorruptionError, another storage error. Not after Stop. May be nil.
	OnStop func(error)
}

// Node runs a Core: its methods are safe for concurrent use. A loop goroutine
// drives raft and writes the log, an apply goroutine calls the Machine, so that
// applying overlaps the next sync.
type Node struct {
	cfg  NodeConfig
	core *Core

	mu       sync.Mutex // guards core's raft, and the fields up to the blank line
	reads    readState
	fenced   bool  // no Confirm until the leadership that is being handed over is gone
	deadline int64 // the latest that any Confirm of this term may have given
	races    races
	sending  map[uint64]bool

	wake     chan struct{} // 1: the loop has something to do
	tickc    chan struct{} // 1: a tick to process
	queue    applyQueue
	done     chan struct{} // closed when the node has begun to stop
	stopOnce sync.Once
	stopErr  error // valid after done
	wg       sync.WaitGroup
	ctx      context.Context // ends with done; for snapshot streams
	cancel   context.CancelFunc

	leader    atomic.Uint64
	leads     atomic.Bool
	solo      atomic.Bool  // sole voter, leading, ready: no round is needed
	writing   atomic.Int64 // boottime at which the log write in progress began, 0 if none
	polling   atomic.Bool
	syncNanos atomic.Int64 // moving average of a log sync
	sample    latencySample
	ticks     broadcast
	applied   broadcast
	stats     nodeStats
	expected  atomic.Uint64 // number of proposals that gather waits for, 0 if it does not
	gathered  chan struct{}

	gatherTimer *time.Timer // the loop's own, as the next
	witnessAt   int64
	movedAt     int // the tick loop's own
}

// StartNode starts a member.
func StartNode(cfg NodeConfig) (*Node, error) {
	if cfg.Tick == 0 {
		cfg.Tick = defaultTick
	}
	if cfg.FlushTicks == 0 {
		cfg.FlushTicks = defaultFlushTicks
	}
	if cfg.Boottime == nil {
		cfg.Boottime = cxl.Boottime
	}
	n := &Node{
		cfg: cfg, wake: make(chan struct{}, 1), tickc: make(chan struct{}, 1), done: make(chan struct{}),
		sending: map[uint64]bool{}, gathered: make(chan struct{}, 1),
	}
	n.gatherTimer = newTimer()
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.queue.init()
	onMembers := cfg.Core.OnMembers
	cfg.Core.Send = n.route
	cfg.Core.OnRead = n.readDone
	cfg.Core.OnMembers = func(m []Member) { n.membersChanged(m, onMembers) }
	core, err := NewCore(cfg.Core, cfg.Store)
	if err != nil {
		n.cancel()
		return nil, err
	}
	core.runApply = n.runApply
	n.core = core
	cfg.Store.PollSpace()
	if cfg.Transport != nil {
		cfg.Transport.SetMembers(core.log.confs.newest().Members)
		if err := cfg.Transport.Start((*nodeHandler)(n)); err != nil {
			n.cancel()
			return nil, fmt.Errorf("raft: start the transport: %w", err)
		}
	}
	n.wg.Add(3)
	go n.tickLoop()
	go n.loop()
	go n.applyLoop()
	n.poke()
	return n, nil
}

// poke tells the loop that there is something to do.
func (n *Node) poke() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// tickLoop passes ticks on, drops those that the loop cannot take, and watches
// what may hang.
func (n *Node) tickLoop() {
	defer n.wg.Done()
	src := n.cfg.Ticks
	if src == nil {
		t := time.NewTicker(n.cfg.Tick) //nolint:forbidigo // the one clock of the package that is not injected
		defer t.Stop()
		src = t.C
	}
	for count := 0; ; count++ {
		select {
		case <-n.done:
			return
		case <-src:
		}
		select {
		case n.tickc <- struct{}{}:
		default:
			n.stats.ticksDropped.Add(1)
		}
		n.ticks.signal()
		if t := n.writing.Load(); t != 0 && n.cfg.Boottime()-t > int64(stallLimit) {
			n.cfg.Store.health.fail(ErrDiskStalled)
			n.fail(ErrDiskStalled)
		}
		if n.cfg.Store.health.failed.Load() {
			n.fail(n.cfg.Store.Healthy())
		}
		if count%spaceTicks == 0 && n.polling.CompareAndSwap(false, true) {
			go func() { // statfs may hang on a dead disk
				n.cfg.Store.PollSpace()
				n.polling.Store(false)
			}()
		}
		n.watchSpeed(count)
		if count%n.cfg.FlushTicks == n.cfg.FlushTicks-1 {
			n.queue.flush()
		}
	}
}

// loop is the goroutine that drives raft.
func (n *Node) loop() {
	defer n.wg.Done()
	defer n.fail(ErrStopped) // also when Pebble ended this goroutine
	for {
		select {
		case <-n.done:
			return
		case <-n.tickc:
			n.tick()
		case <-n.wake:
		}
		for {
			more, err := n.round()
			if err != nil {
				n.fail(err)
				return
			}
			if !more {
				break
			}
			select {
			case <-n.done:
				return
			case <-n.tickc:
				n.tick()
			default:
			}
		}
	}
}

func (n *Node) tick() {
	n.mu.Lock()
	n.core.Tick()
	n.readTick()
	n.mu.Unlock()
}

// gather lets callers whose proposals were just committed join the next sync. They
// are woken by the apply goroutine, and without this pause half of them would miss
// the sync that starts now and half the next: twice as many syncs for the same work.
// It ends when as many have come as were committed, or after half the time of a
// sync, so that it cannot cost more than it may save.
func (n *Node) gather(committed int, before uint64) {
	limit := min(time.Duration(n.syncNanos.Load()/2), gatherMax)
	want := before + uint64(committed) //nolint:gosec // not negative
	select {                           // of an earlier wait
	case <-n.gathered:
	default:
	}
	n.expected.Store(want)
	defer n.expected.Store(0)
	if n.stats.proposals.Load() >= want || limit <= 0 {
		return
	}
	n.gatherTimer.Reset(limit)
	select {
	case <-n.gathered:
	case <-n.gatherTimer.C:
	case <-n.done:
	}
	n.gatherTimer.Stop()
}

// take begins a round, sends what may be sent and hands over what may be applied,
// before anything is written.
func (n *Node) take() (*round, error) {
	n.mu.Lock()
	r, err := n.core.begin()
	n.publish()
	if r != nil && n.leads.Load() {
		if ents := r.append.GetEntries(); len(ents) > 0 {
			n.races.start(ents[len(ents)-1].GetIndex(), n.cfg.Boottime())
		}
	}
	n.mu.Unlock()
	if err != nil || r == nil {
		return nil, err
	}
	n.route(r.early)
	if r.lost != 0 {
		term := r.lost
		n.queue.push(applyItem{fn: func() error { n.core.lossApplied(term); return nil }})
	}
	if r.apply != nil {
		n.queue.push(applyItem{msg: r.apply})
	}
	return r, nil
}

// round handles one Ready, or two with one sync.
func (n *Node) round() (more bool, err error) {
	if n.cfg.Ahead != nil && n.leads.Load() {
		n.cfg.Ahead()
	}
	before := n.stats.proposals.Load()
	r, err := n.take()
	if err != nil || r == nil {
		return false, errors.Join(err, n.syncWitness())
	}
	var next *round
	// Not if half as much as was committed is on its way already: then there are callers enough to keep the disk busy.
	if r.apply != nil && r.spool == nil && n.leads.Load() && 2*len(r.append.GetEntries()) < len(r.apply.GetEntries()) {
		n.gather(len(r.apply.GetEntries()), before)
		if next, err = n.take(); err != nil {
			return false, err
		}
	}
	if err := n.write(r, next); err != nil {
		return false, err
	}
	removed := false
	written := n.cfg.Boottime()
	for _, r := range [...]*round{r, next} {
		if r == nil {
			continue
		}
		n.mu.Lock()
		n.races.end(written)
		late, err := n.core.finish(r)
		n.publish()
		removed = n.core.removed
		n.mu.Unlock()
		if err != nil {
			return false, err
		}
		n.route(late)
	}
	if removed {
		return false, ErrRemoved
	}
	return true, n.syncWitness()
}

// write makes one or two rounds durable. A snapshot syncs itself.
func (n *Node) write(r, next *round) error {
	start := n.cfg.Boottime()
	n.writing.Store(start)
	defer n.writing.Store(0)
	sync := r.sync
	if next != nil {
		sync = r.sync || next.sync
		if next.writes() && next.spool == nil { // one sync for both, by the one that comes last
			r.sync, next.sync = false, sync
		}
	}
	if err := n.core.persist(r); err != nil {
		return err
	}
	if next != nil {
		if err := n.core.persist(next); err != nil {
			return err
		}
	}
	if sync {
		took := n.cfg.Boottime() - start
		n.stats.syncs.observe(took)
		avg := n.syncNanos.Load()
		n.syncNanos.Store(avg + (took-avg)/8)
	}
	return nil
}

// syncWitness writes the witness if that is due.
func (n *Node) syncWitness() error {
	now := n.cfg.Boottime()
	if !n.core.witnessDue && now-n.witnessAt < int64(witnessInterval) {
		return nil
	}
	n.witnessAt = now
	n.writing.Store(now)
	defer n.writing.Store(0)
	n.core.witnessDue = false
	return n.cfg.Store.syncWitness()
}

// publish makes leadership visible without the lock, and ends what it ends.
func (n *Node) publish() {
	c := n.core
	n.leader.Store(c.soft.Lead)
	leads := c.leadTerm != 0
	if n.leads.Swap(leads) && !leads {
		n.fenced, n.deadline = false, 0
	}
	n.updateSolo()
}

// route sends messages, and starts streams for snapshots.
func (n *Node) route(msgs []*pb.Message) {
	if len(msgs) == 0 || n.cfg.Transport == nil {
		return
	}
	out := make([]*pb.Message, 0, len(msgs))
	for _, m := range msgs {
		if m.GetType() == pb.MsgSnap {
			n.startSnapshot(m)
			continue
		}
		out = append(out, m)
	}
	n.cfg.Transport.Send(out)
}

// fail stops the node. The first reason counts.
func (n *Node) fail(err error) {
	n.stopOnce.Do(func() {
		n.stopErr = err
		close(n.done)
		n.cancel()
		n.queue.close()
		n.leads.Store(false)
		n.solo.Store(false)
		if !errors.Is(err, ErrStopped) {
			n.cfg.Core.logger().Error("the member stops", slog.Any("error", err))
			if n.cfg.OnStop != nil {
				go n.cfg.OnStop(err)
			}
		}
	})
}

func (c *CoreConfig) logger() *slog.Logger {
	if c.Logger == nil {
		return slog.New(slog.DiscardHandler)
	}
	return c.Logger
}

// Done is closed when the member has stopped or begins to; Err says why.
func (n *Node) Done() <-chan struct{} { return n.done }

// Err is nil while the member runs, ErrStopped after Stop, else what stopped it.
func (n *Node) Err() error {
	select {
	case <-n.done:
		return n.stopErr
	default:
		return nil
	}
}

// Stop hands leadership to another member if there is one, within ctx, then
// stops, flushes the state machine and releases everything but the Store.
func (n *Node) Stop(ctx context.Context) error {
	if n.leads.Load() && !n.solo.Load() {
		err := n.TransferLeadership(ctx, 0)
		if err != nil {
			n.cfg.Core.logger().Warn("stopping without handing leadership over", slog.Any("error", err))
		}
	}
	n.fail(ErrStopped)
	if n.cfg.Transport != nil {
		n.cfg.Transport.Stop()
	}
	n.wg.Wait()
	for n.polling.Load() { // a measurement in progress uses the store
		select {
		case <-ctx.Done():
			return ctx.Err()
		default:
			time.Sleep(time.Millisecond) //nolint:forbidigo // bounded by ctx; there is no event to wait for
		}
	}
	if !errors.Is(n.stopErr, ErrStopped) {
		return n.stopErr
	}
	return n.core.finalFlush()
}

// finalFlush saves a restart the replay. Nothing else runs any more.
func (c *Core) finalFlush() error {
	able := c.err == nil && !c.store.health.failed.Load() && !c.store.health.critical.Load()
	if able {
		return c.Flush()
	}
	return nil // the log has everything
}

// Propose appends data to the leader's log, as Core.Propose does.
func (n *Node) Propose(data []byte) (index, term uint64, err error) { return n.ProposeIn(0, data) }

// ProposeIn is Propose for a proposal that was made on what this member knew as leader in a term: in a later one, though
// it leads again, nothing is appended and the error is a *NotLeaderError. Term 0 is any.
func (n *Node) ProposeIn(in uint64, data []byte) (index, term uint64, err error) {
	if n.Err() != nil {
		return 0, 0, ErrStopped
	}
	n.mu.Lock()
	if in != 0 && n.core.leadTerm != in {
		n.mu.Unlock()
		return 0, 0, &NotLeaderError{Leader: n.leader.Load()}
	}
	index, term, err = n.core.Propose(data)
	n.mu.Unlock()
	if err != nil {
		return 0, 0, err
	}
	if n.stats.proposals.Add(1) == n.expected.Load() {
		select {
		case n.gathered <- struct{}{}:
		default:
		}
	}
	n.sample.start(index, n.cfg.Boottime)
	n.poke()
	return index, term, nil
}

// Leader names the member believed to lead, 0 if none is known; self says that it
// is this one.
func (n *Node) Leader() (id uint64, self bool) { return n.leader.Load(), n.leads.Load() }

// Applied is the last index that the Machine has applied.
func (n *Node) Applied() uint64 { return n.core.apply.index.Load() }

// Status reports the member's state.
func (n *Node) Status() Status {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.core.Status()
}

// nodeHandler is the Node as its Transport sees it.
type nodeHandler Node

// Receive implements Handler.
func (h *nodeHandler) Receive(m *pb.Message) error {
	n := (*Node)(h)
	n.mu.Lock()
	if m.GetType() == pb.MsgAppResp && !m.GetReject() && n.isVoter(m.GetFrom()) {
		n.races.acked(m.GetIndex(), n.cfg.Boottime)
	}
	err := n.core.Step(m)
	broken := n.core.err
	n.mu.Unlock()
	if broken != nil {
		n.fail(broken)
		return ErrStopped
	}
	n.poke()
	return err
}

// ReceiveSnapshot implements Handler.
func (h *nodeHandler) ReceiveSnapshot(m *pb.Message, r io.Reader) error {
	n := (*Node)(h)
	sp, err := n.core.receiveSnapshot(m, r)
	if err != nil {
		return err
	}
	n.mu.Lock()
	err = n.core.stepSpool(m, sp)
	n.mu.Unlock()
	n.poke()
	return err
}

// Unreachable implements Handler.
func (h *nodeHandler) Unreachable(id uint64) {
	n := (*Node)(h)
	n.mu.Lock()
	n.core.ReportUnreachable(id)
	n.mu.Unlock()
	n.poke()
}

// IsRemoved implements Handler.
func (h *nodeHandler) IsRemoved(id uint64) bool {
	n := (*Node)(h)
	return n.core.log.confs.newest().removed(id)
}

// Expelled implements Handler.
func (h *nodeHandler) Expelled() { (*Node)(h).fail(ErrRemoved) }
