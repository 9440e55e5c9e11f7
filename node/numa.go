package node

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// memoryNode is the NUMA node of a device's memory.
type memoryNode struct {
	plus1 uint64 // 0 = not known
	asked bool   // it was named: anything else will not do
	only  bool   // the host has no other
}

// bind is what the memory has to be bound to, for whoever touches it first, as cxl.MapOptions has it.
func (n memoryNode) bind() int {
	if n.only {
		return 0
	}
	return int(n.plus1) //nolint:gosec // below maxNUMA
}

// maxNUMA bounds the numbers of NUMA nodes: what kernels are built with at most.
const maxNUMA = 1024

// memory is where the kernel says which NUMA nodes there are, and which of them this process has memory from.
type memory struct {
	sys    string               // directory of the nodes
	status string               // file with the cpuset's
	policy func() (nodes []int) // that this process is bound to; nil = none
}

var hostMemory = memory{sys: "/sys/devices/system/node", status: "/proc/self/status", policy: boundTo}

// nodeFor chooses the NUMA node of a node's DRAM: the one that is named; or else the only one of the host, of its topology if
// that is given; or else the only one that this process has memory from.
func (h *memory) nodeFor(cfg *Config) (memoryNode, error) {
	nodes := h.nodes()
	if cfg.NUMA == nil {
		if cfg.Topology != nil && len(cfg.Topology.Nodes) == 1 {
			nodes = []int{cfg.Topology.Nodes[0].ID}
		}
		for i, list := range [][]int{nodes, h.allowed(), h.policy()} {
			if len(list) == 1 && list[0] >= 0 && list[0] < maxNUMA {
				return memoryNode{plus1: uint64(list[0]) + 1, only: i == 0}, nil //nolint:gosec // not negative
			}
		}
		return memoryNode{}, nil
	}
	n := *cfg.NUMA
	switch {
	case cfg.DRAM == 0:
		return memoryNode{}, fmt.Errorf("%w: a NUMA node is that of DRAM, and there is none", ErrConfig)
	case n < 0 || n >= maxNUMA || nodes != nil && !slices.Contains(nodes, n):
		return memoryNode{}, fmt.Errorf("%w: NUMA node %d has no memory: this host's are %v", ErrConfig, n, nodes)
	}
	if total := h.total(n); total != 0 && cfg.DRAM > total {
		return memoryNode{}, fmt.Errorf("%w: DRAM of %d bytes: NUMA node %d has %d", ErrConfig, cfg.DRAM, n, total)
	}
	return memoryNode{plus1: uint64(n) + 1, asked: true, only: len(nodes) == 1}, nil
}

// nodes lists the NUMA nodes that have memory; nil if the kernel does not say.
func (h *memory) nodes() []int {
	text, err := os.ReadFile(filepath.Join(h.sys, "has_memory"))
	if err != nil {
		return nil
	}
	return nodeList(string(text))
}

// allowed lists the nodes of this process's cpuset.
func (h *memory) allowed() []int {
	text, err := os.ReadFile(h.status)
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		if list, ok := strings.CutPrefix(line, "Mems_allowed_list:"); ok {
			return nodeList(list)
		}
	}
	return nil
}

// total is the memory of a NUMA node in bytes, 0 if the kernel does not say.
func (h *memory) total(node int) uint64 {
	text, err := os.ReadFile(filepath.Join(h.sys, "node"+strconv.Itoa(node), "meminfo"))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) { // Node 0 MemTotal:  16351132 kB
		if f := strings.Fields(line); len(f) == 5 && f[2] == "MemTotal:" {
			n, _ := strconv.ParseUint(f[3], 10, 50)
			return n << 10
		}
	}
	return 0
}

// nodeList reads a list as the kernel writes it: "0-3,8". What is none is nil.
func nodeList(text string) (nodes []int) {
	for part := range strings.SplitSeq(strings.TrimSpace(text), ",") {
		low, high, isRange := strings.Cut(part, "-")
		first, err := strconv.Atoi(low)
		last := first
		if err == nil && isRange {
			last, err = strconv.Atoi(high)
		}
		if err != nil || first < 0 || last < first || last >= maxNUMA {
			return nil
		}
		for n := first; n <= last; n++ {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// boundTo lists the nodes that numactl or its like has bound this process to. Its threads inherit that.
func boundTo() (nodes []int) {
	const mpolBind = 2 // MPOL_BIND of <linux/mempolicy.h>
	var mode int32
	var mask [maxNUMA / 64]uint64
	_, _, errno := unix.Syscall6(unix.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&mode)), uintptr(unsafe.Pointer(&mask)), //nolint:gosec // they live for the call
		maxNUMA+1, 0, 0, 0)
	if errno != 0 || mode&0xff != mpolBind { // flags are above
		return nil
	}
	for n := range maxNUMA {
		if mask[n/64]&(1<<(n%64)) != 0 {
			nodes = append(nodes, n)
		}
	}
	return nodes
}
