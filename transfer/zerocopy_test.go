package transfer

import (
	"bytes"
	"context"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// spared makes two engines that reach each other over TCP, and the segment of the second.
func spared(t *testing.T, cfg Config) (here, there *Engine, seg *Segment) {
	t.Helper()
	cfg.Transports = []string{TransportTCP}
	here = engine(t, cfg)
	cfg.Listen = []string{anyPort}
	there = engine(t, cfg)
	return here, there, open(t, here, there.Addresses()...)
}

// asked is how many writes of an engine the kernel was asked not to copy and has let go of.
func asked(e *Engine) uint64 {
	c := &e.counters.zeroCopy
	return c.spared.Load() + c.copied.Load()
}

// TestZeroCopyBytesArrive has several goroutines write and read ranges, of lengths around those from which on nothing is copied:
// each finds its own bytes, and all are let go of.
func TestZeroCopyBytesArrive(t *testing.T) {
	for _, sums := range []bool{false, true} {
		here, there, seg := spared(t, Config{ZeroCopy: ZeroCopyOn, Checksums: sums})
		const part, clients = 3 << 20, 4
		_, buf := buffer(t, there, clients*part, BufferOptions{})
		h := buf.Info().Handle
		var wg sync.WaitGroup
		for c := range uint64(clients) {
			wg.Go(func() {
				for _, n := range []int{1, 4096, zeroCopyLeast - 1, zeroCopyLeast, 100_000, part, 700_001, part} {
					out, in := noise(t, n), make([]byte, n)
					pieces := [][]byte{out[n/3 : n/2], out[n/2:]}
					if err := carry(t, here, Request{Op: Write, Segment: seg, Buffer: h, Offset: c * part, Local: out[:n/3], More: pieces}); err != nil {
						t.Error("write", n, err)
					}
					if err := carry(t, here, Request{Op: Read, Segment: seg, Buffer: h, Offset: c * part, Local: in}); err != nil {
						t.Error("read", n, err)
					}
					if !bytes.Equal(out, in) {
						t.Error("other bytes came back", n)
					}
				}
			})
		}
		wg.Wait()
		require.NotZero(t, asked(here), "writes")
		require.NotZero(t, asked(there), "answers")
		require.Zero(t, here.counters.zeroCopy.givenUp.Load()+there.counters.zeroCopy.givenUp.Load())
		require.Eventually(t, func() bool { return users(buf) == 0 }, 5*time.Second, time.Millisecond, "the buffer is held")
	}
}

func users(b *Buffer) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.users)
}

// TestZeroCopyIsGivenUp where it saves nothing: on this host the kernel copies all the same, and says so.
func TestZeroCopyIsGivenUp(t *testing.T) {
	here, there, seg := spared(t, Config{Connections: 1, remote: true})
	mem, buf := buffer(t, there, 4<<20, BufferOptions{})
	h := buf.Info().Handle
	in := make([]byte, len(mem))
	for _, op := range []Op{Read, Write} {
		e := map[Op]*Engine{Read: there, Write: here}[op]
		require.Eventually(t, func() bool {
			require.NoError(t, carry(t, here, Request{Op: op, Segment: seg, Buffer: h, Local: in}))
			return e.counters.zeroCopy.givenUp.Load() == 1
		}, 10*time.Second, time.Millisecond, op)
	}
	before := asked(here) + asked(there)
	for range 10 {
		require.NoError(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: h, Local: in}))
		require.NoError(t, carry(t, here, Request{Op: Write, Segment: seg, Buffer: h, Local: in}))
	}
	require.Less(t, asked(here)+asked(there)-before, uint64(8), "but what was under way")
	told := scrape(t, here, nil)
	require.InDelta(t, 1, told["larder_transfer_zero_copy_given_up_total"], 0)
	require.InDelta(t, asked(here), told["larder_transfer_zero_copy_writes_total"], 0)
	require.True(t, holds(buf, 0, in))
}

// TestZeroCopyIsForOtherHosts: nobody tries it on this one.
func TestZeroCopyIsForOtherHosts(t *testing.T) {
	for _, choice := range []string{"", ZeroCopyOff} {
		here, there, seg := spared(t, Config{ZeroCopy: choice, remote: choice == ZeroCopyOff})
		mem, buf := buffer(t, there, 1<<20, BufferOptions{})
		require.NoError(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: buf.Info().Handle, Local: mem}))
		require.Zero(t, asked(here)+asked(there))
	}
	_, err := New(Config{ZeroCopy: "perhaps"})
	require.ErrorContains(t, err, "perhaps")
}

// TestZeroCopyOverIPv6: the kernel tells there in another way what it has let go of.
func TestZeroCopyOverIPv6(t *testing.T) {
	here := engine(t, Config{ZeroCopy: ZeroCopyOn})
	there, err := New(Config{ZeroCopy: ZeroCopyOn, Listen: []string{"[::1]:0"}, Transports: []string{TransportTCP}})
	if err != nil {
		t.Skip("no IPv6 here: ", err)
	}
	t.Cleanup(func() { require.NoError(t, there.Close()) })
	seg := open(t, here, there.Addresses()...)
	mem, buf := buffer(t, there, 1<<20, BufferOptions{})
	in := make([]byte, len(mem))
	require.NoError(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: buf.Info().Handle, Local: in}))
	require.True(t, holds(buf, 0, in))
	require.NoError(t, carry(t, here, Request{Op: Write, Segment: seg, Buffer: buf.Info().Handle, Local: in}))
	require.Eventually(t, func() bool { return users(buf) == 0 && asked(there) > 0 }, 5*time.Second, time.Millisecond)
}

// reader is a peer that asks for bytes and takes them when it likes.
type reader struct {
	*stream
	seq uint64
}

func newReader(t *testing.T, e *Engine) *reader {
	t.Helper()
	d := net.Dialer{}
	conn, err := d.DialContext(t.Context(), "tcp", e.Addresses()[0])
	require.NoError(t, err)
	s, err := over(conn)
	require.NoError(t, err)
	require.NoError(t, s.conn.SetReadBuffer(4<<10))
	t.Cleanup(s.close)
	hello := `{"engine":"` + strings.Repeat("0", 32) + `","kind":"data","conn":1}`
	require.NoError(t, s.send(&header{kind: frameHello}, []byte(hello)))
	h, _, err := s.receive()
	require.NoError(t, err)
	require.Equal(t, frameWelcome, h.kind)
	return &reader{stream: s}
}

// over is a stream over a connection.
func over(conn net.Conn) (*stream, error) { return newStream(conn.(*net.TCPConn)) }

func (r *reader) ask(t *testing.T, h Handle, off uint64, n uint32) {
	t.Helper()
	r.seq++
	require.NoError(t, r.send(&header{kind: frameRead, seq: r.seq, gen: h.Generation, buffer: h.ID, off: off, length: n}, nil))
}

// TestNothingIsSentAfterRetire: who reads slowly, or not at all, is never sent what lies in a buffer's memory once Retire has
// returned, though the kernel sends from that memory. The answers have been written, and the socket's buffer has them.
func TestNothingIsSentAfterRetire(t *testing.T) {
	const size, count = 64 << 10, 12
	for name, takes := range map[string]int{"not at all": 0, "slowly": 1} {
		t.Run(name, func(t *testing.T) {
			there := engine(t, Config{ZeroCopy: ZeroCopyOn, Listen: []string{anyPort}})
			mem := bytes.Repeat([]byte{1}, count*size)
			buf := register(t, there, mem, BufferOptions{})
			r := newReader(t, there)
			for i := range uint64(count) {
				r.ask(t, buf.Info().Handle, i*size, size)
			}
			require.Eventually(t, func() bool { return there.counters.served[Read].slices.Load() > 2 }, 5*time.Second, time.Millisecond)
			time.Sleep(20 * time.Millisecond)
			require.NotZero(t, users(buf), "nothing is held")
			var got []byte
			part := make([]byte, 1<<10)
			var wg sync.WaitGroup
			var retired atomic.Bool
			read := func() bool {
				n, err := r.conn.Read(part)
				got = append(got, part[:n]...)
				return err == nil
			}
			if takes > 0 {
				wg.Go(func() {
					for !retired.Load() && read() {
						time.Sleep(time.Millisecond)
					}
				})
			}
			begun := time.Now()
			require.NoError(t, buf.Retire(t.Context()))
			require.Less(t, time.Since(begun), 5*time.Second)
			for i := range mem {
				mem[i] = 0xee
			}
			retired.Store(true)
			wg.Wait()
			require.NoError(t, r.conn.SetReadDeadline(time.Now().Add(2*time.Second)))
			for read() {
			}
			require.Less(t, len(got), count*size, "all was read before")
			require.Equal(t, -1, bytes.IndexByte(got, 0xee), "bytes of after the retirement")
		})
	}
}

// TestRetireIsSoonOver while answers to those who take them are under way: they are taken, and the connection says goodbye.
func TestRetireIsSoonOver(t *testing.T) {
	here, there, seg := spared(t, Config{ZeroCopy: ZeroCopyOn})
	for range 20 {
		mem, buf := buffer(t, there, 4<<20, BufferOptions{})
		other, stays := buffer(t, there, 1<<20, BufferOptions{})
		in := make([]byte, len(mem))
		b, err := here.Submit([]Request{
			{Op: Read, Segment: seg, Buffer: buf.Info().Handle, Local: in},
			{Op: Read, Segment: seg, Buffer: stays.Info().Handle, Local: make([]byte, len(other))},
		}, 0)
		require.NoError(t, err)
		time.Sleep(time.Millisecond)
		require.NoError(t, buf.Retire(t.Context()))
		for i := range mem {
			mem[i] = 0xee
		}
		<-b.Done()
		if _, err := b.Status(0); err != nil {
			require.ErrorIs(t, err, ErrStale)
		}
		_, err = b.Status(1)
		require.NoError(t, err, "of a buffer that stays")
		require.NotContains(t, string(in), strings.Repeat("\xee", 64))
	}
}

// TestZeroCopyWritesThatAreCanceled: nothing of what the caller has in its memory after that arrives.
func TestZeroCopyWritesThatAreCanceled(t *testing.T) {
	here := engine(t, Config{ZeroCopy: ZeroCopyOn, Connections: 1})
	there, ps := through(t, 1, Config{})
	seg := open(t, here, there.Addresses()...)
	for i := range 10 {
		mem, buf := buffer(t, there, 16<<20, BufferOptions{})
		out := bytes.Repeat([]byte{1}, len(mem))
		within(buf, func() { clear(mem) })
		b, err := here.Submit([]Request{{Op: Write, Segment: seg, Buffer: buf.Info().Handle, Local: out}}, 0)
		require.NoError(t, err)
		time.Sleep(time.Duration(i) * time.Millisecond)
		ps[0].stop() // the proxy reads no more: what was written waits in this host's sockets
		b.Cancel()
		<-b.Done()
		for i := range out {
			out[i] = 0xee
		}
		ps[0].flow()
		<-b.Settled()
		time.Sleep(10 * time.Millisecond)
		within(buf, func() { require.Equal(t, -1, bytes.IndexByte(mem, 0xee), "bytes of after the end") })
	}
	require.NotZero(t, here.counters.zeroCopy.spared.Load()+here.counters.zeroCopy.copied.Load())
}

// TestAnAnswerThatComesEarly is that of a peer which has not received what it confirms: the slice does not end with it.
func TestAnAnswerThatComesEarly(t *testing.T) {
	l, err := net.Listen("tcp", anyPort)
	require.NoError(t, err)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer func() { require.NoError(t, l.Close()) }()
	id := strings.Repeat("a", 32)
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { lie(conn, id) })
		}
	})
	here := engine(t, Config{ZeroCopy: ZeroCopyOn, Connections: 1, AbortTimeout: 100 * time.Millisecond, Retries: 1})
	seg, err := here.OpenDescriptor(Descriptor{Engine: id, Rails: []string{l.Addr().String()}})
	require.NoError(t, err)
	out := make([]byte, 8<<20)
	b, err := here.Submit([]Request{{Op: Write, Segment: seg, Buffer: Handle{1, 1}, Local: out}}, time.Second)
	require.NoError(t, err)
	require.Error(t, b.Wait(t.Context()))
	require.ErrorContains(t, seg.lanes[0].lastError(), errEarly.Error())
	require.NoError(t, seg.Close())
}

func (l *lane) lastError() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last
}

// lie welcomes a connection, reads the header of the first WRITE and confirms ten.
func lie(conn net.Conn, id string) {
	defer func() { _ = conn.Close() }()
	s, err := over(conn)
	if err != nil {
		return
	}
	_ = s.conn.SetReadBuffer(4 << 10)
	if _, _, err = s.receive(); err != nil {
		return
	}
	_ = s.send(&header{kind: frameWelcome}, []byte(`{"engine":"`+id+`"}`))
	var h header
	if s.readHeader(&h) != nil || h.kind != frameWrite {
		return
	}
	time.Sleep(20 * time.Millisecond)
	_ = s.send(&header{kind: frameAck, seq: 10}, nil)
	time.Sleep(200 * time.Millisecond) // it takes nothing
	_, _ = io.Copy(io.Discard, conn)
}

// TestWritesTheKernelLetsGoOf in any order, and with numbers of 32 bits, are found.
func TestWritesTheKernelLetsGoOf(t *testing.T) {
	e := engine(t, Config{})
	b := register(t, e, make([]byte, 10), BufferOptions{})
	z := &zeroCopy{counts: &zeroCopyCounters{}, sent: 1<<32 - 2, ended: 1<<32 - 2}
	me := &copier{}
	_, _, err := e.hold(Read, b.Info().Handle, 0, 1, me)
	require.NoError(t, err)
	write := func(n int) {
		a := z.answering([]*Buffer{b, b}, me)
		for range n {
			z.count(a, 1, 1)
		}
		z.count(a, 1, 1) // one that was not written
		z.count(a, 1, -1)
		z.answered(a)
	}
	held := func() int { return users(b) - 1 }
	end := func(first, last uint32) {
		z.mu.Lock()
		defer z.mu.Unlock()
		z.end(first, last, false)
	}
	write(0) // all of it was refused: nothing is held
	require.Zero(t, held())
	write(3) // the last two numbers, and 0
	write(2) // 1 and 2
	write(1) // 3
	require.Equal(t, 3, held())
	end(2, 3)
	require.Equal(t, 2, held())
	end(1<<32-1, 1)
	require.Equal(t, 1, held())
	end(1<<32-2, 1<<32-2)
	require.Zero(t, held())
	require.Equal(t, z.sent, z.ended)
	require.True(t, z.finish(0, 0))
	for range zeroCopyAnswers {
		write(1)
	}
	require.Nil(t, z.answering([]*Buffer{b}, me), "no more than so many")
	end(4, 4+zeroCopyAnswers-1)
	b.release(me)
	require.NoError(t, b.Retire(context.Background()))
	require.EqualValues(t, 6+zeroCopyAnswers, z.counts.spared.Load())
}

// TestSkip leaves out what was written.
func TestSkip(t *testing.T) {
	for n, want := range map[int]string{0: "abcdef", 1: "bcdef", 2: "cdef", 5: "f", 6: ""} {
		left := skip([][]byte{[]byte("ab"), nil, []byte("cde"), []byte("f")}, n)
		require.Equal(t, want, string(slices.Concat(left...)), n)
	}
}

// TestAReadWaitsBesideAFullSocket: what the kernel lets go of while there is neither room in the socket nor anything to be read
// does not end a read that waits. The runtime's poller would have it end.
func TestAReadWaitsBesideAFullSocket(t *testing.T) {
	l, err := net.Listen("tcp", anyPort)
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	d := net.Dialer{}
	here, err := d.DialContext(t.Context(), "tcp", l.Addr().String())
	require.NoError(t, err)
	there, err := l.Accept()
	require.NoError(t, err)
	defer func() { require.NoError(t, there.Close()) }()
	s, err := over(here)
	require.NoError(t, err)
	defer s.close()
	e := engine(t, Config{ZeroCopy: ZeroCopyOn})
	e.spareCopies(s)
	z := s.zero.Load()
	var wg sync.WaitGroup
	defer wg.Wait()
	var h header
	wg.Go(func() {
		if err := s.readHeader(&h); err != nil {
			t.Error("a read", err)
		}
	})
	wg.Go(func() {
		mem := make([]byte, 64<<10)
		for range 256 {
			if err := z.write(s.raw, [][]byte{mem}, nil); err != nil {
				t.Error("a write", err)
			}
		}
	})
	part := make([]byte, 64<<10)
	for range 256 {
		time.Sleep(time.Millisecond / 4)
		_, err := io.ReadFull(there, part)
		require.NoError(t, err)
	}
	b := make([]byte, headerSize)
	(&header{kind: framePing}).encode(b)
	_, err = there.Write(b)
	require.NoError(t, err)
	wg.Wait()
	require.Equal(t, framePing, h.kind)
	require.True(t, z.finish(time.Second, 0))
	require.Equal(t, asked(e), z.sent)
}
