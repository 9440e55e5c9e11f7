package integration

import (
	"encoding/binary"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/integration/cluster"
	"larder/protocol"
)

// TestBadInputCostsItsSenderOnly sends what no sound client sends over real sockets. Each gets an error that says what is
// wrong, or a closed connection, and the server goes on serving others.
func TestBadInputCostsItsSenderOnly(t *testing.T) {
	c := cluster.Start(t, cluster.Options{Pool: "66MiB", Flags: []string{"--write-timeout=2s", "--handshake-timeout=3s"}})
	addr := c.Nodes[0].Client
	x := c.Open(client.Config{})
	cluster.Fill(t, x, "sound", 64, cluster.PageSize)
	others := func(t *testing.T) {
		t.Helper()
		require.Equal(t, 64, cluster.Held(t, x, "sound", 64))
		_, err := x.Put(t.Context(), []byte("sound/"+t.Name()), cluster.MakeValue(nil, "v", 1, 100))
		require.NoError(t, err)
	}
	cluster.Within(t, "the end of the new leader's grace", func() error {
		status, err := c.Nodes[0].Status()
		if err == nil && status.GraceMS > 0 {
			err = fmt.Errorf("%d ms are left", status.GraceMS) // requests for what cannot be had still wait
		}
		return err
	})
	t.Run("frames", func(t *testing.T) { badFrames(t, addr); others(t) })
	t.Run("messages", func(t *testing.T) { badMessages(t, addr); others(t) })
	t.Run("registers", func(t *testing.T) { badRegisters(t, addr); others(t) })
	t.Run("allocs", func(t *testing.T) { badAllocs(t, addr); others(t) })
	t.Run("never reads", func(t *testing.T) { neverReads(t, addr, x); others(t) })
	t.Run("idle connections", func(t *testing.T) { idleConnections(t, c, others) })
	c.Check()
}

// header makes the head of a frame.
func header(magic uint16, version uint8, typ protocol.Type, length uint32) []byte {
	b := binary.BigEndian.AppendUint16(nil, magic)
	b = append(b, version, byte(typ), 0, 0, 0, 0)
	b = binary.BigEndian.AppendUint32(b, 1)
	return binary.BigEndian.AppendUint32(b, length)
}

// badFrames sends bytes that are no frames: the connection ends.
func badFrames(t *testing.T, addr string) {
	t.Helper()
	for name, b := range map[string][]byte{
		"noise":       []byte("GET / HTTP/1.1\r\nHost: larder\r\n\r\n"),
		"magic":       header(0xCF01, 1, protocol.TypeHeartbeat, 0),
		"version":     header(0xCF00, 9, protocol.TypeHeartbeat, 0),
		"oversized":   header(0xCF00, 1, protocol.TypeLookup, protocol.MaxPayload+1),
		"largest u32": header(0xCF00, 1, protocol.TypeLookup, 1<<32-1),
		"zeros":       make([]byte, 4096),
	} {
		t.Run(name, func(t *testing.T) {
			conn := cluster.DialRaw(t, addr)
			_, err := conn.Conn.Write(b)
			require.NoError(t, err)
			conn.Ended() //nolint:errcheck // it may be a reset
		})
	}
	t.Run("cut off", func(t *testing.T) {
		conn := cluster.DialRaw(t, addr)
		_, err := conn.Conn.Write(append(header(0xCF00, 1, protocol.TypeLookup, 1000), "half"...))
		require.NoError(t, err)
		require.NoError(t, conn.Conn.(*net.TCPConn).CloseWrite())
		conn.Ended() //nolint:errcheck // however
	})
}

// badMessages sends frames whose payloads are not what their types promise: an error each, and the connection goes on.
func badMessages(t *testing.T, addr string) {
	t.Helper()
	conn := cluster.DialRaw(t, addr)
	long := []byte(strings.Repeat("k", protocol.MaxKeyBytes+1))
	many := make([][]byte, protocol.MaxBatch+1)
	for i := range many {
		many[i] = []byte("k")
	}
	for name, v := range map[string]struct {
		typ     protocol.Type
		payload func([]byte) []byte
		code    protocol.Code
	}{
		"empty":         {protocol.TypeLookup, cluster.RawPayload(nil), protocol.CodeBadRequest},
		"no map":        {protocol.TypeLookup, cluster.RawPayload([]byte{0x93, 1, 2, 3}), protocol.CodeBadRequest},
		"cut map":       {protocol.TypeLookup, cluster.RawPayload([]byte{0x82, 0xa3, 'k', 'e', 'y'}), protocol.CodeBadRequest},
		"huge map":      {protocol.TypeRegister, cluster.RawPayload([]byte{0xdf, 0xff, 0xff, 0xff, 0xff}), protocol.CodeBadRequest},
		"deep nesting":  {protocol.TypeLookup, cluster.RawPayload(append([]byte{0x81, 0xa1, 'x'}, []byte(strings.Repeat("\x91", 10000))...)), protocol.CodeBadRequest},
		"unknown type":  {protocol.Type(0x6E), protocol.AppendEmpty, protocol.CodeUnsupported},
		"a push":        {protocol.TypeRevoke, protocol.AppendEmpty, protocol.CodeUnsupported},
		"shutdown":      {protocol.TypeShutdown, protocol.AppendEmpty, protocol.CodeForbidden},
		"long key":      {protocol.TypeLookup, cluster.As(protocol.TypeLookup, (&protocol.LookupRequest{Keys: [][]byte{long}}).AppendAs), protocol.CodeKeyTooLong},
		"long batch":    {protocol.TypeBatchLookup, cluster.As(protocol.TypeBatchLookup, (&protocol.LookupRequest{Keys: many}).AppendAs), protocol.CodeLimit},
		"long instance": {protocol.TypeHandshake, (&protocol.HandshakeRequest{InstanceID: string(long), Protocol: 1}).Append, protocol.CodeBadRequest},
	} {
		t.Run(name, func(t *testing.T) {
			reply, err := conn.Do(v.typ, v.payload)
			require.NoError(t, err)
			var e protocol.SuccessReply
			require.NoError(t, e.Decode(reply.Payload))
			t.Logf("%s: %s", e.Code, e.Message)
			require.NotEmpty(t, e.Message)
			if v.code != protocol.CodeForbidden { // Maru's own error, whose code is this server's choice
				require.Equal(t, v.code, e.Code)
			}
		})
	}
}

// badRegisters registers what does not fit its region.
func badRegisters(t *testing.T, addr string) {
	t.Helper()
	conn := cluster.DialRaw(t, addr)
	conn.Handshake("hostile")
	given, err := conn.Alloc(protocol.AllocRequest{
		Mutation: protocol.Mutation{Seq: 1, Acked: 1}, InstanceID: "hostile", Size: 1 << 20, PageSize: cluster.PageSize,
	})
	require.NoError(t, err)
	region := given.Region
	victim := cluster.DialRaw(t, addr)
	victim.Handshake("neighbour")
	other, err := victim.Alloc(protocol.AllocRequest{
		Mutation: protocol.Mutation{Seq: 1, Acked: 1}, InstanceID: "neighbour", Size: 1 << 20, PageSize: cluster.PageSize,
	})
	require.NoError(t, err)

	entry := func(key string, offset, length uint64) protocol.RegisterEntry {
		return protocol.RegisterEntry{
			Key: []byte(key), RegionID: region.RegionID, KVOffset: offset, KVLength: length, Epoch: region.Epoch,
		}
	}
	seq := uint64(2)
	require.NoError(t, conn.Register(seq, entry("hostile/ok", 0, 100)))
	foreign, stale, nowhere := entry("a", 0, 100), entry("a", cluster.PageSize, 100), entry("a", 0, 100)
	foreign.RegionID, foreign.Epoch = other.Region.RegionID, other.Region.Epoch
	stale.Epoch += 7
	nowhere.RegionID = 1 << 20
	for name, v := range map[string]struct {
		e    protocol.RegisterEntry
		code protocol.Code
	}{
		"behind its region":  {entry("a", region.Length, 100), protocol.CodeOutOfRegion},
		"across its end":     {entry("a", region.Length-cluster.PageSize, 2*cluster.PageSize), protocol.CodeOutOfRegion},
		"offset of 2^63":     {entry("a", 1<<63, 100), protocol.CodeOutOfRegion},
		"length of 2^63":     {entry("a", 0, 1<<63), protocol.CodeBadRequest},
		"wrapping around":    {entry("a", 1<<64-cluster.PageSize, 2*cluster.PageSize), protocol.CodeOutOfRegion},
		"between two pages":  {entry("a", 100, 100), protocol.CodeMisaligned},
		"overlapping":        {entry("a", 0, 2*cluster.PageSize), protocol.CodeOverlap},
		"empty":              {entry("a", cluster.PageSize, 0), protocol.CodeBadRequest},
		"with a long key":    {entry(strings.Repeat("k", protocol.MaxKeyBytes+1), cluster.PageSize, 100), protocol.CodeKeyTooLong},
		"in another's":       {foreign, protocol.CodeNotOwner},
		"with a stale epoch": {stale, protocol.CodeStaleEpoch},
		"nowhere":            {nowhere, protocol.CodeStaleEpoch},
	} {
		t.Run(name, func(t *testing.T) {
			seq++
			err := conn.Register(seq, v.e)
			require.Error(t, err)
			t.Log(err)
			require.Equal(t, v.code, protocol.CodeOf(err))
		})
	}
	seq++
	require.NoError(t, conn.Register(seq, entry("hostile/still", cluster.PageSize, 100)), "the session goes on")
}

// badAllocs asks for memory that cannot be given.
func badAllocs(t *testing.T, addr string) {
	t.Helper()
	conn := cluster.DialRaw(t, addr)
	conn.Handshake("greedy")
	seq := uint64(0)
	for name, v := range map[string]struct {
		size, page, need uint64
		codes            []protocol.Code
	}{
		"size 0":                   {0, cluster.PageSize, 0, []protocol.Code{protocol.CodeBadRequest, protocol.CodeMisaligned}},
		"size 2^63":                {1 << 63, cluster.PageSize, 0, []protocol.Code{protocol.CodeNoSpace, protocol.CodeLimit}},
		"size 2^64-1":              {1<<64 - 1, cluster.PageSize, 0, []protocol.Code{protocol.CodeNoSpace, protocol.CodeLimit}},
		"larger than the pool":     {1 << 30, cluster.PageSize, 0, []protocol.Code{protocol.CodeNoSpace}},
		"page that is no multiple": {1 << 20, 5000, 0, []protocol.Code{protocol.CodeMisaligned, protocol.CodeBadRequest}},
		"page of 2^63":             {1 << 20, 1 << 63, 0, []protocol.Code{protocol.CodeMisaligned, protocol.CodeBadRequest, protocol.CodeLimit}},
		"2^63 pages":               {1 << 20, cluster.PageSize, 1 << 63, []protocol.Code{protocol.CodeNoSpace, protocol.CodeLimit, protocol.CodeBadRequest}},
	} {
		t.Run(name, func(t *testing.T) {
			seq++
			reply, err := conn.Alloc(protocol.AllocRequest{
				Mutation: protocol.Mutation{Seq: seq, Acked: seq}, InstanceID: "greedy",
				Size: v.size, PageSize: v.page, NeedPages: v.need, Evict: true, TimeoutMS: 100,
			})
			require.Error(t, err, "%+v", reply)
			t.Log(err)
			require.Contains(t, v.codes, protocol.CodeOf(err))
		})
	}
}

// neverReads has a client ask without end and read nothing: it is cut off.
func neverReads(t *testing.T, addr string, x *client.Client) {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	defer conn.Close() //nolint:errcheck // cut off already
	keys := make([][]byte, 1024)
	for i := range keys {
		keys[i] = fmt.Appendf(nil, "sound/%d", i%64)
	}
	var burst []byte
	for range 16 {
		buf, mark := protocol.BeginFrame(burst, protocol.TypeBatchLookup, 1)
		burst = protocol.EndFrame((&protocol.LookupRequest{Keys: keys}).AppendAs(buf, protocol.TypeBatchLookup), mark)
	}
	require.NoError(t, conn.SetWriteDeadline(time.Now().Add(cluster.Hang)))
	for begun := time.Now(); ; {
		if _, err = conn.Write(burst); err != nil {
			t.Logf("cut off after %v: %v", time.Since(begun), err)
			break
		}
	}
	var timeout net.Error
	if e, ok := err.(net.Error); ok { //nolint:errorlint // as the net package returns it
		timeout = e
	}
	require.False(t, timeout != nil && timeout.Timeout(), "the server neither reads on nor closes the connection")
	require.Equal(t, 64, cluster.Held(t, x, "sound", 64))
}

// idleConnections opens many connections that say nothing.
func idleConnections(t *testing.T, c *cluster.Cluster, others func(*testing.T)) {
	t.Helper()
	const n = 2000
	before, err := c.Nodes[0].Status()
	require.NoError(t, err)
	conns := make([]net.Conn, 0, n)
	defer func() {
		for _, conn := range conns {
			conn.Close() //nolint:errcheck // cut off already
		}
	}()
	for range n {
		conn, err := net.Dial("tcp", c.Nodes[0].Client)
		require.NoError(t, err)
		conns = append(conns, conn)
	}
	others(t)
	cluster.Within(t, "the end of connections that say nothing", func() error {
		status, err := c.Nodes[0].Status()
		if err == nil && status.Connections > before.Connections {
			err = fmt.Errorf("%d connections", status.Connections)
		}
		return err
	})
	others(t)
}
