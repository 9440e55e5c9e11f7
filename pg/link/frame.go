package link

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// A frame is a header of eight bytes and a body: the body's length (uint32, little endian), the frame's kind, how many open files
// come with it, and two zeros. Files come with a frame's first bytes, over Unix sockets only.
const (
	frameHeader = 8
	// maxBody bounds a frame's body: the longest are questions and answers with their number.
	maxBody = MaxAsk + 8
	// maxHello bounds that of a frame whose sender has not said yet who it is.
	maxHello = 8 << 10
	// maxFiles bounds the files of a frame: an outbox and a ring.
	maxFiles = 2
)

// Kinds of frames, and what their bodies are.
const (
	frameHello   = 1 + iota // hello
	frameWelcome            // welcome
	frameBegin              // begin: the dialer has read the welcome
	frameBye                // nothing: the node is being closed
	frameAsk                // a number (uint64), then the question
	frameAnswer             // the question's number, then the answer
	frameBusy               // the question's number, then why there is no answer
	frameOffer              // partyMessage
	frameShare              // partyMessage
	frameDone               // partyMessage
	frameLeave              // partyMessage
	frameKinds              // there are no more
)

// frame is a message between two nodes.
type frame struct {
	kind  byte
	body  []byte // valid until the next is read
	files []*os.File
}

// drop closes the files that nobody has taken.
func (f *frame) drop() {
	closeFiles(f.files)
	f.files = nil
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close() // nobody has written to it
		}
	}
}

// decode reads a body that is JSON.
func (f *frame) decode(into any) error {
	if err := json.Unmarshal(f.body, into); err != nil {
		return fmt.Errorf("%w: kind %d: %w", ErrFrame, f.kind, err)
	}
	return nil
}

// appendFrame writes a frame behind b.
func appendFrame(b []byte, kind byte, files int, body ...[]byte) []byte {
	at := len(b)
	b = append(b, 0, 0, 0, 0, kind, byte(files), 0, 0) //nolint:gosec // at most maxFiles
	for _, part := range body {
		b = append(b, part...)
	}
	binary.LittleEndian.PutUint32(b[at:], uint32(len(b)-at-frameHeader)) //nolint:gosec // at most maxBody
	return b
}

// frameReader takes frames from a connection, with a bound.
type frameReader struct {
	conn  net.Conn
	unix  *net.UnixConn // nil if it is no Unix socket
	most  int           // of bytes in a body
	buf   []byte
	begin int        // of what has come and was not taken, in buf
	files []*os.File // that have come and belong to no frame yet
	oob   []byte
}

// newFrameReader reads from a connection whose other end has not said yet who it is.
func newFrameReader(conn net.Conn) *frameReader {
	r := &frameReader{conn: conn, most: maxHello, buf: make([]byte, 0, 4<<10)}
	if r.unix, _ = conn.(*net.UnixConn); r.unix != nil {
		r.oob = make([]byte, unix.CmsgSpace(4*maxFiles))
	}
	return r
}

// next waits for a frame. Its files are the caller's.
func (r *frameReader) next() (frame, error) {
	for {
		f, n, err := parseFrame(r.buf[r.begin:], r.most)
		if err != nil {
			return frame{}, err
		}
		if n == 0 {
			if err := r.more(); err != nil {
				return frame{}, err
			}
			continue
		}
		want := int(r.buf[r.begin+5])
		r.begin += n
		if want > len(r.files) {
			return frame{}, fmt.Errorf("%w: kind %d says that %d files come with it, %d have come", ErrFrame, f.kind, want, len(r.files))
		}
		f.files, r.files = r.files[:want:want], r.files[want:]
		return f, nil
	}
}

// parseFrame finds a frame at the beginning of b and its length, which is 0 if it is not all there.
func parseFrame(b []byte, most int) (f frame, n int, err error) {
	if len(b) < frameHeader {
		return frame{}, 0, nil
	}
	length := int64(binary.LittleEndian.Uint32(b))
	switch {
	case length > int64(most):
		return frame{}, 0, fmt.Errorf("%w: a body of %d bytes, the most is %d", ErrFrame, length, most)
	case b[4] == 0 || b[4] >= frameKinds:
		return frame{}, 0, fmt.Errorf("%w: there is no kind %d", ErrFrame, b[4])
	case b[5] > maxFiles:
		return frame{}, 0, fmt.Errorf("%w: %d files, the most is %d", ErrFrame, b[5], maxFiles)
	case b[6] != 0 || b[7] != 0:
		return frame{}, 0, fmt.Errorf("%w: its header does not end with zeros", ErrFrame)
	}
	n = frameHeader + int(length)
	if len(b) < n {
		return frame{}, 0, nil
	}
	return frame{kind: b[4], body: b[frameHeader:n:n]}, n, nil
}

// more reads what comes next.
func (r *frameReader) more() error {
	r.buf = append(r.buf[:0], r.buf[r.begin:]...)
	r.begin = 0
	if len(r.buf) == cap(r.buf) {
		r.buf = append(make([]byte, 0, 2*cap(r.buf)), r.buf...) // until a whole frame fits
	}
	room := r.buf[len(r.buf):cap(r.buf)]
	if r.unix == nil {
		n, err := r.conn.Read(room)
		r.buf = r.buf[:len(r.buf)+n]
		return err
	}
	n, rights, flags, _, err := r.unix.ReadMsgUnix(room, r.oob)
	if err != nil {
		return err
	}
	r.files = append(r.files, openRights(r.oob[:rights])...)
	r.buf = r.buf[:len(r.buf)+n]
	switch {
	case n == 0:
		return net.ErrClosed
	case flags&unix.MSG_CTRUNC != 0 || len(r.files) > maxFiles:
		return fmt.Errorf("%w: too many files come with it", ErrFrame)
	}
	return nil
}

// rest is what has come behind the last frame.
func (r *frameReader) rest() []byte { return r.buf[r.begin:] }

// close drops files that no frame has claimed.
func (r *frameReader) close() {
	closeFiles(r.files)
	r.files = nil
}

// openRights takes the files that came with a message.
func openRights(rights []byte) (files []*os.File) {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "shared")) // close-on-exec: the net package asks for that
		}
	}
	return files
}

// writeFrame sends a frame. Its files stay the caller's.
func writeFrame(conn net.Conn, kind byte, files []*os.File, body ...[]byte) error {
	b := appendFrame(nil, kind, len(files), body...)
	if len(files) == 0 {
		_, err := conn.Write(b)
		return err
	}
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return errors.New("link: files go over Unix sockets only")
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	n, _, err := u.WriteMsgUnix(b, unix.UnixRights(fds...), nil)
	if err == nil && n < len(b) {
		_, err = u.Write(b[n:])
	}
	return err
}

// writeJSON sends a frame whose body is JSON.
func writeJSON(conn net.Conn, kind byte, files []*os.File, body any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	return writeFrame(conn, kind, files, b)
}
