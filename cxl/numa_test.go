package cxl

import (
	"errors"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestMemoryIsBoundForWhoeverMapsIt maps a memfd twice: what one mapping asked for holds for the other.
func TestMemoryIsBoundForWhoeverMapsIt(t *testing.T) {
	d := create(t, "memfd:test", testOptions())
	m, err := d.Map(HeaderSpan, 64<<10, MapOptions{NUMA: 1})
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSYS) {
		t.Skip(err)
	}
	require.NoError(t, err)
	other, err := d.Map(HeaderSpan, 64<<10, MapOptions{})
	require.NoError(t, err)
	require.Equal(t, mpolBind, policyOf(t, other.Bytes()))
	require.Zero(t, policyOf(t, make([]byte, 1)))
	other.Bytes()[0] = 1 // it comes from there
	require.NoError(t, m.Close())
	require.NoError(t, other.Close())

	_, err = d.Map(HeaderSpan, 64<<10, MapOptions{NUMA: maxNodes})
	require.Error(t, err, "there is none of that number")
	_, err = d.Map(HeaderSpan, 64<<10, MapOptions{NUMA: maxNodes + 1})
	require.ErrorIs(t, err, unix.EINVAL)
}

// policyOf is the memory policy of an address.
func policyOf(t *testing.T, b []byte) int {
	t.Helper()
	const byAddress = 2 // MPOL_F_ADDR
	var mode int32
	_, _, errno := unix.Syscall6(unix.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&mode)), 0, 0, address(b), byAddress, 0)
	require.Zero(t, errno)
	return int(mode)
}
