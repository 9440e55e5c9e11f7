package server

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/cxl"
	"larder/internal/freeport"
	"larder/protocol"
)

func TestMalformedFramesGetAnErrorAndTheConnectionEnds(t *testing.T) {
	s := startServer(t, testConfig(t))
	good := protocol.Header{Type: protocol.TypeHeartbeat, Sequence: 1, Length: 1}.Append(nil)
	for name, b := range map[string][]byte{
		"magic":   append([]byte("GET / HTTP/1.1\r\n"), make([]byte, 16)...),
		"version": func() []byte { b := append(append([]byte(nil), good...), 0x80); b[2] = 9; return b }(),
		"length": func() []byte {
			b := append([]byte(nil), good...)
			binary.BigEndian.PutUint32(b[12:], protocol.MaxPayload+1)
			return b
		}(),
		"compressed rubbish": func() []byte {
			b := append(append([]byte(nil), good...), 0x80)
			b[4] = protocol.FlagCompressed
			return b
		}(),
	} {
		t.Run(name, func(t *testing.T) {
			w := dial(t, "tcp", s.Addr())
			_, err := w.c.Write(b)
			require.NoError(t, err)
			f := w.receive()
			require.Equal(t, protocol.ReplyBit, f.h.Type)
			require.Zero(t, f.h.Sequence)
			var reply protocol.HeartbeatReply
			require.NoError(t, reply.Decode(f.b))
			require.Equal(t, protocol.CodeBadRequest, reply.Code)
			_, _, err = w.r.Next()
			require.ErrorIs(t, err, io.EOF)
		})
	}
}

func TestBadMessagesCostOnlyThemselves(t *testing.T) {
	s := startServer(t, testConfig(t))
	w := dial(t, "tcp", s.Addr())
	w.open("a")
	huge := make([][]byte, protocol.MaxBatch+1)
	for name, tc := range map[string]struct {
		typ  protocol.Type
		body []byte
		want protocol.Code
	}{
		"not msgpack":    {protocol.TypeLookup, []byte{0xc1}, protocol.CodeBadRequest},
		"no key":         {protocol.TypeLookup, []byte{0x80}, protocol.CodeBadRequest},
		"long key":       {protocol.TypeLookup, (&protocol.LookupRequest{Keys: [][]byte{make([]byte, 2000)}}).AppendAs(nil, protocol.TypeLookup), protocol.CodeKeyTooLong},
		"large batch":    {protocol.TypeBatchLookup, (&protocol.LookupRequest{Keys: huge}).AppendAs(nil, protocol.TypeBatchLookup), protocol.CodeLimit},
		"unknown type":   {0x7e, []byte{0x80}, protocol.CodeUnsupported},
		"a push":         {protocol.TypeRevoke, []byte{0x80}, protocol.CodeUnsupported},
		"shutdown":       {protocol.TypeShutdown, []byte{0x80}, protocol.CodeInternal},
		"size 0":         {protocol.TypeRequestAlloc, (&protocol.AllocRequest{InstanceID: "a"}).Append(nil), protocol.CodeBadRequest},
		"size 2^63":      {protocol.TypeRequestAlloc, (&protocol.AllocRequest{InstanceID: "a", Size: 1 << 63}).Append(nil), protocol.CodeNoSpace},
		"page size":      {protocol.TypeRequestAlloc, (&protocol.AllocRequest{InstanceID: "a", Size: 8192, PageSize: 5000}).Append(nil), protocol.CodeMisaligned},
		"pin kind":       {protocol.TypePin, (&protocol.KeysRequest{Keys: [][]byte{{1}}, Pin: protocol.PinSpec{Kind: "velcro"}}).AppendAs(nil, protocol.TypePin), protocol.CodeBadRequest},
		"no scope":       {protocol.TypeClear, []byte{0x80}, protocol.CodeBadRequest},
		"newer protocol": {protocol.TypeHandshake, (&protocol.HandshakeRequest{InstanceID: "b", Protocol: 99}).Append(nil), protocol.CodeUnsupported},
	} {
		t.Run(name, func(t *testing.T) {
			var reply protocol.HeartbeatReply
			require.NoError(t, reply.Decode(w.call(tc.typ, tc.body)))
			require.Equal(t, tc.want, reply.Code, reply.Message)
			require.NotEmpty(t, reply.Message)
		})
	}
	var alive protocol.HeartbeatReply
	require.NoError(t, alive.Decode(w.call(protocol.TypeHeartbeat, []byte{0x80})))
	require.NoError(t, alive.Err())
}

func TestWrongRegistrationsAreRefused(t *testing.T) {
	s := startServer(t, testConfig(t))
	w := dial(t, "tcp", s.Addr())
	w.open("a")
	a := w.alloc(protocol.AllocRequest{InstanceID: "a", Size: 1 << 20, PageSize: 64 << 10})
	require.NoError(t, a.Err())
	r := w.register(a.Region, 0, "first")
	require.True(t, r.Results[0].IsNew)
	entry := protocol.RegisterEntry{
		Key: []byte("x"), RegionID: a.Region.RegionID, Epoch: a.Region.Epoch, KVOffset: 64 << 10, KVLength: 1000,
	}
	for name, tc := range map[string]struct {
		change func(e *protocol.RegisterEntry)
		want   protocol.Code
	}{
		"outside":        {func(e *protocol.RegisterEntry) { e.KVOffset = 2 << 20 }, protocol.CodeOutOfRegion},
		"across the end": {func(e *protocol.RegisterEntry) { e.KVLength = 1 << 20 }, protocol.CodeOutOfRegion},
		"overflow":       {func(e *protocol.RegisterEntry) { e.KVOffset = ^uint64(0) - 100 }, protocol.CodeOutOfRegion},
		"overlap":        {func(e *protocol.RegisterEntry) { e.KVOffset = 0 }, protocol.CodeOverlap},
		"misaligned":     {func(e *protocol.RegisterEntry) { e.KVOffset++ }, protocol.CodeMisaligned},
		"stale epoch":    {func(e *protocol.RegisterEntry) { e.Epoch++ }, protocol.CodeStaleEpoch},
		"no such region": {func(e *protocol.RegisterEntry) { e.RegionID = 1 << 40 }, protocol.CodeStaleEpoch},
		"empty":          {func(e *protocol.RegisterEntry) { e.KVLength = 0 }, protocol.CodeBadRequest},
	} {
		t.Run(name, func(t *testing.T) {
			e := entry
			tc.change(&e)
			req := protocol.RegisterRequest{Mutation: w.next(), Entries: []protocol.RegisterEntry{e}}
			var reply protocol.RegisterReply
			require.NoError(t, reply.DecodeAs(w.call(protocol.TypeRegister, req.AppendAs(nil, protocol.TypeRegister)), protocol.TypeRegister))
			require.Equal(t, tc.want, reply.Code)
		})
	}
}

func TestHalfAFrameIsCutOffInTime(t *testing.T) {
	cfg := testConfig(t)
	cfg.HandshakeTimeout = 100 * time.Millisecond
	s := startServer(t, cfg)
	w := dial(t, "tcp", s.Addr())
	_, err := w.c.Write([]byte{0xcf, 0x00, 0x01})
	require.NoError(t, err)
	require.NoError(t, w.c.SetReadDeadline(time.Now().Add(10*time.Second)))
	_, err = w.c.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
}

func TestAClientThatNeverReadsIsCutOff(t *testing.T) {
	cfg := testConfig(t)
	cfg.WriteTimeout = 200 * time.Millisecond
	s := startServer(t, cfg)
	w := dial(t, "tcp", s.Addr())
	w.open("a")
	a := w.alloc(protocol.AllocRequest{InstanceID: "a", Size: 1 << 20, PageSize: 4096})
	require.NoError(t, a.Err())
	w.register(a.Region, 0, "k")
	req := protocol.LookupRequest{Packed: true}
	for range 1000 {
		req.Keys = append(req.Keys, []byte("k"))
	}
	b, mark := protocol.BeginFrame(nil, protocol.TypeBatchLookup, 7)
	b = protocol.EndFrame(req.AppendAs(b, protocol.TypeBatchLookup), mark)
	require.NoError(t, w.c.SetWriteDeadline(time.Now().Add(20*time.Second)))
	var err error
	sent := 0
	for err == nil {
		_, err = w.c.Write(b)
		sent += len(b)
	}
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "it is cut off, not just held up")
	require.Eventually(t, func() bool { return s.Counters().ConnectionsDropped.Load() == 1 }, 10*time.Second, time.Millisecond)
	// Others are served meanwhile and afterwards.
	other := dial(t, "tcp", s.Addr())
	other.open("b")
	require.True(t, other.lookup(0, "k").Results[0].Found)
}

func TestThousandsOfIdleConnectionsCostLittle(t *testing.T) {
	const n = 2000
	s := startServer(t, testConfig(t))
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	conns := make([]net.Conn, n)
	for i := range conns {
		c, err := net.Dial("unix", s.Config().Socket)
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		conns[i] = c
	}
	beat := append(protocol.Header{Type: protocol.TypeHeartbeat, Sequence: 1, Length: 1}.Append(nil), 0x80)
	for _, c := range conns {
		_, err := c.Write(beat)
		require.NoError(t, err)
		_, err = io.ReadFull(c, make([]byte, protocol.HeaderSize))
		require.NoError(t, err)
	}
	require.Equal(t, int64(n), s.Counters().Connections.Load())
	runtime.GC()
	runtime.ReadMemStats(&after)
	per := (int64(after.HeapAlloc+after.StackInuse) - int64(before.HeapAlloc+before.StackInuse)) / n
	require.Less(t, per, int64(64<<10), "bytes per connection")
}

func TestTooManyConnectionsAreRefused(t *testing.T) {
	cfg := testConfig(t)
	cfg.MaxConnections = 1
	s := startServer(t, cfg)
	one := dial(t, "tcp", s.Addr())
	one.open("a")
	two := dial(t, "tcp", s.Addr())
	f := two.receive()
	var reply protocol.HeartbeatReply
	require.NoError(t, reply.Decode(f.b))
	require.Equal(t, protocol.CodeBusy, reply.Code)
}

// child starts a process that does nothing.
func child(t *testing.T) (pid, start uint64, kill func()) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"=1")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	_, err = bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	start, _, err = cxl.ProcessStart(cmd.Process.Pid)
	require.NoError(t, err)
	kill = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	t.Cleanup(kill)
	return uint64(cmd.Process.Pid), start, kill
}

func TestTheRegionsOfAKilledProcessAreTakenAtOnce(t *testing.T) {
	cfg := testConfig(t)
	s := startServer(t, cfg)
	pid, start, kill := child(t)
	host := localHost()
	owner, taker := dial(t, "tcp", s.Addr()), dial(t, "tcp", s.Addr())
	hello := owner.handshake(protocol.HandshakeRequest{
		InstanceID: "owner", BootID: host.BootID, PIDNamespace: host.PIDNamespace, PID: pid, PIDStart: start,
	})
	require.NoError(t, hello.Err())
	taker.open("taker")
	size := uint64(cfg.Pool[0].Size) - cxl.HeaderSpan
	a := owner.alloc(protocol.AllocRequest{InstanceID: "owner", Size: size, PageSize: 64 << 10})
	require.NoError(t, a.Err())
	require.True(t, owner.register(a.Region, 0, "k").Results[0].IsNew)
	kill()
	b := taker.alloc(protocol.AllocRequest{InstanceID: "taker", Size: size, PageSize: 64 << 10, Evict: true, TimeoutMS: 10_000})
	require.NoError(t, b.Err())
	require.Equal(t, a.Region.RegionID, b.Region.RegionID)
	require.Equal(t, uint64(2), b.Phase, "it is proven dead: nobody has to be asked")
}

func TestARestartFindsEverything(t *testing.T) {
	cfg := testConfig(t)
	s, err := Start(cfg, testLogger(t))
	require.NoError(t, err)
	w := dial(t, "tcp", s.Addr())
	hello := w.open("a")
	a := w.alloc(protocol.AllocRequest{InstanceID: "a", Size: 1 << 20, PageSize: 64 << 10})
	require.NoError(t, a.Err())
	w.register(a.Region, 0, "one", "two")
	require.NoError(t, s.Stop(t.Context()))

	s = startServer(t, cfg)
	w2 := dial(t, "tcp", s.Addr())
	again := w2.handshake(protocol.HandshakeRequest{InstanceID: "a", Session: hello.Session, Secret: hello.Secret})
	require.NoError(t, again.Err())
	require.True(t, again.Resumed)
	require.Equal(t, []uint64{0, 2 * 64 << 10}, again.Regions[0].Occupied)
	res := w2.lookup(0, "one", "two").Results
	require.True(t, res[0].Found && res[1].Found)
	require.Equal(t, hello.Devices[0].Generation, res[0].Generation)
	report, err := s.Check(t.Context(), true)
	require.NoError(t, err)
	require.Empty(t, report.Problems)
	require.Equal(t, uint64(2), report.Entries)
}

func TestBytesThatDidNotSurviveAreNotServed(t *testing.T) {
	for name, damage := range map[string]func(path string) error{
		"removed":   os.Remove,
		"truncated": func(path string) error { return os.Truncate(path, 4<<20) },
		"emptied": func(path string) error {
			return errors.Join(os.Truncate(path, 0), os.Truncate(path, 64<<20))
		},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig(t)
			s, err := Start(cfg, testLogger(t))
			require.NoError(t, err)
			w := dial(t, "tcp", s.Addr())
			hello := w.open("a")
			a := w.alloc(protocol.AllocRequest{InstanceID: "a", Size: 1 << 20, PageSize: 64 << 10})
			require.NoError(t, a.Err())
			w.register(a.Region, 0, "one", "two")
			require.NoError(t, s.Stop(t.Context()))
			require.NoError(t, damage(cfg.Pool[0].Path))

			s = startServer(t, cfg)
			w = dial(t, "tcp", s.Addr())
			w.open("b")
			require.False(t, w.lookup(0, "one").Results[0].Found)
			again := dial(t, "tcp", s.Addr()).handshake(protocol.HandshakeRequest{InstanceID: "a", Session: hello.Session, Secret: hello.Secret})
			require.NoError(t, again.Err())
			require.NotEqual(t, hello.Devices[0].Generation, again.Devices[0].Generation)
			require.Eventually(t, func() bool { return s.Status().Stats.Entries == 0 }, 10*time.Second, time.Millisecond)
			b := w.alloc(protocol.AllocRequest{InstanceID: "b", Size: 1 << 20, PageSize: 64 << 10})
			require.NoError(t, b.Err())
		})
	}
}

func TestAnotherPoolsDeviceIsRefused(t *testing.T) {
	cfg := testConfig(t)
	s, err := Start(cfg, testLogger(t))
	require.NoError(t, err)
	require.NoError(t, s.Stop(t.Context()))
	cfg.DataDir = t.TempDir()
	_, err = Start(cfg, testLogger(t))
	require.ErrorIs(t, err, cxl.ErrForeignHeader)
	cfg.DataDir = t.TempDir()
	cfg.Pool[0].Force = true
	s, err = Start(cfg, testLogger(t))
	require.NoError(t, err)
	require.NoError(t, s.Stop(t.Context()))
}

// startCluster starts three members, and returns them once one of them serves.
func startCluster(t *testing.T, changes ...func(*Config)) []*Server {
	t.Helper()
	base := testConfig(t)
	for _, change := range changes {
		change(&base)
	}
	const members = 3
	peers := make([]PeerConfig, 0, members)
	for id := range uint64(members) {
		peers = append(peers, PeerConfig{ID: id + 1, Addr: freeport.For(t), Client: freeport.For(t), Admin: "127.0.0.1:1"})
	}
	servers := make([]*Server, 0, members)
	for i, p := range peers {
		cfg := base
		cfg.NodeID, cfg.Peers, cfg.DataDir = p.ID, peers, t.TempDir()
		cfg.Listen, cfg.PeerListen = p.Client, p.Addr
		cfg.Socket = base.Socket + strconv.Itoa(i)
		servers = append(servers, startServer(t, cfg))
	}
	leaderOf(t, servers)
	return servers
}

// leaderOf waits for a member that leads with its devices in service.
func leaderOf(t *testing.T, servers []*Server) *Server {
	t.Helper()
	var leader *Server
	require.Eventually(t, func() bool {
		for _, s := range servers {
			if s.master.Serving() && s.Ready() == nil {
				leader = s
				return true
			}
		}
		return false
	}, 20*time.Second, 5*time.Millisecond)
	return leader
}

func TestAClusterSurvivesItsLeader(t *testing.T) {
	servers := startCluster(t)
	leader := leaderOf(t, servers)
	w := dial(t, "tcp", leader.Addr())
	hello := w.open("a")
	require.Len(t, hello.Members, 3)
	a := w.alloc(protocol.AllocRequest{InstanceID: "a", Size: 1 << 20, PageSize: 64 << 10})
	require.NoError(t, a.Err())
	require.True(t, w.register(a.Region, 0, "k").Results[0].IsNew)
	require.True(t, w.lookup(0, "k").Results[0].Found)

	var rest []*Server
	for _, s := range servers {
		if s == leader {
			continue
		}
		rest = append(rest, s)
		f := dial(t, "tcp", s.Addr())
		require.Eventually(t, func() bool { // once it knows its leader
			reply := f.handshake(protocol.HandshakeRequest{InstanceID: "b"})
			return reply.Code == protocol.CodeNotLeader && reply.Error.Leader == leader.Addr()
		}, 10*time.Second, 5*time.Millisecond)
		req := protocol.KeysRequest{Keys: [][]byte{[]byte("k"), []byte("none")}}
		var reply protocol.KeysReply
		require.NoError(t, reply.DecodeAs(f.call(protocol.TypeBatchExists, req.AppendAs(nil, protocol.TypeBatchExists)), protocol.TypeBatchExists))
		require.NoError(t, reply.Err())
		require.Equal(t, []bool{true, false}, reply.Results, "any member answers what needs no lease")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	require.NoError(t, leader.Stop(ctx))
	next := leaderOf(t, rest)
	w = dial(t, "tcp", next.Addr())
	again := w.handshake(protocol.HandshakeRequest{InstanceID: "a", Session: hello.Session, Secret: hello.Secret})
	require.NoError(t, again.Err())
	require.True(t, again.Resumed)
	require.True(t, w.lookup(0, "k").Results[0].Found)
	w.mutSeq = 2
	require.True(t, w.register(a.Region, 1, "k2").Results[0].IsNew)
	require.Equal(t, hello.Devices[0].Generation, w.lookup(0, "k").Results[0].Generation, "a sound device keeps its generation")
}

func TestAnOpenDeviceThatIsTruncatedIsRetired(t *testing.T) {
	cfg := testConfig(t)
	s := startServer(t, cfg)
	w := dial(t, "tcp", s.Addr())
	hello := w.open("a")
	a := w.alloc(protocol.AllocRequest{InstanceID: "a", Size: 1 << 20, PageSize: 64 << 10})
	require.NoError(t, a.Err())
	w.register(a.Region, 0, "one")
	require.NoError(t, os.Truncate(cfg.Pool[0].Path, 4<<20))
	require.Eventually(t, func() bool { return !w.lookup(0, "one").Results[0].Found }, 20*time.Second, 20*time.Millisecond)
	require.Eventually(t, func() bool { return s.Ready() == nil }, 20*time.Second, 20*time.Millisecond)
	require.NotEqual(t, hello.Devices[0].Generation, s.master.Devices()[0].Generation)
}

func TestRepliesMadeInDoubtAreReplacedByErrors(t *testing.T) {
	var out []byte
	for seq := range uint32(3) {
		h := protocol.Header{Type: protocol.TypeLookup, Sequence: seq + 1}
		out = appendLookup(out, h, []protocol.LookupResult{{Found: true}}, false)
	}
	out = disown(out, &protocol.Error{Code: protocol.CodeNotLeader, Message: "no", Leader: "b:1"})
	for seq := range uint32(3) {
		h, b, err := protocol.ParseFrame(out)
		require.NoError(t, err)
		require.Equal(t, protocol.TypeLookup.Reply(), h.Type)
		require.Equal(t, seq+1, h.Sequence)
		var reply protocol.LookupReply
		require.NoError(t, reply.DecodeAs(b, protocol.TypeLookup))
		require.Equal(t, protocol.CodeNotLeader, reply.Code)
		out = out[protocol.HeaderSize+len(b):]
	}
	require.Empty(t, out)
}

// far is a connection that crosses a network, by its addresses.
type far struct{ *net.TCPConn }

func (far) LocalAddr() net.Addr  { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 7400} }
func (far) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 2), Port: 40000} }

// dialFar connects to a server that takes the connection for one across a network.
func dialFar(t *testing.T, s *Server) *wire {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	w := dial(t, "tcp", l.Addr().String())
	c, err := l.Accept()
	require.NoError(t, err)
	require.NoError(t, l.Close())
	s.net.add(far{c.(*net.TCPConn)})
	return w
}

func TestLargeRepliesAreCompressedAcrossANetwork(t *testing.T) {
	s := startServer(t, testConfig(t))
	owner := dial(t, "tcp", s.Addr())
	owner.open("owner")
	a := owner.alloc(protocol.AllocRequest{InstanceID: "owner", Size: 1 << 20, PageSize: 4096})
	require.NoError(t, a.Err())
	keys := make([][]byte, protocol.MaxBatch)
	names := make([]string, 100)
	for i := range keys {
		keys[i] = []byte("k" + strconv.Itoa(i%len(names)))
		names[i%len(names)] = string(keys[i])
	}
	owner.register(a.Region, 0, names...)
	lookup := (&protocol.LookupRequest{Keys: keys, Packed: true}).AppendAs(nil, protocol.TypeBatchLookup)
	one := (&protocol.LookupRequest{Keys: keys[:1], Packed: true}).AppendAs(nil, protocol.TypeBatchLookup)
	stores := func(w *wire) []byte { // answered through the log, with where the keys lie already
		req := protocol.RegisterRequest{Mutation: w.next()}
		for _, k := range keys[:2048] {
			req.Entries = append(req.Entries, protocol.RegisterEntry{
				Key: k, RegionID: a.Region.RegionID, Epoch: a.Region.Epoch, KVOffset: 200 * 4096, KVLength: 4096,
			})
		}
		return req.AppendAs(nil, protocol.TypeBatchRegister)
	}
	for name, tc := range map[string]struct {
		dial     func() *wire
		features uint64
		want     bool
	}{
		"a network":             {func() *wire { return dialFar(t, s) }, protocol.FeatureCompression, true},
		"a network, not agreed": {func() *wire { return dialFar(t, s) }, 0, false},
		"loopback":              {func() *wire { return dial(t, "tcp", s.Addr()) }, protocol.FeatureCompression, false},
		"Unix":                  {func() *wire { return dial(t, "unix", s.Config().Socket) }, protocol.FeatureCompression, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := tc.dial()
			require.NoError(t, new(w.handshake(protocol.HandshakeRequest{InstanceID: name, Features: tc.features})).Err())
			for range 3 {
				w.send(protocol.TypeBatchLookup, one)
				w.send(protocol.TypeBatchLookup, lookup)
				w.send(protocol.TypeBatchLookup, one)
				for i, n := range []int{1, len(keys), 1} {
					f := w.receive()
					require.Equal(t, tc.want && i == 1, f.h.Flags&protocol.FlagCompressed != 0)
					var reply protocol.LookupReply
					require.NoError(t, reply.DecodeAs(f.b, protocol.TypeBatchLookup))
					require.Len(t, reply.Results, n)
					for _, r := range reply.Results {
						require.True(t, r.Found)
					}
				}
				seq := w.send(protocol.TypeBatchRegister, stores(w))
				f := w.receive()
				require.Equal(t, seq, f.h.Sequence)
				require.Equal(t, tc.want, f.h.Flags&protocol.FlagCompressed != 0)
				var reply protocol.RegisterReply
				require.NoError(t, reply.DecodeAs(f.b, protocol.TypeBatchRegister))
				require.NoError(t, reply.Err())
				require.Equal(t, a.Region.RegionID, reply.Results[2047].Existing.RegionID)
			}
		})
	}
}

func TestCompressedRequestsAreReadWhateverWasAgreed(t *testing.T) {
	s := startServer(t, testConfig(t))
	w := dial(t, "tcp", s.Addr())
	w.open("a")
	req := protocol.LookupRequest{Packed: true}
	for i := range protocol.MaxBatch {
		req.Keys = append(req.Keys, []byte("a key of a block "+strconv.Itoa(i)))
	}
	b, mark := protocol.BeginFrame(nil, protocol.TypeBatchLookup, 77)
	b = protocol.CompressFrames(protocol.EndFrame(req.AppendAs(b, protocol.TypeBatchLookup), mark), mark)
	require.NotZero(t, b[4]&protocol.FlagCompressed)
	_, err := w.c.Write(b)
	require.NoError(t, err)
	var reply protocol.LookupReply
	require.NoError(t, reply.DecodeAs(w.reply(77), protocol.TypeBatchLookup))
	require.NoError(t, reply.Err())
	require.Len(t, reply.Results, protocol.MaxBatch)
}
