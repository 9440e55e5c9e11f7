package ssd

import (
	"fmt"
	"log/slog"
)

// Bounds of memory and work.
const (
	// maxRecordBytes is the longest payload under one CRC: a read of part of it reads all of it.
	maxRecordBytes = 1 << 20
	// maxGroupBytes of payload go into one write: enough to keep a disk busy, and short enough not to keep others waiting.
	maxGroupBytes = 4 << 20
	// maxSlots is how many segments a store has at most. Each is an open file, and 24 bytes of the superblock.
	maxSlots = 4096
	// minSlots leaves room for data beside the reserve.
	minSlots = 8
	// minSegmentBytes keeps a segment much longer than a header.
	minSegmentBytes = 128 << 10
	// maxSegmentBytes is what the index can address.
	maxSegmentBytes = 1 << 36
	// recordShare is the part of a segment that one record may fill, so that little is lost at its end.
	recordShare = 16
	// queueLength is how many records may wait for the writer: two groups of the smallest.
	queueLength = 2 * maxRecords

	defaultSegmentBytes  = 64 << 20
	defaultWriteBuffers  = 64 << 20
	defaultReadBuffers   = 64 << 20
	defaultCompactRate   = 256 << 20
	defaultTickMillis    = 1000
	writeThreshold       = 2 // free segments below which writes wait for compaction: it must find room itself
	discardThreshold     = 1 // the same of discards, which make room
	reserveBase          = 4 // segments that never count as usable: those, the one being written, and one to gain
	reserveShare         = 12
	fullShare            = 24  // the part of the address space, in live bytes, that the headers of all records take at most
	recordOverhead       = 144 // bytes of log for a record's header, and for a discard that may follow it
	compressedWorthTenth = 9   // compressed bytes are kept if they are at most this many tenths
)

// Compression says whether payloads are compressed.
type Compression uint8

const (
	// CompressAuto samples each write, and compresses where it pays.
	CompressAuto Compression = iota
	// CompressOff never compresses.
	CompressOff
	// CompressOn tries to compress all, and keeps what got shorter.
	CompressOn
)

// String gives the name used in configuration: auto, off or on.
func (c Compression) String() string {
	switch c {
	case CompressOff:
		return "off"
	case CompressOn:
		return "on"
	default:
		return "auto"
	}
}

// ParseCompression reads the name used in configuration.
func ParseCompression(s string) (Compression, error) {
	for _, c := range []Compression{CompressAuto, CompressOff, CompressOn} {
		if c.String() == s {
			return c, nil
		}
	}
	return CompressAuto, fmt.Errorf("%w: compression %q: want auto, off or on", ErrOptions, s)
}

// Options say what store [Open] opens or makes, and how. Zero means the default, or, for UUID, Pool, Device, Size,
// Capacity and SegmentBytes of a store that exists, what it has.
type Options struct {
	Create     bool     // make a store if the directory holds none; Size must be given then
	UUID       [16]byte // of the device, for ever
	Pool       [16]byte // id of the pool
	Device     uint64   // number of the device in the pool
	Generation uint64   // of a store that is made; one that exists keeps its own
	Size       uint64   // bytes of the logical address space

	// Capacity is how many bytes of disk the store takes, all of them when it is made. Default: what Size takes in
	// records of one block, and a sixth for compaction to work with: a quarter more than Size. A store that exists may get more, not less.
	Capacity int64
	// SegmentBytes is the size of a segment. Default 64 MiB, or more to stay within 4096 segments.
	SegmentBytes int64

	// NoSync acknowledges writes and discards before they are durable.
	NoSync bool
	// Buffered uses the page cache even where O_DIRECT works.
	Buffered bool
	// Compression of payloads.
	Compression Compression

	// WriteBufferBytes and ReadBufferBytes bound the memory that copies of payloads take. Default 64 MiB each.
	WriteBufferBytes, ReadBufferBytes int64
	// CompactRate bounds the bytes per second that compaction writes while no write waits for it. Default 256 MiB.
	CompactRate int64

	Logger *slog.Logger

	clock clock      // tests only
	fs    fileSystem // tests only
}

// withDefaults fills in what does not depend on the store.
func (o Options) withDefaults() (Options, error) {
	set := func(v *int64, d int64) {
		if *v == 0 {
			*v = d
		}
	}
	set(&o.WriteBufferBytes, defaultWriteBuffers)
	set(&o.ReadBufferBytes, defaultReadBuffers)
	set(&o.CompactRate, defaultCompactRate)
	if o.WriteBufferBytes < maxBuffer || o.ReadBufferBytes < maxBuffer {
		return o, fmt.Errorf("%w: buffers below %d bytes", ErrOptions, maxBuffer)
	}
	if o.CompactRate < 0 || o.Capacity < 0 || o.SegmentBytes < 0 {
		return o, fmt.Errorf("%w: negative", ErrOptions)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.clock == nil {
		o.clock = realClock{}
	}
	return o, nil
}

// shape gives the segment size and how many there are for a store that is made.
func (o Options) shape() (segment int64, slots int, err error) {
	if o.Size == 0 || o.Size > 1<<62 {
		return 0, 0, fmt.Errorf("%w: a logical size of %d bytes", ErrOptions, o.Size)
	}
	segment = o.SegmentBytes
	if segment == 0 {
		segment = defaultSegmentBytes
		for o.slots(segment) > maxSlots && segment <= maxSegmentBytes {
			segment *= 2
		}
	}
	if segment < minSegmentBytes || segment > maxSegmentBytes || segment%(block*recordShare) != 0 {
		return 0, 0, fmt.Errorf("%w: segments of %d bytes: want a multiple of %d from %d to %d",
			ErrOptions, segment, block*recordShare, minSegmentBytes, int64(maxSegmentBytes))
	}
	n := o.slots(segment)
	if n < minSlots || n > maxSlots {
		return 0, 0, fmt.Errorf("%w: %d segments of %d bytes: want %d to %d", ErrOptions, n, segment, minSlots, maxSlots)
	}
	return segment, int(n), nil
}

// slots is how many segments of a size the store has: those of its capacity, or as many as hold the whole address space in
// records of one block, which cost the most, and a bit for what is cut to pieces. Up to maxSlots is exact.
func (o Options) slots(segment int64) int64 {
	if o.Capacity != 0 {
		return o.Capacity / segment
	}
	need := int64(o.Size) + int64(o.Size)/fullShare //nolint:gosec // checked by shape
	n := int64(minSlots)
	for n <= maxSlots && usableBytes(n, segment) < need {
		n++
	}
	return n
}

// usableBytes is what live pieces of a store with n segments may cost. The reserve is compaction's, so that there is always a
// segment with something to gain; the end of one may stay empty if a record does not fit, and the footer takes a part.
func usableBytes(n, segment int64) int64 {
	return (n - reserveBase - n/reserveShare) * (segment - segment/recordShare - segment/64)
}

// Stats is what a store tells of itself. Counters count from Open.
type Stats struct {
	Generation uint64
	Size       uint64 // bytes of the logical address space
	Direct     bool   // O_DIRECT is in use; false: the file system refused, or Buffered was asked for

	Extents    int64 // pieces in the index
	IndexBytes int64 // memory of the index
	LiveBytes  int64 // bytes of disk that live pieces take, headers included
	UsedBytes  int64 // bytes of the segments in use
	Usable     int64 // LiveBytes cannot exceed it
	Capacity   int64

	Segments, FreeSegments int

	Writes, WrittenBytes   int64 // records, and bytes before compression
	Reads, ReadBytes       int64
	Discards               int64 // records logged
	DiscardedBytes         int64 // bytes that were there, before compression
	Groups, GroupRecords   int64 // writes to the log, and records in them
	Syncs                  int64
	StoredBytes            int64   // bytes of payload written, compaction's included
	Compressed             int64   // records that were compressed
	SampledRatio           float64 // running ratio of compressed to raw bytes of samples, 1 if none pays
	Compactions            int64   // segments emptied
	CompactedBytes         int64   // payload that compaction wrote
	NoSpace                int64   // writes refused
	Damaged                int64   // reads whose CRC did not match, or that the disk could not read
	DroppedPieces          int64   // pieces that compaction found damaged and dropped
	RecoveredByScan        int64   // segments indexed from headers, since the footer was missing or damaged
	LostBatches            int64   // times that a hole in the log made everything older untrustworthy
	TornRecords            int64   // records of the last write before a crash that had not landed whole
	SuperblockCopiesMended int64
}
