package client_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/client"
)

func TestReadsIntoMemoryThatIsBroughtWhenLengthsAreKnown(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 8})
	c := open(t, s, client.Config{})
	store(t, c, []byte("a"), []byte("bb"))

	var asked []int
	brought := make([]byte, 100)
	value, err := c.GetWith(t.Context(), []byte("bb"), func(size int) ([]byte, error) {
		asked = append(asked, size)
		return brought[:0], nil
	})
	require.NoError(t, err)
	require.Equal(t, "value of bb", string(value))
	require.Same(t, &brought[0], &value[0])
	require.Equal(t, []int{len("value of bb")}, asked)

	_, err = c.GetWith(t.Context(), []byte("never"), func(int) ([]byte, error) { return nil, errors.New("not asked") })
	require.ErrorIs(t, err, client.ErrNotFound)

	none := errors.New("no memory")
	_, err = c.GetWith(t.Context(), []byte("a"), func(int) ([]byte, error) { return nil, none })
	require.ErrorIs(t, err, none)

	keys := append(names("n", 200), []byte("bb"), []byte("never"), []byte("a"))
	got, err := c.GetBatchWith(t.Context(), keys, func(from int, sizes []int, dst [][]byte) error {
		require.Len(t, dst, len(sizes))
		for i, n := range sizes {
			if k := string(keys[from+i]); k == "a" || k == "bb" {
				require.Equal(t, len("value of "+k), n)
				dst[i] = make([]byte, 0, n)
			} else {
				require.Zero(t, n)
			}
		}
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, []string{"value of bb", "", "value of a"}, []string{string(got[200]), string(got[201]), string(got[202])})
	require.Nil(t, got[201])

	_, err = c.GetBatchWith(t.Context(), keys, func(int, []int, [][]byte) error { return none })
	require.ErrorIs(t, err, none)
}
