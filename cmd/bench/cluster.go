package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"larder/internal/freeport"
	"larder/protocol"
	"larder/server"
)

// Waits of a run.
const (
	readyWait = 2 * time.Minute // for a server to serve: a restart with ten million entries takes seconds
	readyPoll = 5 * time.Millisecond
	stopWait  = 30 * time.Second
)

// node is one server of the run.
type node struct {
	*server.Server

	cfg server.Config
}

// config makes a server's configuration in a directory of its own. The pool lies on the disk unless shm is set: figures
// of the index touch none of its bytes, and files may be larger than memory.
func (b *bench) config(name string, pool server.Size, shm bool) (server.Config, error) {
	cfg := server.Default()
	cfg.DataDir = filepath.Join(b.Dir, name)
	cfg.Listen, cfg.PeerListen, cfg.AdminListen = "127.0.0.1:0", "127.0.0.1:0", server.Off
	cfg.ClusterName = "bench"
	cfg.SessionTTL = 10 * time.Minute // the lean clients send no heartbeats
	cfg.LogLevel = "warn"
	device := server.DeviceConfig{Path: filepath.Join(b.Dir, name+".pool"), Size: pool}
	if shm {
		device.Path = filepath.Join("/dev/shm", filepath.Base(b.Dir)+"-"+name+".pool")
	}
	cfg.Pool = []server.DeviceConfig{device}
	if err := cfg.Complete(); err != nil {
		return cfg, err //nolint:wrapcheck // says all
	}
	return cfg, cfg.Validate() //nolint:wrapcheck // says all
}

// start starts a server and waits until it leads or follows.
func (b *bench) start(cfg server.Config) (*node, error) {
	s, err := server.Start(cfg, b.Logger)
	if err != nil {
		return nil, fmt.Errorf("start: %w", err)
	}
	return &node{s, cfg}, nil
}

// single starts a cluster of one and waits until it serves.
func (b *bench) single(name string, pool server.Size, shm bool, change func(*server.Config)) (*node, error) {
	cfg, err := b.config(name, pool, shm)
	if err != nil {
		return nil, err
	}
	if change != nil {
		change(&cfg)
	}
	n, err := b.start(cfg)
	if err != nil {
		return nil, err
	}
	if _, err := waitServing(b.ctx, n); err != nil {
		return nil, errors.Join(err, n.remove())
	}
	return n, nil
}

// stop stops the server and leaves its files.
func (n *node) stop() error {
	// The run's own context may have ended: this one is for the way out.
	ctx, cancel := context.WithTimeout(context.Background(), stopWait)
	defer cancel()
	if err := n.Stop(ctx); err != nil {
		return fmt.Errorf("stop: %w", err)
	}
	return nil
}

// remove stops the server and deletes its files.
func (n *node) remove() error {
	err := n.stop()
	for _, d := range n.cfg.Pool {
		err = errors.Join(err, os.RemoveAll(d.Path))
	}
	return errors.Join(err, os.RemoveAll(n.cfg.DataDir))
}

// waitServing waits until one of the nodes leads and answers.
func waitServing(ctx context.Context, nodes ...*node) (*node, error) {
	for begin := time.Now(); time.Since(begin) < readyWait; {
		for _, n := range nodes {
			if s := n.Status(); s.Serving && s.GraceMS <= 0 {
				return n, nil
			}
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for a leader: %w", ctx.Err())
		case <-time.After(readyPoll):
		}
	}
	return nil, fmt.Errorf("no server serves after %v", readyWait)
}

// three starts a cluster of three in this process and returns its leader first.
func (b *bench) three(pool server.Size) ([]*node, error) {
	const members = 3
	configs := make([]server.Config, members)
	var peers []server.PeerConfig
	for i := range configs {
		cfg, err := b.config(fmt.Sprintf("replica%d", i+1), pool, false)
		if err != nil {
			return nil, err
		}
		cfg.NodeID = uint64(i + 1)
		for _, addr := range []*string{&cfg.Listen, &cfg.PeerListen} {
			if *addr, err = freeport.Addr(); err != nil {
				return nil, err
			}
		}
		cfg.Advertise, cfg.PeerAdvertise = cfg.Listen, cfg.PeerListen
		cfg.Pool = configs[0].Pool // one device that all of them reach, as CXL memory is
		if i == 0 {
			cfg.Pool = []server.DeviceConfig{{Path: filepath.Join(b.Dir, "replicas.pool"), Size: pool, Tier: "cxl", Coherence: "hardware"}}
		}
		configs[i] = cfg
		peers = append(peers, server.PeerConfig{ID: cfg.NodeID, Addr: cfg.PeerListen, Client: cfg.Listen, Admin: "127.0.0.1:0"})
	}
	var nodes []*node
	for i := range configs {
		configs[i].Peers = peers
		n, err := b.start(configs[i])
		if err != nil {
			return nil, errors.Join(err, removeAll(nodes))
		}
		nodes = append(nodes, n)
	}
	leader, err := waitServing(b.ctx, nodes...)
	if err != nil {
		return nil, errors.Join(err, removeAll(nodes))
	}
	ordered := []*node{leader}
	for _, n := range nodes {
		if n != leader {
			ordered = append(ordered, n)
		}
	}
	return ordered, nil
}

// removeAll removes nodes, the followers first, so that leadership does not move.
func removeAll(nodes []*node) error {
	var err error
	for _, n := range slices.Backward(nodes) {
		err = errors.Join(err, n.remove())
	}
	return err
}

// keyOf makes the 32-byte key number i, spread like a hash.
func keyOf(dst []byte, i uint64) []byte {
	const digits = "0123456789abcdef"
	x := i * 0x9E3779B97F4A7C15 // Fibonacci hashing: odd, so that no two keys meet
	for range 2 {
		for shift := 60; shift >= 0; shift -= 4 {
			dst = append(dst, digits[x>>shift&15])
		}
		x = x*0xD6E8FEB86659FD93 + i // the second half does not repeat the first
	}
	return dst
}

// load registers the keys from up to to, spread over sessions in batches, and returns how many and what it took. It
// stops when time is up, if each is not 0.
func (b *bench) load(sessions []*session, depth, batch int, from, to uint64, each time.Duration) (entries uint64, _ *outcome, _ error) {
	if each == 0 {
		each = time.Hour
	}
	conns := make([]net.Conn, len(sessions))
	loaders := make([]*loader, len(sessions))
	for i, s := range sessions {
		conns[i] = s.conn
		loaders[i] = newLoader(s, batch, from+uint64(i), uint64(len(sessions)), to)
	}
	o, err := driveAll(conns, depth, each,
		func(i int) builder { return loaders[i].build },
		func(i int) checker { return loaders[i].check })
	for _, l := range loaders {
		entries += l.registered
	}
	return entries, o, err
}

// loader registers every stride-th key from next up to end in one session.
type loader struct {
	s                 *session
	typ               protocol.Type
	batch             int
	next, stride, end uint64
	registered        uint64
	keys              []byte
	req               protocol.RegisterRequest
	reply             protocol.RegisterReply
}

// newLoader makes a loader.
func newLoader(s *session, batch int, next, stride, end uint64) *loader {
	l := &loader{s: s, typ: protocol.TypeBatchRegister, batch: batch, next: next, stride: stride, end: end}
	if batch == 1 {
		l.typ = protocol.TypeRegister
	}
	l.keys = make([]byte, 0, 32*batch)
	l.req.Entries = make([]protocol.RegisterEntry, 0, batch)
	return l
}

// build appends the next request; none when the keys or the region's pages have run out.
func (l *loader) build(buf []byte, wire uint32) ([]byte, bool) {
	l.keys, l.req.Entries = l.keys[:0], l.req.Entries[:0]
	for len(l.req.Entries) < l.batch && l.next < l.end {
		var e protocol.RegisterEntry
		if !l.s.place(&e) {
			break
		}
		at := len(l.keys)
		l.keys = keyOf(l.keys, l.next)
		e.Key = l.keys[at:]
		l.req.Entries = append(l.req.Entries, e)
		l.next += l.stride
	}
	if len(l.req.Entries) == 0 {
		return buf, false
	}
	l.registered += uint64(len(l.req.Entries))
	l.req.Mutation = l.s.mutation(wire)
	buf, mark := protocol.BeginFrame(buf, l.typ, wire)
	return protocol.EndFrame(l.req.AppendAs(buf, l.typ), mark), true
}

// check makes sure that every entry was new.
func (l *loader) check(h protocol.Header, payload []byte) error {
	l.s.answer(h.Sequence)
	if err := l.reply.DecodeAs(payload, l.typ); err != nil {
		return fmt.Errorf("register: %w", err)
	}
	if err := l.reply.Err(); err != nil {
		return fmt.Errorf("register: %w", err)
	}
	for k := range l.reply.Results {
		if !l.reply.Results[k].IsNew {
			return fmt.Errorf("register: entry %d is not new: %v", k, l.reply.Results[k].Code)
		}
	}
	return nil
}

// sessions opens a wire-level session with a region on each connection.
func (b *bench) sessions(n *node, size uint64) ([]*session, error) {
	network, address := splitAddress(n.Addr())
	list := make([]*session, 0, connections)
	for i := range connections {
		s, err := openSession(b.ctx, network, address, fmt.Sprintf("bench-%d", i), page, size)
		if err != nil {
			hangUp(list)
			return nil, err
		}
		list = append(list, s)
	}
	return list, nil
}

// hangUp closes the connections of sessions.
func hangUp(list []*session) {
	for _, s := range list {
		s.conn.Close() //nolint:errcheck,gosec // nothing is lost
	}
}
