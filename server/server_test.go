package server

import (
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

func TestStoreAndFind(t *testing.T) {
	s := startServer(t, testConfig(t))
	for _, network := range []string{"tcp", "unix"} {
		addr := s.Addr()
		if network == "unix" {
			addr = s.Config().Socket
		}
		w := dial(t, network, addr)
		hello := w.open("engine-" + network)
		require.Len(t, hello.Devices, 1)
		require.NotEmpty(t, hello.Members)
		a := w.alloc(protocol.AllocRequest{InstanceID: "engine", Size: 1 << 20, PageSize: 64 << 10})
		require.NoError(t, a.Err())
		require.True(t, a.Success)
		require.Equal(t, uint64(1<<20), a.Region.Length)
		require.NotNil(t, a.Device)
		r := w.register(a.Region, 0, network+"1", network+"2")
		require.NoError(t, r.Err())
		require.True(t, r.Results[0].IsNew)
		found := w.lookup(0, network+"1", network+"2", "nope")
		require.True(t, found.Results[0].Found)
		require.Equal(t, uint64(64<<10), found.Results[1].KVOffset)
		require.NotZero(t, found.Results[1].Lease)
		require.False(t, found.Results[2].Found)
		d := w.remove(network + "1")
		require.True(t, d.Results[0])
		require.NotZero(t, d.FreeAfterMS)
		require.False(t, w.lookup(0, network+"1").Results[0].Found)
	}
}
