package protocol

import (
	"encoding/binary"
	"fmt"
	"net/netip"
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

// Distant reports whether frames between the addresses of a connection's ends are worth compressing: whether they cross
// a network. There a reply to a LOOKUP of 4096 keys is sent in less time than it takes uncompressed. Over a Unix socket
// or within a host the bytes cost next to nothing, and compressing them takes CPU from those whose requests wait.
func Distant(local, remote string) bool {
	to, err := netip.ParseAddrPort(remote)
	if err != nil || to.Addr().Unmap().IsLoopback() {
		return false
	}
	from, err := netip.ParseAddrPort(local)
	return err != nil || from.Addr().Unmap() != to.Addr().Unmap() // a host may be reached by its own address
}

// CompressFrames compresses frames for a peer with FeatureCompression: those whose payload is over CompressAbove, if that
// makes them smaller. All of buf from the index from on must be whole frames. It may be called without the locks under
// which they were made. Where none is large it costs a comparison, and a look at the headers if all are more than
// CompressAbove together.
func CompressFrames(buf []byte, from int) []byte {
	if len(buf)-from <= CompressAbove+HeaderSize {
		return buf
	}
	to := from // what lies before is done
	for at := from; len(buf)-at >= HeaderSize; {
		end := at + HeaderSize + int(binary.BigEndian.Uint32(buf[at+12:]))
		if end > len(buf) {
			break // cannot be: they are our own
		}
		packed := compressFrame(buf[at:end])
		if to != at {
			copy(buf[to:], buf[at:at+packed])
		}
		at, to = end, to+packed
	}
	return buf[:to]
}

// compressFrame compresses a frame in its place if that makes it smaller, and returns how long it is then.
func compressFrame(frame []byte) int {
	n := len(frame) - HeaderSize
	if n <= CompressAbove || frame[4]&FlagCompressed != 0 {
		return len(frame)
	}
	scratch := getBuffer(n)
	defer putBuffer(scratch)
	packed := encoder().EncodeAll(frame[HeaderSize:], scratch[:0])
	if len(packed) >= n {
		return len(frame)
	}
	frame[4] |= FlagCompressed
	binary.BigEndian.PutUint32(frame[12:], uint32(len(packed))) //nolint:gosec // less than MaxPayload
	return HeaderSize + copy(frame[HeaderSize:], packed)
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
