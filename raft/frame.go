package raft

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	pb "go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// A frame of the transport is the length of the payload (4 bytes big-endian),
// CRC32C of type and payload (4), type (1), payload.
const (
	frameHello     = 1 // the dialler names itself and whom it wants
	frameReply     = 2 // the listener's answer to a hello, and to a snapshot
	frameMessages  = 3 // messages, each behind its length as a uvarint
	frameSnapshot  = 4 // one MsgSnap; the stream follows
	frameKeepAlive = 5 // nothing
)

const (
	frameHeader = 4 + 4 + 1
	// frameMax is the largest payload: one message with the largest proposal, and room for its neighbours.
	frameMax = 2 * MaxProposalBytes
	// frameBatch is the size at which a frame of messages is closed.
	frameBatch = 256 << 10
)

var errFrame = errors.New("raft: malformed frame from the network; is the peer a member of the same cluster and release?")

// appendFrame adds a frame to b.
func appendFrame(b []byte, typ byte, payload []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(len(payload))) //nolint:gosec // at most frameMax
	b = binary.BigEndian.AppendUint32(b, crc32.Update(crc32.Checksum([]byte{typ}, castagnoli), castagnoli, payload))
	return append(append(b, typ), payload...)
}

// readFrame reads a frame into buf, which grows only as bytes arrive, and returns
// it for reuse; payload lies in it.
func readFrame(r io.Reader, buf []byte) (typ byte, payload, reuse []byte, err error) {
	var head [frameHeader]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, buf, err
	}
	n := int(binary.BigEndian.Uint32(head[:]))
	if n > frameMax {
		return 0, nil, buf, fmt.Errorf("%w: %d bytes exceed the limit of %d", errFrame, n, frameMax)
	}
	if n <= cap(buf) {
		buf = buf[:n]
		_, err = io.ReadFull(r, buf)
	} else {
		b := bytes.NewBuffer(buf[:0])
		_, err = io.CopyN(b, r, int64(n))
		buf = b.Bytes()
	}
	if err != nil {
		return 0, nil, buf, noEOF(err)
	}
	crc := crc32.Update(crc32.Checksum(head[8:], castagnoli), castagnoli, buf)
	if crc != binary.BigEndian.Uint32(head[4:]) {
		return 0, nil, buf, fmt.Errorf("%w: %w", errFrame, errChecksum)
	}
	return head[8], buf, buf, nil
}

// appendMessage adds a message to the payload of a frame.
func appendMessage(b []byte, m *pb.Message) ([]byte, error) {
	opt := proto.MarshalOptions{}
	size := opt.Size(m)
	b = binary.AppendUvarint(b, uint64(size)) //nolint:gosec // not negative
	out, err := opt.MarshalAppend(b, m)
	if err != nil {
		return b, fmt.Errorf("raft: encode a message: %w", err)
	}
	return out, nil
}

// splitMessages calls fn for each message of a payload.
func splitMessages(payload []byte, fn func(*pb.Message) error) error {
	for len(payload) > 0 {
		n, w := binary.Uvarint(payload)
		if w <= 0 || n > uint64(len(payload)-w) { //nolint:gosec // not negative
			return fmt.Errorf("%w: a message is cut off", errFrame)
		}
		m, err := decodeMessage(payload[w : w+int(n)]) //nolint:gosec // at most len(payload)
		if err != nil {
			return fmt.Errorf("%w: %w", errFrame, err)
		}
		if err := fn(m); err != nil {
			return err
		}
		payload = payload[w+int(n):] //nolint:gosec // as above
	}
	return nil
}

// hello opens a connection.
type hello struct {
	kind              byte // helloMessages or helloSnapshot
	cluster, from, to uint64
	addr              string // where from listens
}

const (
	helloMagic    = "LRDRAFT"
	helloVersion  = 1
	helloMessages = 1
	helloSnapshot = 2
)

func (h *hello) encode() []byte {
	b := append([]byte(helloMagic), helloVersion, h.kind)
	b = binary.BigEndian.AppendUint64(b, h.cluster)
	b = binary.BigEndian.AppendUint64(b, h.from)
	b = binary.BigEndian.AppendUint64(b, h.to)
	return append(b, h.addr...)
}

func decodeHello(b []byte) (*hello, error) {
	const fixed = len(helloMagic) + 2 + 24
	if len(b) < fixed || len(b) > fixed+maxAddrBytes || string(b[:len(helloMagic)]) != helloMagic {
		return nil, fmt.Errorf("%w: not a hello", errFrame)
	}
	b = b[len(helloMagic):]
	if b[0] != helloVersion {
		return nil, fmt.Errorf("%w: version %d, this release speaks %d", errFrame, b[0], helloVersion)
	}
	h := &hello{kind: b[1]}
	b = b[2:]
	h.cluster, h.from, h.to = binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:]), binary.BigEndian.Uint64(b[16:])
	h.addr = string(b[24:])
	if h.kind != helloMessages && h.kind != helloSnapshot {
		return nil, fmt.Errorf("%w: unknown kind %d", errFrame, h.kind)
	}
	return h, nil
}

// reply answers a hello, or reports on a snapshot.
type reply struct {
	status  byte
	cluster uint64
	from    uint64
	text    string
}

const (
	replyOK      = 0
	replyRefused = 1 // text says why
	replyRemoved = 2 // the dialler was removed from the cluster
	maxReplyText = 1024
)

func (r *reply) encode() []byte {
	b := binary.BigEndian.AppendUint64([]byte{r.status}, r.cluster)
	b = binary.BigEndian.AppendUint64(b, r.from)
	return append(b, r.text[:min(len(r.text), maxReplyText)]...)
}

func decodeReply(b []byte) (*reply, error) {
	if len(b) < 17 || len(b) > 17+maxReplyText {
		return nil, fmt.Errorf("%w: not a reply", errFrame)
	}
	return &reply{
		status: b[0], cluster: binary.BigEndian.Uint64(b[1:]), from: binary.BigEndian.Uint64(b[9:]), text: string(b[17:]),
	}, nil
}
