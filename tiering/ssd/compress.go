package ssd

import (
	"math"
	"sync/atomic"

	"github.com/klauspost/compress/zstd"
)

const (
	// sampleBytes of a payload, from its middle, tell whether it compresses.
	sampleBytes = 4 << 10
	// sampleEvery is how many writes pass between samples while the running ratio says that none pays.
	sampleEvery = 16
	// hopeless is the running ratio above which that is so.
	hopeless = 0.97
	// ratioWeight is the weight of a new sample in the running ratio.
	ratioWeight = 1.0 / 16
)

// compressor decides and compresses. Its methods may be called concurrently.
type compressor struct {
	mode  Compression
	enc   *zstd.Encoder
	dec   *zstd.Decoder
	ratio atomic.Uint64 // float64: compressed to raw bytes of samples
	turn  atomic.Uint32
}

func newCompressor(mode Compression) (*compressor, error) {
	c := &compressor{mode: mode}
	var err error
	c.enc, err = zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderCRC(false),
		zstd.WithWindowSize(maxRecordBytes), zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, err
	}
	c.dec, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderMaxMemory(maxRecordBytes),
		zstd.WithDecoderMaxWindow(maxRecordBytes), zstd.WithDecoderLowmem(true))
	c.ratio.Store(math.Float64bits(0.5)) // hopeful
	return c, err
}

func (c *compressor) close() {
	c.dec.Close()
}

func (c *compressor) running() float64 { return math.Float64frombits(c.ratio.Load()) }

// worthTrying samples b. Two at once may lose one sample's weight, which does not matter.
func (c *compressor) worthTrying(b []byte) bool {
	if c.mode != CompressAuto || len(b) <= block {
		return c.mode == CompressOn && len(b) > block // a block is the least that can be saved
	}
	if c.running() > hopeless && c.turn.Add(1)%sampleEvery != 0 {
		return false
	}
	mid := (len(b) - min(len(b), sampleBytes)) / 2
	sample := b[mid : mid+min(len(b), sampleBytes)]
	var room [sampleBytes + 64]byte
	r := min(1, float64(len(c.enc.EncodeAll(sample, room[:0])))/float64(len(sample)))
	c.ratio.Store(math.Float64bits(c.running()*(1-ratioWeight) + r*ratioWeight))
	return r*10 <= compressedWorthTenth
}

// compress puts b, compressed, into dst, whose capacity is at least that of b, and gives the length; 0 if it is not worth it.
func (c *compressor) compress(dst, b []byte) int {
	got := c.enc.EncodeAll(b, dst[:0])
	if len(got)*10 > len(b)*compressedWorthTenth || roundUp(len(got)) >= roundUp(len(b)) {
		return 0
	}
	if &got[0] != &dst[:1][0] {
		copy(dst[:cap(dst)], got) // it wanted more room than it needed
	}
	return len(got)
}

// decompress gives the raw bytes of a payload in dst, which has their length.
func (c *compressor) decompress(dst, b []byte) bool {
	got, err := c.dec.DecodeAll(b, dst[:0:len(dst)])
	if err != nil || len(got) != len(dst) {
		return false
	}
	if &got[0] != &dst[0] {
		copy(dst, got)
	}
	return true
}
