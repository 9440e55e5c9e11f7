package replay

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/client"
)

// TestAnotherClientsRegionIsTakenWithoutAFailedCall: one client has all of the pool and is busy; another one stores.
func TestAnotherClientsRegionIsTakenWithoutAFailedCall(t *testing.T) {
	addr := startPool(t, 256, nil)
	open := func(name string) *client.Client {
		c, err := client.Open(t.Context(), client.Config{
			Addrs: []string{addr}, Instance: name, PageSize: testPage, RegionSize: 64 * testPage,
		})
		require.NoError(t, err)
		return c
	}
	a, b := open("a"), open("b")
	block := make([]byte, testPage)
	put := func(c *client.Client, id int) error {
		FillBlock(block, uint64(id))
		_, err := c.Put(t.Context(), fmt.Append(nil, id), block)
		return err
	}
	for i := range 256 {
		require.NoError(t, put(a, i))
	}
	require.Equal(t, 4, a.Stats().Regions)
	v, err := a.View(t.Context(), []byte("255"))
	require.NoError(t, err)
	var stop atomic.Bool
	stored := make(chan error, 1)
	go func() {
		other := make([]byte, testPage)
		for i := 1000; !stop.Load(); i++ {
			FillBlock(other, uint64(i))
			if _, err := a.Put(t.Context(), fmt.Append(nil, i), other); err != nil {
				stored <- err
				return
			}
		}
		stored <- nil
	}()
	for i := 5000; i < 5040; i++ {
		require.NoError(t, put(b, i))
	}
	stop.Store(true)
	require.NoError(t, <-stored, "the busy owner has seen no error")
	require.EqualValues(t, 1, a.Stats().Revoked)
	require.EqualValues(t, 1, b.Stats().ByPhase[3])
	if err := v.Close(); err != nil {
		require.ErrorIs(t, err, client.ErrLease)
	}
	for i := 5000; i < 5040; i++ {
		got, err := b.Get(t.Context(), fmt.Append(nil, i), nil)
		require.NoError(t, err)
		require.NoError(t, CheckBlock(got, uint64(i), testPage))
	}
	require.NoError(t, a.Close(t.Context()))
	require.NoError(t, b.Close(t.Context()))
}
