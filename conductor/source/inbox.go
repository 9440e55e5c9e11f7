package source

import "sync"

// message is one batch as it came.
type message struct {
	seq     uint64
	payload []byte
}

// inbox holds what has come from an engine and is not applied yet. Whoever reads the connection waits while it is full, so
// that what comes then waits at the engine. One puts and one takes.
type inbox struct {
	most, mostBytes int
	ready           chan struct{} // has something in it when there may be something to take

	mu    sync.Mutex
	room  sync.Cond
	list  []message // from head on
	head  int
	bytes int
	free  [][]byte // memory of those that were taken
	ended bool
	why   error
}

// maxFree bounds the memory that is kept for messages to come, of at most maxFreeBytes each.
const (
	maxFree      = 16
	maxFreeBytes = 256 << 10
)

func newInbox(most, mostBytes int) *inbox {
	in := &inbox{most: most, mostBytes: mostBytes, ready: make(chan struct{}, 1)}
	in.room.L = &in.mu
	return in
}

// put adds a copy of a message, once there is room. It reports false if the inbox has been ended.
func (in *inbox) put(seq uint64, payload []byte) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	for !in.ended && in.len() > 0 && (in.len() >= in.most || in.bytes+len(payload) > in.mostBytes) {
		in.room.Wait()
	}
	if in.ended {
		return false
	}
	var b []byte
	if n := len(in.free); n > 0 {
		b, in.free = in.free[n-1], in.free[:n-1]
	}
	in.list = append(in.list, message{seq, append(b[:0], payload...)})
	in.bytes += len(payload)
	in.wake()
	return true
}

// len is how many messages there are. mu is held.
func (in *inbox) len() int { return len(in.list) - in.head }

// wake says that there is something to take, or that nothing will come any more.
func (in *inbox) wake() {
	select {
	case in.ready <- struct{}{}:
	default:
	}
}

// take returns the next message, if there is one; release gives its memory back. Once nothing is left and nothing will come,
// ended is true, and why says why.
func (in *inbox) take() (m message, ok, ended bool, why error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.len() == 0 {
		return message{}, false, in.ended, in.why
	}
	m = in.list[in.head]
	in.list[in.head] = message{}
	if in.head++; in.len() == 0 {
		in.list, in.head = in.list[:0], 0
	} else if in.head >= in.most { // move the rest to the front, now and then
		in.list, in.head = append(in.list[:0], in.list[in.head:]...), 0
	}
	in.bytes -= len(m.payload)
	in.room.Signal()
	return m, true, false, nil
}

// release takes the memory of a message back.
func (in *inbox) release(m message) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if len(in.free) < maxFree && cap(m.payload) <= maxFreeBytes {
		in.free = append(in.free, m.payload)
	}
}

// end says that nothing will come any more.
func (in *inbox) end(why error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.ended {
		in.ended, in.why = true, why
	}
	in.room.Broadcast()
	in.wake()
}
