package protocol

import (
	"errors"
	"io"
	"math/bits"
	"sync"
)

const (
	// readBuffer is the size of a Reader's own buffer: some five hundred lookups, and small enough for ten thousand
	// connections.
	readBuffer = 32 << 10
	// maxEmptyReads is how many reads in a row may bring nothing, without an error, as in bufio.
	maxEmptyReads = 100
)

// Reader splits a stream into frames. It is not safe for concurrent use.
//
// A frame that does not fit its own buffer of 32 KiB is gathered in larger buffers, which double as bytes arrive, so
// that a header which promises 8 MiB costs nothing until they come; they go back to a pool that all Readers share as
// soon as the stream has been read up to their end.
type Reader struct {
	r        io.Reader
	own      []byte // the buffer for small frames
	buf      []byte // the buffer in use: own, or one of the pool
	from, to int    // the bytes of buf that are not consumed
	plain    []byte // decompressed payload of the last frame, of the pool; nil if it was not compressed
	err      error  // sticks
}

// NewReader returns a Reader of the frames that r delivers.
func NewReader(r io.Reader) *Reader {
	own := make([]byte, readBuffer)
	return &Reader{r: r, own: own, buf: own}
}

// Next returns the next frame; a compressed payload has been decompressed, and Header.Length is then its own.
// The payload is valid until the next call of Next.
//
// At the end of the stream the error is io.EOF, or io.ErrUnexpectedEOF within a frame; it is a *FrameError for bytes
// that are no frame, and any other is the underlying reader's. Every error but a timeout is final.
func (r *Reader) Next() (Header, []byte, error) {
	r.recycle()
	if r.err != nil {
		return Header{}, nil, r.err
	}
	if err := r.fill(HeaderSize); err != nil {
		return Header{}, nil, err
	}
	h, err := ParseHeader(r.buf[r.from:r.to])
	if err != nil {
		r.err = err
		return Header{}, nil, err
	}
	size := HeaderSize + int(h.Length)
	if err := r.fill(size); err != nil {
		return Header{}, nil, err
	}
	payload := r.buf[r.from+HeaderSize : r.from+size : r.from+size]
	r.from += size
	if h.Flags&FlagCompressed == 0 {
		return h, payload, nil
	}
	payload, err = r.decompress(payload)
	if err != nil {
		r.err = err
		return Header{}, nil, err
	}
	h.Length = uint32(len(payload)) //nolint:gosec // at most MaxPayload
	return h, payload, nil
}

// Buffered reports whether Next will return without reading: the next frame, or an error, is in memory. A server
// answers everything that is, before it flushes.
func (r *Reader) Buffered() bool {
	if r.err != nil {
		return true
	}
	if r.to-r.from < HeaderSize {
		return false
	}
	h, err := ParseHeader(r.buf[r.from:r.to])
	return err != nil || r.to-r.from >= HeaderSize+int(h.Length)
}

// recycle gives up what the last frame's payload needed.
func (r *Reader) recycle() {
	if r.plain != nil {
		putBuffer(r.plain)
		r.plain = nil
	}
	if r.to-r.from <= len(r.own) && len(r.buf) > len(r.own) {
		r.switchTo(r.own)
	}
}

// switchTo goes on in buf, which has room for what is not consumed.
func (r *Reader) switchTo(buf []byte) {
	old := r.buf
	r.to = copy(buf, old[r.from:r.to])
	r.from = 0
	r.buf = buf
	if len(old) > len(r.own) {
		putBuffer(old)
	}
}

// fill reads until n bytes, of one frame, are there.
func (r *Reader) fill(n int) error {
	empty := 0
	for r.to-r.from < n {
		r.makeRoom(n)
		k, err := r.r.Read(r.buf[r.to:])
		if k < 0 || k > len(r.buf)-r.to {
			r.err = errors.New("protocol: the reader returned an impossible count")
			return r.err
		}
		r.to += k
		if k > 0 {
			empty = 0
		} else if empty++; empty == maxEmptyReads && err == nil {
			err = io.ErrNoProgress
		}
		if err != nil && r.to-r.from < n {
			return r.failed(err)
		}
	}
	return nil
}

// failed says how an error of the underlying reader ends a frame. After a timeout the caller may go on.
func (r *Reader) failed(err error) error {
	if errors.Is(err, io.EOF) && r.to > r.from {
		err = io.ErrUnexpectedEOF
	}
	if t, ok := errors.AsType[interface {
		error
		Timeout() bool
	}](err); !ok || !t.Timeout() {
		r.err = err
	}
	return err
}

// makeRoom makes room for at least one byte of a frame of n bytes: it moves the frame to the front of the buffer, or,
// when that is full, to one of twice the size.
func (r *Reader) makeRoom(n int) {
	if r.from == r.to {
		r.from, r.to = 0, 0
	}
	if r.from+n <= len(r.buf) || r.to < len(r.buf) && n > len(r.buf) {
		return
	}
	if r.from > 0 {
		r.to = copy(r.buf, r.buf[r.from:r.to])
		r.from = 0
	}
	if r.to == len(r.buf) {
		r.switchTo(getBuffer(2 * len(r.buf)))
	}
}

func (r *Reader) decompress(payload []byte) ([]byte, error) {
	// The result is of at least this size in practice; Decompress takes a larger buffer if it is not.
	buf := getBuffer(4 * max(len(payload), readBuffer))
	plain, err := Decompress(buf[:0], payload)
	if cap(plain) == cap(buf) {
		r.plain = buf
	} else {
		putBuffer(buf)
	}
	return plain, err
}

// The pool has buffers of 64 KiB and its doubles, up to one that holds the largest frame, by size.
const (
	minShift = 16
	maxShift = 24 // 16 MiB > HeaderSize + MaxPayload
)

var buffers [maxShift - minShift + 1]sync.Pool

// getBuffer returns a buffer of at least n bytes, or of the largest size if n is over it.
func getBuffer(n int) []byte {
	shift := min(max(bits.Len(uint(n-1)), minShift), maxShift)
	if p, ok := buffers[shift-minShift].Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, 1<<shift)
}

func putBuffer(b []byte) {
	b = b[:cap(b)]
	buffers[bits.Len(uint(len(b)))-1-minShift].Put(&b)
}
