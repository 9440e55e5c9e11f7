//go:build rdma && cgo && linux

package verbs

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/transfer"
)

// openNICs opens the machine's NICs for an engine of the test, which closes before them.
func openNICs(tb testing.TB) []transfer.NIC {
	tb.Helper()
	nics, stop, err := OpenNICs(nil)
	require.NoError(tb, err)
	if len(nics) == 0 {
		tb.Skip("no RDMA device here: run the test by go test -exec integration/emul/uml-exec.sh")
	}
	tb.Cleanup(func() { require.NoError(tb, stop()) })
	return nics
}

// nicEngine is an engine with its NIC.
type nicEngine struct {
	*transfer.Engine
	nic *NIC
}

// newEngine makes an engine that reaches and is reached over RDMA alone.
func newEngine(tb testing.TB, cfg transfer.Config) nicEngine {
	tb.Helper()
	cfg.NICs, cfg.Listen, cfg.Transports = openNICs(tb), []string{"127.0.0.1:0"}, []string{transfer.TransportRDMA}
	e, err := transfer.New(cfg)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, e.Close()) })
	return nicEngine{e, cfg.NICs[0].(*NIC)}
}

func carry(ctx context.Context, e *transfer.Engine, rs ...transfer.Request) error {
	b, err := e.Submit(rs, timeout)
	if err != nil {
		return err
	}
	return b.Wait(ctx)
}

// noise makes bytes that differ by seed and by place, eight at a time.
func noise(p []byte, seed uint64) {
	x := seed*0x9e3779b97f4a7c15 + 1
	for len(p) >= 8 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		binary.LittleEndian.PutUint64(p, x)
		p = p[8:]
	}
	for i := range p {
		p[i] = byte(seed) + byte(i)
	}
}

func TestNICNames(t *testing.T) {
	for _, bad := range []string{"no-such-device", "rxe0/0", "rxe0/x", "rxe0/99"} {
		_, _, err := OpenNICs([]string{bad})
		require.Error(t, err, bad)
	}
	nics, stop, err := OpenNICs([]string{"none"})
	require.NoError(t, err)
	require.Empty(t, nics)
	require.NoError(t, stop())
}

// TestEngineBytes moves ranges of many lengths between two engines, from memory that is registered and from other memory.
func TestEngineBytes(t *testing.T) {
	here, there := newEngine(t, transfer.Config{SliceSize: 16 << 10}), newEngine(t, transfer.Config{})
	buf, mem, err := there.Allocate(1<<20, transfer.BufferOptions{})
	require.NoError(t, err)
	seg, err := here.Open(t.Context(), there.Addresses()...)
	require.NoError(t, err)
	_, own, err := here.Allocate(1<<20, transfer.BufferOptions{})
	require.NoError(t, err)
	for i, local := range [][]byte{own, make([]byte, 1<<20)} {
		for _, n := range []int{1, 47, 4096, 16 << 10, 16<<10 + 1, 300_000, 1 << 20} {
			off := uint64(len(mem)-n) / 2
			noise(local[:n], uint64(n+i))
			want := bytes.Clone(local[:n])
			r := transfer.Request{Op: transfer.Write, Segment: seg, Buffer: buf.Info().Handle, Offset: off, Local: local[:n]}
			require.NoError(t, carry(t.Context(), here.Engine, r), "%d bytes", n)
			require.True(t, bytes.Equal(want, mem[off:off+uint64(n)]), "%d bytes", n)
			clear(local)
			r.Op = transfer.Read
			r.Local, r.More = local[:n/2], [][]byte{local[n/2 : n]}
			require.NoError(t, carry(t.Context(), here.Engine, r), "%d bytes", n)
			require.True(t, bytes.Equal(want, local[:n]), "%d bytes", n)
		}
	}
	require.NoError(t, buf.Retire(t.Context()))
	r := transfer.Request{Op: transfer.Write, Segment: seg, Buffer: buf.Info().Handle, Local: own}
	require.ErrorIs(t, carry(t.Context(), here.Engine, r), transfer.ErrStale)
	require.Equal(t, "active", here.EndpointStats()[0].State)
}

// TestEngineNothingLandsAfterRetire writes without end to a buffer that is retired.
func TestEngineNothingLandsAfterRetire(t *testing.T) {
	here, there := newEngine(t, transfer.Config{SliceSize: 1 << 20}), newEngine(t, transfer.Config{})
	_, own, err := here.Allocate(8<<20, transfer.BufferOptions{})
	require.NoError(t, err)
	for i := range own {
		own[i] = 1
	}
	seg, err := here.Open(t.Context(), there.Addresses()...)
	require.NoError(t, err)
	mem := mapped(t, len(own))
	cut := 0
	for range 20 {
		buf, err := there.Register(mem, transfer.BufferOptions{})
		require.NoError(t, err)
		b, err := here.Submit([]transfer.Request{{Op: transfer.Write, Segment: seg, Buffer: buf.Info().Handle, Local: own}}, 0)
		require.NoError(t, err)
		time.Sleep(time.Duration(rand.IntN(5000)) * time.Microsecond)
		require.NoError(t, buf.Retire(t.Context()))
		clear(mem)
		if err := b.Wait(t.Context()); err != nil {
			cut++
			require.ErrorIs(t, err, transfer.ErrStale)
		}
		time.Sleep(5 * time.Millisecond)
		require.Equal(t, -1, bytes.IndexByte(mem, 1), "a byte landed")
	}
	t.Logf("%d of 20 were cut short", cut)
}

// TestEngineResets has the NIC reset, as after a device's failure: it is opened anew, knows all memory, and carries again.
func TestEngineResets(t *testing.T) {
	here, there := newEngine(t, transfer.Config{}), newEngine(t, transfer.Config{})
	buf, mem, err := there.Allocate(1<<20, transfer.BufferOptions{})
	require.NoError(t, err)
	seg, err := here.Open(t.Context(), there.Addresses()...)
	require.NoError(t, err)
	_, own, err := here.Allocate(1<<20, transfer.BufferOptions{})
	require.NoError(t, err)
	for i, e := range []nicEngine{here, there} {
		noise(own, uint64(i))
		r := transfer.Request{Op: transfer.Write, Segment: seg, Buffer: buf.Info().Handle, Local: own}
		require.NoError(t, carry(t.Context(), here.Engine, r))
		e.nic.tell(transfer.EventFatal)
		require.Eventually(t, func() bool { return e.EndpointStats()[0].Resets == 1 }, timeout, time.Millisecond)
		noise(own, uint64(i+10))
		require.Eventually(t, func() bool { return carry(t.Context(), here.Engine, r) == nil }, timeout, time.Millisecond)
		require.True(t, bytes.Equal(own, mem))
	}
}

// TestEngineSeesItsPort go down and come up.
func TestEngineSeesItsPort(t *testing.T) {
	here, there := newEngine(t, transfer.Config{}), newEngine(t, transfer.Config{})
	buf, _, err := there.Allocate(1<<20, transfer.BufferOptions{})
	require.NoError(t, err)
	seg, err := here.Open(t.Context(), there.Addresses()...)
	require.NoError(t, err)
	r := transfer.Request{Op: transfer.Read, Segment: seg, Buffer: buf.Info().Handle, Local: make([]byte, 1<<20)}
	require.NoError(t, carry(t.Context(), here.Engine, r))
	x := here.nic.o.x
	link(t, x, "down")
	defer link(t, x, "up")
	down := func() bool { return here.EndpointStats()[0].State == "down" && here.EndpointStats()[0].QPs == 0 }
	require.Eventually(t, down, timeout, time.Millisecond)
	link(t, x, "up")
	require.Eventually(t, func() bool { return carry(t.Context(), here.Engine, r) == nil }, timeout, 10*time.Millisecond)
}

// engineChild has the test binary be an engine of another process.
const engineChild = "engine"

// engineMessage is what the processes say to each other, a line of JSON each.
type engineMessage struct {
	At     string `json:"at,omitempty"`     // where the engine listens
	Hub    string `json:"hub,omitempty"`    // whom it should write to
	Buffer string `json:"buffer,omitempty"` // of the hub
	Rounds int    `json:"rounds,omitempty"` // that it has carried
	Error  string `json:"error,omitempty"`
}

const (
	poolSize  = 1 << 20
	hubPlaces = 4
	children  = 8
)

// serveEngine is the child's main: it has a buffer, and writes to one of the hub's and reads that back, until its input ends.
func serveEngine(in io.Reader, out io.Writer) error {
	nics, stop, err := OpenNICs(nil)
	if err != nil || len(nics) == 0 {
		return fmt.Errorf("no NIC: %w", err)
	}
	cfg := transfer.Config{
		NICs: nics, Listen: []string{"127.0.0.1:0"}, Transports: []string{transfer.TransportRDMA}, Retries: 100, BounceBytes: poolSize,
	}
	e, err := transfer.New(cfg)
	if err != nil {
		return err
	}
	if _, _, err := e.Allocate(poolSize, transfer.BufferOptions{Name: "pool"}); err != nil {
		return err
	}
	encoder, decoder := json.NewEncoder(out), json.NewDecoder(in)
	if err := encoder.Encode(engineMessage{At: e.Addresses()[0]}); err != nil {
		return err
	}
	var m engineMessage
	if err := decoder.Decode(&m); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	var rounds atomic.Int64
	go func() { ended <- load(ctx, e, m.Hub, m.Buffer, uint64(os.Getpid()), &rounds) }()
	_ = decoder.Decode(&m) // until the end
	cancel()
	answer := engineMessage{}
	if err := <-ended; err != nil {
		answer.Error = err.Error()
	}
	answer.Rounds = int(rounds.Load())
	return errors.Join(encoder.Encode(answer), e.Close(), stop())
}

// load writes to a buffer and reads it back, until ctx ends. Each byte is looked at.
func load(ctx context.Context, e *transfer.Engine, at, buffer string, seed uint64, rounds *atomic.Int64) error {
	seg, err := e.Open(context.WithoutCancel(ctx), at)
	if err != nil {
		return err
	}
	defer func() { _ = seg.Close() }()
	info, ok := seg.Buffer(buffer)
	if !ok {
		return fmt.Errorf("no buffer %q", buffer)
	}
	out, in := make([]byte, poolSize), make([]byte, poolSize)
	for round := uint64(0); ctx.Err() == nil; round++ {
		n := 1 + rand.IntN(poolSize)
		off := rand.IntN(poolSize - n + 1)
		noise(out[:n], seed<<32+round)
		r := transfer.Request{Op: transfer.Write, Segment: seg, Buffer: info.Handle, Offset: uint64(off), Local: out[:n]}
		if err := carry(context.WithoutCancel(ctx), e, r); err != nil {
			return fmt.Errorf("round %d: write: %w", round, err)
		}
		r.Op, r.Local = transfer.Read, in[:n]
		if err := carry(context.WithoutCancel(ctx), e, r); err != nil {
			return fmt.Errorf("round %d: read: %w", round, err)
		}
		if !bytes.Equal(in[:n], out[:n]) {
			return fmt.Errorf("round %d: other bytes came back", round)
		}
		rounds.Add(1)
	}
	return nil
}

// engineProcess is a child.
type engineProcess struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *json.Decoder
	at  string
}

func startEngine(tb testing.TB) *engineProcess {
	tb.Helper()
	p := &engineProcess{cmd: exec.Command(os.Args[0])}
	p.cmd.Env = append(os.Environ(), childVariable+"="+engineChild)
	p.cmd.Stderr = os.Stderr
	var err error
	p.in, err = p.cmd.StdinPipe()
	require.NoError(tb, err)
	out, err := p.cmd.StdoutPipe()
	require.NoError(tb, err)
	require.NoError(tb, p.cmd.Start())
	p.out = json.NewDecoder(bufio.NewReader(out))
	var m engineMessage
	require.NoError(tb, p.out.Decode(&m))
	p.at = m.At
	return p
}

func (p *engineProcess) tell(tb testing.TB, m engineMessage) {
	tb.Helper()
	require.NoError(tb, json.NewEncoder(p.in).Encode(m))
}

// kill ends a child without a word, as a crash does.
func (p *engineProcess) kill(tb testing.TB) {
	tb.Helper()
	require.NoError(tb, p.cmd.Process.Kill())
	require.Error(tb, p.cmd.Wait())
}

// finish ends a child, and says how many rounds it has carried.
func (p *engineProcess) finish(tb testing.TB) int {
	tb.Helper()
	require.NoError(tb, p.in.Close())
	var m engineMessage
	require.NoError(tb, p.out.Decode(&m))
	require.Empty(tb, m.Error)
	require.NoError(tb, p.cmd.Wait())
	return m.Rounds
}

// loadTime is for how long processes work on each other: LARDER_RDMA_TIME, 10 s if it is not set.
func loadTime(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("LARDER_RDMA_TIME")
	if text == "" {
		return 10 * time.Second
	}
	d, err := time.ParseDuration(text)
	require.NoError(t, err)
	return d
}

// TestProcessesThatEvictEachOther: eight processes, and two that are killed, and a hub write to each other and read back, all at once, while the hub
// has places for four in each direction, so that endpoints under load make room all the time; two of the processes are
// killed meanwhile. Each byte that comes back is the one that was sent, nobody is refused, and in the end only the hub's
// bound of queue pairs is there, and then none.
func TestProcessesThatEvictEachOther(t *testing.T) {
	before := resources(t)
	t.Run("load", func(t *testing.T) {
		hub := newEngine(t, transfer.Config{Endpoints: transfer.EndpointConfig{MaxEndpoints: hubPlaces}, Retries: 100, BounceBytes: 4 * poolSize})
		all := make([]*engineProcess, children+2)
		for i := range all {
			_, _, err := hub.Allocate(poolSize, transfer.BufferOptions{Name: fmt.Sprint(i)})
			require.NoError(t, err)
			all[i] = startEngine(t)
		}
		for i, p := range all {
			p.tell(t, engineMessage{Hub: hub.Addresses()[0], Buffer: fmt.Sprint(i)})
		}
		ctx, cancel := context.WithTimeout(t.Context(), loadTime(t))
		defer cancel()
		var wg sync.WaitGroup
		var rounds atomic.Int64
		for i, p := range all {
			wg.Go(func() {
				err := load(ctx, hub.Engine, p.at, "pool", uint64(i), &rounds)
				if i < children && err != nil {
					t.Error("process", i, err)
				}
			})
		}
		time.Sleep(loadTime(t) / 3)
		all[children].kill(t)
		time.Sleep(loadTime(t) / 3)
		all[children+1].kill(t)
		wg.Wait()
		theirs := 0
		for _, p := range all[:children] {
			n := p.finish(t)
			require.Positive(t, n, "nobody waits for ever")
			theirs += n
		}
		s := hub.EndpointStats()[0]
		t.Logf("%d rounds from the hub, %d to it; %+v", rounds.Load(), theirs, s)
		require.Positive(t, rounds.Load())
		require.Positive(t, s.Evictions+s.Yields)
		require.Positive(t, s.Recalls)
		require.LessOrEqual(t, s.QPs, s.QPBudget)
		require.Zero(t, s.Fences)
		settled := func() bool { s := hub.EndpointStats()[0]; return s.QPs == s.QPsPerEP*(s.Endpoints+s.Served) }
		require.Eventually(t, settled, timeout, 10*time.Millisecond)
	})
	require.Eventually(t, func() bool { return fmt.Sprint(before) == fmt.Sprint(resources(t)) }, timeout, 10*time.Millisecond)
}

// BenchmarkEngine moves batches of 16 blocks between two engines, from registered memory.
func BenchmarkEngine(b *testing.B) {
	for _, op := range []transfer.Op{transfer.Read, transfer.Write} {
		for _, block := range []int{4 << 10, 64 << 10, 1 << 20} {
			b.Run(fmt.Sprintf("%v/%dKiB", op, block>>10), func(b *testing.B) {
				here, there := newEngine(b, transfer.Config{}), newEngine(b, transfer.Config{})
				const batch = 16
				buf, _, err := there.Allocate(batch*block, transfer.BufferOptions{})
				require.NoError(b, err)
				_, own, err := here.Allocate(batch*block, transfer.BufferOptions{})
				require.NoError(b, err)
				seg, err := here.Open(b.Context(), there.Addresses()...)
				require.NoError(b, err)
				rs := make([]transfer.Request, batch)
				for i := range rs {
					rs[i] = transfer.Request{
						Op: op, Segment: seg, Buffer: buf.Info().Handle, Offset: uint64(i * block), Local: own[i*block : (i+1)*block],
					}
				}
				b.SetBytes(int64(batch * block))
				b.ReportAllocs()
				for b.Loop() {
					if err := carry(b.Context(), here.Engine, rs...); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
