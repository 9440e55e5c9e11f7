package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"syscall"
	"time"

	"larder/transfer"
)

// DeadRailRow is what one rail that does not work costs those that do.
type DeadRailRow struct {
	How   string  `json:"how"` // in what way it does not
	Rails int     `json:"rails"`
	Whole float64 `json:"bytes_per_second"`         // with all rails, at best
	Rate  float64 `json:"bytes_per_second_without"` // with one dead, after it was first paused, at best
	Share float64 `json:"share"`                    // of the whole, the median of the rounds
}

// deadRail measures TCP with all rails, and with the last one's address replaced by one that refuses connections, or answers
// nothing. Both are open at once and measured in turns. A batch that fails is an error.
func (cfg *Transfer) deadRail(ctx context.Context) (rows []DeadRailRow, err error) {
	refuses, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	if err := refuses.Close(); err != nil {
		return nil, err
	}
	hole, stop, err := blackHole(ctx)
	if err != nil {
		return nil, err
	}
	defer stop()
	for _, dead := range []struct{ how, address string }{{"refuses", refuses.Addr().String()}, {"does not answer", hole}} {
		cfg.Progress("TCP with a rail that " + dead.how)
		row, err := cfg.deadRailAt(ctx, dead.address)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", dead.how, err)
		}
		row.How = dead.how
		rows = append(rows, *row)
	}
	return rows, nil
}

// errorWindow is more than a rail takes to be paused for the first time: three connections that cannot be made.
const errorWindow = 10 * time.Second

func (cfg *Transfer) deadRailAt(ctx context.Context, address string) (_ *DeadRailRow, err error) {
	e, err := transfer.New(transfer.Config{
		Transports: []string{transfer.TransportTCP}, SliceSize: cfg.SliceSize, Connections: cfg.Conns, Token: cfg.Token,
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	whole, err := e.Open(ctx, cfg.To...)
	if err != nil {
		return nil, err
	}
	there, _ := whole.Buffer(cfg.Buffer)
	d := whole.Descriptor()
	d.Rails[len(d.Rails)-1] = address
	less, err := e.OpenDescriptor(d)
	if err != nil {
		return nil, err
	}
	window, block := *cfg, slices.Max(cfg.Blocks)
	window.Time = errorWindow
	if _, err := window.figure(ctx, e, less, there, transfer.Read, block); err != nil {
		return nil, err
	}
	var shares []float64
	row := &DeadRailRow{Rails: len(d.Rails)}
	for range max(cfg.Rounds, 1) {
		a, err := cfg.figure(ctx, e, whole, there, transfer.Read, block)
		if err != nil {
			return nil, err
		}
		b, err := cfg.figure(ctx, e, less, there, transfer.Read, block)
		if err != nil {
			return nil, err
		}
		row.Whole, row.Rate = max(row.Whole, a.Rate), max(row.Rate, b.Rate)
		shares = append(shares, b.Rate/a.Rate)
	}
	slices.Sort(shares)
	row.Share = shares[len(shares)/2]
	return row, nil
}

// blackHole is an address of this host that answers no attempt to connect: a listener whose queue is full.
func blackHole(ctx context.Context) (address string, stop func(), err error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	var conns []net.Conn
	stop = func() {
		for _, c := range conns {
			_ = c.Close() // nothing was said
		}
		_ = l.Close() // nor here
	}
	raw, err := l.(*net.TCPListener).SyscallConn() //nolint:forcetypeassert // that is what the network tcp gives
	if err == nil {
		err = raw.Control(func(fd uintptr) { _ = syscall.Listen(int(fd), 0) }) // a shorter queue; if not, it does not fill
	}
	for dialer := (net.Dialer{Timeout: 200 * time.Millisecond}); err == nil && len(conns) < 16; {
		c, dialErr := dialer.DialContext(ctx, "tcp", l.Addr().String())
		if dialErr != nil {
			return l.Addr().String(), stop, nil //nolint:nilerr // it is what was wanted
		}
		conns = append(conns, c)
	}
	stop()
	return "", nil, errors.Join(err, errors.New("the queue of a listener does not fill"))
}
