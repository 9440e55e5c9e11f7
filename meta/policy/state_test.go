package policy

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// pages is the store of a policy's state.
type pages map[uint32][]byte

func (p pages) put(page uint32, data []byte) {
	if len(data) == 0 {
		delete(p, page)
		return
	}
	p[page] = slices.Clone(data)
}

func (p pages) restore(t *testing.T, limit uint64) ghosts {
	t.Helper()
	g := newGhosts()
	for _, page := range slices.Sorted(maps.Keys(p)) {
		require.NoError(t, g.restore(page, p[page], limit))
	}
	return g
}

// TestGhostsOverManyPages: what was flushed in parts comes back as it was, with
// the ring grown and gone around, ghosts taken from the middle, pages aged out
// and the limit shrunk and raised.
func TestGhostsOverManyPages(t *testing.T) {
	for seed := range uint64(2) {
		rng := rand.New(rand.NewPCG(seed, 3))
		g, want, disk := newGhosts(), []uint64(nil), pages{}
		limit := 5 * ghostPage
		for step := range 15_000 {
			switch k := rng.IntN(1000); {
			case k < 700:
				key := rng.Uint64N(10_000) // 0 is an unknown key
				g.push(key, uint64(limit))
				want = want[max(0, len(want)-limit+1):]
				if key != 0 {
					if i := slices.Index(want, key); i >= 0 {
						want[i] = 0
					}
					want = append(want, key)
				}
			case k < 995:
				key := 1 + rng.Uint64N(10_000)
				i := slices.Index(want, key)
				require.Equal(t, i >= 0, g.take(key), "step %d", step)
				if i >= 0 {
					want[i] = 0
				}
			case k < 998:
				g.flush(false, disk.put)
				require.LessOrEqual(t, len(disk), limit/ghostPage+10)
				got := disk.restore(t, ghostsHardLimit)
				require.Equal(t, g.stateHash(), got.stateHash(), "step %d", step)
				require.Equal(t, g.at, got.at, "step %d", step)
				g = got
			default:
				limit = 1 + rng.IntN(6*ghostPage)
			}
		}
		require.LessOrEqual(t, len(g.ring), 16*ghostPage, "the ring is bounded by the limit")
		whole := pages{}
		g.flush(false, disk.put)
		g.flush(true, whole.put)
		got := whole.restore(t, ghostsHardLimit)
		require.Equal(t, g.stateHash(), got.stateHash())
		lower := whole.restore(t, 100)
		require.LessOrEqual(t, len(lower.at), 100, "a lowered limit keeps the newest")
	}
}

// TestStateRefused: pages of another policy, release or a damaged store are
// refused with an error.
func TestStateRefused(t *testing.T) {
	header := func(first, next byte) []byte {
		return []byte{0, 0, 0, 0, 0, 0, 0, first, 0, 0, 0, 0, 0, 0, 0, next}
	}
	full := make([]byte, MaxStatePage)
	full[7], full[15] = 5, 5
	for _, c := range []struct {
		name, policy string
		page         uint32
		data         []byte
		before       []byte // page 0, if any
	}{
		{"stateless", "lru", 0, []byte{1}, nil},
		{"sieve page", "sieve", 1, make([]byte, 8), nil},
		{"sieve length", "sieve", 0, make([]byte, 7), nil},
		{"ghost header length", "s3fifo", 0, make([]byte, 15), nil},
		{"ghosts reversed", "s3fifo", 0, header(9, 8), nil},
		{"ghosts too many", "s3fifo", 0, append(make([]byte, 8), 0, 0, 0, 1, 0, 0, 0, 0), nil},
		{"ghost header twice", "s3fifo", 0, header(0, 1), header(0, 1)},
		{"ghost page without header", "s3fifo", 1, full, nil},
		{"ghost page length", "s3fifo", 1, full[:8], header(0, 2)},
		{"ghost page out of reach", "s3fifo", 2, full, header(0, 2)},
		{"ghost twice", "s3fifo", 1, full, header(0, 2)},
		{"ghost beyond the last", "s3fifo", 1, full, header(0, 1)},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, err := New(c.policy, Config{}, nil)
			require.NoError(t, err)
			if c.before != nil {
				require.NoError(t, p.RestoreState(0, c.before))
			}
			require.ErrorContains(t, p.RestoreState(c.page, c.data), "state page")
		})
	}
}

// FuzzRestoreState: no page makes a policy panic, and what it accepts it writes
// again such that it is accepted with the same hash.
func FuzzRestoreState(f *testing.F) {
	f.Add(true, []byte{0, 0, 0, 0, 0, 0, 0, 1}, uint32(0), []byte{})
	f.Add(false, []byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2}, uint32(1), []byte{0, 0, 0, 0, 0, 0, 0, 9})
	f.Fuzz(func(t *testing.T, sieve bool, first []byte, page uint32, second []byte) {
		name := "s3fifo"
		if sieve {
			name = "sieve"
		} else if len(second) > 0 {
			second = append(second, make([]byte, MaxStatePage)...)[:MaxStatePage]
		}
		cfg := Config{MaxGhosts: 2000}
		p, err := New(name, cfg, nil)
		require.NoError(t, err)
		if p.RestoreState(0, first) != nil || (len(second) > 0 && p.RestoreState(page, second) != nil) {
			return
		}
		written := pages{}
		p.FlushState(true, written.put)
		again, err := New(name, cfg, nil)
		require.NoError(t, err)
		for _, n := range slices.Sorted(maps.Keys(written)) {
			require.NoError(t, again.RestoreState(n, written[n]))
		}
		require.Equal(t, p.StateHash(), again.StateHash())
	})
}

// oneInfo is a table of a single entry.
type oneInfo struct {
	Table

	info Info
}

func (o oneInfo) Info(Slot) Info { return o.info }

// TestTTLSteps: an expiry is never taken for earlier than it is, nor for later
// by more than 1/512 of the life or a second, and few queues cover any lives.
func TestTTLSteps(t *testing.T) {
	for _, c := range []struct {
		name          string
		added, expiry uint64 // milliseconds
		lifeMS        uint64
		want          uint64
	}{
		{"exact second", 1_000_000, 1_005_000, 0, 1005},
		{"rounded up to a second", 1_000_000, 1_005_001, 0, 1006},
		{"511 s: steps of 1 s", 0, 511_000, 0, 511},
		{"1025 s: steps of 2 s", 0, 1_025_000, 0, 1026},
		{"a day: steps of 128 s", 500, 86_400_500, 0, 86_528 - 86_528%128},
		{"the policy's own life", 2_000, 0, 3_000, 5},
		{"no life at all", 2_000, 0, 0, never},
		{"its own life counts first", 2_000, 9_000, 3_000, 9},
		{"expired when registered", 9_000_000, 1_000, 0, 1},
		{"life beyond the end of time", 2_000, 0, ^uint64(0), never},
		{"expiry beyond the widest queue", 0, ^uint64(0), 0, never - 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := ttl{t: oneInfo{info: Info{AddedMS: c.added, ExpiresMS: c.expiry}}, lifeMS: c.lifeMS}
			require.Equal(t, int(c.want), int(p.key(0)))
		})
	}
	rng := rand.New(rand.NewPCG(1, 1))
	queues := map[uint64]bool{}
	for range 50_000 {
		life := rng.Uint64N(1 << (10 + rng.Uint64N(32))) // up to 139 years
		p := ttl{t: oneInfo{info: Info{AddedMS: 1, ExpiresMS: 1 + life}}}
		key := p.key(0)
		if at := key * 1000; at < 1+life || at > 1+life+1000+life/512 {
			t.Fatalf("a life of %d ms is taken to end at %d", life, at)
		}
		queues[key] = true
	}
	require.LessOrEqual(t, len(queues), 32*1024)
}
