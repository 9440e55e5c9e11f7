package transfer

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// engine makes one that ends with the test.
func engine(tb testing.TB, cfg Config) *Engine {
	tb.Helper()
	e, err := New(cfg)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, e.Close()) })
	return e
}

const anyPort = "127.0.0.1:0"

// noise is memory with random content.
func noise(tb testing.TB, n int) []byte {
	tb.Helper()
	b := make([]byte, n)
	_, err := rand.Read(b)
	require.NoError(tb, err)
	return b
}

// mapped has buffers lie in memory that others can map.
var mapped bool

// memory makes n bytes of noise for a buffer.
func memory(tb testing.TB, n int, o *BufferOptions) []byte {
	tb.Helper()
	if !mapped {
		return noise(tb, n)
	}
	p, err := newPages("test", n)
	require.NoError(tb, err)
	tb.Cleanup(p.close)
	_, err = rand.Read(p.b)
	require.NoError(tb, err)
	o.File = p.f
	return p.b
}

// buffer registers n bytes of noise.
func buffer(tb testing.TB, e *Engine, n int, o BufferOptions) ([]byte, *Buffer) {
	tb.Helper()
	mem := memory(tb, n, &o)
	b := register(tb, e, mem, o)
	tb.Cleanup(func() { require.NoError(tb, b.Retire(context.Background())) })
	return mem, b
}

func register(tb testing.TB, e *Engine, mem []byte, o BufferOptions) *Buffer {
	tb.Helper()
	b, err := e.Register(mem, o)
	require.NoError(tb, err)
	return b
}

func open(tb testing.TB, e *Engine, at ...string) *Segment {
	tb.Helper()
	s, err := e.Open(tb.Context(), at...)
	require.NoError(tb, err)
	return s
}

// carry submits requests and waits for them.
func carry(tb testing.TB, e *Engine, rs ...Request) error {
	tb.Helper()
	b, err := e.Submit(rs, 20*time.Second)
	require.NoError(tb, err)
	ctx, cancel := context.WithTimeout(tb.Context(), 30*time.Second)
	defer cancel()
	return b.Wait(ctx)
}

// within runs fn as the buffer's users do, which the race detector can see: it does not see that they come after or before
// what a peer is told.
func within(b *Buffer, fn func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	fn()
}

// holds reports whether bytes lie in a buffer.
func holds(b *Buffer, off uint64, want []byte) (is bool) {
	within(b, func() { is = bytes.Equal(want, b.mem[off:off+uint64(len(want))]) })
	return is
}

// ways are the transports that tests go over.
func ways(t *testing.T, cfg Config, run func(t *testing.T, here, there *Engine, seg *Segment)) {
	t.Helper()
	require.False(t, mapped)
	t.Run("tcp", func(t *testing.T) {
		cfg := cfg
		cfg.Listen, cfg.Transports = []string{anyPort, anyPort}, []string{TransportTCP}
		here, there := engine(t, cfg), engine(t, cfg)
		run(t, here, there, open(t, here, there.Addresses()...))
	})
	t.Run("shm", func(t *testing.T) {
		cfg.Listen = []string{anyPort}
		here, there := engine(t, cfg), engine(t, cfg)
		seg := open(t, here, there.Addresses()...)
		require.Equal(t, "shm", seg.lanes[0].transport)
		mapped = true
		defer func() { mapped = false }()
		run(t, here, there, seg)
	})
	t.Run("rdma", func(t *testing.T) {
		cfg := cfg
		if cfg.Checksums {
			t.Skip("NICs check packets, and nothing end to end")
		}
		cfg.Listen, cfg.Transports = []string{anyPort}, []string{TransportRDMA}
		f := newFabric(t)
		here, there := rdmaEngine(t, f, 2, cfg), rdmaEngine(t, f, 2, cfg)
		run(t, here, there, open(t, here, there.Addresses()...))
	})
	t.Run("local", func(t *testing.T) {
		cfg.Listen = []string{anyPort}
		here := engine(t, cfg)
		run(t, here, here, open(t, here, here.Addresses()...))
	})
}

// TestBytesArrive moves ranges of many lengths, in one piece and in many.
func TestBytesArrive(t *testing.T) {
	for _, sums := range []bool{false, true} {
		ways(t, Config{Checksums: sums, SliceSize: 16 << 10}, func(t *testing.T, here, there *Engine, seg *Segment) {
			t.Helper()
			mem, buf := buffer(t, there, 1<<20, BufferOptions{Name: "pool"})
			h := buf.Info().Handle
			for _, n := range []int{0, 1, 47, 48, 4096, 16 << 10, 16<<10 + 1, 300_000, 1 << 20} {
				off := uint64(len(mem)-n) / 2
				in := make([]byte, n)
				require.NoError(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: h, Offset: off, Local: in}), "read %d", n)
				require.True(t, holds(buf, off, in), "read %d", n)
				out := noise(t, n)
				require.NoError(t, carry(t, here, Request{Op: Write, Segment: seg, Buffer: h, Offset: off, Local: out}), "write %d", n)
				require.True(t, holds(buf, off, out), "write %d", n)
			}
			var pieces [][]byte
			whole := noise(t, 100_000)
			for at := 0; at < len(whole); at += 777 {
				pieces = append(pieces, whole[at:min(at+777, len(whole))])
			}
			r := Request{Op: Write, Segment: seg, Buffer: h, Offset: 5, Local: pieces[0], More: pieces[1:]}
			require.NoError(t, carry(t, here, r))
			require.True(t, holds(buf, 5, whole))
			back := make([]byte, len(whole))
			r.Op, r.Local, r.More = Read, back[:1], [][]byte{back[1:3], nil, back[3:]}
			require.NoError(t, carry(t, here, r))
			require.True(t, bytes.Equal(whole, back))
		})
	}
}

// TestManyAtOnce has several goroutines submit batches of many requests.
func TestManyAtOnce(t *testing.T) {
	ways(t, Config{SliceSize: 4 << 10}, func(t *testing.T, here, there *Engine, seg *Segment) {
		t.Helper()
		const block, blocks, clients = 10_000, 50, 4
		_, buf := buffer(t, there, clients*blocks*block, BufferOptions{})
		h := buf.Info().Handle
		var wg sync.WaitGroup
		for c := range clients {
			wg.Go(func() {
				out, in := noise(t, blocks*block), make([]byte, blocks*block)
				for _, op := range []Op{Write, Read} {
					rs := make([]Request, blocks)
					for i := range rs {
						local := out
						if op == Read {
							local = in
						}
						rs[i] = Request{
							Op: op, Segment: seg, Buffer: h, Offset: uint64((c*blocks + i) * block), Local: local[i*block : (i+1)*block],
						}
					}
					if err := carry(t, here, rs...); err != nil {
						t.Error(op, err)
					}
				}
				if !bytes.Equal(out, in) {
					t.Error("other bytes came back")
				}
			})
		}
		wg.Wait()
	})
}

// TestRequestsThatCannotBe tells what each is answered.
func TestRequestsThatCannotBe(t *testing.T) {
	ways(t, Config{}, func(t *testing.T, here, there *Engine, seg *Segment) {
		t.Helper()
		mem, buf := buffer(t, there, 1000, BufferOptions{})
		unwritten, readOnly := buffer(t, there, 1000, BufferOptions{ReadOnly: true})
		h, fixed := buf.Info().Handle, readOnly.Info().Handle
		before, unwrittenBefore := bytes.Clone(mem), bytes.Clone(unwritten)
		for name, c := range map[string]struct {
			r    Request
			want error
		}{
			"another generation":    {Request{Op: Write, Buffer: Handle{h.ID, h.Generation + 2}, Local: make([]byte, 8)}, ErrStale},
			"no such buffer":        {Request{Op: Read, Buffer: Handle{99, h.Generation}, Local: make([]byte, 8)}, ErrStale},
			"behind the end":        {Request{Op: Write, Buffer: h, Offset: 993, Local: make([]byte, 8)}, ErrRange},
			"far behind the end":    {Request{Op: Read, Buffer: h, Offset: 1 << 60, Local: make([]byte, 8)}, ErrRange},
			"a write where one may": {Request{Op: Write, Buffer: fixed, Local: make([]byte, 200_000)[:900]}, ErrReadOnly},
		} {
			c.r.Segment = seg
			b, err := here.Submit([]Request{c.r, {Op: Read, Segment: seg, Buffer: h, Local: make([]byte, 10)}}, 0)
			require.NoError(t, err)
			require.ErrorIs(t, b.Wait(t.Context()), c.want, name)
			state, err := b.Status(0)
			require.Equal(t, Failed, state, name)
			require.ErrorIs(t, err, c.want)
			state, err = b.Status(1)
			require.Equal(t, Done, state, "its neighbour in %s", name)
			require.NoError(t, err)
			<-b.Settled()
		}
		require.Equal(t, before, mem)
		require.Equal(t, unwrittenBefore, unwritten)
		for name, r := range map[string]Request{
			"no operation": {Segment: seg, Buffer: h},
			"no segment":   {Op: Read, Buffer: h},
			"pieces":       {Op: Read, Segment: seg, Buffer: h, More: make([][]byte, MaxPieces)},
			"wraps":        {Op: Read, Segment: seg, Buffer: h, Offset: 1<<64 - 1, Local: make([]byte, 2)},
		} {
			_, err := here.Submit([]Request{r}, 0)
			require.Error(t, err, name)
		}
		_, err := here.Submit(make([]Request, maxBatch+1), 0)
		require.ErrorContains(t, err, "split it")
	})
}

// TestNothingLandsAfterRetire writes without end to a buffer that is retired, and looks whether its memory still changes.
func TestNothingLandsAfterRetire(t *testing.T) {
	ways(t, Config{}, func(t *testing.T, here, there *Engine, seg *Segment) {
		t.Helper()
		for range 20 {
			mem, buf := buffer(t, there, 8<<20, BufferOptions{})
			r := Request{Op: Write, Segment: seg, Buffer: buf.Info().Handle, Local: bytes.Repeat([]byte{1}, len(mem))}
			b, err := here.Submit([]Request{r}, 0)
			require.NoError(t, err)
			time.Sleep(time.Millisecond)
			require.NoError(t, buf.Retire(t.Context()))
			require.NoError(t, buf.Retire(t.Context()), "twice")
			clear(mem)
			if err := b.Wait(t.Context()); err != nil {
				require.ErrorIs(t, err, ErrStale)
			}
			require.Equal(t, -1, bytes.IndexByte(mem, 1), "a byte landed")
		}
	})
}

// TestCancel has a batch end early, and nothing of it land later.
func TestCancel(t *testing.T) {
	ways(t, Config{}, func(t *testing.T, here, there *Engine, seg *Segment) {
		t.Helper()
		mem, buf := buffer(t, there, 64<<20, BufferOptions{})
		h := buf.Info().Handle
		b, err := here.Submit([]Request{{Op: Write, Segment: seg, Buffer: h, Local: bytes.Repeat([]byte{1}, len(mem))}}, 0)
		require.NoError(t, err)
		b.Cancel()
		b.Cancel()
		require.ErrorIs(t, b.Wait(t.Context()), ErrCanceled)
		<-b.Settled()
		within(buf, func() { clear(mem) })
		time.Sleep(10 * time.Millisecond)
		require.Equal(t, -1, bytes.IndexByte(mem, 1), "a byte landed")
	})
}

// between is a proxy in front of a listener, which a test makes misbehave.
type between struct {
	l      net.Listener
	to     string
	mu     sync.Mutex
	hold   chan struct{} // closed when bytes flow; nil = they do
	spoil  func(b []byte)
	refuse bool
	conns  []net.Conn
	wg     sync.WaitGroup
}

func proxy(t *testing.T, to string) *between {
	t.Helper()
	l, err := net.Listen("tcp", anyPort)
	require.NoError(t, err)
	p := &between{l: l, to: to}
	p.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			p.mu.Lock()
			refuse := p.refuse
			p.mu.Unlock()
			d, err := net.Dial("tcp", to)
			if err != nil || refuse {
				_ = c.Close()
				if d != nil {
					_ = d.Close()
				}
				continue
			}
			p.mu.Lock()
			p.conns = append(p.conns, c, d)
			p.mu.Unlock()
			p.wg.Go(func() { p.pipe(c, d, true) })
			p.wg.Go(func() { p.pipe(d, c, false) })
		}
	})
	t.Cleanup(p.close)
	return p
}

func (p *between) close() {
	p.flow()
	_ = p.l.Close()
	p.cut()
	p.wg.Wait()
}

func (p *between) pipe(from, to net.Conn, out bool) {
	defer func() { _, _ = from.Close(), to.Close() }()
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		p.mu.Lock()
		hold, spoil := p.hold, p.spoil
		p.mu.Unlock()
		if hold != nil {
			<-hold
		}
		if spoil != nil && out {
			spoil(b[:n])
		}
		if _, werr := to.Write(b[:n]); err != nil || werr != nil {
			return
		}
	}
}

// cut closes all connections.
func (p *between) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}

// stop lets no byte through until flow.
func (p *between) stop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hold = make(chan struct{})
}

func (p *between) flow() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hold != nil {
		close(p.hold)
		p.hold = nil
	}
}

func (p *between) addr() string { return p.l.Addr().String() }

// through makes an engine that is reached through proxies only.
func through(t *testing.T, rails int, cfg Config) (there *Engine, ps []*between) {
	t.Helper()
	cfg.Transports = []string{TransportTCP}
	for range rails {
		l, err := net.Listen("tcp", anyPort)
		require.NoError(t, err)
		cfg.Listen = append(cfg.Listen, l.Addr().String())
		require.NoError(t, l.Close())
		p := proxy(t, l.Addr().String())
		ps = append(ps, p)
		cfg.Advertise = append(cfg.Advertise, p.addr())
	}
	return engine(t, cfg), ps
}

// TestConnectionsThatBreak cuts connections all the time: no batch fails, and each byte arrives.
func TestConnectionsThatBreak(t *testing.T) {
	here := engine(t, Config{Retries: 1000})
	there, ps := through(t, 2, Config{})
	seg := open(t, here, there.Addresses()...)
	mem := make([]byte, 1<<20)
	buf := register(t, there, mem, BufferOptions{})
	h := buf.Info().Handle
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
				ps[i%2].cut()
			}
		}
	})
	for range 50 {
		out, in := noise(t, len(mem)), make([]byte, len(mem))
		require.NoError(t, carry(t, here, Request{Op: Write, Segment: seg, Buffer: h, Local: out}))
		require.True(t, holds(buf, 0, out))
		require.NoError(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: h, Local: in}))
		require.True(t, bytes.Equal(out, in))
	}
	close(stop)
	wg.Wait()
}

// TestADeadRail refuses all connections on one of two rails: batches go over the other, and the first comes back.
func TestADeadRail(t *testing.T) {
	here := engine(t, Config{})
	there, ps := through(t, 2, Config{})
	seg := open(t, here, there.Addresses()...)
	mem := noise(t, 4<<20)
	h := register(t, there, mem, BufferOptions{}).Info().Handle
	ps[0].mu.Lock()
	ps[0].refuse = true
	ps[0].mu.Unlock()
	ps[0].cut()
	in := make([]byte, len(mem))
	for range 20 {
		require.NoError(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: h, Local: in}))
	}
	l := seg.lanes[0]
	probing := func(i int) bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.rails[i].probing
	}
	require.True(t, probing(0))
	require.False(t, probing(1))
	ps[0].mu.Lock()
	ps[0].refuse = false
	ps[0].mu.Unlock()
	require.Eventually(t, func() bool {
		require.NoError(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: h, Local: in}))
		return l.rails[0].carries.Load()
	}, 20*time.Second, 10*time.Millisecond)
}

// TestNoRailIsLeft has batches fail soon, with the reason.
func TestNoRailIsLeft(t *testing.T) {
	here, there := engine(t, Config{}), engine(t, Config{Listen: []string{anyPort}})
	seg := open(t, here, there.Addresses()...)
	h := register(t, there, make([]byte, 100), BufferOptions{}).Info().Handle
	require.NoError(t, there.Close())
	begun := time.Now()
	err := carry(t, here, Request{Op: Write, Segment: seg, Buffer: h, Local: make([]byte, 100)})
	require.ErrorIs(t, err, ErrNoPath)
	var path *PathError
	require.ErrorAs(t, err, &path)
	require.Less(t, time.Since(begun), 10*time.Second)
}

// TestASpoiledByte is noticed, and the slice sent again.
func TestASpoiledByte(t *testing.T) {
	here := engine(t, Config{Checksums: true, Connections: 1, SliceSize: 4 << 10})
	there, ps := through(t, 1, Config{})
	seg := open(t, here, there.Addresses()...)
	mem := make([]byte, 100_000)
	buf := register(t, there, mem, BufferOptions{})
	h := buf.Info().Handle
	out := noise(t, len(mem))
	require.NoError(t, carry(t, here, Request{Op: Write, Segment: seg, Buffer: h, Local: out}))
	require.True(t, holds(buf, 0, out))
	mark := []byte("a byte of this is spoiled on its way")
	copy(out[5000:], mark)
	var once sync.Once
	ps[0].mu.Lock()
	ps[0].spoil = func(b []byte) {
		if i := bytes.Index(b, mark); i >= 0 {
			once.Do(func() { b[i] ^= 1 })
		}
	}
	ps[0].mu.Unlock()
	require.NoError(t, carry(t, here, Request{Op: Write, Segment: seg, Buffer: h, Local: out}))
	require.True(t, holds(buf, 0, out))
}

// TestAPeerThatIsStuck neither reads nor answers: a WRITE ends unsettled, in time, and is settled when the peer is back;
// nothing lands later than that.
func TestAPeerThatIsStuck(t *testing.T) {
	here := engine(t, Config{StallTimeout: 200 * time.Millisecond, AbortTimeout: 200 * time.Millisecond})
	there, ps := through(t, 1, Config{})
	seg := open(t, here, there.Addresses()...)
	mem := make([]byte, 1<<20)
	buf := register(t, there, mem, BufferOptions{})
	h := buf.Info().Handle
	require.NoError(t, carry(t, here, Request{Op: Write, Segment: seg, Buffer: h, Local: noise(t, len(mem))}))
	ps[0].stop()
	write := Request{Op: Write, Segment: seg, Buffer: h, Local: bytes.Repeat([]byte{1}, len(mem))}
	b, err := here.Submit([]Request{write}, 0)
	require.NoError(t, err)
	require.ErrorIs(t, b.Wait(t.Context()), ErrUnsettled)
	state, _ := b.Status(0)
	require.Equal(t, Unsettled, state)
	select {
	case <-b.Settled():
		t.Fatal("settled while the peer is stuck")
	case <-time.After(50 * time.Millisecond):
	}
	ps[0].flow()
	select {
	case <-b.Settled():
	case <-time.After(20 * time.Second):
		t.Fatal("not settled")
	}
	within(buf, func() { clear(mem) })
	time.Sleep(50 * time.Millisecond)
	require.Equal(t, -1, bytes.IndexByte(mem, 1), "a byte landed")
}

// TestAReadThatIsStuck ends at its batch's deadline, and its memory is the caller's again.
func TestAReadThatIsStuck(t *testing.T) {
	here := engine(t, Config{AbortTimeout: 200 * time.Millisecond})
	there, ps := through(t, 1, Config{})
	seg := open(t, here, there.Addresses()...)
	h := register(t, there, noise(t, 1<<20), BufferOptions{}).Info().Handle
	in := make([]byte, 1<<20)
	require.NoError(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: h, Local: in}))
	ps[0].stop()
	b, err := here.Submit([]Request{{Op: Read, Segment: seg, Buffer: h, Local: in}}, 200*time.Millisecond)
	require.NoError(t, err)
	require.ErrorIs(t, b.Wait(t.Context()), ErrTimeout)
	<-b.Settled()
	clear(in)
	ps[0].flow()
	time.Sleep(50 * time.Millisecond)
	require.Equal(t, make([]byte, len(in)), in)
}

// TestDescriptors tells what a segment shows of itself, and what is refused.
// TestAConnectionIsKnownOnceItIsWelcome: what is sent on it next can be aborted.
func TestAConnectionIsKnownOnceItIsWelcome(t *testing.T) {
	here, there := engine(t, Config{}), engine(t, Config{Listen: []string{"127.0.0.1:0"}})
	for id := uint64(1); id <= 200; id++ {
		s, _, err := here.dial(t.Context(), "", there.Addresses()[0], kindData, id)
		require.NoError(t, err)
		found := there.target.find(here.ID(), id)
		require.NoError(t, s.conn.Close())
		require.NotNil(t, found, "connection %d", id)
	}
}

// TestARequestOutOfTimeBehindOthers: a short deadline holds also for what waits behind a request that has much time.
func TestARequestOutOfTimeBehindOthers(t *testing.T) {
	c := &connection{head: windowSlices - 1, tail: windowSlices + 1}
	c.ring[0] = &slice{batch: &Batch{deadline: 100}}
	c.ring[1] = &slice{batch: &Batch{deadline: 10}}
	require.False(t, c.late(9))
	require.True(t, c.late(10))
	c.ring[1] = &slice{orphan: true}
	require.False(t, c.late(99))
	require.True(t, c.late(100))
}

func TestDescriptors(t *testing.T) {
	here, there := engine(t, Config{}), engine(t, Config{Name: "n1", Listen: []string{anyPort, anyPort}})
	buf := register(t, there, make([]byte, 10), BufferOptions{Name: "a"})
	seg := open(t, here, there.Addresses()...)
	d := seg.Descriptor()
	require.Equal(t, there.Describe(), d)
	require.Equal(t, "n1", d.Name)
	info, ok := seg.Buffer("a")
	require.True(t, ok)
	require.Equal(t, buf.Info(), info)
	register(t, there, make([]byte, 20), BufferOptions{Name: "b", ReadOnly: true})
	_, ok = seg.Buffer("b")
	require.False(t, ok)
	require.NoError(t, seg.Refresh(t.Context()))
	info, ok = seg.Buffer("b")
	require.True(t, ok)
	require.EqualValues(t, 20, info.Bytes)
	for _, bad := range []string{
		"", "{}", `{"engine":"00"}`, `{"engine":"00000000000000000000000000000000","rails":["x"]}`,
		`{"engine":"00000000000000000000000000000000","rails":"127.0.0.1:1"}`,
	} {
		_, err := ParseDescriptor([]byte(bad))
		require.Error(t, err, bad)
	}
	_, err := here.OpenDescriptor(Descriptor{Engine: d.Engine})
	require.ErrorIs(t, err, ErrNoPath)
}

// TestATokenThatIsWrong is refused.
func TestATokenThatIsWrong(t *testing.T) {
	there := engine(t, Config{Listen: []string{anyPort}, Token: "secret"})
	_, err := engine(t, Config{Token: "other"}).Open(t.Context(), there.Addresses()...)
	require.ErrorIs(t, err, ErrRefused)
	require.ErrorContains(t, err, "token")
	open(t, engine(t, Config{Token: "secret"}), there.Addresses()...)
}

// TestHostileBytes sends an engine what no engine would: it closes the connection, and goes on with others.
func TestHostileBytes(t *testing.T) {
	there := engine(t, Config{Listen: []string{anyPort}})
	h := register(t, there, noise(t, 100), BufferOptions{}).Info().Handle
	head := func(h header) []byte {
		b := make([]byte, headerSize)
		h.encode(b)
		return b
	}
	hi := `{"engine":"00000000000000000000000000000000","kind":"data"}`
	greeting := append(head(header{kind: frameHello, body: uint32(len(hi))}), hi...)
	for name, bad := range map[string][]byte{
		"noise":             noise(t, 1000),
		"a long hello":      head(header{kind: frameHello, body: 1 << 30}),
		"no hello":          head(header{kind: frameRead}),
		"a hello of noise":  append(head(header{kind: frameHello, body: 9}), "{{{{{{{{{"...),
		"an answer":         append(bytes.Clone(greeting), head(header{kind: frameAck, seq: 1})...),
		"a read of 4 GiB":   append(bytes.Clone(greeting), head(header{kind: frameRead, length: 1<<32 - 1})...),
		"half a write":      append(bytes.Clone(greeting), head(header{kind: frameWrite, body: 100, gen: h.Generation, buffer: h.ID})...),
		"a body of no type": append(bytes.Clone(greeting), head(header{kind: framePing, body: 5})...),
	} {
		c, err := net.Dial("tcp", there.Addresses()[0])
		require.NoError(t, err, name)
		_, err = c.Write(bad)
		require.NoError(t, err, name)
		_ = c.(*net.TCPConn).CloseWrite()           // it may be closed already
		_, _ = io.ReadAll(io.LimitReader(c, 1<<20)) // until it is closed, or reset
		require.NoError(t, c.Close())
	}
	here := engine(t, Config{})
	in := make([]byte, 100)
	require.NoError(t, carry(t, here, Request{Op: Read, Segment: open(t, here, there.Addresses()...), Buffer: h, Local: in}))
}

// TestConfig tells what is refused.
func TestConfig(t *testing.T) {
	for name, c := range map[string]Config{
		"slice size":  {SliceSize: 100},
		"large slice": {SliceSize: 1 << 30},
		"connections": {Connections: 1000},
		"advertise":   {Listen: []string{anyPort}, Advertise: []string{"a:1", "b:2"}},
		"address":     {Listen: []string{"256.0.0.1:0"}},
		"time":        {Timeout: -1},
		"transport":   {Transports: []string{"pigeon"}},
	} {
		_, err := New(c)
		require.Error(t, err, name)
	}
}

// FuzzHeader reads headers: none is taken that could ask for too much, and each is written as it was.
func FuzzHeader(f *testing.F) {
	b := make([]byte, headerSize)
	(&header{kind: frameWrite, body: 10, seq: 1, gen: 2, off: 3, sum: 4, buffer: 5, length: 6}).encode(b)
	f.Add(b)
	f.Add(binary.LittleEndian.AppendUint64(nil, 1))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < headerSize {
			return
		}
		var h header
		if h.decode(b[:headerSize]) != nil {
			return
		}
		if h.body > maxSlice || h.length > maxSlice {
			t.Fatal("too much")
		}
		again := make([]byte, headerSize)
		h.encode(again)
		require.Equal(t, b[:headerSize], again)
	})
}

// FuzzDescriptor reads descriptors.
func FuzzDescriptor(f *testing.F) {
	f.Add([]byte(`{"engine":"00000000000000000000000000000000","rails":["127.0.0.1:1"],"buffers":[{"id":1,"generation":"3","bytes":4}]}`))
	e, err := New(Config{})
	require.NoError(f, err)
	f.Cleanup(func() { _ = e.Close() })
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := ParseDescriptor(b)
		if err != nil {
			return
		}
		s, err := e.OpenDescriptor(*d)
		if err != nil {
			return
		}
		require.NoError(t, s.Close())
	})
}

func benchmarkWay(b *testing.B, here, there *Engine, op Op, block int) {
	b.Helper()
	seg := open(b, here, there.Addresses()...)
	const batch = 16
	buf, _, err := there.Allocate(batch*block, BufferOptions{})
	require.NoError(b, err)
	defer func() { require.NoError(b, buf.Retire(context.Background())) }()
	h := buf.Info().Handle
	local := make([]byte, batch*block)
	rs := make([]Request, batch)
	for i := range rs {
		rs[i] = Request{Op: op, Segment: seg, Buffer: h, Offset: uint64(i * block), Local: local[i*block : (i+1)*block]}
	}
	b.SetBytes(int64(batch * block))
	b.ReportAllocs()
	for b.Loop() {
		if err := carry(b, here, rs...); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkTCP moves batches of 16 blocks over loopback, one batch at a time.
func BenchmarkTCP(b *testing.B) {
	for _, op := range []Op{Read, Write} {
		for _, block := range []int{64 << 10, 1 << 20} {
			b.Run(fmt.Sprintf("%v/%dKiB", op, block>>10), func(b *testing.B) {
				here, there := engine(b, Config{}), engine(b, Config{Listen: []string{anyPort}, Transports: []string{TransportTCP}})
				benchmarkWay(b, here, there, op, block)
			})
		}
	}
}

// BenchmarkShm is the same through shared memory, beside a copy by one goroutine.
func BenchmarkShm(b *testing.B) {
	for _, op := range []Op{Read, Write} {
		b.Run(op.String(), func(b *testing.B) {
			here, there := engine(b, Config{}), engine(b, Config{Listen: []string{anyPort}})
			benchmarkWay(b, here, there, op, 1<<20)
		})
	}
	b.Run("copy", func(b *testing.B) {
		from, to := make([]byte, 16<<20), make([]byte, 16<<20)
		b.SetBytes(16 << 20)
		for b.Loop() {
			copy(to, from)
		}
	})
}

// TestBatchesAreReused releases batches as soon as they are done, from several goroutines: each keeps to its own.
func TestBatchesAreReused(t *testing.T) {
	ways(t, Config{SliceSize: 4 << 10}, func(t *testing.T, here, there *Engine, seg *Segment) {
		t.Helper()
		_, buf := buffer(t, there, 1<<20, BufferOptions{})
		h := buf.Info().Handle
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for i := range 200 {
					requests := func() (list []Request) {
						for range 1 + i%2 {
							r := Request{Op: Read, Segment: seg, Buffer: h, Local: make([]byte, i*100)}
							if i%10 == 9 {
								r.Offset = 1 << 20
							}
							list = append(list, r)
						}
						return list
					}
					left, err := here.Submit(requests(), 0)
					if err != nil {
						t.Error(err)
						return
					}
					left.Release() // if it is not done, nothing happens
					b, err := here.Submit(requests(), 0)
					if err != nil {
						t.Error(err)
						return
					}
					if err := b.Wait(t.Context()); (err != nil) != (i%10 == 9) || b.Len() != 1+i%2 {
						t.Error(i, err)
					}
					<-b.Settled()
					b.Release()
				}
			})
		}
		wg.Wait()
	})
}

// BenchmarkSubmit is what a batch costs for each of its slices: in Submit, and, with allocations, until all are done, of
// which a copy of 4 KiB is a part.
func BenchmarkSubmit(b *testing.B) {
	const count, size = 256, 4 << 10
	here := engine(b, Config{Listen: []string{anyPort}})
	seg := open(b, here, here.Addresses()...)
	h := register(b, here, make([]byte, count*size), BufferOptions{}).Info().Handle
	local := make([]byte, count*size)
	rs := make([]Request, count)
	for i := range rs {
		rs[i] = Request{Op: Read, Segment: seg, Buffer: h, Offset: uint64(i * size), Local: local[i*size : (i+1)*size]}
	}
	var inSubmit time.Duration
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		begun := time.Now()
		batch, err := here.Submit(rs, 0)
		inSubmit += time.Since(begun)
		if err == nil {
			err = batch.Wait(context.Background())
		}
		if err != nil {
			b.Fatal(err)
		}
		batch.Release()
		n += count
	}
	b.ReportMetric(float64(inSubmit.Nanoseconds())/float64(n), "submit-ns/slice")
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n), "ns/slice")
}
