package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"time"

	"larder/protocol"
	"larder/server"
)

const (
	lostCalm = 5 * time.Second        // lookups before the device is lost: what they wait for then is the machine's own
	lostWait = 2 * time.Minute        // for its entries to be swept
	lostPoll = 100 * time.Millisecond // how often it is looked whether they are
	lostMost = 10 * time.Millisecond  // the longest that any lookup may be delayed
	lostMany = 5_000_000              // locations on the device
	lostFew  = 500_000                // in the short run
	lostLook = 2                      // connections with one lookup in flight each
)

// lost measures lookups while a device with many locations is lost.
func (b *bench) lost() error { return b.lostWith(lostFew) }

// lostLong is the same with as many locations as the aim names.
func (b *bench) lostLong() error { return b.lostWith(lostMany) }

// lostWith fills a device, replaces it by an empty one under the server, and times every lookup until the last of its
// entries is gone.
func (b *bench) lostWith(entries uint64) (err error) {
	n, err := b.single("lost", server.Size(entries*page+1<<30), false, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.remove()) }()
	writers, err := b.sessions(n, (entries/connections+1)*page)
	if err != nil {
		return err
	}
	defer hangUp(writers)
	if _, _, err := b.load(writers, 8, registerBatch, 0, entries, 0); err != nil {
		return err
	}
	network, address := splitAddress(n.Addr())
	conns, err := dialMany(b.ctx, network, address, lostLook)
	if err != nil {
		return err
	}
	defer closeAll(conns)
	before, err := b.lookDuring(conns, entries, func() error { time.Sleep(lostCalm); return nil })
	if err != nil {
		return err
	}
	begin := time.Now()
	during, err := b.lookDuring(conns, entries, func() error {
		if err := loseDevice(n.cfg.Pool[0].Path); err != nil {
			return err
		}
		for n.Status().Stats.Entries > 0 {
			if time.Since(begin) > lostWait {
				return fmt.Errorf("%d entries are left of a lost device after %v", n.Status().Stats.Entries, lostWait)
			}
			time.Sleep(lostPoll)
		}
		return nil
	})
	if err != nil {
		return err
	}
	calm, worst := before.latency[len(before.latency)-1], during.latency[len(during.latency)-1]
	millis := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }
	b.aim(Row{
		Name: fmt.Sprintf("longest LOOKUP while a device with %d locations is lost", entries), Value: millis(worst), Unit: "ms",
		Bound: millis(calm), Of: "the longest in 5 s before",
		Note: fmt.Sprintf("%s, found out and swept in %.1f s", latencyNote(during), time.Since(begin).Seconds()),
	}, "at most 10 ms more", worst-calm <= lostMost)
	return nil
}

// lookDuring looks up random keys, held or not, while do runs.
func (b *bench) lookDuring(conns []net.Conn, entries uint64, do func() error) (*outcome, error) {
	type result struct {
		o   *outcome
		err error
	}
	done := make(chan result, 1)
	stop := make(chan struct{})
	go func() {
		o, err := b.lookUntil(conns, entries, stop)
		done <- result{o, err}
	}()
	err := do()
	close(stop)
	r := <-done
	return r.o, errors.Join(err, r.err)
}

// loseDevice puts an empty file in the place of a device.
func loseDevice(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err //nolint:wrapcheck // names the file
	}
	if err := os.Truncate(path, 0); err != nil {
		return err //nolint:wrapcheck // names the file
	}
	return os.Truncate(path, info.Size()) //nolint:wrapcheck // names the file
}

// lookUntil looks up random keys, whether they are held or not, until stop is closed.
func (b *bench) lookUntil(conns []net.Conn, entries uint64, stop <-chan struct{}) (*outcome, error) {
	build := func(conn int) builder {
		random := rand.New(rand.NewPCG(uint64(conn), 1)) //nolint:gosec // a load, not a secret
		req := protocol.LookupRequest{Keys: make([][]byte, 1)}
		return func(buf []byte, wire uint32) ([]byte, bool) {
			select {
			case <-stop:
				return buf, false
			default:
			}
			req.Keys[0] = keyOf(req.Keys[0][:0], random.Uint64N(entries))
			buf, mark := protocol.BeginFrame(buf, protocol.TypeLookup, wire)
			return protocol.EndFrame(req.AppendAs(buf, protocol.TypeLookup), mark), true
		}
	}
	check := func(int) checker {
		var reply protocol.LookupReply
		return func(_ protocol.Header, payload []byte) error {
			if err := reply.DecodeAs(payload, protocol.TypeLookup); err != nil {
				return fmt.Errorf("lookup: %w", err)
			}
			return reply.Err()
		}
	}
	return driveAll(conns, 1, lostWait+lostCalm, build, check)
}
