package client

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
	"larder/transfer"
)

// fakeHost is the host of a fake's own device.
const fakeHost = "here"

// fakeNode is a node of a fake's pool: a device whose bytes are memory of a transfer engine, which clients reach by
// transfer alone.
type fakeNode struct {
	f      *fake
	id     uint64
	name   string
	tier   string
	gen    uint64
	engine *transfer.Engine
	mem    []byte
	read   *transfer.Buffer
	next   uint64 // offset of free space
	grants map[uint64]*transfer.Buffer
	proxy  *proxy
	first  bool // regions come from here before the fake's own device
	hidden bool // the master does not know how to reach it
}

// addNode adds a node with a device of size bytes to a fake.
func (f *fake) addNode(tb testing.TB, tier string, size int) *fakeNode {
	tb.Helper()
	n := &fakeNode{
		f: f, id: uint64(len(f.nodes) + 2), tier: tier, gen: 100, mem: make([]byte, size), grants: map[uint64]*transfer.Buffer{},
	}
	n.name = fmt.Sprint("node-", n.id)
	n.start(tb)
	tb.Cleanup(func() {
		if n.proxy != nil {
			n.proxy.thaw()
			n.proxy.close()
		}
		_ = n.engine.Close()
	})
	f.do(func() { f.nodes = append(f.nodes, n) })
	return n
}

// start starts a node's engine, again after stop.
func (n *fakeNode) start(tb testing.TB) {
	tb.Helper()
	e, err := transfer.New(transfer.Config{
		Name: n.name, Listen: []string{"127.0.0.1:0"}, Transports: []string{transfer.TransportTCP},
		StallTimeout: 300 * time.Millisecond, AbortTimeout: 300 * time.Millisecond,
	})
	require.NoError(tb, err)
	n.engine = e
	n.read, err = e.Register(n.mem, transfer.BufferOptions{Name: "device", ReadOnly: true})
	require.NoError(tb, err)
}

// endpoint says how a buffer of the node is reached.
func (n *fakeNode) endpoint(b *transfer.Buffer, offset uint64) *protocol.Endpoint {
	d := n.engine.Describe()
	if n.proxy != nil {
		d.Rails = []string{n.proxy.ln.Addr().String()}
	}
	h := b.Info().Handle
	return &protocol.Endpoint{
		Engine: d.Engine, Rails: d.Rails, Buffer: uint64(h.ID), BufferGeneration: h.Generation, Offset: offset,
		Storage: n.tier == "ssd",
	}
}

func (n *fakeNode) device() protocol.Device {
	d := protocol.Device{
		ID: n.id, UUID: hex.EncodeToString(append([]byte{byte(n.id)}, make([]byte, 15)...)), Tier: n.tier,
		Size: uint64(len(n.mem)), Generation: n.gen, Node: n.name,
	}
	if !n.hidden {
		d.Endpoint = n.endpoint(n.read, 0)
	}
	return d
}

// give gives a region of the node's device.
func (n *fakeNode) give(size, pageSize uint64) protocol.Region {
	n.f.ids++
	r := protocol.Region{
		Handle: protocol.Handle{RegionID: n.f.ids, Offset: n.next, Length: size}, Device: n.id, Generation: n.gen, Epoch: 1,
		PageSize: pageSize,
	}
	n.next += size
	return r
}

// pick chooses the node that a region comes from; nil for the fake's own device.
func (f *fake) pick(r *protocol.AllocRequest) *fakeNode {
	best, score := (*fakeNode)(nil), 0
	switch {
	case r.Device > 1 || f.next+r.Size > f.size:
		score = -100
	case slices.Contains(r.Avoid, fakeHost):
		score = -10
	}
	for _, n := range f.nodes {
		s := -1
		switch {
		case n.next+r.Size > uint64(len(n.mem)), r.Device != 0 && r.Device != n.id, r.Promote && n.tier == slowTier:
			continue
		case slices.Contains(r.Avoid, n.name) || slices.Contains(r.Avoid, fmt.Sprint("#", n.id)):
			s = -20
		case n.first, r.Tier == n.tier:
			s = 10
		}
		if s > score {
			best, score = n, s
		}
	}
	return best
}

// access lets the owner of a region write to it.
func (f *fake) access(cn *fakeConn, r *protocol.AccessRequest) []byte {
	reg := f.regions[r.RegionID]
	if reg == nil || reg.owner != cn.sess || reg.Epoch != r.Epoch {
		return protocol.AppendErrorReply(nil, &protocol.Error{Code: protocol.CodeNotOwner})
	}
	n := f.nodes[reg.Device-2]
	b, err := n.engine.Register(n.mem[reg.Offset:reg.Offset+reg.Length], transfer.BufferOptions{})
	require.NoError(f.t, err)
	n.grants[reg.RegionID] = b
	return (&protocol.AccessReply{Endpoint: *n.endpoint(b, reg.Offset)}).Append(nil)
}

// forget has the node retire all of its buffers and register its memory anew, as one that was started again does.
func (n *fakeNode) forget(tb testing.TB) {
	tb.Helper()
	n.f.mu.Lock()
	defer n.f.mu.Unlock()
	require.NoError(tb, n.read.Retire(context.Background()))
	for id, b := range n.grants {
		require.NoError(tb, b.Retire(context.Background()))
		delete(n.grants, id)
	}
	var err error
	n.read, err = n.engine.Register(n.mem, transfer.BufferOptions{Name: "device", ReadOnly: true})
	require.NoError(tb, err)
}

// lay lays an entry on the node's device, as another client would.
func (n *fakeNode) lay(key string, b []byte, sum uint64) *fakeEntry {
	f := n.f
	f.mu.Lock()
	defer f.mu.Unlock()
	reg := n.give((uint64(len(b))+4095)/4096*4096, 4096)
	f.regions[reg.RegionID] = &fakeRegion{Region: reg}
	copy(n.mem[reg.Offset:], b)
	loc := protocol.Location{Region: reg, KVLength: uint64(len(b)), Checksum: sum}
	if e := f.entries[key]; e != nil {
		x := e.Value.(*fakeEntry)
		x.copies = append(x.copies, loc)
		return x
	}
	f.ids++
	x := &fakeEntry{key: key, loc: loc, leased: map[uint64]time.Time{}, version: f.ids}
	f.entries[key] = f.order.PushBack(x)
	return x
}

// proxy carries connections to a node, and can stop to, without ending them.
type proxy struct {
	ln   net.Listener
	to   string
	wg   sync.WaitGroup
	mu   sync.Mutex
	wait chan struct{} // closed when nothing is frozen
	open []net.Conn
	held atomic.Int64 // pieces of what was sent that were held up
}

// behindProxy has clients reach the node through a proxy.
func (n *fakeNode) behindProxy(tb testing.TB) *proxy {
	tb.Helper()
	ln, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	p := &proxy{ln: ln, to: n.engine.Addresses()[0], wait: make(chan struct{})}
	close(p.wait)
	n.f.do(func() { n.proxy = p })
	p.wg.Go(func() {
		for {
			a, err := ln.Accept()
			if err != nil {
				return
			}
			b, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", p.to)
			if err != nil {
				_ = a.Close()
				continue
			}
			p.mu.Lock()
			p.open = append(p.open, a, b)
			p.mu.Unlock()
			p.wg.Go(func() { p.carry(a, b) })
			p.wg.Go(func() { p.carry(b, a) })
		}
	})
	return p
}

func (p *proxy) carry(from, to net.Conn) {
	defer func() { _, _ = from.Close(), to.Close() }()
	buf := make([]byte, 16<<10)
	for {
		n, err := from.Read(buf)
		p.mu.Lock()
		wait := p.wait
		p.mu.Unlock()
		select {
		case <-wait:
		default:
			p.held.Add(1)
			<-wait
		}
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				return
			}
			_ = to.(*net.TCPConn).CloseWrite()
			return
		}
	}
}

func (p *proxy) freeze() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.wait = make(chan struct{})
}

func (p *proxy) thaw() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.wait:
	default:
		close(p.wait)
	}
}

func (p *proxy) close() {
	_ = p.ln.Close()
	p.mu.Lock()
	for _, c := range p.open {
		_ = c.Close()
	}
	p.mu.Unlock()
	p.wg.Wait()
}

// inherit gives a home's session the regions of those before it, under new epochs.
func (f *fake) inherit(s *fakeSession) {
	for _, reg := range f.regions {
		if reg.owner != nil {
			reg.owner = s
			reg.Epoch++
		}
	}
	for _, e := range f.entries {
		e.Value.(*fakeEntry).owner = s
	}
}

// registerCopy adds a location to an entry.
func (f *fake) registerCopy(cn *fakeConn, en *protocol.RegisterEntry) protocol.Code {
	e, reg := f.entries[string(en.Key)], f.regions[en.RegionID]
	switch {
	case reg == nil || reg.owner != cn.sess:
		return protocol.CodeNotOwner
	case reg.Epoch != en.Epoch:
		return protocol.CodeStaleEpoch
	case e == nil:
		return protocol.CodeNotFound
	}
	x := e.Value.(*fakeEntry)
	switch {
	case en.Of == 0 && x.version <= f.bornBefore || en.Of != 0 && en.Of != x.version || x.loc.KVLength != en.KVLength:
		return protocol.CodeNotFound
	case x.loc.Device == reg.Device || slices.ContainsFunc(x.copies, func(l protocol.Location) bool { return l.Device == reg.Device }):
		return protocol.CodeDuplicate
	case len(x.copies) == protocol.MaxCopies:
		return protocol.CodeLimit
	}
	loc := protocol.Location{Region: reg.Region, KVOffset: en.KVOffset, KVLength: en.KVLength, Checksum: en.Checksum}
	x.copies, x.promote = append(x.copies, loc), false
	if en.MoveFrom == x.loc.Device {
		x.loc, x.copies = loc, x.copies[:len(x.copies)-1]
	}
	return protocol.CodeOK
}

// locations are the devices where an entry lies.
func (f *fake) locations(key string) (devices []uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if e := f.entries[key]; e != nil {
		x := e.Value.(*fakeEntry)
		devices = append(devices, x.loc.Device)
		for _, l := range x.copies {
			devices = append(devices, l.Device)
		}
	}
	return devices
}
