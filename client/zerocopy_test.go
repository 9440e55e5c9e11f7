package client_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"larder/client"
)

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
