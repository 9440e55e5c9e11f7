package transfer

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"larder/cxl"
)

// stream reads frames from a TCP connection: bodies straight into their place, and with the same system call what follows
// them. One goroutine reads; write may be used by another.
type stream struct {
	conn  *net.TCPConn
	raw   syscall.RawConn
	idle  func() error // called before a read waits
	ahead [readAhead]byte
	r, w  int // what has been read ahead lies between
	iov   []syscall.Iovec
	try   func(fd uintptr) bool
	n     int
	err   error
	moved atomic.Int64 // bytes that were read, ever
	out   net.Buffers

	wait syscall.RawConn          // what a read waits for: raw, or what zero has for it
	zero atomic.Pointer[zeroCopy] // nil if all that is written is copied
}

// readAhead is room for 21 headers: as many small frames come with one system call, and little of a body is copied twice.
const readAhead = 1 << 10

func newStream(conn *net.TCPConn) (*stream, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	s := &stream{conn: conn, raw: raw, wait: raw}
	s.try = s.readv
	if sameHost(conn) {
		_ = raw.Control(func(fd uintptr) { // slower without, but right
			_ = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "reno")
		})
	}
	return s, nil
}

// sameHost reports whether a connection never leaves this host: nothing is lost there, and what paces itself for a network
// (bbr, where that is the default) takes the other process's turn on a processor for a long way, and sends little. Of what
// every kernel has reno holds nothing back.
func sameHost(conn *net.TCPConn) bool {
	here, ok := conn.LocalAddr().(*net.TCPAddr)
	there, too := conn.RemoteAddr().(*net.TCPAddr)
	return ok && too && (here.IP.Equal(there.IP) || here.IP.IsLoopback())
}

// readv is one attempt to read into iov. It reports false if there is nothing yet.
func (s *stream) readv(fd uintptr) bool {
	for {
		n, _, errno := syscall.Syscall(syscall.SYS_READV, fd,
			uintptr(unsafe.Pointer(&s.iov[0])), uintptr(len(s.iov))) //nolint:gosec // the kernel wants it so
		switch {
		case errno == syscall.EINTR:
			continue
		case errno == syscall.EAGAIN:
			if z := s.zero.Load(); z != nil {
				z.drain()
			}
			if s.idle != nil {
				if s.err = s.idle(); s.err != nil {
					return true
				}
			}
			return false
		case errno != 0:
			s.err = os.NewSyscallError("readv", errno)
		case n == 0:
			s.err = io.EOF
		default:
			s.n = int(n)
			s.moved.Add(int64(s.n))
		}
		return true
	}
}

// fill reads once into iov.
func (s *stream) fill() (int, error) {
	s.n, s.err = 0, nil
	if err := s.wait.Read(s.try); err != nil {
		return 0, err
	}
	return s.n, s.err
}

func (s *stream) addIov(b []byte) {
	v := syscall.Iovec{Base: unsafe.SliceData(b)} //nolint:gosec // the kernel wants it so
	v.SetLen(len(b))
	s.iov = append(s.iov, v)
}

// readHeader reads the next header. io.EOF means that the peer has closed the connection between two frames.
func (s *stream) readHeader(h *header) error {
	for s.w-s.r < headerSize {
		if s.r > 0 {
			s.w = copy(s.ahead[:], s.ahead[s.r:s.w])
			s.r = 0
		}
		s.iov = s.iov[:0]
		s.addIov(s.ahead[s.w:])
		n, err := s.fill()
		if err != nil {
			if errors.Is(err, io.EOF) && s.w > 0 {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
		s.w += n
	}
	err := h.decode(s.ahead[s.r:])
	s.r += headerSize
	return err
}

// more is the type of the next frame if its header has been read ahead, 0 if it has not.
func (s *stream) more() uint8 {
	if s.w-s.r < headerSize {
		return 0
	}
	return s.ahead[s.r]
}

// readBody fills pieces, all of which together are the body of the frame whose header has just been read, or a part. After
// [ErrMemory], which says that they are gone, the next frame can be read.
func (s *stream) readBody(pieces [][]byte) error {
	left, err := s.place(pieces)
	if left > 0 && err == nil {
		s.r, s.w = 0, 0
		s.addIov(s.ahead[:])
		left, err = s.fillAll(left)
	}
	if errors.Is(err, ErrMemory) || errors.Is(err, syscall.EFAULT) {
		if err := s.discard(uint32(left)); err != nil { //nolint:gosec // no longer than a body
			return err
		}
		return ErrMemory
	}
	return err
}

// place puts what has been read ahead into pieces, and lists what is left to be read, in bytes.
func (s *stream) place(pieces [][]byte) (left int, err error) {
	s.iov = s.iov[:0]
	r := s.r
	err = cxl.Guard(func() {
		for _, p := range pieces {
			n := copy(p, s.ahead[r:s.w])
			r += n
			if p = p[n:]; len(p) > 0 {
				s.addIov(p)
				left += len(p)
			}
		}
	})
	if err == nil {
		s.r = r
		return left, nil
	}
	left = 0
	for _, p := range pieces {
		left += len(p)
	}
	return left, ErrMemory
}

// fillAll reads until nothing is left, and says how much is if that fails.
func (s *stream) fillAll(left int) (int, error) {
	for at := 0; ; {
		whole := s.iov
		s.iov = whole[at:]
		n, err := s.fill()
		s.iov = whole
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return left, err
		}
		if n >= left {
			s.w = n - left
			return 0, nil
		}
		left -= n
		for n >= int(s.iov[at].Len) { //nolint:gosec // the length of a slice
			n -= int(s.iov[at].Len) //nolint:gosec // no more than n
			at++
		}
		v := &s.iov[at]
		v.Base = (*byte)(unsafe.Add(unsafe.Pointer(v.Base), n)) //nolint:gosec // within the piece
		v.SetLen(int(v.Len) - n)                                //nolint:gosec // within the piece
	}
}

// discard reads a body that nobody wants.
func (s *stream) discard(n uint32) error {
	scratch := make([]byte, min(n, 32<<10))
	for n > 0 {
		part := scratch[:min(int(n), len(scratch))]
		n -= uint32(len(part)) //nolint:gosec // no more than n
		if err := s.readBody([][]byte{part}); err != nil {
			return err
		}
	}
	return nil
}

// write sends buffers, with one system call if they fit the socket.
func (s *stream) write(buffers [][]byte) error {
	s.out = buffers
	_, err := s.out.WriteTo(s.conn)
	return err
}

// expire ends what waits for the connection, now and later.
func (s *stream) expire() {
	if z := s.zero.Load(); z != nil {
		_ = z.ready.SetDeadline(past()) // it fails for closed ones only
	}
	_ = s.conn.SetDeadline(past()) // it fails for closed ones only
}

// close closes the connection, which nobody reads or writes any more.
func (s *stream) close() {
	if z := s.zero.Load(); z != nil {
		_ = z.ready.Close() // it holds nothing
	}
	_ = s.conn.Close() // what it carried is dealt with
}

// call is one exchange on a control connection, within a time.
func (s *stream) call(h *header, body []byte, timeout time.Duration) (*header, []byte, error) {
	if err := s.conn.SetDeadline(soon(timeout)); err != nil {
		return nil, nil, err
	}
	if err := s.send(h, body); err != nil {
		return nil, nil, err
	}
	return s.receive()
}

// send writes one frame.
func (s *stream) send(h *header, body []byte) error {
	b := make([]byte, headerSize, headerSize+len(body))
	h.body = uint32(len(body)) //nolint:gosec // bounded by the callers
	h.encode(b)
	_, err := s.conn.Write(append(b, body...))
	return err
}

// receive reads one frame whole. It is for small ones.
func (s *stream) receive() (*header, []byte, error) {
	h := &header{}
	if err := s.readHeader(h); err != nil {
		return nil, nil, err
	}
	if h.body > maxControl {
		return nil, nil, fmt.Errorf("transfer: a body of %d bytes where a small one was due", h.body)
	}
	body := make([]byte, h.body)
	if h.body > 0 {
		if err := s.readBody([][]byte{body}); err != nil {
			return nil, nil, err
		}
	}
	return h, body, nil
}
