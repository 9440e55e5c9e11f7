//go:build rdma && cgo && linux

package pg

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/pg/reduce"
	"larder/transfer"
	"larder/transfer/verbs"
)

// byRDMA is a shape where every rank is a host of its own, and has an engine that writes by its NICs alone.
func byRDMA(t *testing.T) (shape func(*Config), engines *[]*transfer.Engine) {
	t.Helper()
	engines = new([]*transfer.Engine)
	return func(c *Config) {
		nics, stop, err := verbs.OpenNICs(nil)
		require.NoError(t, err)
		if len(nics) == 0 {
			t.Skip("no RDMA device here: run the test by go test -exec integration/emul/uml-exec.sh")
		}
		e, err := transfer.New(transfer.Config{
			Listen: []string{"127.0.0.1:0"}, NICs: nics, Transports: []string{transfer.TransportRDMA}, Topology: &transfer.Topology{},
		})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, e.Close()); require.NoError(t, stop()) })
		*engines = append(*engines, e)
		c.Engine, c.Transports, c.Host = e, []string{"rdma"}, fmt.Sprint("host", c.Rank)
		c.Listen = []string{"127.0.0.1:0"} // where ranks greet each other
	}, engines
}

// All collectives between hosts, over lanes that NICs write; then a rank is gone, and the others go on.
func TestCollectivesByRDMA(t *testing.T) {
	const n = 4
	shape, engines := byRDMA(t)
	j := newJob(t, n, shape)
	groups := j.groups(GroupConfig{Retry: true}, upTo(n)...)
	for _, count := range []int{1, 1000, 100_000} {
		each(t, groups, func(g *Group) error { return allKinds(t, g, n, count) })
	}
	for i, e := range *engines {
		var made uint64
		for _, s := range e.EndpointStats() {
			made += s.QPsCreated
		}
		require.NotZero(t, made, "rank %d has written by its NIC", i)
	}
	require.NoError(t, j.worlds[1].Close())
	each(t, []*Group{groups[0], groups[2], groups[3]}, func(g *Group) error {
		buf := fill(float32(g.Rank()), 100_000)
		_, err := g.Do(AllReduce(buf, buf, reduce.F32, reduce.Sum))
		require.Equal(t, fill(5, 100_000), buf)
		return err
	})
}
