package simtest

import (
	"math/rand/v2"
	"slices"
	"strings"
)

// class is a kind of fault. A seed switches each off half of the time.
type class uint8

const (
	netDelay        class = iota // links are slow for a while
	netDrop                      // messages between members are lost
	netDuplicate                 // or come twice
	netReorder                   // or out of order
	netClog                      // a link holds everything back for a while
	partOne                      // one member is cut off
	partMajority                 // the members are split in two
	partOneWay                   // one link is cut in one direction
	partBridge                   // two halves that only one member can reach
	partClients                  // the members are split in two, and their clients with them; a leader may be paused too
	linkDelay                    // a client's connections are slow
	linkBreak                    // they break, noticed or not
	diskTorn                     // power loss tears the last block of the log
	diskRot                      // a bit flips while a member is down
	diskMisread                  // a read returns another block
	diskIO                       // the log's device fails
	diskFull                     // no space is left
	diskSlow                     // syncs take long
	powerLoss                    // a member loses its power, also in the middle of a write
	powerAll                     // all do
	memberPause                  // a member stands still
	memberPauseStep              // the leader stands still between two steps of a read
	memberWipe                   // a member loses its disk and joins under a new id
	memberTransfer               // leadership is handed over
	memberChange                 // a learner joins, is promoted; a member is removed
	memberLag                    // logs are cut so soon that members need snapshots
	clockSkew                    // clocks run at different speeds
	clockJump                    // a client's clock, or that of a member which follows, jumps ahead
	deviceLoss                   // a device loses its bytes and gets a new generation
	restore                      // the cluster is restored from an old snapshot
	version                      // the cluster's version is raised, and put back in vain
	clientPause                  // a client stands still, in the middle of whatever it does
	clientCrash                  // its process dies, and another takes its name
	clientDeaf                   // a client does not answer REVOKE
	clientSilent                 // a client does not renew its session for long
	clientQuits                  // a client gives calls up before they are answered, and undoes them
	nodeCrash                    // a node's process dies, and starts again after a while
	nodePause                    // a node stands still
	deviceDrain                  // a device is to be emptied, and is not any more
	classes
)

// tierClasses need nodes.
const tierClasses = classSet(1)<<nodeCrash | 1<<nodePause | 1<<deviceDrain

var classNames = [classes]string{
	netDelay: "net-delay", netDrop: "net-drop", netDuplicate: "net-duplicate", netReorder: "net-reorder",
	netClog: "net-clog", partOne: "part-one", partMajority: "part-majority", partOneWay: "part-one-way",
	partBridge: "part-bridge", partClients: "part-clients", linkDelay: "link-delay", linkBreak: "link-break", diskTorn: "disk-torn",
	diskRot: "disk-rot", diskMisread: "disk-misread", diskIO: "disk-io", diskFull: "disk-full", diskSlow: "disk-slow",
	powerLoss: "power-loss", powerAll: "power-all", memberPause: "member-pause", memberPauseStep: "member-pause-step",
	memberWipe: "member-wipe", memberTransfer: "member-transfer", memberChange: "member-change",
	memberLag: "member-lag", clockSkew: "clock-skew", clockJump: "clock-jump", deviceLoss: "device-loss",
	restore: "restore", version: "version", clientPause: "client-pause", clientCrash: "client-crash",
	clientDeaf: "client-deaf", clientSilent: "client-silent", clientQuits: "client-quits", nodeCrash: "node-crash",
	nodePause: "node-pause", deviceDrain: "device-drain",
}

// String returns the class's name, as -faults takes it.
func (c class) String() string { return classNames[c] }

// classSet is a set of classes.
type classSet uint64

const allClasses = classSet(1)<<classes - 1

func (s classSet) has(c class) bool         { return s>>c&1 != 0 }
func (s classSet) with(c class) classSet    { return s | 1<<c }
func (s classSet) without(c class) classSet { return s &^ (1 << c) }

func (s classSet) withoutAll(o classSet) classSet { return s &^ o }

// String writes a set as -faults takes it.
func (s classSet) String() string {
	if s == 0 {
		return "none"
	}
	var names []string
	for c := range classes {
		if s.has(c) {
			names = append(names, c.String())
		}
	}
	return strings.Join(names, ",")
}

// parseClasses reads what String wrote. The second result is the first name that is none.
func parseClasses(text string) (s classSet, bad string) {
	switch text {
	case "all":
		return allClasses, ""
	case "none":
		return 0, ""
	}
	for name := range strings.SplitSeq(text, ",") {
		i := slices.Index(classNames[:], name)
		if i < 0 {
			return 0, name
		}
		s = s.with(class(i))
	}
	return s, ""
}

// mix is what a seed draws: how large the cluster is, which faults there are and how often, and how busy clients are.
type mix struct {
	members  int
	clients  int
	workers  int // things that a client does at a time
	keys     int
	faults   classSet
	every    int64 // mean time between faults
	think    int64 // mean pause of a worker
	pages    uint64
	devices  int
	policy   string
	minAgeMS uint64
	keepLog  uint64
	push     bool
	hot      bool // few keys are used most, reads are slow, and free pages are used at once
	// Of messages between members, while the classes are on.
	drop, duplicate, reorder float64
	delay                    int64 // mean, of a healthy link
	putShare, deleteShare    int   // of 100 operations; the rest reads
	remote                   float64
	views                    int      // of 100 reads, those in place for longer than a lease lasts
	names                    bool     // clients use names
	nodes                    []string // tiers of their devices
	nodePages                uint64
	tierLow                  uint64
	away                     int64 // how long a disk may be
	marus                    int   // clients of Maru\'s
}

// draw makes a mix from a seed.
func draw(rng *rand.Rand) mix {
	m := mix{
		members: 3, clients: 2 + rng.IntN(4), workers: 1 + rng.IntN(3), keys: 16 + rng.IntN(64),
		every: sec + rng.Int64N(15*sec), think: 80*ms + rng.Int64N(500*ms),
		devices:  1 + rng.IntN(2),
		policy:   []string{"lru", "lru", "sieve", "s3fifo", "lfu", "fifo", "ttl", "length-aware"}[rng.IntN(8)],
		minAgeMS: rng.Uint64N(3) * 1000, keepLog: 50_000, push: rng.IntN(8) != 0, hot: rng.IntN(3) == 0,
		drop: rng.Float64() * 0.2, duplicate: rng.Float64() * 0.2, reorder: rng.Float64() * 0.3,
		delay: ms/10 + rng.Int64N(3*ms), putShare: 20 + rng.IntN(40), deleteShare: rng.IntN(25),
	}
	if rng.IntN(4) == 0 {
		m.remote = 0.25
	}
	if rng.IntN(3) == 0 {
		m.members = 5
	}
	// Values take 1.5 pages: from a pool that holds a fifth of them to one that holds all.
	share := 0.2 + rng.Float64()
	if m.hot {
		share, m.think = share/4, m.think/4
		if rng.IntN(2) == 0 {
			m.policy = "fifo" // which evicts what is being read, if leases do not keep it from that
		}
	}
	// Fewer regions than clients is a case of its own: most of what clients ask for is refused.
	least := m.clients + rng.IntN(3)
	if rng.IntN(10) == 0 {
		least = m.devices
	}
	m.pages = 8 * uint64(max((least+m.devices-1)/m.devices, int(share*1.5*float64(m.keys)/8)/m.devices))
	m.think *= int64(m.clients * m.workers) // what all do together is what costs time
	for c := range nodeCrash {              // for the others see drawTiers
		if rng.IntN(2) == 0 && (c != restore || rng.IntN(2) == 0) { // each restore throws much away
			m.faults = m.faults.with(c)
		}
	}
	if rng.IntN(20) == 0 {
		m.faults = classSet(0).with(restore)
	}
	if rng.IntN(20) == 0 {
		m.faults = allClasses
	}
	if m.faults.has(memberLag) {
		m.keepLog = 1 + rng.Uint64N(30)
	}
	m.views = []int{0, 3, 10, 30}[rng.IntN(4)]
	return m
}

// drawMaru has some runs have clients of Maru's, with room of their own, for which nothing else that is drawn changes.
func (m *mix) drawMaru(rng *rand.Rand) {
	if rng.IntN(3) == 0 {
		m.marus = 1 + rng.IntN(3)
		m.pages += 8 * rng.Uint64N(uint64(m.marus)+2)
	}
}

// drawTiers has some runs have nodes, for which nothing else that is drawn changes.
func (m *mix) drawTiers(rng *rand.Rand, o options) {
	m.faults = m.faults.withoutAll(tierClasses)
	if rng.IntN(3) > 0 || o.faults&tierClasses == 0 {
		return
	}
	for range 1 + rng.IntN(3) {
		m.nodes = append(m.nodes, []string{tierDRAM, tierSSD, tierSSD}[rng.IntN(3)])
	}
	m.nodePages = 8 * (1 + rng.Uint64N(m.pages/4))
	m.tierLow, m.away = 20+rng.Uint64N(81), 2*sec+rng.Int64N(20*sec)
	if m.remote == 0 {
		m.remote = 0.4
	}
	for c := nodeCrash; c < classes; c++ {
		if rng.IntN(4) > 0 || o.all {
			m.faults = m.faults.with(c)
		}
	}
	m.faults &= o.faults
}
