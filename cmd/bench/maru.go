package bench

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"larder/internal/freeport"
	"larder/zmtp"
)

// MaruConfig says how Larder is compared with Maru's own server: the same load, from the same clients, on this machine.
type MaruConfig struct {
	Maru     string           // a checkout of Maru
	Python   string           // with what Maru's server needs
	Program  string           // larder
	Dir      string           // for Larder's data and pool; what is made there is removed
	Clients  []int            // how many at once, each figure anew
	Time     time.Duration    // for each turn
	Rounds   int              // turns of each server for each figure, one server after the other; the median counts
	Run      *regexp.Regexp   // nil = all; else the figures as MODE/OPERATION that match
	Progress func(row string) // nil = nobody
}

// MaruReport is a comparison. What changes something is on Larder's disk before it is answered, and nowhere but in memory
// with Maru's server: SyncMicros is what one client's change cannot be faster than.
type MaruReport struct {
	CPUs       int       `json:"cpus"`
	SyncMicros float64   `json:"sync_us"` // median of a 4 KiB append and fdatasync
	Rows       []MaruRow `json:"rows"`
}

// MaruRow compares one kind of request.
type MaruRow struct {
	Mode    string    `json:"mode"` // sync: one request in flight per client; async: 64
	Op      string    `json:"operation"`
	Clients int       `json:"clients"`
	Larder  MaruSpeed `json:"larder"`
	Maru    MaruSpeed `json:"maru"`
	Ratio   float64   `json:"ratio"` // of requests per second
}

// MaruSpeed is what one server did in its median turn.
type MaruSpeed struct {
	Server   string  `json:"server"`
	Requests float64 `json:"requests_per_s"`
	P50      float64 `json:"p50_us"`
	P99      float64 `json:"p99_us"`
	CPU      float64 `json:"cpu_us"` // processor time of the server for each request
}

// maruMode is a way to ask.
type maruMode struct {
	name   string
	socket zmtp.SocketType
	depth  int // requests in flight
}

// maruModes are the two that Maru's clients have.
var maruModes = []maruMode{{"sync", zmtp.REQ, 1}, {"async", zmtp.DEALER, maruInFlight}}

// maruStart is how long a server may take to listen.
const maruStart = 30 * time.Second

// maruServer is a server in a process of its own.
type maruServer struct {
	name    string
	address string
	region  uint64
	cmd     *exec.Cmd
	log     string // file with what it says
}

// Maru measures, and returns what it has when it fails. Maru's server needs a resource manager: Larder's is one.
//
// Maru has two servers, the one that its command starts, which serves one request at a time, and one with four threads that
// only its tests and its benchmark start. In async mode both are measured, and the faster one counts.
func Maru(ctx context.Context, cfg MaruConfig) (report *MaruReport, err error) {
	report = &MaruReport{CPUs: runtime.NumCPU()}
	if cfg.Dir, err = os.MkdirTemp(cfg.Dir, "larder-maru-bench-"); err != nil {
		return report, fmt.Errorf("bench: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(cfg.Dir)) }()
	if report.SyncMicros, err = syncTime(filepath.Join(cfg.Dir, "sync"), cfg.Time); err != nil {
		return report, err
	}
	for _, f := range maruFigures(&cfg) {
		if cfg.Progress != nil {
			cfg.Progress(f.String())
		}
		row, err := f.alone(ctx, cfg)
		if err != nil {
			return report, fmt.Errorf("%v: %w", &f, err)
		}
		report.Rows = append(report.Rows, row)
	}
	return report, nil
}

// maruFigures are the rows that a configuration asks for.
func maruFigures(cfg *MaruConfig) (figures []maruFigure) {
	for _, mode := range maruModes {
		for _, op := range maruOps {
			if cfg.Run != nil && !cfg.Run.MatchString(mode.name+"/"+op.name) {
				continue
			}
			for _, clients := range cfg.Clients {
				figures = append(figures, maruFigure{mode, op, clients, cfg.Time, cfg.Rounds})
			}
		}
	}
	return figures
}

// Check reports what is wrong with a configuration before anything is started: that it asks for no figure.
func (cfg *MaruConfig) Check() error {
	if len(maruFigures(cfg)) > 0 {
		return nil
	}
	names := make([]string, len(maruOps))
	for i, op := range maruOps {
		names[i] = op.name
	}
	return fmt.Errorf("no figure matches %v: they are sync/ and async/ and one of %s", cfg.Run, strings.Join(names, "; "))
}

// maruFigure is one row that is to be measured.
type maruFigure struct {
	mode    maruMode
	op      maruOp
	clients int
	time    time.Duration
	rounds  int
}

func (f *maruFigure) String() string {
	return fmt.Sprintf("%s/%s, clients: %d", f.mode.name, f.op.name, f.clients)
}

// alone measures servers of the figure's own: the keys that one registers more than another in the same time stay there, and would
// be at its expense in all that follows.
func (f *maruFigure) alone(ctx context.Context, cfg MaruConfig) (row MaruRow, err error) {
	if cfg.Dir, err = os.MkdirTemp(cfg.Dir, "figure-"); err != nil {
		return row, fmt.Errorf("bench: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(cfg.Dir)) }()
	servers, err := startMaru(ctx, &cfg, f.mode)
	defer func() {
		for _, s := range servers {
			s.stop()
		}
	}()
	if err != nil {
		return row, err
	}
	return f.compare(ctx, servers)
}

// compare measures servers, the first of which is Larder's, in turns: a machine that others use is not the same for long.
func (f *maruFigure) compare(ctx context.Context, servers []*maruServer) (MaruRow, error) {
	row := MaruRow{Mode: f.mode.name, Op: f.op.name, Clients: f.clients}
	turns := make([][]MaruSpeed, len(servers))
	for range f.rounds {
		for i, s := range servers {
			speed, err := f.measure(ctx, s)
			if err != nil {
				return row, fmt.Errorf("%s: %w", s.name, err)
			}
			turns[i] = append(turns[i], speed)
		}
	}
	row.Larder = medianTurn(turns[0])
	for _, t := range turns[1:] {
		if m := medianTurn(t); m.Requests > row.Maru.Requests {
			row.Maru = m
		}
	}
	row.Ratio = row.Larder.Requests / row.Maru.Requests
	return row, nil
}

// medianTurn is the median by requests per second: of two, the slower one.
func medianTurn(turns []MaruSpeed) MaruSpeed {
	slices.SortFunc(turns, func(a, b MaruSpeed) int { return cmp.Compare(a.Requests, b.Requests) })
	return turns[(len(turns)-1)/2]
}

// measure loads a server.
func (f *maruFigure) measure(ctx context.Context, s *maruServer) (speed MaruSpeed, err error) {
	l, err := openMaru(ctx, s.address, f.mode.socket, f.clients, s.region)
	if err != nil {
		return speed, err
	}
	defer l.close()
	const warm = 10 // of the time goes by before it counts
	if _, err = l.run(ctx, f.op.request, f.mode.depth, f.time/warm); err != nil {
		return speed, err
	}
	begun := processorTime(s.cmd.Process.Pid)
	o, err := l.run(ctx, f.op.request, f.mode.depth, f.time)
	if err != nil {
		return speed, err
	}
	used := processorTime(s.cmd.Process.Pid) - begun
	return MaruSpeed{
		s.name, o.rate(), micros(o.quantile(0.5)), micros(o.quantile(0.99)), micros(used) / float64(max(o.requests, 1)),
	}, nil
}

// startMaru starts Larder first, and with it as their resource manager those servers of Maru's that are measured in a mode.
func startMaru(ctx context.Context, cfg *MaruConfig, mode maruMode) (servers []*maruServer, err error) {
	var at [4]string
	for i := range at {
		if at[i], err = freeport.Addr(); err != nil {
			return nil, err
		}
	}
	rm := at[3]
	begin := func(s *maruServer, program string, args ...string) {
		if err == nil {
			servers = append(servers, s)
			err = s.start(ctx, cfg, program, args...)
		}
	}
	begin(&maruServer{name: "larder", address: at[0]}, cfg.Program, "serve", "--maru", at[0], "--maru-rm", rm,
		"--data-dir", filepath.Join(cfg.Dir, "data"), "--pool", filepath.Join(cfg.Dir, "pool")+",size=1GiB",
		"--listen", "none", "--socket", filepath.Join(cfg.Dir, "socket"), "--peer-listen", "none", "--admin-listen", "none",
		"--log-level", "warn")
	host, port, _ := net.SplitHostPort(at[1])
	begin(&maruServer{name: "maru-server", address: at[1]}, cfg.Python, "-m", "maru_server",
		"--host", host, "--port", port, "--rm-address", rm, "--log-level", "ERROR")
	if mode.depth == 1 {
		return servers, err
	}
	host, port, _ = net.SplitHostPort(at[2])
	begin(&maruServer{name: "RpcAsyncServer", address: at[2]}, cfg.Python, "-c", fmt.Sprintf(
		"from maru_server.rpc_async_server import RpcAsyncServer as S; from maru_server.server import MaruServer as M; "+
			"S(M(rm_address=%q), host=%q, port=%s).start()", rm, host, port))
	return servers, err
}

// start starts a server and registers the keys that are looked up.
func (s *maruServer) start(ctx context.Context, cfg *MaruConfig, program string, args ...string) error {
	s.cmd = exec.CommandContext(ctx, program, args...) //nolint:gosec // what the user named is to be run
	s.cmd.Env = append(os.Environ(), "PYTHONPATH="+cfg.Maru, "PYTHONDONTWRITEBYTECODE=1", "MARU_LOG_LEVEL=ERROR")
	s.log = filepath.Join(cfg.Dir, s.name+".log")
	log, err := os.Create(s.log)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	defer log.Close() //nolint:errcheck // the process has its own
	s.cmd.Dir, s.cmd.Stdout, s.cmd.Stderr = cfg.Dir, log, log
	s.cmd.Cancel = func() error { return s.cmd.Process.Signal(syscall.SIGTERM) }
	s.cmd.WaitDelay = maruPatience
	if err := s.cmd.Start(); err != nil {
		return fmt.Errorf("bench: start %s: %w", s.name, err)
	}
	ended := make(chan struct{})
	go func() {
		_ = s.cmd.Wait() // how it ended shows in what it said
		close(ended)
	}()
	for begun := time.Now(); ; {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.address)
		if err == nil {
			_ = conn.Close() // it was a question
			break
		}
		select {
		case <-ended:
		case <-time.After(readyPoll):
			if time.Since(begun) < maruStart {
				continue
			}
		}
		said, _ := os.ReadFile(s.log) // without it the error says less
		return fmt.Errorf("bench: %s does not listen at %s: %w\n%s", s.name, s.address, err, said)
	}
	if err := s.fill(ctx); err != nil {
		return fmt.Errorf("bench: fill %s: %w", s.name, err)
	}
	return nil
}

// stop ends the server.
func (s *maruServer) stop() {
	if s.cmd == nil || s.cmd.Process == nil {
		return
	}
	_ = s.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	for range maruStart / readyPoll {
		if s.cmd.Process.Signal(syscall.Signal(0)) != nil {
			return
		}
		time.Sleep(readyPoll)
	}
	_ = s.cmd.Process.Kill() // as above
}

// fill has the server give a region and registers maruKeys in it.
func (s *maruServer) fill(ctx context.Context) error {
	l, err := openMaru(ctx, s.address, zmtp.REQ, 1, 0)
	if err != nil {
		return err
	}
	defer l.close()
	defer context.AfterFunc(ctx, l.close)()
	c := l.clients[0]
	alloc := func(c *maruClient) byte {
		b := appendMaruText(append(c.body, 0x82), "instance_id")
		c.body = appendMaruUint(appendMaruText(appendMaruText(b, "bench"), "size"), maruRegion)
		return maruAlloc
	}
	reply, err := c.call(alloc)
	if err != nil {
		return err
	}
	if c.region, err = maruRegionOf(reply); err != nil {
		return err
	}
	s.region = c.region
	c.number = 0
	for c.fresh < maruKeys {
		if _, err := c.call((*maruClient).batchRegister); err != nil {
			return err
		}
	}
	reply, err = c.call(func(c *maruClient) byte { return c.keyed(maruLookup, maruKeys-1) })
	if err == nil && !bytes.Contains(reply, []byte("\xa5found\xc3")) {
		err = fmt.Errorf("a key that was registered is not found: %.100q", reply)
	}
	return err
}

// maruRegionOf finds the region's id in the reply to REQUEST_ALLOC.
func maruRegionOf(reply []byte) (uint64, error) {
	_, b, found := bytes.Cut(reply, []byte("\xa9region_id"))
	if !found || len(b) == 0 {
		return 0, fmt.Errorf("no region: %.200q", reply)
	}
	switch n := b[0]; {
	case n < 0x80:
		return uint64(n), nil
	case n >= 0xcc && n <= 0xcf && len(b) > 1<<(n-0xcc):
		var wide [8]byte
		size := 1 << (n - 0xcc)
		copy(wide[8-size:], b[1:1+size])
		return binary.BigEndian.Uint64(wide[:]), nil
	}
	return 0, fmt.Errorf("a region whose id is no number: %.200q", reply)
}

// CheckMaru reports what is wrong with a checkout of Maru or with an interpreter.
func CheckMaru(ctx context.Context, python, checkout string) error {
	if info, err := os.Stat(filepath.Join(checkout, "maru_server")); err != nil || !info.IsDir() {
		return fmt.Errorf("%s is no checkout of Maru: it has no maru_server", checkout)
	}
	cmd := exec.CommandContext(ctx, python, "-c", "import maru_server.rpc_async_server")
	cmd.Env = append(os.Environ(), "PYTHONPATH="+checkout, "PYTHONDONTWRITEBYTECODE=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		said := strings.TrimSpace(string(out))
		return fmt.Errorf("%s cannot run Maru's server, which needs pyzmq, msgpack, dacite and numpy: %w: %s",
			python, err, said[strings.LastIndexByte(said, '\n')+1:])
	}
	return nil
}
