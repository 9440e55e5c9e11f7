package transfer

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"larder/cxl"
)

// Memory that is a file's (a memfd, tmpfs, device-DAX) is mapped by processes of the same host, which copy by themselves.
//
// The owner shares two pages besides: a table of generations, which the others may only read, and for each of them a page
// of slots, one for each goroutine that copies. Who copies makes its slot's number odd, looks whether the generation is
// still the right one, copies, and makes the number even. Whoever retires a buffer clears the generation, and then waits
// until each slot that was odd has another number: those that come later see that the buffer is gone. A process that has
// ended is one whose socket is closed: that comes after its memory is gone.
const (
	shmSlots     = 64
	slotSize     = 64 // a cache line each
	tablePages   = maxBuffers * 8
	maxShmPeers  = 1024
	maxShmAsk    = 1 << 10
	shmAnswerMax = 1 << 10
)

// shmName is the name of an engine's socket, abstract: only processes of the same network namespace see it.
func shmName(engine string) *net.UnixAddr {
	return &net.UnixAddr{Name: "@larder-transfer-" + engine, Net: "unixpacket"}
}

// shmAsk is a message to the owner, shmAnswer what it says, with open files.
type shmAsk struct {
	Engine string `json:"engine,omitempty"` // the first one
	Token  string `json:"token,omitempty"`
	Buffer Handle `json:"buffer"`
}

type shmAnswer struct {
	Error    string `json:"error,omitempty"`
	Private  bool   `json:"private,omitempty"` // the buffer cannot be mapped
	Stale    bool   `json:"stale,omitempty"`
	Slot     int    `json:"slot,omitempty"`   // in the table
	Offset   int64  `json:"offset,omitempty"` // in the file
	Bytes    uint64 `json:"bytes,omitempty"`
	ReadOnly bool   `json:"read_only,omitempty"`
}

// sharer is the owner's side.
type sharer struct {
	e     *Engine
	l     *net.UnixListener
	table *pages // generations, by a buffer's slot
	wg    sync.WaitGroup

	mu     sync.Mutex
	closed bool
	peers  map[*sharedWith]struct{}
}

// sharedWith is a process that has mapped buffers.
type sharedWith struct {
	conn  *net.UnixConn
	slots *pages
	gone  chan struct{} // closed when it has ended, or let go of all
	use   sync.RWMutex  // who looks at slots holds it for reading
}

// pages are shared memory that holds no bytes of buffers.
type pages struct {
	f *os.File
	b []byte
}

func newPages(name string, size int) (*pages, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("transfer: make shared pages: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if err := f.Truncate(int64(size)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return mapPages(f, size, unix.PROT_READ|unix.PROT_WRITE)
}

func mapPages(f *os.File, size, prot int) (*pages, error) {
	b, err := unix.Mmap(int(f.Fd()), 0, size, prot, unix.MAP_SHARED)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("transfer: map shared pages: %w", err), f.Close())
	}
	return &pages{f, b}, nil
}

func (p *pages) close() { _ = errors.Join(unix.Munmap(p.b), p.f.Close()) } // they hold nothing

// word is the i-th number of a page.
func (p *pages) word(at int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&p.b[at])) //nolint:gosec // callers align, and the page outlives its users
}

// newSharer opens the engine's socket. Engines that nobody needs to reach have none.
func newSharer(e *Engine) (*sharer, error) {
	table, err := newPages("larder-generations", tablePages)
	if err != nil {
		return nil, err
	}
	l, err := net.ListenUnix("unixpacket", shmName(e.ID()))
	if err != nil {
		table.close()
		return nil, fmt.Errorf("transfer: listen for processes of this host: %w", err)
	}
	return &sharer{e: e, l: l, table: table, peers: map[*sharedWith]struct{}{}}, nil
}

func (s *sharer) begin() {
	s.wg.Go(func() {
		for {
			conn, err := s.l.AcceptUnix()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil { // out of files, say: it passes
				s.e.cfg.Logger.Warn("transfer: accept", slog.Any("error", err))
				<-after(tickEvery)
				continue
			}
			s.wg.Go(func() { s.serve(conn) })
		}
	})
}

// serve answers one process for as long as it lives.
func (s *sharer) serve(conn *net.UnixConn) {
	defer func() { _ = conn.Close() }() // it tells the other side only that
	if conn.SetDeadline(soon(greetTimeout)) != nil {
		return
	}
	var ask shmAsk
	if receiveAsk(conn, &ask) != nil {
		return
	}
	p, err := s.admit(conn, &ask)
	if err != nil {
		_ = sendAnswer(conn, &shmAnswer{Error: err.Error()}) // it is gone if it fails
		return
	}
	defer s.dismiss(p)
	if sendAnswer(conn, &shmAnswer{}, s.table.f, p.slots.f) != nil || conn.SetDeadline(time.Time{}) != nil {
		return
	}
	for receiveAsk(conn, &ask) == nil {
		if s.answer(conn, ask.Buffer) != nil {
			return
		}
	}
}

// answer shares a buffer's file. The buffer is held meanwhile, since the file is closed when it has been retired.
func (s *sharer) answer(conn *net.UnixConn, h Handle) error {
	me := &copier{}
	b, _, err := s.e.hold(Read, h, 0, 0, me)
	if err != nil {
		return sendAnswer(conn, &shmAnswer{Stale: true})
	}
	defer b.release(me)
	if b.file == nil {
		return sendAnswer(conn, &shmAnswer{Private: true})
	}
	f := b.file
	if b.info.ReadOnly {
		if f, err = os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd())); err != nil {
			return sendAnswer(conn, &shmAnswer{Private: true})
		}
		defer func() { _ = f.Close() }() // it was opened for this
	}
	return sendAnswer(conn, &shmAnswer{Slot: b.slot, Offset: b.offset, Bytes: b.info.Bytes, ReadOnly: b.info.ReadOnly}, f)
}

func (s *sharer) admit(conn *net.UnixConn, ask *shmAsk) (*sharedWith, error) {
	if ask.Token != s.e.cfg.Token {
		return nil, errors.New("wrong token: both processes need the same")
	}
	slots, err := newPages("larder-slots", shmSlots*slotSize)
	if err != nil {
		return nil, err
	}
	p := &sharedWith{conn: conn, slots: slots, gone: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.peers) >= maxShmPeers || s.closed {
		slots.close()
		return nil, errFull
	}
	s.peers[p] = struct{}{}
	return p, nil
}

// dismiss forgets a process that has closed its socket.
func (s *sharer) dismiss(p *sharedWith) {
	s.mu.Lock()
	delete(s.peers, p)
	s.mu.Unlock()
	close(p.gone)
	p.use.Lock()
	defer p.use.Unlock()
	p.slots.close()
}

// publish makes a buffer's generation known to those who have mapped it, or 0 that it is gone.
func (s *sharer) publish(b *Buffer, generation uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed && b.slot >= 0 {
		s.table.word(b.slot * 8).Store(generation)
	}
}

// settle waits until nobody copies who may have seen a generation that was published before. stop ends the wait.
func (s *sharer) settle(stop <-chan struct{}) bool {
	s.mu.Lock()
	all := make([]*sharedWith, 0, len(s.peers))
	for p := range s.peers {
		all = append(all, p)
	}
	s.mu.Unlock()
	for _, p := range all {
		for i := range shmSlots {
			if !p.settle(i, stop) {
				return false
			}
		}
	}
	return true
}

func (p *sharedWith) settle(i int, stop <-chan struct{}) bool {
	p.use.RLock()
	defer p.use.RUnlock()
	select {
	case <-p.gone:
		return true
	default:
	}
	word := p.slots.word(i * slotSize)
	was := word.Load()
	for wait := time.Microsecond; was&1 == 1 && word.Load() == was; wait = min(2*wait, time.Millisecond) {
		select {
		case <-p.gone:
			return true
		case <-stop:
			return false
		case <-after(wait):
		}
	}
	return true
}

func (s *sharer) close() {
	_ = s.l.Close() // nothing is lost with it
	s.mu.Lock()
	for p := range s.peers {
		_ = p.conn.Close()
	}
	s.closed = true
	s.mu.Unlock()
	s.wg.Wait()
	s.table.close()
}

// receiveAsk reads a message. It must be all of one.
func receiveAsk(conn *net.UnixConn, ask *shmAsk) error {
	b := make([]byte, maxShmAsk)
	n, err := conn.Read(b)
	if err != nil {
		return err
	}
	*ask = shmAsk{}
	return json.Unmarshal(b[:n], ask)
}

func sendAnswer(conn *net.UnixConn, a *shmAnswer, files ...*os.File) error {
	b, err := json.Marshal(a)
	if err != nil {
		return err
	}
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	_, _, err = conn.WriteMsgUnix(b, rights, nil)
	return err
}

// mapper is the other side: a process's buffers as they are mapped here.
type mapper struct {
	conn    *net.UnixConn
	table   *pages
	slots   *pages
	answers chan shmReply
	dead    chan struct{} // closed when the owner has ended, or closed its engine

	ask sync.Mutex   // held for a question and its answer
	use sync.RWMutex // who copies holds it for reading, who maps or unmaps for writing

	mapped  map[Handle]*mapping
	private map[Handle]struct{} // those that cannot be
}

// mapping is a buffer in this process's memory.
type mapping struct {
	whole    []byte // from a page's beginning
	b        []byte
	slot     int
	readOnly bool
}

// shmReply is an answer with the files that came with it.
type shmReply struct {
	a     shmAnswer
	files []*os.File
}

var (
	errPrivate = errors.New("transfer: the buffer's memory cannot be mapped")
	errGone    = errors.New("transfer: the process that shares its memory is gone")
)

// attach connects to an engine of this host.
func attach(e *Engine, engine string) (*mapper, error) {
	conn, err := net.DialUnix("unixpacket", nil, shmName(engine))
	if err != nil {
		return nil, err
	}
	m := &mapper{
		conn: conn, answers: make(chan shmReply), dead: make(chan struct{}),
		mapped: map[Handle]*mapping{}, private: map[Handle]struct{}{},
	}
	go m.listen()
	_, files, err := m.question(&shmAsk{Engine: e.ID(), Token: e.cfg.Token}, 2)
	if err != nil {
		m.close()
		return nil, err
	}
	if m.table, err = mapPages(files[0], tablePages, unix.PROT_READ); err != nil {
		m.close()
		return nil, errors.Join(err, files[1].Close())
	}
	if m.slots, err = mapPages(files[1], shmSlots*slotSize, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

// listen takes answers until the owner closes the socket.
func (m *mapper) listen() {
	defer close(m.dead)
	b, rights := make([]byte, shmAnswerMax), make([]byte, unix.CmsgSpace(4*2))
	for {
		n, nr, _, _, err := m.conn.ReadMsgUnix(b, rights)
		if err != nil || n == 0 {
			return
		}
		r := shmReply{files: openRights(rights[:nr])}
		if json.Unmarshal(b[:n], &r.a) != nil {
			r.a.Error = "it answers with what is no JSON object"
		}
		select {
		case m.answers <- r:
		case <-after(greetTimeout): // nobody waits any more
			r.close()
		}
	}
}

func (r *shmReply) close() {
	for _, f := range r.files {
		_ = f.Close() // nothing has been written to it
	}
}

// question asks for something, with so many files.
func (m *mapper) question(q *shmAsk, files int) (*shmAnswer, []*os.File, error) {
	m.ask.Lock()
	defer m.ask.Unlock()
	b, err := json.Marshal(q)
	if err != nil {
		return nil, nil, err
	}
	if _, err := m.conn.Write(b); err != nil {
		return nil, nil, err
	}
	var r shmReply
	select {
	case r = <-m.answers:
	case <-m.dead:
		return nil, nil, errGone
	case <-after(greetTimeout):
		_ = m.conn.Close() // an answer that came now would be taken for another's
		return nil, nil, errStalled
	}
	switch {
	case r.a.Error != "":
		err = fmt.Errorf("%w: %s", ErrRefused, r.a.Error)
	case r.a.Stale:
		err = ErrStale
	case r.a.Private:
		err = errPrivate
	case len(r.files) != files:
		err = fmt.Errorf("%w: %d open files came, not %d", ErrRefused, len(r.files), files)
	}
	if err != nil {
		r.close()
		return nil, nil, err
	}
	return &r.a, r.files, nil
}

// openRights takes the files that came with a message.
func openRights(rights []byte) (files []*os.File) {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "shared"))
		}
	}
	return files
}

// ended reports whether the owner has ended. What is copied then is copied to nowhere.
func (m *mapper) ended() bool {
	select {
	case <-m.dead:
		return true
	default:
		return false
	}
}

// find maps a buffer, if it has not been mapped yet.
func (m *mapper) find(h Handle) error {
	m.use.RLock()
	_, private := m.private[h]
	known := m.mapped[h] != nil
	m.use.RUnlock()
	switch {
	case known:
		return nil
	case private:
		return errPrivate
	}
	a, files, err := m.question(&shmAsk{Buffer: h}, 1)
	m.use.Lock()
	defer m.use.Unlock()
	if errors.Is(err, errPrivate) {
		m.private[h] = struct{}{}
	}
	if err != nil {
		return err
	}
	defer func() { _ = files[0].Close() }() // the mapping stays
	if m.mapped[h] != nil {
		return nil
	}
	g, err := mapBuffer(a, files[0])
	if err == nil {
		m.mapped[h] = g
	}
	return err
}

func mapBuffer(a *shmAnswer, f *os.File) (*mapping, error) {
	skip := a.Offset % int64(os.Getpagesize())
	prot := unix.PROT_READ
	if !a.ReadOnly {
		prot |= unix.PROT_WRITE
	}
	if a.Slot < 0 || a.Slot >= maxBuffers || a.Offset < 0 || a.Bytes == 0 || a.Bytes > 1<<50 {
		return nil, fmt.Errorf("%w: it describes a buffer that cannot be", ErrRefused)
	}
	whole, err := unix.Mmap(int(f.Fd()), a.Offset-skip, int(a.Bytes)+int(skip), prot, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("transfer: map a buffer: %w", err)
	}
	_ = unix.Madvise(whole, unix.MADV_DONTFORK) // a child must not go on where its parent has ended; best effort
	return &mapping{whole: whole, b: whole[skip:], slot: a.Slot, readOnly: a.ReadOnly}, nil
}

// drop unmaps a buffer that its owner has retired, so that its memory goes.
func (m *mapper) drop(h Handle) {
	m.use.Lock()
	defer m.use.Unlock()
	if g := m.mapped[h]; g != nil {
		_ = unix.Munmap(g.whole) // it is one
		delete(m.mapped, h)
	}
}

// close unmaps all. Nobody copies any more.
func (m *mapper) close() {
	_ = m.conn.Close() // the other side learns only that
	<-m.dead
	for _, g := range m.mapped {
		_ = unix.Munmap(g.whole) // it is one
	}
	for _, p := range []*pages{m.table, m.slots} {
		if p != nil {
			p.close()
		}
	}
}

// copySlice copies between local memory and a mapped buffer, with a slot of its own.
func (m *mapper) copySlice(s *slice, pieces [][]byte, slot int) error {
	h := s.request.Buffer
	if err := m.find(h); err != nil {
		return err
	}
	err := m.copyMapped(s, h, pieces, slot)
	if errors.Is(err, ErrStale) {
		m.drop(h)
	}
	if err == nil && m.ended() {
		err = errGone
	}
	return err
}

func (m *mapper) copyMapped(s *slice, h Handle, pieces [][]byte, slot int) error {
	m.use.RLock()
	defer m.use.RUnlock()
	g, off := m.mapped[h], s.offset()
	switch {
	case g == nil: // another has dropped it
		return ErrStale
	case off > uint64(len(g.b)) || s.length > uint64(len(g.b))-off:
		return ErrRange
	case s.request.Op == Write && g.readOnly:
		return ErrReadOnly
	}
	word := m.slots.word(slot * slotSize)
	word.Add(1)
	defer word.Add(1)
	if m.table.word(g.slot*8).Load() != h.Generation {
		return ErrStale
	}
	return copyPieces(s.request.Op, g.b[off:off+s.length], pieces, s.batch.bytes)
}

// streamFrom is the size in bytes from which a READ's stores go past the caches: who asks for so much at once does not use
// all of it at once, and lines that are not fetched before they are overwritten save a third of the memory's bandwidth.
const streamFrom = 1 << 20

// copyPieces copies between a range of a buffer and local memory, of a batch of so many bytes in all.
func copyPieces(op Op, there []byte, pieces [][]byte, whole uint64) (err error) {
	for _, p := range pieces {
		switch {
		case op == Write:
			err = cxl.CopyIn(there[:len(p)], p)
		case whole >= streamFrom:
			err = cxl.CopyOutStream(p, there[:len(p)])
		default:
			err = cxl.CopyOut(p, there[:len(p)])
		}
		if err != nil {
			return ErrMemory
		}
		there = there[len(p):]
	}
	return nil
}

// shmLane is the way to a process of this host. Its workers share what is mapped.
type shmLane struct {
	*lane
	free chan int // slots that nobody uses

	mu    sync.Mutex
	m     *mapper
	users int // workers that have it
}

func newShmLane(s *Segment) *lane {
	sl := &shmLane{free: make(chan int, shmSlots)}
	for i := range shmSlots {
		sl.free <- i
	}
	sl.lane = newLane(s, TransportShm, min(runtime.GOMAXPROCS(0), shmSlots), sl.carry)
	sl.add("", "this host")
	return sl.lane
}

// attach gives a worker the peer's mappings, until detach.
func (sl *shmLane) attach() (m *mapper, err error) {
	sl.mu.Lock()
	defer sl.mu.Unlock()
	switch {
	case sl.m == nil:
		if sl.m, err = attach(sl.seg.e, sl.seg.Descriptor().Engine); err != nil {
			return nil, err
		}
	case sl.m.ended():
		return nil, errGone
	}
	sl.users++
	return sl.m, nil
}

// detach has the last worker unmap all.
func (sl *shmLane) detach() {
	sl.mu.Lock()
	defer sl.mu.Unlock()
	if sl.users--; sl.users == 0 {
		sl.m.close()
		sl.m = nil
	}
}

// carry copies slices until the lane is closed, or the peer has ended.
func (sl *shmLane) carry(r *rail) {
	m, err := sl.attach()
	if err != nil {
		r.missed(err)
		return
	}
	defer sl.detach()
	r.reached()
	slot := <-sl.free
	defer func() { sl.free <- slot }()
	var out [4]*slice
	var pieces [][]byte
	for {
		n := sl.take(r, out[:], 1<<20, m.ended)
		if n == 0 {
			break
		}
		for _, s := range out[:n] {
			pieces = s.pieces(pieces[:0])
			sl.finish(r, s, m.copySlice(s, pieces, slot))
		}
		clear(pieces)
	}
	if m.ended() {
		r.missed(errGone)
	}
}

// finish ends a slice that was copied, or gives it to another lane.
func (sl *shmLane) finish(r *rail, s *slice, err error) {
	switch {
	case err == nil:
		r.carried(s)
	case errors.Is(err, errPrivate):
		sl.pass(s)
	case errors.Is(err, ErrStale), errors.Is(err, ErrRange), errors.Is(err, ErrReadOnly), errors.Is(err, ErrMemory):
		s.end(err)
	default:
		sl.retry(s, r, r.failed(err))
	}
}
