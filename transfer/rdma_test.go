package transfer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// rdmaEngine makes an engine with simulated NICs, which is reached over RDMA alone unless the configuration says otherwise.
func rdmaEngine(tb testing.TB, f *fabric, nics int, cfg Config) *Engine {
	tb.Helper()
	for i := range nics {
		cfg.NICs = append(cfg.NICs, f.nic(fmt.Sprintf("sim%d", i)))
	}
	if cfg.Listen == nil {
		cfg.Listen = []string{anyPort}
	}
	if cfg.Transports == nil {
		cfg.Transports = []string{TransportRDMA}
	}
	return engine(tb, cfg)
}

func nicOf(e *Engine, i int) *fabNIC { return e.cfg.NICs[i].(*fabNIC) }

// rdmaPair is two engines of a NIC each.
func rdmaPair(tb testing.TB, f *fabric, cfg Config) (here, there *Engine, seg *Segment) {
	tb.Helper()
	here, there = rdmaEngine(tb, f, 1, cfg), rdmaEngine(tb, f, 1, cfg)
	return here, there, open(tb, here, there.Addresses()...)
}

// ended requires that each slice of a batch has ended once.
func ended(tb testing.TB, b *Batch) {
	tb.Helper()
	<-b.Settled()
	require.Zero(tb, b.left.Load())
	require.Zero(tb, b.loose.Load())
	for i := range b.entries {
		require.Zero(tb, b.entries[i].left.Load())
	}
}

// landed reports whether a byte of an RDMA WRITE of ones lies in memory.
func landed(f *fabric, mem []byte) (is bool) {
	f.with(func() { is = bytes.IndexByte(mem, 1) >= 0 })
	return is
}

// TestRegisteredMemoryIsUsedDirectly: requests whose memory is a buffer's, in up to MaxLocal pieces, take no slab; others do,
// and so do READs into a buffer that may not be written.
func TestRegisteredMemoryIsUsedDirectly(t *testing.T) {
	here, there, seg := rdmaPair(t, newFabric(t), Config{SliceSize: 64 << 10})
	_, buf := buffer(t, there, 1<<20, BufferOptions{})
	h := buf.Info().Handle
	slabs := func() bool {
		b := &here.rdma.bounce
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.slabs != nil
	}
	own, _ := buffer(t, here, 1<<20, BufferOptions{})
	want := bytes.Clone(own)
	require.NoError(t, carry(t, here, Request{Op: Write, Segment: seg, Buffer: h, Local: own}))
	require.True(t, holds(buf, 0, want))
	clear(own)
	pieces := [][]byte{own[:1000], own[5000:9000], own[9000:20_000]}
	require.NoError(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: h, Local: pieces[0], More: pieces[1:]}))
	require.Equal(t, want[:16_000], bytes.Join(pieces, nil))
	require.Equal(t, make([]byte, 4000), own[1000:5000], "beside the pieces")
	require.False(t, slabs())
	fixed, _ := buffer(t, here, 1<<20, BufferOptions{ReadOnly: true})
	require.NoError(t, carry(t, here, Request{Op: Write, Segment: seg, Buffer: h, Local: fixed}))
	require.False(t, slabs())
	require.NoError(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: h, Offset: 7, Local: fixed[7:1000]}))
	require.True(t, holds(buf, 0, fixed))
	require.True(t, slabs())
	var many [][]byte
	for i := range MaxLocal + 1 {
		many = append(many, own[i*100:i*100+50])
	}
	require.NoError(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: h, Local: many[0], More: many[1:]}))
	require.True(t, holds(buf, 0, bytes.Join(many, nil)))
}

// TestBounceBuffersAreWaitedFor: with four slabs, batches of hundreds of slices end well.
func TestBounceBuffersAreWaitedFor(t *testing.T) {
	f := newFabric(t)
	here, there := rdmaEngine(t, f, 3, Config{SliceSize: 4 << 10, BounceBytes: 1}), rdmaEngine(t, f, 2, Config{})
	seg := open(t, here, there.Addresses()...)
	_, buf := buffer(t, there, 1<<20, BufferOptions{})
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			out, in := noise(t, 256<<10), make([]byte, 256<<10)
			at := uint64(i * len(out))
			for range 3 {
				r := Request{Op: Write, Segment: seg, Buffer: buf.Info().Handle, Offset: at, Local: out}
				if err := carry(t, here, r); err != nil {
					t.Error(err)
				}
				r.Op, r.Local = Read, in
				if err := carry(t, here, r); err != nil || !bytes.Equal(in, out) {
					t.Error("other bytes came back", err)
				}
			}
		})
	}
	wg.Wait()
	require.Len(t, here.rdma.bounce.slabs, minSlabs)
}

// TestNICsThatAreReset in the middle of batches, at either end: each slice ends once, and what is reported done has arrived.
func TestNICsThatAreReset(t *testing.T) {
	for name, at := range map[string]int{"here": 0, "there": 1} {
		t.Run(name, func(t *testing.T) {
			f := newFabric(t)
			here, there, seg := rdmaPair(t, f, Config{Retries: 1000, StallTimeout: time.Second})
			_, buf := buffer(t, there, 4<<20, BufferOptions{})
			nic := nicOf([]*Engine{here, there}[at], 0)
			stop := make(chan struct{})
			var wg sync.WaitGroup
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					case <-time.After(150 * time.Millisecond):
						nic.events <- EventFatal
					}
				}
			})
			done := 0
			for i := range 10 {
				out, in := noise(t, 4<<20), make([]byte, 4<<20)
				b, err := here.Submit([]Request{{Op: Write, Segment: seg, Buffer: buf.Info().Handle, Local: out}}, 20*time.Second)
				require.NoError(t, err)
				if b.Wait(t.Context()) == nil {
					done++
					require.True(t, holds(buf, 0, out), "batch %d", i)
					if carry(t, here, Request{Op: Read, Segment: seg, Buffer: buf.Info().Handle, Local: in}) == nil {
						require.True(t, bytes.Equal(in, out))
					}
				}
				ended(t, b)
			}
			close(stop)
			wg.Wait()
			require.Positive(t, done)
			f.with(func() {
				require.Positive(t, nic.resets)
				t.Logf("%d resets, %d of 10 WRITEs succeeded", nic.resets, done)
			})
		})
	}
}

// TestNothingLandsAfterABatchHasEnded, though packets that were sent before a queue pair failed arrive later: the peer has
// closed its end by then.
func TestNothingLandsAfterABatchHasEnded(t *testing.T) {
	f := newFabric(t)
	f.late = true
	here, there, seg := rdmaPair(t, f, Config{})
	mem, buf := buffer(t, there, 1<<20, BufferOptions{})
	ones, _ := buffer(t, here, 1<<20, BufferOptions{})
	f.with(func() { copy(ones, bytes.Repeat([]byte{1}, len(ones))) })
	for i := range 40 {
		b, err := here.Submit([]Request{{Op: Write, Segment: seg, Buffer: buf.Info().Handle, Local: ones}}, 10*time.Second)
		require.NoError(t, err)
		time.Sleep(time.Duration(rand.IntN(100<<(i%5))) * time.Microsecond) // before, in the middle of it, or when it is over
		here.rdma.ports[0].store.Delete(there.ID() + "/sim0")               // its queue pairs fail
		if i%2 == 0 {
			b.Cancel()
		}
		if err = b.Wait(t.Context()); !errors.Is(err, ErrCanceled) {
			require.NoError(t, err)
		}
		f.with(func() { clear(mem) })
		time.Sleep(2 * lateFor)
		require.False(t, landed(f, mem), "a byte landed")
		ended(t, b)
	}
}

// TestAKeyThatIsStale: a buffer was retired whose key the other side keeps, and its memory is registered again. The request
// fails as stale, and touches nothing; the next one carries, on the same way.
func TestAKeyThatIsStale(t *testing.T) {
	f := newFabric(t)
	here, there, seg := rdmaPair(t, f, Config{})
	mem := make([]byte, 100_000)
	nic := nicOf(there, 0)
	f.with(func() { nic.keys = []uint32{7, 7, 7, 8} })
	old := register(t, there, mem, BufferOptions{})
	out := noise(t, len(mem))
	write := Request{Op: Write, Segment: seg, Buffer: old.Info().Handle, Local: out}
	require.NoError(t, carry(t, here, write))
	require.NoError(t, old.Retire(t.Context()))
	f.with(func() { clear(mem) })
	next := register(t, there, mem, BufferOptions{})
	f.with(func() { require.Contains(t, nic.regions, uint32(8), "the NIC gives 7 again, which is not used") })
	require.ErrorIs(t, carry(t, here, write), ErrStale)
	require.True(t, holds(next, 0, make([]byte, len(mem))))
	write.Buffer = next.Info().Handle
	require.NoError(t, carry(t, here, write))
	require.True(t, holds(next, 0, out))
	require.Equal(t, "active", seg.Paths()[0].State)
	require.Zero(t, seg.Paths()[0].Errors, "the way is not to blame")
	require.Zero(t, here.EndpointStats()[0].BackingOff)
}

// TestAPeerThatDiesAndComesBack: what is under way fails, without landing, and a process that takes its place is reached.
func TestAPeerThatDiesAndComesBack(t *testing.T) {
	f := newFabric(t)
	here := rdmaEngine(t, f, 1, Config{})
	for i := range 3 {
		there := rdmaEngine(t, f, 1, Config{})
		seg := open(t, here, there.Addresses()...)
		b, _, err := there.Allocate(1<<20, BufferOptions{})
		require.NoError(t, err)
		r := Request{Op: Write, Segment: seg, Buffer: b.Info().Handle, Local: make([]byte, 1<<20)}
		require.NoError(t, carry(t, here, r))
		batch, err := here.Submit([]Request{r}, 10*time.Second)
		require.NoError(t, err)
		require.NoError(t, there.Close())
		if err := batch.Wait(t.Context()); err != nil {
			require.NotErrorIs(t, err, ErrUnsettled)
		}
		ended(t, batch)
		require.Error(t, carry(t, here, r), "round %d", i)
		if i == 1 {
			require.NoError(t, seg.Close())
		}
	}
	require.Eventually(t, func() bool { return nicOf(here, 0).allocated() == 0 }, 20*time.Second, 10*time.Millisecond)
}

// TestAControlConnectionThatBreaks takes its links along; both ends make new ones, and each byte arrives.
func TestAControlConnectionThatBreaks(t *testing.T) {
	f := newFabric(t)
	here := rdmaEngine(t, f, 2, Config{Retries: 1000})
	there, ps := rdmaThrough(t, f, Config{})
	seg := open(t, here, there.Addresses()...)
	_, buf := buffer(t, there, 1<<20, BufferOptions{})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(50 * time.Millisecond):
				ps.cut()
			}
		}
	})
	for range 20 {
		out, in := noise(t, 1<<20), make([]byte, 1<<20)
		require.NoError(t, carry(t, here, Request{Op: Write, Segment: seg, Buffer: buf.Info().Handle, Local: out}))
		require.True(t, holds(buf, 0, out))
		require.NoError(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: buf.Info().Handle, Local: in}))
		require.True(t, bytes.Equal(out, in))
	}
	close(stop)
	wg.Wait()
	require.LessOrEqual(t, nicOf(there, 0).allocated(), 2*2*2, "an earlier end is replaced")
}

// rdmaThrough makes an engine with a NIC whose control connections go through a proxy.
func rdmaThrough(t *testing.T, f *fabric, cfg Config) (*Engine, *between) {
	t.Helper()
	l, err := net.Listen("tcp", anyPort)
	require.NoError(t, err)
	cfg.Listen = []string{l.Addr().String()}
	require.NoError(t, l.Close())
	p := proxy(t, l.Addr().String())
	cfg.Advertise = []string{p.addr()}
	return rdmaEngine(t, f, 1, cfg), p
}

// TestAPeerThatConfirmsNothing: WRITEs that failed end unsettled, in time, and are settled when it answers again.
func TestAPeerThatConfirmsNothing(t *testing.T) {
	f := newFabric(t)
	here := rdmaEngine(t, f, 1, Config{AbortTimeout: 200 * time.Millisecond, StallTimeout: 200 * time.Millisecond})
	there, p := rdmaThrough(t, f, Config{})
	seg := open(t, here, there.Addresses()...)
	mem, buf := buffer(t, there, 1<<20, BufferOptions{})
	ones := bytes.Repeat([]byte{1}, len(mem))
	write := Request{Op: Write, Segment: seg, Buffer: buf.Info().Handle, Local: ones}
	require.NoError(t, carry(t, here, write))
	nicOf(here, 0).hold(true)
	p.stop()
	b, err := here.Submit([]Request{write}, 0)
	require.NoError(t, err)
	require.ErrorIs(t, b.Wait(t.Context()), ErrUnsettled)
	select {
	case <-b.Settled():
		t.Fatal("settled while the peer says nothing")
	case <-time.After(50 * time.Millisecond):
	}
	p.flow()
	nicOf(here, 0).hold(false)
	select {
	case <-b.Settled():
	case <-time.After(20 * time.Second):
		t.Fatal("not settled")
	}
	f.with(func() { clear(mem) })
	time.Sleep(20 * time.Millisecond)
	require.False(t, landed(f, mem), "a byte landed")
}

// TestRDMADeadline: a request on a NIC that carries nothing ends when its batch does, and its memory is the caller's again.
func TestRDMADeadline(t *testing.T) {
	f := newFabric(t)
	here, there, seg := rdmaPair(t, f, Config{})
	_, buf := buffer(t, there, 1<<20, BufferOptions{})
	in, _ := buffer(t, here, 1<<20, BufferOptions{})
	read := Request{Op: Read, Segment: seg, Buffer: buf.Info().Handle, Local: in}
	require.NoError(t, carry(t, here, read))
	nicOf(here, 0).hold(true)
	b, err := here.Submit([]Request{read}, 100*time.Millisecond)
	require.NoError(t, err)
	require.ErrorIs(t, b.Wait(t.Context()), ErrTimeout)
	ended(t, b)
	clear(in)
	nicOf(here, 0).hold(false)
	require.NoError(t, carry(t, here, Request{Op: Write, Segment: seg, Buffer: buf.Info().Handle, Local: make([]byte, 10)}))
	require.Equal(t, make([]byte, len(in)), in)
	require.Zero(t, here.EndpointStats()[0].BackingOff, "the peer has done nothing wrong")
}

// TestAQueuePairThatIsStuck has its NIC reset: the READ ends then, once.
func TestAQueuePairThatIsStuck(t *testing.T) {
	f := newFabric(t)
	cfg := Config{Endpoints: EndpointConfig{StuckAfter: 50 * time.Millisecond, FenceAfter: 100 * time.Millisecond}}
	here, there, seg := rdmaPair(t, f, cfg)
	_, buf := buffer(t, there, 1<<20, BufferOptions{})
	in := make([]byte, 1<<20)
	read := Request{Op: Read, Segment: seg, Buffer: buf.Info().Handle, Local: in}
	require.NoError(t, carry(t, here, read))
	nic := nicOf(here, 0)
	nic.hold(true)
	f.with(func() { nic.stuck = true })
	b, err := here.Submit([]Request{read}, 100*time.Millisecond)
	require.NoError(t, err)
	require.ErrorIs(t, b.Wait(t.Context()), ErrTimeout)
	ended(t, b)
	f.with(func() { require.Equal(t, 1, nic.resets) })
	nic.hold(false)
	require.Eventually(t, func() bool { return carry(t, here, read) == nil }, 20*time.Second, 10*time.Millisecond)
	require.True(t, holds(buf, 0, in))
}

// TestFewEndpointsServeMany: 32 peers, all at work at once, share places for 4, at the end that connects and at the end that
// is connected to. Work that is under way when an endpoint makes room ends well, and each byte is right.
func TestFewEndpointsServeMany(t *testing.T) {
	const peers, places, size = 32, 4, 256 << 10
	few := Config{Endpoints: EndpointConfig{MaxEndpoints: places}, SliceSize: 16 << 10}
	run := func(t *testing.T, from, to []*Engine, crowded *Engine) {
		t.Helper()
		var wg sync.WaitGroup
		var rounds atomic.Int64
		for i := range peers {
			here, there := from[i%len(from)], to[i%len(to)]
			_, buf := buffer(t, there, size, BufferOptions{Name: fmt.Sprint(i)})
			seg := open(t, here, there.Addresses()...)
			wg.Go(func() {
				for range 3 {
					out, in := noise(t, size), make([]byte, size)
					w := Request{Op: Write, Segment: seg, Buffer: buf.Info().Handle, Local: out}
					if err := carry(t, here, w); err != nil {
						t.Error(err)
						return
					}
					w.Op, w.Local = Read, in
					if err := carry(t, here, w); err != nil || !bytes.Equal(out, in) {
						t.Error("other bytes came back", err)
						return
					}
					rounds.Add(1)
				}
			})
		}
		wg.Wait()
		s := crowded.EndpointStats()[0]
		require.EqualValues(t, 3*peers, rounds.Load())
		require.LessOrEqual(t, nicOf(crowded, 0).most, s.QPBudget)
		t.Logf("%d queue pairs at most; %+v", nicOf(crowded, 0).most, s)
	}
	many := func(t *testing.T, f *fabric) (all []*Engine) {
		t.Helper()
		for range peers {
			all = append(all, rdmaEngine(t, f, 1, Config{SliceSize: 16 << 10}))
		}
		return all
	}
	t.Run("connecting", func(t *testing.T) {
		f := newFabric(t)
		hub := rdmaEngine(t, f, 1, few)
		run(t, []*Engine{hub}, many(t, f), hub)
	})
	t.Run("connected to", func(t *testing.T) {
		f := newFabric(t)
		hub := rdmaEngine(t, f, 1, few)
		run(t, many(t, f), []*Engine{hub}, hub)
		require.Positive(t, hub.EndpointStats()[0].Recalls)
	})
}

// TestAPeerThatDoesNotLetGo has its endpoint taken away, so that others are served.
func TestAPeerThatDoesNotLetGo(t *testing.T) {
	f := newFabric(t)
	hub := rdmaEngine(t, f, 1, Config{Endpoints: EndpointConfig{MaxServed: 1}})
	_, buf := buffer(t, hub, 1000, BufferOptions{})
	deaf, p := rdmaEngine(t, f, 1, Config{}), proxy(t, hub.Addresses()[0])
	seg, err := deaf.OpenDescriptor(Descriptor{Engine: hub.ID(), Rails: []string{p.addr()}, NICs: []string{"sim0"}})
	require.NoError(t, err)
	read := Request{Op: Read, Segment: seg, Buffer: buf.Info().Handle, Local: make([]byte, 1000)}
	require.NoError(t, carry(t, deaf, read))
	p.stop()
	defer p.flow()
	other := rdmaEngine(t, f, 1, Config{})
	read.Segment = open(t, other, hub.Addresses()...)
	require.NoError(t, carry(t, other, read))
	s := hub.EndpointStats()[0]
	require.Equal(t, 1, s.Served)
	require.EqualValues(t, 1, s.Recalls)
}

// TestOtherWaysCarry when a NIC is down: those of the other NICs, or TCP; and it carries again when it is back.
func TestOtherWaysCarry(t *testing.T) {
	for name, v := range map[string]struct {
		nics int
		tcp  string
	}{"another NIC": {2, ""}, "TCP": {1, TransportTCP}} {
		t.Run(name, func(t *testing.T) {
			f := newFabric(t)
			cfg := Config{Transports: []string{TransportRDMA}}
			if v.tcp != "" {
				cfg.Transports = append(cfg.Transports, v.tcp)
			}
			here, there := rdmaEngine(t, f, v.nics, cfg), rdmaEngine(t, f, 1, cfg)
			seg := open(t, here, there.Addresses()...)
			_, buf := buffer(t, there, 1<<20, BufferOptions{})
			in := make([]byte, 1<<20)
			read := Request{Op: Read, Segment: seg, Buffer: buf.Info().Handle, Local: in}
			require.NoError(t, carry(t, here, read))
			nicOf(here, 0).flap(false)
			for range 3 {
				clear(in)
				require.NoError(t, carry(t, here, read))
				require.True(t, holds(buf, 0, in))
			}
			nicOf(here, 0).flap(true)
			before := seg.Paths()[0].Slices
			require.Eventually(t, func() bool {
				require.NoError(t, carry(t, here, read))
				return seg.Paths()[0].Slices > before
			}, 20*time.Second, 10*time.Millisecond)
		})
	}
}

// TestMemoryThatANICDoesNotTake goes over another transport.
func TestMemoryThatANICDoesNotTake(t *testing.T) {
	f := newFabric(t)
	both := []string{TransportRDMA, TransportTCP}
	here, there := rdmaEngine(t, f, 1, Config{Transports: both}), rdmaEngine(t, f, 1, Config{Transports: both})
	f.with(func() { nicOf(there, 0).keys = []uint32{1} })
	require.NoError(t, register(t, there, make([]byte, 10), BufferOptions{}).Retire(t.Context()))
	f.with(func() { nicOf(there, 0).keys = bytes32(1, keyTries) })
	_, buf := buffer(t, there, 1000, BufferOptions{})
	in := make([]byte, 1000)
	require.NoError(t, carry(t, here, Request{Op: Read, Segment: open(t, here, there.Addresses()...), Buffer: buf.Info().Handle, Local: in}))
	require.True(t, holds(buf, 0, in))
}

func bytes32(key uint32, n int) (all []uint32) {
	for range n {
		all = append(all, key)
	}
	return all
}

// TestKeysAreRemembered, as many as there is room for.
func TestKeysAreRemembered(t *testing.T) {
	var k keys
	for i := range uint32(keysRemembered + 10) {
		k.add(i)
		k.add(i)
	}
	require.Len(t, k.set, keysRemembered)
	require.NotContains(t, k.set, uint32(9))
	require.Contains(t, k.set, uint32(10))
}

// TestConfigOfNICs refuses what cannot be right.
func TestConfigOfNICs(t *testing.T) {
	f := newFabric(t)
	a := f.nic("a")
	for want, cfg := range map[string]Config{
		"twice":       {NICs: []NIC{a, a}},
		"64 bytes":    {NICs: []NIC{f.nic("")}},
		"slice size":  {NICs: []NIC{&shortNIC{a}}},
		"queue depth": {NICs: []NIC{a}, Endpoints: EndpointConfig{QueueDepth: -1}},
	} {
		_, err := New(cfg)
		require.Error(t, err, want)
	}
}

// shortNIC moves less at once than a slice.
type shortNIC struct{ *fabNIC }

func (*shortNIC) MaxMessage() int { return 4 << 10 }

// TestHostileRDMA says on a control connection what no engine would: it is closed, or answered with fail, at the cost of
// nothing but a bounded number of queue pairs, which go with the connection.
func TestHostileRDMA(t *testing.T) {
	f := newFabric(t)
	there := rdmaEngine(t, f, 1, Config{Endpoints: EndpointConfig{MaxServed: 8, ConnectTimeout: 100 * time.Millisecond}})
	greet := func() *stream {
		c, err := net.Dial("tcp", there.Addresses()[0])
		require.NoError(t, err)
		s, err := newStream(c.(*net.TCPConn))
		require.NoError(t, err)
		hi, err := json.Marshal(hello{Engine: "00000000000000000000000000000000", Kind: kindRDMA})
		require.NoError(t, err)
		_, _, err = s.call(&header{kind: frameHello}, hi, 10*time.Second)
		require.NoError(t, err)
		return s
	}
	good := `{"from":"x","to":"sim0","qps":[{"qpn":1},{"qpn":2}]}`
	for name, v := range map[string]struct {
		h    header
		body string
		want uint8 // 0: it is closed
	}{
		"an answer":       {header{kind: frameConnected}, "{}", 0},
		"a read":          {header{kind: frameRead}, "", 0},
		"no JSON":         {header{kind: frameConnect}, "{", 0},
		"no name":         {header{kind: frameConnect}, `{"to":"sim0","qps":[{"qpn":1}]}`, 0},
		"no queue pair":   {header{kind: frameConnect}, `{"from":"x","to":"sim0"}`, 0},
		"a bad number":    {header{kind: frameConnect}, `{"from":"x","to":"sim0","qps":[{"qpn":16777216}]}`, 0},
		"too few":         {header{kind: frameConnect}, `{"from":"x","to":"sim0","qps":[{"qpn":1}]}`, frameFail},
		"no such NIC":     {header{kind: frameConnect}, `{"from":"x","to":"y","qps":[{"qpn":1}]}`, frameFail},
		"no such buffer":  {header{kind: frameGrant, buffer: 1, gen: 2}, "", frameFail},
		"no such link":    {header{kind: frameClose, gen: 9}, "", frameClosed},
		"what is allowed": {header{kind: frameConnect, gen: 9}, good, frameConnected},
	} {
		s := greet()
		h, _, err := s.call(&v.h, []byte(v.body), 10*time.Second)
		if v.want == 0 {
			require.ErrorIs(t, err, io.EOF, name)
		} else {
			require.NoError(t, err, name)
			require.Equal(t, v.want, h.kind, name)
		}
		require.NoError(t, s.conn.Close())
	}
	s := greet()
	for i := range 200 {
		body := fmt.Sprintf(`{"from":"nic%d","to":"sim0","qps":[{"qpn":1},{"qpn":2}]}`, i)
		h, _, err := s.call(&header{kind: frameConnect, gen: uint64(i % 20)}, []byte(body), 10*time.Second)
		require.NoError(t, err)
		require.Contains(t, []uint8{frameConnected, frameFail, frameRecall}, h.kind)
	}
	require.LessOrEqual(t, nicOf(there, 0).allocated(), 2*8)
	require.NoError(t, s.conn.Close())
	require.Eventually(t, func() bool { return nicOf(there, 0).allocated() == 0 }, 20*time.Second, 10*time.Millisecond)
}

// TestSegmentsOfOnePeer share endpoints; closing one ends what it has under way and leaves the other.
func TestSegmentsOfOnePeer(t *testing.T) {
	here, there, seg := rdmaPair(t, newFabric(t), Config{})
	other := open(t, here, there.Addresses()...)
	_, buf := buffer(t, there, 8<<20, BufferOptions{})
	r := Request{Op: Read, Segment: seg, Buffer: buf.Info().Handle, Local: make([]byte, 8<<20)}
	require.NoError(t, carry(t, here, r))
	require.Equal(t, 2, nicOf(here, 0).allocated())
	b, err := here.Submit([]Request{r}, 0)
	require.NoError(t, err)
	q := r
	q.Segment, q.Local = other, make([]byte, 8<<20)
	c, err := here.Submit([]Request{q}, 0)
	require.NoError(t, err)
	require.NoError(t, seg.Close())
	if err := b.Wait(t.Context()); err != nil {
		require.ErrorIs(t, err, ErrClosed)
	}
	ended(t, b)
	require.NoError(t, c.Wait(t.Context()))
	require.True(t, holds(buf, 0, q.Local))
	require.NoError(t, other.Close())
	require.Eventually(t, func() bool { return nicOf(here, 0).allocated()+nicOf(there, 0).allocated() == 0 }, 20*time.Second, time.Millisecond)
}

// TestAnIdleControlConnection ends when no link needs it.
func TestAnIdleControlConnection(t *testing.T) {
	here, there, seg := rdmaPair(t, newFabric(t), Config{IdleTimeout: 50 * time.Millisecond})
	_, buf := buffer(t, there, 1000, BufferOptions{})
	r := Request{Op: Read, Segment: seg, Buffer: buf.Info().Handle, Local: make([]byte, 1000)}
	require.NoError(t, carry(t, here, r))
	peer := here.rdma.peers[there.ID()]
	connected := func() bool {
		peer.mu.Lock()
		defer peer.mu.Unlock()
		return peer.control != nil
	}
	time.Sleep(200 * time.Millisecond)
	require.True(t, connected(), "there is a link")
	here.rdma.ports[0].store.Delete(there.ID() + "/sim0")
	require.Eventually(t, func() bool { return !connected() }, 20*time.Second, 10*time.Millisecond)
	require.NoError(t, carry(t, here, r))
}

// TestStatsOfAnotherProcess are asked for over its address.
func TestStatsOfAnotherProcess(t *testing.T) {
	here, there, seg := rdmaPair(t, newFabric(t), Config{})
	_, buf := buffer(t, there, 1000, BufferOptions{})
	require.NoError(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: buf.Info().Handle, Local: make([]byte, 1000)}))
	all, err := engine(t, Config{}).PeerEndpointStats(t.Context(), there.Addresses()[0])
	require.NoError(t, err)
	require.Len(t, all, 1)
	require.Equal(t, "sim0", all[0].NIC)
	require.Equal(t, 1, all[0].Served)
	require.Equal(t, 2, all[0].QPs)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, err = here.PeerEndpointStats(ctx, "127.0.0.1:1")
	require.Error(t, err)
}

// FuzzRDMABodies reads what peers say on RDMA control connections.
func FuzzRDMABodies(f *testing.F) {
	f.Add([]byte(`{"from":"a","to":"b","qps":[{"gid":[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,1],"qpn":1,"psn":2,"mtu":4096,"reads":16}]}`))
	f.Add([]byte(`{"address":"4096","bytes":1,"keys":{"a":1}}`))
	f.Add([]byte(`{"error":"no"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if a, err := parseConnectAsk(b); err == nil && (!validNIC(a.From) || !validNIC(a.To) || len(a.QPs) == 0) {
			t.Fatal("a connect that cannot be")
		}
		if a, err := parseConnectAnswer(b); err == nil && len(a.QPs) > maxQPsPerEndpoint {
			t.Fatal("a connected that cannot be")
		}
		if g, err := parseGrant(b); err == nil && g.Address+g.Bytes < g.Address {
			t.Fatal("a grant that cannot be")
		}
		if len(refused(&header{status: statusRefused}, b).Error()) > 2*maxRefusal {
			t.Fatal("a long refusal")
		}
	})
}
