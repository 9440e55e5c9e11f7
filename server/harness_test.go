package server

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"larder/protocol"
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		runChild()
	}
	goleak.VerifyTestMain(m)
}

// childEnv makes the test binary a process that does nothing, to be watched and killed.
const childEnv = "LARDER_TEST_CHILD"

func runChild() {
	fmt.Println("up")
	select {}
}

// testConfig is a cluster of one on tmpfs, with ports of the system's choice.
func testConfig(tb testing.TB) Config {
	tb.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "larder-server-")
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, os.RemoveAll(dir)) })
	cfg := Default()
	cfg.ClusterName = strings.ReplaceAll(tb.Name(), "/", "-")
	if len(cfg.ClusterName) > 60 {
		cfg.ClusterName = cfg.ClusterName[:60]
	}
	cfg.DataDir = tb.TempDir()
	cfg.Listen, cfg.PeerListen, cfg.AdminListen = "127.0.0.1:0", "127.0.0.1:0", Off
	cfg.Socket = filepath.Join(dir, "s")
	cfg.Pool = []DeviceConfig{{Path: filepath.Join(dir, "pool"), Size: 64 << 20}}
	cfg.ElectionTimeout, cfg.DefaultLease = 300*time.Millisecond, 200*time.Millisecond
	cfg.MinRegionAge = 0
	cfg.MinFreeDisk = 1 << 20
	return cfg
}

func testLogger(tb testing.TB) *slog.Logger {
	tb.Helper()
	if os.Getenv("LARDER_TEST_LOG") == "" {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(tb.Output(), &slog.HandlerOptions{Level: slog.LevelInfo}))
}

// startServer starts a server that stops with the test.
func startServer(tb testing.TB, cfg Config) *Server {
	tb.Helper()
	s, err := Start(cfg, testLogger(tb))
	require.NoError(tb, err)
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		require.NoError(tb, s.Stop(ctx))
	})
	return s
}

// peer is a lean client for tests: frames in, frames out.
type wire struct {
	tb              testing.TB
	c               net.Conn
	r               *protocol.Reader
	seq             uint32
	session, secret uint64
	mutSeq          uint64
}

type frame struct {
	h protocol.Header
	b []byte
}

func dial(tb testing.TB, network, addr string) *wire {
	tb.Helper()
	c, err := net.Dial(network, addr)
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = c.Close() })
	return &wire{tb: tb, c: c, r: protocol.NewReader(c)}
}

// send writes one request and returns its sequence.
func (w *wire) send(t protocol.Type, body []byte) uint32 {
	w.tb.Helper()
	w.seq++
	b, mark := protocol.BeginFrame(nil, t, w.seq)
	_, err := w.c.Write(protocol.EndFrame(append(b, body...), mark))
	require.NoError(w.tb, err)
	return w.seq
}

// receive reads the next frame.
func (w *wire) receive() frame {
	w.tb.Helper()
	require.NoError(w.tb, w.c.SetReadDeadline(time.Now().Add(20*time.Second)))
	h, b, err := w.r.Next()
	require.NoError(w.tb, err)
	return frame{h, append([]byte(nil), b...)}
}

// reply reads until the reply to seq, past pushes.
func (w *wire) reply(seq uint32) []byte {
	w.tb.Helper()
	for {
		f := w.receive()
		if f.h.Sequence == seq {
			return f.b
		}
	}
}

func (w *wire) call(t protocol.Type, body []byte) []byte { return w.reply(w.send(t, body)) }

// next numbers a mutation; everything before it is answered.
func (w *wire) next() protocol.Mutation {
	w.mutSeq++
	return protocol.Mutation{Seq: w.mutSeq, Acked: w.mutSeq}
}

func (w *wire) handshake(req protocol.HandshakeRequest) protocol.HandshakeReply {
	w.tb.Helper()
	req.Protocol = protocol.Version
	req.Features |= protocol.FeaturePush | protocol.FeaturePacked
	var r protocol.HandshakeReply
	require.NoError(w.tb, r.Decode(w.call(protocol.TypeHandshake, req.Append(nil))))
	if r.Code == 0 {
		w.session, w.secret = r.Session, r.Secret
	}
	return r
}

func (w *wire) open(instance string) protocol.HandshakeReply {
	w.tb.Helper()
	r := w.handshake(protocol.HandshakeRequest{InstanceID: instance})
	require.NoError(w.tb, r.Err())
	require.True(w.tb, r.Success)
	return r
}

func (w *wire) alloc(req protocol.AllocRequest) protocol.AllocReply {
	w.tb.Helper()
	if req.Seq == 0 {
		req.Mutation = w.next()
	}
	var r protocol.AllocReply
	require.NoError(w.tb, r.Decode(w.call(protocol.TypeRequestAlloc, req.Append(nil))))
	return r
}

func (w *wire) register(r protocol.Region, page uint64, keys ...string) protocol.RegisterReply {
	w.tb.Helper()
	req := protocol.RegisterRequest{Mutation: w.next()}
	for i, k := range keys {
		req.Entries = append(req.Entries, protocol.RegisterEntry{
			Key: []byte(k), RegionID: r.RegionID, Epoch: r.Epoch, KVOffset: (page + uint64(i)) * r.PageSize, KVLength: r.PageSize,
		})
	}
	var reply protocol.RegisterReply
	require.NoError(w.tb, reply.DecodeAs(w.call(protocol.TypeBatchRegister, req.AppendAs(nil, protocol.TypeBatchRegister)), protocol.TypeBatchRegister))
	return reply
}

func (w *wire) lookup(lease uint64, keys ...string) protocol.LookupReply {
	w.tb.Helper()
	req := protocol.LookupRequest{LeaseMS: lease}
	for _, k := range keys {
		req.Keys = append(req.Keys, []byte(k))
	}
	var reply protocol.LookupReply
	require.NoError(w.tb, reply.DecodeAs(w.call(protocol.TypeBatchLookup, req.AppendAs(nil, protocol.TypeBatchLookup)), protocol.TypeBatchLookup))
	return reply
}

func (w *wire) remove(key string) protocol.KeysReply {
	w.tb.Helper()
	req := protocol.KeysRequest{Mutation: w.next(), Keys: [][]byte{[]byte(key)}}
	var reply protocol.KeysReply
	require.NoError(w.tb, reply.DecodeAs(w.call(protocol.TypeDelete, req.AppendAs(nil, protocol.TypeDelete)), protocol.TypeDelete))
	return reply
}
