package meta

import (
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// A CANCEL may overtake the very request that would have told how far the client has come. What it says is final all
// the same: either the request is refused when it arrives, or the CANCEL says that it does not know.
func TestACancelThatOvertakesItsRequestHolds(t *testing.T) {
	p := newPool(t)
	p.device(1 << 20)
	id := p.open("a")
	_, a := p.alloc(id, &protocol.AllocRequest{Size: 4 * 4096, PageSize: 4096})
	require.True(t, a.Given)
	// The client has had answers up to seq 90; that was said by none of the requests that have arrived.
	const seq, acked = 100, 90
	entry := protocol.RegisterEntry{Key: []byte("k"), RegionID: uint64(a.Region), Epoch: a.Epoch, KVLength: 4096}
	code, body := p.apply(Header{Session: id, Acked: acked}, &Cancel{Seqs: []uint64{seq}})
	require.Zero(t, code)
	applied, err := DecodeCodes(body)
	require.NoError(t, err)
	require.Equal(t, []protocol.Code{0}, applied)
	code, _ = p.apply(Header{Session: id, Seq: seq, Acked: acked}, &Register{Entries: []protocol.RegisterEntry{entry}})
	require.Equal(t, protocol.CodeCanceled, code, "the client uses the page for something else already")

	code, _ = p.apply(Header{Session: id, Acked: acked}, &Cancel{Seqs: []uint64{acked + protocol.Window}})
	require.Equal(t, protocol.CodeTooManyUnacked, code, "nothing is known of a seq beyond the window")
}
