package node

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"larder/transfer"
)

// testMemory is what a kernel says of a host, none of it if it is "".
func testMemory(t *testing.T, nodes, allowed string, bound ...int) *memory {
	t.Helper()
	dir := t.TempDir()
	h := &memory{sys: dir, status: filepath.Join(dir, "status"), policy: func() []int { return bound }}
	if nodes != "" {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "has_memory"), []byte(nodes+"\n"), 0o600))
	}
	if allowed != "" {
		require.NoError(t, os.WriteFile(h.status, []byte("Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t"+allowed+"\n"), 0o600))
	}
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "node1"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "node1", "meminfo"),
		[]byte("Node 1 MemTotal:       16384 kB\nNode 1 MemFree:        1 kB\n"), 0o600))
	return h
}

// TestTheNodeOfMemory: without being told a node knows it only where there is no other that its memory could come from.
func TestTheNodeOfMemory(t *testing.T) {
	one := &transfer.Topology{Nodes: []transfer.TopologyNode{{ID: 3}}}
	for name, c := range map[string]struct {
		h    *memory
		top  *transfer.Topology
		want memoryNode
	}{
		"a host with one":           {testMemory(t, "0", "0"), nil, memoryNode{plus1: 1, only: true}},
		"a host with two":           {testMemory(t, "0-1", "0-1"), nil, memoryNode{}},
		"a cpuset with one of them": {testMemory(t, "0-1", "1"), nil, memoryNode{plus1: 2}},
		"bound to one of them":      {testMemory(t, "0-1,4", "0-1,4", 4), nil, memoryNode{plus1: 5}},
		"bound to two of three":     {testMemory(t, "0-2", "0-2", 0, 2), nil, memoryNode{}},
		"a topology with one":       {testMemory(t, "0-1", "0-1"), one, memoryNode{plus1: 4, only: true}},
		"nothing is known":          {testMemory(t, "", ""), nil, memoryNode{}},
		"nonsense":                  {testMemory(t, "x", "1-0"), nil, memoryNode{}},
	} {
		got, err := c.h.nodeFor(&Config{DRAM: 8 * mib, Topology: c.top})
		require.NoError(t, err, name)
		require.Equal(t, c.want, got, name)
	}
	require.Zero(t, memoryNode{plus1: 1, only: true}.bind(), "it needs not be bound to the only one")
	require.Equal(t, 2, memoryNode{plus1: 2}.bind())
}

func TestTheNodeOfMemoryThatIsNamed(t *testing.T) {
	h := testMemory(t, "0-1", "0-1")
	for n, c := range map[int]struct {
		size uint64
		want string
	}{
		0:    {8 * mib, ""},
		1:    {8 * mib, ""},
		2:    {8 * mib, "NUMA node 2 has no memory: this host's are [0 1]"},
		-1:   {8 * mib, "NUMA node -1 has no memory"},
		1024: {8 * mib, "NUMA node 1024 has no memory"},
	} {
		got, err := h.nodeFor(&Config{DRAM: c.size, NUMA: &n})
		if c.want != "" {
			require.ErrorIs(t, err, ErrConfig)
			require.ErrorContains(t, err, c.want)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, memoryNode{plus1: uint64(n) + 1, asked: true}, got)
	}
	one := 1
	_, err := h.nodeFor(&Config{DRAM: 17 * mib, NUMA: &one})
	require.ErrorContains(t, err, "NUMA node 1 has 16777216")
	_, err = h.nodeFor(&Config{NUMA: &one})
	require.ErrorContains(t, err, "there is none")
}

// TestMemoryThatCannotBeBound: a node that is named is kept to, one that was found out is not told.
func TestMemoryThatCannotBeBound(t *testing.T) {
	d := &dram{size: 8 * mib, numa: memoryNode{plus1: maxNUMA}, log: slog.New(slog.DiscardHandler)}
	d.uuid = newUUID()
	require.NoError(t, d.prepare([16]byte{1}, 1))
	require.Zero(t, d.describe().NUMA)
	require.NoError(t, d.close(false))

	d.numa = memoryNode{plus1: maxNUMA, asked: true}
	err := d.prepare([16]byte{1}, 1)
	require.ErrorIs(t, err, ErrMedium)
	require.True(t, errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPERM), err)
	require.NoError(t, d.close(false))
}

// TestPlacementsFindMemoryByItsNode: what a node says of its memory, named and bound, is what masters are told.
func TestPlacementsFindMemoryByItsNode(t *testing.T) {
	zero := 0
	nodes := hostMemory.nodes()
	if len(nodes) == 0 || nodes[0] != 0 {
		t.Skip("this host has no NUMA node 0")
	}
	m := newMasters(t)
	n, _ := m.start(Config{DRAM: 8 * mib, NUMA: &zero})
	ready(t, n)
	d := m.device("")
	require.EqualValues(t, 1, d.ready.NUMA)
}
