package zmtp

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// patience bounds what a test waits for.
const patience = 10 * time.Second

// listen serves connections with a handler until the test ends.
func listen(t *testing.T, cfg Config, handle func(*Conn)) *Server {
	t.Helper()
	s, err := Listen(t.Context(), "tcp://127.0.0.1:*", cfg, handle)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// echo sends back what it reads.
func echo(c *Conn) {
	for {
		m, err := c.Read()
		if err != nil || c.Write(m...) != nil {
			return
		}
	}
}

func dial(t *testing.T, endpoint string, cfg Config) *Conn {
	t.Helper()
	c, err := Dial(t.Context(), endpoint, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// raw is a peer that says what a test wants it to.
func raw(t *testing.T, s *Server) net.Conn {
	t.Helper()
	network, address, err := parse(s.Endpoint(), false)
	require.NoError(t, err)
	conn, err := (&net.Dialer{}).DialContext(t.Context(), network, address)
	require.NoError(t, err)
	require.NoError(t, conn.SetDeadline(time.Now().Add(patience)))
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// TestMessages: what is written is read, over TCP and over Unix sockets, whatever the sizes of the parts.
func TestMessages(t *testing.T) {
	sizes := [][]int{{0}, {1}, {0, 0, 3}, {254, 255, 256, 257}, {step - 1, step, step + 1}, {1 << 20, 5}}
	for _, endpoint := range []string{"tcp://127.0.0.1:*", "tcp://[::1]:*", "ipc://" + filepath.Join(t.TempDir(), "s"), "ipc://@larder-zmtp-test"} {
		t.Run(endpoint[:5], func(t *testing.T) {
			s, err := Listen(t.Context(), endpoint, Config{Type: ROUTER}, echo)
			if err != nil && strings.Contains(endpoint, "::1") {
				t.Skip("no IPv6 here:", err)
			}
			require.NoError(t, err)
			defer func() { require.NoError(t, s.Close()) }()
			c := dial(t, s.Endpoint(), Config{Type: DEALER})
			for i, parts := range sizes {
				var m [][]byte
				for _, n := range parts {
					m = append(m, bytes.Repeat([]byte{byte(i + 1)}, n))
				}
				require.NoError(t, c.Write(m...))
				got, err := c.Read()
				require.NoError(t, err)
				require.Len(t, got, len(m))
				for j := range m {
					require.True(t, bytes.Equal(m[j], got[j]))
				}
			}
			require.Error(t, c.Write())
		})
	}
}

// TestQueue: what is queued goes out with what is written next, in order, and the reader can tell that more has come.
func TestQueue(t *testing.T) {
	burst := make(chan []string, 1)
	s := listen(t, Config{Type: ROUTER}, func(c *Conn) {
		var got []string
		for {
			m, err := c.Read()
			if err != nil {
				return
			}
			if got = append(got, string(m[0])); !c.Buffered() {
				burst <- got
				got = nil
			}
		}
	})
	c := dial(t, s.Endpoint(), Config{Type: DEALER})
	require.NoError(t, c.Flush(), "there may be nothing")
	require.NoError(t, c.Queue([]byte("1")))
	require.NoError(t, c.Queue([]byte("2")))
	require.Error(t, c.Queue())
	select {
	case got := <-burst:
		require.Fail(t, "nothing has been flushed", "%v", got)
	case <-time.After(20 * time.Millisecond):
	}
	require.NoError(t, c.Flush())
	require.Equal(t, []string{"1", "2"}, <-burst)
	require.NoError(t, c.Queue([]byte("3")))
	require.NoError(t, c.Write([]byte("4")))
	require.Equal(t, []string{"3", "4"}, <-burst)
}

// TestHandshake: each side learns who the other is.
func TestHandshake(t *testing.T) {
	who := make(chan *Conn, 1)
	s := listen(t, Config{Type: ROUTER, Identity: "the router"}, func(c *Conn) {
		who <- c
		echo(c)
	})
	c := dial(t, s.Endpoint(), Config{Type: REQ, Identity: "me"})
	require.Equal(t, "the router", c.Identity())
	require.Equal(t, ROUTER, c.PeerType())
	there := <-who
	require.Equal(t, "me", there.Identity())
	require.Equal(t, REQ, there.PeerType())
	require.Equal(t, "tcp", there.RemoteAddr().Network())
}

// hello is a greeting with a change.
func hello(change func(b []byte)) []byte {
	b := greeting()
	change(b)
	return b
}

// TestPeersThatCannotBe: a connection ends with what is wrong, and the next one works.
func TestPeersThatCannotBe(t *testing.T) {
	good := greeting()
	dealer := ready(&Config{Type: DEALER})
	for name, c := range map[string]struct {
		says []byte
		err  error
	}{
		"HTTP":                  {[]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), ErrProtocol},
		"ZMTP 2":                {hello(func(b []byte) { b[10] = 1 }), ErrProtocol},
		"CURVE":                 {hello(func(b []byte) { copy(b[mechanismAt:], "CURVE\x00") }), ErrProtocol},
		"nothing":               {nil, io.ErrUnexpectedEOF},
		"half a greeting":       {good[:40], io.ErrUnexpectedEOF},
		"no READY":              {good, io.ErrUnexpectedEOF},
		"a message":             {append(good, appendFrame(nil, []byte("x"), false)...), ErrProtocol},
		"another command":       {append(good, appendCommand(nil, "PING", []byte{0, 0})...), ErrProtocol},
		"ERROR":                 {append(good, appendCommand(nil, "ERROR", []byte("\x02no"))...), ErrPeer},
		"a type that fits not":  {append(good, ready(&Config{Type: PUB})...), ErrType},
		"no type":               {append(good, appendCommand(nil, "READY", nil)...), ErrType},
		"a READY cut short":     {append(good, appendCommand(nil, "READY", []byte("\x0bSocket-Type\x00\x00\x00\x09DEALER"))...), ErrProtocol},
		"a property, no name":   {append(good, appendCommand(nil, "READY", []byte{0, 0, 0, 0, 0})...), ErrProtocol},
		"an identity too long":  {append(good, ready(&Config{Type: DEALER, Identity: strings.Repeat("x", 256)})...), ErrLimit},
		"a READY too long":      {append(good, appendCommand(nil, "READY", make([]byte, maxCommand))...), ErrProtocol},
		"a command, no name":    {append(append(good, dealer...), appendHeader(nil, flagCommand, 0)...), ErrProtocol},
		"flags nobody knows":    {append(append(good, dealer...), 8, 0), ErrProtocol},
		"a command with more":   {append(append(good, dealer...), flagCommand|flagMore, 0), ErrProtocol},
		"a command too long":    {append(append(good, dealer...), appendHeader(nil, flagCommand, maxCommand+1)...), ErrLimit},
		"a PING cut short":      {append(append(good, dealer...), appendCommand(nil, "PING", []byte{1})...), ErrProtocol},
		"a message too large":   {append(append(good, dealer...), appendHeader(nil, 0, 101)...), ErrLimit},
		"2^64-1 bytes":          {append(append(good, dealer...), flagLong, 255, 255, 255, 255, 255, 255, 255, 255), ErrLimit},
		"too many parts":        {append(append(good, dealer...), bytes.Repeat([]byte{flagMore, 0}, 4)...), ErrLimit},
		"half a frame":          {append(append(good, dealer...), 0, 5, 'x'), io.ErrUnexpectedEOF},
		"half a header":         {append(append(good, dealer...), flagLong, 0), io.ErrUnexpectedEOF},
		"half a message":        {append(append(good, dealer...), flagMore, 1, 'x'), io.ErrUnexpectedEOF},
		"an end between frames": {append(append(good, dealer...), 0, 0), io.EOF},
	} {
		t.Run(name, func(t *testing.T) {
			cfg, err := Config{Type: ROUTER, MaxMessage: 100, MaxParts: 3}.withDefaults()
			require.NoError(t, err)
			conn, err := newConn(&canned{says: bytes.NewReader(c.says)}, cfg)
			for err == nil {
				_, err = conn.Read()
			}
			require.ErrorIs(t, err, c.err)
		})
	}
}

// TestSilentPeers: whoever says nothing holds up nobody, and is let go.
func TestSilentPeers(t *testing.T) {
	s := listen(t, Config{Type: ROUTER, HandshakeTimeout: 50 * time.Millisecond}, echo)
	silent := raw(t, s)
	c := dial(t, s.Endpoint(), Config{Type: REQ})
	require.NoError(t, c.Write(nil, []byte("x")))
	_, err := c.Read()
	require.NoError(t, err)
	_, err = io.Copy(io.Discard, silent)
	require.NoError(t, err, "it is closed from there, after its greeting")
}

// TestMaxPeers: who comes when a listener is full is turned away, and admitted when there is room.
func TestMaxPeers(t *testing.T) {
	s := listen(t, Config{Type: ROUTER, MaxPeers: 1}, echo)
	first := dial(t, s.Endpoint(), Config{Type: REQ})
	_, err := Dial(t.Context(), s.Endpoint(), Config{Type: REQ})
	require.Error(t, err)
	require.NoError(t, first.Close())
	require.Eventually(t, func() bool {
		c, err := Dial(t.Context(), s.Endpoint(), Config{Type: REQ})
		return err == nil && c.Close() == nil
	}, patience, time.Millisecond)
}

// TestHeartbeats: a peer that answers stays, one that does not is given up; a question is answered with its context.
func TestHeartbeats(t *testing.T) {
	s := listen(t, Config{Type: ROUTER}, echo)
	c := dial(t, s.Endpoint(), Config{Type: DEALER, Heartbeat: 5 * time.Millisecond})
	go func() {
		time.Sleep(50 * time.Millisecond)
		_ = c.Write([]byte("still here"))
	}()
	m, err := c.Read()
	require.NoError(t, err)
	require.Equal(t, "still here", string(m[0]))

	mute, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, mute.Close()) }()
	go func() {
		conn, err := mute.Accept()
		if err == nil {
			_, _ = conn.Write(append(greeting(), ready(&Config{Type: ROUTER})...))
			_, _ = io.Copy(io.Discard, conn)
			_ = conn.Close()
		}
	}()
	quiet := dial(t, "tcp://"+mute.Addr().String(), Config{Type: DEALER, Heartbeat: 5 * time.Millisecond})
	_, err = quiet.Read()
	require.ErrorIs(t, err, ErrSilent)
	require.NoError(t, quiet.Close())

	asks := raw(t, s)
	_, err = asks.Write(append(append(greeting(), ready(&Config{Type: DEALER})...), appendCommand(nil, "PING", []byte("\x00\x64hello"))...))
	require.NoError(t, err)
	r := bufio.NewReader(asks)
	_, err = r.Discard(greetingSize)
	require.NoError(t, err)
	_, err = readReady(r, DEALER)
	require.NoError(t, err)
	_, size, err := readHeader(r)
	require.NoError(t, err)
	body, err := appendBody(nil, r, int(size))
	require.NoError(t, err)
	require.Equal(t, "\x04PONGhello", string(body))
}

// publisher publishes until the test ends.
func publisher(t *testing.T, cfg Config) *Publisher {
	t.Helper()
	p, err := NewPublisher(t.Context(), "tcp://127.0.0.1:*", cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p
}

// subscribed waits until somebody gets what is published under a topic.
func subscribed(t *testing.T, p *Publisher, topic string) {
	t.Helper()
	require.Eventually(t, func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		for s := range p.subs {
			if s.wants([]byte(topic)) {
				return true
			}
		}
		return false
	}, patience, time.Millisecond)
}

// TestTopics: a subscriber gets what begins with one of its topics, once, in order.
func TestTopics(t *testing.T) {
	for _, minor := range []byte{0, 1} {
		p := publisher(t, Config{})
		c := dial(t, p.Endpoint(), Config{Type: SUB})
		c.minor = minor // 0: subscriptions are messages, as before ZMTP 3.1
		p.Publish([]byte("kv@a"), []byte("before"))
		require.NoError(t, c.Subscribe("kv@a"))
		require.NoError(t, c.Subscribe("kv@"))
		require.NoError(t, c.Subscribe("x"))
		subscribed(t, p, "x")
		for _, topic := range []string{"kv@a", "kv@b", "kv", "", "xy"} {
			p.Publish([]byte(topic), []byte{1})
		}
		p.Publish()
		for _, want := range []string{"kv@a", "kv@b", "xy"} {
			m, err := c.Read()
			require.NoError(t, err)
			require.Equal(t, want, string(m[0]))
		}
		require.Equal(t, 1, p.Subscribers())
	}
}

// TestUnsubscribe: a topic is sent until it was taken back as often as it was asked for.
func TestUnsubscribe(t *testing.T) {
	s := &subscriber{topics: map[string]int{}}
	require.NoError(t, s.subscribe([]byte("a"), true))
	require.NoError(t, s.subscribe([]byte("a"), true))
	require.NoError(t, s.subscribe([]byte("a"), false))
	require.True(t, s.wants([]byte("ab")))
	require.NoError(t, s.subscribe([]byte("a"), false))
	require.NoError(t, s.subscribe([]byte("a"), false), "once more than was asked for")
	require.False(t, s.wants([]byte("ab")))
	for range maxSubscriptions {
		require.NoError(t, s.subscribe([]byte("b"), true))
	}
	require.ErrorIs(t, s.subscribe([]byte("c"), true), ErrLimit)
}

// TestSlowSubscriber: who does not read loses messages, and nobody else does.
func TestSlowSubscriber(t *testing.T) {
	p := publisher(t, Config{QueueMessages: 100, QueueBytes: 1 << 20})
	slow, fast := dial(t, p.Endpoint(), Config{Type: SUB}), dial(t, p.Endpoint(), Config{Type: SUB})
	require.NoError(t, slow.Subscribe("s"))
	subscribed(t, p, "s")
	require.NoError(t, fast.Subscribe("sf"))
	require.NoError(t, fast.Subscribe("f"))
	subscribed(t, p, "f")
	large := make([]byte, 64<<10)
	for n := byte(0); p.Dropped() == 0; n++ {
		p.Publish([]byte("s"), large)
		p.Publish([]byte("sf"), []byte{n})
		m, err := fast.Read()
		require.NoError(t, err)
		require.Equal(t, []byte{n}, m[1])
	}
	m, err := slow.Read()
	require.NoError(t, err, "what was sent before is there")
	require.Len(t, m[1], len(large))
}

// TestClose: whoever waits is told, and nothing is left behind.
func TestClose(t *testing.T) {
	s := listen(t, Config{Type: ROUTER}, echo)
	c := dial(t, s.Endpoint(), Config{Type: DEALER})
	ended := make(chan error)
	go func() {
		_, err := c.Read()
		ended <- err
	}()
	require.NoError(t, c.Close())
	require.ErrorIs(t, <-ended, ErrClosed)
	require.ErrorIs(t, c.Write([]byte("x")), ErrClosed)

	other := dial(t, s.Endpoint(), Config{Type: DEALER})
	require.NoError(t, s.Close())
	_, err := other.Read()
	require.Error(t, err)
}

// TestDialThatCannotBe names what is wrong.
func TestDialThatCannotBe(t *testing.T) {
	for endpoint, want := range map[string]error{
		"tcp://127.0.0.1":         ErrEndpoint,
		"tcp://*:5557":            ErrEndpoint,
		"tcp://127.0.0.1:*":       ErrEndpoint,
		"tcp://127.0.0.1:0":       ErrEndpoint,
		"tcp://127.0.0.1:x":       ErrEndpoint,
		"tcp://127.0.0.1:123456":  ErrEndpoint,
		"udp://127.0.0.1:5557":    ErrEndpoint,
		"ipc://":                  ErrEndpoint,
		"":                        ErrEndpoint,
		"ipc:///nobody/listens/x": errors.ErrUnsupported,
	} {
		_, err := Dial(t.Context(), endpoint, Config{Type: SUB})
		require.Error(t, err, endpoint)
		require.Equal(t, want == ErrEndpoint, errors.Is(err, ErrEndpoint), endpoint) //nolint:errorlint // a table's own
	}
	for _, cfg := range []Config{{}, {Type: "PAIR"}, {Type: REQ, Identity: strings.Repeat("x", 256)}, {Type: SUB, MaxParts: -1}} {
		_, err := Dial(t.Context(), "tcp://127.0.0.1:1", cfg)
		require.Error(t, err)
		_, err = Listen(t.Context(), "tcp://127.0.0.1:*", cfg, echo)
		require.Error(t, err)
	}
	_, err := Listen(t.Context(), "tcp://x", Config{Type: ROUTER}, echo)
	require.ErrorIs(t, err, ErrEndpoint)
	require.ErrorIs(t, CheckEndpoint("x", true), ErrEndpoint)
	require.NoError(t, CheckEndpoint("tcp://*:5557", true))

	gone, cancel := context.WithCancel(t.Context())
	s := listen(t, Config{Type: ROUTER}, echo)
	cancel()
	_, err = Dial(gone, s.Endpoint(), Config{Type: DEALER})
	require.ErrorIs(t, err, context.Canceled)
}
