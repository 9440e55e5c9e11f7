package simtest

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing/synctest"
	"time"

	pb "go.etcd.io/raft/v3/raftpb"

	"larder/meta"
	"larder/protocol"
	"larder/raft"
	"larder/server"
)

// How members are set up.
const (
	clusterID      = 0x51
	electionTicks  = 10
	electionSpan   = electionTicks * tick // what a lease lasts at most
	masterTick     = 25 * ms
	flushTicks     = 5
	spaceTicks     = 5
	sessionTTL     = 5 * sec
	hostBoot       = "00000000000000000000000000000001"
	hostNamespace  = 7
	processRounds  = 64 // of one event; the rest follows in the next
	transferRounds = 2 * electionTicks
)

// clock is CLOCK_BOOTTIME of one process: it runs a little fast or slow, and may have jumped ahead.
type clock struct {
	s      *sim
	start  int64
	ppm    int64 // parts per million that it is fast
	jumped int64
}

// Boottime implements server.Clock.
func (c *clock) Boottime() int64 { return c.start + c.s.now + c.s.now/1_000_000*c.ppm + c.jumped }

// steady is the clock without its jumps, on which pages rest in quarantine. A real clock jumps over a suspend, which takes
// as long for everybody else: no wait gets shorter by it. Here a clock jumps while no time passes, which is right for what
// may only end too late, such as a lease, and would break what may only end too early.
func (c *clock) steady() int64 { return c.Boottime() - c.jumped }

// length is how long in true time d lasts on this clock.
func (c *clock) length(d int64) int64 { return d - d/1_000_000*c.ppm }

// member is one master: its disk for as long as that lives, and the process that runs on it, if one does. It is the
// deterministic counterpart of server.Server and raft.Node around the real Core and Master.
type member struct {
	s           *sim
	id          uint64
	disk        *disk
	fs          *diskFS // as the process has mounted it
	compactions *compactions
	uncompacted bool // its store's compactions are disabled
	piled       int  // tables since then
	clock       clock
	joins       bool // its store is made by Join

	life   *actor // nil while it is down
	store  *raft.Store
	core   *raft.Core
	master *server.Master
	count  *server.Counters
	conns  []*serverConn
	reads  reads

	poked, pumping bool
	slowTo         int64 // syncs take slow until then
	slow           int64
	ticks          int
	stopped        error // why the storage says that it must stop
	watched        map[meta.SessionID]meta.Process
	starting       int // failed starts in a row
	rotten         bool
	restored       func() error // its store was made from a snapshot, and has no incarnation of its own yet
	lagging        bool
	cpu            int    // depth of enter
	at, hash       uint64 // what was applied, and the state's hash then
}

func (s *sim) newMember(id uint64) *member {
	m := &member{
		s: s, id: id, disk: newDisk(s.opt.seed, id),
		clock: clock{s: s, start: int64(1e12) + s.rngSetup.Int64N(1e12)},
	}
	if s.faulty(clockSkew) {
		m.clock.ppm = s.rngSetup.Int64N(8001) - 4000 // clocks differ by less than the 1% that leases allow for
		s.cover.fault(clockSkew)
	}
	s.members[id] = m
	return m
}

func addrOf(id uint64) string { return fmt.Sprintf("m%d:1", id) }

func memberRecord(id uint64) raft.Member {
	return raft.Member{ID: id, Addr: addrOf(id), Context: fmt.Appendf(nil, "c%d", id)}
}

func (m *member) up() bool { return m.life != nil && !m.life.dead }

// running says that it is up and not paused.
func (m *member) running() bool { return m.up() && !m.life.paused }

// flushAfter so many bytes that were written to the log, memory is flushed. The first memtable of a process is full after
// 256 KiB, of which what is not data takes less than half.
const flushAfter = 100 << 10

// enter runs what may use the disk. Pebble ends the goroutine on which its log fails, and waits for ever for what it
// cannot do, so that a disk which is going to fail, or to lose its power, is used on another one. When it returns, nothing
// works in the background any more. A process that has ended itself does nothing.
func (m *member) enter(fn func()) {
	if m.stopped != nil {
		return
	}
	m.disk.mu.Lock()
	risky := m.disk.sick || m.rotten || m.disk.crashIn != [2]int{}
	work := fn
	if m.cpu == 0 && m.store != nil && m.disk.logged > flushAfter {
		m.disk.logged = 0
		work = func() {
			m.note(m.store.Flush())
			fn()
		}
		m.piledUp()
	}
	m.disk.mu.Unlock()
	m.cpu++
	if risky && m.cpu == 1 {
		m.aside(work)
	} else {
		work()
	}
	m.cpu--
	if m.cpu == 0 {
		synctest.Wait()
		m.compact()
		m.disk.rest()
		m.fate()
	}
}

// maxPiled tables that nobody merges may lie in a store: writes stall at 32.
const maxPiled = 16

// piledUp counts a table of a store that is not compacted. When there are too many the disk is mended: reads come from
// the right places again, or another member takes the place of the one whose disk has rotted.
func (m *member) piledUp() {
	if !m.uncompacted {
		return
	}
	if m.piled++; m.piled != maxPiled {
		return
	}
	m.s.after(0, m.s.world, func() {
		switch {
		case m.s.members[m.id] != m || !m.up():
		case m.rotten:
			m.s.operator.swap(m)
		default:
			m.powerOff(100, false)
		}
	})
}

// compact runs what compactions the store asks for, one by one, unless the process is at its end.
func (m *member) compact() {
	for !m.disk.lost() && m.fs.failed() == nil && m.compactions.run() {
		synctest.Wait()
	}
}

// fate takes note of the storage's word that the process must end, once nothing works any more.
func (m *member) fate() {
	if err := m.fs.failed(); err != nil && m.stopped == nil {
		m.stopped = err
	}
}

// stuckAfter is how long, by the clock of Pebble's own timers, something may take before it counts as stuck.
const stuckAfter = time.Hour

// aside runs fn on a goroutine of its own. If the storage or a loss of power ends the process in the middle of it, it
// never comes back: the process does nothing more, and at the same time its end is dealt with.
func (m *member) aside(fn func()) {
	done := make(chan any, 1)
	go func() {
		var r any
		defer func() { done <- r }()
		defer func() { r = recover() }()
		fn()
	}()
	synctest.Wait()
	m.fate()
	if len(done) == 0 && m.stopped == nil && !m.disk.lost() {
		select {
		case r := <-done:
			done <- r
		case <-time.After(stuckAfter):
		}
		m.fate()
	}
	if len(done) > 0 {
		if r := <-done; r != nil && m.stopped == nil { // a process whose storage has failed is gone, whatever is unwound
			m.cpu = 0
			panic(r)
		}
		return
	}
	m.cpu = 1
	if m.stopped == nil && !m.disk.lost() {
		m.s.fail("storage", "member %d uses its disk, and never comes back", m.id)
	}
	life := m.life
	if life == nil {
		return
	}
	life.paused = true
	m.s.after(0, m.s.world, func() {
		if m.life == life && m.core != nil {
			m.settled()
		}
	})
}

// silent says that what the process does has no effect on the world: the power was lost a moment ago, or its storage
// told it to stop.
func (m *member) silent() bool { return m.disk.lost() || m.stopped != nil }

// start starts the process. It reports whether it runs.
func (m *member) start() bool {
	m.stopped, m.poked, m.pumping, m.ticks = nil, false, false, 0
	m.at, m.hash = 0, 0
	m.reads, m.watched, m.conns = reads{}, map[meta.SessionID]meta.Process{}, nil
	m.life = m.s.newActor(fmt.Sprintf("member %d", m.id))
	m.store, m.core, m.master = nil, nil, nil
	var err error
	ok := false
	m.enter(func() {
		err = m.open()
		ok = true
	})
	if !ok && err == nil {
		err = errors.Join(errors.New("the storage ended the start"), m.stopped)
	}
	if m.stopped != nil {
		err = errors.Join(err, m.stopped)
	}
	if m.disk.lost() {
		m.s.trace("crash in start", m.id, 0)
		m.powerOff(0, false)
		return false
	}
	if err != nil {
		m.refused(err)
		return false
	}
	m.starting = 0
	m.s.trace("start", m.id, m.core.Status().Applied)
	m.s.checkReplica(m)
	m.schedule()
	return true
}

// open opens the store and makes the process's parts.
func (m *member) open() (err error) {
	s := m.s
	defer func() {
		if err != nil && m.store != nil && m.stopped == nil {
			err = errors.Join(err, m.store.Close())
			m.store = nil
		}
	}()
	m.store = nil
	m.store, err = raft.OpenStore("/data", m.storeOptions())
	if err != nil {
		return err
	}
	if _, id := m.store.Identity(); id == 0 {
		if m.joins {
			err = m.store.Join(s.cluster, m.id)
		} else {
			err = m.store.Bootstrap(s.cluster, m.id, s.founders)
		}
		if err != nil {
			return err
		}
	}
	restored, done, err := m.store.TakeRestoredMarker()
	if err != nil {
		return err
	}
	if m.restored = nil; restored {
		m.restored = done
	}
	m.count = &server.Counters{}
	m.core = nil
	if m.master, err = server.NewMaster(m.config()); err != nil {
		return err
	}
	m.core, err = raft.NewCore(raft.CoreConfig{
		ID: m.id, ClusterID: s.cluster, ElectionTicks: electionTicks, Machine: machine{m.master, m}, Send: m.send,
		OnRead: m.readDone, OnLeadership: m.onLeadership, LogKeepEntries: s.mix.keepLog, Logger: s.logger,
	}, m.store)
	return err
}

func (m *member) storeOptions() raft.StoreOptions {
	fs := m.disk.mount()
	m.fs, m.compactions = fs, &compactions{}
	if m.uncompacted = m.rotten || m.disk.misreadOf > 0; m.uncompacted {
		m.piledUp() // what lies in the log goes to a table
	} else {
		m.piled = 0
	}
	return raft.StoreOptions{
		FS: fs, CacheBytes: 1 << 20, MemTableBytes: 256 << 10, BallastBytes: -1, MinFreeBytes: 1 << 20,
		FailStop: fs.fail, Logger: m.s.logger, CompactionScheduler: m.compactions,
		// A compaction that meets rot may panic on a goroutine of its own: there, a process would be gone.
		DisableAutomaticCompactions: m.uncompacted,
	}
}

// refused is what an operator does with a member that does not start: once more, since a read may have failed, and then
// it is replaced.
func (m *member) refused(err error) {
	s := m.s
	s.trace("refuses to start", m.id, 0)
	s.logf("member %d does not start: %v", m.id, err)
	m.life.kill()
	m.life = nil
	if m.store != nil {
		m.abandon(m.store)
		m.store, m.core, m.master = nil, nil, nil
	}
	if !m.rotten && s.cover.Faults[diskMisread.String()] == 0 && !storageFault(err) {
		s.fail("start", "member %d, whose disk is sound, does not start: %v", m.id, err)
		return
	}
	s.cover.Refusals++
	m.starting++
	m.disk.crash(100, false)
	if m.starting < 2 && !m.rotten {
		s.after(sec, s.world, func() { m.restart() })
		return
	}
	s.replace(m)
}

func storageFault(err error) bool { return strings.Contains(err.Error(), errIO.Error()) }

func (m *member) config() server.MasterConfig {
	s := m.s
	cfg := server.MasterConfig{
		Clock: &m.clock, Store: m.store.State(), Logger: s.logger, Counters: m.count,
		Propose: m.propose, Wake: m.wake, Leader: m.leader, Describe: m.describe,
		Host: server.Host{
			BootID: hostBoot, PIDNamespace: hostNamespace,
			Dead: func(pid int, _ uint64) bool { return s.processDead(uint64(pid)) },
		},
		Watch:       func(id meta.SessionID, p meta.Process) { m.watched[id] = p },
		Unwatch:     func(id meta.SessionID) { delete(m.watched, id) },
		DeviceReady: func(d meta.DeviceID, _ string, generation uint64) bool { return s.deviceReady(d, generation) },
		Random:      s.rngMaster.Uint64,
		Restored:    m.restored != nil,
		MaxLease:    time.Duration(electionSpan), DefaultLease: 500 * time.Millisecond, SessionTTL: time.Duration(sessionTTL),
		FlushInterval: 500 * time.Millisecond, TouchInterval: 200 * time.Millisecond, TouchBudget: 1000,
		AllocTimeout: 2 * time.Second, AwayTimeout: time.Duration(s.mix.away),
	}
	if s.mix.marus > 0 {
		cfg.MaruLease, cfg.OwnerGrace, cfg.OwnerAlive = time.Duration(maruLease), time.Duration(maruGrace), s.maruAlive
	}
	return cfg
}

// schedule starts the process's clocks.
func (m *member) schedule() {
	s := m.s
	var raftTick, tend func()
	raftTick = func() {
		m.raftTick()
		s.after(m.clock.length(tick), m.life, raftTick)
	}
	tend = func() {
		if !m.silent() {
			m.master.Tick()
		}
		s.after(m.clock.length(masterTick), m.life, tend)
	}
	s.after(s.rngSetup.Int64N(tick), m.life, raftTick)
	s.after(s.rngSetup.Int64N(masterTick), m.life, tend)
	m.poke()
}

func (m *member) raftTick() {
	m.ticks++
	m.core.Tick()
	m.reads.tick(m)
	if m.ticks%spaceTicks == 0 {
		m.store.PollSpace()
	}
	if m.ticks%flushTicks == 0 && !m.store.Space().Critical {
		m.enter(func() { m.note(m.core.Flush()) })
	}
	m.poke()
}

// poke makes the member work through what raft has ready. With a slow disk that takes long, and so comes late.
func (m *member) poke() {
	if m.poked || !m.up() {
		return
	}
	m.poked = true
	d := int64(0)
	if m.s.now < m.slowTo {
		d = m.slow
	}
	m.s.after(d, m.life, m.process)
}

func (m *member) process() {
	m.poked = false
	more := true
	for n := 0; more && n < processRounds && m.up() && !m.silent(); n++ {
		ok := false
		m.enter(func() {
			var err error
			if m.core.LeadTerm() != 0 {
				m.master.PumpAhead() // as raft.Node has it done when it looks for work
			}
			more, err = m.core.Process()
			m.note(err)
			ok = true
		})
		more = more && ok
	}
	if m.settled(); more && m.up() {
		m.poke()
	}
}

// settled looks what has become of the process after it has worked.
func (m *member) settled() {
	if !m.up() {
		return
	}
	switch {
	case m.disk.lost():
		m.powerOff(0, false)
		return
	case m.stopped != nil:
		m.halt(m.stopped)
		return
	case m.core.Removed():
		m.s.trace("removed", m.id, 0)
		m.s.retire(m)
		return
	}
	m.s.checkReplica(m)
	m.reads.applied(m)
	if m.core.LeadTerm() == 0 {
		m.reads.fenced, m.reads.deadline = false, 0
	}
	for _, c := range m.conns {
		if c.waits {
			c.p.wake()
		}
	}
}

// note takes note of an error of raft's: what concerns a sender only has no effect, anything else stops the member.
func (m *member) note(err error) {
	var bad *raft.BadMessageError
	if err == nil || errors.As(err, &bad) || errors.Is(err, raft.ErrSnapshotInvalid) || errors.Is(err, raft.ErrDiskFull) {
		return
	}
	if m.stopped == nil {
		m.stopped = err
	}
	m.poke()
}

// halt ends a process whose storage failed. It starts again from what the disk holds; what was not synced may be gone.
func (m *member) halt(err error) {
	s := m.s
	s.trace("halts", m.id, 0)
	s.logf("member %d halts: %v", m.id, err)
	if !m.rotten && s.cover.Faults[diskIO.String()] == 0 && s.cover.Faults[diskMisread.String()] == 0 {
		s.fail("storage", "member %d, whose disk is sound, stops: %v", m.id, err)
	}
	var lost *raft.LostDataError
	var corrupt *raft.CorruptionError
	if errors.As(err, &lost) || errors.As(err, &corrupt) {
		m.rotten = true
	}
	m.powerOff(s.rngFaults.IntN(101), false)
}

// powerOff ends the process, with the loss of what its disk had not synced, and starts it again after a while.
func (m *member) powerOff(keep int, torn bool) {
	m.down(keep, torn)
	s := m.s
	s.after(s.rngFaults.Int64N(5*sec), s.world, m.restart)
}

// down ends the process.
func (m *member) down(keep int, torn bool) {
	s := m.s
	m.disk.crash(keep, torn)
	s.cover.PowerLosses++
	s.trace("power off", m.id, uint64(keep))
	if m.life != nil {
		m.life.kill()
	}
	m.life = nil
	for _, c := range m.conns {
		c.reset(s.net.rng.IntN(3) > 0)
	}
	m.conns = nil
	if m.store != nil {
		m.abandon(m.store)
	}
	m.store, m.core, m.master = nil, nil, nil
}

// abandon closes a store whose disk is gone; errors are those of the disk. A process that has ended itself closes
// nothing, nor does one that the loss of power has stopped in the middle of something.
func (m *member) abandon(st *raft.Store) {
	m.disk.mu.Lock()
	lost := m.fs.lost
	m.disk.mu.Unlock()
	if !lost && !m.fs.gone.Load() {
		go func() {
			defer func() { _ = recover() }()
			_ = st.Close()
		}()
	}
	synctest.Wait()
}

// restart starts the process again, unless it runs or the member is gone.
func (m *member) restart() {
	if m.s.members[m.id] == m && !m.up() && !m.s.expelled[m.id] {
		m.start()
	}
}

// send is raft's way to the network.
func (m *member) send(msgs []*pb.Message) {
	if m.silent() {
		return
	}
	for _, msg := range msgs {
		if msg.GetType() == pb.MsgSnap {
			m.s.after(m.s.net.rng.Int64N(20*ms), m.life, func() { m.sendSnapshot(msg) })
			continue
		}
		m.s.net.send(m, msg, nil)
	}
}

// sendSnapshot streams the state to a follower.
func (m *member) sendSnapshot(msg *pb.Message) {
	var buf bytes.Buffer
	var err error
	var at *pb.SnapshotMetadata
	m.enter(func() { at, err = m.core.WriteSnapshot(&buf) })
	if m.silent() || m.settledAfter(err) {
		return
	}
	if err != nil {
		m.reportSnapshot(msg.GetTo(), false)
		return
	}
	msg.Snapshot = &pb.Snapshot{Metadata: at}
	m.s.net.send(m, msg, buf.Bytes())
}

func (m *member) settledAfter(error) bool {
	if m.disk.lost() || m.stopped != nil {
		m.settled()
		return true
	}
	return false
}

func (m *member) reportSnapshot(to uint64, ok bool) {
	if m.core != nil {
		m.core.ReportSnapshot(to, ok)
		m.poke()
	}
}

// propose is the Master's way into the log, as raft.Node.ProposeIn.
func (m *member) propose(in uint64, data []byte) (index, term uint64, err error) {
	if in != 0 && m.core.LeadTerm() != in {
		return 0, 0, &raft.NotLeaderError{Leader: m.core.Status().Leader}
	}
	index, term, err = m.core.Propose(data)
	if _, before := m.s.proposals[index]; err == nil && !before {
		m.s.proposals[index] = m.s.now
	}
	m.poke()
	return index, term, err
}

// wake is the Master's wish to be pumped.
func (m *member) wake() {
	if m.pumping || !m.up() {
		return
	}
	m.pumping = true
	m.s.after(m.s.net.rng.Int64N(ms/5), m.life, func() {
		m.pumping = false
		if !m.silent() {
			m.master.Pump()
			m.poke()
		}
	})
}

// leader implements server.MasterConfig.Leader.
func (m *member) leader() (addr string, id uint64) {
	if m.core == nil {
		return "", 0
	}
	id = m.core.Status().Leader
	if id == 0 || id == m.id && !m.master.Serving() {
		return "", id
	}
	return addrOf(id), id
}

func (m *member) describe(r *protocol.HandshakeReply) {
	r.RMAddress, r.ServerVersion, r.Pool = addrOf(m.id), "sim", "pool"
	if m.core == nil {
		return
	}
	st := m.core.Status()
	r.Leader = st.Leader
	for _, x := range st.Members {
		r.Members = append(r.Members, protocol.Member{ID: x.ID, Addr: addrOf(x.ID), Learner: x.Learner})
	}
}

func (m *member) onLeadership(leads bool, term uint64) {
	m.s.trace("leads", m.id, term)
	if m.silent() {
		return
	}
	m.master.OnLeadership(leads, term)
	if leads {
		m.s.cover.Leaders++
		m.s.leads(m, term)
		m.life.spawn(func(p *proc) { m.manage(p, term) })
	}
	for _, c := range m.conns {
		c.p.wake()
	}
}

// machine is the Master as raft drives it; what it applies is compared with what all others apply.
type machine struct {
	*server.Master
	m *member
}

// Apply implements raft.Machine.
func (x machine) Apply(index, term uint64, data []byte) error {
	s := x.m.s
	if x.m.silent() {
		return nil // the process is gone, and its state is thrown away
	}
	s.committed(x.m, index, term, data)
	return x.Master.Apply(index, term, data)
}

// do logs a command of the shell's own and waits for its result.
func (m *member) do(p *proc, cmd meta.Command) (result []byte, code protocol.Code) {
	done := false
	err := m.master.Do(cmd, func(c protocol.Code, b []byte) {
		done, code, result = true, c, append([]byte(nil), b...)
		p.wake()
	})
	if err != nil {
		return nil, protocol.CodeOf(err)
	}
	p.wait(func() bool { return done })
	return result, code
}

var discard = slog.New(slog.DiscardHandler)
