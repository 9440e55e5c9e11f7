package transfer

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// disk is storage in memory, which a test makes misbehave.
type disk struct {
	mu    sync.Mutex
	bytes []byte
	err   error         // of all calls
	hold  chan struct{} // calls wait until it is closed, whatever ctx says; nil = they do not
	calls chan struct{} // is sent to by each call that begins, if it is not nil
}

func (d *disk) begin() error {
	d.mu.Lock()
	err, hold, calls := d.err, d.hold, d.calls
	d.mu.Unlock()
	if calls != nil {
		calls <- struct{}{}
	}
	if hold != nil {
		<-hold
	}
	return err
}

func (d *disk) ReadAt(_ context.Context, p []byte, off uint64) error {
	if err := d.begin(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	copy(p, d.bytes[off:])
	return nil
}

func (d *disk) WriteAt(_ context.Context, p []byte, off uint64) error {
	if err := d.begin(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	copy(d.bytes[off:], p)
	return nil
}

// set changes how a disk behaves from now on.
func (d *disk) set(err error, hold chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err, d.hold = err, hold
}

// content is what the disk holds at off.
func (d *disk) content(off, n int) []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	return bytes.Clone(d.bytes[off : off+n])
}

func newDisk(tb testing.TB, n int) *disk {
	tb.Helper()
	return &disk{bytes: noise(tb, n)}
}

// onStorage registers a storage.
func onStorage(tb testing.TB, e *Engine, st Storage, n uint64, o BufferOptions) *Buffer {
	tb.Helper()
	b, err := e.RegisterStorage(st, n, o)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, b.Retire(context.Background())) })
	return b
}

// storageWays are the ways to storage: within the process, and over TCP, also if the processes share a host.
func storageWays(t *testing.T, cfg Config, run func(t *testing.T, here, there *Engine, seg *Segment)) {
	t.Helper()
	t.Run("tcp", func(t *testing.T) {
		cfg := cfg
		cfg.Listen = []string{anyPort, anyPort}
		here, there := engine(t, cfg), engine(t, cfg)
		run(t, here, there, open(t, here, there.Addresses()...))
	})
	t.Run("local", func(t *testing.T) {
		cfg.Listen = []string{anyPort}
		here := engine(t, cfg)
		run(t, here, here, open(t, here, here.Addresses()...))
	})
}

// TestStorageHoldsWhatIsWritten writes ranges of many lengths to a file, at the beginnings of blocks and elsewhere, and reads
// them back.
func TestStorageHoldsWhatIsWritten(t *testing.T) {
	for _, sums := range []bool{false, true} {
		storageWays(t, Config{Checksums: sums, SliceSize: 16 << 10}, func(t *testing.T, here, there *Engine, seg *Segment) {
			t.Helper()
			const size = 1 << 43
			f, err := OpenFile(filepath.Join(t.TempDir(), "file"), size)
			if err != nil {
				t.Skip("no file of 8 TiB here: ", err)
			}
			t.Cleanup(func() { require.NoError(t, f.Close()) })
			h := onStorage(t, there, f, size, BufferOptions{Name: "disk"}).Info().Handle
			require.NoError(t, seg.Refresh(t.Context()))
			info, ok := seg.Buffer("disk")
			require.True(t, ok && info.Storage && info.Bytes == size)
			for _, n := range []int{0, 1, 4095, 4096, 16<<10 + 1, 300_000, 1 << 20} {
				for _, off := range []uint64{0, 4096, 5001, size / 2, size - uint64(n)} {
					out, in := noise(t, n), make([]byte, n)
					require.NoError(t, carry(t, here, Request{Op: Write, Segment: seg, Buffer: h, Offset: off, Local: out}))
					require.NoError(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: h, Offset: off, Local: in}))
					require.True(t, bytes.Equal(out, in), "%d bytes at %d", n, off)
				}
			}
			in := bytes.Repeat([]byte{1}, 10_000)
			require.NoError(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: h, Offset: size / 3, Local: in}))
			require.Equal(t, make([]byte, 10_000), in, "what nobody has written")
		})
	}
}

// TestStorageRefuses tells what each request that cannot be carried out is answered, and that its neighbours are.
func TestStorageRefuses(t *testing.T) {
	storageWays(t, Config{}, func(t *testing.T, here, there *Engine, seg *Segment) {
		t.Helper()
		good, bad, empty := newDisk(t, 10_000), newDisk(t, 10_000), newDisk(t, 10_000)
		bad.err = errors.New("the disk is on fire")
		empty.err = errors.Join(errors.New("no such extent"), ErrMissing)
		h := onStorage(t, there, good, 10_000, BufferOptions{}).Info().Handle
		fixed := onStorage(t, there, good, 10_000, BufferOptions{ReadOnly: true}).Info().Handle
		broken := onStorage(t, there, bad, 10_000, BufferOptions{}).Info().Handle
		missing := onStorage(t, there, empty, 10_000, BufferOptions{}).Info().Handle
		before := good.content(0, 10_000)
		for name, c := range map[string]struct {
			r    Request
			want error
			text string
		}{
			"another generation":    {Request{Op: Write, Buffer: Handle{h.ID, h.Generation + 2}, Local: make([]byte, 8)}, ErrStale, ""},
			"no such buffer":        {Request{Op: Read, Buffer: Handle{99 | storageBit, h.Generation}, Local: make([]byte, 8)}, ErrStale, ""},
			"behind the end":        {Request{Op: Write, Buffer: h, Offset: 9993, Local: make([]byte, 8)}, ErrRange, ""},
			"a write where one may": {Request{Op: Write, Buffer: fixed, Local: make([]byte, 900)}, ErrReadOnly, ""},
			"a read that fails":     {Request{Op: Read, Buffer: broken, Local: make([]byte, 900)}, ErrStorage, "on fire"},
			"a write that fails":    {Request{Op: Write, Buffer: broken, Local: make([]byte, 900)}, ErrStorage, "on fire"},
			"what is not there":     {Request{Op: Read, Buffer: missing, Local: make([]byte, 900)}, ErrMissing, "no such extent"},
		} {
			c.r.Segment = seg
			in := make([]byte, 1000)
			b, err := here.Submit([]Request{c.r, {Op: Read, Segment: seg, Buffer: h, Local: in}}, 0)
			require.NoError(t, err)
			err = b.Wait(t.Context())
			require.ErrorIs(t, err, c.want, name)
			require.ErrorContains(t, err, c.text, name)
			state, err := b.Status(1)
			require.NoError(t, err, "its neighbour in %s", name)
			require.Equal(t, Done, state)
			require.Equal(t, before[:1000], in)
		}
		require.Equal(t, before, good.content(0, 10_000))
		for _, p := range seg.Paths() {
			require.Zero(t, p.Errors, "a disk's errors are none of a rail's")
		}
	})
	e := engine(t, Config{})
	_, err := e.RegisterStorage(nil, 10, BufferOptions{})
	require.Error(t, err)
	_, err = e.RegisterStorage(newDisk(t, 10), 0, BufferOptions{})
	require.ErrorContains(t, err, "from 1")
	_, err = e.RegisterStorage(newDisk(t, 10), 1<<63, BufferOptions{})
	require.ErrorContains(t, err, "from 1")
}

// TestStorageIsReadInParallel has a disk answer nobody before several ask.
func TestStorageIsReadInParallel(t *testing.T) {
	storageWays(t, Config{SliceSize: 4 << 10, Connections: 1}, func(t *testing.T, here, there *Engine, seg *Segment) {
		t.Helper()
		d := newDisk(t, 1<<20)
		d.hold, d.calls = make(chan struct{}), make(chan struct{}, 1000)
		h := onStorage(t, there, d, 1<<20, BufferOptions{}).Info().Handle
		in := make([]byte, 1<<20)
		b, err := here.Submit([]Request{{Op: Read, Segment: seg, Buffer: h, Local: in}}, 0)
		require.NoError(t, err)
		for range storageRequests {
			<-d.calls
		}
		select {
		case <-b.Done():
			t.Fatal("done before the disk")
		default:
		}
		close(d.hold)
		require.NoError(t, b.Wait(t.Context()))
		require.True(t, bytes.Equal(d.content(0, 1<<20), in))
	})
}

// TestAStorageThatHangs costs those that asked it their time, and nobody else anything; what it writes late is known to be
// unsettled. Retire waits for it.
func TestAStorageThatHangs(t *testing.T) {
	cfg := Config{StallTimeout: 300 * time.Millisecond, AbortTimeout: 100 * time.Millisecond}
	storageWays(t, cfg, func(t *testing.T, here, there *Engine, seg *Segment) {
		t.Helper()
		d := newDisk(t, 1<<20)
		buf := onStorage(t, there, d, 1<<20, BufferOptions{})
		_, memory := buffer(t, there, 1<<20, BufferOptions{})
		h := buf.Info().Handle
		hold := make(chan struct{})
		d.set(nil, hold)
		ones := bytes.Repeat([]byte{1}, 1<<20)
		write, err := here.Submit([]Request{{Op: Write, Segment: seg, Buffer: h, Local: ones}}, 200*time.Millisecond)
		require.NoError(t, err)
		in := make([]byte, 1<<20)
		read, err := here.Submit([]Request{{Op: Read, Segment: seg, Buffer: h, Local: in}}, 200*time.Millisecond)
		require.NoError(t, err)
		for range 10 {
			r := Request{Op: Read, Segment: seg, Buffer: memory.Info().Handle, Local: make([]byte, 1<<20)}
			require.NoError(t, carry(t, here, r), "memory beside it")
		}
		require.ErrorIs(t, read.Wait(t.Context()), ErrTimeout)
		<-read.Settled()
		require.ErrorIs(t, write.Wait(t.Context()), ErrUnsettled)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, buf.Retire(ctx), context.DeadlineExceeded, "it may still write")
		select {
		case <-write.Settled():
			t.Fatal("settled while the disk hangs")
		default:
		}
		d.set(nil, nil)
		close(hold)
		<-write.Settled()
		require.NoError(t, buf.Retire(t.Context()))
		within(buf, func() {}) // the disk has let go
		d.mu.Lock()
		clear(d.bytes)
		d.mu.Unlock()
		err = carry(t, here, Request{Op: Write, Segment: seg, Buffer: h, Local: ones})
		require.ErrorIs(t, err, ErrStale)
		require.Equal(t, make([]byte, 1<<20), d.content(0, 1<<20))
		require.Equal(t, make([]byte, 1<<20), in, "a read that ended has landed")
	})
}

// TestNothingIsWrittenAfterRetire writes without end to storage that is retired.
func TestNothingIsWrittenAfterRetire(t *testing.T) {
	storageWays(t, Config{}, func(t *testing.T, here, there *Engine, seg *Segment) {
		t.Helper()
		for range 20 {
			d := &disk{bytes: make([]byte, 8<<20)}
			buf := onStorage(t, there, d, 8<<20, BufferOptions{})
			r := Request{Op: Write, Segment: seg, Buffer: buf.Info().Handle, Local: bytes.Repeat([]byte{1}, 8<<20)}
			b, err := here.Submit([]Request{r}, 0)
			require.NoError(t, err)
			time.Sleep(time.Millisecond)
			require.NoError(t, buf.Retire(t.Context()))
			clear(d.bytes) // without its lock: nobody is there
			if err := b.Wait(t.Context()); err != nil {
				require.ErrorIs(t, err, ErrStale)
			}
			require.Equal(t, -1, bytes.IndexByte(d.bytes, 1), "a byte was written")
		}
	})
}

// TestMemoryAndStorageOnOneConnection mixes both in one connection, as no engine of this release does: all are answered, in
// order.
func TestMemoryAndStorageOnOneConnection(t *testing.T) {
	there := engine(t, Config{Listen: []string{anyPort}})
	d := newDisk(t, 100)
	disk := onStorage(t, there, d, 100, BufferOptions{}).Info().Handle
	mem, buf := buffer(t, there, 100, BufferOptions{})
	h := buf.Info().Handle
	s, _, err := engine(t, Config{}).dial(t.Context(), "", there.Addresses()[0], kindData, 1)
	require.NoError(t, err)
	defer func() { require.NoError(t, s.conn.Close()) }()
	var all []byte
	add := func(h header, body string) {
		h.body, h.seq = uint32(len(body)), h.seq+1
		b := make([]byte, headerSize)
		h.encode(b)
		all = append(append(all, b...), body...)
	}
	for i := range uint64(3) {
		add(header{kind: frameWrite, seq: 6 * i, gen: h.Generation, buffer: h.ID, off: i}, "m")
		add(header{kind: frameRead, seq: 6*i + 1, gen: h.Generation, buffer: h.ID, length: 10}, "")
		add(header{kind: frameWrite, seq: 6*i + 2, gen: disk.Generation, buffer: disk.ID, off: i}, "d")
		add(header{kind: frameRead, seq: 6*i + 3, gen: disk.Generation, buffer: disk.ID, length: 10}, "")
		add(header{kind: frameRead, seq: 6*i + 4, gen: disk.Generation, buffer: disk.ID, off: 95, length: 10}, "")
		add(header{kind: frameRead, seq: 6*i + 5, gen: disk.Generation, buffer: disk.ID}, "")
	}
	_, err = s.conn.Write(all)
	require.NoError(t, err)
	for seq := uint64(1); seq <= 18; {
		a, body, err := s.receive()
		require.NoError(t, err)
		require.Equal(t, seq, a.seq)
		switch seq % 6 {
		case 1, 3:
			require.Equal(t, frameAck, a.kind)
		case 5:
			require.Equal(t, frameFail, a.kind)
			require.Equal(t, statusOf(ErrRange), a.status)
		case 2, 4:
			require.Equal(t, frameData, a.kind)
			require.Len(t, body, 10)
		case 0:
			require.Equal(t, frameData, a.kind)
			require.Empty(t, body)
		}
		seq++
	}
	within(buf, func() { require.Equal(t, "mmm", string(mem[:3])) })
	require.Equal(t, "ddd", string(d.content(0, 3)))
}

// TestStagingIsBounded has many take buffers of all sizes: no more are out than the bound, and all are given back.
func TestStagingIsBounded(t *testing.T) {
	g := newStaging(1 << 20)
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for k := range 200 {
				n := 1 + (i*7919+k*104729)%(1<<20)
				b, err := g.get(n, nil)
				if err != nil || len(b) != n {
					t.Error(len(b), n, err)
					return
				}
				b[0], b[n-1] = 1, 1
				if out := g.used(); out > 1<<20 {
					t.Error(out)
				}
				g.put(b)
			}
		})
	}
	wg.Wait()
	require.Zero(t, g.used())
	whole, err := g.get(1<<20, nil)
	require.NoError(t, err)
	stop := make(chan struct{})
	close(stop)
	_, err = g.get(1, stop)
	require.ErrorIs(t, err, ErrTimeout)
	g.put(whole)
	g.close()
	require.Zero(t, g.idle)
}

// TestFiles tells what may be opened as storage.
func TestFiles(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a")
	f, err := OpenFile(path, 10_000)
	require.NoError(t, err)
	require.NoError(t, f.WriteAt(t.Context(), []byte("hello"), 9_995))
	require.NoError(t, f.Sync())
	require.ErrorIs(t, f.ReadAt(t.Context(), make([]byte, 6), 9_995), ErrRange)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, f.ReadAt(ended, make([]byte, 5), 0), context.Canceled)
	require.NoError(t, os.Truncate(path, 100))
	require.ErrorIs(t, f.ReadAt(t.Context(), make([]byte, 5), 9_995), ErrMissing)
	require.NoError(t, f.Close())
	for name, open := range map[string]func() (*File, error){
		"no bytes":     func() (*File, error) { return OpenFile(path, 0) },
		"too many":     func() (*File, error) { return OpenFile(path, 1<<63) },
		"a directory":  func() (*File, error) { return OpenFile(dir, 10) },
		"no directory": func() (*File, error) { return OpenFile(filepath.Join(dir, "b", "c"), 10) },
	} {
		_, err := open()
		require.Error(t, err, name)
	}
}
