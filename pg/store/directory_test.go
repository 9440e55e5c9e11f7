package store_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/pg/store"
)

// TestKilledWritersOfADirectory kills processes while they write as fast as they can: what is there is whole, all that they have leased
// goes, and what is left can be written.
func TestKilledWritersOfADirectory(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	b := &backend{lease: time.Second}
	s := b.open(t, "file://"+dir)
	w := watch(t, s, "churn/")
	for range 12 {
		children := []*child{startChild(t, "churn", "file://"+dir, b.lease), startChild(t, "churn", "file://"+dir, b.lease)}
		for _, c := range children {
			c.says("up")
		}
		time.Sleep(rand.N(10 * time.Millisecond))
		for _, c := range children {
			c.signal(syscall.SIGKILL)
		}
	}
	require.Eventually(t, func() bool {
		leases, err := os.ReadDir(filepath.Join(dir, "leases"))
		require.NoError(t, err)
		return len(leases) == 1
	}, 5*time.Second, time.Millisecond)
	w.sees(t, s, "churn/", 5*time.Second)
	for i := range 8 {
		key := fmt.Sprint("churn/", i)
		if err := s.Delete(t.Context(), key); err != nil {
			require.ErrorIs(t, err, store.ErrNotFound)
		}
		_, err := s.Put(t.Context(), key, nil, store.IfAbsent())
		require.NoError(t, err)
	}
	w.sees(t, s, "churn/", 5*time.Second)
}

// A store that begins where processes have died knows at once that they have.
func TestADirectoryThatDeadProcessesLeft(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	c := startChild(t, "announce", "file://"+dir, time.Hour)
	c.says("announced")
	c.signal(syscall.SIGKILL)
	_ = c.cmd.Wait()
	list, _, err := (&backend{}).open(t, "file://"+dir).List(t.Context(), "")
	require.NoError(t, err)
	require.Empty(t, list)
}

// What no store has written, or a host did not write to the end before it crashed, is as good as nothing.
func TestGarbageInADirectory(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	b := &backend{lease: 300 * time.Millisecond}
	s := b.open(t, "file://"+dir)
	_, err := s.Put(t.Context(), "k", []byte("v"))
	require.NoError(t, err)
	_, err = s.Put(t.Context(), "good", nil)
	require.NoError(t, err)
	w := watch(t, s, "")
	w.sees(t, s, "", time.Second)
	path := func(names ...string) string { return filepath.Join(append([]string{dir}, names...)...) }
	require.NoError(t, os.WriteFile(path("entries", "k"), []byte("garbage"), 0o600))
	require.NoError(t, os.WriteFile(path("entries", "new"), nil, 0o600))
	good, err := os.ReadFile(path("entries", "good"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path("entries", "other"), good, 0o600))
	require.NoError(t, os.Mkdir(path("leases", "dir"), 0o700))
	require.NoError(t, os.Truncate(path("lock"), 7))
	for _, key := range []string{"k", "new", "other"} {
		_, err = s.Get(t.Context(), key)
		require.ErrorIs(t, err, store.ErrNotFound, key)
	}
	list, _, err := s.List(t.Context(), "")
	require.NoError(t, err)
	require.Equal(t, []string{"good"}, keys(list))
	again, err := s.Put(t.Context(), "k", []byte("w"), store.IfAbsent())
	require.NoError(t, err)
	require.Greater(t, again.Modified, list[0].Modified, "revisions go on")
	w.sees(t, s, "", 5*time.Second)

	require.NoError(t, b.open(t, "file://"+dir).Close())
	require.NoFileExists(t, path("entries", "new"), "it is cleared away with the next lease that ends")
	require.NoFileExists(t, path("entries", "other"))
	w.sees(t, s, "", time.Second)
}

// A directory that is taken away is none any more, until somebody makes it anew.
func TestADirectoryThatIsTakenAway(t *testing.T) {
	for name, take := range map[string]func(dir string) error{
		"removed":    os.RemoveAll,
		"moved away": func(dir string) error { return os.Rename(dir, dir+".gone") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(shm(t), "d")
			b := &backend{lease: 300 * time.Millisecond}
			s := b.open(t, "file://"+dir)
			_, err := s.Put(t.Context(), "k", nil)
			require.NoError(t, err)
			w := watch(t, s, "")
			w.sees(t, s, "", time.Second)
			lost := s.Lost()
			require.Eventually(t, func() bool { return take(dir) == nil }, time.Second, time.Microsecond, "the store may make a file meanwhile")
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err = s.Put(ctx, "k", nil)
			var gone *store.UnavailableError
			require.ErrorAs(t, err, &gone)
			require.Equal(t, "file://"+dir, gone.Where)
			require.Eventually(t, func() bool { return s.Confirmed() > b.lease }, 5*time.Second, time.Millisecond)
			b.open(t, "file://"+dir)
			<-lost
			_, err = s.Put(t.Context(), "k2", nil, store.Leased())
			require.NoError(t, err)
			w.sees(t, s, "", 5*time.Second)
			require.Equal(t, 1, w.count())
		})
	}
}

func TestOpenRefuses(t *testing.T) {
	t.Parallel()
	file := filepath.Join(shm(t), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	var bad *store.URLError
	var gone *store.UnavailableError
	for _, tc := range []struct {
		url  string
		want any
		says string
	}{
		{"", &bad, "no scheme"},
		{"/dir", &bad, "no scheme"},
		{"etcd://host:1", &bad, `"etcd" is not known`},
		{"masters://", &bad, `the address "" is not host:port`},
		{"masters://host", &bad, `"host" is not host:port`},
		{"masters://a:1,b", &bad, `"b" is not host:port`},
		{"masters://a:1/x", &bad, "is not host:port"},
		{"masters://a:1?prefixes=x", &bad, `no option "prefixes"`},
		{"masters://a:1?%zz", &bad, "query cannot be read"},
		{"tcp://host:1,host:2", &bad, "is not host:port"},
		{"tcp://host:1?tenant=x", &bad, `no option "tenant"`},
		{"tcp://:", &bad, "is not host:port"},
		{"file://dir", &bad, "no absolute path"},
		{"file://%zz", &bad, "no absolute path"},
		{"file://" + file, &gone, "not a directory"},
		{"tcp://127.0.0.1:1", &gone, "tcp://127.0.0.1:1"},
		{"masters://127.0.0.1:1", &gone, "masters://127.0.0.1:1"},
		{"masters://unix:/none", &gone, "masters://unix:/none"},
	} {
		t.Run(tc.url, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			_, err := store.Open(ctx, tc.url, 0)
			require.ErrorAs(t, err, tc.want)
			require.ErrorContains(t, err, tc.says)
		})
	}
	for _, lease := range []time.Duration{-1, time.Millisecond, 2 * time.Hour} {
		_, err := store.Open(t.Context(), "tcp://127.0.0.1:1", lease)
		require.ErrorIs(t, err, store.ErrInvalid)
	}
	_, err := store.Open(t.Context(), "masters://127.0.0.1:1?prefix="+string(make([]byte, 257)), 0)
	require.Error(t, err)
}
