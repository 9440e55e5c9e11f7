package client_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/node"
	"larder/protocol"
	"larder/server"
	"larder/tiering/ssd"
)

// startNode starts a node with memory, and a disk if diskMiB is not 0, that clients reach by transfer alone. It returns a
// function that stops it, and the ids of its devices.
func startNode(t *testing.T, s *server.Server, host string, memMiB, diskMiB int) (stop func(), ids []uint64) {
	t.Helper()
	return startNodeAt(t, s, host, memMiB, diskMiB, t.TempDir())
}

// startNodeAt is startNode with its disk in a directory.
func startNodeAt(t *testing.T, s *server.Server, host string, memMiB, diskMiB int, dir string) (stop func(), ids []uint64) {
	t.Helper()
	n, stop := runNode(t, s, host, memMiB, diskMiB, dir)
	status := n.Status()
	for _, d := range status.Devices {
		ids = append(ids, d.ID)
	}
	return stop, ids
}

// runNode is startNodeAt for those who look into the node.
func runNode(t *testing.T, s *server.Server, host string, memMiB, diskMiB int, dir string) (n *node.Node, stop func()) {
	t.Helper()
	cfg := node.Config{
		Masters: []string{s.Addr()}, Host: host, Listen: []string{"127.0.0.1:0"}, DRAM: uint64((memMiB + 2) * mib), NoMap: true,
		RegionSize: 4 * mib,
	}
	if diskMiB > 0 {
		cfg.SSD = []node.SSD{{Dir: dir, Size: uint64(diskMiB * mib)}}
	}
	n, err := node.New(cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			cancel()
			require.NoError(t, <-ended)
			require.NoError(t, n.Close())
		}
	}
	t.Cleanup(stop)
	require.Eventually(t, func() bool { status := n.Status(); return status.Ready() }, 20*time.Second, 5*time.Millisecond)
	return n, stop
}

// text makes n bytes that only this key has.
func text(key []byte, n int) []byte { return bytes.Repeat(append(key, ' '), n/(len(key)+1)+1)[:n] }

func TestReplicasOutliveANode(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 8})
	stop, a := startNode(t, s, "a", 32, 0)
	startNode(t, s, "b", 32, 0)
	c := open(t, s, client.Config{Near: []string{"a"}, Tier: "dram", Replicas: 2, Checksums: true})
	reader := open(t, s, client.Config{})
	keys := names("k", 20)
	for _, k := range keys {
		_, err := c.Put(t.Context(), k, text(k, 100_000))
		require.NoError(t, err)
	}
	require.EqualValues(t, len(keys), c.Stats().Replicas)
	l, err := reader.Lookup(t.Context(), keys[0])
	require.NoError(t, err)
	require.Equal(t, a[0], l.Device)
	stop()
	for _, k := range keys {
		require.Eventually(t, func() bool {
			got, err := reader.Get(t.Context(), k, nil)
			return err == nil && bytes.Equal(text(k, 100_000), got)
		}, 10*time.Second, 5*time.Millisecond, "%s", k)
	}
}

func TestWritingThroughToADisk(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 8})
	startNode(t, s, "a", 8, 64)
	c := open(t, s, client.Config{WriteThrough: "ssd"})
	var items []client.Item
	for _, k := range names("k", 20) {
		items = append(items, client.Item{Key: k, Value: text(k, 100_000)})
	}
	_, err := c.PutBatch(t.Context(), items)
	require.NoError(t, err)
	require.EqualValues(t, len(items), c.Stats().Replicas)
	require.Zero(t, c.Stats().RemoteReads)
	for i := range items {
		got, err := c.Get(t.Context(), items[i].Key, nil)
		require.NoError(t, err)
		require.Equal(t, items[i].Value, got)
	}
	require.Zero(t, c.Stats().RemoteReads, "memory that is mapped costs less than a disk")
}

// TestWhatIsDeletedLeavesTheDisk: a home discards what it has copied to its own regions and nobody wants any more.
func TestWhatIsDeletedLeavesTheDisk(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 16})
	dir := t.TempDir()
	n, stop := runNode(t, s, "a", 8, 64, dir)
	store := func() *ssd.Stats { return n.Status().Devices[1].Store }
	c := open(t, s, client.Config{Checksums: true})
	keys := names("k", 20)
	copyAll := func() {
		t.Helper()
		for _, k := range keys {
			_, err := c.Put(t.Context(), k, text(k, 100_000))
			require.NoError(t, err)
		}
		_, err := c.Copy(t.Context(), protocol.CopyRequest{Keys: keys, Tier: "ssd", Move: true})
		require.NoError(t, err)
		for _, k := range keys {
			require.Eventually(t, func() bool {
				l, err := c.Lookup(t.Context(), k)
				return err == nil && l.Device == n.Status().Devices[1].ID
			}, 10*time.Second, 5*time.Millisecond)
		}
	}
	copyAll()
	one := store().LiveBytes / int64(len(keys))
	require.Positive(t, one)
	_, err := c.Delete(t.Context(), keys[1:]...)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return store().LiveBytes <= one }, 20*time.Second, 5*time.Millisecond)
	require.EqualValues(t, 19*100_000, store().DiscardedBytes)
	for range 3 {
		copyAll()
		for _, k := range keys {
			got, err := c.Get(t.Context(), k, nil)
			require.NoError(t, err)
			require.Equal(t, text(k, 100_000), got)
		}
		_, err := c.Delete(t.Context(), keys[1:]...)
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool { return store().LiveBytes <= one }, 20*time.Second, 5*time.Millisecond)
	got, err := c.Get(t.Context(), keys[0], nil)
	require.NoError(t, err)
	require.Equal(t, text(keys[0], 100_000), got)
	require.Zero(t, n.Status().Devices[1].Undiscarded)
	require.Zero(t, c.Stats().ChecksumFaults+c.Stats().Condemned)

	stop()
	_, err = c.Delete(t.Context(), keys[0])
	require.NoError(t, err)
	n, _ = runNode(t, s, "a", 8, 64, dir)
	require.Eventually(t, func() bool { return store().LiveBytes == 0 }, 20*time.Second, 5*time.Millisecond,
		"what came free meanwhile")
}

// TestDamageOnADiskIsNoMissForEver: whoever stores a key again whose bytes have rotted finds it free.
func TestDamageOnADiskIsNoMissForEver(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 8})
	dir := t.TempDir()
	startNodeAt(t, s, "a", 8, 64, dir)
	c := open(t, s, client.Config{Tier: "ssd"})
	values := map[string][]byte{}
	for _, k := range names("k", 3) {
		b := make([]byte, 50_000) // which do not compress
		_, _ = rand.Read(b)
		values[string(k)] = b
		_, err := c.Put(t.Context(), k, b)
		require.NoError(t, err)
	}
	rot(t, dir, values["k-1"][:4096])
	for k, b := range values {
		got, err := c.Get(t.Context(), []byte(k), nil)
		if k == "k-1" {
			require.ErrorIs(t, err, client.ErrNotFound)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, b, got)
	}
	require.EqualValues(t, 1, c.Stats().Condemned)
	res, err := c.Put(t.Context(), []byte("k-1"), values["k-1"])
	require.NoError(t, err)
	require.True(t, res.Stored)
	got, err := c.Get(t.Context(), []byte("k-1"), nil)
	require.NoError(t, err)
	require.Equal(t, values["k-1"], got)
}

// rot turns a bit in what a store has written.
func rot(t *testing.T, dir string, written []byte) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.segment"))
	require.NoError(t, err)
	for _, name := range files {
		b, err := os.ReadFile(name)
		require.NoError(t, err)
		at := bytes.Index(b, written)
		if at < 0 {
			continue
		}
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		require.NoError(t, err)
		_, err = f.WriteAt([]byte{written[0] ^ 1}, int64(at))
		require.NoError(t, err)
		require.NoError(t, f.Close())
		return
	}
	require.Fail(t, "it is not there")
}

func TestLayersOnADiskAndTheirPromotion(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 8})
	startNode(t, s, "a", 8, 64)
	disk := open(t, s, client.Config{Tier: "ssd", Checksums: true})
	sizes := []int{70_000, 130_000, 5}
	value := text([]byte("k"), 200_005)
	w, err := disk.PutLayers(t.Context(), []byte("k"), sizes)
	require.NoError(t, err)
	for i, from := 0, 0; i < len(sizes); i++ {
		require.NoError(t, w.Launch(i, value[from:from+sizes[i]]))
		from += sizes[i]
	}
	_, err = w.Finish(t.Context())
	require.NoError(t, err)

	c := open(t, s, client.Config{Checksums: true})
	store(t, c, []byte("has a region"))
	g, err := c.GetLayers(t.Context(), []byte("k"), sizes)
	require.NoError(t, err)
	got := make([]byte, len(value))
	for i, from := 0, 0; i < len(sizes); i++ {
		require.NoError(t, g.Launch(i, got[from:from+sizes[i]]))
		require.NoError(t, g.Wait(t.Context(), i))
		from += sizes[i]
	}
	require.NoError(t, g.Close())
	require.Equal(t, value, got)

	require.Eventually(t, func() bool { // it is wanted faster when it has been used often enough
		got, err := c.Get(t.Context(), []byte("k"), nil)
		require.NoError(t, err)
		require.Equal(t, value, got)
		return c.Stats().Promoted == 1
	}, 10*time.Second, 5*time.Millisecond)
	far := c.Stats().RemoteReads
	require.Eventually(t, func() bool {
		before := c.Stats().RemoteReads
		_, err := c.Get(t.Context(), []byte("k"), nil)
		require.NoError(t, err)
		return c.Stats().RemoteReads == before
	}, 10*time.Second, 5*time.Millisecond, fmt.Sprint(far, " reads came from the disk"))
}

func TestEntriesAreMovedOnDemand(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 8})
	_, a := startNode(t, s, "a", 32, 0)
	for name, sums := range map[string]bool{"with checksums": true, "without": false} {
		t.Run(name, func(t *testing.T) {
			c := open(t, s, client.Config{Checksums: sums, Near: []string{"elsewhere"}, Avoid: []string{"a"}})
			keys := names(name, 10)
			for _, k := range keys {
				_, err := c.Put(t.Context(), k, text(k, 100_000))
				require.NoError(t, err)
			}
			rep, err := c.Copy(t.Context(), protocol.CopyRequest{Keys: append(keys, []byte("none")), Node: "a", Move: true})
			require.NoError(t, err)
			require.Len(t, rep.Tasks, 1)
			require.False(t, rep.Found[len(keys)])
			var status []protocol.TaskStatus
			require.Eventually(t, func() bool {
				status, err = c.TaskStatus(t.Context(), rep.Tasks...)
				return err == nil && len(status) == 1 && status[0].State == "done"
			}, 10*time.Second, 5*time.Millisecond)
			require.EqualValues(t, len(keys), status[0].Copied)
			for _, k := range keys {
				l, err := c.Lookup(t.Context(), k)
				require.NoError(t, err)
				require.Equal(t, a[0], l.Device)
				got, err := c.Get(t.Context(), k, nil)
				require.NoError(t, err)
				require.Equal(t, text(k, 100_000), got)
			}
			require.EqualValues(t, len(keys), c.Stats().RemoteReads)
		})
	}
}
