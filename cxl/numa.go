package cxl

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	mpolBind = 2    // MPOL_BIND of <linux/mempolicy.h>
	maxNodes = 1024 // that a mask holds: what kernels are built with at most
)

// bind has pages that nobody has touched yet come from a NUMA node. The policy of memory that a file or memfd shares is that
// of the file: it holds for whoever maps it.
func bind(b []byte, node int) error {
	var mask [maxNodes / 64]uint64
	if node < 0 || node >= maxNodes {
		return fmt.Errorf("NUMA node %d: %w", node, unix.EINVAL)
	}
	mask[node/64] = 1 << (node % 64)
	// The kernel takes the last bit of the mask's length for none of it.
	_, _, errno := unix.Syscall6(unix.SYS_MBIND, address(b), uintptr(len(b)), mpolBind,
		uintptr(unsafe.Pointer(&mask)), maxNodes+1, 0) //nolint:gosec // the mask lives for the call
	if errno != 0 {
		return fmt.Errorf("mbind to NUMA node %d: %w", node, errno)
	}
	return nil
}
