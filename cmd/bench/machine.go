package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"larder/protocol"
)

// measureMachine measures the bounds. file is created on the disk that matters.
func measureMachine(ctx context.Context, file string, each time.Duration) (Machine, error) {
	m := Machine{CPUs: runtime.GOMAXPROCS(0), Go: runtime.Version()}
	c := newCopier(copySpan)
	m.CopyOne = c.rate(1, each)
	m.CopyAll = c.rate(m.CPUs, each)
	var err error
	if m.SyncMicros, err = syncTime(file, each); err != nil {
		return m, err
	}
	for _, network := range []string{"tcp", "unix"} {
		many, single, err := echoRates(ctx, network, filepath.Dir(file), each)
		if err != nil {
			return m, err
		}
		if network == "tcp" {
			m.EchoTCP, m.RoundTripTCP = many, 1e6/single
		} else {
			m.EchoUnix, m.RoundTripUnix = many, 1e6/single
		}
	}
	return m, nil
}

// copySpan is copied to as much other memory: no cache holds either.
const copySpan = 256 << 20

// copier measures copies of memory.
type copier struct{ src, dst []byte }

func newCopier(span int) *copier { return &copier{touched(span), touched(span)} }

// rate copies with a number of threads, and returns bytes per second.
func (c *copier) rate(threads int, each time.Duration) float64 {
	var wg sync.WaitGroup
	counts := make([]int, threads)
	src, dst := c.src, c.dst
	span := len(src) / threads
	begin := time.Now()
	for i := range threads {
		wg.Go(func() {
			for time.Since(begin) < each {
				copy(dst[i*span:(i+1)*span], src[i*span:(i+1)*span])
				counts[i]++
			}
		})
	}
	wg.Wait()
	total := 0
	for _, n := range counts {
		total += n
	}
	return float64(total) * float64(span) / time.Since(begin).Seconds()
}

// syncTime is the median time of a 4 KiB append made durable, in microseconds.
func syncTime(file string, each time.Duration) (_ float64, err error) {
	f, err := os.Create(file) //nolint:gosec // inside the run's own directory
	if err != nil {
		return 0, fmt.Errorf("sync: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(file)) }()
	block := make([]byte, 4096)
	var times []time.Duration
	for begin := time.Now(); time.Since(begin) < each; {
		at := time.Now()
		if _, err := f.Write(block); err != nil {
			return 0, fmt.Errorf("sync: %w", err)
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			return 0, fmt.Errorf("sync: %w", err)
		}
		times = append(times, time.Since(at))
	}
	slices.Sort(times)
	return float64(times[len(times)/2].Nanoseconds()) / 1e3, nil
}

// echoRates measures a server that sends frames back as they come: what the sockets and the scheduler cost by
// themselves. It returns messages per second with inFlight on connections, and with one on one.
func echoRates(ctx context.Context, network, dir string, each time.Duration) (many, single float64, err error) {
	address := "127.0.0.1:0"
	if network == "unix" {
		address = filepath.Join(dir, "echo.sock")
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, network, address)
	if err != nil {
		return 0, 0, fmt.Errorf("echo: %w", err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return // closed below
			}
			wg.Go(func() { echo(conn) })
		}
	})
	defer wg.Wait()
	defer listener.Close() //nolint:errcheck // nothing is lost
	address = listener.Addr().String()
	payload := make([]byte, 40)
	build := func(_ int) builder {
		return func(buf []byte, seq uint32) ([]byte, bool) {
			buf, mark := protocol.BeginFrame(buf, protocol.TypeLookup, seq)
			return protocol.EndFrame(append(buf, payload...), mark), true
		}
	}
	for _, load := range []struct {
		conns, depth int
		rate         *float64
	}{{connections, inFlight / connections, &many}, {1, 1, &single}} {
		conns, err := dialMany(ctx, network, address, load.conns)
		if err != nil {
			return 0, 0, err
		}
		outcome, err := driveAll(conns, load.depth, each, build, nil)
		closeAll(conns)
		if err != nil {
			return 0, 0, err
		}
		*load.rate = outcome.rate()
	}
	return many, single, nil
}

// echo sends frames back.
func echo(conn net.Conn) {
	defer conn.Close() //nolint:errcheck // nothing is lost
	r := protocol.NewReader(conn)
	w := bufio.NewWriterSize(conn, 64<<10)
	var buf []byte
	for {
		h, payload, err := r.Next()
		if err != nil {
			return // the client is done
		}
		buf, mark := protocol.BeginReply(buf[:0], h)
		if _, err := w.Write(protocol.EndFrame(append(buf, payload...), mark)); err != nil {
			return
		}
		if !r.Buffered() {
			if err := w.Flush(); err != nil && !errors.Is(err, io.EOF) {
				return
			}
		}
	}
}

// self stands for this process where a process is to be named.
const self = 0

// processorTime is what a process has used of all processors; 0 if it has gone. Linux has a clock for it, whose number is
// made of the process's (clock_getcpuclockid(3), as CPUCLOCK_SCHED).
func processorTime(pid int) time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(int32(^pid<<3|2), &ts) != nil { //nolint:gosec // processes have numbers below 2^22
		return 0
	}
	return time.Duration(ts.Nano())
}
