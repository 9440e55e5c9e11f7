package transfer

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// sysNodes is where the kernel describes NUMA nodes.
const sysNodes = "/sys/devices/system/node"

// pinToNode has the calling thread run on the CPUs of a NUMA node. The goroutine must be locked to it.
func pinToNode(root string, node int) error {
	if node < 0 {
		return errors.New("transfer: its NUMA node is not known")
	}
	path := filepath.Join(root, "node"+strconv.Itoa(node), "cpulist")
	text, err := os.ReadFile(path) //nolint:gosec // below root
	if err != nil {
		return err
	}
	set, err := parseCPUList(string(text))
	if err != nil {
		return fmt.Errorf("transfer: %s: %w", path, err)
	}
	if err := unix.SchedSetaffinity(0, set); err != nil {
		return fmt.Errorf("transfer: pin to node %d: %w", node, err)
	}
	return nil
}

// maxCPUs is how many a unix.CPUSet holds.
const maxCPUs = 1024

// parseCPUList reads a list as the kernel writes it: "0-3,8,10-11". One without a CPU is an error: memory alone has none.
func parseCPUList(text string) (*unix.CPUSet, error) {
	set := new(unix.CPUSet)
	for part := range strings.SplitSeq(strings.TrimSpace(text), ",") {
		low, high, isRange := strings.Cut(part, "-")
		first, err := strconv.Atoi(low)
		if err != nil {
			return nil, fmt.Errorf("a list of CPUs: %w", err)
		}
		last := first
		if isRange {
			if last, err = strconv.Atoi(high); err != nil {
				return nil, fmt.Errorf("a list of CPUs: %w", err)
			}
		}
		if first < 0 || last < first || last >= maxCPUs {
			return nil, fmt.Errorf("a list of CPUs: %d-%d", first, last)
		}
		for cpu := first; cpu <= last; cpu++ {
			set.Set(cpu)
		}
	}
	return set, nil
}
