package server

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/cxl"
	"larder/meta"
	"larder/protocol"
)

// newRestoredRig is a rig whose index was restored from a snapshot that holds one entry, k0, of client a.
func newRestoredRig(t *testing.T) (*rig, protocol.Region, protocol.HandshakeReply) {
	t.Helper()
	r := newRig(t)
	r.do(&meta.NewIncarnation{Incarnation: 1_700_000_000_000})
	r.device(8)
	c := r.client("a")
	region := c.store("k", 1)
	require.True(t, c.lookup("k0")[0].Found)
	_, err := r.m.Flush()
	require.NoError(t, err)
	r.config.Restored = true
	r.m, err = NewMaster(r.config)
	require.NoError(t, err)
	r.clients = nil
	r.elect()
	return r, region, c.hello
}

// Between the election of the leader of a restored pool and its new incarnation nothing is served: what the index says
// is out of date.
func TestARestoredIndexServesNothingBeforeItsIncarnation(t *testing.T) {
	r, region, hello := newRestoredRig(t)
	c := r.connect()
	code := func(typ protocol.Type, body []byte) protocol.Code {
		var reply protocol.HeartbeatReply
		require.NoError(t, reply.Decode(c.call(typ, body)))
		return reply.Code
	}
	k := [][]byte{[]byte("k0")}
	keys := protocol.KeysRequest{Keys: k}
	lookup := protocol.LookupRequest{Keys: k}
	match := protocol.PrefixMatchRequest{Context: protocol.Context{Model: "m"}, Hashes: []uint64{7}}
	alloc := protocol.AllocRequest{InstanceID: "maru", Size: testPage, PageSize: testPage}
	requests := map[protocol.Type][]byte{
		protocol.TypeLookup:          lookup.AppendAs(nil, protocol.TypeLookup),
		protocol.TypeBatchLookup:     lookup.AppendAs(nil, protocol.TypeBatchLookup),
		protocol.TypeExists:          keys.AppendAs(nil, protocol.TypeExists),
		protocol.TypeBatchExists:     keys.AppendAs(nil, protocol.TypeBatchExists),
		protocol.TypePrefixMatch:     match.Append(nil),
		protocol.TypeListKeys:        (&protocol.ListKeysRequest{}).Append(nil),
		protocol.TypeListBlocks:      (&protocol.ListBlocksRequest{}).Append(nil),
		protocol.TypeListAllocations: (&protocol.ListAllocationsRequest{}).Append(nil),
		protocol.TypeRequestAlloc:    alloc.Append(nil),
		protocol.TypePin:             keys.AppendAs(nil, protocol.TypePin),
		protocol.TypeDelete:          keys.AppendAs(nil, protocol.TypeDelete),
		protocol.TypeRenew:           (&protocol.LeasesRequest{Leases: []uint64{1}}).Append(nil),
		protocol.TypeHeartbeat:       protocol.AppendEmpty(nil),
		protocol.TypeHandshake:       (&protocol.HandshakeRequest{InstanceID: "b", Protocol: 1}).Append(nil),
	}
	logged := r.m.Applied()
	require.NotZero(t, r.m.Term(), "it leads, so that it can begin the incarnation")
	require.False(t, r.m.Serving())
	for typ, body := range requests {
		require.True(t, code(typ, body).Retryable(), typ)
	}
	resume := protocol.HandshakeRequest{Protocol: 1, Session: hello.Session, Secret: hello.Secret}
	require.True(t, code(protocol.TypeHandshake, resume.Append(nil)).Retryable(), "nor is a session taken up")
	require.Error(t, r.m.Do(&meta.Delete{Keys: k}, nil), "nor does an operator change anything")
	r.pass(time.Second)
	require.Equal(t, logged, r.m.Applied())

	r.do(&meta.NewIncarnation{Incarnation: 1_800_000_000_000})
	require.True(t, r.m.Serving())
	require.Equal(t, protocol.CodeSessionExpired, code(protocol.TypeHandshake, resume.Append(nil)))
	b := r.client("b")
	require.False(t, b.lookup("k0")[0].Found)
	req := protocol.AllocRequest{InstanceID: "b", Size: testPage, PageSize: testPage, Mutation: b.next()}
	seq := b.send(protocol.TypeRequestAlloc, req.Append(nil))
	r.pass(100 * time.Millisecond)
	require.Nil(t, b.answer(seq), "the device may be written to by clients of before")
	r.do(&meta.Retire{Device: 1, Generation: 9, Fenced: true})
	r.pass(100 * time.Millisecond)
	given := allocReply(t, b.answer(seq))
	require.NoError(t, given.Err())
	require.NotEqual(t, region.RegionID, given.Region.RegionID)
	require.EqualValues(t, 9, given.Region.Generation)
}

// A follower of a restored pool that has its incarnation serves again, also if it leads later.
func TestAnAppliedIncarnationEndsTheBar(t *testing.T) {
	r, _, _ := newRestoredRig(t)
	r.do(&meta.NewIncarnation{Incarnation: 1_800_000_000_000})
	r.m.OnLeadership(false, 0)
	r.elect()
	require.True(t, r.m.Serving())
	require.False(t, r.client("a").lookup("k0")[0].Found)
}

// poolFile is a pool device as a client has it: open, with a region mapped for writing.
type poolFile struct {
	dev *cxl.Device
	m   *cxl.Mapping
}

func openPoolFile(t *testing.T, path string, r protocol.Region) poolFile {
	t.Helper()
	dev, err := cxl.Open(path, cxl.Expect{})
	require.NoError(t, err)
	m, err := dev.Map(int64(r.Offset), int64(r.Length), cxl.MapOptions{})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, m.Close())
		require.NoError(t, dev.Close())
	})
	return poolFile{dev, m}
}

// A client that was given a region after the snapshot may be in the middle of a copy when the restored pool gives that
// space to another. Its stores must not be seen there.
func TestAWriterOfBeforeTheRestoreCannotReachWhatIsGivenAfterIt(t *testing.T) {
	for name, before := range map[string]bool{"a device that the snapshot knows": true, "a device that it does not": false} {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig(t)
			pool := cfg.Pool
			other := filepath.Join(filepath.Dir(pool[0].Path), "other")
			if !before {
				cfg.Pool = []DeviceConfig{{Path: other, Size: 4 << 20}}
			}
			var snapshot bytes.Buffer
			old := startServer(t, cfg)
			require.NoError(t, old.SnapshotSave(t.Context(), &snapshot))
			stop := func(s *Server) {
				ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
				defer cancel()
				require.NoError(t, s.Stop(ctx))
			}
			if !before {
				stop(old)
				cfg.Pool = append(cfg.Pool, pool...)
				old = startServer(t, cfg)
			}
			w := dial(t, "unix", old.Config().Socket)
			hello := w.open("a")
			given := w.alloc(protocol.AllocRequest{InstanceID: "a", Size: 32 << 20, PageSize: 64 << 10})
			require.NoError(t, given.Err())
			writer := openPoolFile(t, pool[0].Path, given.Region)
			incarnation := writer.dev.Header().Incarnation
			stop(old)

			cfg = old.Config()
			cfg.DataDir, cfg.NodeID, cfg.Pool = t.TempDir(), 0, pool
			_, err := Restore(&cfg, &snapshot, testLogger(t))
			require.NoError(t, err)
			s := startServer(t, cfg)
			w = dial(t, "unix", s.Config().Socket)
			refused := w.handshake(protocol.HandshakeRequest{Session: hello.Session, Secret: hello.Secret})
			require.Equal(t, protocol.CodeSessionExpired, refused.Code)
			again := w.open("b")
			require.NotEqual(t, hello.Session, again.Session)
			next := w.alloc(protocol.AllocRequest{InstanceID: "b", Size: 32 << 20, PageSize: 64 << 10})
			require.NoError(t, next.Err())
			require.NotEqual(t, given.Region.RegionID, next.Region.RegionID)
			require.NotEqual(t, given.Region.Generation, next.Region.Generation)
			require.Equal(t, given.Region.Offset, next.Region.Offset, "the index knows of no owner")
			reader := openPoolFile(t, pool[0].Path, next.Region)
			require.Equal(t, next.Region.Generation, reader.dev.Generation())
			require.Greater(t, reader.dev.Header().Incarnation, incarnation)
			require.Equal(t, next.Region.Device, reader.dev.Header().DeviceID)
			copy(reader.m.Bytes(), "new")
			copy(writer.m.Bytes(), "late")
			require.Equal(t, "new\x00", string(reader.m.Bytes()[:4]))
		})
	}
}

// What cannot be replaced, such as a device-DAX, stays out of service after a restore until its memory has lost power or
// an operator has said that nobody writes there.
func TestADeviceThatCannotBeReplacedWaitsForTheOperator(t *testing.T) {
	s := startServer(t, testConfig(t))
	d, node := s.devices, "/dev/null" // is no file either
	now := s.master.incarnation()
	retired := &meta.DeviceInfo{ID: 1}
	for name, tc := range map[string]struct {
		old    *meta.DeviceInfo
		header cxl.Header
		lost   bool
		out    bool
	}{
		"the index was restored":                         {old: retired, header: cxl.Header{Incarnation: now - 1}, out: true},
		"the index was restored to before it":            {header: cxl.Header{Incarnation: now - 1}, out: true},
		"the index was restored, and the host restarted": {old: retired, lost: true},
		"it was dropped":                                 {header: cxl.Header{Incarnation: now}},
	} {
		t.Run(name, func(t *testing.T) {
			err := d.renew(t.Context(), DeviceConfig{Path: node, Coherence: "hardware"}, node, tc.old, &cxl.Info{Header: &tc.header, Lost: tc.lost})
			require.Error(t, err, "the null device cannot be formatted")
			require.Equal(t, tc.out, errors.Is(err, errUnfenced), err)
			err = d.renew(t.Context(), DeviceConfig{Path: node, Coherence: "hardware", Force: true}, node, tc.old, &cxl.Info{Header: &tc.header})
			require.NotErrorIs(t, err, errUnfenced)
		})
	}
	_, err := d.fencedInPlace(retired, DeviceConfig{})
	require.ErrorIs(t, err, errUnfenced, "its header is gone, and with it what could be known")
}
