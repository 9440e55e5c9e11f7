package client

import (
	"container/list"
	"context"
	"encoding/hex"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/cxl"
	"larder/protocol"
)

// fake is a pool with one or more masters in this process: enough of a server's semantics, on a real device file, to
// break the client against. Tests script it through before and after.
type fake struct {
	t      testing.TB
	dir    string
	path   string
	device *cxl.Device

	mu       sync.Mutex
	leader   int
	masters  []*fakeMaster
	gen      uint64
	next     uint64 // offset of free space
	size     uint64
	ids      uint64
	limit    int // regions per session; 0 = no limit
	ttlMS    uint64
	leaseMS  uint64
	features uint64 // that it has
	restMS   uint64 // free_after_ms of what is evicted or deleted
	sessions map[uint64]*fakeSession
	regions  map[uint64]*fakeRegion
	entries  map[string]*list.Element // of *fakeEntry
	order    *list.List               // coldest first
	leases   map[uint64]*fakeEntry
	seen     []seen
	nodes    []*fakeNode
	answers  map[protocol.Type]func(p []byte) []byte // of what it does not carry out itself
	returned []uint64                                // regions given back

	bornBefore uint64 // the last version before the REGISTER that is being carried out

	// before runs under mu before a request is carried out: it may answer in its place.
	before func(cn *fakeConn, h protocol.Header, payload []byte) *protocol.Error
	// after runs under mu when it has been: false drops the connection in place of the reply.
	after func(cn *fakeConn, h protocol.Header) bool
}

type seen struct {
	typ     protocol.Type
	payload []byte
	packed  bool // it came compressed
}

type fakeSession struct {
	id, secret uint64
	replies    map[uint64][]byte
	canceled   map[uint64]bool
	conn       *fakeConn
	ended      bool
}

type fakeRegion struct {
	protocol.Region
	owner *fakeSession
}

type fakeEntry struct {
	key    string
	loc    protocol.Location
	owner  *fakeSession
	leased map[uint64]time.Time // until when

	version uint64
	copies  []protocol.Location
	promote bool
}

func (x *fakeEntry) busy() bool {
	for _, until := range x.leased {
		if time.Now().Before(until) {
			return true
		}
	}
	return false
}

type fakeMaster struct {
	f    *fake
	id   int
	addr string
	ln   net.Listener
	wg   sync.WaitGroup
	mu   sync.Mutex
	open map[net.Conn]bool
}

type fakeConn struct {
	m    *fakeMaster
	nc   net.Conn
	wmu  sync.Mutex
	sess *fakeSession
}

// newFake starts masters over a fresh device of size bytes of data.
func newFake(tb testing.TB, size uint64, masters int) *fake {
	tb.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "larder-client-")
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, os.RemoveAll(dir)) })
	f := &fake{
		t: tb, dir: dir, path: filepath.Join(dir, "pool"), gen: 77, next: cxl.HeaderSpan, size: size + cxl.HeaderSpan,
		ttlMS: 3000, leaseMS: 500, sessions: map[uint64]*fakeSession{}, regions: map[uint64]*fakeRegion{},
		entries: map[string]*list.Element{}, order: list.New(), leases: map[uint64]*fakeEntry{},
	}
	f.format()
	for i := range masters {
		f.startMaster(i)
	}
	tb.Cleanup(func() {
		for _, m := range f.masters {
			m.stop()
		}
		require.NoError(tb, f.device.Close())
	})
	return f
}

func (f *fake) format() {
	t := f.t
	t.Helper()
	opts := cxl.Options{DeviceID: 1, Generation: f.gen, Incarnation: 1, Size: int64(f.size), Coherence: cxl.CoherenceHardware}
	opts.Pool[0], opts.Device[0] = 1, 2
	require.NoError(t, cxl.Format(f.path, opts))
	dev, err := cxl.Open(f.path, cxl.Expect{Claim: true})
	require.NoError(t, err)
	require.NoError(t, dev.SetGeneration(f.gen, 1))
	f.device = dev
}

func (f *fake) startMaster(i int) {
	m := &fakeMaster{f: f, id: i, addr: filepath.Join(f.dir, "master"+string(rune('0'+i))), open: map[net.Conn]bool{}}
	ln, err := (&net.ListenConfig{}).Listen(context.Background(), "unix", m.addr)
	require.NoError(f.t, err)
	m.ln = ln
	f.masters = append(f.masters, m)
	m.wg.Add(1)
	go m.accept()
}

func (m *fakeMaster) accept() {
	defer m.wg.Done()
	for {
		nc, err := m.ln.Accept()
		if err != nil {
			return
		}
		m.mu.Lock()
		m.open[nc] = true
		m.mu.Unlock()
		m.wg.Go(func() {
			cn := &fakeConn{m: m, nc: nc}
			r := protocol.NewReader(nc)
			for {
				h, p, err := r.Next()
				if err != nil || !cn.serve(h, slices.Clone(p)) {
					break
				}
			}
			_ = nc.Close()
			m.mu.Lock()
			delete(m.open, nc)
			m.mu.Unlock()
		})
	}
}

// cut closes every connection of the master.
func (m *fakeMaster) cut() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for nc := range m.open {
		_ = nc.Close()
	}
}

func (m *fakeMaster) stop() {
	_ = m.ln.Close()
	m.cut()
	m.wg.Wait()
}

func (f *fake) addrs() (all []string) {
	for _, m := range f.masters {
		all = append(all, unixScheme+m.addr)
	}
	return all
}

// do runs g under the fake's lock.
func (f *fake) do(g func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	g()
}

// count says how many requests of a type have come.
func (f *fake) count(typ protocol.Type) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.seen {
		if s.typ == typ {
			n++
		}
	}
	return n
}

func (cn *fakeConn) write(typ protocol.Type, seq uint32, payload []byte) {
	b, mark := protocol.BeginFrame(nil, typ, seq)
	b = protocol.EndFrame(append(b, payload...), mark)
	cn.wmu.Lock()
	defer cn.wmu.Unlock()
	_ = cn.nc.SetWriteDeadline(time.Now().Add(time.Second))
	_, _ = cn.nc.Write(b)
}

// push sends a push to a session's connection.
func (s *fakeSession) push(typ protocol.Type, payload []byte) {
	if s.conn != nil {
		s.conn.write(typ, 0, payload)
	}
}

func (cn *fakeConn) serve(h protocol.Header, payload []byte) bool {
	f := cn.m.f
	f.mu.Lock()
	f.seen = append(f.seen, seen{h.Type, payload, h.Flags&protocol.FlagCompressed != 0})
	reply := cn.answer(h, payload)
	keep := f.after == nil || f.after(cn, h)
	f.mu.Unlock()
	if !keep {
		return false
	}
	if reply != nil {
		cn.write(h.Type.Reply(), h.Sequence, reply)
	}
	return true
}

var errSilent = &protocol.Error{Code: 9999}

// answer carries a request out, once per seq.
func (cn *fakeConn) answer(h protocol.Header, p []byte) []byte {
	f := cn.m.f
	if f.before != nil {
		if e := f.before(cn, h, p); errors.Is(e, errSilent) && e != nil {
			return nil
		} else if e != nil {
			return protocol.AppendErrorReply(nil, e)
		}
	}
	if f.leader != cn.m.id {
		e := &protocol.Error{Code: protocol.CodeNotLeader}
		if f.leader < len(f.masters) && f.leader >= 0 {
			e.Leader = unixScheme + f.masters[f.leader].addr
		}
		return protocol.AppendErrorReply(nil, e)
	}
	if h.Type == protocol.TypeHandshake {
		return f.handshake(cn, p)
	}
	if cn.sess == nil || cn.sess.ended {
		return protocol.AppendErrorReply(nil, &protocol.Error{Code: protocol.CodeSessionExpired})
	}
	var mut protocol.GoodbyeRequest
	require.NoError(f.t, mut.Decode(p))
	if mut.Seq != 0 {
		if cn.sess.canceled[mut.Seq] {
			return protocol.AppendErrorReply(nil, &protocol.Error{Code: protocol.CodeCanceled})
		}
		if old, ok := cn.sess.replies[mut.Seq]; ok {
			return old
		}
		if mut.Seq < mut.Acked || mut.Seq-mut.Acked >= protocol.Window {
			return protocol.AppendErrorReply(nil, &protocol.Error{Code: protocol.CodeTooManyUnacked})
		}
	}
	reply := f.dispatch(cn, h.Type, p)
	if mut.Seq != 0 {
		for seq := range cn.sess.replies {
			if seq < mut.Acked {
				delete(cn.sess.replies, seq)
			}
		}
		var e protocol.HeartbeatReply
		require.NoError(f.t, e.Decode(reply))
		if e.Code == protocol.CodeOK {
			cn.sess.replies[mut.Seq] = reply
		}
	}
	return reply
}

func (f *fake) dispatch(cn *fakeConn, typ protocol.Type, p []byte) []byte {
	if answer := f.answers[typ]; answer != nil {
		return answer(p)
	}
	switch typ {
	case protocol.TypeLookup, protocol.TypeBatchLookup:
		return f.lookup(typ, p)
	case protocol.TypeRequestAlloc:
		return f.alloc(cn, p)
	case protocol.TypeRegister, protocol.TypeBatchRegister:
		return f.register(cn, typ, p)
	case protocol.TypeBatchExists, protocol.TypeBatchDelete, protocol.TypeBatchPin, protocol.TypeBatchUnpin:
		return f.keys(cn, typ, p)
	case protocol.TypeCancel:
		var r protocol.CancelRequest
		require.NoError(f.t, r.Decode(p))
		rep := protocol.CancelReply{Success: true}
		for _, seq := range r.Seqs {
			_, applied := cn.sess.replies[seq]
			if !applied {
				cn.sess.canceled[seq] = true
			}
			rep.Applied = append(rep.Applied, applied)
		}
		return rep.Append(nil)
	case protocol.TypeRenew:
		var r protocol.LeasesRequest
		require.NoError(f.t, r.Decode(p))
		rep := protocol.LeasesReply{Success: true}
		for _, l := range r.Leases {
			rep.Results = append(rep.Results, f.leases[l] != nil)
		}
		return rep.Append(nil)
	case protocol.TypeRelease:
		var r protocol.LeasesRequest
		require.NoError(f.t, r.Decode(p))
		f.release(r.Leases)
		return (&protocol.LeasesReply{Success: true}).Append(nil)
	case protocol.TypeRevokeDone:
		var r protocol.RevokeDoneRequest
		require.NoError(f.t, r.Decode(p))
		delete(f.regions, r.RegionID)
		return (&protocol.SuccessReply{Success: true}).Append(nil)
	case protocol.TypeAccess:
		var r protocol.AccessRequest
		require.NoError(f.t, r.Decode(p))
		return f.access(cn, &r)
	case protocol.TypeReturnAlloc:
		var r protocol.ReturnAllocRequest
		require.NoError(f.t, r.Decode(p))
		f.returned = append(f.returned, r.RegionID)
		if reg := f.regions[r.RegionID]; reg != nil {
			reg.owner = nil
		}
		return (&protocol.SuccessReply{Success: true}).Append(nil)
	case protocol.TypeClear, protocol.TypeGranted, protocol.TypeFenced:
		return (&protocol.SuccessReply{Success: true}).Append(nil)
	case protocol.TypeGoodbye:
		cn.sess.ended = true
		return (&protocol.SuccessReply{Success: true}).Append(nil)
	default:
		return protocol.AppendEmpty(nil)
	}
}

func (f *fake) handshake(cn *fakeConn, p []byte) []byte {
	var r protocol.HandshakeRequest
	require.NoError(f.t, r.Decode(p))
	s := f.sessions[r.Session]
	if r.Session != 0 && (s == nil || s.ended) {
		return protocol.AppendErrorReply(nil, &protocol.Error{Code: protocol.CodeSessionExpired})
	}
	resumed := s != nil
	if s == nil {
		f.ids++
		s = &fakeSession{id: f.ids, secret: f.ids * 7, replies: map[uint64][]byte{}, canceled: map[uint64]bool{}}
		f.sessions[s.id] = s
		if r.Features&protocol.FeatureNode != 0 {
			f.inherit(s)
		}
	}
	cn.sess, s.conn = s, cn
	rep := protocol.HandshakeReply{
		Success: true, Protocol: protocol.Version, Session: s.id, Secret: s.secret, Resumed: resumed,
		Features: r.Features & f.features,
		TTLMS:    f.ttlMS, DefaultLeaseMS: f.leaseMS, MaxLeaseMS: 1000, QuarantineMS: 20,
		Pool:    hex.EncodeToString(append([]byte{1}, make([]byte, 15)...)),
		Devices: []protocol.Device{f.own()},
	}
	for _, n := range f.nodes {
		rep.Devices = append(rep.Devices, n.device())
	}
	for i, m := range f.masters {
		rep.Members = append(rep.Members, protocol.Member{ID: uint64(i + 1), Addr: unixScheme + m.addr})
	}
	for _, reg := range f.regions {
		if reg.owner != s || !resumed && r.Features&protocol.FeatureNode == 0 {
			continue
		}
		o := protocol.OwnedRegion{Region: reg.Region}
		for e := f.order.Front(); e != nil; e = e.Next() {
			if x := e.Value.(*fakeEntry); x.loc.RegionID == reg.RegionID {
				o.Occupied = append(o.Occupied, x.loc.KVOffset, x.loc.KVLength)
			}
		}
		rep.Regions = append(rep.Regions, o)
	}
	return rep.Append(nil)
}

// own describes the fake's own device.
func (f *fake) own() protocol.Device {
	return protocol.Device{
		ID: 1, Path: f.path, UUID: hex.EncodeToString(append([]byte{2}, make([]byte, 15)...)), Size: f.size,
		Generation: f.gen, Node: fakeHost,
	}
}

func (f *fake) lookup(typ protocol.Type, p []byte) []byte {
	var r protocol.LookupRequest
	require.NoError(f.t, r.DecodeAs(p, typ))
	f.release(r.Release)
	var rep protocol.LookupReply
	for _, k := range r.Keys {
		var res protocol.LookupResult
		if e := f.entries[string(k)]; e != nil {
			f.order.MoveToBack(e)
			x := e.Value.(*fakeEntry)
			f.ids++
			f.leases[f.ids] = x
			x.leased[f.ids] = time.Now().Add(time.Second)
			res = protocol.LookupResult{Found: true, Location: x.loc, Lease: f.ids, LeaseMS: f.leaseMS}
			if f.features&protocol.FeatureCopies != 0 {
				res.Copies, res.Promote = x.copies, x.promote
			}
			if len(res.Copies) > 0 || res.Promote {
				res.Version = x.version
			}
			if r.LeaseMS > 0 {
				res.LeaseMS = min(r.LeaseMS, 1000)
			}
		}
		if !res.Found && r.StopAtMiss {
			break
		}
		rep.Results = append(rep.Results, res)
	}
	if r.Packed {
		return rep.AppendPacked(nil)
	}
	return rep.AppendAs(nil, typ)
}

func (f *fake) release(leases []uint64) {
	for _, l := range leases {
		if x := f.leases[l]; x != nil {
			delete(x.leased, l)
			delete(f.leases, l)
		}
	}
}

// drop removes an entry and tells where it lay.
func (f *fake) drop(e *list.Element) protocol.Page {
	x := e.Value.(*fakeEntry)
	f.order.Remove(e)
	delete(f.entries, x.key)
	return protocol.Page{
		Key: []byte(x.key), RegionID: x.loc.RegionID, KVOffset: x.loc.KVOffset, KVLength: x.loc.KVLength,
		FreeAfterMS: f.restMS,
	}
}

func (f *fake) alloc(cn *fakeConn, p []byte) []byte {
	var r protocol.AllocRequest
	require.NoError(f.t, r.Decode(p))
	rep := protocol.AllocReply{Success: true}
	short := int(r.NeedPages)
	if len(r.Keys) > 0 {
		missing := 0
		for _, k := range r.Keys {
			_, ok := f.entries[string(k)]
			rep.Found = append(rep.Found, ok)
			if ok {
				f.order.MoveToBack(f.entries[string(k)])
			} else {
				missing++
			}
		}
		short = missing*int(max(r.RunPages, 1)) - int(r.FreePages)
	}
	if short <= 0 && (r.NeedPages > 0 || len(r.Keys) > 0) {
		return rep.Append(nil)
	}
	owned := 0
	for _, reg := range f.regions {
		if reg.owner == cn.sess {
			owned++
		}
	}
	if n := f.pick(&r); n != nil && (f.limit == 0 || owned < f.limit) {
		info := n.device()
		rep.Region, rep.Device = n.give(r.Size, r.PageSize), &info
		f.regions[rep.Region.RegionID] = &fakeRegion{Region: rep.Region, owner: cn.sess}
		return rep.Append(nil)
	}
	if f.next+r.Size <= f.size && (f.limit == 0 || owned < f.limit) && (r.Device == 0 || r.Device == 1) {
		f.ids++
		rep.Region = protocol.Region{
			Handle: protocol.Handle{RegionID: f.ids, Offset: f.next, Length: r.Size}, Device: 1, Generation: f.gen,
			Epoch: 1, PageSize: r.PageSize,
		}
		own := f.own()
		rep.Device = &own
		f.next += r.Size
		f.regions[f.ids] = &fakeRegion{Region: rep.Region, owner: cn.sess}
		return rep.Append(nil)
	}
	rep.Phase = 1
	if r.Promote {
		if page, ok := f.fall(cn); ok {
			rep.Evicted = append(rep.Evicted, page)
			return rep.Append(nil)
		}
	}
	if !r.Evict {
		return protocol.AppendErrorReply(nil, &protocol.Error{Code: protocol.CodeNoSpace})
	}
	if r.Whole {
		for _, reg := range f.regions {
			if reg.owner != cn.sess || !f.empty(reg) {
				continue
			}
			reg.Epoch++
			rep.Region = reg.Region
			return rep.Append(nil)
		}
		return protocol.AppendErrorReply(nil, &protocol.Error{Code: protocol.CodePending})
	}
	leased := false
	for e := f.order.Front(); e != nil && short > 0; {
		x := e.Value.(*fakeEntry)
		n := e.Next()
		if x.owner == cn.sess && x.busy() {
			leased = true
		} else if x.owner == cn.sess {
			rep.Evicted = append(rep.Evicted, f.drop(e))
			short -= int((x.loc.KVLength + r.PageSize - 1) / r.PageSize)
		}
		e = n
	}
	switch {
	case len(rep.Evicted) > 0:
	case leased: // a master has waited for that, which passes
		return protocol.AppendErrorReply(nil, &protocol.Error{Code: protocol.CodePending})
	default:
		return protocol.AppendErrorReply(nil, &protocol.Error{Code: protocol.CodeNoSpace})
	}
	return rep.Append(nil)
}

// fall has the coldest entry of a client that has a copy leave its page.
func (f *fake) fall(cn *fakeConn) (protocol.Page, bool) {
	for e := f.order.Front(); e != nil; e = e.Next() {
		if x := e.Value.(*fakeEntry); x.owner == cn.sess && len(x.copies) > 0 && !x.busy() {
			page := protocol.Page{
				Key: []byte(x.key), RegionID: x.loc.RegionID, KVOffset: x.loc.KVOffset, KVLength: x.loc.KVLength, FreeAfterMS: f.restMS,
			}
			x.loc, x.copies = x.copies[0], x.copies[1:]
			return page, true
		}
	}
	return protocol.Page{}, false
}

// empty drops all entries of a region, unless one is leased.
func (f *fake) empty(reg *fakeRegion) bool {
	var in []*list.Element
	for e := f.order.Front(); e != nil; e = e.Next() {
		x := e.Value.(*fakeEntry)
		if x.loc.RegionID != reg.RegionID {
			continue
		}
		if x.busy() {
			return false
		}
		in = append(in, e)
	}
	for _, e := range in {
		f.drop(e)
	}
	return true
}

func (f *fake) register(cn *fakeConn, typ protocol.Type, p []byte) []byte {
	var r protocol.RegisterRequest
	require.NoError(f.t, r.DecodeAs(p, typ))
	rep := protocol.RegisterReply{Success: true}
	f.bornBefore = f.ids
	for i := range r.Entries {
		rep.Results = append(rep.Results, f.registerOne(cn, &r.Entries[i]))
	}
	return rep.AppendAs(nil, typ)
}

func (f *fake) registerOne(cn *fakeConn, en *protocol.RegisterEntry) (res protocol.RegisterResult) {
	if en.Copy {
		res.Code = f.registerCopy(cn, en)
		res.IsNew = res.Code == protocol.CodeOK
		return res
	}
	if e := f.entries[string(en.Key)]; e != nil {
		f.order.MoveToBack(e)
		res.Existing = e.Value.(*fakeEntry).loc
		return res
	}
	reg := f.regions[en.RegionID]
	switch {
	case en.Touch:
		res.Code = protocol.CodeNotFound
		return res
	case reg == nil || reg.owner != cn.sess:
		res.Code = protocol.CodeNotOwner
		return res
	case reg.Epoch != en.Epoch:
		res.Code = protocol.CodeStaleEpoch
		return res
	}
	for e := f.order.Front(); e != nil; e = e.Next() {
		x := e.Value.(*fakeEntry)
		if x.loc.RegionID == en.RegionID && x.loc.KVOffset < en.KVOffset+en.KVLength && en.KVOffset < x.loc.KVOffset+x.loc.KVLength {
			f.t.Errorf("entry %q overlaps %q", en.Key, x.key)
		}
	}
	f.ids++
	x := &fakeEntry{key: string(en.Key), owner: cn.sess, leased: map[uint64]time.Time{}, version: f.ids}
	x.loc = protocol.Location{Region: reg.Region, KVOffset: en.KVOffset, KVLength: en.KVLength, Checksum: en.Checksum}
	f.entries[x.key] = f.order.PushBack(x)
	res.IsNew = true
	return res
}

func (f *fake) keys(_ *fakeConn, typ protocol.Type, p []byte) []byte {
	var r protocol.KeysRequest
	require.NoError(f.t, r.DecodeAs(p, typ))
	var rep protocol.KeysReply
	for _, k := range r.Keys {
		e := f.entries[string(k)]
		if e != nil && r.RegionID != 0 {
			was, last := e.Value.(*fakeEntry).lose(&r)
			if !last {
				rep.Results = append(rep.Results, was)
				continue
			}
		}
		rep.Results = append(rep.Results, e != nil)
		if e != nil && typ == protocol.TypeBatchDelete {
			rep.Freed = append(rep.Freed, f.drop(e))
		}
	}
	return rep.AppendAs(nil, typ)
}

// lose takes a location away, and reports whether there was one, and whether that was the last.
func (x *fakeEntry) lose(r *protocol.KeysRequest) (was, last bool) {
	is := func(l protocol.Location) bool {
		return l.RegionID == r.RegionID && l.KVOffset <= r.KVOffset && r.KVOffset < l.KVOffset+l.KVLength
	}
	if is(x.loc) {
		if len(x.copies) == 0 {
			return true, true
		}
		x.loc, x.copies = x.copies[0], x.copies[1:]
		return true, false
	}
	n := len(x.copies)
	x.copies = slices.DeleteFunc(x.copies, is)
	return len(x.copies) < n, false
}

// open connects a client to the fake, which is closed at the end of the test.
func (f *fake) open(tb testing.TB, change func(*Config)) *Client {
	tb.Helper()
	cfg := Config{
		Addrs: f.addrs(), Instance: strings.ReplaceAll(tb.Name(), "/", "-"), PageSize: 4096, RegionSize: 16 * 4096,
		CallTimeout: 300 * time.Millisecond, Timeout: 5 * time.Second,
	}
	if change != nil {
		change(&cfg)
	}
	c, err := Open(tb.Context(), cfg)
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}
