package zmtp

import (
	"bufio"
	"bytes"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// canned is a connection to a peer whose words are known, and that takes everything.
type canned struct {
	net.Conn
	says *bytes.Reader
}

func (c *canned) Read(b []byte) (int, error)       { return c.says.Read(b) }
func (c *canned) Write(b []byte) (int, error)      { return len(b), nil }
func (c *canned) WriteNow(b []byte) (int, error)   { return len(b), nil }
func (c *canned) Close() error                     { return nil }
func (c *canned) SetDeadline(time.Time) error      { return nil }
func (c *canned) SetWriteDeadline(time.Time) error { return nil }

// FuzzGreeting: a handshake ends, and what it accepts goes with this side.
func FuzzGreeting(f *testing.F) {
	for _, kind := range []SocketType{SUB, DEALER, REQ, ROUTER} {
		f.Add(append(greeting(), ready(&Config{Type: kind, Identity: "i"})...))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bufio.NewReader(bytes.NewReader(b))
		if _, err := readGreeting(r); err != nil {
			return
		}
		p, err := readReady(r, ROUTER)
		if err == nil {
			require.Contains(t, peers[ROUTER], p.kind)
			require.LessOrEqual(t, len(p.identity), maxIdentity)
		}
	})
}

// FuzzRead: whatever a peer sends, messages keep to the limits, and are what is read again when they are written.
func FuzzRead(f *testing.F) {
	f.Add(appendMessage(nil, [][]byte{{}, []byte("seq"), bytes.Repeat([]byte{7}, 300)}))
	f.Add(append(appendCommand(nil, "PING", []byte("\x00\x01context")), appendFrame(nil, nil, false)...))
	f.Add(appendCommand(nil, "SUBSCRIBE", []byte("topic")))
	f.Add(appendCommand(nil, "ERROR", []byte("\x05short")))
	f.Add([]byte{flagLong | flagMore, 0, 0, 0, 0, 0, 0, 0, 1, 'x', 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		cfg, err := Config{Type: ROUTER, MaxMessage: 1 << 10, MaxParts: 4}.withDefaults()
		require.NoError(t, err)
		c := &Conn{cfg: cfg, conn: &canned{}, r: bufio.NewReader(bytes.NewReader(b)), done: make(chan struct{})}
		c.subscribe = (&subscriber{topics: map[string]int{}}).subscribe
		for {
			m, err := c.Read()
			if err != nil {
				return
			}
			require.NotEmpty(t, m)
			require.LessOrEqual(t, len(m), cfg.MaxParts)
			again := &Conn{cfg: cfg, r: bufio.NewReader(bytes.NewReader(appendMessage(nil, m)))}
			same, err := again.Read()
			require.NoError(t, err)
			require.Len(t, same, len(m))
			for i := range m {
				require.True(t, bytes.Equal(m[i], same[i]))
			}
		}
	})
}
