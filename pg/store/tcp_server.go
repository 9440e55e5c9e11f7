package store

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"
)

const (
	// maxPeers bounds the connections of a server: a process has one.
	maxPeers = 4096
	// maxPeerWatches bounds the watches of one connection, and maxPeerLists the lists of which it has not asked for all pages.
	maxPeerWatches = 64
	maxPeerLists   = 64
	// helloTime is how long a connection may take to say hello.
	helloTime = 5 * time.Second
)

// Server is a store in the memory of one process, for processes that have no masters. It is not replicated: with its process all
// is lost. Whoever reaches its address may read and write.
type Server struct {
	ln net.Listener
	wg sync.WaitGroup

	mu       sync.Mutex
	entries  map[string]*record
	revision uint64
	bytes    int // of keys and values
	peers    map[*peer]struct{}
	closed   bool
}

// record is an entry and the connection whose lease it ends with, nil if none. The value is never changed.
type record struct {
	Entry

	owner *peer
}

// peer is a connection. Its reader carries out requests, one after the other, its teller sends what its watches have to tell.
type peer struct {
	s     *Server
	nc    net.Conn
	lease time.Duration // 0 before the hello

	leased  map[string]struct{}   // keys; under Server.mu
	watches map[uint64]*peerWatch // by id; under Server.mu
	news    chan struct{}         // has an element when there is something to tell
	gone    chan struct{}         // closed when the reader has ended

	rest map[uint64][]Entry // by id of a list, the pages that have not been asked for; the reader's

	wmu sync.Mutex // writes to nc
	out []byte
}

// peerWatch is a watch of a connection.
type peerWatch struct {
	id     uint64
	prefix string
	*backlog
}

// Serve begins to serve an empty store at an address, "host:port". Port 0 stands for one of the system's choice: see Addr.
func Serve(addr string) (*Server, error) {
	var lc net.ListenConfig
	ln, err := lc.Listen(context.Background(), "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("serve a store: %w", err)
	}
	s := &Server{ln: ln, entries: make(map[string]*record), peers: make(map[*peer]struct{}), revision: epoch()}
	s.wg.Go(s.accept)
	return s, nil
}

// Addr is where the server listens.
func (s *Server) Addr() string { return s.ln.Addr().String() }

// Close ends the server and its connections. What was in it is lost.
func (s *Server) Close() error {
	s.mu.Lock()
	was := s.closed
	s.closed = true
	for p := range s.peers {
		_ = p.nc.Close()
	}
	s.mu.Unlock()
	if was {
		return nil
	}
	err := s.ln.Close()
	s.wg.Wait()
	return err //nolint:wrapcheck // names the address
}

func (s *Server) accept() {
	for {
		nc, err := s.ln.Accept()
		if err != nil {
			s.mu.Lock()
			closed := s.closed
			s.mu.Unlock()
			if closed || errors.Is(err, net.ErrClosed) {
				return
			}
			_ = sleep(context.Background(), acceptPause)
			continue
		}
		p := &peer{
			s: s, nc: nc, leased: make(map[string]struct{}), watches: make(map[uint64]*peerWatch),
			news: make(chan struct{}, 1), gone: make(chan struct{}), rest: make(map[uint64][]Entry),
		}
		s.mu.Lock()
		room := !s.closed && len(s.peers) < maxPeers
		if room {
			s.peers[p] = struct{}{}
		}
		s.mu.Unlock()
		if !room {
			_ = nc.Close()
			continue
		}
		s.wg.Go(p.read)
		s.wg.Go(p.tell)
	}
}

// acceptPause is how long to wait when no connection can be accepted: there are no descriptors left.
const acceptPause = 50 * time.Millisecond

// read carries out requests until the connection ends, or nothing is heard for the lease.
func (p *peer) read() {
	defer p.end()
	r := bufio.NewReader(p.nc)
	var buf bytes.Buffer
	for {
		limit := p.lease
		if limit == 0 {
			limit = helloTime
		}
		var req request
		if p.nc.SetReadDeadline(soon(limit)) != nil || readFrame(r, maxRequest, &buf, &req) != nil {
			return
		}
		if !p.serve(&req) {
			return
		}
	}
}

// end gives up the connection, and its lease with it.
func (p *peer) end() {
	_ = p.nc.Close()
	close(p.gone)
	p.s.mu.Lock()
	delete(p.s.peers, p)
	p.s.mu.Unlock()
	p.release()
}

// release ends the lease.
func (p *peer) release() {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	for key := range p.leased {
		p.s.remove(p.s.entries[key])
	}
}

// serve answers a request. It reports false if the connection is of no use any more.
func (p *peer) serve(req *request) bool {
	r := reply{ID: req.ID}
	var err error
	if p.lease == 0 && req.Op != opHello {
		req.Op = ""
	}
	switch req.Op {
	case opHello:
		err = p.hello(req)
	case opBeat:
	case opBye:
		p.release()
	case opGet:
		r.Entry, err = p.s.get(req.Key)
	case opPut:
		r.Entry, err = p.s.put(p, req)
	case opDelete:
		err = p.s.drop(req)
	case opList, opWatch, opMore:
		err = p.list(req, &r)
	case opForget:
		p.forget(req.ID)
		return true
	default:
		err = fmt.Errorf("%w: no such request, or no hello before it", ErrInvalid)
	}
	r.refuse(err)
	return p.send(&r) == nil && p.lease != 0 && req.Op != opBye
}

// list answers with a page.
func (p *peer) list(req *request, r *reply) (err error) {
	var list []Entry
	switch {
	case req.Op == opMore:
		list = p.rest[req.ID]
	case len(p.rest) >= maxPeerLists:
		return fmt.Errorf("%w: %d lists of one process at a time", ErrLimit, maxPeerLists)
	case req.Op == opWatch:
		list, r.Revision, err = p.watch(req)
	default:
		list, r.Revision = p.s.list(req.Key)
	}
	delete(p.rest, req.ID)
	if r.Entries, list = page(list); len(list) > 0 {
		r.More, p.rest[req.ID] = true, list
	}
	return err
}

func (p *peer) forget(id uint64) {
	delete(p.rest, id)
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	delete(p.watches, id)
}

// send writes a reply. A client that does not read for the lease is given up.
func (p *peer) send(r *reply) (err error) {
	p.wmu.Lock()
	defer p.wmu.Unlock()
	if p.out, err = appendFrame(p.out[:0], r); err != nil {
		return err
	}
	if err := p.nc.SetWriteDeadline(soon(max(p.lease, MinLease))); err != nil {
		return err //nolint:wrapcheck // ends the connection
	}
	_, err = p.nc.Write(p.out)
	return err //nolint:wrapcheck // ends the connection
}

func (p *peer) hello(req *request) error {
	if req.Version != wireVersion {
		return fmt.Errorf("%w: version %d of the protocol, this server has %d: use one release in all processes", ErrInvalid,
			req.Version, wireVersion)
	}
	lease, err := checkLease(time.Duration(min(req.LeaseMS, 1<<40)) * time.Millisecond)
	if err == nil && p.lease != 0 {
		err = fmt.Errorf("%w: a second hello", ErrInvalid)
	}
	if err == nil {
		p.lease = lease
	}
	return err
}

// watch begins a watch, and returns what there is to begin with.
func (p *peer) watch(req *request) ([]Entry, uint64, error) {
	s := p.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(p.watches) >= maxPeerWatches {
		return nil, 0, fmt.Errorf("%w: %d watches of one process: watch a common prefix", ErrLimit, maxPeerWatches)
	}
	p.watches[req.ID] = &peerWatch{req.ID, req.Key, newBacklog()}
	return s.collect(req.Key), s.revision, nil
}

// tell sends what the watches have to tell until the connection ends. What a watch
// begins with may come after that.
func (p *peer) tell() {
	defer func() { _ = p.nc.Close() }() // the reader then ends, too
	for {
		select {
		case <-p.news:
		case <-p.gone:
			return
		}
		p.s.mu.Lock()
		watches := make([]*peerWatch, 0, len(p.watches))
		for _, w := range p.watches {
			watches = append(watches, w)
		}
		p.s.mu.Unlock()
		for _, w := range watches {
			for more := true; more; {
				r := reply{ID: w.id}
				if r.Changes, more = w.take(pageBytes); len(r.Changes) > 0 && p.send(&r) != nil {
					return
				}
			}
		}
	}
}

func (s *Server) list(prefix string) ([]Entry, uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.collect(prefix), s.revision
}

// collect returns the entries that begin with prefix, in the order of their keys. The caller holds mu.
func (s *Server) collect(prefix string) (list []Entry) {
	for key, e := range s.entries {
		if strings.HasPrefix(key, prefix) {
			list = append(list, e.Entry)
		}
	}
	sortEntries(list)
	return list
}

func (s *Server) get(key string) (*Entry, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[key]
	if e == nil {
		return nil, fmt.Errorf("%w: %.64q", ErrNotFound, key)
	}
	return &Entry{e.Key, e.Value, e.Created, e.Modified}, nil
}

// check compares an entry, nil if it is not there, with what a request expects. With a conflict it returns the entry.
func (e *record) check(req *request) (*Entry, error) {
	o := options{check: req.Check, revision: req.Revision}
	switch {
	case e == nil && !o.allows(0):
		return nil, fmt.Errorf("%w: %.64q", ErrConflict, req.Key)
	case e != nil && !o.allows(e.Modified):
		return &Entry{e.Key, e.Value, e.Created, e.Modified}, fmt.Errorf("%w: %.64q", ErrConflict, req.Key)
	}
	return nil, nil
}

func (s *Server) put(p *peer, req *request) (*Entry, error) {
	if err := checkPut(req.Key, req.Value); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[req.Key]
	if is, err := e.check(req); err != nil {
		return is, err
	}
	count, size := 1, len(req.Key)+len(req.Value)
	if e != nil {
		count, size = 0, len(req.Value)-len(e.Value)
	}
	if err := checkRoom(len(s.entries), count, s.bytes, size); err != nil {
		return nil, err
	}
	s.revision++
	if e == nil {
		e = &record{Entry: Entry{Key: req.Key, Created: s.revision}}
		s.entries[req.Key] = e
	}
	e.disown()
	s.bytes += size
	e.Value, e.Modified = req.Value, s.revision
	if req.Lease {
		e.owner = p
		p.leased[e.Key] = struct{}{}
	}
	s.tell(Change{e.Entry, false})
	return &Entry{Key: e.Key, Created: e.Created, Modified: e.Modified}, nil
}

func (s *Server) drop(req *request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[req.Key]
	if _, err := e.check(req); err != nil {
		return err
	}
	if e == nil {
		return fmt.Errorf("%w: %.64q", ErrNotFound, req.Key)
	}
	s.remove(e)
	return nil
}

// remove deletes an entry. The caller holds mu.
func (s *Server) remove(e *record) {
	s.revision++
	e.disown()
	delete(s.entries, e.Key)
	s.bytes -= len(e.Key) + len(e.Value)
	s.tell(Change{Entry{Key: e.Key, Created: e.Created, Modified: s.revision}, true})
}

// disown takes an entry from the lease that it would end with. The caller holds mu.
func (e *record) disown() {
	if e.owner != nil {
		delete(e.owner.leased, e.Key)
		e.owner = nil
	}
}

// tell has all watches know of a change. The caller holds mu.
func (s *Server) tell(x Change) {
	for p := range s.peers {
		news := false
		for _, w := range p.watches {
			if strings.HasPrefix(x.Key, w.prefix) {
				w.add(x)
				news = true
			}
		}
		if news {
			kick(p.news)
		}
	}
}

// checkRoom refuses what would make a store larger than it may be.
func checkRoom(entries, more, bytes, grow int) error {
	if entries+more > MaxEntries || grow > 0 && bytes+grow > MaxBytes {
		return fmt.Errorf("%w: the store has %d entries of %d bytes, of at most %d and %d: delete what is of no use any more", ErrLimit,
			entries, bytes, MaxEntries, MaxBytes)
	}
	return nil
}
