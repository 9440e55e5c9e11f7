package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"larder/transfer"
)

// Transfer says what to measure between this process and another one's segment.
type Transfer struct {
	To         []string // addresses of the other engine
	Buffer     string   // the name of the buffer there
	Token      string
	Transports []string // each by itself; none means all that lead there
	Ops        []transfer.Op
	Blocks     []int // bytes of a request
	Batch      int   // requests of a batch
	Threads    int   // that submit one batch after the other
	SliceSize  int
	Conns      int // connections of a rail
	Checksums  bool
	From       []string           // addresses here from which rails leave
	Topology   *transfer.Topology // nil for this host's as the kernel tells it
	NICs       []transfer.NIC
	Time       time.Duration // for each figure
	Rounds     int           // of which the medians count: each measures a figure and its yardstick, one after the other
	DeadRail   bool          // measure what a rail that does not work costs
	Progress   func(what string)

	copier *copier
}

// TransferRow is one figure. Times are those of whole batches.
type TransferRow struct {
	Transport string        `json:"transport"`
	Op        string        `json:"op"`
	Block     int           `json:"block_bytes"`
	Batch     int           `json:"batch"`
	Threads   int           `json:"threads"`
	Rate      float64       `json:"bytes_per_second"`
	Yardstick float64       `json:"yardstick_bytes_per_second,omitempty"` // what this machine does at most: see yardstick
	Share     float64       `json:"share,omitempty"`                      // of the yardstick, the median of the rounds
	P50       time.Duration `json:"p50_ns"`
	P99       time.Duration `json:"p99_ns"`
	P999      time.Duration `json:"p999_ns"`
	CPU       float64       `json:"cpu_seconds_per_gb"` // of this process
	Submit    time.Duration `json:"submit_ns_per_slice"`
	Allocs    float64       `json:"allocations_per_slice"` // until the slice is done
}

// TransferReport is what RunTransfer has measured.
type TransferReport struct {
	CopyOne  float64       `json:"copy_bytes_per_second"`     // one thread's copy of memory here
	Loopback float64       `json:"loopback_bytes_per_second"` // one plain TCP stream to this host itself
	Rows     []TransferRow `json:"rows"`
	DeadRail []DeadRailRow `json:"dead_rail,omitempty"`
}

// RunTransfer measures each transport, operation and block size, beside what this machine can do at most.
func RunTransfer(ctx context.Context, cfg *Transfer) (*TransferReport, error) {
	r := &TransferReport{}
	cfg.Progress("a copy of memory, and a plain TCP stream")
	r.CopyOne = newCopier().rate(1, cfg.Time)
	var err error
	if r.Loopback, err = streamRate(ctx, 1, streamPiece, cfg.Time); err != nil {
		return nil, err
	}
	transports, found := cfg.Transports, false
	if len(transports) == 0 {
		transports = transfer.Transports
	}
	for _, name := range transports {
		rows, err := cfg.measure(ctx, name)
		switch {
		case errors.Is(err, transfer.ErrNoPath) && len(cfg.Transports) == 0:
			continue // it does not lead there
		case err != nil:
			return r, fmt.Errorf("transfer bench: %s: %w", name, err)
		}
		found = true
		r.Rows = append(r.Rows, rows...)
	}
	if found && cfg.DeadRail {
		if r.DeadRail, err = cfg.deadRail(ctx); err != nil {
			return r, fmt.Errorf("transfer bench: a dead rail: %w", err)
		}
	}
	if !found {
		return r, fmt.Errorf("transfer bench: %w to %v", transfer.ErrNoPath, cfg.To)
	}
	return r, nil
}

// measure measures one transport.
func (cfg *Transfer) measure(ctx context.Context, transport string) (rows []TransferRow, err error) {
	e, err := transfer.New(transfer.Config{
		Transports: []string{transport}, SliceSize: cfg.SliceSize, Connections: cfg.Conns, Checksums: cfg.Checksums, Token: cfg.Token,
		From: cfg.From, Topology: cfg.Topology, NICs: cfg.NICs,
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	seg, err := e.Open(ctx, cfg.To...)
	if err != nil {
		return nil, err
	}
	there, ok := seg.Buffer(cfg.Buffer)
	if !ok {
		return nil, fmt.Errorf("the segment of %v has no buffer %q", cfg.To, cfg.Buffer)
	}
	for _, block := range cfg.Blocks {
		for _, op := range cfg.Ops {
			cfg.Progress(fmt.Sprintf("%s %v of %d KiB", transport, op, block>>10))
			span := cfg.Batch * block * cfg.Threads
			if there.Storage {
				span = 0
			}
			row, err := cfg.rounds(ctx, transport, span, func() (*TransferRow, error) {
				return cfg.figure(ctx, e, seg, there, op, block)
			})
			if err != nil {
				return nil, err
			}
			rows = append(rows, *row)
		}
	}
	return rows, nil
}

// rounds measures a figure and what the machine can do, in turns, since other work comes and goes. It returns the round whose
// rate is the median. span is how much memory the figure's bytes come from, 0 if it is storage.
func (cfg *Transfer) rounds(
	ctx context.Context, transport string, span int, figure func() (*TransferRow, error),
) (*TransferRow, error) {
	var rows []*TransferRow
	var shares []float64
	for range max(cfg.Rounds, 1) {
		yardstick, err := cfg.yardstick(ctx, transport, span)
		if err != nil {
			return nil, err
		}
		row, err := figure()
		if err != nil {
			return nil, err
		}
		row.Transport, row.Yardstick = transport, yardstick
		if yardstick > 0 {
			shares = append(shares, row.Rate/yardstick)
		}
		rows = append(rows, row)
	}
	slices.SortFunc(rows, func(a, b *TransferRow) int { return cmp.Compare(a.Rate, b.Rate) })
	row := rows[len(rows)/2]
	if len(shares) > 0 {
		slices.Sort(shares)
		row.Share = shares[len(shares)/2]
	}
	return row, nil
}

// yardstick is what this machine does without the engine: over TCP, as many plain streams as a rail has connections, from and
// to as much memory; through shared memory, copies of as much by all processors. 0 for storage, which other tools measure.
func (cfg *Transfer) yardstick(ctx context.Context, transport string, span int) (float64, error) {
	switch {
	case span == 0:
		return 0, nil
	case transport == transfer.TransportTCP:
		return streamRate(ctx, max(cfg.Conns, 1), span, cfg.Time)
	}
	if cfg.copier == nil {
		cfg.copier = newCopier()
	}
	return cfg.copier.within(runtime.GOMAXPROCS(0), span, cfg.Time), nil
}

// figure measures one operation with one size of blocks.
func (cfg *Transfer) figure(
	ctx context.Context, e *transfer.Engine, seg *transfer.Segment, there transfer.BufferInfo, op transfer.Op, block int,
) (*TransferRow, error) {
	span := cfg.Batch * block
	if uint64(span*cfg.Threads) > there.Bytes { //nolint:gosec // flags are checked
		return nil, fmt.Errorf("%d threads of %d blocks of %d bytes do not fit the buffer's %d: give the target a larger --size",
			cfg.Threads, cfg.Batch, block, there.Bytes)
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.Time+time.Minute)
	defer cancel()
	times, failures := make([][]time.Duration, cfg.Threads), make([]error, cfg.Threads)
	submitted := make([]time.Duration, cfg.Threads)
	var mem [2]runtime.MemStats
	runtime.ReadMemStats(&mem[0])
	before, begun := processorTime(), time.Now()
	var wg sync.WaitGroup
	for i := range cfg.Threads {
		wg.Go(func() {
			rs := make([]transfer.Request, cfg.Batch)
			local := make([]byte, span)
			for k := 0; k < span; k += 4096 {
				local[k] = 1 // memory that nobody has written to is one page of zeros, and copied from the cache
			}
			for j := range rs {
				rs[j] = transfer.Request{
					Op: op, Segment: seg, Buffer: there.Handle, Offset: uint64(i*span + j*block), //nolint:gosec // within the buffer
					Local: local[j*block : (j+1)*block],
				}
			}
			times[i] = make([]time.Duration, 0, 1<<16)
			for n := 0; failures[i] == nil && (n == 0 || time.Since(begun) < cfg.Time); n++ {
				if there.Storage {
					scatter(rs, there.Bytes, block)
				}
				at := time.Now()
				inSubmit, err := once(ctx, e, rs)
				failures[i] = err
				submitted[i] += inSubmit
				times[i] = append(times[i], time.Since(at))
			}
		})
	}
	wg.Wait()
	took, cpu := time.Since(begun), processorTime()-before
	runtime.ReadMemStats(&mem[1])
	if err := errors.Join(failures...); err != nil {
		return nil, err
	}
	all := slices.Concat(times...)
	slices.Sort(all)
	moved := float64(len(all)) * float64(span)
	parts := float64(len(all) * cfg.Batch * ((block + cfg.sliceSize() - 1) / cfg.sliceSize()))
	inSubmit := time.Duration(0)
	for _, t := range submitted {
		inSubmit += t
	}
	at := func(q float64) time.Duration { return all[min(int(q*float64(len(all))), len(all)-1)] }
	return &TransferRow{
		Op: op.String(), Block: block, Batch: cfg.Batch, Threads: cfg.Threads, Rate: moved / took.Seconds(),
		P50: at(.5), P99: at(.99), P999: at(.999), CPU: cpu.Seconds() / (moved / 1e9),
		Submit: time.Duration(float64(inSubmit) / parts), Allocs: float64(mem[1].Mallocs-mem[0].Mallocs) / parts,
	}, nil
}

// once carries out a batch, and tells how long its submission took.
func once(ctx context.Context, e *transfer.Engine, rs []transfer.Request) (inSubmit time.Duration, err error) {
	begun := time.Now()
	b, err := e.Submit(rs, 0)
	inSubmit = time.Since(begun)
	if err != nil {
		return inSubmit, err
	}
	err = b.Wait(ctx)
	b.Release()
	return inSubmit, err
}

// sliceSize is how many bytes are moved at once.
func (cfg *Transfer) sliceSize() int { return cmp.Or(cfg.SliceSize, 64<<10) }

// scatter has requests go anywhere in a buffer, at multiples of their size: what a disk has read once it may keep.
func scatter(rs []transfer.Request, bytes uint64, block int) {
	for i := range rs {
		rs[i].Offset = rand.Uint64N(bytes/uint64(block)) * uint64(block) //nolint:gosec // not a secret, and positive
	}
}

// streamPiece is what a plain stream reads and writes at once, in bytes.
const streamPiece = 1 << 20

// streamRate is what so many plain TCP streams move on this host at once, in bytes per second, from and to so much memory in
// all.
func streamRate(ctx context.Context, streams, span int, each time.Duration) (rate float64, err error) {
	rates, failures := make([]float64, streams), make([]error, streams)
	var wg sync.WaitGroup
	for i := range streams {
		wg.Go(func() { rates[i], failures[i] = oneStream(ctx, max(span/streams, streamPiece), each) })
	}
	wg.Wait()
	for _, r := range rates {
		rate += r
	}
	return rate, errors.Join(failures...)
}

// unpaced has a socket hold nothing back for a network's sake, as the engine's connections within a host: bbr costs plain
// streams a third.
func unpaced(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		_ = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "reno") // slower without
	})
}

// oneStream is what one plain TCP stream moves.
func oneStream(ctx context.Context, span int, each time.Duration) (float64, error) {
	l, err := (&net.ListenConfig{Control: unpaced}).Listen(ctx, "tcp", "127.0.0.1:0") // connections inherit it
	if err != nil {
		return 0, err
	}
	defer func() { _ = l.Close() }() // nothing is lost with it
	sent := make(chan error, 1)
	end := time.Now().Add(each)
	go func() {
		sent <- func() error {
			c, err := l.Accept()
			if err != nil {
				return err
			}
			b := make([]byte, span)
			clear(b) // or it is one page of zeros
			for at := 0; err == nil && time.Now().Before(end); {
				_, err = c.Write(b[at : at+streamPiece])
				if at += streamPiece; at+streamPiece > span {
					at = 0
				}
			}
			return errors.Join(err, c.Close())
		}()
	}()
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", l.Addr().String())
	if err != nil {
		return 0, err
	}
	begun, n, b, at := time.Now(), int64(0), make([]byte, span), 0
	for {
		k, err := c.Read(b[at:min(at+streamPiece, span)])
		n += int64(k)
		at = (at + k) % span
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return 0, errors.Join(err, c.Close())
		}
	}
	rate := float64(n) / time.Since(begun).Seconds()
	return rate, errors.Join(<-sent, c.Close())
}
