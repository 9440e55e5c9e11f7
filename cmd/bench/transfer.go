package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"time"

	"larder/transfer"
)

// Transfer says what to measure between this process and another one's segment.
type Transfer struct {
	To         []string // addresses of the other engine
	Buffer     string   // the name of the buffer there
	Token      string
	Transports []string // each by itself; none means all that lead there
	Ops        []transfer.Op
	Blocks     []int  // bytes of a request
	Batch      int    // requests of a batch
	Threads    int    // that submit one batch after the other
	Span       int    // bytes on each side that the requests of all threads go through, over and over
	Plain      string // address of plain streams of To's process to compare TCP with; empty for none
	File       string // a file or disk that the transport local, which leads to this process itself, measures; empty for memory
	Size       uint64 // of it
	SliceSize  int
	Conns      int // connections of a rail
	Checksums  bool
	ZeroCopy   string             // see transfer.Config
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
	CopyOne  float64       `json:"copy_bytes_per_second"`            // one thread's copy of memory here
	Plain    float64       `json:"plain_bytes_per_second,omitempty"` // one plain TCP stream from there
	Rows     []TransferRow `json:"rows"`
	DeadRail []DeadRailRow `json:"dead_rail,omitempty"`
}

// RunTransfer measures each transport, operation and block size, beside what this machine can do at most.
func RunTransfer(ctx context.Context, cfg *Transfer) (*TransferReport, error) {
	r := &TransferReport{}
	cfg.Progress("a copy of memory")
	cfg.copier = newCopier(cfg.Span)
	r.CopyOne = cfg.copier.rate(1, cfg.Time)
	var err error
	if cfg.Plain != "" {
		cfg.Progress("a plain TCP stream")
		if r.Plain, err = plainRate(ctx, cfg.Plain, transfer.Read, 1, cfg.Span, cfg.Time); err != nil {
			return nil, fmt.Errorf("transfer bench: %w", err)
		}
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
		From: cfg.From, Topology: cfg.Topology, NICs: cfg.NICs, ZeroCopy: cfg.ZeroCopy,
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	seg, closeOwn, err := cfg.open(ctx, e, transport)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.Close(), closeOwn()) }()
	there, ok := seg.Buffer(cfg.Buffer)
	if !ok {
		return nil, fmt.Errorf("the segment of %v has no buffer %q", cfg.To, cfg.Buffer)
	}
	if !there.Storage && there.Bytes < uint64(cfg.Span) { //nolint:gosec // flags are checked
		cfg.Span = int(there.Bytes) //nolint:gosec // less than it was
		cfg.copier = newCopier(cfg.Span)
	}
	if err := cfg.warm(ctx, e, seg, there); err != nil {
		return nil, err
	}
	for _, block := range cfg.Blocks {
		for _, op := range cfg.Ops {
			cfg.Progress(fmt.Sprintf("%s %v of %d KiB", transport, op, block>>10))
			row, err := cfg.rounds(ctx, transport, op, there.Storage, func() (*TransferRow, error) {
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

// open opens the other process's segment, or for the transport local one of this process.
func (cfg *Transfer) open(
	ctx context.Context, e *transfer.Engine, transport string,
) (_ *transfer.Segment, closeOwn func() error, err error) {
	closeOwn = func() error { return nil }
	switch {
	case transport != transfer.TransportLocal || !slices.Contains(cfg.Transports, transport):
		seg, err := e.Open(ctx, cfg.To...)
		return seg, closeOwn, err
	case cfg.File == "":
		_, _, err = e.Allocate(cfg.Span, transfer.BufferOptions{Name: cfg.Buffer})
	default:
		f, err := transfer.OpenFile(cfg.File, cfg.Size)
		if err != nil {
			return nil, nil, err
		}
		closeOwn = f.Close
		if _, err := e.RegisterStorage(f, cfg.Size, transfer.BufferOptions{Name: cfg.Buffer}); err != nil {
			return nil, nil, errors.Join(err, f.Close())
		}
	}
	if err != nil {
		return nil, nil, err
	}
	seg, err := e.OpenDescriptor(e.Describe())
	return seg, closeOwn, err
}

// warm goes through all memory once, so that every page is there and mapped.
func (cfg *Transfer) warm(ctx context.Context, e *transfer.Engine, seg *transfer.Segment, there transfer.BufferInfo) error {
	if there.Storage {
		return nil
	}
	op := transfer.Read
	if slices.Contains(cfg.Ops, transfer.Write) {
		op = transfer.Write
	}
	_, err := once(ctx, e, []transfer.Request{{Op: op, Segment: seg, Buffer: there.Handle, Local: cfg.copier.dst}})
	return err
}

// rounds measures a figure and what the machine can do, in turns, since other work comes and goes. It returns the round whose
// rate is the median.
func (cfg *Transfer) rounds(
	ctx context.Context, transport string, op transfer.Op, storage bool, figure func() (*TransferRow, error),
) (*TransferRow, error) {
	var rows []*TransferRow
	var shares []float64
	for range max(cfg.Rounds, 1) {
		yardstick, err := cfg.yardstick(ctx, transport, op, storage)
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

// yardstick is what there is without the engine, with as much memory: over TCP, as many plain streams as a rail has
// connections; through shared memory, copies by all processors. 0 where other tools measure that: storage and RDMA.
func (cfg *Transfer) yardstick(ctx context.Context, transport string, op transfer.Op, storage bool) (float64, error) {
	switch {
	case storage:
		return 0, nil
	case transport == transfer.TransportTCP && cfg.Plain != "":
		return plainRate(ctx, cfg.Plain, op, max(cfg.Conns, 1), cfg.Span, cfg.Time)
	case transport == transfer.TransportShm, transport == transfer.TransportLocal:
		return cfg.copier.rate(runtime.GOMAXPROCS(0), cfg.Time), nil
	}
	return 0, nil
}

// figure measures one operation with one size of blocks.
func (cfg *Transfer) figure(
	ctx context.Context, e *transfer.Engine, seg *transfer.Segment, there transfer.BufferInfo, op transfer.Op, block int,
) (*TransferRow, error) {
	part := cfg.Batch * block // of a batch
	span := cfg.Span / cfg.Threads / part * part
	if span == 0 {
		return nil, fmt.Errorf("%d threads of %d blocks of %d bytes do not fit the buffer's %d: give the target a larger --size",
			cfg.Threads, cfg.Batch, block, there.Bytes)
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.Time+time.Minute)
	defer cancel()
	times, failures := make([][]time.Duration, cfg.Threads), make([]error, cfg.Threads)
	submitted := make([]time.Duration, cfg.Threads)
	var mem [2]runtime.MemStats
	runtime.ReadMemStats(&mem[0])
	before, begun := processorTime(self), time.Now()
	var wg sync.WaitGroup
	for i := range cfg.Threads {
		wg.Go(func() {
			w := &walk{rs: make([]transfer.Request, cfg.Batch), local: cfg.copier.dst[i*span:][:span], base: i * span, block: block}
			for j := range w.rs {
				w.rs[j] = transfer.Request{Op: op, Segment: seg, Buffer: there.Handle}
			}
			times[i] = make([]time.Duration, 0, 1<<16)
			for n := 0; failures[i] == nil && (n == 0 || time.Since(begun) < cfg.Time); n++ {
				w.next()
				if there.Storage {
					scatter(w.rs, there.Bytes, block)
				}
				at := time.Now()
				inSubmit, err := once(ctx, e, w.rs)
				failures[i] = err
				submitted[i] += inSubmit
				times[i] = append(times[i], time.Since(at))
			}
		})
	}
	wg.Wait()
	took, cpu := time.Since(begun), processorTime(self)-before
	runtime.ReadMemStats(&mem[1])
	if err := errors.Join(failures...); err != nil {
		return nil, err
	}
	all := slices.Concat(times...)
	slices.Sort(all)
	moved := float64(len(all)) * float64(part)
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

// walk is where a thread's next batch goes: through its part of either side's memory, over and over.
type walk struct {
	rs              []transfer.Request
	local           []byte
	base, at, block int
}

func (w *walk) next() {
	for j := range w.rs {
		w.rs[j].Offset, w.rs[j].Local = uint64(w.base+w.at), w.local[w.at:w.at+w.block] //nolint:gosec // within the buffer
		w.at += w.block
	}
	if w.at == len(w.local) {
		w.at = 0
	}
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
