package cluster

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// RawConn speaks the protocol on one connection to one master, follows no redirection, retries nothing, and can send
// what no sound client sends.
type RawConn struct {
	t    *testing.T
	Conn net.Conn
	seq  uint32

	mu      sync.Mutex
	waiting map[uint32]chan RawReply
	pushes  []protocol.Type
	closed  chan struct{} // the reader has ended
	err     error         // why; after closed
}

// RawReply is one reply.
type RawReply struct {
	Typ     protocol.Type
	Payload []byte
}

// errNoReply says that the connection ended before the reply.
var errNoReply = errors.New("the connection ended without a reply")

// DialRaw connects to a master.
func DialRaw(t *testing.T, addr string) *RawConn {
	t.Helper()
	conn, err := net.DialTimeout("tcp", addr, Hang)
	require.NoError(t, err)
	r := &RawConn{t: t, Conn: conn, waiting: make(map[uint32]chan RawReply), closed: make(chan struct{})}
	go r.read()
	t.Cleanup(r.Close)
	return r
}

// Close ends the connection.
func (r *RawConn) Close() {
	r.Conn.Close() //nolint:errcheck // it may have been cut off
	<-r.closed
}

// read hands replies to those who wait for them.
func (r *RawConn) read() {
	defer close(r.closed)
	reader := protocol.NewReader(r.Conn)
	for {
		h, payload, err := reader.Next()
		r.mu.Lock()
		if err != nil {
			r.err = err
			for _, ch := range r.waiting {
				close(ch)
			}
			r.waiting = nil
			r.mu.Unlock()
			return
		}
		if ch := r.waiting[h.Sequence]; ch != nil && h.Sequence != 0 {
			delete(r.waiting, h.Sequence)
			ch <- RawReply{h.Type, append([]byte(nil), payload...)}
		} else {
			r.pushes = append(r.pushes, h.Type)
		}
		r.mu.Unlock()
	}
}

// Send sends a request and returns where its reply will come; it is closed without one if the connection ends.
func (r *RawConn) Send(typ protocol.Type, payload func([]byte) []byte) (<-chan RawReply, error) {
	ch := make(chan RawReply, 1)
	r.mu.Lock()
	r.seq++
	seq := r.seq
	if r.waiting == nil {
		r.mu.Unlock()
		return nil, errNoReply
	}
	r.waiting[seq] = ch
	r.mu.Unlock()
	buf, mark := protocol.BeginFrame(nil, typ, seq)
	_, err := r.Conn.Write(protocol.EndFrame(payload(buf), mark))
	return ch, err
}

// Do sends a request and waits for its reply.
func (r *RawConn) Do(typ protocol.Type, payload func([]byte) []byte) (RawReply, error) {
	ch, err := r.Send(typ, payload)
	if err != nil {
		return RawReply{}, err
	}
	select {
	case reply, ok := <-ch:
		if !ok {
			return RawReply{}, errNoReply
		}
		return reply, nil
	case <-after(Hang):
		r.t.Fatalf("no reply to %v", typ)
		return RawReply{}, nil
	}
}

// As gives a codec that takes the message's type the form of the others.
func As(typ protocol.Type, f func([]byte, protocol.Type) []byte) func([]byte) []byte {
	return func(b []byte) []byte { return f(b, typ) }
}

// RawPayload is a payload as it stands.
func RawPayload(p []byte) func([]byte) []byte {
	return func(b []byte) []byte { return append(b, p...) }
}

// Handshake opens a session.
func (r *RawConn) Handshake(instance string) *protocol.HandshakeReply {
	r.t.Helper()
	req := protocol.HandshakeRequest{
		ClientVersion: protocol.Version, Protocol: protocol.Version, InstanceID: instance, TTLMS: 10_000,
	}
	reply, err := r.Do(protocol.TypeHandshake, req.Append)
	require.NoError(r.t, err)
	out := new(protocol.HandshakeReply)
	require.NoError(r.t, out.Decode(reply.Payload))
	require.NoError(r.t, out.Err())
	return out
}

// Alloc asks for a region.
func (r *RawConn) Alloc(req protocol.AllocRequest) (*protocol.AllocReply, error) {
	reply, err := r.Do(protocol.TypeRequestAlloc, req.Append)
	if err != nil {
		return nil, err
	}
	out := new(protocol.AllocReply)
	if err := out.Decode(reply.Payload); err != nil {
		return nil, fmt.Errorf("reply to REQUEST_ALLOC: %w", err)
	}
	return out, out.Err()
}

// Register registers one entry, and returns what became of it.
func (r *RawConn) Register(seq uint64, e protocol.RegisterEntry) error {
	req := protocol.RegisterRequest{Mutation: protocol.Mutation{Seq: seq, Acked: seq}, Entries: []protocol.RegisterEntry{e}}
	reply, err := r.Do(protocol.TypeRegister, As(protocol.TypeRegister, req.AppendAs))
	if err != nil {
		return err
	}
	var out protocol.RegisterReply
	if err := out.DecodeAs(reply.Payload, protocol.TypeRegister); err != nil {
		return fmt.Errorf("reply to REGISTER_KV: %w", err)
	}
	if err := out.Err(); err != nil {
		return err
	}
	if code := out.Results[0].Code; code != protocol.CodeOK {
		return &protocol.Error{Code: code}
	}
	return nil
}

// Ended waits until the master has closed the connection, and returns why reading ended.
func (r *RawConn) Ended() error {
	r.t.Helper()
	select {
	case <-r.closed:
		if errors.Is(r.err, io.EOF) {
			return nil
		}
		return r.err
	case <-after(Hang):
		r.t.Fatal("the master does not close the connection")
		return nil
	}
}
