package pg

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/pg/store"
)

// testLease is as long as leases are elsewhere: with a shorter one ranks of a busy machine lose theirs.
const testLease = 3 * time.Second

// job is worlds in this process, each with a store of its own on one directory.
type job struct {
	t      testing.TB
	dir    string
	worlds []*World
	stores []store.Store
}

// newJob makes a job of n worlds. change, if not nil, changes the configuration of each.
func newJob(tb testing.TB, n int, change func(*Config)) *job {
	tb.Helper()
	j := &job{t: tb, dir: tb.TempDir()}
	for range n {
		j.add(change)
	}
	return j
}

// add adds a world, with the next global rank.
func (j *job) add(change func(*Config)) *World {
	j.t.Helper()
	ctx, cancel := context.WithTimeout(j.t.Context(), 20*time.Second)
	defer cancel()
	s, err := store.Directory(ctx, j.dir, testLease)
	require.NoError(j.t, err)
	return j.addTo(s, change)
}

// addTo adds a world that has a store, which is closed after it.
func (j *job) addTo(s store.Store, change func(*Config)) *World {
	j.t.Helper()
	ctx, cancel := context.WithTimeout(j.t.Context(), 20*time.Second)
	defer cancel()
	log := slog.New(slog.NewTextHandler(j.t.Output(), nil)).With(slog.Int("at", len(j.worlds)))
	cfg := Config{Job: "test", Rank: len(j.worlds), Store: s, Logger: log}
	if change != nil {
		change(&cfg)
	}
	w, err := New(ctx, cfg)
	require.NoError(j.t, err)
	j.worlds, j.stores = append(j.worlds, w), append(j.stores, s)
	j.t.Cleanup(func() { require.NoError(j.t, w.Close()); require.NoError(j.t, s.Close()) })
	return w
}

// groups makes a group of the worlds with these global ranks.
func (j *job) groups(cfg GroupConfig, ranks ...int) []*Group {
	j.t.Helper()
	ctx, cancel := context.WithTimeout(j.t.Context(), 20*time.Second)
	defer cancel()
	cfg.Ranks = ranks
	if cfg.ID == "" {
		cfg.ID = "world"
	}
	all := make([]*Group, len(ranks))
	errs := make([]error, len(ranks))
	var wg sync.WaitGroup
	for i, r := range ranks {
		wg.Go(func() { all[i], errs[i] = j.worlds[r].Group(ctx, cfg) })
	}
	wg.Wait()
	for _, err := range errs {
		require.NoError(j.t, err)
	}
	return all
}

// each calls f for every group at once, and fails with what any of them says.
func each(tb testing.TB, groups []*Group, f func(g *Group) error) {
	tb.Helper()
	errs := make([]error, len(groups))
	var wg sync.WaitGroup
	for i, g := range groups {
		wg.Go(func() {
			if err := f(g); err != nil {
				errs[i] = fmt.Errorf("rank %d: %w", g.Rank(), err)
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		require.NoError(tb, err)
	}
}

// floats is memory of float32s.
func floats(x ...float32) []byte {
	b := make([]byte, 0, 4*len(x))
	for _, v := range x {
		b = binary.NativeEndian.AppendUint32(b, math.Float32bits(v))
	}
	return b
}

// fill is memory of n float32s that are all the same.
func fill(x float32, n int) []byte {
	b := make([]byte, 0, 4*n)
	for range n {
		b = binary.NativeEndian.AppendUint32(b, math.Float32bits(x))
	}
	return b
}

func float32At(b []byte, i int) float32 {
	return math.Float32frombits(binary.NativeEndian.Uint32(b[4*i:]))
}
