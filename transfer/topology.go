package transfer

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Topology tells which NICs of a host are close to which of its memory. It goes to peers as a part of the [Descriptor].
type Topology struct {
	Nodes []TopologyNode `json:"nodes,omitempty"` // NUMA nodes
	NICs  []TopologyNIC  `json:"nics,omitempty"`
	GPUs  []TopologyGPU  `json:"gpus,omitempty"`
	// Matrix has an entry for each memory location: "cpu:N" is the memory of NUMA node N, "gpu:N" that of the N-th GPU in
	// the order of PCI addresses.
	Matrix map[string]Preference `json:"matrix,omitempty"`
}

// TopologyNode is a NUMA node.
type TopologyNode struct {
	ID   int    `json:"id"`
	CPUs string `json:"cpus"` // as the kernel writes it: 0-3,8
}

// TopologyNIC is an RDMA device or a network interface.
type TopologyNIC struct {
	Name      string   `json:"name"`
	RDMA      bool     `json:"rdma,omitempty"`
	Node      int      `json:"node"`                // -1 if it is not known
	PCI       string   `json:"pci,omitempty"`       // from the root complex down: pci0000:3a/0000:3a:00.0/0000:3b:00.0
	Addresses []string `json:"addresses,omitempty"` // IP addresses of the interface, or of the RDMA device's
}

// TopologyGPU is a GPU.
type TopologyGPU struct {
	Name string `json:"name"` // its memory location
	Node int    `json:"node"`
	PCI  string `json:"pci"`
}

// Preference is which NICs a memory location's bytes should take, by name.
type Preference struct {
	Preferred []string `json:"preferred"`           // behind the same PCIe switch, or on the same NUMA node
	Secondary []string `json:"secondary,omitempty"` // all others
}

// Bounds of a topology, which may come from a peer: twice what the largest machines have.
const (
	maxTopology     = 256 // nodes, NICs, GPUs and locations, each
	maxTopologyName = 512 // bytes of a name or path
)

// ParseTopology reads a topology from JSON.
func ParseTopology(b []byte) (*Topology, error) {
	t := &Topology{}
	if err := json.Unmarshal(b, t); err != nil {
		return nil, fmt.Errorf("transfer: read a topology: %w", err)
	}
	if err := t.check(); err != nil {
		return nil, err
	}
	return t, nil
}

// check refuses what is too large to be a host's, and NICs that are not there.
func (t *Topology) check() error {
	if t == nil {
		return nil
	}
	if max(len(t.Nodes), len(t.NICs), len(t.GPUs), len(t.Matrix)) > maxTopology {
		return fmt.Errorf("transfer: a topology of more than %d nodes, NICs, GPUs or locations", maxTopology)
	}
	names := map[string]bool{}
	for i := range t.NICs {
		n := &t.NICs[i]
		if len(n.Addresses) > maxTopology || len(n.PCI) > maxTopologyName {
			return fmt.Errorf("transfer: the topology's NIC %.40q is too large", n.Name)
		}
		names[n.Name] = true
	}
	for location, p := range t.Matrix {
		for _, name := range slices.Concat(p.Preferred, p.Secondary) {
			if !names[name] || len(location) > maxTopologyName {
				return fmt.Errorf("transfer: the topology's matrix has NIC %.40q for %.40q, which is not among its NICs", name, location)
			}
		}
	}
	return nil
}

// nic finds the NIC that has an address, host or host:port.
func (t *Topology) nic(address string) *TopologyNIC {
	if t == nil || address == "" {
		return nil
	}
	if host, _, err := net.SplitHostPort(address); err == nil {
		address = host
	}
	i := slices.IndexFunc(t.NICs, func(n TopologyNIC) bool { return !n.RDMA && slices.Contains(n.Addresses, address) })
	if i < 0 {
		return nil
	}
	return &t.NICs[i]
}

// far reports whether an address is that of a NIC which a location prefers others to. What is not known is not far.
func (t *Topology) far(location, address string) bool {
	n := t.nic(address)
	return n != nil && slices.Contains(t.Matrix[location].Secondary, n.Name)
}

// matters reports whether some NIC is far from some memory.
func (t *Topology) matters() bool {
	if t == nil {
		return false
	}
	for _, p := range t.Matrix {
		if len(p.Secondary) > 0 {
			return true
		}
	}
	return false
}

// hostTopology is this host's topology, read once.
var hostTopology = sync.OnceValue(func() *Topology {
	t, err := ReadTopology("/sys")
	if err != nil {
		return &Topology{} // nothing is known: nothing is preferred
	}
	return t
})

// ReadTopology reads the topology of a host from its sysfs, at root. Addresses are those of this host's interfaces.
func ReadTopology(root string) (*Topology, error) {
	return readTopology(root, interfaceAddresses)
}

func readTopology(root string, addresses func(name string) []string) (*Topology, error) {
	t := &Topology{}
	for _, read := range []func(root string) error{
		t.readNodes, func(root string) error { return t.readNICs(root, addresses) }, t.readGPUs,
	} {
		if err := read(root); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("transfer: read the topology: %w", err)
		}
	}
	t.fill()
	return t, t.check()
}

func (t *Topology) readNodes(root string) error {
	dirs, err := filepath.Glob(filepath.Join(root, "devices/system/node/node[0-9]*"))
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		id, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(dir), "node"))
		if err != nil {
			continue
		}
		t.Nodes = append(t.Nodes, TopologyNode{ID: id, CPUs: readLine(filepath.Join(dir, "cpulist"))})
	}
	slices.SortFunc(t.Nodes, func(a, b TopologyNode) int { return cmp.Compare(a.ID, b.ID) })
	return nil
}

// readNICs lists RDMA devices and interfaces. Virtual ones, which have no device, are left out.
func (t *Topology) readNICs(root string, addresses func(string) []string) error {
	for _, class := range []string{"infiniband", "net"} {
		list, err := os.ReadDir(filepath.Join(root, "class", class))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, entry := range list {
			dir := filepath.Join(root, "class", class, entry.Name(), "device")
			path, err := filepath.EvalSymlinks(dir)
			if err != nil {
				continue
			}
			n := TopologyNIC{Name: entry.Name(), RDMA: class == "infiniband", PCI: pciPath(path), Node: deviceNode(path)}
			names := []string{n.Name}
			if n.RDMA {
				names = children(filepath.Join(dir, "net"))
			}
			for _, name := range names {
				n.Addresses = append(n.Addresses, addresses(name)...)
			}
			t.NICs = append(t.NICs, n)
		}
	}
	return nil
}

// PCI classes of GPUs: 3D controllers and accelerators, and displays of the makers of those; others are for screens.
const (
	classDisplay     = "0x0300"
	class3D          = "0x0302"
	classAccelerator = "0x1200"
	vendorNVIDIA     = "0x10de"
	vendorAMD        = "0x1002"
)

func (t *Topology) readGPUs(root string) error {
	for _, name := range children(filepath.Join(root, "bus/pci/devices")) {
		path, err := filepath.EvalSymlinks(filepath.Join(root, "bus/pci/devices", name))
		if err != nil {
			continue
		}
		class, vendor := readLine(filepath.Join(path, "class")), readLine(filepath.Join(path, "vendor"))
		switch {
		case strings.HasPrefix(class, class3D), strings.HasPrefix(class, classAccelerator):
		case strings.HasPrefix(class, classDisplay) && (vendor == vendorNVIDIA || vendor == vendorAMD):
		default:
			continue
		}
		t.GPUs = append(t.GPUs, TopologyGPU{Name: "gpu:" + strconv.Itoa(len(t.GPUs)), Node: deviceNode(path), PCI: pciPath(path)})
	}
	return nil
}

// fill makes the matrix.
func (t *Topology) fill() {
	t.Matrix = map[string]Preference{}
	for _, n := range t.Nodes {
		t.Matrix[cpuLocation(n.ID)] = t.prefer(func(nic *TopologyNIC) int { return nodeDistance(n.ID, nic.Node) })
	}
	for i := range t.GPUs {
		g := &t.GPUs[i]
		t.Matrix[g.Name] = t.prefer(func(nic *TopologyNIC) int {
			if n := sharedBridges(g.PCI, nic.PCI); n > 0 {
				return -n
			}
			return nodeDistance(g.Node, nic.Node)
		})
	}
}

// prefer sorts NICs by their distance: the closest are preferred.
func (t *Topology) prefer(distance func(*TopologyNIC) int) (p Preference) {
	if len(t.NICs) == 0 {
		return Preference{Preferred: []string{}}
	}
	sorted := make([]*TopologyNIC, len(t.NICs))
	for i := range t.NICs {
		sorted[i] = &t.NICs[i]
	}
	slices.SortStableFunc(sorted, func(a, b *TopologyNIC) int { return cmp.Compare(distance(a), distance(b)) })
	for _, n := range sorted {
		if distance(n) == distance(sorted[0]) {
			p.Preferred = append(p.Preferred, n.Name)
		} else {
			p.Secondary = append(p.Secondary, n.Name)
		}
	}
	return p
}

// nodeDistance is 0 on one NUMA node, and where a node is not known, and 1 between two.
func nodeDistance(a, b int) int {
	if a == b || a < 0 || b < 0 {
		return 0
	}
	return 1
}

// sharedBridges counts the bridges that two devices have in common below their root complex.
func sharedBridges(a, b string) (n int) {
	as, bs := strings.Split(a, "/"), strings.Split(b, "/")
	for i := 0; i < min(len(as), len(bs)) && as[i] == bs[i] && as[i] != ""; i++ {
		n = i // the first is the root complex
	}
	return n
}

// cpuLocation names the memory of a NUMA node.
func cpuLocation(node int) string { return "cpu:" + strconv.Itoa(node) }

// pciElement is a directory of a root complex, or of a PCI function.
var pciElement = regexp.MustCompile(`^(pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])$`)

// pciPath is the part of a sysfs path that is PCI. What hangs below, virtio for one, is left out.
func pciPath(path string) string {
	var all []string
	for part := range strings.SplitSeq(path, string(filepath.Separator)) {
		if pciElement.MatchString(part) {
			all = append(all, part)
		}
	}
	return strings.Join(all, "/")
}

// deviceNode is the NUMA node of a device or of what it hangs below; -1 if that is not known.
func deviceNode(path string) int {
	for range 4 { // a virtio device's PCI function is one above
		if node, err := strconv.Atoi(readLine(filepath.Join(path, "numa_node"))); err == nil {
			return max(node, -1)
		}
		path = filepath.Dir(path)
	}
	return -1
}

// readLine reads a short file. One that cannot be read is empty.
func readLine(path string) string {
	b, err := os.ReadFile(path) //nolint:gosec // below sysfs
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// children lists a directory. One that cannot be read is empty.
func children(dir string) (names []string) {
	list, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	for _, entry := range list {
		names = append(names, entry.Name())
	}
	return names
}

// interfaceAddresses are the IP addresses of an interface of this host.
func interfaceAddresses(name string) (all []string) {
	i, err := net.InterfaceByName(name)
	if err != nil {
		return nil
	}
	list, err := i.Addrs()
	if err != nil {
		return nil
	}
	for _, a := range list {
		if n, ok := a.(*net.IPNet); ok {
			all = append(all, n.IP.String())
		}
	}
	return all
}
