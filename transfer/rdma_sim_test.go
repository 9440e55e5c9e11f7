package transfer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// fabric is a network of simulated NICs that move real bytes, packet by packet, and keep the rules of RC queue pairs: a
// packet lands if both ends are connected with each other and the key is good at that moment, and whoever breaks a rule of
// libibverbs is taken note of.
type fabric struct {
	tb   testing.TB
	wg   sync.WaitGroup
	stop chan struct{}

	mu   sync.Mutex
	nics []*fabNIC
	late bool // packets of a WRITE whose queue pair fails are on their way still, and arrive
	gone time.Duration
}

const (
	packet  = 4 << 10
	lateFor = 3 * time.Millisecond
)

func newFabric(tb testing.TB) *fabric {
	tb.Helper()
	f := &fabric{tb: tb, stop: make(chan struct{}), gone: 20 * time.Millisecond}
	tb.Cleanup(func() {
		close(f.stop)
		f.wg.Wait()
		for _, n := range f.nics {
			require.Empty(tb, n.broken, n.name)
			require.Empty(tb, n.qps, "queue pairs of %s that nobody has destroyed", n.name)
			require.Empty(tb, n.regions, "memory of %s that nobody has deregistered", n.name)
		}
	})
	return f
}

// fabNIC is one NIC. The fabric's mu guards it.
type fabNIC struct {
	f       *fabric
	name    string
	gid     [16]byte
	pool    int // queue pairs it has
	events  chan PortEvent
	arrived chan struct{} // something may be in cq
	posted  chan struct{}

	qps     map[uint32]*fabQP
	regions map[uint32]*fabRegion
	keys    []uint32 // to give out next; random ones if there are none
	lastQPN uint32
	cq      []Completion
	port    PortState
	held    bool // it carries nothing
	stuck   bool // and its queue pairs do not flush
	most    int  // queue pairs that were allocated at once
	resets  int
	broken  []string
}

func (f *fabric) nic(name string) *fabNIC {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := &fabNIC{
		f: f, name: name, pool: 1 << 16, events: make(chan PortEvent, 16), arrived: make(chan struct{}, 1),
		posted: make(chan struct{}, 1), qps: map[uint32]*fabQP{}, regions: map[uint32]*fabRegion{}, port: PortActive,
	}
	f.nics = append(f.nics, n)
	n.gid[15], n.gid[14] = byte(len(f.nics)), byte(len(f.nics)>>8)
	f.wg.Go(n.run)
	return n
}

func (f *fabric) with(fn func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	fn()
}

func (f *fabric) byGID(gid [16]byte) *fabNIC {
	i := int(gid[15]) + int(gid[14])<<8 - 1
	if i < 0 || i >= len(f.nics) {
		return nil
	}
	return f.nics[i]
}

type fabRegion struct {
	n      *fabNIC
	mem    []byte
	access Access
	key    uint32
}

type fabQP struct {
	n      *fabNIC
	qpn    uint32
	psn    uint32
	state  string // INIT, RTS, ERR, gone
	remote QPAddress
	work   []WorkRequest
	at     int       // bytes of the first that have been moved
	waits  time.Time // its peer does not answer since
	polled int       // completions that nobody has polled
}

func nudge(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (n *fabNIC) Name() string             { return n.name }
func (n *fabNIC) NUMANode() int            { return -1 }
func (n *fabNIC) MaxMessage() int          { return 1 << 30 }
func (n *fabNIC) Events() <-chan PortEvent { return n.events }

func (n *fabNIC) PortState() (PortState, error) {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	return n.port, nil
}

func (n *fabNIC) CreateQP() (QueuePair, error) {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	if len(n.qps) >= n.pool {
		return nil, fmt.Errorf("ibv_create_qp: %w", syscall.ENOMEM)
	}
	n.lastQPN++
	q := &fabQP{n: n, qpn: n.lastQPN, psn: rand.Uint32() & bits24, state: "INIT"}
	n.qps[q.qpn] = q
	n.most = max(n.most, len(n.qps))
	return q, nil
}

func (n *fabNIC) Register(mem []byte, access Access) (Region, error) {
	if touch(mem) != nil {
		return nil, syscall.EFAULT // as a driver does that cannot pin a page
	}
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	r := &fabRegion{n: n, mem: mem, access: access, key: rand.Uint32()}
	if len(n.keys) > 0 {
		r.key, n.keys = n.keys[0], n.keys[1:]
	}
	n.regions[r.key] = r
	return r, nil
}

func (r *fabRegion) RKey() uint32 { return r.key }

func (r *fabRegion) Deregister() error {
	r.n.f.mu.Lock()
	defer r.n.f.mu.Unlock()
	if r.n.regions[r.key] == r {
		delete(r.n.regions, r.key)
	}
	return nil
}

func (n *fabNIC) Poll(out []Completion) (int, error) {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	k := copy(out, n.cq)
	for _, c := range n.cq[:k] {
		if q := n.qps[c.QPN]; q != nil {
			q.polled--
		}
	}
	n.cq = slices.Clone(n.cq[k:])
	return k, nil
}

func (n *fabNIC) Wait(ctx context.Context, out []Completion) (int, error) {
	for {
		if k, err := n.Poll(out); k > 0 || err != nil {
			return k, err
		}
		select {
		case <-n.arrived:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

func (n *fabNIC) Reset(context.Context) error {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	n.resets++
	for _, q := range n.qps {
		q.state = "gone"
	}
	clear(n.qps)
	clear(n.regions)
	n.cq, n.stuck = nil, false
	return nil
}

// flap has the port go down or come up.
func (n *fabNIC) flap(up bool) {
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	if n.port = PortDown; up {
		n.port = PortActive
		n.events <- EventPortUp
		return
	}
	n.events <- EventPortDown
}

func (n *fabNIC) hold(is bool) {
	n.f.with(func() { n.held = is })
	nudge(n.posted)
}

// run carries a packet of each queue pair in turn.
func (n *fabNIC) run() {
	for {
		n.f.mu.Lock()
		var busy []*fabQP
		for _, q := range n.qps {
			if q.state == "RTS" && len(q.work) > 0 {
				busy = append(busy, q)
			}
		}
		n.f.mu.Unlock()
		moved := false
		for _, q := range busy {
			n.f.mu.Lock()
			if q.state == "RTS" && len(q.work) > 0 && !n.held {
				moved = n.step(q) || moved
			}
			n.f.mu.Unlock()
		}
		if moved {
			select {
			case <-n.f.stop:
				return
			default:
			}
			continue
		}
		select {
		case <-n.posted:
		case <-time.After(time.Millisecond):
			if len(busy) == 0 {
				select {
				case <-n.posted:
				case <-n.f.stop:
					return
				}
			}
		case <-n.f.stop:
			return
		}
	}
}

// peer is the other end, nil if it does not answer.
func (q *fabQP) peer() *fabQP {
	n := q.n.f.byGID(q.remote.GID)
	if n == nil || n.port == PortDown || q.n.port == PortDown {
		return nil
	}
	p := n.qps[q.remote.QPN]
	if p == nil || p.state != "RTS" || p.remote.QPN != q.qpn || p.remote.PSN != q.psn || p.psn != q.remote.PSN {
		return nil
	}
	return p
}

// step carries a packet. It reports whether something has happened.
func (n *fabNIC) step(q *fabQP) bool {
	w := &q.work[0]
	local, ok := n.local(w)
	if !ok {
		q.complete(4, 1) // IBV_WC_LOC_PROT_ERR
		q.fail()
		return true
	}
	p := q.peer()
	if p == nil {
		if q.waits.IsZero() {
			q.waits = time.Now()
		}
		if time.Since(q.waits) < n.f.gone {
			return false
		}
		q.complete(StatusRetryExceeded, 1)
		q.fail()
		return true
	}
	q.waits = time.Time{}
	there := p.n.remote(w, len(local))
	if there == nil {
		q.complete(StatusRemoteAccess, 1)
		q.fail()
		p.fail()
		return true
	}
	end := min(q.at+packet, len(local))
	if w.Op == Read {
		n.scatter(w, q.at, there[q.at:end])
	} else {
		copy(there[q.at:end], local[q.at:end])
	}
	if q.at = end; end == len(local) {
		q.complete(StatusOK, 1)
	}
	return true
}

// local gathers the pieces of a work request.
func (n *fabNIC) local(w *WorkRequest) ([]byte, bool) {
	var all []byte
	for _, p := range w.Local {
		r := p.Region.(*fabRegion)
		if n.regions[r.key] != r || p.Offset+p.Length > len(r.mem) || w.Op == Read && r.access&LocalWrite == 0 {
			return nil, false
		}
		piece := r.mem[p.Offset : p.Offset+p.Length]
		if len(w.Local) == 1 {
			return piece, true
		}
		all = append(all, piece...)
	}
	return all, true
}

// scatter lands bytes of a READ in its pieces.
func (n *fabNIC) scatter(w *WorkRequest, at int, b []byte) {
	for _, p := range w.Local {
		if at >= p.Length {
			at -= p.Length
			continue
		}
		k := copy(p.Region.(*fabRegion).mem[p.Offset+at:p.Offset+p.Length], b)
		b, at = b[k:], 0
	}
}

// remote is what a work request means here, nil if its key is not good.
func (n *fabNIC) remote(w *WorkRequest, length int) []byte {
	r, need := n.regions[w.RKey], RemoteRead
	if w.Op == Write {
		need = RemoteWrite
	}
	if r == nil || r.access&need == 0 {
		return nil
	}
	off := w.Remote - uint64(addressOf(r.mem))
	if off > uint64(len(r.mem)) || uint64(length) > uint64(len(r.mem))-off {
		return nil
	}
	return r.mem[off : off+uint64(length)]
}

func (q *fabQP) complete(status CompletionStatus, k int) {
	for _, w := range q.work[:k] {
		q.n.cq = append(q.n.cq, Completion{ID: w.ID, QPN: q.qpn, Status: status})
		q.polled++
	}
	q.work, q.at = q.work[k:], 0
	nudge(q.n.arrived)
}

// fail takes a queue pair to ERR.
func (q *fabQP) fail() {
	if q.n.f.late && q.state == "RTS" && len(q.work) > 0 && q.work[0].Op == Write {
		q.arriveLate()
	}
	q.state = "ERR"
	if !q.n.stuck {
		q.complete(StatusFlushed, len(q.work))
	}
}

// arriveLate has the rest of the first WRITE land for a while, packet by packet, as long as the other end takes it.
func (q *fabQP) arriveLate() {
	w, at := q.work[0], q.at
	local, ok := q.n.local(&w)
	if !ok {
		return
	}
	rest := slices.Clone(local[at:])
	p := q.peer()
	q.n.f.wg.Go(func() {
		for begun := time.Now(); time.Since(begun) < lateFor; time.Sleep(lateFor / 100) {
			q.n.f.mu.Lock()
			if p != nil && p.state == "RTS" {
				if there := p.n.remote(&w, at+len(rest)); there != nil {
					copy(there[at:], rest)
				}
			}
			q.n.f.mu.Unlock()
		}
	})
}

func (q *fabQP) Address() QPAddress { return QPAddress{GID: q.n.gid, QPN: q.qpn, PSN: q.psn} }

func (q *fabQP) Connect(remote QPAddress) error {
	q.n.f.mu.Lock()
	defer q.n.f.mu.Unlock()
	if q.state == "gone" {
		return errors.New("the NIC was reset")
	}
	if q.state != "INIT" {
		q.n.broken = append(q.n.broken, "connect in "+q.state)
	}
	q.state, q.remote = "RTS", remote
	return nil
}

func (q *fabQP) Post(list []WorkRequest) (int, error) {
	q.n.f.mu.Lock()
	defer q.n.f.mu.Unlock()
	if q.state != "RTS" && q.state != "ERR" {
		q.n.broken = append(q.n.broken, "post in "+q.state)
		return 0, syscall.EINVAL
	}
	q.work = append(q.work, slices.Clone(list)...)
	if q.state == "ERR" {
		q.fail()
	}
	nudge(q.n.posted)
	return len(list), nil
}

func (q *fabQP) ToError() error {
	q.n.f.mu.Lock()
	defer q.n.f.mu.Unlock()
	if q.state == "gone" {
		q.n.broken = append(q.n.broken, "to ERR when gone")
		return syscall.EINVAL
	}
	q.fail()
	return nil
}

func (q *fabQP) Destroy() error {
	q.n.f.mu.Lock()
	defer q.n.f.mu.Unlock()
	if q.state != "ERR" || len(q.work) > 0 || q.polled > 0 {
		q.n.broken = append(q.n.broken, fmt.Sprintf("destroyed in %s with %d outstanding and %d unpolled", q.state, len(q.work), q.polled))
	}
	q.state = "gone"
	delete(q.n.qps, q.qpn)
	return nil
}

// allocated is how many queue pairs a NIC has.
func (n *fabNIC) allocated() (k int) {
	n.f.with(func() { k = len(n.qps) })
	return k
}
