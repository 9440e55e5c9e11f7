package raft

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// Checksums keep random bytes from most decoders. The targets here put the right ones around what the fuzzer makes, as
// a peer of another release or a faulty memory could.

// FuzzPayload decodes payloads of frames whose checksum is right.
func FuzzPayload(f *testing.F) {
	app := &pb.Message{
		Type: pb.MsgApp.Enum(), From: new(uint64(2)), To: new(uint64(1)), Term: new(uint64(3)), Index: new(uint64(7)),
		LogTerm: new(uint64(2)), Entries: []*pb.Entry{{Index: new(uint64(8)), Term: new(uint64(3)), Data: []byte("d")}},
	}
	change, err := json.Marshal(confChange{Member: Member{ID: 4, Addr: "a:1"}})
	require.NoError(f, err)
	cc, err := proto.Marshal(&pb.ConfChange{Type: pb.ConfChangeAddNode.Enum(), NodeId: new(uint64(4)), Context: change})
	require.NoError(f, err)
	joined := proto.CloneOf(app)
	joined.Entries[0].Type, joined.Entries[0].Data = pb.EntryConfChange.Enum(), cc
	stray := &pb.Message{
		Type: pb.MsgVoteResp.Enum(), From: new(uint64(2)), To: new(uint64(1)), Term: new(uint64(3)),
		Entries: []*pb.Entry{{Type: pb.EntryConfChange.Enum()}},
	}
	for _, m := range []*pb.Message{
		app, joined, stray, {Type: pb.MsgHeartbeatResp.Enum(), From: new(uint64(2)), To: new(uint64(1)), Term: new(uint64(1)), Context: make([]byte, 8)},
	} {
		b, err := appendMessage(nil, m)
		require.NoError(f, err)
		f.Add(b)
	}
	h := hello{kind: helloSnapshot, cluster: 7, from: 2, to: 1, addr: "a:1"}
	f.Add(h.encode())
	r := reply{status: replyRemoved, cluster: 7, from: 1, text: "gone"}
	f.Add(r.encode())
	f.Fuzz(func(t *testing.T, payload []byte) {
		bytesSeen := 0
		_ = splitMessages(payload, func(m *pb.Message) error { // what it refuses is the sender's matter
			bytesSeen += proto.Size(m)
			if checkMessage(m, 1) != nil {
				return nil //nolint:nilerr // refused, which is one of the two right outcomes
			}
			require.EqualValues(t, 1, m.GetTo())
			require.NotContains(t, []uint64{0, 1}, m.GetFrom())
			last := m.GetIndex()
			for _, e := range m.GetEntries() {
				if m.GetType() == pb.MsgApp {
					last++
					require.Equal(t, last, e.GetIndex(), "no hole in what is appended")
				}
				if e.GetType() == pb.EntryConfChange {
					_, c, err := decodeConfChange(e.GetData())
					require.NoError(t, err, "an entry that is appended can be applied")
					require.NoError(t, c.Member.validate())
				}
			}
			return nil
		})
		if h, err := decodeHello(payload); err == nil {
			require.Equal(t, payload, h.encode())
		}
		if r, err := decodeReply(payload); err == nil {
			require.Equal(t, payload, r.encode())
		}
	})
}

// FuzzStoredEntry writes any entry and reads it back, then damages it.
func FuzzStoredEntry(f *testing.F) {
	f.Add(uint64(1), uint64(2), uint8(0), []byte("data"), uint64(5), uint16(0))
	f.Add(uint64(1<<63), uint64(1), uint8(1), []byte{}, uint64(0), uint16(20))
	f.Fuzz(func(t *testing.T, index, term uint64, typ uint8, data []byte, prev uint64, at uint16) {
		b := new(pebble.Batch)
		e := &pb.Entry{Index: new(index), Term: new(term), Type: pb.EntryType(typ).Enum(), Data: data}
		chain := putEntry(b, e, prev)
		r := b.Reader()
		_, key, value, ok, err := r.Next()
		require.NoError(t, err)
		require.True(t, ok)
		got, next, err := decodeEntry(index, key, value, prev, true)
		require.NoError(t, err)
		require.Equal(t, chain, next)
		require.Equal(t, term, got.GetTerm())
		require.Equal(t, pb.EntryType(typ), got.GetType())
		require.True(t, bytes.Equal(data, got.GetData()))
		_, _, err = decodeEntry(index, key, value, prev+1, true)
		require.Error(t, err, "it continues only its own predecessor")
		_, _, err = decodeEntry(index+1, key, value, prev, true)
		require.Error(t, err, "it lies at its own index only")
		damaged := bytes.Clone(value)
		damaged[int(at)%len(damaged)] ^= 1 << (at % 8)
		_, _, err = decodeEntry(index, key, damaged, prev, true)
		require.Error(t, err, "a flipped bit shows")
	})
}

// FuzzSealedRecord decodes any bytes, under a right checksum, as each of the small records beside the log.
func FuzzSealedRecord(f *testing.F) {
	c := &conf{Index: 3, Members: []Member{{ID: 1, Addr: "a:1"}, {ID: 2, Addr: "b:1", Learner: true}}, Removed: []uint64{9}}
	b, err := json.Marshal(c)
	require.NoError(f, err)
	f.Add(b)
	f.Add([]byte(`{"members":[{"id":18446744073709551615}],"index":-1}`))
	w := make([]byte, 0, witnessBytes)
	for _, v := range []uint64{witnessMagic, 1, 2, 3, 4, 5} {
		w = binary.BigEndian.AppendUint64(w, v)
	}
	f.Add(w)
	f.Fuzz(func(t *testing.T, b []byte) {
		s := sealed(bytes.Clone(b))
		plain, err := unseal("a test", bytes.Clone(s))
		require.NoError(t, err)
		require.True(t, bytes.Equal(b, plain))
		if c, err := decodeConf(bytes.Clone(s)); err == nil {
			again, err := json.Marshal(c)
			require.NoError(t, err)
			back, err := decodeConf(sealed(again))
			require.NoError(t, err)
			require.Equal(t, c.state().String(), back.state().String())
			_, _ = c.find(1)
			require.LessOrEqual(t, c.voters(), len(c.Members))
		} else {
			require.ErrorAs(t, err, new(*CorruptionError))
		}
		if r, ok := decodeWitness(bytes.Clone(s)); ok {
			require.GreaterOrEqual(t, len(b), witnessBytes-4)
			require.NotEqual(t, witnessRecord{seq: ^r.seq}, r)
		}
	})
}

// FuzzSnapshotContent streams any manifest and any chunk under right checksums. What is accepted is complete.
func FuzzSnapshotContent(f *testing.F) {
	good, err := json.Marshal(&manifest{
		Version: snapFormatVersion, Cluster: 1, Index: 9, Term: 2, Conf: &conf{Index: 1, Members: []Member{{ID: 1}}},
	})
	require.NoError(f, err)
	record := func(k, v string) []byte {
		b := binary.BigEndian.AppendUint32(nil, uint32(len(k)))
		return append(append(binary.BigEndian.AppendUint32(b, uint32(len(v))), k...), v...)
	}
	f.Add(good, append(record("a", "1"), record("b", "")...), uint32(0))
	f.Add(good, record("", ""), uint32(1))
	f.Add([]byte(`{"version":1,"cluster":1,"index":1,"term":1,"conf":null}`), []byte{}, uint32(0))
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest))
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, man, raw []byte, lie uint32) {
		var out bytes.Buffer
		w := &snapWriter{w: bufio.NewWriter(&out)}
		_, err := w.w.WriteString(snapMagic)
		require.NoError(t, err)
		_, err = w.frame(snapManifest, man)
		require.NoError(t, err)
		chunk := enc.EncodeAll(raw, binary.BigEndian.AppendUint32(nil, uint32(len(raw))+lie))
		crc, err := w.frame(snapChunk, chunk)
		require.NoError(t, err)
		w.digest = snapDigest(w.digest, crc)
		for b := raw; len(b) >= 8; { // as many as there are, so that the end can match
			n := 8 + uint64(binary.BigEndian.Uint32(b)) + uint64(binary.BigEndian.Uint32(b[4:]))
			if n > uint64(len(b)) {
				break
			}
			b = b[n:]
			w.records++
			w.bytes += n - 8
		}
		var end []byte
		for _, v := range []uint64{w.records, w.bytes, w.digest} {
			end = binary.BigEndian.AppendUint64(end, v)
		}
		_, err = w.frame(snapEnd, end)
		require.NoError(t, err)
		require.NoError(t, w.w.Flush())
		var m *manifest
		records, size := 0, 0
		err = readSnapshot(&out, func(got *manifest) error { m = got; return nil }, func(k, v []byte) error {
			records++
			size += 8 + len(k) + len(v)
			return nil
		})
		if err != nil {
			require.ErrorIs(t, err, ErrSnapshotInvalid)
			return
		}
		require.Zero(t, lie)
		require.Equal(t, len(raw), size, "every byte was a record's")
		require.NoError(t, m.validate())
		require.Positive(t, m.Conf.voters())
		require.NotNil(t, m.meta().GetConfState())
	})
}
