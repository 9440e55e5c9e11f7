package client

import (
	"testing"

	"github.com/stretchr/testify/require"

	"larder/cxl"
	"larder/protocol"
)

// TestAReturnNamesTheEpoch: a region that the client cannot use goes back as it was given. If the same one is given anew
// in the answer to another request, that one stays.
func TestAReturnNamesTheEpoch(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	strange := protocol.Region{Device: 1, Generation: 77, Epoch: 5, PageSize: 1} // of pages that nobody asked for
	strange.RegionID, strange.Offset, strange.Length = 9, cxl.HeaderSpan, 16*4096
	returned := make(chan protocol.ReturnAllocRequest, 8)
	f.before = func(cn *fakeConn, h protocol.Header, payload []byte) *protocol.Error {
		switch h.Type {
		case protocol.TypeRequestAlloc:
			cn.write(h.Type.Reply(), h.Sequence, (&protocol.AllocReply{Success: true, Region: strange}).Append(nil))
			return errSilent
		case protocol.TypeReturnAlloc:
			var req protocol.ReturnAllocRequest
			require.NoError(t, req.Decode(payload))
			returned <- req
		default: // answered as usual
		}
		return nil
	}
	c := f.open(t, nil)
	_, err := c.Put(t.Context(), []byte("k"), []byte("v"))
	require.Error(t, err)
	got := <-returned
	require.Equal(t, uint64(9), got.RegionID)
	require.Equal(t, uint64(5), got.Epoch)
}
