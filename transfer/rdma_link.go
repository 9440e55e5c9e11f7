package transfer

import (
	"cmp"
	"context"
	"log/slog"
	"sync"
	"time"
)

// rdmaLink is the other end of an endpoint: the queue pairs that the peer has connected with this one's. It implements Link.
type rdmaLink struct {
	peer    *rdmaPeer
	port    *port
	path    string       // the peer's NIC
	id      uint64       // random: whoever does not know it cannot close it
	control *rdmaControl // that has made it: the link ends with it

	mu      sync.Mutex
	closing bool // the peer is being asked
	closed  bool // it has confirmed: nothing that was posted here lands there any more
	loose   bool // it has not for so long that requests ended as unsettled
	unsure  []*unsure
}

// unsure is a WRITE that has failed and may still land there.
type unsure struct {
	s     *slice
	l     *rdmaLane
	via   *rail // to blame
	err   error
	ended bool // as unsettled
}

// Gone implements Link: the peer need not keep its end.
func (k *rdmaLink) Gone() { k.peer.gone(k) }

// settle ends a WRITE, or tries it again, when the peer has closed its end of the link.
func (k *rdmaLink) settle(u *unsure) {
	k.mu.Lock()
	switch {
	case k.closed:
		k.mu.Unlock()
		u.settled()
		return
	case k.loose:
		u.endLoose()
	case !k.closing:
		k.closing = true
		k.peer.hold()
		k.peer.r.wg.Go(k.confirm)
	}
	k.unsure = append(k.unsure, u)
	k.mu.Unlock()
}

// confirm has the peer close its end. Who waits for that ends after a time as unsettled, while the peer is asked on: what
// nobody waits for any more soon.
func (k *rdmaLink) confirm() {
	defer k.peer.part()
	e := k.peer.r.e
	sure := k.askFor(min(cancelGrace, e.cfg.AbortTimeout))
	if !sure {
		now := e.now()
		k.mu.Lock()
		for _, u := range k.unsure {
			if over := u.s.over(now); over != nil {
				u.err = over
				u.endLoose()
			}
		}
		k.mu.Unlock()
		sure = k.askFor(e.cfg.AbortTimeout)
	}
	if !sure {
		e.cfg.Logger.Warn("transfer: a peer does not confirm that a link is closed", slog.String("peer", k.path),
			slog.String("nic", k.port.nic.Name()))
		k.mu.Lock()
		k.loose = true
		for _, u := range k.unsure {
			if !u.ended {
				u.err = cmp.Or(u.s.over(e.now()), u.err)
				u.endLoose()
			}
		}
		k.mu.Unlock()
		if !k.ask(e.ctx) {
			return
		}
	}
	k.mu.Lock()
	k.closed = true
	all := k.unsure
	k.unsure = nil
	k.mu.Unlock()
	for _, u := range all {
		u.settled()
	}
}

// askFor is ask for a while.
func (k *rdmaLink) askFor(d time.Duration) bool {
	ctx, cancel := context.WithTimeout(k.peer.r.e.ctx, d)
	defer cancel()
	return k.ask(ctx)
}

// ask asks until the peer confirms.
func (k *rdmaLink) ask(ctx context.Context) bool {
	for wait := retryEvery; ; wait = min(2*wait, retryAtMost) {
		if k.peer.closeLink(ctx, k) == nil {
			return true
		}
		if !sleep(ctx, wait) {
			return false
		}
	}
}

// settled says that a WRITE lands no more.
func (u *unsure) settled() {
	if u.ended {
		u.s.settle()
		return
	}
	u.l.retry(u.s, u.via, u.err)
	u.l.expect(-1)
}

// endLoose ends a WRITE that may still land.
func (u *unsure) endLoose() {
	u.ended = true
	u.s.endLoose(u.err)
	u.l.expect(-1)
}
