package server

import (
	"encoding/hex"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/cxl"
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

// What HANDSHAKE and the status call the pool is what its devices' headers call it.
func TestPoolIDIsThatOfTheHeaders(t *testing.T) {
	cfg := testConfig(t)
	s := startServer(t, cfg)
	require.Eventually(t, func() bool { return len(s.master.Devices()) == 1 }, 10*time.Second, 10*time.Millisecond)
	info, err := cxl.Inspect(cfg.Pool[0].Path)
	require.NoError(t, err)
	require.Equal(t, hex.EncodeToString(info.Header.Pool[:]), s.pool())
	require.Equal(t, s.pool(), s.Status().Pool)
}

// A client that fills its window, and is answered, goes on with the next: the first request beyond what the index has
// seen acknowledged brings the acknowledgement along.
func TestWindowMovesOnWithTheRequestThatNeedsIt(t *testing.T) {
	s := startServer(t, testConfig(t))
	w := dial(t, "tcp", s.Addr())
	w.open("engine")
	a := w.alloc(protocol.AllocRequest{InstanceID: "engine", Size: 1 << 20, PageSize: 4096})
	require.NoError(t, a.Err())
	register := func(seq, acked, page uint64) error {
		req := protocol.RegisterRequest{Mutation: protocol.Mutation{Seq: seq, Acked: acked}}
		req.Entries = append(req.Entries, protocol.RegisterEntry{
			Key: []byte{byte(page)}, RegionID: a.Region.RegionID, Epoch: a.Region.Epoch, KVOffset: page * 4096, KVLength: 4096,
		})
		var reply protocol.RegisterReply
		const batch = protocol.TypeBatchRegister
		require.NoError(t, reply.DecodeAs(w.call(batch, req.AppendAs(nil, batch)), batch))
		return reply.Err()
	}
	for i := range uint64(4) {
		first := 100 + i*protocol.Window
		require.NoError(t, register(first, first, i))
		require.Equal(t, protocol.CodeTooManyUnacked, protocol.CodeOf(register(first+protocol.Window, first, 99)))
	}
}
