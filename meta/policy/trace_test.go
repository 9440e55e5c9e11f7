package policy_test

import (
	"bufio"
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/meta/policy"
	"larder/meta/policy/policytest"
)

type request struct {
	Timestamp uint64   `json:"timestamp"`
	HashIDs   []uint64 `json:"hash_ids"`
}

// traceTTLMS is the life of entries under "ttl" in these tests: ten minutes.
const traceTTLMS = 600_000

func ratio(tb testing.TB, name string, capacity int, requests []request) float64 {
	tb.Helper()
	c, err := policytest.NewCache(name, policy.Config{TTLMS: traceTTLMS}, capacity)
	require.NoError(tb, err)
	for _, r := range requests {
		c.Request(r.Timestamp, r.HashIDs)
		require.LessOrEqual(tb, c.Pool.Policy.Len(), capacity)
	}
	return c.Ratio()
}

func readTrace(tb testing.TB) []request {
	tb.Helper()
	path := os.Getenv("LARDER_TRACE")
	if path == "" {
		tb.Skip("set LARDER_TRACE to the published conversation trace (JSON lines) to compare hit ratios with it")
	}
	f, err := os.Open(path)
	require.NoError(tb, err)
	defer func() { require.NoError(tb, f.Close()) }()
	var requests []request
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r request
		require.NoError(tb, json.Unmarshal(lines.Bytes(), &r))
		requests = append(requests, r)
	}
	require.NoError(tb, lines.Err())
	return requests
}

// TestPublishedTrace compares hit ratios by block with independently computed
// ones, to three digits.
//
// On this trace the hand of SIEVE never comes around, whatever the capacity:
// new blocks, seldom used again, always lie before it. SIEVE then evicts what
// LFU does, hit for hit, so these figures do not tell the two apart. That the
// hand goes around rightly is for TestAgainstReference to show.
func TestPublishedTrace(t *testing.T) {
	requests := readTrace(t)
	want := map[string]map[int]float64{
		"lru": {
			1000: 0.0445, 5859: 0.1355, 10_000: 0.2112, 30_000: 0.3257,
			50_000: 0.3546, 100_000: 0.3637, 200_000: 0.3664,
		},
		"sieve": {1000: 0.0481, 5859: 0.0966, 10_000: 0.1318, 30_000: 0.2759, 50_000: 0.3438, 200_000: 0.3664},
	}
	for _, name := range policy.Names() {
		for _, capacity := range []int{1000, 5859, 10_000, 30_000, 50_000, 100_000, 200_000} {
			got := ratio(t, name, capacity, requests)
			t.Logf("%-12s %7d blocks: %.4f", name, capacity, got)
			if w, known := want[name][capacity]; known {
				require.InDelta(t, w, got, 0.00005, "%s at %d blocks", name, capacity)
			}
			require.LessOrEqual(t, got, 0.3665, "no policy can hit a block that was never stored")
		}
	}
}
