package cluster

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// echoed starts a server that sends back what it gets, and a proxy before it, and connects to that.
func echoed(t *testing.T) (*Links, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				io.Copy(conn, conn) //nolint:errcheck // it ends when the other side does
				conn.Close()        //nolint:errcheck // as above
			}()
		}
	}()
	links := &Links{links: make(map[[2]uint64]*Link)}
	p, err := startProxy("127.0.0.1:0", l.Addr().String(), false, func(from uint64, up bool) *Link {
		if up {
			return links.Of(from, 1)
		}
		return links.Of(1, from)
	})
	require.NoError(t, err)
	t.Cleanup(p.close)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	conn, err := net.Dial("tcp", p.listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() }) //nolint:errcheck // it may have been reset
	return links, conn
}

// exchange sends bytes and expects them back within a time; false if nothing came.
func exchange(t *testing.T, conn net.Conn, text string, within time.Duration) bool {
	t.Helper()
	_, err := conn.Write([]byte(text))
	require.NoError(t, err)
	return comes(t, conn, text, within)
}

func comes(t *testing.T, conn net.Conn, text string, within time.Duration) bool {
	t.Helper()
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(within)))
	got := make([]byte, len(text))
	if _, err := io.ReadFull(conn, got); err != nil {
		return false
	}
	require.Equal(t, text, string(got))
	return true
}

func TestProxyPassesEverythingOn(t *testing.T) {
	_, conn := echoed(t)
	require.True(t, exchange(t, conn, "hello", time.Second))
	large := bytes.Repeat([]byte("0123456789abcdef"), 1<<18) // 4 MiB
	go conn.Write(large)                                     //nolint:errcheck // what comes back tells
	got := make([]byte, len(large))
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(10*time.Second)))
	_, err := io.ReadFull(conn, got)
	require.NoError(t, err)
	require.True(t, bytes.Equal(large, got))
	require.NoError(t, conn.(*net.TCPConn).CloseWrite())
	_, err = conn.Read(got)
	require.ErrorIs(t, err, io.EOF, "the end passes too")
}

func TestLinkHolds(t *testing.T) {
	links, conn := echoed(t)
	require.True(t, exchange(t, conn, "before", time.Second))
	for _, way := range []*Link{links.Of(Clients, 1), links.Of(1, Clients)} {
		way.Set(Rules{Hold: true})
		require.False(t, exchange(t, conn, "held", 100*time.Millisecond))
		way.Set(Rules{})
		require.True(t, comes(t, conn, "held", time.Second), "nothing is lost")
	}
}

func TestLinkSwallows(t *testing.T) {
	links, conn := echoed(t)
	require.True(t, exchange(t, conn, "before", time.Second))
	links.Of(Clients, 1).Set(Rules{Swallow: true})
	require.False(t, exchange(t, conn, "gone", 100*time.Millisecond), "the connection stays open")
	links.Heal()
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(time.Second)))
	_, err := conn.Read(make([]byte, 1))
	require.ErrorContains(t, err, "reset")
	require.Equal(t, uint64(4), links.Lost())
}

func TestLinkDelays(t *testing.T) {
	links, conn := echoed(t)
	links.Of(Clients, 1).Set(Rules{Delay: 80 * time.Millisecond, Jitter: 20 * time.Millisecond})
	at := time.Now()
	require.True(t, exchange(t, conn, "late", time.Second))
	require.GreaterOrEqual(t, time.Since(at), 60*time.Millisecond)
}

func TestLinkResets(t *testing.T) {
	links, conn := echoed(t)
	require.True(t, exchange(t, conn, "before", time.Second))
	links.Of(1, Clients).Reset()
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(time.Second)))
	_, err := conn.Read(make([]byte, 1))
	require.ErrorContains(t, err, "reset")
}

// TestDroppedFramesAreWhole drops frames of messages at random, in pieces of any size: what is left are whole frames.
func TestDroppedFramesAreWhole(t *testing.T) {
	frame := func(typ byte, n int) []byte {
		b := binary.BigEndian.AppendUint32(nil, uint32(n))
		return append(append(b, 0, 0, 0, 0, typ), bytes.Repeat([]byte{byte(n)}, n)...)
	}
	stream := make([]byte, 0, 32<<10)
	for n := range 200 {
		stream = append(stream, frame(byte(1+n%5), n)...)
	}
	for _, size := range []int{1, 7, 9, 100, len(stream)} {
		p := &pipe{framed: true}
		var kept []byte
		lost := 0
		for from := 0; from < len(stream); from += size {
			k, l := p.sift(stream[from:min(from+size, len(stream))], 0.5)
			kept, lost = append(kept, k...), lost+l
		}
		require.NotZero(t, lost)
		require.Len(t, stream, len(kept)+lost)
		others := 0
		for b := kept; len(b) > 0; {
			n := int(binary.BigEndian.Uint32(b))
			require.Equal(t, frame(b[8], n), b[:peerHeader+n])
			if b[8] != peerMessages {
				others++
			}
			b = b[peerHeader+n:]
		}
		require.Equal(t, 160, others, "frames of other types are not dropped")
	}
}
