package node

import (
	"context"
	"log/slog"
	"time"

	"larder/protocol"
)

// Bounds of tier work.
const (
	// pollEvery is how late a task begins whose push was lost.
	pollEvery = time.Second
	// freshPart is the part of a lease, a half, that may be over when its entries are begun with. It is renewed from then on.
	freshPart = 2
	// chunkItems and chunkBytes bound what is copied at once, and so the memory that it takes, how much is done twice after a
	// crash, and how many entries are kept from being evicted meanwhile.
	chunkItems = 1024
	chunkBytes = 4 << 20
	// chunksAtOnce bounds the chunks that all devices of a node copy at the same time.
	chunksAtOnce = 2
	// chunkTime bounds one chunk, leader changes included, beside the time that its bytes take at the rate of slowest.
	chunkTime = 30 * time.Second
	slowest   = 16 << 20 // bytes a second: a busy disk that is read and written is faster
	// firstItems are asked for, and leased, before it is known how long entries are, and after a chunk that failed; then twice
	// what the last chunk took. What is leased and not copied can neither be evicted meanwhile.
	firstItems = 8
	// othersFirst is how many chunks of others a task waits for that could not be done.
	othersFirst = 8
	// maxAttempts is how often a chunk is tried until its entries count as failed: a minute or so, by pollEvery and
	// chunkTime, in which masters and disks come back.
	maxAttempts = 5
)

// worker does the tasks of one device, one after the other.
type worker struct {
	d *device
	s session

	items    int            // to ask for
	paid     uint64         // bytes that the bucket has given for the next chunk
	attempts map[uint64]int // of the next chunk of each task, those that failed
	after    uint64         // the task that failed last: others come first; 0 = none
	others   int            // chunks of them since then
}

func newWorker(d *device, s session) *worker {
	return &worker{d: d, s: s, items: firstItems, attempts: map[uint64]int{}}
}

// run does tasks until ctx is over.
func (w *worker) run(ctx context.Context) {
	for ctx.Err() == nil {
		more, err := w.round(ctx)
		if err != nil && ctx.Err() == nil {
			w.d.log.Warn("tier work is tried again", slog.Any("error", err))
		}
		if more && err == nil {
			continue
		}
		if wait(ctx, w.d.n.cfg.clock, pollEvery, w.d.tasks) != nil {
			return
		}
	}
}

// round asks for the first task, or one behind that which failed, and copies a chunk of it. more says that there may be
// something left. The device may have got another number since the last one.
func (w *worker) round(ctx context.Context) (more bool, err error) {
	asked := w.d.n.cfg.clock.now()
	reply, err := w.s.tasks(ctx, w.d.number(), w.after, uint64(w.items)) //nolint:gosec // positive
	if err != nil || len(reply.Tasks) == 0 || len(reply.Tasks[0].Items) == 0 {
		more = err == nil && w.after != 0
		w.after = 0
		return more, err
	}
	t := &reply.Tasks[0]
	n, bytes := cut(t.Items)
	if bytes > w.paid {
		if err := w.d.n.bucket.take(ctx, bytes-w.paid); err != nil {
			return false, err
		}
		w.paid = bytes
	}
	lease := int64(reply.LeaseMS) * int64(time.Millisecond) //nolint:gosec // milliseconds
	if w.d.n.cfg.clock.now()-asked > lease/freshPart {
		return true, nil // it is asked again, and the chunk is paid for
	}
	return w.chunk(ctx, t, n, asked, reply.LeaseMS)
}

// cut says how many items, from the first on, are a chunk, and how many bytes they have.
func cut(items []protocol.TaskItem) (n int, bytes uint64) {
	for n < len(items) && n < chunkItems && (n == 0 || bytes+items[n].KVLength <= chunkBytes) {
		if len(items[n].Key) > 0 {
			bytes += items[n].KVLength
		}
		n++
	}
	return n, bytes
}

// chunk copies the first n items of a task, which were leased by what was asked at a time, and reports them. done says that
// nothing keeps the worker from going on.
func (w *worker) chunk(ctx context.Context, t *protocol.Task, n int, asked int64, leaseMS uint64) (done bool, err error) {
	items := make([]protocol.TaskItem, 0, n)
	for _, it := range t.Items[:n] {
		if len(it.Key) > 0 {
			items = append(items, it)
		}
	}
	got, err := w.copy(ctx, t, items, asked, leaseMS)
	if err == nil {
		w.items = min(2*n, chunkItems)
	} else {
		w.attempts[t.ID]++
		w.items = firstItems // one of them may be the reason: few of the others should fail with it
		w.after, w.others = t.ID, 0
		if w.attempts[t.ID] < maxAttempts || ctx.Err() != nil {
			return false, err
		}
		w.d.log.Warn("entries are not copied", slog.Uint64("task", t.ID), slog.Int("entries", len(items)), slog.Any("error", err))
		got = copied{failed: uint64(len(items))}
	}
	got.skipped += uint64(n - len(items)) //nolint:gosec // not negative
	if w.others++; w.others >= othersFirst {
		w.after = 0
	}
	delete(w.attempts, t.ID)
	w.paid = 0
	t.Done += uint64(n) //nolint:gosec // not negative
	w.d.counts.add(&got)
	if _, err := w.s.taskDone(ctx, &protocol.TaskDoneRequest{
		Task: t.ID, Done: t.Done, Copied: got.copied, Skipped: got.skipped, Failed: got.failed, Bytes: got.bytes,
	}); err != nil {
		return false, err
	}
	return true, nil // also if it was canceled: then there is another one next, or none
}

// copy copies items when the node has a place for another chunk.
func (w *worker) copy(
	ctx context.Context, t *protocol.Task, items []protocol.TaskItem, asked int64, leaseMS uint64,
) (copied, error) {
	if len(items) == 0 {
		return copied{}, nil
	}
	select {
	case w.d.n.places <- struct{}{}:
		defer func() { <-w.d.n.places }()
	case <-ctx.Done():
		return copied{}, ctx.Err() //nolint:wrapcheck // the worker ends
	}
	bytes := uint64(0)
	for i := range items {
		bytes += items[i].KVLength
	}
	ctx, cancel := context.WithTimeout(ctx, timeFor(bytes))
	defer cancel()
	return w.s.copyIn(ctx, t, items, asked, leaseMS)
}

// timeFor is how long a chunk of so many bytes may take. Most have at most chunkBytes; one long entry is a chunk too.
func timeFor(bytes uint64) time.Duration {
	return chunkTime + time.Duration(min(bytes, 1<<33)*uint64(time.Second)/slowest)
}
