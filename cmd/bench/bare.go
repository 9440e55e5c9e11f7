package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"larder/protocol"
)

// bareValue is about what a REGISTER is in the log, in bytes.
const bareValue = 96

// openBare opens an empty Pebble store of its own.
func (b *bench) openBare() (db *pebble.DB, remove func() error, err error) {
	dir := filepath.Join(b.Dir, "bare")
	db, err = pebble.Open(dir, &pebble.Options{
		FormatMajorVersion: pebble.FormatNewest, MemTableSize: 64 << 20, Logger: quiet{},
	})
	if err != nil {
		return nil, nil, fmt.Errorf("bare harness: %w", err)
	}
	return db, func() error { return errors.Join(db.Close(), os.RemoveAll(dir)) }, nil
}

// pebbleRate is the bare harness without sockets: callers that each set a small value and wait until it is synced.
func (b *bench) pebbleRate(each time.Duration) (_ float64, err error) {
	db, remove, err := b.openBare()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, remove()) }()
	var wg sync.WaitGroup
	var count atomic.Int64
	var failed atomic.Pointer[error]
	begin := time.Now()
	for i := range inFlight {
		wg.Go(func() {
			value := make([]byte, bareValue)
			key := make([]byte, 0, 32)
			for k := uint64(i); time.Since(begin) < each; k += inFlight { //nolint:gosec // small
				if err := db.Set(keyOf(key[:0], k), value, pebble.Sync); err != nil {
					failed.Store(&err)
					return
				}
				count.Add(1)
			}
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		return 0, fmt.Errorf("bare harness: %w", *err)
	}
	return float64(count.Load()) / time.Since(begin).Seconds(), nil
}

// bareServer is the least that a server with group commit can be: it answers a frame once its content is synced, and
// one sync serves all that came during the one before. It has no index, no replicas and no rules.
type bareServer struct {
	db *pebble.DB
	wg sync.WaitGroup

	mu      sync.Mutex
	pending []bareRequest
	kick    chan struct{} // 1: something is pending
}

type bareRequest struct {
	conn    *bareConn
	header  protocol.Header
	payload [bareValue]byte
}

// bareConn gathers the answers of a connection.
type bareConn struct {
	net.Conn

	out []byte
}

// commit syncs what is pending, and answers it, until ctx is over.
func (s *bareServer) commit(ctx context.Context) {
	seq := uint64(0)
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.kick:
		}
		s.mu.Lock()
		group := s.pending
		s.pending = nil
		s.mu.Unlock()
		batch := s.db.NewBatch()
		var key []byte
		for i := range group {
			seq++
			key = keyOf(key[:0], seq)
			if err := batch.Set(key, group[i].payload[:], nil); err != nil {
				return
			}
		}
		if batch.Commit(pebble.Sync) != nil {
			return
		}
		conns := map[*bareConn]struct{}{}
		for i := range group {
			c := group[i].conn
			buf, mark := protocol.BeginReply(c.out, group[i].header)
			c.out = protocol.EndFrame(buf, mark)
			conns[c] = struct{}{}
		}
		for c := range conns {
			if _, err := c.Write(c.out); err != nil {
				return
			}
			c.out = c.out[:0]
		}
	}
}

// serve reads the frames of one connection.
func (s *bareServer) serve(nc net.Conn) {
	c := &bareConn{Conn: nc}
	r := protocol.NewReader(nc)
	for {
		h, payload, err := r.Next()
		if err != nil {
			return // the client is done
		}
		q := bareRequest{conn: c, header: h}
		copy(q.payload[:], payload)
		s.mu.Lock()
		s.pending = append(s.pending, q)
		s.mu.Unlock()
		if !r.Buffered() {
			select {
			case s.kick <- struct{}{}:
			default:
			}
		}
	}
}

// bareRate is the bare harness over sockets: a bareServer under the same load as REGISTER.
func (b *bench) bareRate(each time.Duration) (_ float64, err error) {
	db, remove, err := b.openBare()
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, remove()) }()
	listener, err := (&net.ListenConfig{}).Listen(b.ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("bare harness: %w", err)
	}
	s := &bareServer{db: db, kick: make(chan struct{}, 1)}
	ctx, cancel := context.WithCancel(b.ctx)
	defer s.wg.Wait()
	defer cancel()
	defer listener.Close() //nolint:errcheck // nothing is lost
	s.wg.Go(func() { s.commit(ctx) })
	s.wg.Go(func() {
		for {
			nc, err := listener.Accept()
			if err != nil {
				return // closed above
			}
			s.wg.Go(func() { s.serve(nc) })
		}
	})
	conns, err := dialMany(b.ctx, "tcp", listener.Addr().String(), connections)
	if err != nil {
		return 0, err
	}
	defer closeAll(conns)
	payload := make([]byte, bareValue)
	o, err := driveAll(conns, inFlight/connections, each, func(int) builder {
		return func(buf []byte, wire uint32) ([]byte, bool) {
			buf, mark := protocol.BeginFrame(buf, protocol.TypeRegister, wire)
			return protocol.EndFrame(append(buf, payload...), mark), true
		}
	}, nil)
	if err != nil {
		return 0, err
	}
	return o.rate(), nil
}
