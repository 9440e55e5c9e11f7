package maru

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/zmtp"
)

// fakeIndex is an index that says yes to everything, and remembers who is there. It implements Index.
type fakeIndex struct {
	mu      sync.Mutex
	term    uint64
	leader  string
	clients map[*Client]struct{}
	logged  int
}

func (x *fakeIndex) Term() uint64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.term
}

func (x *fakeIndex) Leader() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.leader
}

func (x *fakeIndex) lead(term uint64, leader string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.term, x.leader = term, leader
}

func (*fakeIndex) Confirm(context.Context, uint64) bool { return true }
func (*fakeIndex) ResourceManager() string              { return "here:9850" }

func (*fakeIndex) Read(q *Request, b []byte) ([]byte, Outcome) {
	return AppendBools(b, q.Type, len(q.Keys), func() bool { return true }), Done
}

func (x *fakeIndex) Log(q *Request, _ bool, within time.Duration, done func(o Outcome, reply func(b []byte) []byte)) {
	if within <= 0 {
		done(Failed, nil)
		return
	}
	x.mu.Lock()
	x.logged++
	x.mu.Unlock()
	t, n := q.Type, max(len(q.Keys), len(q.Entries), 1)
	done(Done, func(b []byte) []byte { return AppendBools(b, t, n, func() bool { return true }) })
}

func (*fakeIndex) Alloc(context.Context, *Client, *Request, time.Duration) (Handle, Outcome) {
	return Handle{Region: 1}, Done
}

func (*fakeIndex) Heard(c *Client, q *Request) {
	if q.Instance != "" {
		name := q.Instance
		c.Instance.Store(&name)
	}
}

func (x *fakeIndex) Joined(c *Client) {
	x.mu.Lock()
	x.clients[c] = struct{}{}
	x.mu.Unlock()
}

func (x *fakeIndex) Left(c *Client) {
	x.mu.Lock()
	delete(x.clients, c)
	x.mu.Unlock()
}

// heard are the instances of the clients that are there.
func (x *fakeIndex) heard() (names []string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for c := range x.clients {
		if p := c.Instance.Load(); p != nil {
			names = append(names, *p)
		}
	}
	return names
}

func listenFake(t *testing.T) (*Server, *fakeIndex) {
	t.Helper()
	x := &fakeIndex{term: 1, clients: map[*Client]struct{}{}}
	s, err := Listen(t.Context(), "127.0.0.1:0", 16, x, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	s.Start()
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s, x
}

// dealer is a client with an identity.
func dealer(t *testing.T, s *Server, identity string) *zmtp.Conn {
	t.Helper()
	c, err := zmtp.Dial(t.Context(), "tcp://"+s.Addr(), zmtp.Config{Type: zmtp.DEALER, Identity: identity})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() }) // it returns nil
	return c
}

// ask sends a request and returns the reply's type and payload.
func ask(t *testing.T, c *zmtp.Conn, h Header, payload []byte) (Type, []byte) {
	t.Helper()
	require.NoError(t, c.Write(nil, request(h, payload)))
	parts, err := c.Read()
	require.NoError(t, err)
	body := parts[len(parts)-1]
	require.GreaterOrEqual(t, len(body), headerSize)
	return Type(body[3]), body[headerSize:]
}

func request(h Header, payload []byte) []byte {
	b, mark := beginReply(nil, h)
	b = endReply(append(b, payload...), mark)
	b[3] = byte(h.Type)
	return b
}

func registration(key string) []byte {
	b := appendStr(appendStr(append([]byte(nil), 0x84), "key"), key)
	for _, name := range []string{"region_id", "kv_offset", "kv_length"} {
		b = append(appendStr(b, name), 1)
	}
	return b
}

// TestLeaderKnowsIdleClients: each new leader learns of the clients of other members, though they ask for nothing.
func TestLeaderKnowsIdleClients(t *testing.T) {
	follower, at := listenFake(t)
	first, one := listenFake(t)
	second, two := listenFake(t)
	at.lead(0, first.Addr())
	c := dealer(t, follower, strings.Repeat("i", 255))
	b := appendStr(appendStr(append([]byte(nil), 0x82), "instance_id"), "engine")
	typ, _ := ask(t, c, Header{Type: RequestAlloc, Sequence: 1}, append(appendStr(b, "size"), 1))
	require.Equal(t, RequestAlloc|replyBit, typ)
	require.Equal(t, []string{"engine"}, one.heard())
	at.lead(0, second.Addr())
	require.Eventually(t, func() bool { return len(two.heard()) == 1 }, 4*KeepInterval, 10*time.Millisecond)
	require.Equal(t, []string{"engine"}, two.heard())
	require.Empty(t, one.heard(), "the link to the old leader is closed")
	require.NoError(t, c.Close())
	require.Eventually(t, func() bool { return len(two.heard()) == 0 }, 4*KeepInterval, 10*time.Millisecond, "and with the client")
}

// TestStall: what is there when a process goes on may have come as long ago as it was stopped.
func TestStall(t *testing.T) {
	at := now().Add
	for _, tt := range []struct {
		name        string
		beat        time.Duration
		stalled     *stall
		before, now time.Duration
		want        time.Duration
	}{
		{name: "running", beat: 10 * time.Second, before: time.Second, now: 10*time.Second + beatInterval, want: 10*time.Second + beatInterval},
		{name: "just continued, and not yet seen", beat: 10 * time.Second, before: 9 * time.Second, now: 13 * time.Second, want: 10 * time.Second},
		{
			name: "just continued", beat: 13 * time.Second, stalled: &stall{at(10 * time.Second), at(13 * time.Second)},
			before: 9 * time.Second, now: 13*time.Second + time.Millisecond, want: 10 * time.Second,
		},
		{
			name: "waited for since", beat: 13 * time.Second, stalled: &stall{at(10 * time.Second), at(13 * time.Second)},
			before: 13*time.Second + time.Millisecond, now: 13*time.Second + 2*time.Millisecond, want: 13*time.Second + 2*time.Millisecond,
		},
		{
			name: "long ago", beat: 20 * time.Second, stalled: &stall{at(10 * time.Second), at(13 * time.Second)},
			before: 9 * time.Second, now: 20 * time.Second, want: 20 * time.Second,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &Server{}
			beat := at(tt.beat)
			s.beat.Store(&beat)
			s.stalled.Store(tt.stalled)
			require.Equal(t, at(tt.want), s.since(at(tt.before), at(tt.now)))
		})
	}
}

// TestStoppedProcess: a REGISTER_KV that came while the process was stopped is refused, and the next one is not.
func TestStoppedProcess(t *testing.T) {
	s, x := listenFake(t)
	c := dealer(t, s, "12345678")
	long := now().Add(-2 * Patience)
	s.stalled.Store(&stall{long, now().Add(stallAfter)})
	typ, payload := ask(t, c, Header{Type: Register, Sequence: 1}, registration("k"))
	require.Equal(t, Register|replyBit, typ)
	require.Contains(t, string(payload), internalError)
	require.Zero(t, x.logged)
	s.stalled.Store(nil)
	_, payload = ask(t, c, Header{Type: Register, Sequence: 2}, registration("k"))
	require.NotContains(t, string(payload), internalError)
	require.Equal(t, 1, x.logged)
}

// TestQueuedWhileAway: what a DEALER has queued while it had no connection is refused if it changes something; a client
// that goes on without a pause is believed again soon.
func TestQueuedWhileAway(t *testing.T) {
	s, x := listenFake(t)
	c := dealer(t, s, "12345678")
	fresh := false
	begun := now()
	for seq := uint32(17); !fresh; seq++ {
		_, payload := ask(t, c, Header{Type: Register, Sequence: seq}, registration("k"))
		fresh = !strings.Contains(string(payload), internalError)
		require.False(t, fresh && seq == 17)
		require.Less(t, now().Sub(begun), 2*staleFor)
	}
	require.Equal(t, 1, x.logged)

	c = dealer(t, s, "abcdefgh")
	typ, payload := ask(t, c, Header{Type: Exists, Sequence: 9}, appendStr(appendStr([]byte{0x81}, "key"), "k"))
	require.Equal(t, Exists|replyBit, typ)
	require.NotContains(t, string(payload), internalError, "what changes nothing is answered")
}

// TestWaitedForTheIndex: what was sent before the index could be asked has waited since its client connected.
func TestWaitedForTheIndex(t *testing.T) {
	x := &fakeIndex{term: 1, clients: map[*Client]struct{}{}}
	s, err := Listen(t.Context(), "127.0.0.1:0", 16, x, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	c := dealer(t, s, "12345678")
	require.NoError(t, c.Write(nil, request(Header{Type: Register, Sequence: 1}, registration("k"))))
	time.Sleep(Patience + 100*time.Millisecond)
	s.Start()
	parts, err := c.Read()
	require.NoError(t, err)
	require.Contains(t, string(parts[1]), internalError)
	require.Zero(t, x.logged)
}
