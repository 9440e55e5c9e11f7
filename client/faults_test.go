package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// Clients store and read while their nodes forget their buffers, hang and come back. Whatever is read is what was stored, and
// what was stored stays: nothing that was still on its way lands in a page that holds something else by then.
func TestNothingIsLostOrMixedUpWhileNodesFail(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	f.features = protocol.FeatureCopies
	// What a client gives up is not given again by the fake: there is room for many times what is stored.
	nodes := []*fakeNode{f.addNode(t, "dram", 128<<20), f.addNode(t, "dram", 128<<20)}
	for _, n := range nodes {
		n.first = true
		n.behindProxy(t)
	}
	change := func(replicas int) func(*Config) {
		return func(cfg *Config) {
			cfg.Instance, cfg.Replicas = fmt.Sprint("client-", replicas), replicas
			cfg.CallTimeout, cfg.Timeout = 200*time.Millisecond, 20*time.Second
		}
	}
	clients := []*Client{f.open(t, change(1)), f.open(t, change(2))}
	stop := make(chan struct{})
	var faults, work sync.WaitGroup
	faults.Go(func() {
		r := rand.New(rand.NewPCG(1, 2))
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(r.IntN(30)) * time.Millisecond):
			}
			n := nodes[r.IntN(len(nodes))]
			if r.IntN(3) == 0 {
				n.forget(t)
				continue
			}
			n.proxy.freeze()
			time.Sleep(time.Duration(r.IntN(400)) * time.Millisecond)
			n.proxy.thaw()
		}
	})
	var mu sync.Mutex
	stored := map[string]int{}
	for w := range 4 {
		work.Go(func() {
			r, c := rand.New(rand.NewPCG(3, uint64(w))), clients[w%2]
			for i := range 40 {
				key, size := fmt.Sprintf("w%d-%d", w, i), 1+r.IntN(9000)
				if _, err := c.Put(t.Context(), []byte(key), value(key, size)); err == nil {
					mu.Lock()
					stored[key] = size
					mu.Unlock()
				}
				mu.Lock()
				var other string
				for other = range stored {
					break
				}
				want := stored[other]
				mu.Unlock()
				if other == "" {
					continue
				}
				got, err := clients[r.IntN(2)].Get(t.Context(), []byte(other), nil)
				if err != nil && !errors.Is(err, ErrNotFound) {
					t.Error(err)
				}
				if err == nil && string(got) != string(value(other, want)) {
					t.Errorf("wrong bytes of %s", other)
				}
			}
		})
	}
	work.Wait()
	close(stop)
	faults.Wait()
	require.Greater(t, len(stored), 100)
	for key, size := range stored {
		require.EventuallyWithT(t, func(t *assert.CollectT) { // a device that has failed is asked for again
			got, err := clients[0].Get(context.Background(), []byte(key), nil)
			require.NoError(t, err, key)
			require.Equal(t, value(key, size), got, key)
		}, 10*time.Second, time.Millisecond)
	}
}
