package server

import (
	"sync"
	"sync/atomic"

	"larder/meta"
	"larder/protocol"
)

// Peer is the other end of a client's connection. Its methods may be called from any goroutine, with the Master's
// locks held, and never block.
type Peer interface {
	// Lock gives the output buffer, to append whole frames to; Unlock takes it back, longer.
	Lock() []byte
	Unlock(buf []byte)
	// Flush sends what was appended.
	Flush()
	// Close cuts the connection off.
	Close(why string)
}

// Client is one connection as the Master sees it.
type Client struct {
	peer Peer
	sess atomic.Pointer[session] // nil = none: not native, or no handshake yet

	push    atomic.Bool  // reads Revoke and Freed
	copies  atomic.Bool  // reads copies in lookups
	unacked atomic.Int64 // pages in FREED pushes that it has not acknowledged

	// room is signalled when requests of this client have been answered.
	room chan struct{}

	mu       sync.Mutex
	requests int // queued or on their way
	bytes    int

	// Used by the connection's reader only.
	follows   bool // what it is served now will be sent without confirming leadership: nothing that only a leader may say
	tenant    meta.TenantID
	tenantGen uint64   // of which machine; 0 = unknown
	tenantOf  *session // and for which session
	sampled   int
	asOf      uint64 // log time that the request being served has waited for; 0 = none
	named     bool   // has asked for a session: a native client, which finds the leader by itself
}

// NewClient takes in a connection.
func (m *Master) NewClient(p Peer) *Client {
	return &Client{peer: p, room: make(chan struct{}, 1)}
}

// CloseClient forgets a connection. Its session stays until its deadline.
func (m *Master) CloseClient(c *Client) {
	s := c.sess.Load()
	if s == nil {
		return
	}
	m.mu.Lock()
	s.detach(c)
	m.dropWatches(c)
	m.mu.Unlock()
}

// Follow says whether what the client is served next will be sent without a confirmation that this member leads:
// then it gets nothing that only a leader may say. It is for the connection's reader.
func (c *Client) Follow(follows bool) { c.follows = follows }

// Touch keeps the client's session alive.
func (c *Client) Touch(now int64) {
	if s := c.sess.Load(); s != nil {
		s.hear(now)
	}
}

// Full reports whether the client has as many requests on their way as it may have: its further ones must wait.
func (c *Client) Full() bool { return c.fullAt(maxClientBytes) }

// fullAt is Full for another bound of the bytes.
func (c *Client) fullAt(bytes int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.requests >= maxClientRequests || c.bytes >= bytes
}

// has takes note of the features of the client.
func (c *Client) has(features uint64) {
	c.push.Store(features&protocol.FeaturePush != 0)
	c.copies.Store(features&protocol.FeatureCopies != 0)
}

// Room is signalled after requests of the client have been answered.
func (c *Client) Room() <-chan struct{} { return c.room }

// Idle reports whether nothing of the client is on its way.
func (c *Client) Idle() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.requests == 0
}

func (c *Client) took(bytes int) {
	c.mu.Lock()
	c.requests++
	c.bytes += bytes
	c.mu.Unlock()
}

func (c *Client) answered(bytes int) {
	c.mu.Lock()
	c.requests--
	c.bytes -= bytes
	c.mu.Unlock()
	select {
	case c.room <- struct{}{}:
	default:
	}
}

// native reports whether the client has a session of its own.
func (c *Client) native() bool { return c.sess.Load() != nil }

// session returns the id of the client's session, 0 if it has none.
func (c *Client) session() meta.SessionID {
	if s := c.sess.Load(); s != nil {
		return s.id
	}
	return 0
}

// tenantID returns the tenant that the client's keys belong to. The caller holds state for reading.
func (c *Client) tenantID(m *Master) meta.TenantID {
	s := c.sess.Load()
	if c.tenantGen != m.gen || c.tenantOf != s {
		c.tenant, c.tenantGen, c.tenantOf = m.machine.Tenant(c.tenantName()), m.gen, s
	}
	return c.tenant
}

// tenantName returns the name of that tenant.
func (c *Client) tenantName() string {
	if s := c.sess.Load(); s != nil && s.tenant != "" {
		return s.tenant
	}
	return meta.DefaultTenant
}

// outbox collects clients that have replies waiting, so that each is flushed once.
type outbox struct{ clients []*Client }

// add notes a client.
func (o *outbox) add(c *Client) {
	if n := len(o.clients); n > 0 && o.clients[n-1] == c {
		return
	}
	o.clients = append(o.clients, c)
}

// flush sends everything.
func (o *outbox) flush() {
	for i, c := range o.clients {
		c.peer.Flush()
		o.clients[i] = nil
	}
	o.clients = o.clients[:0]
}

// frame appends a reply to a request with header h, whose payload body appends.
func (c *Client) frame(h protocol.Header, body func(b []byte) []byte) {
	b := c.peer.Lock()
	b, mark := protocol.BeginReply(b, h)
	b = protocol.EndFrame(body(b), mark)
	c.peer.Unlock(b)
}

// frameError appends an error as the reply to a request with header h.
func (c *Client) frameError(h protocol.Header, f *protocol.Error) {
	b := c.peer.Lock()
	b = appendError(b, h, f)
	c.peer.Unlock(b)
}

// appendError appends a whole frame that answers a request with an error.
func appendError(b []byte, h protocol.Header, f *protocol.Error) []byte {
	b, mark := protocol.BeginReply(b, h)
	return protocol.EndFrame(protocol.AppendErrorReply(b, f), mark)
}
