package simtest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"testing/cryptotest"
	"testing/synctest"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/zeebo/xxh3"

	"larder/raft"
)

// Streams of random numbers: what one concern draws does not depend on what another does.
const (
	streamMix = iota + 1
	streamSetup
	streamNet
	streamFaults
	streamMaster
	streamSteps
	streamTiers
	streamNames
	streamMaru
	streamDisk   = 1 << 20
	streamClient = 1 << 30
)

// clientPlaces is the place of the first client, where partitions are concerned.
const clientPlaces = 1 << 32

// options is one run.
type options struct {
	seed  uint64
	ticks int
	// faults restricts the classes that the seed draws; skip leaves single faults out, by their number.
	faults classSet
	skip   map[int]bool
	// careless members answer reads without confirming that they lead: the oracles must find that out.
	careless bool
	// all has the run draw all classes that faults allows, and not half of them.
	all bool
	log func(format string, args ...any)
}

// sim is one run.
type sim struct {
	*sched
	opt                                      options
	mix                                      mix
	rngSetup, rngFaults, rngMaster, rngSteps *rand.Rand

	net      *network
	cluster  uint64
	founders []raft.Member
	members  map[uint64]*member
	nextID   uint64
	expelled map[uint64]bool
	clients  []*client
	nodes    []*client // see node
	marus    []*maruClient
	maruKeys []string // that they use, if there are any
	maruOps  map[uint64]*maruOp
	devices  []*device // those of the masters, then those of nodes
	keys     []string
	pids     uint64
	deadPIDs map[uint64]bool
	versions uint64

	named        uint64 // the last revision of a name that was acknowledged
	log          *history
	linear       *linear
	pushes       *pushLog
	questions    map[seqKey]*question
	pins         map[pinKey]bool
	proposals    map[uint64]int64
	leaders      map[uint64]uint64 // term -> member
	incarnations uint64
	old          *backup // a snapshot to restore
	past         []*linear

	quiet      bool  // the faults are over
	fired      int   // faults so far
	busyTo     int64 // until then clients do much with few keys
	linkSlow   int64
	linkSlowTo int64
	operator   *operator
	cover      *coverage
	hash       *xxh3.Hasher
	violation  *violation
	logger     *slog.Logger
	ticksRun   int64
}

// violation is what an oracle found first.
type violation struct {
	oracle, text string
	at           int64
}

// Error implements error.
func (v *violation) Error() string {
	return fmt.Sprintf("%s: at %.3f s: %s", v.oracle, float64(v.at)/1e9, v.text)
}

// result is what came of a run.
type result struct {
	violation *violation
	trace     uint64 // hash of all that happened
	cover     *coverage
	fired     int
	faults    classSet
	ticks     int
}

// simulate carries one run out.
func simulate(t *testing.T, o options) (res result) {
	t.Helper()
	defer watch(o)()
	cryptotest.SetGlobalRandom(t, o.seed) // raft draws its jitter there
	var s *sim
	bubble(t, func() {
		s = newSim(o)
		s.protected(s.live)
		s.end()
	})
	if s.violation == nil {
		for _, l := range append(s.past, s.linear) {
			if r := l.check(); r != porcupine.Ok {
				s.fail("linear", "the history of operations is %s", r)
			}
		}
	}
	s.cover.Seeds = 1
	if s.violation != nil {
		s.cover.Violations = 1
	}
	return result{s.violation, s.hash.Sum64(), s.cover, s.fired, s.mix.faults, int(s.ticksRun)}
}

// Of real time: what a run may take before it counts as stuck. With the race detector some take a minute, and longer on a
// busy machine.
const (
	runLimit  = 5 * time.Minute
	tickLimit = 20 * time.Millisecond
)

func (o options) limit() time.Duration { return runLimit + time.Duration(o.ticks)*tickLimit }

// watch ends the process if a run is stuck, and says which it is and where: nothing else can end it then. The caller
// calls the result when the run is over.
func watch(o options) (over func()) {
	limit := o.limit()
	timer := time.AfterFunc(limit, func() {
		debug.SetTraceback("none")
		panic(fmt.Sprintf("stuck: not over in %v\n%s\n%s", limit, o.line(commit()), restless()))
	})
	return func() { timer.Stop() }
}

// restless are the stacks of the goroutines that do not wait for an event of the simulation: one of them is why it does
// not go on.
func restless() string {
	all := make([]byte, 16<<20)
	all = all[:runtime.Stack(all, true)]
	var b strings.Builder
	for stack := range strings.SplitSeq(string(all), "\n\n") {
		if first, _, _ := strings.Cut(stack, "\n"); !strings.Contains(first, "(durable)") {
			b.WriteString(stack + "\n\n")
		}
	}
	return b.String()
}

// bubble runs fn where it can wait until nothing works in the background. What Pebble leaves behind when it ends the
// goroutine that opens a store, since a process ends then, stays behind here.
func bubble(t *testing.T, fn func()) {
	t.Helper()
	done := false
	defer func() {
		if r := recover(); r != nil && (!done || !strings.Contains(fmt.Sprint(r), "blocked goroutines remain")) {
			panic(r)
		}
	}()
	synctest.Test(t, func(*testing.T) {
		fn()
		done = true
	})
}

func (s *sim) stream(n uint64) *rand.Rand { return rand.New(rand.NewPCG(s.opt.seed, n)) }

func newSim(o options) *sim {
	s := &sim{
		sched: newSched(), opt: o, cluster: clusterID, members: map[uint64]*member{}, expelled: map[uint64]bool{},
		deadPIDs: map[uint64]bool{}, questions: map[seqKey]*question{}, pins: map[pinKey]bool{},
		maruOps:   map[uint64]*maruOp{},
		proposals: map[uint64]int64{}, leaders: map[uint64]uint64{}, cover: newCoverage(), hash: xxh3.New(), pids: 100,
		logger: discard,
	}
	s.mix = draw(s.stream(streamMix))
	if s.mix.faults &= o.faults; o.all {
		s.mix.faults = o.faults
	}
	s.mix.drawTiers(s.stream(streamTiers), o)
	s.mix.names = s.stream(streamNames).IntN(3) == 0 // for which nothing else that is drawn changes
	s.mix.drawMaru(s.stream(streamMaru))
	s.rngSetup, s.rngFaults = s.stream(streamSetup), s.stream(streamFaults)
	s.rngMaster, s.rngSteps = s.stream(streamMaster), s.stream(streamSteps)
	s.net = &network{s: s, rng: s.stream(streamNet), links: map[[2]uint64]*peerLink{}}
	s.log, s.linear, s.pushes = newHistory(s, 2), newLinear(s), newPushLog(s)
	for i := range s.mix.keys {
		s.keys = append(s.keys, fmt.Sprintf("%c%d", 'a'+i%4, i))
	}
	for i := range maruKeys * min(s.mix.marus, 1) {
		s.maruKeys = append(s.maruKeys, fmt.Sprint("maru", i))
	}
	for i := range s.mix.devices {
		s.devices = append(s.devices, s.newDevice(i))
	}
	for i, tier := range s.mix.nodes {
		size := headerSpan + s.mix.nodePages*pageSize
		s.devices = append(s.devices, &device{uuid: fmt.Sprintf("%032x", 0x100+i), size: size, mem: newMemory(size), tier: tier})
	}
	for i := range s.mix.members {
		s.founders = append(s.founders, memberRecord(uint64(i+1)))
	}
	s.nextID = uint64(s.mix.members) + 1
	s.operator = newOperator(s)
	return s
}

// live is the run itself: faults first, then peace.
func (s *sim) live() {
	for i := range s.mix.members {
		s.newMember(uint64(i + 1)).start()
	}
	s.clients = make([]*client, s.mix.clients)
	for i := range s.clients {
		s.after(s.rngSetup.Int64N(2*sec), s.world, func() { s.newClient(i) })
	}
	s.marus = make([]*maruClient, s.mix.marus)
	for i := range s.marus {
		s.after(s.rngSetup.Int64N(2*sec), s.world, func() { s.newMaru(i) })
	}
	s.nodes = make([]*client, len(s.mix.nodes))
	for i := range s.nodes {
		s.after(int64(i+1)*sec, s.world, func() { s.newNode(i) })
	}
	s.world.spawn(s.nemesis)
	end := int64(s.opt.ticks) * tick
	s.until(end)
	if s.violation == nil {
		s.peace()
	}
	s.ticksRun = s.now / tick
	s.cover.Ticks = uint64(s.ticksRun)
}

// until lets events happen up to a time, or a violation.
func (s *sim) until(end int64) {
	for s.violation == nil && s.step(end) {
		s.cover.Events++
	}
}

// protected turns a panic into a violation, as a crash of a server would be.
func (s *sim) protected(fn func()) {
	defer func() {
		if r := recover(); r != nil {
			s.fail("panic", "%v\n%s", r, debug.Stack())
		}
	}()
	fn()
}

// end stops everything.
func (s *sim) end() {
	s.quiet = true
	for c := range s.processes() {
		c.life.kill()
	}
	for _, c := range s.marus {
		if c != nil {
			c.life.kill()
		}
	}
	for _, m := range s.sorted() {
		s.cover.Syncs += m.disk.syncs
		if m.life != nil {
			m.life.kill()
		}
		if m.store != nil {
			m.abandon(m.store)
		}
	}
	s.world.kill()
}

// fail notes a violation; the first counts.
func (s *sim) fail(oracle, format string, args ...any) {
	if s.violation == nil {
		s.violation = &violation{oracle, fmt.Sprintf(format, args...), s.now}
		s.logf("VIOLATION %v", s.violation)
	}
}

// trace adds something that happened to the hash of the run.
func (s *sim) trace(what string, a, b uint64) {
	var buf [24]byte
	binary.LittleEndian.PutUint64(buf[:], uint64(s.now))
	binary.LittleEndian.PutUint64(buf[8:], a)
	binary.LittleEndian.PutUint64(buf[16:], b)
	_, _ = s.hash.WriteString(what) // hashing does not fail
	_, _ = s.hash.Write(buf[:])
	if s.opt.log != nil && what != "commit" && what != "sent" {
		s.logf("%s %d %d", what, a, b)
	}
}

func (s *sim) logf(format string, args ...any) {
	if s.opt.log != nil {
		s.opt.log("%10.4f "+format, append([]any{float64(s.now) / 1e9}, args...)...)
	}
}

// sent puts what masters say to clients into the trace.
func (s *sim) sent(c *serverConn, b []byte) {
	s.trace("sent", c.m.id, xxh3.Hash(b))
}

// faulty reports whether a class of faults is on, now.
func (s *sim) faulty(c class) bool { return !s.quiet && s.mix.faults.has(c) }

// fires counts a single fault, and reports whether it may happen: -skip leaves some out.
func (s *sim) fires(c class) bool {
	s.fired++
	if s.opt.skip[s.fired] {
		return false
	}
	s.cover.fault(c)
	s.trace("fault "+c.String(), uint64(s.fired), 0)
	return true
}

// processes are the clients and nodes that there are.
func (s *sim) processes() iter.Seq[*client] {
	return func(yield func(*client) bool) {
		for _, c := range slices.Concat(s.clients, s.nodes) {
			if c != nil && !yield(c) {
				return
			}
		}
	}
}

// sorted lists the members by id.
func (s *sim) sorted() (list []*member) {
	for id := range s.memberIDs() {
		list = append(list, s.members[id])
	}
	return list
}

func (s *sim) memberIDs() iter.Seq[uint64] {
	return slices.Values(slices.Sorted(maps.Keys(s.members)))
}

// memberAt finds a member by the address that clients know, 0 if there is none.
func (s *sim) memberAt(addr string) uint64 {
	for id := range s.memberIDs() {
		if addrOf(id) == addr {
			return id
		}
	}
	return 0
}

// leader is the running member that serves in the highest term, nil if there is none.
func (s *sim) leader() (best *member) {
	for _, m := range s.sorted() {
		if m.running() && m.master != nil && m.master.Serving() && (best == nil || m.master.Term() > best.master.Term()) {
			best = m
		}
	}
	return best
}

// leads checks that a term has one leader.
func (s *sim) leads(m *member, term uint64) {
	if other, ok := s.leaders[term]; ok && other != m.id {
		s.fail("leader", "members %d and %d both lead in term %d", other, m.id, term)
	}
	s.leaders[term] = m.id
}

func (s *sim) proposedAt(index uint64) int64 { return s.proposals[index] }

// processDead says whether a process on the masters' host is proven dead.
func (s *sim) processDead(pid uint64) bool { return s.deadPIDs[pid] }

// processDied tells masters that watch a process that it has ended.
func (s *sim) processDied(c *client) {
	if c.remote {
		return
	}
	for _, m := range s.sorted() {
		if !m.up() || m.watched == nil {
			continue
		}
		for _, id := range slices.Sorted(maps.Keys(m.watched)) {
			if m.watched[id].PID == c.pid {
				s.after(s.net.rng.Int64N(ms), m.life, func() {
					m.master.ProcessDied(id)
					m.poke()
				})
			}
		}
	}
}

func sortedCopy(list []string) []string {
	list = slices.Clone(list)
	slices.Sort(list)
	return list
}

// line is the command that repeats a run.
func (o options) line(commit string) string {
	var b bytes.Buffer
	fmt.Fprintf(&b, "go test ./integration/simtest -run '^TestSeed$' -seed=%d -ticks=%d", o.seed, o.ticks)
	if o.faults != allClasses {
		fmt.Fprintf(&b, " -faults=%s", o.faults)
	}
	if len(o.skip) > 0 {
		var n []string
		for _, i := range slices.Sorted(maps.Keys(o.skip)) {
			n = append(n, fmt.Sprint(i))
		}
		fmt.Fprintf(&b, " -skip=%s", strings.Join(n, ","))
	}
	if commit != "" {
		fmt.Fprintf(&b, " -version=%s", commit)
	}
	return b.String()
}
