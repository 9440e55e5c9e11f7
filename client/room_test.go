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

func TestAllocBatchIsAllOrNothing(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 2})
	c := open(t, s, client.Config{})
	all, err := c.AllocBatch(t.Context(), []int{1, 65 << 10, 3})
	require.NoError(t, err)
	region, _, length := all[0].Region()
	require.NotZero(t, region)
	require.EqualValues(t, mib, length)
	_, first, _ := all[1].Region()
	_, second, _ := all[2].Region()
	require.NotEqual(t, first, second)
	for _, a := range all {
		for i := range a.Bytes() {
			a.Bytes()[i] = 7
		}
	}
	allocs := c.Stats().Allocs
	require.EqualValues(t, 1, allocs, "one exchange makes room for all")

	r, err := all[1].StoreAs(t.Context(), []byte("long"))
	require.NoError(t, err)
	require.True(t, r.Stored)
	r, err = all[0].StoreAs(t.Context(), []byte("long"))
	require.NoError(t, err)
	require.False(t, r.Stored, "it is held")
	_, err = all[2].StoreAs(t.Context(), nil)
	require.ErrorIs(t, err, client.ErrConfig)

	value, err := c.Get(t.Context(), []byte("long"), nil)
	require.NoError(t, err)
	require.Len(t, value, 65<<10)
	free := c.Stats().FreePages

	_, err = c.AllocBatch(t.Context(), []int{1 << 20, 1 << 20, 1 << 20})
	require.ErrorIs(t, err, client.ErrNoSpace)
	require.GreaterOrEqual(t, c.Stats().FreePages, free, "nothing is left allocated")
	for _, sizes := range [][]int{{0}, {-1}, make([]int, 5000)} {
		_, err = c.AllocBatch(t.Context(), sizes)
		require.ErrorIs(t, err, client.ErrConfig)
	}
	none, err := c.AllocBatch(t.Context(), nil)
	require.NoError(t, err)
	require.Empty(t, none)
}
