package cluster

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
)

// Evictions returns what has been evicted so far: own entries, those of departed clients, those of other clients.
func (c *Cluster) Evictions() (own, departed, other uint64) {
	c.t.Helper()
	status, err := c.Leader().Status()
	require.NoError(c.t, err)
	e := status.Stats.Evictions
	return e[1], e[2], e[3]
}

// Fill stores n values of size bytes each under name, in batches. No store may fail.
func Fill(t *testing.T, x *client.Client, name string, n, size int) {
	t.Helper()
	for from := 0; from < n; from += fillBatch {
		items := make([]client.Item, min(fillBatch, n-from))
		for i := range items {
			key := fmt.Sprintf("%s/%d", name, from+i)
			items[i] = client.Item{Key: []byte(key), Value: MakeValue(nil, key, 1, size)}
		}
		_, err := x.PutBatch(t.Context(), items)
		require.NoError(t, err, "store %d of %d", from, n)
	}
}

// fillBatch is how many values fill stores at a time.
const fillBatch = 32

// Held counts which of the n values that fill stored are there, and verifies those.
func Held(t *testing.T, x *client.Client, name string, n int) int {
	t.Helper()
	count := 0
	for from := 0; from < n; from += 64 {
		keys := make([][]byte, min(64, n-from))
		for i := range keys {
			keys[i] = fmt.Appendf(nil, "%s/%d", name, from+i)
		}
		values, err := x.GetBatch(t.Context(), keys, nil)
		require.NoError(t, err)
		for i, value := range values {
			if value == nil {
				continue
			}
			_, err := CheckValue(string(keys[i]), value)
			require.NoError(t, err)
			count++
		}
	}
	return count
}

// Pause stops a process for a while.
func Pause(n *Node, d time.Duration) {
	n.Signal(syscall.SIGSTOP)
	sleep(d)
	n.Signal(syscall.SIGCONT)
}
