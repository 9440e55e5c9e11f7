package rm

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// heap is a pool of one device that is never full, with one secret.
type heap struct {
	secret Secret
	down   error // what everything fails with; nil = nothing

	mu     sync.Mutex
	next   uint64
	owners map[uint64]string
	allocs int
}

func (p *heap) region(id, size uint64, owner string) Region {
	h := Handle{Region: id, Offset: id << 21, Length: size}
	h.Token = p.secret.Token(h.Region, h.Offset, h.Length, id, owner)
	return Region{Handle: h, Path: "/dev/shm/pool"}
}

func (p *heap) Alloc(_ context.Context, client string, size uint64, path string) (Region, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.allocs++
	switch {
	case p.down != nil:
		return Region{}, p.down
	case size == 0 || size > 1<<48:
		return Region{}, ErrSize
	case path != "" && path != "/dev/shm/pool":
		return Region{}, ErrUnknownPath
	case size > 1<<30:
		return Region{}, ErrNoRoom
	}
	p.next++
	p.owners[p.next] = client
	return p.region(p.next, size, client), nil
}

func (p *heap) find(h Handle) (string, error) {
	owner, ok := p.owners[h.Region]
	switch {
	case p.down != nil:
		return "", p.down
	case !ok:
		return "", ErrNotFound
	case p.region(h.Region, h.Length, owner).Token != h.Token:
		return "", ErrToken
	}
	return owner, nil
}

func (p *heap) Free(_ context.Context, client string, h Handle) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	owner, err := p.find(h)
	if err == nil && owner != client {
		err = ErrOwner
	}
	if err == nil {
		delete(p.owners, h.Region)
	}
	return err
}

func (p *heap) Access(_ context.Context, h Handle) (Region, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	owner, err := p.find(h)
	return p.region(h.Region, h.Length, owner), err
}

func (p *heap) Pools(context.Context) ([]Pool, error) {
	return []Pool{{Path: "/dev/shm/pool", File: true, Total: 1 << 30, Free: 1 << 29, Align: 2 << 20}}, p.down
}

func serve(t *testing.T) (*Server, *heap) {
	t.Helper()
	p := &heap{owners: map[uint64]string{}}
	s, err := Listen(t.Context(), "127.0.0.1:0", p, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s, p
}

func dial(t *testing.T, s *Server, id string) *Client {
	t.Helper()
	c, err := Dial(t.Context(), s.Addr().String(), id)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func requireStatus(t *testing.T, want Status, err error) {
	t.Helper()
	var status *StatusError
	require.ErrorAs(t, err, &status)
	require.Equal(t, want, status.Status)
}

func requireError(t *testing.T, want *Error, err error) {
	t.Helper()
	var fault *Error
	require.ErrorAs(t, err, &fault)
	require.Equal(t, want.Status, fault.Status)
	require.Equal(t, want.Message, fault.Message)
}

func TestLifeOfARegion(t *testing.T) {
	s, _ := serve(t)
	ctx := t.Context()
	owner, other := dial(t, s, "host:1"), dial(t, s, "host:2")

	r, err := owner.Alloc(ctx, 3_000_000, "")
	require.NoError(t, err)
	require.Equal(t, "/dev/shm/pool", r.Path)
	require.EqualValues(t, 3_000_000, r.Length)
	same, err := other.Access(ctx, r.Handle)
	require.NoError(t, err, "whoever holds a handle may map it")
	require.Equal(t, r, same)

	forged := r.Handle
	forged.Token++
	_, err = other.Access(ctx, forged)
	requireError(t, errAccessToken, err)
	requireError(t, errFreeToken, owner.Free(ctx, forged))
	requireStatus(t, StatusOwner, other.Free(ctx, r.Handle))

	require.NoError(t, owner.Free(ctx, r.Handle))
	requireStatus(t, StatusNotFound, owner.Free(ctx, r.Handle))
	_, err = other.Access(ctx, r.Handle)
	requireStatus(t, StatusNotFound, err)

	for _, v := range []struct {
		size uint64
		path string
		want Status
	}{
		{0, "", StatusInvalid}, {1<<48 + 1, "", StatusInvalid}, {1, "/dev/none", StatusNotFound}, {1 << 40, "", StatusNoRoom},
	} {
		_, err := owner.Alloc(ctx, v.size, v.path)
		requireStatus(t, v.want, err)
	}

	pools, err := other.Pools(ctx)
	require.NoError(t, err)
	require.Equal(t, []Pool{{Path: "/dev/shm/pool", File: true, Total: 1 << 30, Free: 1 << 29, Align: 2 << 20}}, pools)
}

func TestRegionsOutliveConnections(t *testing.T) {
	s, _ := serve(t)
	owner := dial(t, s, "host:1")
	r, err := owner.Alloc(t.Context(), 1<<20, "")
	require.NoError(t, err)
	require.NoError(t, owner.Close())
	require.Eventually(t, func() bool { return s.Clients.Load() == 0 }, 5*time.Second, time.Millisecond)
	_, err = dial(t, s, "host:2").Access(t.Context(), r.Handle)
	require.NoError(t, err)
}

// A client whose connection breaks asks once more, and is answered as before.
func TestClientConnectsAgain(t *testing.T) {
	s, p := serve(t)
	c := dial(t, s, "host:1")
	_, err := c.Alloc(t.Context(), 1<<20, "")
	require.NoError(t, err)
	require.NoError(t, c.nc.Close())
	_, err = c.Alloc(t.Context(), 1<<20, "")
	require.NoError(t, err)
	require.Equal(t, 2, p.allocs)
	require.NoError(t, c.Close())
	_, err = c.Alloc(t.Context(), 1<<20, "")
	require.ErrorIs(t, err, net.ErrClosed)
}

func TestNoLeader(t *testing.T) {
	s, p := serve(t)
	ctx := t.Context()
	c := dial(t, s, "host:1")
	r, err := c.Alloc(ctx, 1<<20, "")
	require.NoError(t, err)
	p.down = context.DeadlineExceeded
	_, err = c.Alloc(ctx, 1<<20, "")
	requireError(t, errUnavailable, err)
	_, err = c.Access(ctx, r.Handle)
	requireError(t, errUnavailable, err)
	_, err = c.Pools(ctx)
	requireError(t, errUnavailable, err)
	requireError(t, errUnavailable, c.Free(ctx, r.Handle))
	p.down = nil
	require.NoError(t, c.Free(ctx, r.Handle), "the connection goes on")
}

// exchange sends bytes on a new connection, and returns what comes back until the server closes it, or for as long as
// replies are expected.
func exchange(t *testing.T, s *Server, replies int, frames ...[]byte) (got [][]byte, ended bool) {
	t.Helper()
	nc, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", s.Addr().String())
	require.NoError(t, err)
	defer nc.Close() //nolint:errcheck // it is a test's
	require.NoError(t, nc.SetDeadline(time.Now().Add(10*time.Second)))
	_, err = nc.Write(bytes.Join(frames, nil))
	require.NoError(t, err)
	for len(got) < replies {
		kind, payload, err := readFrame(nc, nil, maxReply, func() error { return nil })
		require.NoError(t, err)
		got = append(got, endFrame(append(beginFrame(kind), payload...)))
	}
	require.NoError(t, nc.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
	_, err = nc.Read(make([]byte, 1))
	return got, !errors.Is(err, os.ErrDeadlineExceeded) // the end, or a reset where the server left something unread
}

func TestBadPeers(t *testing.T) {
	s, p := serve(t)
	stats := requestFrame(&request{kind: KindStats})
	alloc := func(client string, id uint64) []byte {
		return requestFrame(&request{kind: KindAlloc, size: 1, client: client, id: id})
	}
	pools := statsFrame([]Pool{{Path: "/dev/shm/pool", File: true, Total: 1 << 30, Free: 1 << 29, Align: 2 << 20}})
	frame := func(kind Kind, payload []byte) []byte { return endFrame(append(beginFrame(kind), payload...)) }
	large := frame(KindStats, nil)
	large[9] = 0x21
	for _, v := range []struct {
		name   string
		send   [][]byte
		want   [][]byte
		closed bool
	}{
		{"another magic", [][]byte{[]byte("GET / HTTP/1.1\r\n")}, [][]byte{errorFrame(errHeader)}, true},
		{"a payload above 8 KiB", [][]byte{large}, [][]byte{errorFrame(errLarge)}, true},
		{"an unknown request", [][]byte{frame(99, nil)}, [][]byte{errorFrame(errKind)}, true},
		{"a short request", [][]byte{frame(KindFree, []byte{1})}, [][]byte{errorFrame(errFree)}, true},
		{"no name", [][]byte{frame(KindFree, make([]byte, 32)), stats}, [][]byte{errorFrame(errNoClient), pools}, false},
		{
			"two names",
			[][]byte{stats, alloc("a:1", 0), alloc("b:1", 0)},
			[][]byte{pools, allocFrame(StatusOK, new(p.region(1, 1, "a:1")), 1), errorFrame(errPinned)},
			true,
		},
	} {
		t.Run(v.name, func(t *testing.T) {
			got, closed := exchange(t, s, len(v.want), v.send...)
			require.Equal(t, v.want, got)
			require.Equal(t, v.closed, closed)
		})
	}
}

func TestRepeatOnAnotherConnection(t *testing.T) {
	s, p := serve(t)
	ask := requestFrame(&request{kind: KindAlloc, size: 1, client: "a:1", id: 9})
	first, _ := exchange(t, s, 1, ask)
	second, _ := exchange(t, s, 1, ask)
	require.Equal(t, first, second)
	require.Equal(t, 1, p.allocs)
}

func TestTooManyClients(t *testing.T) {
	s, _ := serve(t)
	probe := func() net.Conn {
		nc, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", s.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = nc.Close() })
		return nc
	}
	first := probe()
	for range MaxClients - 1 {
		probe()
	}
	require.Eventually(t, func() bool { return s.Clients.Load() == MaxClients }, 5*time.Second, time.Millisecond)
	extra := probe()
	require.NoError(t, extra.SetReadDeadline(time.Now().Add(10*time.Second)))
	_, err := extra.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
	require.EqualValues(t, 1, s.Refused.Load())

	require.NoError(t, first.Close(), "a connection without a request is a question whether somebody is there")
	require.Eventually(t, func() bool { return s.Clients.Load() < MaxClients }, 5*time.Second, time.Millisecond)
	_, err = dial(t, s, "a:1").Pools(t.Context())
	require.NoError(t, err)
}
