package store_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/pg/store"
)

// backend is an implementation under test.
type backend struct {
	name  string
	lease time.Duration                   // a short one that it grants
	fresh func(t testing.TB) (url string) // names an empty store
}

func (b *backend) open(tb testing.TB, url string) store.Store {
	tb.Helper()
	s, err := store.Open(tb.Context(), url, b.lease)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, s.Close()) })
	return s
}

func backends(tb testing.TB) []*backend {
	tb.Helper()
	masters := sync.OnceValue(func() string { return startMaster(tb).Addr() })
	n := 0
	return []*backend{
		{"masters", time.Second, func(testing.TB) string {
			n++
			return fmt.Sprintf("masters://%s?prefix=test-%d/", masters(), n)
		}},
		{"directory", 400 * time.Millisecond, func(tb testing.TB) string {
			tb.Helper()
			return "file://" + shm(tb)
		}},
		{"tcp", 400 * time.Millisecond, func(tb testing.TB) string {
			tb.Helper()
			return "tcp://" + serve(tb, "127.0.0.1:0").Addr()
		}},
	}
}

// TestStores holds all implementations to what Store promises.
func TestStores(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name string
		run  func(t *testing.T, b *backend)
	}{
		{"entries are set, read, listed and deleted", testEntries},
		{"any key and value within the limits is kept as it is", testKeysAndValues},
		{"bad arguments are refused", testBadArguments},
		{"of those who compare and set at a time one wins", testRaces},
		{"a watch never goes back and ends with what is there", testWatch},
		{"a watch ends with its function, its context and its store", testWatchEnds},
		{"a lease lasts as long as its store", testLease},
		{"a store that is closed is of no use", testClosed},
		{"a call ends with its context", testContext},
		{"what a killed process has leased is gone", testKilled},
		{"a stopped process is taken for dead, and told of it", testStopped},
	}
	for _, b := range backends(t) {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			for _, tc := range cases {
				t.Run(tc.name, func(t *testing.T) { tc.run(t, b) })
			}
		})
	}
}

func testEntries(t *testing.T, b *backend) {
	t.Helper()
	ctx, url := t.Context(), b.fresh(t)
	s, other := b.open(t, url), b.open(t, url)
	list, _, err := s.List(ctx, "")
	require.NoError(t, err)
	require.Empty(t, list)
	_, err = s.Get(ctx, "a/1")
	require.ErrorIs(t, err, store.ErrNotFound)
	require.ErrorIs(t, s.Delete(ctx, "a/1"), store.ErrNotFound)
	require.ErrorIs(t, s.Delete(ctx, "a/1", store.IfAbsent()), store.ErrNotFound)
	require.ErrorIs(t, s.Delete(ctx, "a/1", store.IfRevision(7)), store.ErrConflict)
	e, err := s.Put(ctx, "a/1", []byte("x"), store.IfRevision(7))
	require.ErrorIs(t, err, store.ErrConflict)
	require.Zero(t, e)

	one, err := s.Put(ctx, "a/1", []byte("x"), store.IfAbsent())
	require.NoError(t, err)
	require.Equal(t, store.Entry{Key: "a/1", Value: []byte("x"), Created: one.Modified, Modified: one.Modified}, one)
	got, err := other.Get(ctx, "a/1")
	require.NoError(t, err)
	require.Equal(t, one, got)
	is, err := other.Put(ctx, "a/1", []byte("y"), store.IfAbsent())
	require.ErrorIs(t, err, store.ErrConflict)
	require.Equal(t, one, is, "it is told what is there")
	two, err := other.Put(ctx, "a/1", []byte("y"), store.IfRevision(one.Modified))
	require.NoError(t, err)
	require.Equal(t, one.Created, two.Created)
	require.Greater(t, two.Modified, one.Modified)
	again, err := s.Put(ctx, "a/1", []byte("y"))
	require.NoError(t, err)
	require.Greater(t, again.Modified, two.Modified, "the same value is another revision")

	for _, key := range []string{"b/1", "a/2", "a", "a0"} {
		_, err = s.Put(ctx, key, nil)
		require.NoError(t, err)
	}
	list, revision, err := other.List(ctx, "a/")
	require.NoError(t, err)
	require.Equal(t, []string{"a/1", "a/2"}, keys(list))
	require.Equal(t, again, list[0])
	require.Empty(t, list[1].Value)
	require.GreaterOrEqual(t, revision, list[1].Modified)
	list, _, err = other.List(ctx, "")
	require.NoError(t, err)
	require.Equal(t, []string{"a", "a/1", "a/2", "a0", "b/1"}, keys(list))

	require.ErrorIs(t, s.Delete(ctx, "a/1", store.IfRevision(two.Modified)), store.ErrConflict)
	require.NoError(t, s.Delete(ctx, "a/1", store.IfRevision(again.Modified)))
	_, err = other.Get(ctx, "a/1")
	require.ErrorIs(t, err, store.ErrNotFound)
	anew, err := other.Put(ctx, "a/1", []byte("z"), store.IfAbsent())
	require.NoError(t, err)
	require.Greater(t, anew.Created, again.Modified, "it is another one")
}

func keys(list []store.Entry) (keys []string) {
	for _, e := range list {
		keys = append(keys, e.Key)
	}
	return keys
}

func testKeysAndValues(t *testing.T, b *backend) {
	t.Helper()
	ctx, url := t.Context(), b.fresh(t)
	s := b.open(t, url)
	binary := make([]byte, store.MaxValueBytes)
	for i := range binary {
		binary[i] = byte(i * 7)
	}
	want := map[string][]byte{
		".": nil, "..": {0}, "a/../b": []byte("\xff\xfe"), "%41": {1}, "A": {2}, "a": {3}, "~": {4}, "\n \x00\"\\<&>": {5}, "ключ/鍵": {6}, "big": binary,
		strings.Repeat("/", store.MaxKeyBytes): {7}, strings.Repeat("/", store.MaxKeyBytes-1): {8}, strings.Repeat("k", store.MaxKeyBytes): {9},
	}
	for key, value := range want {
		_, err := s.Put(ctx, key, value, store.IfAbsent(), store.Leased())
		require.NoError(t, err, "%q", key)
	}
	list, _, err := b.open(t, url).List(ctx, "")
	require.NoError(t, err)
	require.Len(t, list, len(want))
	for _, e := range list {
		require.Equal(t, string(want[e.Key]), string(e.Value), "%q", e.Key)
		got, err := s.Get(ctx, e.Key)
		require.NoError(t, err)
		require.Equal(t, e.Modified, got.Modified)
	}
	for key := range want {
		require.NoError(t, s.Delete(ctx, key), "%q", key)
	}
}

func testBadArguments(t *testing.T, b *backend) {
	t.Helper()
	ctx := t.Context()
	s := b.open(t, b.fresh(t))
	nothing := func([]store.Change) error { return nil }
	for _, tc := range []struct {
		name, key string
		want      error
	}{
		{"no key", "", store.ErrInvalid},
		{"no UTF-8", "a\xff", store.ErrInvalid},
		{"too long", strings.Repeat("k", store.MaxKeyBytes+1), store.ErrLimit},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := s.Put(ctx, tc.key, nil)
			require.ErrorIs(t, err, tc.want)
			_, err = s.Get(ctx, tc.key)
			require.ErrorIs(t, err, tc.want)
			require.ErrorIs(t, s.Delete(ctx, tc.key), tc.want)
			if tc.key != "" {
				_, _, err = s.List(ctx, tc.key)
				require.ErrorIs(t, err, tc.want)
				require.ErrorIs(t, s.Watch(ctx, tc.key, nothing), tc.want)
			}
		})
	}
	_, err := s.Put(ctx, "k", make([]byte, store.MaxValueBytes+1))
	require.ErrorIs(t, err, store.ErrLimit)
	_, err = s.Get(ctx, "k")
	require.ErrorIs(t, err, store.ErrNotFound)
}

// testRaces has eight goroutines of three stores count up to 160, and then take a lock.
func testRaces(t *testing.T, b *backend) {
	t.Helper()
	ctx, url := t.Context(), b.fresh(t)
	stores := []store.Store{b.open(t, url), b.open(t, url), b.open(t, url)}
	const racers, each = 8, 20
	won := make([]store.Entry, racers)
	race(t, racers, func(i int) error {
		s := stores[i%len(stores)]
		var is store.Entry
		for n := 0; n < each; {
			count, _ := strconv.Atoi(string(is.Value))
			next, err := s.Put(ctx, "count", strconv.AppendInt(nil, int64(count)+1, 10), store.IfRevision(is.Modified))
			switch {
			case err == nil:
				n++
			case !errors.Is(err, store.ErrConflict):
				return err
			}
			is = next
		}
		return nil
	})
	e, err := stores[0].Get(ctx, "count")
	require.NoError(t, err)
	require.Equal(t, strconv.Itoa(racers*each), string(e.Value))

	race(t, racers, func(i int) error {
		e, err := stores[i%len(stores)].Put(ctx, "lock", []byte{byte(i)}, store.IfAbsent(), store.Leased())
		if err == nil {
			won[i] = e
		} else if !errors.Is(err, store.ErrConflict) || e.Modified == 0 {
			return fmt.Errorf("%v: %w", e, err)
		}
		return nil
	})
	winners := 0
	for _, e := range won {
		if e.Modified != 0 {
			winners++
		}
	}
	require.Equal(t, 1, winners)
}

func race(t *testing.T, n int, f func(i int) error) {
	t.Helper()
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
}

// watched follows a watch, and checks that it makes sense.
type watched struct {
	mu    sync.Mutex
	there map[string]store.Entry
	last  map[string]uint64 // by key, the last revision that was told
	calls int
	wrong error
	done  chan error
}

func watch(tb testing.TB, s store.Store, prefix string) *watched {
	tb.Helper()
	ctx, cancel := context.WithCancel(tb.Context())
	w := &watched{there: make(map[string]store.Entry), last: make(map[string]uint64), done: make(chan error, 1)}
	go func() { w.done <- s.Watch(ctx, prefix, w.tell) }()
	tb.Cleanup(func() {
		cancel()
		if err := <-w.done; !errors.Is(err, store.ErrClosed) {
			require.ErrorIs(tb, err, context.Canceled)
		}
		require.NoError(tb, w.wrong)
	})
	return w
}

func (w *watched) tell(changes []store.Change) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls++
	for _, x := range changes {
		old, there := w.there[x.Key]
		switch {
		case x.Modified <= w.last[x.Key]:
			w.wrong = fmt.Errorf("%s goes back from %d to %d", x.Key, w.last[x.Key], x.Modified)
		case x.Deleted && (!there || x.Created != old.Created):
			w.wrong = fmt.Errorf("%s, which is not there, is deleted", x.Key)
		}
		if w.last[x.Key] = x.Modified; x.Deleted {
			delete(w.there, x.Key)
		} else {
			w.there[x.Key] = x.Entry
		}
	}
	return nil
}

// count is how many entries there are, as far as the watch has told.
func (w *watched) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.there)
}

// sees waits until the watch has told of just what a list has.
func (w *watched) sees(tb testing.TB, s store.Store, prefix string, within time.Duration) {
	tb.Helper()
	var seen, list []store.Entry
	ok := func() bool {
		var err error
		list, _, err = s.List(tb.Context(), prefix)
		require.NoError(tb, err)
		w.mu.Lock()
		defer w.mu.Unlock()
		seen = nil
		for _, e := range list {
			if x, there := w.there[e.Key]; there {
				seen = append(seen, x)
			}
		}
		return len(w.there) == len(list) && w.calls > 0 && slices.EqualFunc(seen, list, func(a, b store.Entry) bool {
			return a.Created == b.Created && a.Modified == b.Modified && bytes.Equal(a.Value, b.Value)
		})
	}
	for end := time.Now().Add(within); !ok(); time.Sleep(time.Millisecond) {
		require.True(tb, time.Now().Before(end), "told of %d, there are %v", len(seen), keys(list))
	}
}

func testWatch(t *testing.T, b *backend) {
	t.Helper()
	ctx, url := t.Context(), b.fresh(t)
	s, other := b.open(t, url), b.open(t, url)
	_, err := s.Put(ctx, "w/0", []byte("before"))
	require.NoError(t, err)
	var watches []*watched
	for _, x := range []store.Store{s, other, other} {
		watches = append(watches, watch(t, x, "w/"))
	}
	none := watch(t, other, "none/")
	race(t, 4, func(i int) error {
		s := []store.Store{s, other}[i%2]
		for n := range 50 {
			key := fmt.Sprint("w/", rand.N(4))
			if rand.N(3) == 0 {
				if err := s.Delete(ctx, key); err != nil && !errors.Is(err, store.ErrNotFound) {
					return err
				}
			} else if _, err := s.Put(ctx, key, fmt.Append(nil, i, n)); err != nil {
				return err
			}
			if _, err := s.Put(ctx, "x", nil); err != nil {
				return err
			}
		}
		return nil
	})
	for _, w := range watches {
		w.sees(t, s, "w/", 5*time.Second)
	}
	none.sees(t, s, "none/", 5*time.Second)
	require.Equal(t, 1, none.calls, "of nothing it is told once")
}

func testWatchEnds(t *testing.T, b *backend) {
	t.Helper()
	s := b.open(t, b.fresh(t))
	enough := &store.UnavailableError{Err: errors.New("it is the function's own")}
	require.Same(t, enough, s.Watch(t.Context(), "", func([]store.Change) error { return enough }))
	ctx, cancel := context.WithCancel(t.Context())
	require.Equal(t, context.Canceled, s.Watch(ctx, "", func([]store.Change) error { cancel(); return nil }))
	require.ErrorIs(t, s.Watch(t.Context(), "", func([]store.Change) error { return s.Close() }), store.ErrClosed)
}

func testLease(t *testing.T, b *backend) {
	t.Helper()
	ctx, url := t.Context(), b.fresh(t)
	s, other := b.open(t, url), b.open(t, url)
	lost := s.Lost()
	require.Equal(t, b.lease, s.Lease())
	for _, key := range []string{"l/mine", "l/taken", "l/freed"} {
		_, err := s.Put(ctx, key, nil, store.Leased())
		require.NoError(t, err)
	}
	_, err := other.Put(ctx, "l/taken", nil, store.Leased())
	require.NoError(t, err)
	_, err = other.Put(ctx, "l/freed", nil)
	require.NoError(t, err)
	w := watch(t, other, "l/")
	for end := time.Now().Add(b.lease * 3 / 2); time.Now().Before(end); time.Sleep(b.lease / 50) {
		require.Less(t, s.Confirmed(), b.lease, "it is renewed in time")
	}
	select {
	case <-lost:
		require.Fail(t, "the lease is lost")
	default:
	}
	w.sees(t, other, "l/", time.Second)
	require.Equal(t, 3, w.count())
	require.NoError(t, s.Close())
	<-lost
	list, _, err := other.List(ctx, "l/")
	require.NoError(t, err)
	require.Equal(t, []string{"l/freed", "l/taken"}, keys(list), "what others have put since stays")
	w.sees(t, other, "l/", time.Second)
}

func testClosed(t *testing.T, b *backend) {
	t.Helper()
	ctx := t.Context()
	s := b.open(t, b.fresh(t))
	require.NoError(t, s.Close())
	_, err := s.Get(ctx, "k")
	require.ErrorIs(t, err, store.ErrClosed)
	_, err = s.Put(ctx, "k", nil)
	require.ErrorIs(t, err, store.ErrClosed)
	require.ErrorIs(t, s.Delete(ctx, "k"), store.ErrClosed)
	_, _, err = s.List(ctx, "")
	require.ErrorIs(t, err, store.ErrClosed)
	require.ErrorIs(t, s.Watch(ctx, "", func([]store.Change) error { return nil }), store.ErrClosed)
	<-s.Lost()
	require.NoError(t, s.Close())
}

func testContext(t *testing.T, b *backend) {
	t.Helper()
	s := b.open(t, b.fresh(t))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for name, call := range map[string]func() error{
		"get":    func() error { _, err := s.Get(ctx, "k"); return err },
		"put":    func() error { _, err := s.Put(ctx, "k", nil); return err },
		"delete": func() error { return s.Delete(ctx, "k") },
		"list":   func() error { _, _, err := s.List(ctx, ""); return err },
	} {
		err := call()
		require.ErrorIs(t, err, context.Canceled, name)
		var gone *store.UnavailableError
		require.ErrorAs(t, err, &gone, name)
	}
	_, err := s.Get(t.Context(), "k")
	require.ErrorIs(t, err, store.ErrNotFound, "nothing was done")
}

func testKilled(t *testing.T, b *backend) {
	t.Helper()
	url := b.fresh(t)
	s := b.open(t, url)
	c := startChild(t, "announce", url, b.lease)
	w := watch(t, s, "child/")
	c.says("announced")
	w.sees(t, s, "child/", 5*time.Second)
	require.Equal(t, 2, w.count())
	at := time.Now()
	c.signal(syscall.SIGKILL)
	for w.count() > 0 {
		require.Less(t, time.Since(at), b.lease+time.Second)
		time.Sleep(time.Millisecond)
	}
}

func testStopped(t *testing.T, b *backend) {
	t.Helper()
	url := b.fresh(t)
	s := b.open(t, url)
	c := startChild(t, "announce", url, b.lease)
	w := watch(t, s, "child/")
	c.says("announced")
	w.sees(t, s, "child/", 5*time.Second)
	c.signal(syscall.SIGSTOP)
	at := time.Now()
	for {
		list, _, err := s.List(t.Context(), "child/")
		require.NoError(t, err)
		if len(list) == 0 {
			break
		}
		require.Less(t, time.Since(at), b.lease+time.Second)
		time.Sleep(time.Millisecond)
	}
	require.GreaterOrEqual(t, time.Since(at), b.lease*6/10, "no earlier than the lease, which was last renewed a third of it before")
	c.signal(syscall.SIGCONT)
	c.says("lost")
	c.says("announced")
	w.sees(t, s, "child/", 5*time.Second)
	require.Equal(t, 2, w.count())
}
