package integration

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// rawConn speaks the protocol on one connection to one master, follows no redirection, retries nothing, and can send
// what no sound client sends.
type rawConn struct {
	t    *testing.T
	conn net.Conn
	seq  uint32

	mu      sync.Mutex
	waiting map[uint32]chan rawReply
	pushes  []protocol.Type
	closed  chan struct{} // the reader has ended
	err     error         // why; after closed
}

// rawReply is one reply.
type rawReply struct {
	typ     protocol.Type
	payload []byte
}

// errNoReply says that the connection ended before the reply.
var errNoReply = errors.New("the connection ended without a reply")

// dialRaw connects to a master.
func dialRaw(t *testing.T, addr string) *rawConn {
	t.Helper()
	conn, err := net.DialTimeout("tcp", addr, hang)
	require.NoError(t, err)
	r := &rawConn{t: t, conn: conn, waiting: make(map[uint32]chan rawReply), closed: make(chan struct{})}
	go r.read()
	t.Cleanup(r.close)
	return r
}

func (r *rawConn) close() {
	r.conn.Close() //nolint:errcheck // it may have been cut off
	<-r.closed
}

// read hands replies to those who wait for them.
func (r *rawConn) read() {
	defer close(r.closed)
	reader := protocol.NewReader(r.conn)
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
			ch <- rawReply{h.Type, append([]byte(nil), payload...)}
		} else {
			r.pushes = append(r.pushes, h.Type)
		}
		r.mu.Unlock()
	}
}

// send sends a request and returns where its reply will come; it is closed without one if the connection ends.
func (r *rawConn) send(typ protocol.Type, payload func([]byte) []byte) (<-chan rawReply, error) {
	ch := make(chan rawReply, 1)
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
	_, err := r.conn.Write(protocol.EndFrame(payload(buf), mark))
	return ch, err
}

// do sends a request and waits for its reply.
func (r *rawConn) do(typ protocol.Type, payload func([]byte) []byte) (rawReply, error) {
	ch, err := r.send(typ, payload)
	if err != nil {
		return rawReply{}, err
	}
	select {
	case reply, ok := <-ch:
		if !ok {
			return rawReply{}, errNoReply
		}
		return reply, nil
	case <-time.After(hang):
		r.t.Fatalf("no reply to %v", typ)
		return rawReply{}, nil
	}
}

// as gives a codec that takes the message's type the form of the others.
func as(typ protocol.Type, f func([]byte, protocol.Type) []byte) func([]byte) []byte {
	return func(b []byte) []byte { return f(b, typ) }
}

// raw is a payload as it stands.
func rawPayload(p []byte) func([]byte) []byte {
	return func(b []byte) []byte { return append(b, p...) }
}

// handshake opens a session.
func (r *rawConn) handshake(instance string) *protocol.HandshakeReply {
	r.t.Helper()
	req := protocol.HandshakeRequest{
		ClientVersion: protocol.Version, Protocol: protocol.Version, InstanceID: instance, TTLMS: 10_000,
	}
	reply, err := r.do(protocol.TypeHandshake, req.Append)
	require.NoError(r.t, err)
	out := new(protocol.HandshakeReply)
	require.NoError(r.t, out.Decode(reply.payload))
	require.NoError(r.t, out.Err())
	return out
}

// alloc asks for a region.
func (r *rawConn) alloc(req protocol.AllocRequest) (*protocol.AllocReply, error) {
	reply, err := r.do(protocol.TypeRequestAlloc, req.Append)
	if err != nil {
		return nil, err
	}
	out := new(protocol.AllocReply)
	if err := out.Decode(reply.payload); err != nil {
		return nil, fmt.Errorf("reply to REQUEST_ALLOC: %w", err)
	}
	return out, out.Err()
}

// register registers one entry, and returns what became of it.
func (r *rawConn) register(seq uint64, e protocol.RegisterEntry) error {
	req := protocol.RegisterRequest{Mutation: protocol.Mutation{Seq: seq, Acked: seq}, Entries: []protocol.RegisterEntry{e}}
	reply, err := r.do(protocol.TypeRegister, as(protocol.TypeRegister, req.AppendAs))
	if err != nil {
		return err
	}
	var out protocol.RegisterReply
	if err := out.DecodeAs(reply.payload, protocol.TypeRegister); err != nil {
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

// ended waits until the master has closed the connection, and returns why reading ended.
func (r *rawConn) ended() error {
	r.t.Helper()
	select {
	case <-r.closed:
		if errors.Is(r.err, io.EOF) {
			return nil
		}
		return r.err
	case <-time.After(hang):
		r.t.Fatal("the master does not close the connection")
		return nil
	}
}
