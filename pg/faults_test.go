package pg

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/internal/freeport"
	"larder/pg/member"
	"larder/pg/reduce"
	"larder/pg/store"
)

// What may go wrong with ranks of this process: their connections end as they do when they die, or a gate cuts them off.

var errCrashed = errors.New("this rank has crashed")

// crash stops a world and ends its connections, as its death does. What it has written into the store stays until its lease is over.
func (j *job) crash(rank int) {
	w := j.worlds[rank]
	w.mu.Lock()
	groups := slices.Clone(w.groups)
	w.mu.Unlock()
	for _, g := range groups { // nobody may poll what is not mapped any more
		g.stop(errCrashed)
		g.cancel()
		g.endCalls(errCrashed)
		g.halt()
	}
	if err := w.node.Close(); err != nil {
		j.t.Error(err)
	}
}

// gate is a TCP address that leads to another one, unless it is shut: then connections that are there end, and new ones end at once;
// or mute: then nothing passes, and nobody is told.
type gate struct {
	listener net.Listener
	target   string
	wg       sync.WaitGroup

	mu    sync.Mutex
	state gateState
	open  chan struct{} // closed when it is not mute
	conns map[net.Conn]bool
}

type gateState uint8

const (
	gateOpen gateState = iota
	gateShut
	gateMute
	gateGone // for good
)

// newGate makes one that leads to target, which may be set later, before somebody comes.
func newGate(tb testing.TB, target string) *gate {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	g := &gate{listener: l, target: target, open: make(chan struct{}), conns: map[net.Conn]bool{}}
	close(g.open)
	g.wg.Go(g.accept)
	tb.Cleanup(func() {
		_ = l.Close() // once
		g.set(gateGone)
		g.wg.Wait()
	})
	return g
}

func (g *gate) addr() string { return g.listener.Addr().String() }

func (g *gate) set(s gateState) {
	g.mu.Lock()
	defer g.mu.Unlock()
	was := g.state
	g.state = s
	switch {
	case was != gateMute && s == gateMute:
		g.open = make(chan struct{})
	case was == gateMute && s != gateMute:
		close(g.open)
	}
	if s == gateShut || s == gateGone {
		for c := range g.conns {
			_ = c.Close() // nobody needs it
		}
	}
}

func (g *gate) accept() {
	for {
		c, err := g.listener.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", g.target)
		if err != nil {
			_ = c.Close() // nobody is there
			continue
		}
		for _, c := range []net.Conn{c, out} {
			g.mu.Lock()
			g.conns[c] = true
			if g.state == gateShut || g.state == gateGone {
				_ = c.Close() // it was let in too late
			}
			g.mu.Unlock()
		}
		g.wg.Go(func() { g.pass(c, out) })
		g.wg.Go(func() { g.pass(out, c) })
	}
}

// pass carries bytes one way.
func (g *gate) pass(from, to net.Conn) {
	defer func() {
		_ = from.Close() // both ways end together
		_ = to.Close()
		g.mu.Lock()
		delete(g.conns, from)
		g.mu.Unlock()
	}()
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		g.mu.Lock()
		open := g.open
		g.mu.Unlock()
		<-open
		if _, werr := to.Write(b[:n]); err != nil || werr != nil {
			return
		}
	}
}

// gatedJob makes a job whose worlds reach each other by TCP, each through a gate of its own, and the store through another one.
// Who shuts the former cuts a rank off from those of higher ranks, who dial; and from all, if it is the lowest.
func gatedJob(t *testing.T, n int, change func(*Config)) (j *job, peers, stores []*gate) {
	t.Helper()
	srv, err := store.Serve("127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, srv.Close()) })
	j = &job{t: t}
	for rank := range n {
		at := freeport.For(t)
		peers = append(peers, newGate(t, at))
		stores = append(stores, newGate(t, srv.Addr()))
		s, err := store.Dial(t.Context(), stores[rank].addr(), testLease)
		require.NoError(t, err)
		j.addTo(s, func(c *Config) {
			c.Host, c.Transports = fmt.Sprint("host ", rank), []string{"tcp"}
			c.Listen, c.Advertise = []string{at}, []string{peers[rank].addr()}
			if change != nil {
				change(c)
			}
		})
	}
	return j, peers, stores
}

// sums calls an all-reduce of 2^rank and returns the sum: who has taken part.
func sums(g *Group) (float32, error) {
	buf := floats(float32(int(1) << g.Rank()))
	_, err := g.Do(AllReduce(buf, buf, reduce.F32, reduce.Sum))
	return float32At(buf, 0), err
}

// until calls something every few milliseconds until it says so.
func until(t *testing.T, what string, so func() bool) {
	t.Helper()
	require.Eventually(t, so, 20*time.Second, 5*time.Millisecond, what)
}

// settle calls all-reduces until one has that sum. Those before it may have lost these ranks, and nobody else.
func settle(g *Group, want float32, lost ...int) error {
	for began := moment(); since(began) < 20*time.Second; {
		sum, err := sums(g)
		if err == nil && sum == want {
			return nil
		}
		if peer, ok := errors.AsType[*PeerError](err); err != nil && (!ok || slices.ContainsFunc(peer.Ranks, func(r int) bool {
			return !slices.Contains(lost, r)
		})) {
			return err
		}
	}
	return fmt.Errorf("the sum does not become %v", want)
}

// settled has all of these groups settle at once.
func settled(tb testing.TB, groups []*Group, want float32, lost ...int) {
	tb.Helper()
	each(tb, groups, func(g *Group) error { return settle(g, want, lost...) })
}

// letIn has a group join, and one of those who are in it activate it, while they call nothing.
func letIn(t *testing.T, joiner, by *Group) {
	t.Helper()
	joined := make(chan error, 1)
	go func() { joined <- joiner.Join(t.Context()) }()
	until(t, "it may be activated", func() bool {
		states, err := by.PeerState(joiner.Rank())
		return err == nil && states[0]
	})
	res, err := by.Activate(t.Context(), joiner.Rank())
	require.NoError(t, err)
	require.Equal(t, member.Applied, res.Status, res.Reason)
	require.NoError(t, <-joined)
	until(t, "it is known to", func() bool { return by.Epoch() == joiner.Epoch() })
}

// passOn sends a message around.
func passOn(t *testing.T, g *Group, n, count int) error {
	t.Helper()
	buf := make([]byte, 4*count)
	s := g.Start(Send(fill(float32(g.Rank()), count), (g.Rank()+1)%n, 7))
	from := (g.Rank() + n - 1) % n
	if _, err := g.Do(Recv(buf, from, 7)); err != nil {
		return err
	}
	require.Equal(t, fill(float32(from), count), buf)
	_, err := s.Wait(t.Context())
	return err
}
