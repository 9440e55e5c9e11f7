package rm

import (
	"bytes"
	"encoding/binary"
)

const (
	handleSize = 32
	// maxClientID is the longest name of a client in bytes; longer ones count as none.
	maxClientID = 127
	// maxPath is the longest path of a pool in a request: PATH_MAX of Linux.
	maxPath = 4096
)

// Handle names a region, and shows that whoever has it was told of it.
type Handle struct {
	Region uint64
	Offset uint64 // in the file or device that it is mapped from, in bytes
	Length uint64 // in bytes
	Token  uint64 // see [Secret]
}

// Region is a region as this member's clients can map it.
type Region struct {
	Handle
	Path string // of the file or device, on this member's host
}

// Pool describes a device that regions come from.
type Pool struct {
	Path  string
	File  bool   // rather than a device node
	Total uint64 // bytes
	Free  uint64 // bytes
	Align uint64 // of regions, in bytes
}

// request is a request of any kind.
type request struct {
	kind   Kind
	size   uint64 // ALLOC
	path   string // ALLOC: of the pool; empty = any
	handle Handle // FREE, GET_ACCESS
	client string // who asks; empty = it does not say, or not in a way that counts
	id     uint64 // ALLOC, FREE: the client's number of the request; 0 = it has none
}

// parseRequest takes a request's payload apart. An Error says what is wrong with it. Whatever follows behind what is known is
// ignored, as Maru ignores it.
func parseRequest(kind Kind, b []byte) (q request, fault *Error) {
	q.kind = kind
	switch kind {
	case KindAlloc:
		if b, fault = q.parseAlloc(b); fault != nil {
			return q, fault
		}
	case KindFree, KindAccess:
		if len(b) < handleSize {
			if kind == KindFree {
				return q, errFree
			}
			return q, errAccess
		}
		q.handle, b = parseHandle(b), b[handleSize:]
	case KindStats:
		return q, nil
	default:
		return q, errKind
	}
	q.client, b = parseClient(b)
	if kind == KindAccess {
		return q, nil // it may be repeated as it is
	}
	if q.client == "" {
		return q, errNoClient
	}
	if len(b) >= 8 {
		q.id = binary.LittleEndian.Uint64(b)
	}
	return q, nil
}

func (q *request) parseAlloc(b []byte) (rest []byte, fault *Error) {
	const fixed = 16 // size u64, path length u32, reserved u32
	if len(b) < fixed {
		return nil, errAlloc
	}
	q.size = binary.LittleEndian.Uint64(b)
	n := binary.LittleEndian.Uint32(b[8:])
	b = b[fixed:]
	switch {
	case n > maxPath:
		return nil, errPathLen
	case uint64(n) > uint64(len(b)):
		return nil, errPathCut
	case bytes.IndexByte(b[:n], 0) >= 0:
		return nil, errPathNUL
	}
	q.path = string(b[:n])
	return b[n:], nil
}

// parseClient takes a name off the front: u16 length and bytes. One that does not count is left where it is.
func parseClient(b []byte) (client string, rest []byte) {
	if len(b) <= 2 {
		return "", b
	}
	n := int(binary.LittleEndian.Uint16(b))
	if n == 0 || n > maxClientID || 2+n > len(b) || bytes.IndexByte(b[2:2+n], 0) >= 0 {
		return "", b
	}
	return string(b[2 : 2+n]), b[2+n:]
}

func parseHandle(b []byte) Handle {
	u := binary.LittleEndian.Uint64
	return Handle{Region: u(b), Offset: u(b[8:]), Length: u(b[16:]), Token: u(b[24:])}
}

func appendHandle(b []byte, h *Handle) []byte {
	b = binary.LittleEndian.AppendUint64(b, h.Region)
	b = binary.LittleEndian.AppendUint64(b, h.Offset)
	b = binary.LittleEndian.AppendUint64(b, h.Length)
	return binary.LittleEndian.AppendUint64(b, h.Token)
}

// requestFrame is the frame of a request.
func requestFrame(q *request) []byte {
	b := beginFrame(q.kind)
	if q.kind == KindAlloc {
		b = binary.LittleEndian.AppendUint64(b, q.size)
		b = appendText32(b, q.path, 0)
	} else if q.kind != KindStats {
		b = appendHandle(b, &q.handle)
	}
	if q.kind != KindStats && (q.kind != KindAccess || q.client != "") {
		b = appendText16(b, q.client)
	}
	if q.kind == KindAlloc || q.kind == KindFree {
		b = binary.LittleEndian.AppendUint64(b, q.id)
	}
	return endFrame(b)
}

// appendText16 appends a text behind its length in 16 bits.
func appendText16(b []byte, s string) []byte {
	return append(binary.LittleEndian.AppendUint16(b, uint16(len(s))), s...) //nolint:gosec // names and ids are short
}

// appendText32 appends a text behind its length in 32 bits and whatever lies between.
func appendText32(b []byte, s string, between ...uint32) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(s))) //nolint:gosec // paths are short
	for _, v := range between {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	return append(b, s...)
}

// noUUID stands where Maru names a device by the id that it has written there. The devices of a Larder pool carry Larder's
// own header, so that clients take the path.
const noUUID = ""

// allocFrame is the frame that answers ALLOC. For a status other than OK the region is the zero one, and so is size.
func allocFrame(status Status, r *Region, size uint64) []byte {
	b := beginFrame(KindAllocReply)
	b = binary.LittleEndian.AppendUint32(b, uint32(status)) //nolint:gosec // two's complement is what is meant
	b = binary.LittleEndian.AppendUint32(b, 0)              // kind of access: there is one
	b = appendHandle(b, &r.Handle)
	b = binary.LittleEndian.AppendUint64(b, size)
	b = appendText32(b, r.Path)
	return endFrame(appendText16(b, noUUID))
}

// freeFrame is the frame that answers FREE.
func freeFrame(status Status) []byte {
	b := beginFrame(KindFreeReply)
	return endFrame(binary.LittleEndian.AppendUint32(b, uint32(status))) //nolint:gosec // as above
}

// accessFrame is the frame that answers GET_ACCESS. For a status other than OK the region is the zero one.
func accessFrame(status Status, r *Region) []byte {
	b := beginFrame(KindAccessReply)
	b = binary.LittleEndian.AppendUint32(b, uint32(status)) //nolint:gosec // as above
	b = appendText32(b, r.Path)
	b = binary.LittleEndian.AppendUint64(b, r.Offset)
	b = binary.LittleEndian.AppendUint64(b, r.Length)
	return endFrame(appendText16(b, noUUID))
}

// statsFrame is the frame that answers STATS.
func statsFrame(pools []Pool) []byte {
	b := beginFrame(KindStatsReply)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(pools))) //nolint:gosec // a handful
	for i := range pools {
		p := &pools[i]
		b = binary.LittleEndian.AppendUint32(b, uint32(len(p.Path))) //nolint:gosec // a path
		kind := uint32(0)
		if p.File {
			kind = 1
		}
		b = binary.LittleEndian.AppendUint32(b, kind)
		b = binary.LittleEndian.AppendUint64(b, p.Total)
		b = binary.LittleEndian.AppendUint64(b, p.Free)
		b = binary.LittleEndian.AppendUint64(b, p.Align)
		b = append(b, p.Path...)
	}
	return endFrame(b)
}

// errorFrame is the frame of an error.
func errorFrame(f *Error) []byte {
	b := beginFrame(KindError)
	b = binary.LittleEndian.AppendUint32(b, uint32(f.Status)) //nolint:gosec // as above
	return endFrame(appendText32(b, f.Message))
}
