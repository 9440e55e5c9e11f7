package client

import (
	"context"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
	"larder/sock"
)

// TestLookupBatchStopsAtTheFirstMissOfAllParts: more keys than one request carries are asked for in parts, of which none
// is asked for once a miss is known, wherever in its part that was.
func TestLookupBatchStopsAtTheFirstMissOfAllParts(t *testing.T) {
	const n = 2*protocol.MaxBatch + 10
	f := newFake(t, 64<<20, 1)
	c := f.open(t, func(cfg *Config) {
		cfg.RegionSize = 1024 * 4096
		cfg.CallTimeout, cfg.Timeout = 10*time.Second, time.Minute // a busy machine takes its time for so many
	})
	items := make([]Item, n)
	keys := make([][]byte, n)
	for i := range items {
		keys[i] = fmt.Appendf(nil, "k%d", i)
		items[i] = Item{Key: keys[i], Value: []byte{byte(i)}}
	}
	_, err := c.PutBatch(t.Context(), items)
	require.NoError(t, err)
	for _, miss := range []int{0, 1, protocol.MaxBatch - 1, protocol.MaxBatch, protocol.MaxBatch + 1, n - 1} {
		t.Run(fmt.Sprint("miss at ", miss), func(t *testing.T) {
			held := keys[miss]
			keys[miss] = []byte("none")
			defer func() { keys[miss] = held }()
			before := f.count(protocol.TypeBatchLookup)
			found, err := c.LookupBatch(t.Context(), keys, true)
			require.NoError(t, err)
			require.Equal(t, miss, found)
			require.Equal(t, miss/protocol.MaxBatch+1, f.count(protocol.TypeBatchLookup)-before, "no part behind the miss is asked for")
			found, err = c.LookupBatch(t.Context(), keys, false)
			require.NoError(t, err)
			require.Equal(t, n-1, found)
		})
	}
	found, err := c.LookupBatch(t.Context(), keys, true)
	require.NoError(t, err)
	require.Equal(t, n, found)
}

// far is a connection that crosses a network, by its addresses.
type far struct{ socket }

func (far) LocalAddr() net.Addr  { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 40000} }
func (far) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 2), Port: 7400} }

func TestLargeRequestsAreCompressedAcrossANetwork(t *testing.T) {
	large, small := make([][]byte, protocol.MaxBatch), make([][]byte, 10)
	for i := range large {
		large[i] = fmt.Appendf(nil, "a key of a block %d", i)
	}
	copy(small, large)
	for name, tc := range map[string]struct {
		features uint64
		far      bool
		want     bool
	}{
		"a network":             {protocol.FeatureCompression, true, true},
		"a network, not agreed": {0, true, false},
		"a Unix socket":         {protocol.FeatureCompression, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t, 16*4096, 1)
			f.features = tc.features
			c := f.open(t, func(cfg *Config) { cfg.CallTimeout = time.Minute }) // a reconnect would lead to the Unix socket
			put(t, c, string(large[0]), 4096)
			nc, err := (&net.Dialer{}).DialContext(t.Context(), "unix", f.masters[0].addr)
			require.NoError(t, err)
			var sc socket
			sc, err = sock.New(nc)
			require.NoError(t, err)
			if tc.far {
				sc = far{sc}
			}
			cn := startConn(sc, "far", c.cfg.Clock, c.pushed, c.connClosed, &c.readers)
			_, err = c.handshake(context.WithoutCancel(t.Context()), cn, false)
			require.NoError(t, err)
			old := c.link.Load()
			c.setLink(&link{conns: []*conn{cn}})
			old.close(errConnLost)
			f.do(func() { f.seen = nil })
			for _, keys := range [][][]byte{large, small, large} {
				found, err := c.LookupBatch(t.Context(), keys, false)
				require.NoError(t, err)
				require.Equal(t, 1, found, "it was read as it was meant")
			}
			f.do(func() {
				for _, s := range f.seen {
					var req protocol.KeysRequest
					if s.typ != protocol.TypeBatchLookup {
						continue
					}
					require.NoError(t, req.DecodeAs(s.payload, s.typ))
					require.Equal(t, tc.want && len(req.Keys) == len(large), s.packed)
				}
			})
		})
	}
}
