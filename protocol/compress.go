package protocol

import (
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// coders is how many payloads are compressed, and how many decompressed, at the same time; more wait. It bounds the
// memory of their tables, about 1 MiB each.
const coders = 4

var encoder = sync.OnceValue(func() *zstd.Encoder {
	w, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(coders),
		zstd.WithWindowSize(1<<20), zstd.WithEncoderCRC(true))
	if err != nil {
		panic("protocol: zstd refuses constant options: " + err.Error())
	}
	return w
})

var decoder = sync.OnceValue(func() *zstd.Decoder {
	r, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(coders), zstd.WithDecoderMaxMemory(MaxPayload),
		zstd.WithDecoderLowmem(true))
	if err != nil {
		panic("protocol: zstd refuses constant options: " + err.Error())
	}
	return r
})

// EndFrameCompressed is EndFrame for a peer with FeatureCompression: a payload over CompressAbove is sent compressed
// if that makes it smaller.
func EndFrameCompressed(buf []byte, mark int) []byte {
	n := PayloadLen(buf, mark)
	if n <= CompressAbove || n > MaxPayload {
		return EndFrame(buf, mark)
	}
	scratch := getBuffer(n)
	packed := encoder().EncodeAll(buf[mark+HeaderSize:], scratch[:0])
	if len(packed) < n {
		buf = append(buf[:mark+HeaderSize], packed...)
		buf[mark+4] |= FlagCompressed
	}
	putBuffer(scratch)
	binary.BigEndian.PutUint32(buf[mark+12:], uint32(PayloadLen(buf, mark))) //nolint:gosec // at most MaxPayload
	return buf
}

// Decompress appends what the compressed payload of a frame holds. Its error is a *FrameError: no zstd frame, or one
// of more than MaxPayload. Reader does this by itself.
func Decompress(dst, payload []byte) ([]byte, error) {
	before := len(dst)
	dst, err := decoder().DecodeAll(payload, dst)
	if err != nil {
		return nil, &FrameError{Reason: fmt.Sprintf("compressed payload: %v", err)}
	}
	if n := len(dst) - before; n > MaxPayload {
		return nil, &FrameError{Reason: fmt.Sprintf("payload of %d bytes, decompressed, is over the limit of %d", n,
			MaxPayload)}
	}
	return dst, nil
}
