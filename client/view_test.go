package client_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
)

func TestViewsTellWhetherTheyAreStillRight(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 2})
	c := open(t, s, client.Config{})
	store(t, c, []byte("a"))
	v, err := c.ViewBatch(t.Context(), [][]byte{[]byte("a")}, false)
	require.NoError(t, err)
	require.NoError(t, v.Err())
	region, _ := v.Region(0)
	require.NotZero(t, region)
	was, err := open(t, s, client.Config{}).Delete(t.Context(), []byte("a"))
	require.NoError(t, err)
	require.Equal(t, []bool{true}, was)
	require.Eventually(t, func() bool { return v.Err() != nil }, 10*time.Second, 10*time.Millisecond)
	require.ErrorIs(t, v.Err(), client.ErrLease)
	require.ErrorIs(t, v.Close(), client.ErrLease)
	require.NoError(t, v.Err(), "it is closed")
}
