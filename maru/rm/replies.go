package rm

import (
	"context"
	"crypto/sha256"
	"sync"
	"time"
)

const (
	// maxReplies of them are remembered, as in Maru: more requests than that within replyTime are not repeated by clients, which
	// repeat at once.
	maxReplies = 1024
	// replyTime is how long one is remembered: a client gives up after 10 s, reconnects and asks once more.
	replyTime = time.Minute
)

// replies has ALLOC and FREE, which clients repeat when a connection breaks, done once: it remembers what they were answered. A
// repeat that comes while the first is being carried out waits for it. It may be used concurrently.
type replies struct {
	now func() time.Duration // since some moment

	mu    sync.Mutex
	known map[replyKey]*reply
	order []*reply // that are remembered, oldest first
}

type replyKey struct {
	client string
	id     uint64
}

type reply struct {
	key  replyKey
	sum  [sha256.Size]byte // of the request
	at   time.Duration     // when it was answered
	done chan struct{}     // closed when frame is there
	// frame is the answer. It is not changed any more.
	frame []byte
}

func newReplies(now func() time.Duration) *replies {
	return &replies{now: now, known: map[replyKey]*reply{}}
}

// answer returns what a request is answered: what do returns, or what an earlier request of the same name, id and bytes was.
// keep, which do returns with it, says whether a repeat is to get the same. The same name and id on other bytes is another
// process that happens to have both.
func (r *replies) answer(ctx context.Context, key replyKey, payload []byte, do func() (frame []byte, keep bool)) []byte {
	if key.id == 0 {
		frame, _ := do()
		return frame
	}
	mine, first := r.begin(key, sha256.Sum256(payload))
	if !first {
		select {
		case <-mine.done:
			return mine.frame
		case <-ctx.Done():
			return errorFrame(errUnavailable)
		}
	}
	frame, keep := do()
	r.finish(mine, frame, keep)
	return frame
}

// begin returns the entry of a request, and whether it is a new one.
func (r *replies) begin(key replyKey, sum [sha256.Size]byte) (entry *reply, first bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forget(maxReplies)
	if old := r.known[key]; old != nil && old.sum == sum {
		return old, false
	}
	entry = &reply{key: key, sum: sum, done: make(chan struct{})}
	r.known[key] = entry
	return entry, true
}

// finish notes an answer.
func (r *replies) finish(entry *reply, frame []byte, keep bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	entry.frame, entry.at = frame, r.now()
	close(entry.done)
	if !keep {
		r.drop(entry)
		return
	}
	r.forget(maxReplies - 1)
	r.order = append(r.order, entry)
}

// forget drops the oldest answers: those whose time is over, and those above a number. The caller holds mu.
func (r *replies) forget(most int) {
	n := 0
	for n < len(r.order) && (len(r.order)-n > most || r.now()-r.order[n].at >= replyTime) {
		r.drop(r.order[n])
		n++
	}
	if n > 0 {
		r.order = append(r.order[:0], r.order[n:]...)
	}
}

// drop makes an answer one that is not found. The caller holds mu.
func (r *replies) drop(entry *reply) {
	if r.known[entry.key] == entry {
		delete(r.known, entry.key)
	}
}
