package server

import (
	"encoding/binary"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"larder/meta"
	"larder/protocol"
	"larder/raft"
)

// Clock tells CLOCK_BOOTTIME in nanoseconds: it never goes back and runs on through a suspend.
type Clock interface {
	Boottime() int64
}

// Limits of the Master. Each bounds what clients can make it hold.
const (
	// MaxGroupBytes is where a group stops taking commands: at 100 MB/s the disk writes it in 10 ms. A single command
	// may be larger, up to a frame.
	MaxGroupBytes = 1 << 20
	// MaxGroupCommands bounds the commands of a group, and with them how long Apply holds the state.
	MaxGroupCommands = 4096
	// maxGroups are on their way at a time: one is written to the log while the one before it is applied and answered.
	// More would only be smaller.
	maxGroups = 2
	// maxQueuedBytes of commands wait in all; more are answered Busy.
	maxQueuedBytes = 64 << 20
	// maxClientRequests and maxClientBytes of one connection wait; its further requests stay in the socket.
	maxClientRequests = 256
	maxClientBytes    = 16 << 20 // two frames of the largest size
	// maxParked requests wait for a victim at the same time; more are answered Pending at once.
	maxParked = 4096
	// maxReplans parked requests are planned again in one round, so that a round takes about a millisecond.
	maxReplans = 64
	// busyRetry is when a client that was told Busy may try again.
	busyRetry = 20 * time.Millisecond
	// flushRecords changed records are written to the store at once, so that no lookup waits for a long encode: about
	// 2 ms.
	flushRecords = 8192
	// maxAllocTimeout is the longest that a REQUEST_ALLOC may ask to wait.
	maxAllocTimeout = 30 * time.Second
	// latencySample is of how many lookups one is timed.
	latencySample = 64
)

// Store is where a Master keeps its state between restarts; raft.StateStore implements it.
type Store = *raft.StateStore

// MasterConfig configures a Master.
type MasterConfig struct {
	Clock    Clock
	Store    Store
	Logger   *slog.Logger
	Counters *Counters
	// Propose appends a group to the log, if this member still leads in the term: see raft.Node.ProposeIn.
	Propose func(term uint64, data []byte) (index, inTerm uint64, err error)
	// Wake asks the shell to call Pump soon, from a goroutine of its own. It must not block, and must not call back.
	Wake func()
	// Leader returns the client address of the leader, "" if unknown, and its member id.
	Leader func() (addr string, id uint64)
	// Describe fills in what a HANDSHAKE's reply says of the cluster: members, pool id, server version.
	Describe func(r *protocol.HandshakeReply)
	// Host says who is on this host. Dead may be nil: then no process is ever proven dead.
	Host Host
	// Watch asks to have ProcessDied called once the process of a session on this host has ended. May be nil.
	Watch func(id meta.SessionID, p meta.Process)
	// Unwatch ends that. May be nil.
	Unwatch func(id meta.SessionID)
	// DeviceReady reports whether a device shows the generation that the index has for it: no region is given on one that
	// does not yet. It must not block. nil = all do.
	DeviceReady func(d meta.DeviceID, node string, generation uint64) bool
	// Restored says that the store was made from a snapshot, whose pool went on without it: until a NewIncarnation has
	// been applied a leader serves nothing, and takes no command but what a pool begins with.
	Restored bool
	// Blocks is told, in order, what each log entry has changed of the blocks of prefixes; nil instead of a list says that the
	// state was replaced by that of a snapshot. It must not block, and keep nothing of the list. nil = nobody wants to know.
	Blocks func(changes []meta.BlockChange)
	// Random returns 64 random bits.
	Random func() uint64

	MaxLease      time.Duration // one election timeout
	DefaultLease  time.Duration
	SessionTTL    time.Duration // longest, and for clients that name none
	FlushInterval time.Duration
	TouchInterval time.Duration
	TouchBudget   int // per second
	AllocTimeout  time.Duration
	// RevokeWatermark is the percentage of the pool in regions from which on a client that evicts more than it holds is
	// given a region of another's before it must wait for one. 0 = never.
	RevokeWatermark int
	RevokeInterval  time.Duration // 0 = revokeInterval
	// AwayTimeout is how long what lies on a device is kept whose home is gone, if it outlives that.
	AwayTimeout time.Duration

	// MaruLease is for how long what a client of Maru's was told stays where it is; it gives no lease back. 0 = there are none.
	MaruLease time.Duration
	// OwnerAlive reports whether the client of an instance of Maru's may have a connection; process is what its session
	// says of it. OwnerGrace is how long it may have none before its regions may be had. nil = they never may.
	OwnerAlive func(instance, process string) bool
	OwnerGrace time.Duration
}

// Host identifies this host's processes.
type Host struct {
	BootID       string // hexadecimal; "" = nothing is known
	PIDNamespace uint64
	Dead         func(pid int, start uint64) bool
}

// knows reports whether a process is of this host, so that its end can be seen from here.
func (h *Host) knows(p meta.Process) bool {
	return h.Dead != nil && p.Known() && p.BootID == h.BootID && p.PIDNamespace == h.PIDNamespace && p.PIDNamespace != 0
}

// dead reports whether a process is proven to be dead.
func (h *Host) dead(p meta.Process) bool {
	return h.knows(p) && h.Dead(int(p.PID), p.Start) //nolint:gosec // a pid
}

// Master is the deterministic heart of a server: the index, the leader's leases and plans, sessions, and the queue of
// commands. It has no goroutines, sockets, files or timers of its own. A shell drives it: the network server in
// production, a simulator in tests. It implements raft.Machine.
//
// Locks are taken in this order: proposing, state, mu, leases.mu. state is held for writing only by Apply, Flush's encoding and
// Restored. Nothing blocks while one of them is held, but another one.
type Master struct {
	cfg MasterConfig
	n   *Counters

	state   sync.RWMutex
	machine *meta.Machine
	gen     uint64 // counts machines: Restored makes a new one

	leases leases

	maruTokens maruTokens

	proposing sync.Mutex // held from the making of a group until it is proposed, so that both have one order

	mu       sync.Mutex
	leading  bool
	term     uint64
	queue    []*request
	queued   int // bytes in queue
	inflight map[seqKey]*request
	groups   []*group   // on their way, the oldest first: at most maxGroups
	parked   []*request // REQUEST_ALLOCs that wait for a victim
	retry    bool       // parked requests should be planned again
	settled  chan struct{}
	stampMS  uint64 // log time that a group is to be stamped with at least, also if there is nothing else to log
	sessions map[meta.SessionID]*session
	revokes  map[meta.RegionID]*revoke
	drains   map[meta.RegionID]int64 // draining regions: since when this leader knows
	pushID   uint64
	house    housekeeping
	nodes    nodes
	tiering  tiering
	grants   map[uint64]*grant // by the id that their GRANT has
	fences   map[meta.RegionID]*fence
	watches  nameWatches
	owners   owners

	serving atomic.Bool   // leading, for readers that hold no lock
	term64  atomic.Uint64 // the term, while leading
	// restored says that the index may be older than the pool, until it has a new incarnation: nothing is served.
	restored  atomic.Bool
	stampless atomic.Int64 // until when reads do not ask for stamps, since the log took none
	elected   atomic.Pointer[election]
	parkedN   atomic.Int64
	reports   reports
	// answering is how many requests the last group answered and others that waited then: negative once all answers
	// have been sent, so that one word tells.
	answering atomic.Int64

	devMu   sync.Mutex // innermost
	devices map[meta.DeviceID]*protocol.Device
	order   []meta.DeviceID // theirs, ascending
	// namesake is what the pool has its id from; see there.
	namesake string

	// Used by the goroutine that applies only.
	results   meta.Results
	lastFlush int64
	box       outbox
	untold    []*cleared // CLEARs that the next Tick tells of; guarded by mu
}

// seqKey names a request for ever.
type seqKey struct {
	session meta.SessionID
	seq     uint64
}

// election is where a leader's log time begins.
type election struct {
	logMS uint64 // log time at the election
	clock int64  // and the clock then
}

// NewMaster rebuilds the index from the store. The result follows; it leads when OnLeadership says so.
func NewMaster(cfg MasterConfig) (*Master, error) {
	machine, err := meta.Open(cfg.Store)
	if err != nil {
		return nil, fmt.Errorf("server: rebuild the index: %w", err)
	}
	if cfg.RevokeInterval == 0 {
		cfg.RevokeInterval = revokeInterval
	}
	m := &Master{
		cfg: cfg, n: cfg.Counters, machine: machine, gen: 1,
		inflight: map[seqKey]*request{}, sessions: map[meta.SessionID]*session{},
		revokes: map[meta.RegionID]*revoke{}, drains: map[meta.RegionID]int64{},
		grants: map[uint64]*grant{}, fences: map[meta.RegionID]*fence{},
		settled: make(chan struct{}),
	}
	m.nodes.reset()
	m.leases.touches.perSec = float64(cfg.TouchBudget)
	m.restored.Store(cfg.Restored)
	m.leases.reset(0, 0)
	m.lastFlush = m.now()
	return m, nil
}

// now is the clock in nanoseconds.
func (m *Master) now() int64 { return m.cfg.Clock.Boottime() }

// Serving reports whether this member leads and has applied an entry of its own term.
func (m *Master) Serving() bool { return m.serving.Load() }

// barred reports whether this member leads, but must not serve yet: see MasterConfig.Restored.
func (m *Master) barred() bool { return m.restored.Load() && m.term64.Load() != 0 }

// Term returns the term in which this member leads, 0 if it does not.
func (m *Master) Term() uint64 { return m.term64.Load() }

// Applied implements raft.Machine.
func (m *Master) Applied() uint64 {
	m.state.RLock()
	defer m.state.RUnlock()
	return m.machine.Applied()
}

// Apply implements raft.Machine. It is called by one goroutine at a time, and not beside Flush and Restored.
func (m *Master) Apply(index, term uint64, data []byte) error {
	m.results.Reset()
	g := m.ours(index, term, len(data) > 0)
	serving := m.serving.Load()
	// One that has led, and does not now, may still have connections of owners.
	m.results.WantEffects = m.elected.Load() != nil
	m.results.WantBlocks = m.cfg.Blocks != nil
	m.state.Lock()
	incarnation := m.machine.Incarnation()
	err := m.machine.Apply(index, data, &m.results)
	renewed := m.machine.Incarnation() != incarnation
	if err != nil {
		m.state.Unlock()
		return fmt.Errorf("server: %w", err)
	}
	if serving {
		// The slots that were freed must be ready for their next entries before anybody can read those.
		m.leases.mu.Lock()
		m.state.Unlock()
		m.settleLeases(g)
		m.leases.mu.Unlock()
	} else {
		m.state.Unlock()
	}
	if renewed {
		m.unbar()
	}
	if g != nil {
		m.finish(g)
	}
	if !serving {
		m.missFreed()
		m.tellBlocks()
		return m.flushIfDue()
	}
	m.pushFreed()
	m.tellWatches()
	m.box.flush()
	if n := m.answering.Load(); n > 0 {
		m.answering.Store(-n)
	}
	m.tellBlocks()
	return m.flushIfDue()
}

// tellBlocks passes on what a log entry has changed of blocks, once its requests have been answered.
func (m *Master) tellBlocks() {
	if len(m.results.Blocks) > 0 {
		m.cfg.Blocks(m.results.Blocks)
	}
}

// flushIfDue writes changed records to the store if there are many, or the interval has passed.
func (m *Master) flushIfDue() error {
	now := m.now()
	m.state.RLock()
	n := m.machine.DirtyLen()
	m.state.RUnlock()
	if n < flushRecords && (n == 0 || now-m.lastFlush < int64(m.cfg.FlushInterval)) {
		return nil
	}
	_, err := m.Flush()
	return err
}

// Flush implements raft.Machine.
func (m *Master) Flush() (applied uint64, err error) {
	b := m.cfg.Store.NewBatch()
	m.state.Lock()
	applied = m.machine.Flush(b)
	m.state.Unlock()
	m.lastFlush = m.now()
	if err := b.Commit(); err != nil {
		return 0, fmt.Errorf("server: flush the index: %w", err)
	}
	return applied, nil
}

// Restored implements raft.Machine: a snapshot has replaced the store's content.
func (m *Master) Restored(uint64) error {
	machine, err := meta.Open(m.cfg.Store)
	if err != nil {
		return fmt.Errorf("server: rebuild the index from a snapshot: %w", err)
	}
	m.state.Lock()
	m.machine = machine
	m.gen++
	m.state.Unlock()
	if m.cfg.Blocks != nil {
		m.cfg.Blocks(nil)
	}
	m.missAll()
	return nil
}

// OnLeadership tells the Master that its member leads, having applied everything of earlier terms, or that it no
// longer does. It is called between calls of Apply.
func (m *Master) OnLeadership(leads bool, term uint64) {
	if !leads {
		m.resign()
		return
	}
	now := m.now()
	m.state.RLock()
	m.mu.Lock()
	m.leading, m.term = true, term
	m.elected.Store(&election{m.machine.NowMS(), now})
	m.leases.reset(uint32(m.cfg.Random()), now+int64(m.cfg.MaxLease)) //nolint:gosec // any bits will do
	m.leases.maruGrace = now + int64(m.cfg.MaruLease)
	m.owners = owners{}
	m.nodes.reset()
	m.adoptSessions(now)
	m.adoptRegions(now)
	m.house = housekeeping{}
	m.tiering = tiering{paused: map[meta.DeviceID]int64{}, rests: map[meta.DeviceID]int64{}}
	m.mu.Unlock()
	m.state.RUnlock()
	m.cutMissed()
	m.term64.Store(term)
	m.serving.Store(!m.restored.Load())
	m.cfg.Logger.Info("leading", slog.Uint64("term", term))
	m.cfg.Wake()
}

// unbar takes note that an index which was restored has its new incarnation: from here on a leader serves it. Nothing of
// before is left, so there are no sessions to take over. It is called by Apply.
func (m *Master) unbar() {
	if !m.restored.Swap(false) {
		return
	}
	m.state.RLock()
	m.mu.Lock()
	leads := m.leading
	if leads {
		now := m.now()
		m.adoptSessions(now)
		m.adoptRegions(now)
	}
	m.serving.Store(leads)
	m.mu.Unlock()
	m.state.RUnlock()
}

// resign ends the term: the outcome of what is on its way is unknown, and its requests are answered so.
func (m *Master) resign() {
	m.serving.Store(false)
	m.term64.Store(0)
	m.mu.Lock()
	was := m.leading
	m.leading = false
	m.serving.Store(false) // unbar may have come in between
	lost := append([]*request(nil), m.queue...)
	lost = append(lost, m.parked...)
	for _, g := range m.groups {
		lost = append(lost, g.members...)
	}
	m.groups = nil
	m.queue, m.parked, m.queued, m.stampMS = nil, nil, 0, 0
	clear(m.inflight)
	clear(m.revokes)
	clear(m.drains)
	clear(m.fences)
	m.nodes.reset()
	asked := m.takeGrants(0, true)
	m.n.RevokesPending.Store(0)
	m.n.RegionsFenced.Store(0)
	m.announce()
	fault := m.notLeader()
	var box outbox
	m.failWatches(&box, &fault)
	m.mu.Unlock()
	for _, r := range lost {
		if r.client == nil && r.done == nil {
			continue
		}
		m.fail(r, &fault, &box)
	}
	box.flush()
	m.failGrants(asked, &fault)
	if was {
		m.cfg.Logger.Info("no longer leading", slog.Int("requests_cut_off", len(lost)))
	}
}

// announce wakes those that wait for the outcome of a group. The caller holds mu.
func (m *Master) announce() {
	close(m.settled)
	m.settled = make(chan struct{})
}

// Settled returns a channel that is closed when a group that is on its way now, or due for its stamp, has been applied
// or lost.
func (m *Master) Settled() <-chan struct{} {
	m.state.RLock()
	defer m.state.RUnlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.groups) == 0 && m.stampMS <= m.machine.NowMS() {
		return closedChannel
	}
	return m.settled
}

var closedChannel = func() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()

// notLeader is what a member that does not lead answers.
func (m *Master) notLeader() protocol.Error {
	addr, _ := m.cfg.Leader()
	if addr == "" {
		return protocol.Error{
			Code: protocol.CodeUnavailable, Message: "no leader is known at the moment: retry",
			RetryAfterMS: uint64(busyRetry / time.Millisecond),
		}
	}
	return protocol.Error{Code: protocol.CodeNotLeader, Message: "another member leads: retry there", Leader: addr}
}

// logTime is the log time in milliseconds: the last stamped one, moved on by this leader's own clock. The caller holds
// state for reading.
func (m *Master) logTime(now int64) uint64 {
	e := m.elected.Load()
	if e == nil { // this member has never led
		return m.machine.NowMS()
	}
	own := e.logMS + uint64(max(now-e.clock, 0))/uint64(time.Millisecond)
	return max(own, m.machine.NowMS())
}

// graceMS is what is left of a new leader's grace.
func (m *Master) graceMS(now int64) uint64 {
	m.leases.mu.Lock()
	defer m.leases.mu.Unlock()
	return msUp(m.leases.grace - now)
}

// randomBytes fills a UUID from the configured source.
func (m *Master) randomID() (id [16]byte) {
	binary.LittleEndian.PutUint64(id[:8], m.cfg.Random())
	binary.LittleEndian.PutUint64(id[8:], m.cfg.Random())
	return id
}
