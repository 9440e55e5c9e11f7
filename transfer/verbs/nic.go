//go:build rdma && cgo && linux

package verbs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"larder/transfer"
)

// NIC is one port of a device, for transfer engines. It implements transfer.NIC.
type NIC struct {
	name   string
	device string
	port   int
	depth  int
	events chan transfer.PortEvent
	most   int             // bytes of a work request
	life   context.Context //nolint:containedctx // it does not end: watching ends when the device is closed
	wg     sync.WaitGroup

	scratch [pollAtOnce]Completion // of Wait

	mu      sync.RWMutex
	o       *opened       // nil while it is reset, and after Close
	changed chan struct{} // closed when o is
	closed  bool
}

// opened is a device from Open to the next reset.
type opened struct {
	x     *Context
	d     *Domain
	cq    *CompletionQueue
	lists chan *List // that nobody uses
	gid   GID        // in use
	lid   uint16

	mu      sync.Mutex
	qps     map[*nicQP]struct{}
	regions map[*nicRegion]struct{}
}

const (
	// pollAtOnce is how many completions are taken at once.
	pollAtOnce = 64
	// listRequests is how many work requests are posted at once.
	listRequests = 64
	// spareLists bounds the lists that are kept: so many goroutines post to one device at once without making new ones.
	spareLists = 8
	// eventsKept is how many events of ports wait until somebody looks. More say nothing that these do not.
	eventsKept = 16
)

// OpenNICs opens the ports of that name, "mlx5_0" or "mlx5_0/2" for one but the first; without a name, the first port of
// each device of this machine. "none" is none. stop closes them, after the engine that uses them.
func OpenNICs(names []string) (nics []transfer.NIC, stop func() error, err error) {
	if len(names) == 0 {
		if names, err = Devices(); err != nil {
			return nil, nil, err
		}
	}
	var all []*NIC
	stop = func() (err error) {
		for _, n := range all {
			err = errors.Join(err, n.Close())
		}
		return err
	}
	for _, name := range names {
		if name == "none" && len(names) == 1 {
			break
		}
		n, err := OpenNIC(name, transfer.DefaultQueueDepth)
		if err != nil {
			return nil, nil, errors.Join(err, stop())
		}
		all = append(all, n)
		nics = append(nics, n)
	}
	return nics, stop, nil
}

// OpenNIC opens a port, see [OpenNICs]. depth is how many work requests a queue pair holds.
func OpenNIC(name string, depth int) (*NIC, error) {
	device, text, found := strings.Cut(name, "/")
	port := 1
	if found {
		var err error
		if port, err = strconv.Atoi(text); err != nil || port < 1 {
			return nil, fmt.Errorf("verbs: %q is no port: it is named as mlx5_0, or mlx5_0/2", name)
		}
	}
	n := &NIC{
		name: name, device: device, port: port, depth: depth, events: make(chan transfer.PortEvent, eventsKept),
		changed: make(chan struct{}), life: context.Background(),
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n, n.open()
}

// open opens the device. The mu is held.
func (n *NIC) open() error {
	o := &opened{lists: make(chan *List, spareLists), qps: map[*nicQP]struct{}{}, regions: map[*nicRegion]struct{}{}}
	if err := o.open(n); err != nil {
		return errors.Join(fmt.Errorf("verbs: open NIC %s: %w", n.name, err), o.close())
	}
	n.o = o
	close(n.changed)
	n.changed = make(chan struct{})
	n.wg.Go(func() { n.watch(o) })
	return nil
}

func (o *opened) open(n *NIC) (err error) {
	if o.x, err = Open(n.device); err != nil {
		return err
	}
	p, err := o.x.Port(n.port)
	if err != nil {
		return err
	}
	o.gid, _ = p.PickGID() // queue pairs fail where there must be one
	o.lid = p.LID
	n.most = int(min(p.MaxMessage, 1<<30))
	if o.d, err = o.x.NewDomain(); err != nil {
		return err
	}
	o.cq, err = o.x.NewCompletionQueue(transfer.MaxOutstanding)
	return err
}

// close closes all that was made. It may be called again after it has failed.
func (o *opened) close() error {
	if o.x == nil {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	var all error
	for q := range o.qps {
		all = errors.Join(all, q.q.Close())
	}
	for r := range o.regions {
		all = errors.Join(all, r.r.Close())
	}
	if o.cq != nil {
		all = errors.Join(all, o.cq.Close())
	}
	if o.d != nil {
		all = errors.Join(all, o.d.Close())
	}
	if all != nil {
		return all
	}
	for len(o.lists) > 0 {
		(<-o.lists).Close() // nobody posts any more
	}
	return o.x.Close()
}

// Close closes the device. The engine that uses the NIC must have been closed.
func (n *NIC) Close() error {
	n.mu.Lock()
	defer n.wg.Wait()
	defer n.mu.Unlock()
	if n.o == nil {
		return nil
	}
	if err := n.o.close(); err != nil {
		return err
	}
	n.o, n.closed = nil, true
	close(n.changed)
	n.changed = make(chan struct{})
	return nil
}

// Name implements transfer.NIC.
func (n *NIC) Name() string { return n.name }

// NUMANode implements transfer.NIC.
func (n *NIC) NUMANode() int {
	text, err := os.ReadFile(filepath.Join("/sys/class/infiniband", n.device, "device", "numa_node"))
	if err != nil {
		return -1
	}
	node, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return -1
	}
	return node
}

// MaxMessage implements transfer.NIC.
func (n *NIC) MaxMessage() int {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.most
}

// Events implements transfer.NIC.
func (n *NIC) Events() <-chan transfer.PortEvent { return n.events }

// now is the device as it is open now, and what is closed when that changes.
func (n *NIC) now() (o *opened, changed <-chan struct{}, err error) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if n.o == nil {
		err = ErrClosed
	}
	return n.o, n.changed, err
}

// PortState implements transfer.NIC.
func (n *NIC) PortState() (transfer.PortState, error) {
	o, _, err := n.now()
	if err != nil {
		return transfer.PortDown, err
	}
	p, err := o.x.Port(n.port)
	if err != nil || !p.Active {
		return transfer.PortDown, err
	}
	return transfer.PortActive, nil
}

// Reset implements transfer.NIC.
func (n *NIC) Reset(context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return ErrClosed
	}
	if n.o != nil {
		if err := n.o.close(); err != nil {
			return err
		}
		n.o = nil
	}
	return n.open()
}

// watch passes events on until the device is closed.
func (n *NIC) watch(o *opened) {
	for {
		e, err := o.x.NextEvent(n.life)
		if err != nil {
			return
		}
		switch {
		case e.Type == DeviceFatal || e.Type == CompletionsLost:
			n.tell(transfer.EventFatal)
		case e.Port != n.port:
		case e.Type == PortDown:
			n.tell(transfer.EventPortDown)
		case e.Type == PortActive || (e.Type == GIDChange || e.Type == LIDChange) && o.moved(n.port):
			n.tell(transfer.EventPortUp)
		}
	}
}

// tell passes an event on. If nobody has taken those before, one more would say nothing new but that the device failed.
func (n *NIC) tell(e transfer.PortEvent) {
	for {
		select {
		case n.events <- e:
			return
		default:
		}
		if e != transfer.EventFatal {
			return
		}
		select {
		case <-n.events:
		default:
		}
	}
}

// moved reports whether the port has another address than before.
func (o *opened) moved(port int) bool {
	p, err := o.x.Port(port)
	if err != nil {
		return true
	}
	gid, _ := p.PickGID()
	moved := gid != o.gid || p.LID != o.lid
	o.gid, o.lid = gid, p.LID
	return moved
}

// Poll implements transfer.NIC.
func (n *NIC) Poll(out []transfer.Completion) (int, error) {
	o, _, err := n.now()
	if err != nil {
		return 0, nil //nolint:nilerr // there are none
	}
	list := make([]Completion, min(len(out), pollAtOnce))
	k, err := o.cq.Poll(list)
	translate(out, list[:k])
	return k, err
}

// Wait implements transfer.NIC.
func (n *NIC) Wait(ctx context.Context, out []transfer.Completion) (int, error) {
	for {
		o, changed, err := n.now()
		if err == nil {
			var k int
			k, err = o.cq.Wait(ctx, n.scratch[:min(len(out), pollAtOnce)])
			translate(out, n.scratch[:k])
			if !errors.Is(err, ErrClosed) {
				return k, err
			}
		}
		select { // it is being reset
		case <-changed:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

func translate(out []transfer.Completion, list []Completion) {
	for i := range list {
		c := &list[i]
		status := transfer.CompletionStatus(c.Status) //nolint:gosec // verbs know two dozen
		out[i] = transfer.Completion{ID: c.ID, QPN: c.QPN, Status: status, Vendor: c.Vendor}
	}
}

// nicRegion implements transfer.Region.
type nicRegion struct {
	n *NIC
	o *opened
	r *Region
}

// Register implements transfer.NIC.
func (n *NIC) Register(memory []byte, access transfer.Access) (transfer.Region, error) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if n.o == nil {
		return nil, ErrClosed
	}
	var flags Access
	for from, to := range map[transfer.Access]Access{
		transfer.LocalWrite: LocalWrite, transfer.RemoteRead: RemoteRead, transfer.RemoteWrite: RemoteWrite,
	} {
		if access&from != 0 {
			flags |= to
		}
	}
	r, err := n.o.d.Register(memory, flags)
	if err != nil {
		return nil, err
	}
	region := &nicRegion{n, n.o, r}
	n.o.mu.Lock()
	defer n.o.mu.Unlock()
	n.o.regions[region] = struct{}{}
	return region, nil
}

// RKey implements transfer.Region.
func (r *nicRegion) RKey() uint32 { return r.r.RKey() }

// Deregister implements transfer.Region.
func (r *nicRegion) Deregister() error {
	if err := r.r.Close(); err != nil {
		return err
	}
	r.o.mu.Lock()
	defer r.o.mu.Unlock()
	delete(r.o.regions, r)
	return nil
}

// nicQP implements transfer.QueuePair.
type nicQP struct {
	o *opened
	q *QueuePair
}

// CreateQP implements transfer.NIC.
func (n *NIC) CreateQP() (transfer.QueuePair, error) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if n.o == nil {
		return nil, ErrClosed
	}
	q, err := n.o.d.NewQueuePair(n.o.cq, Options{Port: n.port, Depth: n.depth, SGE: transfer.MaxLocal})
	if err != nil {
		return nil, err
	}
	qp := &nicQP{n.o, q}
	n.o.mu.Lock()
	defer n.o.mu.Unlock()
	n.o.qps[qp] = struct{}{}
	return qp, nil
}

// Address implements transfer.QueuePair.
func (q *nicQP) Address() transfer.QPAddress {
	a := q.q.Address()
	out := transfer.QPAddress{LID: a.LID, QPN: a.QPN, PSN: a.PSN, MTU: uint16(a.MTU), Reads: uint8(a.Reads)} //nolint:gosec // 4096; bounded
	if a.GID.IsValid() {
		out.GID = a.GID.As16()
	}
	return out
}

// Connect implements transfer.QueuePair.
func (q *nicQP) Connect(remote transfer.QPAddress) error {
	a := Address{LID: remote.LID, QPN: remote.QPN, PSN: remote.PSN, MTU: int(remote.MTU), Reads: int(remote.Reads)}
	if remote.GID != [16]byte{} {
		a.GID = netip.AddrFrom16(remote.GID)
	}
	return q.q.Connect(a)
}

// Post implements transfer.QueuePair.
func (q *nicQP) Post(work []transfer.WorkRequest) (posted int, err error) {
	var l *List
	select {
	case l = <-q.o.lists:
	default:
		if l, err = NewList(listRequests, listRequests*transfer.MaxLocal); err != nil {
			return 0, err
		}
	}
	defer func() {
		l.Reset()
		select {
		case q.o.lists <- l:
		default:
			l.Close()
		}
	}()
	for len(work) > 0 && err == nil {
		part := work[:min(len(work), listRequests)]
		work = work[len(part):]
		l.Reset()
		if err = add(l, part); err != nil {
			return posted, err
		}
		var k int
		k, err = q.q.Post(l)
		posted += k
	}
	return posted, err
}

// add appends work requests to a list.
func add(l *List, work []transfer.WorkRequest) error {
	var pieces [transfer.MaxLocal]Piece
	for i := range work {
		w := &work[i]
		if len(w.Local) > len(pieces) {
			return fmt.Errorf("verbs: a work request of %d pieces, at most %d", len(w.Local), len(pieces))
		}
		for k, p := range w.Local {
			pieces[k] = Piece{Region: p.Region.(*nicRegion).r, Offset: p.Offset, Length: p.Length} //nolint:forcetypeassert // of this NIC
		}
		op := Read
		if w.Op == transfer.Write {
			op = Write
		}
		if err := l.Add(op, w.ID, Signaled, w.Remote, w.RKey, pieces[:len(w.Local)]...); err != nil {
			return err
		}
	}
	return nil
}

// ToError implements transfer.QueuePair.
func (q *nicQP) ToError() error { return q.q.Fail() }

// Destroy implements transfer.QueuePair.
func (q *nicQP) Destroy() error {
	if err := q.q.Close(); err != nil {
		return err
	}
	q.o.mu.Lock()
	defer q.o.mu.Unlock()
	delete(q.o.qps, q)
	return nil
}
