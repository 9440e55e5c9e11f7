//go:build !rdma || !cgo || !linux

package verbs

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestNICsThatAreNamed without RDMA in the program are an error that says what to do.
func TestNICsThatAreNamed(t *testing.T) {
	for _, names := range [][]string{nil, {"none"}} {
		nics, stop, err := OpenNICs(names)
		require.NoError(t, err)
		require.Empty(t, nics)
		require.NoError(t, stop())
	}
	_, _, err := OpenNICs([]string{"mlx5_0"})
	require.ErrorIs(t, err, ErrNotBuilt)
	require.ErrorContains(t, err, "-tags rdma")
}
