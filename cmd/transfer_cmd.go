package cmd

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"larder/client"
	"larder/cmd/bench"
	"larder/server"
	"larder/transfer"
)

// transferCmd is larder transfer.
type transferCmd struct {
	Bench     transferBench     `cmd:"" help:"Measure reads and writes to another process, here or on another host."`
	Probe     transferProbe     `cmd:"" help:"Show a process's segment and the ways there, with what each takes."`
	Target    transferTarget    `cmd:"" help:"Be the other process: register memory and wait."`
	Endpoints transferEndpoints `cmd:"" help:"Show a process's NICs: queue pairs, endpoints, and what became of them."`
}

// benchBuffer is the name of a target's buffer.
const benchBuffer = "bench"

// transferTarget is larder transfer target.
type transferTarget struct {
	Listen []string    `default:"127.0.0.1:0" help:"Addresses to listen at, one for each rail (default 127.0.0.1:0: this host only, on a free port)."`
	Size   server.Size `default:"256MiB" help:"Bytes to register (default 256MiB)."`
	File   string      `placeholder:"PATH" help:"Register a file or block device instead of memory. A file is made as long as --size, without taking its space."`
	Name   string      `help:"Name of the segment."`
	Token  string      `env:"LARDER_TRANSFER_TOKEN" help:"What others must know, too."`

	Masters []string `placeholder:"ADDR" help:"Masters of a pool, host:port or unix:PATH: clients of --tenant, who then may write to it, find it there by --name."`
	Tenant  string   `help:"Tenant whose clients find it (default: the default tenant)."`

	ZeroCopy string `default:"auto" enum:"auto,on,off" help:"Whether long answers over TCP are sent from where they lie: on; off; auto, to other hosts where the kernel can (default auto)."`

	Topology topologyFile `placeholder:"FILE" help:"Topology of this host as JSON (default: as its sysfs tells; see larder transfer probe --json)."`
	Metrics  string       `placeholder:"ADDR" help:"Address at which Prometheus finds /metrics of the NICs."`
	Plain    string       `placeholder:"ADDR" help:"Address at which to take plain TCP streams, from anybody: what larder transfer bench --plain compares with."`

	nicFlags
}

// topologyFile is a flag that reads a topology.
type topologyFile struct{ *transfer.Topology }

// UnmarshalText implements encoding.TextUnmarshaler.
func (f *topologyFile) UnmarshalText(path []byte) error {
	text, err := os.ReadFile(string(path))
	if err == nil {
		f.Topology, err = transfer.ParseTopology(text)
	}
	return err
}

// Run implements the command.
func (c *transferTarget) Run(e *env) (err error) {
	if c.Size == 0 || c.Size > 1<<40 && c.File == "" {
		return usageError(fmt.Errorf("transfer target: --size %v: from 1 byte to 1TiB of memory", c.Size))
	}
	nics, closeNICs, err := c.open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeNICs()) }()
	if len(c.Masters) > 0 && c.Name == "" {
		return usageError(errors.New("transfer target: --masters: give it a --name to be found by"))
	}
	cfg := transfer.Config{
		Name: c.Name, Listen: c.Listen, Token: c.Token, ZeroCopy: c.ZeroCopy, Topology: c.Topology.Topology, NICs: nics,
	}
	directory := client.NewDirectory()
	if len(c.Masters) > 0 {
		cfg.Directory = directory
	}
	engine, err := transfer.New(cfg)
	if err != nil {
		return usageError(err)
	}
	defer func() { err = errors.Join(err, engine.Close()) }()
	if c.Metrics != "" {
		at, stop, err := serveMetrics(c.Metrics, engine)
		if err != nil {
			return fmt.Errorf("transfer target: %w", err)
		}
		defer func() { _ = stop() }() // nothing is lost with it
		fmt.Fprintf(e.stderr, "metrics at http://%s/metrics\n", at)
	}
	if c.File != "" {
		f, err := transfer.OpenFile(c.File, uint64(c.Size))
		if err != nil {
			return usageError(err)
		}
		defer func() { err = errors.Join(err, engine.Close(), f.Close()) }()
		if _, err := engine.RegisterStorage(f, uint64(c.Size), transfer.BufferOptions{Name: benchBuffer}); err != nil {
			return err //nolint:wrapcheck // says all
		}
	} else if _, _, err := engine.Allocate(int(c.Size), transfer.BufferOptions{Name: benchBuffer}); err != nil { //nolint:gosec // at most 1 TiB
		return err //nolint:wrapcheck // says all
	}
	stop, err := publish(e.ctx, directory, c.Masters, c.Tenant)
	if err != nil {
		return fmt.Errorf("transfer target: %w", err)
	}
	defer stop()
	if c.Plain != "" {
		l, err := (&net.ListenConfig{}).Listen(e.ctx, "tcp", c.Plain)
		if err != nil {
			return fmt.Errorf("transfer target: --plain: %w", err)
		}
		defer func() { _ = l.Close() }() // nothing is lost with it
		go bench.ServePlain(l)
		fmt.Fprintf(e.stdout, "plain streams at %s\n", l.Addr())
	}
	fmt.Fprintf(e.stdout, "listening at %s\n", strings.Join(engine.Addresses(), " "))
	<-e.ctx.Done()
	return nil
}

// transferBench is larder transfer bench.
type transferBench struct {
	To         []string      `placeholder:"ADDR" help:"Addresses of a larder transfer target, or another engine. Without any a target is started on this host."`
	Buffer     string        `default:"bench" help:"Name of the buffer there (default bench)."`
	Token      string        `env:"LARDER_TRANSFER_TOKEN" help:"What the target was given."`
	Transports []string      `name:"transport" help:"Transports to measure: shm, rdma, tcp (default: all that lead there), and local: this process's own memory, or --file."`
	Ops        []string      `name:"op" default:"read,write" enum:"read,write" help:"Operations (default read,write)."`
	Blocks     []server.Size `name:"block" default:"4KiB,64KiB,1MiB" help:"Bytes of a request (default 4KiB,64KiB,1MiB)."`
	Batch      int           `default:"16" help:"Requests of a batch (default 16)."`
	Threads    int           `default:"1" help:"Threads that submit one batch after the other (default 1)."`
	Span       server.Size   `default:"256MiB" help:"Memory on each side that the requests go through (default 256MiB: more than caches hold)."`
	Plain      string        `placeholder:"ADDR" help:"Compare TCP with plain streams of the other process: the --plain of larder transfer target."`
	Slice      server.Size   `default:"64KiB" help:"Bytes that are moved at once (default 64KiB)."`
	Conns      int           `name:"connections" default:"2" help:"Connections of a rail (default 2)."`
	ZeroCopy   string        `default:"auto" enum:"auto,on,off" help:"Whether long writes over TCP, and the answers of the target that is started, are sent from where they lie: on; off; auto, to other hosts where the kernel can (default auto)."`
	Checksums  bool          `help:"Check the bytes end to end."`
	From       []string      `placeholder:"ADDR" help:"Addresses here from which rails leave (default: as the system routes)."`
	Topology   topologyFile  `placeholder:"FILE" help:"Topology of this host as JSON (default: as its sysfs tells)."`
	Time       time.Duration `default:"1s" help:"Time for each figure (default 1s)."`
	Rounds     int           `default:"1" help:"Rounds, of which the medians count (default 1)."`
	Rails      int           `default:"1" help:"Addresses of the target that is started: 127.0.0.1 and those that follow (default 1)."`
	DeadRail   bool          `help:"Measure what a rail that does not work costs."`
	File       string        `placeholder:"PATH" help:"Have the target that is started, or this process with --transport local, register a file or block device, of --size."`
	Size       server.Size   `default:"1GiB" help:"Bytes of --file (default 1GiB)."`
	JSON       bool          `help:"Print JSON."`

	findFlags
	nicFlags
}

// Run implements the command.
func (c *transferBench) Run(e *env) (err error) {
	cfg := &bench.Transfer{
		To: c.To, Buffer: c.Buffer, Token: c.Token, Transports: c.Transports, Batch: c.Batch, Threads: c.Threads, Plain: c.Plain,
		SliceSize: int(c.Slice), Conns: c.Conns, Checksums: c.Checksums, Time: c.Time, //nolint:gosec // checked by transfer.New
		From: c.From, Topology: c.Topology.Topology, Rounds: c.Rounds, DeadRail: c.DeadRail, ZeroCopy: c.ZeroCopy,
		Progress: func(what string) { fmt.Fprintln(e.stderr, "measuring", what) },
	}
	if err := c.check(cfg); err != nil {
		return usageError(fmt.Errorf("transfer bench: %w", err))
	}
	if cfg.To, err = c.find(e.ctx, c.To); err != nil {
		return fmt.Errorf("transfer bench: %w", err)
	}
	nics, closeNICs, err := c.open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeNICs()) }()
	cfg.NICs = nics
	cfg.File, cfg.Size = c.File, uint64(c.Size)
	if alone := slices.Equal(c.Transports, []string{transfer.TransportLocal}); len(cfg.To) == 0 && !alone {
		stop, err := startTarget(e, c, cfg)
		if err != nil {
			return fmt.Errorf("transfer bench: start a target: %w", err)
		}
		defer stop()
	}
	report, err := bench.RunTransfer(e.ctx, cfg)
	if err != nil {
		return err //nolint:wrapcheck // says all
	}
	if c.JSON {
		return printJSON(e.stdout, report)
	}
	return printTransfer(e.stdout, report)
}

// check reads the flags that are lists.
func (c *transferBench) check(cfg *bench.Transfer) error {
	for _, op := range c.Ops {
		cfg.Ops = append(cfg.Ops, map[string]transfer.Op{"read": transfer.Read, "write": transfer.Write}[op])
	}
	for _, b := range c.Blocks {
		if b == 0 || b > 1<<30 {
			return fmt.Errorf("--block %v: from 1 byte to 1GiB", b)
		}
		cfg.Blocks = append(cfg.Blocks, int(b))
	}
	for _, t := range c.Transports {
		if !slices.Contains(transfer.Transports, t) {
			return fmt.Errorf("--transport %.20q: one of %s", t, strings.Join(transfer.Transports, ", "))
		}
	}
	most := server.Size(c.Batch) * server.Size(c.Threads) * slices.Max(c.Blocks) //nolint:gosec // checked below
	cfg.Span = int(max(c.Span, most))                                            //nolint:gosec // checked below
	switch {
	case c.Span < 4<<10 || c.Span > 64<<30:
		return fmt.Errorf("--span %v: from 4KiB to 64GiB", c.Span)
	case c.Batch < 1 || c.Batch > 4096:
		return fmt.Errorf("--batch %d: from 1 to 4096", c.Batch)
	case c.Threads < 1 || c.Threads > 256:
		return fmt.Errorf("--threads %d: from 1 to 256", c.Threads)
	case c.Rounds < 1 || c.Rails < 1 || c.Rails > 64:
		return fmt.Errorf("--rounds %d, --rails %d: at least 1, and at most 64 rails", c.Rounds, c.Rails)
	case c.DeadRail && c.Rails < 2 && len(c.To) == 0:
		return errors.New("--dead-rail: give at least two --rails, so that one is left")
	case c.Time < 10*time.Millisecond:
		return fmt.Errorf("--time %v is too short; at least 10ms", c.Time)
	case c.Slice < 4<<10 || c.Slice > 16<<20:
		return fmt.Errorf("--slice %v: from 4KiB to 16MiB", c.Slice)
	}
	return nil
}

// startTarget runs a target as another process of this host, and has cfg measure it.
func startTarget(e *env, c *transferBench, cfg *bench.Transfer) (stop func(), err error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	size := server.Size(cfg.Span) //nolint:gosec // checked
	args := []string{"transfer", "target", "--plain=127.0.0.1:0"}
	if c.File != "" {
		size = c.Size
		args = append(args, "--file="+c.File)
	}
	args = append(args, fmt.Sprintf("--size=%v", size), "--zero-copy="+c.ZeroCopy)
	for i := range c.Rails {
		args = append(args, fmt.Sprintf("--listen=127.0.0.%d:0", 1+i))
	}
	for _, name := range c.NICs {
		args = append(args, "--nics="+name)
	}
	cmd := exec.CommandContext(context.WithoutCancel(e.ctx), program, args...) //nolint:gosec // this program
	cmd.Env = append(os.Environ(), "LARDER_TRANSFER_TOKEN="+c.Token)
	cmd.Stderr = e.stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	stop = func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		_ = cmd.Wait()                          // with whatever: all is measured
	}
	in := bufio.NewReader(out)
	for _, what := range []struct {
		says string
		take func(addresses []string)
	}{
		{"plain streams at ", func(a []string) { cfg.Plain = a[0] }},
		{"listening at ", func(a []string) { cfg.To = a }},
	} {
		line, err := in.ReadString('\n')
		list, ok := strings.CutPrefix(strings.TrimSpace(line), what.says)
		if err != nil || !ok || list == "" {
			stop()
			return nil, fmt.Errorf("it says %q: %w", line, err)
		}
		what.take(strings.Fields(list))
	}
	return stop, nil
}

// printTransfer prints the report as tables.
func printTransfer(w io.Writer, r *bench.TransferReport) error {
	fmt.Fprintf(w, "One thread copies %s here", quantity(r.CopyOne, "B/s"))
	if r.Plain > 0 {
		fmt.Fprintf(w, "; one plain TCP stream from there carries %s", quantity(r.Plain, "B/s"))
	}
	fmt.Fprint(w, ".\n\n")
	t := newTable("TRANSPORT", "OP", "-BLOCK", "-BATCH", "-THREADS", "-RATE", "-OF PLAIN", "-P50", "-P99", "-P99.9", "-CPU",
		"-SUBMIT/SLICE", "-ALLOCS/SLICE")
	for i := range r.Rows {
		row := &r.Rows[i]
		t.row(row.Transport, row.Op, server.Size(row.Block).String(), row.Batch, row.Threads, quantity(row.Rate, "B/s"), //nolint:gosec // a size
			shareOf(row.Share), micros(row.P50), micros(row.P99), micros(row.P999), fmt.Sprintf("%.2f s/GB", row.CPU),
			fmt.Sprintf("%d ns", row.Submit.Nanoseconds()), fmt.Sprintf("%.2f", row.Allocs))
	}
	if err := t.print(w); err != nil || len(r.DeadRail) == 0 {
		return err
	}
	fmt.Fprintln(w)
	t = newTable("ONE RAIL", "-RAILS", "-ALL WORK", "-ONE DOES NOT", "-SHARE")
	for _, row := range r.DeadRail {
		t.row(row.How, row.Rails, quantity(row.Whole, "B/s"), quantity(row.Rate, "B/s"), shareOf(row.Share))
	}
	return t.print(w)
}

// shareOf prints a share; a dash if there is none.
func shareOf(share float64) string {
	if share == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f%%", 100*share)
}

func micros(d time.Duration) string { return fmt.Sprintf("%.0f us", float64(d)/1e3) }

// transferProbe is larder transfer probe.
type transferProbe struct {
	To       []string     `arg:"" optional:"" name:"address" help:"Addresses of an engine."`
	Token    string       `env:"LARDER_TRANSFER_TOKEN" help:"What the engine was given."`
	From     []string     `placeholder:"ADDR" help:"Addresses here from which rails leave (default: as the system routes)."`
	Topology topologyFile `placeholder:"FILE" help:"Topology of this host as JSON (default: as its sysfs tells)."`
	JSON     bool         `help:"Print JSON."`

	findFlags
	nicFlags
}

// probed is what a probe found.
type probed struct {
	Segment transfer.Descriptor `json:"segment"`
	Paths   []transfer.Path     `json:"paths"`
	Failed  map[string]string   `json:"failed,omitempty"` // transports that lead there and do not work
	Here    *transfer.Topology  `json:"topology_here"`
}

// Run implements the command.
func (c *transferProbe) Run(e *env) (err error) {
	if c.To, err = c.find(e.ctx, c.To); err != nil {
		return fmt.Errorf("transfer probe: %w", err)
	}
	if len(c.To) == 0 {
		return usageError(errors.New("transfer probe: give addresses of an engine, or its --name"))
	}
	nics, closeNICs, err := c.open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeNICs()) }()
	out := &probed{Failed: map[string]string{}}
	for _, name := range transfer.Transports {
		if err := c.probe(e.ctx, name, nics, out); errors.Is(err, transfer.ErrNoPath) {
			continue // it does not lead there, or what failed is in the table
		} else if err != nil {
			return fmt.Errorf("transfer probe: %w", err)
		}
	}
	if c.JSON {
		return printJSON(e.stdout, out)
	}
	return out.print(e.stdout)
}

// probeReads are enough for an average of the time that one takes.
const probeReads = 200

// probe goes one way.
func (c *transferProbe) probe(ctx context.Context, transport string, nics []transfer.NIC, out *probed) (err error) {
	engine, err := transfer.New(transfer.Config{
		Transports: []string{transport}, Token: c.Token, From: c.From, Topology: c.Topology.Topology, NICs: nics,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, engine.Close()) }()
	seg, err := engine.Open(ctx, c.To...)
	if err != nil {
		return err
	}
	out.Segment, out.Here = seg.Descriptor(), engine.Topology()
	for _, storage := range []bool{false, true} {
		leads := slices.ContainsFunc(seg.Paths(), func(p transfer.Path) bool { return p.Storage == storage })
		i := slices.IndexFunc(out.Segment.Buffers, func(b transfer.BufferInfo) bool { return b.Storage == storage })
		if !leads || i < 0 {
			continue
		}
		if err := probeBuffer(ctx, engine, seg, &out.Segment.Buffers[i]); err != nil {
			out.Failed[transport] = err.Error()
		}
	}
	out.Paths = append(out.Paths, seg.Paths()...)
	return nil
}

// probeBuffer reads from a buffer, so that the ways there have something to show.
func probeBuffer(ctx context.Context, engine *transfer.Engine, seg *transfer.Segment, b *transfer.BufferInfo) error {
	local := make([]byte, min(b.Bytes, 4<<10))
	request := []transfer.Request{{Op: transfer.Read, Segment: seg, Buffer: b.Handle, Local: local}}
	for range probeReads {
		batch, err := engine.Submit(request, 5*time.Second)
		if err == nil {
			err = batch.Wait(ctx)
		}
		if err != nil {
			return err //nolint:wrapcheck // says all
		}
	}
	return nil
}

// printMatrix prints which NICs are close to which memory, if that is known.
func printMatrix(w io.Writer, where string, topology *transfer.Topology) error {
	if topology == nil || len(topology.Matrix) == 0 {
		return nil
	}
	fmt.Fprintln(w)
	t := newTable("MEMORY "+where, "PREFERRED NICS", "OTHERS")
	for _, location := range slices.Sorted(maps.Keys(topology.Matrix)) {
		p := topology.Matrix[location]
		t.row(location, strings.Join(p.Preferred, " "), strings.Join(p.Secondary, " "))
	}
	return t.print(w)
}

// kindOf is what a buffer lies on.
func kindOf(storage bool) string {
	if storage {
		return "storage"
	}
	return "memory"
}

func (p *probed) print(w io.Writer) error {
	if p.Segment.Engine == "" {
		return errors.New("transfer probe: no transport of this build leads there")
	}
	fmt.Fprintf(w, "Segment %s, engine %s\n\n", p.Segment.Name, p.Segment.Engine)
	t := newTable("BUFFER", "-ID", "-BYTES", "ACCESS", "ON")
	for _, b := range p.Segment.Buffers {
		on := kindOf(b.Storage)
		access := "read, write"
		if b.ReadOnly {
			access = "read"
		}
		t.row(b.Name, uint64(b.ID), server.Size(b.Bytes).String(), access, on)
	}
	if err := t.print(w); err != nil {
		return err
	}
	fmt.Fprintln(w)
	t = newTable("TRANSPORT", "FROM", "TO", "FOR", "STATE", "-4KiB READ", "-READS", "-ERRORS")
	for i := range p.Paths {
		r := &p.Paths[i]
		from := r.From
		if from == "" {
			from = "any"
		}
		t.row(r.Transport, from, r.To, kindOf(r.Storage), r.State, micros(r.Latency), r.Slices, r.Errors)
	}
	if err := t.print(w); err != nil {
		return err
	}
	for _, side := range []struct {
		where string
		t     *transfer.Topology
	}{{"HERE", p.Here}, {"THERE", p.Segment.Topology}} {
		if err := printMatrix(w, side.where, side.t); err != nil {
			return err
		}
	}
	for name, why := range p.Failed {
		fmt.Fprintf(w, "\n%s fails: %s\n", name, why)
	}
	return nil
}
