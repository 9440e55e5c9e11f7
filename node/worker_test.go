package node

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// give makes a task of entries of some length; those at gone are gone.
func (m *masters) give(id uint64, n int, length uint64, gone ...int) {
	t := protocol.Task{ID: id, Kind: "demote", Total: uint64(n)}
	for i := range n {
		it := protocol.TaskItem{Slot: uint64(i), Version: 1, Location: protocol.Location{KVLength: length}}
		if !slices.Contains(gone, i) {
			it.Key = fmt.Appendf(nil, "%d/%d", id, i)
		}
		t.Items = append(t.Items, it)
	}
	m.mu.Lock()
	m.tasks = append(m.tasks, t)
	var s *fakeSession
	if len(m.sessions) > 0 {
		s = m.sessions[len(m.sessions)-1]
	}
	m.mu.Unlock()
	if s != nil {
		s.h.work()
	}
}

// idle waits until all tasks are over.
func (m *masters) idle(t *testing.T) {
	t.Helper()
	within(t, func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		if len(m.tasks) > 0 {
			return fmt.Errorf("%d tasks are left, %v", len(m.tasks), m.done)
		}
		return nil
	})
}

// keeper notes what was copied.
type keeper struct {
	mu   sync.Mutex
	keys map[string]int
	most int // items at once
}

func (k *keeper) copyIn(items []protocol.TaskItem) (got copied, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.most = max(k.most, len(items))
	for i := range items {
		k.keys[string(items[i].Key)]++
		got.copied++
		got.bytes += items[i].KVLength
	}
	return got, nil
}

func TestTasksAreDoneInChunks(t *testing.T) {
	m := newMasters(t)
	k := &keeper{keys: map[string]int{}}
	m.copies = k.copyIn
	m.give(1, 150, 1000, 3, 70)
	n, _ := m.start(Config{DRAM: 8 * mib})
	ready(t, n)
	m.give(2, 3, chunkBytes)
	m.idle(t)
	require.Len(t, k.keys, 148+3)
	require.LessOrEqual(t, k.most, chunkItems)
	var copies, skipped uint64
	last := map[uint64]uint64{}
	for _, d := range m.done {
		require.Greater(t, d.Done, last[d.Task], "progress is absolute")
		require.Equal(t, d.Done-last[d.Task], d.Copied+d.Skipped+d.Failed, "and all of it is accounted for")
		last[d.Task] = d.Done
		copies += d.Copied
		skipped += d.Skipped
	}
	require.EqualValues(t, 151, copies)
	require.EqualValues(t, 2, skipped, "those that are gone")
	require.Equal(t, map[uint64]uint64{1: 150, 2: 3}, last)
	s := n.Status().Devices[0]
	require.EqualValues(t, 151, s.Copied)
	require.EqualValues(t, 148*1000+3*chunkBytes, s.CopiedBytes)
}

// TestChunksGoByTheSizeOfEntries: many small ones at a time, since each chunk takes its turns in the log, and of large ones
// no more than fit, since what is asked for is leased.
func TestChunksGoByTheSizeOfEntries(t *testing.T) {
	m := newMasters(t)
	k := &keeper{keys: map[string]int{}}
	m.copies = k.copyIn
	m.give(1, 5000, 1000)
	n, _ := m.start(Config{DRAM: 8 * mib})
	ready(t, n)
	m.idle(t)
	require.Equal(t, chunkItems, k.most)
	require.Len(t, m.done, 7+4, "8 to 512 entries, and then 1024 at a time")
}

func TestWorkGoesOnWhereItWas(t *testing.T) {
	m := newMasters(t)
	k := &keeper{keys: map[string]int{}}
	m.copies = k.copyIn
	m.give(1, 100, 1000)
	m.tasks[0].Done = 40 // by whoever was the home before
	n, _ := m.start(Config{DRAM: 8 * mib})
	ready(t, n)
	m.idle(t)
	require.Len(t, k.keys, 60)
	require.Zero(t, k.keys["1/39"])
	require.Equal(t, 1, k.keys["1/40"])
}

func TestCanceledTaskIsLeft(t *testing.T) {
	m := newMasters(t)
	k := &keeper{keys: map[string]int{}}
	m.copies = k.copyIn
	m.canceled[1] = true
	m.give(1, 1000, 1000)
	m.give(2, 10, 1000)
	n, _ := m.start(Config{DRAM: 8 * mib})
	ready(t, n)
	m.idle(t)
	require.Len(t, k.keys, firstItems+10, "one chunk, and what comes next")
}

func TestTroubleIsTriedAgain(t *testing.T) {
	m := newMasters(t)
	k := &keeper{keys: map[string]int{}}
	tries := 0
	m.copies = func(items []protocol.TaskItem) (copied, error) {
		if string(items[0].Key) == "1/0" {
			if tries++; tries <= 2 {
				return copied{}, errors.New("no page is free")
			}
		}
		return k.copyIn(items)
	}
	n, _ := m.start(Config{DRAM: 8 * mib})
	ready(t, n)
	m.give(1, 10, 1000)
	m.idle(t)
	require.Len(t, k.keys, 10)
	require.Zero(t, n.Status().Devices[0].FailedCopies)
}

func TestEntriesThatCannotBeCopiedHoldNobodyUp(t *testing.T) {
	m := newMasters(t)
	k := &keeper{keys: map[string]int{}}
	m.copies = func(items []protocol.TaskItem) (copied, error) {
		if string(items[0].Key) == "1/0" {
			return copied{}, errors.New("not in a hundred years")
		}
		return k.copyIn(items)
	}
	m.give(1, 100, 1000)
	n, _ := m.start(Config{DRAM: 8 * mib})
	ready(t, n)
	m.idle(t)
	require.Len(t, k.keys, 100-firstItems)
	require.EqualValues(t, firstItems, n.Status().Devices[0].FailedCopies)
}

// TestTasksThatFailLetOthersGo: a task that cannot be done is tried again between chunks of others.
func TestTasksThatFailLetOthersGo(t *testing.T) {
	c := &fakeClock{}
	m := newMasters(t)
	var order []uint64
	m.copies = func(items []protocol.TaskItem) (got copied, err error) {
		order = append(order, uint64(items[0].Key[0]-'0'))
		if items[0].Key[0] == '1' {
			return copied{}, errors.New("no page is free")
		}
		got.copied = uint64(len(items))
		return got, nil
	}
	m.give(1, 2, 1000)
	m.give(2, 12, chunkBytes)
	w := aWorker(t, m, c)
	for len(m.tasks) > 0 {
		if _, err := w.round(t.Context()); err != nil {
			require.ErrorContains(t, err, "no page is free")
		}
	}
	require.Equal(t, []uint64{1, 2, 2, 2, 2, 2, 2, 2, 2, 1, 2, 2, 2, 2, 1, 1, 1}, order)
	require.Empty(t, w.attempts)
}

// TestOnlyWhatIsCopiedIsLeased, and what is long: each item that is asked for is leased, and cannot be evicted for as long.
func TestOnlyWhatIsCopiedIsLeased(t *testing.T) {
	m := newMasters(t)
	k := &keeper{keys: map[string]int{}}
	m.copies = k.copyIn
	m.give(1, 20, chunkBytes/2)
	m.give(2, 3000, 10)
	w := aWorker(t, m, &fakeClock{})
	w.d.id = 7
	for len(m.tasks) > 0 {
		_, err := w.round(t.Context())
		require.NoError(t, err)
		w.d.id = 8 // the leader has given the device another number
	}
	require.Equal(t, taskAsk{7, firstItems}, m.asked[0])
	for _, a := range m.asked[1:11] {
		require.Equal(t, taskAsk{8, 4}, a)
	}
	require.Equal(t, taskAsk{8, chunkItems}, m.asked[len(m.asked)-1])
	require.Len(t, k.keys, 3020)
	require.Greater(t, timeFor(8<<30), 8*time.Minute, "a long entry has the time that it needs")
}

// aWorker is the worker of a device of a node that does nothing else.
func aWorker(t *testing.T, m *masters, c clock) *worker {
	t.Helper()
	cfg, err := Config{Masters: []string{"a:1"}, DRAM: 8 * mib, Bandwidth: 1 << 40, clock: c, open: m.open}.withDefaults()
	require.NoError(t, err)
	n := &Node{cfg: cfg, bucket: newBucket(c, cfg.Bandwidth), places: make(chan struct{}, 1)}
	return newWorker(newDevice(n, "dram", &dram{}), &fakeSession{m: m})
}

// TestBandwidthIsBounded has time pass only where the node waits for it.
func TestBandwidthIsBounded(t *testing.T) {
	c := &fakeClock{}
	m := newMasters(t)
	k := &keeper{keys: map[string]int{}}
	m.copies = k.copyIn
	m.give(1, 160, 100_000) // 16 MB
	cfg, err := Config{Masters: []string{"a:1"}, DRAM: 8 * mib, Bandwidth: 1_000_000, clock: c, open: m.open}.withDefaults()
	require.NoError(t, err)
	n := &Node{cfg: cfg, bucket: newBucket(c, cfg.Bandwidth), places: make(chan struct{}, 1)}
	d := newDevice(n, "dram", &dram{})
	w := newWorker(d, &fakeSession{m: m})
	for more := true; more; {
		more, err = w.round(t.Context())
		require.NoError(t, err)
	}
	require.Len(t, k.keys, 160)
	require.InDelta(t, 15.5e9, float64(c.now()), 1e6, "16 s of bytes, of which half a second's was saved up")
}
