package cluster

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestValuesTellEveryWrongByte(t *testing.T) {
	value := ValueOf(nil, "key", 7)
	version, err := CheckValue("key", value)
	require.NoError(t, err)
	require.Equal(t, uint64(7), version)
	_, err = CheckValue("other", value)
	require.Error(t, err)
	_, err = CheckValue("key", value[:len(value)-1])
	require.Error(t, err)
	for _, i := range []int{0, 9, 17, 25, headBytes, len(value) / 2, len(value) - 1} {
		value[i] ^= 1
		_, err = CheckValue("key", value)
		require.Error(t, err, "byte %d", i)
		value[i] ^= 1
	}
}
