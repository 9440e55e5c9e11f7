package transfer

import (
	"container/list"
	"time"
)

// backoffs remembers peers that failed, and how long each is left alone. Its memory is bounded: when it is full, the peer
// is forgotten whose last failure is the longest ago. The store's mu guards it.
type backoffs struct {
	first, most time.Duration
	max         int
	jitter      func() float64
	peers       map[string]*list.Element
	order       list.List // of *backoff, by last failure
}

type backoff struct {
	peer     string
	failures int // in a row
	until    int64
	err      error // of the last
}

func (b *backoffs) init() {
	b.peers = map[string]*list.Element{}
	b.order.Init()
}

// failed counts a failure of a peer. fresh says that it has worked well since the last one. The pause doubles with each
// failure; its second half is drawn, so that peers which failed together do not come back together.
func (b *backoffs) failed(peer string, now int64, fresh bool, err error) {
	at := b.peers[peer]
	if at == nil {
		if b.order.Len() >= b.max {
			b.forget(b.order.Front())
		}
		at = b.order.PushBack(&backoff{peer: peer})
		b.peers[peer] = at
	}
	b.order.MoveToBack(at)
	r := at.Value.(*backoff) //nolint:forcetypeassert // nothing else is in the list
	if fresh {
		r.failures = 0
	}
	r.failures++
	pause := b.most
	if shift := r.failures - 1; shift < 30 {
		pause = min(b.first<<shift, b.most)
	}
	r.until = now + int64(pause/2) + int64(b.jitter()*float64(pause-pause/2))
	r.err = err
}

// of is what is remembered of a peer, nil if nothing is.
func (b *backoffs) of(peer string) *backoff {
	if at := b.peers[peer]; at != nil {
		return at.Value.(*backoff) //nolint:forcetypeassert // nothing else is in the list
	}
	return nil
}

// expire forgets peers that might have been tried again for as long as the longest pause and have not failed.
func (b *backoffs) expire(now int64) {
	for at := b.order.Front(); at != nil; at = b.order.Front() {
		if r := at.Value.(*backoff); now < r.until+int64(b.most) { //nolint:forcetypeassert // nothing else is in the list
			return
		}
		b.forget(at)
	}
}

func (b *backoffs) forget(at *list.Element) {
	delete(b.peers, at.Value.(*backoff).peer) //nolint:forcetypeassert // nothing else is in the list
	b.order.Remove(at)
}
