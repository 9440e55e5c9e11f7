package link

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/zeebo/xxh3"

	"larder/pg/shm"
	"larder/transfer"
)

// loopback takes a free port of this host.
const loopback = "127.0.0.1:0"

// events takes down what a node hears of others.
type events struct {
	mu   sync.Mutex
	list []string
	errs []error
}

func (e *events) add(what string, rank int, incarnation uint64, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = append(e.list, fmt.Sprintf("%s %d/%d", what, rank, incarnation))
	e.errs = append(e.errs, err)
}

func (e *events) all() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]string(nil), e.list...)
}

func (e *events) lastErr() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.errs[len(e.errs)-1]
}

// node makes a node that is closed with the test. Its incarnation is its rank plus 100 unless the config names one.
func node(tb testing.TB, cfg Config) (*Node, *events) {
	tb.Helper()
	heard := &events{}
	if cfg.Job == "" {
		cfg.Job = tb.Name()
	}
	if cfg.Incarnation == 0 {
		cfg.Incarnation = uint64(cfg.Rank) + 100
	}
	cfg.Up = func(rank int, incarnation uint64) { heard.add("up", rank, incarnation, nil) }
	cfg.Down = func(rank int, incarnation uint64, err error) { heard.add("down", rank, incarnation, err) }
	n, err := New(cfg)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, n.Close()) })
	return n, heard
}

func peerOf(n *Node) Peer {
	return Peer{Rank: n.cfg.Rank, Incarnation: n.cfg.Incarnation, Address: n.Address()}
}

// connect connects all nodes with each other.
func connect(tb testing.TB, nodes ...*Node) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for _, n := range nodes {
		for _, to := range nodes {
			if n != to {
				wg.Go(func() {
					if err := n.Connect(ctx, peerOf(to)); err != nil {
						tb.Error(err)
					}
				})
			}
		}
	}
	wg.Wait()
	require.False(tb, tb.Failed())
}

// transportKind is a way for lanes between two nodes of this process, and the configurations that have it taken.
type transportKind struct {
	name string
	cfg  func(tb testing.TB, rank int) Config
}

// transportKinds are all of them. Hosts differ where they would share memory.
var transportKinds = []transportKind{
	{TransportShm, func(testing.TB, int) Config { return Config{} }},
	{TransportUnix, func(_ testing.TB, rank int) Config { return Config{Host: fmt.Sprint("host ", rank)} }},
	{TransportTCP, func(_ testing.TB, rank int) Config {
		return Config{Host: fmt.Sprint("host ", rank), Transports: []string{TransportShm, TransportTCP}, Listen: []string{loopback}}
	}},
	{TransportEngine, func(tb testing.TB, _ int) Config {
		tb.Helper()
		e, err := transfer.New(transfer.Config{Listen: []string{loopback}, Topology: &transfer.Topology{}})
		require.NoError(tb, err)
		tb.Cleanup(func() { require.NoError(tb, e.Close()) })
		return Config{Transports: []string{TransportEngine}, Engine: e}
	}},
}

// nodesOver makes nodes whose lanes go by a transport, and connects them.
func nodesOver(tb testing.TB, kind transportKind, count int) []*Node {
	tb.Helper()
	var nodes []*Node
	for rank := range count {
		cfg := kind.cfg(tb, rank)
		cfg.Rank = rank
		n, _ := node(tb, cfg)
		nodes = append(nodes, n)
	}
	connect(tb, nodes...)
	return nodes
}

func members(nodes ...*Node) (list []Member) {
	for _, n := range nodes {
		list = append(list, Member{n.cfg.Rank, n.cfg.Incarnation})
	}
	return list
}

// small is a layout that costs little.
var small = shm.Layout{Tracks: 2, Slots: 4, SlotBytes: 4 << 10}

// meshOf has all nodes build a mesh.
func meshOf(tb testing.TB, group string, epoch uint64, nodes ...*Node) []*Mesh {
	tb.Helper()
	meshes, errs := meshes(context.Background(), group, epoch, nodes...)
	require.NoError(tb, errors.Join(errs...))
	return meshes
}

func meshes(ctx context.Context, group string, epoch uint64, nodes ...*Node) ([]*Mesh, []error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	out, errs := make([]*Mesh, len(nodes)), make([]error, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() {
			out[i], errs[i] = n.Mesh(ctx, MeshConfig{Group: group, Epoch: epoch, Me: i, Members: members(nodes...), Layout: small})
		})
	}
	wg.Wait()
	return out, errs
}

func closeAll(tb testing.TB, meshes ...*Mesh) {
	tb.Helper()
	for _, m := range meshes {
		require.NoError(tb, m.Close())
	}
}

// wait is how long a test waits for what should be soon.
const wait = 20 * time.Second

// send writes all of b into a ring, as room comes.
func send(bell *shm.Bell, p *shm.Producer, b []byte) error {
	for len(b) > 0 {
		var free []byte
		if !bell.Wait(func() bool { free = p.Free(); return len(free) > 0 || p.Err() != nil }, 0, wait) {
			return errors.New("no room comes")
		}
		if err := p.Err(); err != nil {
			return err
		}
		n := copy(free, b)
		p.Commit(n)
		b = b[n:]
	}
	return nil
}

// receive reads until b is full.
func receive(bell *shm.Bell, c *shm.Consumer, b []byte) error {
	for len(b) > 0 {
		var ready []byte
		if !bell.Wait(func() bool { ready = c.Ready(); return len(ready) > 0 || c.Err() != nil }, 0, wait) {
			return errors.New("nothing comes")
		}
		if len(ready) == 0 {
			return c.Err()
		}
		n := copy(b, ready)
		c.Consume(n)
		b = b[n:]
	}
	return nil
}

// stream writes or reads random pieces of a stream that ends with its sum.
func writeRandom(bell *shm.Bell, p *shm.Producer, seed uint64, bytes int) error {
	rnd, h := rand.New(rand.NewPCG(seed, 1)), xxh3.New()
	for bytes > 0 {
		piece := make([]byte, min(bytes, 1+rnd.IntN(1<<rnd.IntN(18))))
		for i := 0; i+8 <= len(piece); i += 8 {
			binary.LittleEndian.PutUint64(piece[i:], rnd.Uint64())
		}
		_, _ = h.Write(piece)
		if err := send(bell, p, piece); err != nil {
			return err
		}
		bytes -= len(piece)
	}
	return send(bell, p, h.Sum(nil))
}

func readRandom(bell *shm.Bell, c *shm.Consumer, seed uint64, bytes int) error {
	rnd, h := rand.New(rand.NewPCG(seed, 2)), xxh3.New()
	for bytes > 0 {
		piece := make([]byte, min(bytes, 1+rnd.IntN(1<<rnd.IntN(18))))
		if err := receive(bell, c, piece); err != nil {
			return err
		}
		_, _ = h.Write(piece)
		bytes -= len(piece)
	}
	sum := make([]byte, 8)
	if err := receive(bell, c, sum); err != nil {
		return err
	}
	if string(sum) != string(h.Sum(nil)) {
		return io.ErrUnexpectedEOF
	}
	return nil
}
