package bench

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/transfer"
)

// plainServer serves plain streams until the test ends.
func plainServer(t *testing.T) (addr string) {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan struct{})
	go func() {
		defer close(served)
		ServePlain(l)
	}()
	t.Cleanup(func() {
		require.NoError(t, l.Close())
		<-served
	})
	return l.Addr().String()
}

// TestPlainStreams: both directions carry, through more memory than one system call takes and from less than streams ask for.
func TestPlainStreams(t *testing.T) {
	addr := plainServer(t)
	for _, op := range []transfer.Op{transfer.Read, transfer.Write} {
		for _, span := range []int{1, plainPiece, 3*plainPiece + 1} {
			rate, err := plainRate(t.Context(), addr, op, 2, span, 20*time.Millisecond)
			require.NoError(t, err)
			require.Positive(t, rate)
		}
	}
}

// TestPlainStreamsThatCannotBe end, and others go on.
func TestPlainStreamsThatCannotBe(t *testing.T) {
	addr := plainServer(t)
	for name, hello := range map[string][plainHello]byte{
		"no memory":       {byte(transfer.Read)},
		"too much memory": {byte(transfer.Write), 15: 1},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addr)
			require.NoError(t, err)
			_, err = conn.Write(hello[:])
			require.NoError(t, err)
			_, err = conn.Read(make([]byte, 1))
			require.ErrorIs(t, err, io.EOF)
			require.NoError(t, conn.Close())
		})
	}
	rate, err := plainRate(t.Context(), addr, transfer.Read, 1, 1, 20*time.Millisecond)
	require.NoError(t, err)
	require.Positive(t, rate)
}
