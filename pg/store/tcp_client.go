package store

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// dialTime bounds one attempt to reach the server, with its hello.
	dialTime = 2 * time.Second
	// minRedial and maxRedial bound the pause between attempts: ranks of a job start within seconds, a server that was started again
	// answers at once.
	minRedial = 5 * time.Millisecond
	maxRedial = 250 * time.Millisecond
	// byeTime bounds the wait for the answer to the last request.
	byeTime = 500 * time.Millisecond
)

var (
	errNoServer = errors.New("there is no connection")
	errSilent   = errors.New("the server has not answered for the lease")
)

// remote is a Store that a Server has.
type remote struct {
	addr  string
	lease time.Duration
	life  context.Context //nolint:containedctx // the store's own life, which its goroutines share
	end   context.CancelFunc
	wg    sync.WaitGroup

	confirmed atomic.Int64 // when the last answered request was sent, by now
	ids       atomic.Uint64

	mu      sync.Mutex
	link    *tcpLink      // nil while there is none
	changed chan struct{} // closed when link changes
	lost    chan struct{} // of the present lease
	lastErr error         // why there is no link
}

// tcpLink is one connection, and the lease that ends with it.
type tcpLink struct {
	r    *remote
	nc   net.Conn
	done chan struct{} // closed when the reader has ended

	wmu sync.Mutex // writes to nc
	out []byte

	mu      sync.Mutex
	over    bool
	calls   map[uint64]*tcpCall  // that have no answer yet, by id
	watches map[uint64]*tcpWatch // by id of the call that began them
}

// tcpCall is a request without an answer.
type tcpCall struct {
	sentAt int64
	answer chan *reply
}

// tcpWatch is what came for a watch.
type tcpWatch struct{ *backlog }

// Dial opens the store that a [Server] at an address, "host:port", has. A server that does not answer yet is waited for. While it
// cannot be reached calls fail; when another one is there its entries are those that count. The lease ends with the connection.
func Dial(ctx context.Context, addr string, lease time.Duration) (Store, error) {
	lease, err := checkLease(lease)
	if err != nil {
		return nil, err
	}
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	r := &remote{
		addr: addr, lease: lease, life: life, end: end, changed: make(chan struct{}), lost: make(chan struct{}), lastErr: errNoServer,
	}
	r.wg.Go(r.connector)
	ctx, cancel := withCallTime(ctx)
	defer cancel()
	if _, err := r.connected(ctx); err != nil {
		_ = r.Close() //nolint:contextcheck // has a time of its own
		return nil, err
	}
	return r, nil
}

// connector keeps a link up until the store is closed.
func (r *remote) connector() {
	for pause := minRedial; r.life.Err() == nil; {
		l, err := r.dial()
		if err != nil {
			r.mu.Lock()
			r.lastErr = err
			r.mu.Unlock()
			_ = sleep(r.life, pause/2+rand.N(pause/2)) //nolint:gosec // no secret
			pause = min(2*pause, maxRedial)
			continue
		}
		pause = minRedial
		r.setLink(l, nil)
		err = l.run()
		r.setLink(nil, err)
	}
}

// setLink makes l the link, and wakes who waits for one. nil takes the link away, and the lease is lost.
func (r *remote) setLink(l *tcpLink, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.link, r.lastErr = l, err
	close(r.changed)
	r.changed = make(chan struct{})
	if l == nil {
		close(r.lost)
		if r.life.Err() == nil { // or it stays closed
			r.lost = make(chan struct{})
		}
	}
}

// dial connects and says hello.
func (r *remote) dial() (*tcpLink, error) {
	ctx, cancel := context.WithTimeout(r.life, dialTime)
	defer cancel()
	var d net.Dialer
	nc, err := d.DialContext(ctx, "tcp", r.addr)
	if err != nil {
		return nil, err //nolint:wrapcheck // names the address
	}
	l := &tcpLink{
		r: r, nc: nc, done: make(chan struct{}), calls: make(map[uint64]*tcpCall), watches: make(map[uint64]*tcpWatch),
	}
	stop := context.AfterFunc(r.life, func() { _ = nc.Close() })
	defer stop()
	at := now()
	hello := request{Op: opHello, Version: wireVersion, LeaseMS: uint64(r.lease / time.Millisecond)} //nolint:gosec // positive
	var answer reply
	err = nc.SetDeadline(soon(dialTime))
	if err == nil {
		err = l.write(&hello, dialTime)
	}
	if err == nil {
		err = readFrame(nc, maxReply, new(bytes.Buffer), &answer)
	}
	if err == nil {
		err = answer.err()
	}
	if err == nil {
		err = nc.SetDeadline(time.Time{})
	}
	if err != nil {
		_ = nc.Close()
		return nil, err
	}
	r.confirm(at)
	return l, nil
}

// confirm notes that a request sent at that time was answered.
func (r *remote) confirm(at int64) {
	for {
		old := r.confirmed.Load()
		if old >= at || r.confirmed.CompareAndSwap(old, at) {
			return
		}
	}
}

// run reads until the connection ends, and returns why.
func (l *tcpLink) run() error {
	ended := make(chan error, 1)
	go func() { ended <- l.read() }()
	tick, stop := every(l.r.lease / beats)
	defer stop()
	var why error
	closed := l.r.life.Done()
	for {
		select {
		case err := <-ended:
			return errors.Join(why, err)
		case <-closed:
			_ = l.nc.Close()
			closed = nil
		case <-tick:
			if l.r.Confirmed() > l.r.lease {
				why = errSilent
				_ = l.nc.Close()
				continue
			}
			l.beat()
		}
	}
}

// beat renews the lease. The reader takes the answer.
func (l *tcpLink) beat() {
	id := l.r.ids.Add(1)
	l.call(id, &tcpCall{sentAt: now(), answer: make(chan *reply, 1)}, nil)
	if l.write(&request{ID: id, Op: opBeat}, l.r.lease) != nil {
		_ = l.nc.Close()
	}
}

// call enters a call, and the watch that it begins if it does. It reports false if the connection has ended.
func (l *tcpLink) call(id uint64, c *tcpCall, w *tcpWatch) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return false
	}
	l.calls[id] = c
	if w != nil {
		l.watches[id] = w
	}
	return true
}

func (l *tcpLink) forget(id uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.calls, id)
	delete(l.watches, id)
}

func (l *tcpLink) write(req *request, limit time.Duration) (err error) {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	if l.out, err = appendFrame(l.out[:0], req); err != nil {
		return err
	}
	if err := l.nc.SetWriteDeadline(soon(limit)); err != nil {
		return err //nolint:wrapcheck // the connection's
	}
	_, err = l.nc.Write(l.out)
	return err //nolint:wrapcheck // the connection's
}

// read takes replies until the connection ends.
func (l *tcpLink) read() (err error) {
	defer func() {
		_ = l.nc.Close()
		l.mu.Lock()
		l.over = true
		l.mu.Unlock()
		close(l.done)
	}()
	in := bufio.NewReader(l.nc)
	var buf bytes.Buffer
	for {
		r := new(reply)
		if err := readFrame(in, maxReply, &buf, r); err != nil {
			return err
		}
		l.take(r)
	}
}

// take hands a reply to who waits for it.
func (l *tcpLink) take(r *reply) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(r.Changes) > 0 {
		if w := l.watches[r.ID]; w != nil {
			w.add(r.Changes...)
		}
		return
	}
	c := l.calls[r.ID]
	if c == nil {
		return // nobody waits for it any more
	}
	l.r.confirm(c.sentAt)
	delete(l.calls, r.ID)
	c.answer <- r // has room for the only one
}

// connected returns the link. It waits while there is none.
func (r *remote) connected(ctx context.Context) (*tcpLink, error) {
	for {
		r.mu.Lock()
		l, changed, last := r.link, r.changed, r.lastErr
		r.mu.Unlock()
		if r.life.Err() != nil {
			return nil, ErrClosed
		}
		if l != nil {
			return l, nil
		}
		select {
		case <-changed:
		case <-r.life.Done():
		case <-ctx.Done():
			r.mu.Lock()
			last = errors.Join(r.lastErr, last)
			r.mu.Unlock()
			return nil, r.unavailable(fmt.Errorf("%w (the last attempt: %w)", ctx.Err(), last))
		}
	}
}

func (r *remote) unavailable(err error) error {
	if r.life.Err() != nil {
		return ErrClosed
	}
	return &UnavailableError{"tcp://" + r.addr, err}
}

// send makes a request over a connection, and waits for the answer. Its id is a new one if it has none; w is the watch that it begins,
// nil if it does not.
func (l *tcpLink) send(ctx context.Context, req *request, w *tcpWatch) (*reply, error) {
	r := l.r
	if req.ID == 0 {
		req.ID = r.ids.Add(1)
	}
	c := &tcpCall{sentAt: now(), answer: make(chan *reply, 1)}
	if !l.call(req.ID, c, w) {
		return nil, r.unavailable(errNoServer)
	}
	if err := l.write(req, r.lease); err != nil {
		_ = l.nc.Close()
		return nil, r.unavailable(err)
	}
	select {
	case answer := <-c.answer:
		return answer, answer.err()
	case <-l.done:
		return nil, r.unavailable(errNoServer)
	case <-ctx.Done():
		l.forget(req.ID)
		return nil, r.unavailable(ctx.Err())
	}
}

// list is send for what is answered by pages: the answer has all of them.
func (l *tcpLink) list(ctx context.Context, req *request, w *tcpWatch) (*reply, error) {
	all, err := l.send(ctx, req, w)
	for more := all; err == nil && more.More; {
		if more, err = l.send(ctx, &request{ID: req.ID, Op: opMore}, nil); err == nil {
			all.Entries = append(all.Entries, more.Entries...)
		}
		if len(all.Entries) > MaxEntries {
			err = fmt.Errorf("%w: the server tells of more entries than there may be", ErrLimit)
		}
	}
	if err != nil {
		l.unsend(req.ID)
	}
	return all, err
}

// unsend has the server forget a list or a watch.
func (l *tcpLink) unsend(id uint64) {
	l.forget(id)
	_ = l.write(&request{ID: id, Op: opForget}, l.r.lease) // or else the connection is over, and with it what it is about
}

// do calls f with a connection, and with the next one if that ends and the call only reads.
func (r *remote) do(ctx context.Context, reads bool, f func(ctx context.Context, l *tcpLink) (*reply, error)) (*reply, error) {
	ctx, cancel := withCallTime(ctx)
	defer cancel()
	for {
		l, err := r.connected(ctx)
		if err == nil && ctx.Err() != nil {
			err = r.unavailable(ctx.Err())
		}
		if err != nil {
			return nil, err
		}
		answer, err := f(ctx, l)
		if _, lost := errors.AsType[*UnavailableError](err); lost && ctx.Err() == nil && reads {
			<-l.done // it is over, and another one is on its way
			continue
		}
		return answer, err
	}
}

// ask makes a request that has one answer.
func (r *remote) ask(ctx context.Context, req *request) (*reply, error) {
	return r.do(ctx, req.Op == opGet, func(ctx context.Context, l *tcpLink) (*reply, error) {
		again := *req
		return l.send(ctx, &again, nil)
	})
}

// Get implements Store.
func (r *remote) Get(ctx context.Context, key string) (Entry, error) {
	if err := checkKey(key); err != nil {
		return Entry{}, err
	}
	answer, err := r.ask(ctx, &request{Op: opGet, Key: key})
	return answer.entry(), err
}

// entry is that of a reply, a zero one if it has none.
func (r *reply) entry() Entry {
	if r == nil || r.Entry == nil {
		return Entry{}
	}
	return *r.Entry
}

// Put implements Store.
func (r *remote) Put(ctx context.Context, key string, value []byte, opts ...Option) (Entry, error) {
	if err := checkPut(key, value); err != nil {
		return Entry{}, err
	}
	o := readOptions(opts)
	answer, err := r.ask(ctx, &request{Op: opPut, Key: key, Value: value, Check: o.check, Revision: o.revision, Lease: o.lease})
	e := answer.entry()
	if err == nil {
		e.Value = value // which did not come back
	}
	return e, err
}

// Delete implements Store.
func (r *remote) Delete(ctx context.Context, key string, opts ...Option) error {
	if err := checkKey(key); err != nil {
		return err
	}
	o := readOptions(opts)
	_, err := r.ask(ctx, &request{Op: opDelete, Key: key, Check: o.check, Revision: o.revision})
	return err
}

// List implements Store.
func (r *remote) List(ctx context.Context, prefix string) ([]Entry, uint64, error) {
	if err := checkPrefix(prefix); err != nil {
		return nil, 0, err
	}
	answer, err := r.do(ctx, true, func(ctx context.Context, l *tcpLink) (*reply, error) {
		return l.list(ctx, &request{Op: opList, Key: prefix}, nil)
	})
	if err != nil {
		return nil, 0, err
	}
	return answer.Entries, answer.Revision, nil
}

// Watch implements Store.
func (r *remote) Watch(ctx context.Context, prefix string, fn func(changes []Change) error) error {
	if err := checkPrefix(prefix); err != nil {
		return err
	}
	f := newFollower(fn)
	for {
		l, err := r.connected(ctx)
		if err == nil {
			err = l.watch(ctx, prefix, f)
		}
		switch {
		case f.err != nil:
			return f.err
		case ctx.Err() != nil:
			return ctx.Err() //nolint:wrapcheck // the caller's own
		}
		if _, lost := errors.AsType[*UnavailableError](err); !lost {
			return err
		}
		<-l.done
	}
}

// watch is Watch as long as the connection lasts.
func (l *tcpLink) watch(ctx context.Context, prefix string, f *follower) error {
	w, req := &tcpWatch{newBacklog()}, &request{Op: opWatch, Key: prefix}
	answer, err := l.list(ctx, req, w)
	if err != nil {
		return err
	}
	defer l.unsend(req.ID)
	for changes := f.compare(answer.Entries, answer.Revision); ; {
		if err := f.tell(changes); err != nil {
			return err
		}
		select {
		case <-w.wake:
		case <-l.done:
			return l.r.unavailable(errNoServer)
		case <-ctx.Done():
			return ctx.Err() //nolint:wrapcheck // the caller's own
		}
		changes, _ = w.take(MaxBytes + MaxEntries*frameBytes(new(Entry)))
		changes = f.fresh(changes)
	}
}

// Lease implements Store.
func (r *remote) Lease() time.Duration { return r.lease }

// Confirmed implements Store.
func (r *remote) Confirmed() time.Duration { return ago(r.confirmed.Load()) }

// Lost implements Store.
func (r *remote) Lost() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lost
}

// Close tells the server that the lease is over. If it does not answer it finds out when the connection is closed.
func (r *remote) Close() error {
	r.mu.Lock()
	l := r.link
	r.mu.Unlock()
	if l != nil && r.life.Err() == nil {
		ctx, cancel := context.WithTimeout(context.Background(), byeTime)
		_, _ = l.send(ctx, &request{Op: opBye}, nil)
		cancel()
	}
	r.end()
	r.wg.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.lost:
	default:
		close(r.lost) // it was between two connections
	}
	return nil
}
