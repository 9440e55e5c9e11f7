package raft

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/xxh3"
)

// A snapshot stream is the magic and then frames: length of the payload (4 bytes
// big-endian), CRC32C of type and payload (4), type (1), payload. First comes the
// manifest (JSON), then chunks, then the end. A chunk is the size of its records
// (4) and those records, compressed with zstd. A record is the lengths of key and
// value (4 each) and both. Keys ascend strictly through the whole stream. The end
// repeats the number of records, their bytes, and a hash over all chunk checksums.
const snapMagic = "LRDRSNP1"

const (
	snapManifest = 1
	snapChunk    = 2
	snapEnd      = 3
)

// Limits of the stream: what a receiver may have to keep in memory for one frame.
const (
	snapChunkBytes    = 1 << 20  // records per chunk: zstd gains little beyond its 1 MiB window
	snapMaxRecord     = 32 << 20 // one record; the state machine's are small
	snapMaxRaw        = snapMaxRecord + snapChunkBytes
	snapMaxFrame      = snapMaxRaw + snapMaxRaw/128 + 1024 // zstd's bound on incompressible data
	snapMaxManifest   = 4 << 20
	snapFormatVersion = 1
)

// manifest says what a snapshot is.
type manifest struct {
	Version int    `json:"version"`
	Cluster uint64 `json:"cluster"`
	Index   uint64 `json:"index"`
	Term    uint64 `json:"term"`
	Conf    *conf  `json:"conf"` // as of Index
}

func (m *manifest) validate() error {
	switch {
	case m.Version != snapFormatVersion:
		return fmt.Errorf("%w: format %d, this release reads %d", ErrSnapshotInvalid, m.Version, snapFormatVersion)
	case m.Index == 0 || m.Term == 0 || m.Cluster == 0 || m.Conf == nil || m.Conf.Index > m.Index:
		return fmt.Errorf("%w: the manifest is incomplete", ErrSnapshotInvalid)
	case m.Conf.voters() == 0:
		return fmt.Errorf("%w: the manifest names no voter", ErrSnapshotInvalid)
	}
	for i := range m.Conf.Members {
		if err := m.Conf.Members[i].validate(); err != nil {
			return fmt.Errorf("%w: %w", ErrSnapshotInvalid, err)
		}
		if i > 0 && m.Conf.Members[i].ID <= m.Conf.Members[i-1].ID {
			return fmt.Errorf("%w: the manifest's members are not in order", ErrSnapshotInvalid)
		}
	}
	return nil
}

// snapWriter encodes a stream.
type snapWriter struct {
	w       *bufio.Writer
	enc     *zstd.Encoder
	raw     []byte
	out     []byte
	records uint64
	bytes   uint64
	digest  uint64
}

func newSnapWriter(w io.Writer, m *manifest) (*snapWriter, error) {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithEncoderCRC(false))
	if err != nil {
		return nil, fmt.Errorf("raft: zstd: %w", err)
	}
	s := &snapWriter{w: bufio.NewWriterSize(w, snapBuffer), enc: enc}
	if _, err := s.w.WriteString(snapMagic); err != nil {
		return nil, fmt.Errorf("raft: write snapshot: %w", err)
	}
	b, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("raft: encode the manifest: %w", err)
	}
	_, err = s.frame(snapManifest, b)
	return s, err
}

// snapBuffer is the size of reads and writes on the way to a socket or file.
const snapBuffer = 256 << 10

func (s *snapWriter) frame(typ byte, payload []byte) (crc uint32, err error) {
	crc = crc32.Update(crc32.Checksum([]byte{typ}, castagnoli), castagnoli, payload)
	var head [9]byte
	binary.BigEndian.PutUint32(head[:], uint32(len(payload))) //nolint:gosec // at most snapMaxFrame
	binary.BigEndian.PutUint32(head[4:], crc)
	head[8] = typ
	_, err = s.w.Write(head[:])
	if err == nil {
		_, err = s.w.Write(payload)
	}
	if err != nil {
		return 0, fmt.Errorf("raft: write snapshot: %w", err)
	}
	return crc, nil
}

// add writes a record; keys must ascend.
func (s *snapWriter) add(key, value []byte) error {
	if len(key)+len(value)+8 > snapMaxRecord {
		return fmt.Errorf("raft: a record of %d bytes exceeds the snapshot's limit of %d", len(key)+len(value), snapMaxRecord)
	}
	if len(s.raw) > 0 && len(s.raw)+len(key)+len(value)+8 > snapChunkBytes {
		if err := s.flush(); err != nil {
			return err
		}
	}
	s.raw = binary.BigEndian.AppendUint32(s.raw, uint32(len(key)))   //nolint:gosec // at most snapMaxRecord
	s.raw = binary.BigEndian.AppendUint32(s.raw, uint32(len(value))) //nolint:gosec // as above
	s.raw = append(append(s.raw, key...), value...)
	s.records++
	s.bytes += uint64(len(key) + len(value))
	return nil
}

func (s *snapWriter) flush() error {
	if len(s.raw) == 0 {
		return nil
	}
	s.out = binary.BigEndian.AppendUint32(s.out[:0], uint32(len(s.raw))) //nolint:gosec // at most snapMaxRaw
	s.out = s.enc.EncodeAll(s.raw, s.out)
	s.raw = s.raw[:0]
	crc, err := s.frame(snapChunk, s.out)
	s.digest = snapDigest(s.digest, crc)
	return err
}

func snapDigest(prev uint64, crc uint32) uint64 {
	return xxh3.HashSeed(binary.BigEndian.AppendUint32(nil, crc), prev)
}

// finish writes the end. Without it no receiver accepts the stream.
func (s *snapWriter) finish() error {
	if err := s.flush(); err != nil {
		return err
	}
	var b []byte
	for _, v := range [...]uint64{s.records, s.bytes, s.digest} {
		b = binary.BigEndian.AppendUint64(b, v)
	}
	if _, err := s.frame(snapEnd, b); err != nil {
		return err
	}
	if err := s.w.Flush(); err != nil {
		return fmt.Errorf("raft: write snapshot: %w", err)
	}
	return s.enc.Close()
}

// readSnapshot decodes and verifies a whole stream. Begin is called with the
// manifest, then add with each record; the slices are valid during the call. Only
// a nil error means that all of it was there. It reads nothing behind the end.
func readSnapshot(r io.Reader, begin func(*manifest) error, add func(key, value []byte) error) error {
	d := &snapReader{r: r, add: add}
	var magic [len(snapMagic)]byte
	if _, err := io.ReadFull(r, magic[:]); err != nil {
		return fmt.Errorf("%w: %w", ErrSnapshotInvalid, err)
	}
	if string(magic[:]) != snapMagic {
		return fmt.Errorf("%w: it does not begin as one", ErrSnapshotInvalid)
	}
	typ, payload, _, err := d.frame(snapMaxManifest)
	if err != nil {
		return err
	}
	m := new(manifest)
	if typ != snapManifest {
		return fmt.Errorf("%w: it has no manifest", ErrSnapshotInvalid)
	}
	if err := json.Unmarshal(payload, m); err != nil {
		return fmt.Errorf("%w: manifest: %w", ErrSnapshotInvalid, err)
	}
	if err := m.validate(); err != nil {
		return err
	}
	if err := begin(m); err != nil {
		return err
	}
	if d.dec, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(snapMaxRaw)); err != nil {
		return fmt.Errorf("raft: zstd: %w", err)
	}
	defer d.dec.Close()
	return d.chunks()
}

type snapReader struct {
	r       io.Reader
	dec     *zstd.Decoder
	add     func(key, value []byte) error
	buf     []byte
	raw     []byte
	last    []byte
	records uint64
	bytes   uint64
	digest  uint64
}

// frame reads one frame into the reused buffer, which grows only as bytes arrive.
func (d *snapReader) frame(limit uint32) (typ byte, payload []byte, crc uint32, err error) {
	var head [9]byte
	if _, err := io.ReadFull(d.r, head[:]); err != nil {
		return 0, nil, 0, fmt.Errorf("%w: %w", ErrSnapshotInvalid, noEOF(err))
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > limit {
		return 0, nil, 0, fmt.Errorf("%w: a frame of %d bytes exceeds the limit of %d", ErrSnapshotInvalid, n, limit)
	}
	b := bytes.NewBuffer(d.buf[:0])
	if _, err := io.CopyN(b, d.r, int64(n)); err != nil {
		return 0, nil, 0, fmt.Errorf("%w: %w", ErrSnapshotInvalid, noEOF(err))
	}
	d.buf = b.Bytes()
	crc = crc32.Update(crc32.Checksum(head[8:], castagnoli), castagnoli, d.buf)
	if crc != binary.BigEndian.Uint32(head[4:]) {
		return 0, nil, 0, fmt.Errorf("%w: %w", ErrSnapshotInvalid, errChecksum)
	}
	return head[8], d.buf, crc, nil
}

// noEOF makes the end of a stream where none belongs an error of its own.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func (d *snapReader) chunks() error {
	for {
		typ, payload, crc, err := d.frame(snapMaxFrame)
		if err != nil {
			return err
		}
		switch typ {
		case snapChunk:
			d.digest = snapDigest(d.digest, crc)
			if err := d.chunk(payload); err != nil {
				return err
			}
		case snapEnd:
			if len(payload) != 24 || binary.BigEndian.Uint64(payload) != d.records ||
				binary.BigEndian.Uint64(payload[8:]) != d.bytes || binary.BigEndian.Uint64(payload[16:]) != d.digest {
				return fmt.Errorf("%w: the end does not match what came before", ErrSnapshotInvalid)
			}
			return nil
		default:
			return fmt.Errorf("%w: unknown frame type %d", ErrSnapshotInvalid, typ)
		}
	}
}

func (d *snapReader) chunk(payload []byte) error {
	if len(payload) < 4 {
		return fmt.Errorf("%w: a chunk is too short", ErrSnapshotInvalid)
	}
	n := binary.BigEndian.Uint32(payload)
	if n > snapMaxRaw {
		return fmt.Errorf("%w: a chunk of %d bytes exceeds the limit of %d", ErrSnapshotInvalid, n, snapMaxRaw)
	}
	raw, err := d.dec.DecodeAll(payload[4:], d.raw[:0])
	if err != nil {
		return fmt.Errorf("%w: zstd: %w", ErrSnapshotInvalid, err)
	}
	d.raw = raw
	if len(raw) != int(n) || n == 0 {
		return fmt.Errorf("%w: a chunk has %d bytes, not %d", ErrSnapshotInvalid, len(raw), n)
	}
	for len(raw) > 0 {
		if len(raw) < 8 {
			return fmt.Errorf("%w: a record is cut off", ErrSnapshotInvalid)
		}
		kn, vn := uint64(binary.BigEndian.Uint32(raw)), uint64(binary.BigEndian.Uint32(raw[4:]))
		raw = raw[8:]
		if kn+vn > uint64(len(raw)) {
			return fmt.Errorf("%w: a record is cut off", ErrSnapshotInvalid)
		}
		key, value := raw[:kn], raw[kn:kn+vn]
		raw = raw[kn+vn:]
		if d.records > 0 && bytes.Compare(key, d.last) <= 0 {
			return fmt.Errorf("%w: keys do not ascend", ErrSnapshotInvalid)
		}
		d.last = append(d.last[:0], key...)
		d.records++
		d.bytes += kn + vn
		if err := d.add(key, value); err != nil {
			return err
		}
	}
	return nil
}
