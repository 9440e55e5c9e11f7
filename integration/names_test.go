package integration

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/integration/cluster"
)

// TestNamesSurviveLeaders kills the leader while names are set by compare-and-set and watched: no change that was
// acknowledged is lost or done twice, and the watcher ends with what is there.
func TestNamesSurviveLeaders(t *testing.T) {
	cluster.SkipShort(t)
	c := cluster.Start(t, cluster.Options{Members: 3})
	writers := []*client.Client{c.Open(client.Config{}), c.Open(client.Config{})}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var mu sync.Mutex
	seen := map[string]client.Name{}
	watched := make(chan error, 1)
	go func() {
		watched <- writers[0].WatchNames(ctx, "n/", func(changes []client.NameChange) error {
			mu.Lock()
			defer mu.Unlock()
			for _, x := range changes {
				if x.Modified < seen[x.Key].Modified {
					return fmt.Errorf("%s goes back from revision %d to %d", x.Key, seen[x.Key].Modified, x.Modified)
				}
				if seen[x.Key] = x.Name; x.Deleted {
					delete(seen, x.Key)
				}
			}
			return nil
		})
	}()
	counted := make(chan int, len(writers))
	until := time.Now().Add(8 * time.Second)
	for _, w := range writers {
		go func() { counted <- count(ctx, w, until) }()
	}
	for range 2 {
		time.Sleep(2 * time.Second)
		leader := c.Leader()
		leader.Kill()
		leader.Restart()
		leader.Ready()
	}
	total := <-counted + <-counted
	last, err := writers[1].GetName(ctx, "n/count")
	require.NoError(t, err)
	var n int
	_, err = fmt.Sscan(string(last.Value), &n)
	require.NoError(t, err)
	require.Positive(t, total)
	require.GreaterOrEqual(t, n, total, "every acknowledged step counts")
	require.LessOrEqual(t, n, total+len(writers)*10, "and none twice, but for those whose answer nobody had")
	t.Logf("counted to %d, acknowledged %d", n, total)
	cluster.Within(t, "the watcher", func() error {
		mu.Lock()
		defer mu.Unlock()
		if seen["n/count"].Modified != last.Modified {
			return fmt.Errorf("it is at %d of %d", seen["n/count"].Modified, last.Modified)
		}
		return nil
	})
	cancel()
	require.Error(t, <-watched)
	c.Settled()
}

// count adds to a number by compare-and-set, and returns how often it did.
func count(ctx context.Context, c *client.Client, until time.Time) (n int) {
	for time.Now().Before(until) {
		at, value := uint64(0), 0
		if old, err := c.GetName(ctx, "n/count"); err == nil {
			at = old.Modified
			_, _ = fmt.Sscan(string(old.Value), &value)
		}
		if _, err := c.PutName(ctx, "n/count", fmt.Append(nil, value+1), client.IfRevision(at)); err == nil {
			n++
		}
	}
	return n
}
