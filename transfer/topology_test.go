package transfer

import (
	"bytes"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// sysfs builds the tree that a file of testdata/topology describes.
func sysfs(t *testing.T, name string) (root string) {
	t.Helper()
	root = t.TempDir()
	text, err := os.ReadFile(filepath.Join("testdata/topology", name))
	require.NoError(t, err)
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		path, content, isFile := strings.Cut(line, " = ")
		link, target, isLink := strings.Cut(line, " -> ")
		switch {
		case strings.HasPrefix(line, "#"):
		case isFile:
			path = filepath.Join(root, path)
			require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
			require.NoError(t, os.WriteFile(path, []byte(content+"\n"), 0o600))
		case isLink:
			link = filepath.Join(root, link)
			require.NoError(t, os.MkdirAll(filepath.Dir(link), 0o700))
			require.NoError(t, os.Symlink(filepath.Join(root, target), link))
		default:
			t.Fatal(line)
		}
	}
	return root
}

// TestTopology reads a machine of two sockets: memory prefers the NICs of its node, a GPU the one behind its switch.
func TestTopology(t *testing.T) {
	address := map[string][]string{
		"eno1": {"10.0.0.1"}, "ib0": {"10.1.0.1"}, "ib1": {"10.1.1.1"}, "ib2": {"10.1.2.1"}, "ib3": {"10.1.3.1", "fe80::3"},
	}
	topology, err := readTopology(sysfs(t, "two-sockets.txt"), func(name string) []string { return address[name] })
	require.NoError(t, err)
	require.Equal(t, []TopologyNode{{0, "0-31,64-95"}, {1, "32-63,96-127"}}, topology.Nodes)
	require.Len(t, topology.NICs, 9, "four RDMA devices, their interfaces, and one for management")
	require.Equal(t, TopologyNIC{
		Name: "mlx5_3", RDMA: true, Node: 1, Addresses: []string{"10.1.3.1", "fe80::3"},
		PCI: "pci0000:b7/0000:b7:01.0/0000:b8:00.0/0000:b9:00.0/0000:ba:00.0",
	}, topology.NICs[3])
	require.Equal(t, "ib3", topology.nic("10.1.3.1:7").Name)
	require.Equal(t, "ib3", topology.nic("[fe80::3]:7").Name)
	require.Nil(t, topology.nic("10.9.9.9:7"))
	require.Len(t, topology.GPUs, 4, "the screen's is none")
	require.Equal(t, TopologyGPU{
		Name: "gpu:2", Node: 1, PCI: "pci0000:97/0000:97:01.0/0000:98:00.0/0000:99:01.0/0000:9b:00.0",
	}, topology.GPUs[2])
	require.Equal(t, map[string]Preference{
		"cpu:0": {[]string{"mlx5_0", "mlx5_1", "eno1", "ib0", "ib1"}, []string{"mlx5_2", "mlx5_3", "ib2", "ib3"}},
		"cpu:1": {[]string{"mlx5_2", "mlx5_3", "ib2", "ib3"}, []string{"mlx5_0", "mlx5_1", "eno1", "ib0", "ib1"}},
		"gpu:0": {[]string{"mlx5_0", "ib0"}, []string{"mlx5_1", "eno1", "ib1", "mlx5_2", "mlx5_3", "ib2", "ib3"}},
		"gpu:1": {[]string{"mlx5_1", "ib1"}, []string{"mlx5_0", "eno1", "ib0", "mlx5_2", "mlx5_3", "ib2", "ib3"}},
		"gpu:2": {[]string{"mlx5_2", "ib2"}, []string{"mlx5_3", "ib3", "mlx5_0", "mlx5_1", "eno1", "ib0", "ib1"}},
		"gpu:3": {[]string{"mlx5_3", "ib3"}, []string{"mlx5_2", "ib2", "mlx5_0", "mlx5_1", "eno1", "ib0", "ib1"}},
	}, topology.Matrix)
	require.True(t, topology.far("cpu:0", "10.1.2.1:80"))
	require.False(t, topology.far("cpu:0", "10.1.0.1:80"))
	require.False(t, topology.far("", "10.1.2.1:80"), "nobody knows where the memory lies")
	require.False(t, topology.far("cpu:0", ""), "nor which NIC the kernel takes")
	text, err := json.Marshal(topology)
	require.NoError(t, err)
	again, err := ParseTopology(text)
	require.NoError(t, err)
	require.Equal(t, topology, again)
}

// TestTopologyOfThisHost can be read, whatever it is, and of one that tells nothing.
func TestTopologyOfThisHost(t *testing.T) {
	topology, err := ReadTopology("/sys")
	require.NoError(t, err)
	require.Len(t, topology.Matrix, len(topology.Nodes)+len(topology.GPUs))
	topology, err = ReadTopology(t.TempDir())
	require.NoError(t, err)
	require.False(t, topology.matters())
	for _, bad := range []string{`[]`, `{"matrix":{"cpu:0":{"preferred":["x"]}}}`} {
		_, err := ParseTopology([]byte(bad))
		require.Error(t, err, bad)
	}
	mem := noise(t, 1<<20)
	if len(hostTopology().Nodes) > 0 {
		require.Regexp(t, `^cpu:\d+$`, memoryLocation(mem))
	}
	require.Equal(t, "cpu:3", mostCommon([]int32{3, -2, 1, 3, -2, -2, -2}))
	require.Empty(t, mostCommon([]int32{-2, -14}))
}

// twoNICs is a topology of two NICs, the loopback addresses 127.0.0.1 and 127.0.0.2, each close to one half of the memory.
func twoNICs() *Topology {
	t := &Topology{
		Nodes: []TopologyNode{{ID: 0}, {ID: 1}},
		NICs:  []TopologyNIC{{Name: "a", Node: 0, Addresses: []string{"127.0.0.1"}}, {Name: "b", Node: 1, Addresses: []string{"127.0.0.2"}}},
	}
	t.fill()
	return t
}

// TestRailsFollowTheTopology has each buffer's bytes take the rail that is close to it, at either end, and the other if that
// one does not work.
func TestRailsFollowTheTopology(t *testing.T) {
	two := []string{"127.0.0.1:0", "127.0.0.2:0"}
	carried := func(s *Segment) (rails []uint64) {
		for _, p := range s.Paths() {
			rails = append(rails, p.Slices)
		}
		return rails
	}
	read := func(t *testing.T, here *Engine, seg *Segment, b *Buffer, local []byte) {
		t.Helper()
		require.NoError(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: b.Info().Handle, Local: local}))
		require.True(t, holds(b, 0, local))
	}
	tcp := []string{TransportTCP}
	const few = 5 // one in a while takes the other rail, to compare
	t.Run("of the buffer", func(t *testing.T) {
		there := engine(t, Config{Listen: two, Topology: twoNICs(), Transports: tcp})
		here := engine(t, Config{Topology: &Topology{}})
		near := register(t, there, noise(t, 4<<20), BufferOptions{Location: "cpu:0"})
		far := register(t, there, noise(t, 4<<20), BufferOptions{Location: "cpu:1"})
		seg := open(t, here, there.Addresses()...)
		require.Equal(t, twoNICs(), seg.Descriptor().Topology)
		read(t, here, seg, near, make([]byte, 4<<20))
		require.InDelta(t, 64, carried(seg)[0], few)
		read(t, here, seg, far, make([]byte, 4<<20))
		require.InDelta(t, 64, carried(seg)[1], few)
	})
	t.Run("of local memory", func(t *testing.T) {
		there := engine(t, Config{Listen: []string{anyPort}, Transports: tcp, Topology: &Topology{}})
		here := engine(t, Config{From: []string{"127.0.0.1", "127.0.0.2"}, Topology: twoNICs()})
		b := register(t, there, noise(t, 4<<20), BufferOptions{})
		local := make([]byte, 4<<20)
		register(t, here, local, BufferOptions{Location: "cpu:1"})
		seg := open(t, here, there.Addresses()...)
		read(t, here, seg, b, local)
		require.InDelta(t, 64, carried(seg)[1], few)
	})
	t.Run("one that does not work", func(t *testing.T) {
		l, err := net.Listen("tcp", two[0])
		require.NoError(t, err)
		require.NoError(t, l.Close())
		cfg := Config{Listen: two[1:], Advertise: []string{l.Addr().String()}, Topology: twoNICs(), Transports: tcp}
		there := engine(t, cfg)
		d := there.Describe()
		d.Rails = append(d.Rails, there.target.listeners[0].Addr().String())
		here := engine(t, Config{})
		b := register(t, there, bytes.Repeat([]byte{7}, 4<<20), BufferOptions{Location: "cpu:0"})
		seg, err := here.OpenDescriptor(d)
		require.NoError(t, err)
		require.NoError(t, seg.Refresh(t.Context()))
		read(t, here, seg, b, make([]byte, 4<<20))
		require.Equal(t, []uint64{0, 64}, carried(seg))
	})
}

// TestASecondaryRail takes slices that prefer another rail only if that one is paused, has failed with them, or is much slower.
func TestASecondaryRail(t *testing.T) {
	seg := &Segment{e: engine(t, Config{})}
	l := newLane(seg, TransportTCP, 1, nil)
	l.add("", "a")
	l.add("", "b")
	a, b := l.rails[0], l.rails[1]
	a.running = 1
	s := &slice{prefer: 1}
	const now = 1000
	b.compared = now
	require.False(t, l.leaves(a, s, now), "it is preferred itself")
	require.True(t, l.leaves(b, s, now))
	require.False(t, l.leaves(b, &slice{}, now), "nothing is preferred")
	require.False(t, l.leaves(b, &slice{prefer: 1, avoid: 1}, now), "the other has failed with it")
	a.pace.add(5000)
	require.True(t, l.leaves(b, s, now), "nobody knows how fast this one is")
	require.False(t, l.leaves(b, s, now+compareEvery), "so that it is known")
	require.True(t, l.leaves(b, s, now+compareEvery), "once in a while")
	b.pace.add(2000)
	require.True(t, l.leaves(b, s, now+compareEvery))
	b.pace.v.Store(1000)
	require.False(t, l.leaves(b, s, now+compareEvery), "the other is much slower")
	b.pace.v.Store(5000)
	a.pausedUntil = now + 2*compareEvery
	require.False(t, l.leaves(b, s, now+compareEvery))
	a.pausedUntil, a.running = 0, 0
	require.False(t, l.leaves(b, s, now+compareEvery), "nothing leads there now")
}
