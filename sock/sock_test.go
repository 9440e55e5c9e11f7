package sock_test

import (
	"bytes"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/sock"
)

// pair is both ends of a connection.
func pair(tb testing.TB, network string) (ours *sock.Conn, theirs net.Conn) {
	tb.Helper()
	address := "127.0.0.1:0"
	if network == "unix" {
		address = tb.TempDir() + "/s"
	}
	l, err := net.Listen(network, address)
	require.NoError(tb, err)
	defer l.Close() //nolint:errcheck // it has served
	theirs, err = net.Dial(network, l.Addr().String())
	require.NoError(tb, err)
	nc, err := l.Accept()
	require.NoError(tb, err)
	ours, err = sock.New(nc)
	require.NoError(tb, err)
	tb.Cleanup(func() {
		_ = ours.Close()   // the test may have done so
		_ = theirs.Close() // as above
	})
	return ours, theirs
}

// TestConn: it carries bytes as a connection of package net does.
func TestConn(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			ours, theirs := pair(t, network)
			large := bytes.Repeat([]byte("0123456789abcdef"), 1<<18) // more than the system holds
			go func() {
				_, _ = io.Copy(theirs, theirs) // what is missing shows below
				_ = theirs.Close()             // as above
			}()
			sent := make(chan error, 1)
			go func() {
				n, err := ours.Write(large)
				if err == nil && n == len(large) {
					err = ours.Conn.(interface{ CloseWrite() error }).CloseWrite()
				}
				sent <- err
			}()
			back, err := io.ReadAll(ours)
			require.NoError(t, err)
			require.True(t, bytes.Equal(large, back), "%d bytes of %d", len(back), len(large))
			require.NoError(t, <-sent)
			n, err := ours.Read(nil)
			require.NoError(t, err, "nobody has asked for a byte")
			require.Zero(t, n)
		})
	}
}

// TestNow: what is there is read, and what there is room for is written, without waiting for more.
func TestNow(t *testing.T) {
	ours, theirs := pair(t, "unix")
	b := make([]byte, 1<<20)
	_, err := ours.ReadNow(b)
	require.ErrorIs(t, err, sock.ErrNothing)
	written := 0
	for {
		n, err := ours.WriteNow(b)
		require.NoError(t, err)
		if n == 0 {
			break
		}
		written += n
	}
	n, err := io.ReadFull(theirs, make([]byte, written))
	require.NoError(t, err)
	require.Equal(t, written, n)
	_, err = theirs.Write([]byte("xyz"))
	require.NoError(t, err)
	n, err = ours.ReadNow(b)
	require.NoError(t, err)
	require.Equal(t, "xyz", string(b[:n]))
	require.NoError(t, theirs.Close())
	_, err = ours.ReadNow(b)
	require.ErrorIs(t, err, io.EOF)
	n, err = ours.WriteNow(b)
	require.ErrorIs(t, err, syscall.EPIPE)
	require.Zero(t, n)
}

// TestAwait: it returns when its function has found what it waits for, which more than one arrival may bring.
func TestAwait(t *testing.T) {
	ours, theirs := pair(t, "tcp")
	var got []byte
	looks := make(chan struct{}, 100)
	done := make(chan error)
	go func() {
		done <- ours.Await(func() bool {
			var b [10]byte
			for {
				n, err := ours.ReadNow(b[:])
				if err != nil {
					break
				}
				got = append(got, b[:n]...)
			}
			looks <- struct{}{}
			return len(got) >= 6
		})
	}()
	for _, s := range []string{"abc", "def"} {
		<-looks // for the first time before anything has come
		_, err := theirs.Write([]byte(s))
		require.NoError(t, err)
	}
	require.NoError(t, <-done)
	require.Equal(t, "abcdef", string(got))
}

// TestEndsOfWaiting: whoever waits is let go by a deadline and by Close.
func TestEndsOfWaiting(t *testing.T) {
	b := make([]byte, 64<<10)
	fill := func(c *sock.Conn) (err error) {
		for err == nil {
			_, err = c.Write(b)
		}
		return err
	}
	for name, wait := range map[string]func(c *sock.Conn) error{
		"read":  func(c *sock.Conn) error { _, err := c.Read(b); return err },
		"write": fill,
		"await": func(c *sock.Conn) error { return c.Await(func() bool { return false }) },
	} {
		t.Run(name, func(t *testing.T) {
			ours, _ := pair(t, "tcp")
			require.NoError(t, ours.SetDeadline(time.Now().Add(20*time.Millisecond)))
			require.ErrorIs(t, wait(ours), os.ErrDeadlineExceeded)
			require.NoError(t, ours.SetDeadline(time.Time{}))
			ended := make(chan error)
			go func() { ended <- wait(ours) }()
			require.NoError(t, ours.Close())
			require.ErrorIs(t, <-ended, net.ErrClosed)
			_, err := ours.ReadNow(b)
			require.ErrorIs(t, err, net.ErrClosed)
		})
	}
}

// TestNotASocket: what has no descriptor is refused.
func TestNotASocket(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close() //nolint:errcheck // it returns nil
	defer b.Close() //nolint:errcheck // as above
	_, err := sock.New(a)
	require.ErrorContains(t, err, "a *net.pipe is no socket")
}

// BenchmarkEcho sends short messages on 8 connections and waits for their echoes, by package net and by this one in turns. More is
// gained between processes: see docs/MARU.md.
func BenchmarkEcho(b *testing.B) {
	const clients, message = 8, 64
	var ends [2][clients]io.ReadWriter
	for kind := range ends {
		for i := range clients {
			ours, there := pair(b, "tcp")
			ends[kind][i] = ours.Conn
			var theirs io.ReadWriter = there
			if kind == 1 {
				c, err := sock.New(there)
				require.NoError(b, err)
				ends[kind][i], theirs = ours, c
			}
			go func() {
				p := make([]byte, message)
				for {
					if _, err := io.ReadFull(theirs, p); err != nil {
						return
					}
					_, _ = theirs.Write(p) // what fails shows at the other end
				}
			}()
		}
	}
	var took [2]time.Duration
	p := make([]byte, message)
	b.ReportAllocs()
	for b.Loop() {
		for kind := range ends {
			begin := time.Now()
			for _, end := range ends[kind] {
				_, err := end.Write(p)
				require.NoError(b, err)
			}
			for _, end := range ends[kind] {
				_, err := io.ReadFull(end, p)
				require.NoError(b, err)
			}
			took[kind] += time.Since(begin)
		}
	}
	b.ReportMetric(float64(took[1])/float64(took[0]), "of-net's-time")
}
