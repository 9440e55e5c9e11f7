package reduce

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSkeleton(t *testing.T) {
	dst := []byte{1, 2, 3}
	Reduce(Sum, U8, dst, dst, []byte{1, 1, 255})
	require.Equal(t, []byte{2, 3, 2}, dst)
}
