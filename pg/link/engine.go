package link

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"larder/pg/shm"
	"larder/transfer"
)

const (
	// maxNotifyName bounds the name under which a lane is notified.
	maxNotifyName = 128
	// progressBytes is the body of a notification: how much was written to the peer's ring, how much was read of the ring that the peer
	// writes to, both since the beginning, and whether there will be more.
	progressBytes = 8 + 8 + 1
	// notifyTries is how often a notification is sent that may not have arrived: it says where a lane is, so that twice does no harm.
	notifyTries = 3
	// notifyPause is how long a peer is left alone that has not taken one.
	notifyPause = 10 * time.Millisecond
	// retireTime is how long the peer's writes may take to end when a lane is closed. Memory that they may still land in is never given
	// back.
	retireTime = 10 * time.Second
	// maxDescriptor bounds the description of this process's NICs that a peer is sent, in bytes: half of what fits.
	maxDescriptor = 32 << 10
)

// engineEnd is what the lanes of a node that go by the transfer engine have in common: notifications are told apart by their names. The
// engine's other users are not disturbed, other nodes among them.
type engineEnd struct {
	e      *transfer.Engine
	prefix string
	stop   func()

	mu    sync.Mutex
	lanes map[uint64]*engineLane
}

func newEngineEnd(e *transfer.Engine) *engineEnd {
	end := &engineEnd{e: e, prefix: fmt.Sprintf(transfer.ReservedNames+"pg/%016x%016x/", draw(), draw()), lanes: map[uint64]*engineLane{}}
	end.stop = e.Handle(end.prefix, end.notified)
	return end
}

func (end *engineEnd) close() { end.stop() }

// notified takes a peer's word on how far a lane is.
func (end *engineEnd) notified(n transfer.Notification) {
	number, err := strconv.ParseUint(strings.TrimPrefix(n.Name, end.prefix), 16, 64)
	if err != nil {
		return
	}
	end.mu.Lock()
	l := end.lanes[number]
	end.mu.Unlock()
	if by := l.peer(); l == nil || by != "" && by != n.Engine {
		return
	}
	if err := l.hear(n.Body); err != nil {
		l.lane.cut(&LaneError{Rank: l.lane.rank, Transport: l.lane.via, Err: err})
	}
}

// engineLane carries a lane by the transfer engine. What this process's user writes is written into the ring at the peer, of which as
// much is free as the peer has said; then the peer is notified of how far the ring is filled. That is seen after the bytes, for the
// writes were done before.
type engineLane struct {
	n      *Node
	end    *engineEnd
	number uint64
	lane   *lane
	buffer *transfer.Buffer // in's memory
	ctx    context.Context  //nolint:containedctx // it ends what is under way
	cancel context.CancelFunc
	wake   waker         // there is something to do
	out    *shm.Consumer // of this process's user

	mu     sync.Mutex
	in     *shm.Producer // to this process's user
	head   uint64        // bytes that have come
	sent   uint64        // bytes that were written to the peer
	taken  uint64        // of them, those that the peer has read
	told   uint64        // bytes of in that were read, as the peer knows
	over   bool          // nothing that is sent matters any more
	begun  bool          // run lets go of all
	engine string        // the peer's
}

// newEngineLane makes the ring that the peer is to write to.
func (n *Node) newEngineLane(rank int, via string) (*engineLane, error) {
	end := n.engine
	l := &engineLane{n: n, end: end, wake: make(waker, 1)}
	l.lane = &lane{rank: rank, via: via, by: l}
	var err error
	if l.lane.p, l.out, err = shm.NewRing(n.cfg.RingBytes, n.bell, l.wake); err != nil {
		return nil, err
	}
	if l.in, l.lane.c, err = shm.NewRing(n.cfg.RingBytes, l.wake, n.bell); err != nil {
		return nil, errors.Join(err, l.lane.p.Close(), l.out.Close())
	}
	// All of an empty ring is free, so that this is its memory. Behind it lies the same again, which nobody writes to.
	l.buffer, err = end.e.Register(l.in.Free(), transfer.BufferOptions{Name: "process group lane", Unlisted: true})
	if err != nil {
		err = fmt.Errorf("link: register a ring: %w", err)
		return nil, errors.Join(err, l.lane.p.Close(), l.out.Close(), l.in.Close(), l.lane.c.Close())
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	end.mu.Lock()
	defer end.mu.Unlock()
	l.number = draw()
	end.lanes[l.number] = l
	return l, nil
}

// share is what the peer needs to write to this process.
func (l *engineLane) share() *engineShare {
	d := l.end.e.Describe()
	d.Buffers = nil
	if len(marshal(d)) > maxDescriptor {
		d.Topology = nil // it only makes better choices
	}
	return &engineShare{
		Descriptor: d, Ring: l.buffer.Info().Handle, Bytes: l.in.Size(), Name: l.end.prefix + strconv.FormatUint(l.number, 16),
	}
}

// start begins to carry.
func (l *engineLane) start(theirs *engineShare) error {
	seg, err := l.end.e.OpenDescriptor(theirs.Descriptor)
	if err != nil {
		return fmt.Errorf("link: the engine of rank %d: %w", l.lane.rank, err)
	}
	l.mu.Lock()
	l.engine, l.begun = theirs.Descriptor.Engine, true
	l.mu.Unlock()
	l.n.pumps.Go(func() { l.run(seg, theirs) })
	return nil
}

// peer is the engine that the lane leads to, empty if that has begun and this one has not.
func (l *engineLane) peer() string {
	if l == nil {
		return ""
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.engine
}

// hear takes a notification.
func (l *engineLane) hear(body []byte) error {
	if len(body) != progressBytes {
		return fmt.Errorf("%w: a notification of %d bytes", ErrFrame, len(body))
	}
	head, taken, over := binary.LittleEndian.Uint64(body), binary.LittleEndian.Uint64(body[8:]), body[16] != 0
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case taken > l.sent:
		return fmt.Errorf("%w: %d bytes are said to have been read of %d", ErrFrame, taken, l.sent)
	case taken > l.taken:
		l.taken = taken
		l.wake.Ring()
	}
	if head > l.head {
		if free := l.in.Free(); head-l.head > uint64(len(free)) && l.in.Err() == nil {
			return fmt.Errorf("%w: %d bytes are said to have been written where %d are free", ErrFrame, head-l.head, len(free))
		}
		if l.in.Err() == nil {
			l.in.Commit(int(head - l.head)) //nolint:gosec // it fits into the ring
		}
		l.head = head
		l.wake.Ring() // the peer may have to hear how much was read
	}
	if over {
		l.in.Fail(l.reason(ErrEnded))
		l.over = true
		l.wake.Ring()
	}
	return nil
}

// reason is what the lane's user is told.
func (l *engineLane) reason(err error) error {
	return &LaneError{Rank: l.lane.rank, Transport: l.lane.via, Err: err}
}

// run carries until the lane is closed or fails, and then lets go of all.
func (l *engineLane) run(seg *transfer.Segment, theirs *engineShare) {
	err := l.carry(seg, theirs)
	l.out.Fail(l.reason(err))
	l.mu.Lock()
	l.in.Fail(l.reason(err))
	l.mu.Unlock()
	last, cancel := context.WithTimeout(context.Background(), lingerTime)
	defer cancel()
	_ = l.notify(last, seg, theirs.Name, true) // a peer that does not hear it sees its writes fail
	l.release(seg)
}

// release lets go of the lane's memory, when nothing lands in it any more.
func (l *engineLane) release(seg *transfer.Segment) {
	l.cancel()
	l.end.mu.Lock()
	delete(l.end.lanes, l.number)
	l.end.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), retireTime)
	defer cancel()
	if seg != nil {
		_ = seg.Close() // it waits, and cannot fail
	}
	err := l.buffer.Retire(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.out.Close() // nothing is lost with it, as in the next
	if err != nil && !errors.Is(err, transfer.ErrClosed) {
		l.n.cfg.Logger.Warn("link: memory of a lane is kept for good: the peer may still write to it")
		l.in.Fail(ErrClosed)
		return
	}
	_ = l.in.Close()
}

// carry sends what there is, and how much was read here, until the lane has ended, and says why it has.
func (l *engineLane) carry(seg *transfer.Segment, theirs *engineShare) error {
	for {
		moved, err := l.write(seg, theirs)
		if err != nil {
			return err
		}
		if moved || l.due() {
			if err := l.notify(l.ctx, seg, theirs.Name, false); err != nil {
				return err
			}
			continue
		}
		l.mu.Lock()
		over := l.over
		l.mu.Unlock()
		if over {
			return ErrEnded
		}
		if ended := l.out.Err(); ended != nil {
			return ended
		}
		select {
		case <-l.wake:
		case <-l.ctx.Done():
			return ErrClosed
		}
	}
}

// due reports whether so much has been read of what came that the peer should know: half of the ring makes it wait at no time.
func (l *engineLane) due() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.read()-l.told >= uint64(l.in.Size()/4) //nolint:gosec // positive
}

// read is how many bytes of in were read. The lock is held.
func (l *engineLane) read() uint64 {
	if l.in.Err() != nil {
		return l.told
	}
	return l.head - uint64(l.in.Size()-len(l.in.Free())) //nolint:gosec // a ring has no more than its size in it
}

// write writes what there is, as far as there is room, and waits for that.
func (l *engineLane) write(seg *transfer.Segment, theirs *engineShare) (moved bool, err error) {
	b, size := l.out.Ready(), uint64(theirs.Bytes) //nolint:gosec // checked
	l.mu.Lock()
	at, room, over := l.sent, size-(l.sent-l.taken), l.over
	l.mu.Unlock()
	b = b[:min(uint64(len(b)), room, carryMost)]
	if len(b) == 0 || over {
		return false, nil
	}
	first := b[:min(uint64(len(b)), size-at%size)]
	requests := []transfer.Request{{Op: transfer.Write, Segment: seg, Buffer: theirs.Ring, Offset: at % size, Local: first}}
	if rest := b[len(first):]; len(rest) > 0 {
		requests = append(requests, transfer.Request{Op: transfer.Write, Segment: seg, Buffer: theirs.Ring, Local: rest})
	}
	batch, err := l.end.e.Submit(requests, 0)
	if err != nil {
		return false, err
	}
	if err := batch.Wait(l.ctx); err != nil {
		batch.Cancel()
		<-batch.Done() // nobody uses the ring's memory any more
		return false, err
	}
	batch.Release()
	l.out.Consume(len(b))
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent += uint64(len(b))
	return true, nil
}

// notify tells the peer how far the lane is.
func (l *engineLane) notify(ctx context.Context, seg *transfer.Segment, name string, over bool) error {
	l.mu.Lock()
	l.told = l.read()
	body := binary.LittleEndian.AppendUint64(nil, l.sent)
	body = binary.LittleEndian.AppendUint64(body, l.told)
	l.mu.Unlock()
	body = append(body, 0)
	if over {
		body[progressBytes-1] = 1
	}
	for try := 1; ; try++ {
		err := seg.Notify(ctx, name, body)
		if err == nil || try == notifyTries || !errors.Is(err, transfer.ErrUncertain) && !errors.Is(err, transfer.ErrFull) {
			return err
		}
		select {
		case <-after(notifyPause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// lose implements carrier. What the peer has written and told of is in the ring already.
func (l *engineLane) lose(err error) {
	l.mu.Lock()
	l.in.Fail(err)
	l.mu.Unlock()
	l.cancel()
}

// cut implements carrier.
func (l *engineLane) cut(error) {
	l.cancel()
	l.mu.Lock()
	begun := l.begun
	l.begun = true
	l.mu.Unlock()
	if !begun { // nobody else lets go of it
		l.n.pumps.Go(func() { l.release(nil) })
	}
}

// close implements carrier.
func (l *engineLane) close() {
	stop := time.AfterFunc(lingerTime, l.cancel) //nolint:forbidigo // as deadlines of connections are
	context.AfterFunc(l.ctx, func() { stop.Stop() })
}
