package server

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/meta"
	"larder/protocol"
)

func (c *testClient) putName(req protocol.PutNameRequest) (reply protocol.NameReply) {
	c.r.t.Helper()
	if req.Seq == 0 {
		req.Mutation = c.next()
	}
	require.NoError(c.r.t, reply.Decode(c.call(protocol.TypePutName, req.Append(nil))))
	return reply
}

func (c *testClient) put(key, value string) uint64 {
	c.r.t.Helper()
	reply := c.putName(protocol.PutNameRequest{Key: []byte(key), Value: []byte(value), Lease: true})
	require.NoError(c.r.t, reply.Err())
	return reply.Modified
}

func (c *testClient) dropName(req protocol.DeleteNameRequest) (reply protocol.NameReply) {
	c.r.t.Helper()
	req.Mutation = c.next()
	require.NoError(c.r.t, reply.Decode(c.call(protocol.TypeDeleteName, req.Append(nil))))
	return reply
}

func (c *testClient) names(req protocol.ListNamesRequest) (reply protocol.ListNamesReply) {
	c.r.t.Helper()
	require.NoError(c.r.t, reply.Decode(c.call(protocol.TypeListNames, req.Append(nil))))
	return reply
}

// watch asks for changes, and waits if there are none.
func (c *testClient) watch(prefix string, after uint64, wait time.Duration) uint32 {
	c.r.t.Helper()
	req := protocol.WatchNamesRequest{Prefix: []byte(prefix), After: after, TimeoutMS: uint64(wait / time.Millisecond)}
	return c.send(protocol.TypeWatchNames, req.Append(nil))
}

// told is the answer to a watch, as text; "" if it waits.
func (c *testClient) told(seq uint32) string {
	c.r.t.Helper()
	b := c.answer(seq)
	if b == nil {
		return ""
	}
	var reply protocol.WatchNamesReply
	require.NoError(c.r.t, reply.Decode(b))
	if reply.Code != 0 {
		return reply.Code.String()
	}
	text := fmt.Sprintf("to %d", reply.Revision)
	if reply.Compacted {
		text = fmt.Sprintf("compacted at %d", reply.Revision)
	}
	for i := range reply.Changes {
		if x := &reply.Changes[i]; x.Deleted {
			text += fmt.Sprintf(" %d: -%s", x.Modified, x.Key)
		} else {
			text += fmt.Sprintf(" %d: %s=%s", x.Modified, x.Key, x.Value)
		}
	}
	return text
}

func TestNamesNeedTheClusterVersion(t *testing.T) {
	r := newRig(t)
	a := r.client("a")
	reply := a.putName(protocol.PutNameRequest{Key: []byte("k")})
	require.Equal(t, protocol.CodeUnsupported, reply.Code)
	require.Contains(t, reply.Message, "ctl upgrade")
	list := a.names(protocol.ListNamesRequest{})
	require.Equal(t, protocol.CodeUnsupported, list.Code)
	require.Equal(t, "UNSUPPORTED", a.told(a.watch("", 0, time.Second)))
}

func TestNamesAreComparedAndSet(t *testing.T) {
	r := newTierRig(t)
	a, b := r.client("a"), r.client("b")
	first := a.putName(protocol.PutNameRequest{Key: []byte("lock"), Value: []byte("a"), Check: true, Lease: true})
	require.NoError(t, first.Err())
	require.Equal(t, protocol.NameReply{Success: true, Created: 1, Modified: 1}, first)
	lost := b.putName(protocol.PutNameRequest{Key: []byte("lock"), Value: []byte("b"), Check: true, Lease: true})
	require.Equal(t, protocol.CodeConflict, lost.Code)
	require.Equal(t, uint64(1), lost.Modified, "who comes second is told of what is there")
	require.NotEmpty(t, lost.Message)
	require.False(t, lost.Code.Retryable())
	a.mutSeq--
	again := a.putName(protocol.PutNameRequest{Key: []byte("lock"), Value: []byte("a"), Check: true, Lease: true})
	require.Equal(t, first, again, "the same request over again gets the same answer")

	got := b.names(protocol.ListNamesRequest{Key: []byte("lock")})
	require.Equal(t, []protocol.NameInfo{{Key: []byte("lock"), Value: []byte("a"), Created: 1, Modified: 1, Session: a.hello.Session}}, got.Names)
	require.Equal(t, uint64(1), got.Revision)
	require.Empty(t, b.names(protocol.ListNamesRequest{Key: []byte("loc")}).Names)
	require.Equal(t, protocol.CodeConflict, b.dropName(protocol.DeleteNameRequest{Key: []byte("lock"), Check: true, Revision: 9}).Code)
	require.Equal(t, protocol.NameReply{Success: true, Created: 1, Modified: 2}, b.dropName(protocol.DeleteNameRequest{Key: []byte("lock"), Check: true, Revision: 1}))
	gone := b.dropName(protocol.DeleteNameRequest{Key: []byte("lock")})
	require.Equal(t, protocol.CodeNotFound, gone.Code)
	bad := b.putName(protocol.PutNameRequest{})
	require.Equal(t, protocol.CodeBadRequest, bad.Code)
	require.Contains(t, bad.Message, "512")

	maru := r.connect()
	var reply protocol.NameReply
	req := protocol.PutNameRequest{Key: []byte("k")}
	require.NoError(t, reply.Decode(maru.call(protocol.TypePutName, req.Append(nil))))
	require.Equal(t, protocol.CodeSessionExpired, reply.Code, "it has no session")
	require.Equal(t, "SESSION_EXPIRED", maru.told(maru.watch("", 0, time.Second)))
}

func TestNamesAreListedInPages(t *testing.T) {
	r := newTierRig(t)
	a := r.client("a")
	big := string(make([]byte, 60<<10))
	for i := range 100 {
		a.put(fmt.Sprintf("big/%02d", i), big)
	}
	a.put("other", "")
	var keys []string
	req := protocol.ListNamesRequest{Prefix: []byte("big/")}
	for pages := 1; ; pages++ {
		page := a.names(req)
		require.NoError(t, page.Err())
		require.Equal(t, uint64(101), page.Revision)
		for _, n := range page.Names {
			keys = append(keys, string(n.Key))
		}
		req.After = []byte(keys[len(keys)-1])
		if !page.More {
			require.Equal(t, 2, pages)
			break
		}
	}
	require.Len(t, keys, 100)
	require.IsIncreasing(t, keys)
	page := a.names(protocol.ListNamesRequest{Limit: 2})
	require.True(t, page.More)
	require.Len(t, page.Names, 2)

	// A watch from the beginning is told in pages, too.
	told, at := 0, uint64(0)
	for told < 101 {
		var reply protocol.WatchNamesReply
		req := protocol.WatchNamesRequest{After: at}
		require.NoError(t, reply.Decode(a.call(protocol.TypeWatchNames, req.Append(nil))))
		require.NotEmpty(t, reply.Changes)
		told, at = told+len(reply.Changes), reply.Revision
		require.Equal(t, uint64(told), at)
	}
}

func TestWatchesAreToldOfEachChange(t *testing.T) {
	r := newTierRig(t)
	a, b := r.client("a"), r.client("b")
	require.Equal(t, "to 0", a.told(a.watch("", 0, 0)), "who does not wait learns where it is")
	one, other, all := a.watch("x/", 0, time.Minute), a.watch("y/", 0, time.Minute), b.watch("", 0, time.Minute)
	require.Empty(t, a.told(one)+a.told(other)+b.told(all))
	require.Equal(t, int64(3), r.m.n.NameWatches.Load())
	b.put("x/1", "v")
	require.Equal(t, "to 1 1: x/1=v", a.told(one))
	require.Empty(t, a.told(other))
	require.Equal(t, "to 1 1: x/1=v", b.told(all))
	b.put("x/1", "w")
	b.put("x/2", "v")
	require.Equal(t, "to 3 2: x/1=w 3: x/2=v", a.told(a.watch("x/", 1, time.Minute)), "what came in between is not lost")
	require.Equal(t, "compacted at 3", a.told(a.watch("x/", 99, time.Minute)), "of another history")
	require.Empty(t, a.told(other))
	r.alive(61*time.Second, a, b)
	require.Equal(t, "to 3", a.told(other), "its time is over, and nothing was there up to 3")
	require.Zero(t, r.m.n.NameWatches.Load())
	require.True(t, a.c.Idle() && b.c.Idle())

	// The names of a session that ends go, and whoever watches hears of it.
	one = a.watch("", 3, time.Minute)
	gone := b.watch("z", 3, time.Minute)
	r.alive(11*time.Second, a)
	require.Equal(t, "to 5 4: -x/1 5: -x/2", a.told(one))
	require.Equal(t, "SESSION_EXPIRED", b.told(gone))
	require.Zero(t, r.m.n.NameWatches.Load())
}

func TestWatchesAreOfATenant(t *testing.T) {
	r := newTierRig(t)
	a := r.client("a")
	other := r.connect()
	hello := tierHello("o", "", 0)
	hello.Tenant = "other"
	opened := other.handshake(hello)
	require.NoError(t, opened.Err())
	w := other.watch("", 0, time.Minute)
	a.put("k", "v")
	require.Empty(t, other.told(w))
	require.Empty(t, other.names(protocol.ListNamesRequest{}).Names)
	other.put("k", "w")
	require.Equal(t, "to 2 2: k=w", other.told(w))
}

func TestWatchesAreBounded(t *testing.T) {
	r := newTierRig(t)
	a := r.client("a")
	for range maxSessionWatches {
		require.Empty(t, a.told(a.watch("k", 0, time.Minute)))
	}
	require.Equal(t, "LIMIT", a.told(a.watch("k", 0, time.Minute)))
	r.m.CloseClient(a.c)
	require.Zero(t, r.m.n.NameWatches.Load())
	a.c = r.m.NewClient(a)
	a.resume()
	require.Empty(t, a.told(a.watch("k", 0, time.Minute)), "those of a connection that is gone do not count")
}

func TestWatchesEndWithTheTerm(t *testing.T) {
	r := newTierRig(t)
	a := r.client("a")
	a.put("k", "v")
	w := a.watch("", 1, time.Minute)
	r.m.OnLeadership(false, 0)
	require.Equal(t, "NOT_LEADER", a.told(w))
	require.True(t, a.c.Idle())
	require.Equal(t, "NOT_LEADER", a.told(a.watch("", 1, time.Minute)))
	r.elect()
	require.Equal(t, "to 1 1: k=v", a.told(a.watch("", 0, time.Minute)), "a new leader that has applied it all remembers it")
	_, err := r.m.Flush()
	require.NoError(t, err)
	require.NoError(t, r.m.Restored(r.index))
	require.Equal(t, "compacted at 1", a.told(a.watch("", 0, time.Minute)))
	require.Empty(t, a.told(a.watch("", 1, time.Minute)))
	a.put("k", "w")

	r.do(&meta.NewIncarnation{Incarnation: 1})
	r.pass(time.Second)
	b := r.client("b")
	require.Equal(t, "compacted at 3", b.told(b.watch("", 2, time.Minute)), "what came before an incarnation is another history")
}

func TestNamesAreShownToOperators(t *testing.T) {
	cfg := testConfig(t)
	cfg.AdminListen = "127.0.0.1:0"
	s := startServer(t, cfg)
	w := dial(t, "unix", s.Config().Socket)
	w.open("a")
	for _, key := range []string{"a/1", "a/2", "b\xff"} {
		req := protocol.PutNameRequest{Mutation: w.next(), Key: []byte(key), Value: []byte("v"), Lease: true}
		var reply protocol.NameReply
		require.NoError(t, reply.Decode(w.call(protocol.TypePutName, req.Append(nil))))
		require.NoError(t, reply.Err())
	}
	list, more := s.Names("", []byte("a/"), nil, 1)
	require.True(t, more)
	require.Equal(t, []NameStatus{{Key: []byte("a/1"), Value: []byte("v"), Created: 1, Modified: 1, Session: w.session, Instance: "a"}}, list)
	list, more = s.Names("", nil, []byte("a/2"), 10)
	require.False(t, more)
	require.Len(t, list, 1)
	list, _ = s.Names("nobody", nil, nil, 10)
	require.Empty(t, list)
	require.Equal(t, 3, s.Status().Stats.Names)
}
