package transfer

import (
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Zero-copy writes (MSG_ZEROCOPY): the kernel sends bodies from the pages that they lie in, which it pins, instead of copying
// them first. It numbers such writes of a connection from 0, and tells on the socket's error queue when it has let go of their
// pages, and whether it has copied after all, as it does for whatever stays on this host.
//
// Until then it may send of those pages what lies there at that moment. So
//
//   - whoever answers a READ holds the buffer until the kernel has let go: an acknowledgement by the peer's TCP, or the end of
//     the connection. To end a connection is not enough: of what has been handed to a device, pages may still be read after
//     the reset. Only what the kernel tells is waited for, however long that takes, as for a storage that hangs.
//   - a WRITE ends when the peer's answer has come and the peer's TCP has all of it: what is sent again after that is thrown
//     away there. One that ends otherwise waits for the peer to confirm that nobody reads the connection; the connection is
//     reset by then, and the kernel has let go, so that nobody is sent what the caller puts there next.

// Choices of [Config.ZeroCopy].
const (
	ZeroCopyAuto = "auto" // on connections to other hosts, until the kernel says that it copies
	ZeroCopyOn   = "on"   // on all, whatever it says
	ZeroCopyOff  = "off"
)

const (
	// zeroCopyLeast is how long bodies are, in the mean of a write, that are not copied: the kernel's documentation has it
	// pay above 10 KB, since pages are pinned and completions are read.
	zeroCopyLeast = 16 << 10
	// zeroCopyMisses in a row were copied after all before a connection writes as others do: what one says all do.
	zeroCopyMisses = 8
	// zeroCopyAnswers bounds the answers to reads, of up to burst each, that the kernel has not let go of. The bytes in them
	// are bounded by the socket's buffer, which they count for.
	zeroCopyAnswers = 64
	// zeroCopyGrace is how long a connection that ends well leaves the peer's TCP to take what was sent last.
	zeroCopyGrace = 100 * time.Millisecond
	// iovMax is what one system call takes.
	iovMax = 1024
)

// zeroCopyCounters count writes by what became of them.
type zeroCopyCounters struct {
	spared  atomic.Uint64 // not copied
	copied  atomic.Uint64 // by the kernel after all
	refused atomic.Uint64 // and then written as others are
	givenUp atomic.Uint64 // connections that write as others do from then on
}

// zeroCopy is a connection's zero-copy writes. One goroutine writes at a time.
type zeroCopy struct {
	counts *zeroCopyCounters
	insist bool
	fd     int
	origin uint64 // bytes that the peer's TCP had before
	off    atomic.Bool

	// ready is an epoll that has the socket alone. The runtime's poller takes a socket for broken that has something on its error
	// queue and neither room nor bytes to read, and says so to its reader; an epoll is readable then.
	ready *os.File

	mu     sync.Mutex
	sent   uint64 // writes
	ended  uint64 // of those that the kernel has let go of
	misses int
	acked  uint64 // bytes that the peer's TCP has, as far as is known
	open   []*answer
	spare  []*answer
	oob    [128]byte
}

// answer is a write of answers to reads. It holds their buffers until the kernel has let go of them.
type answer struct {
	by      interrupter
	buffers []*Buffer
	heads   *[burst * headerSize]byte
	first   uint64 // of its writes, and the one after its last
	after   uint64
	left    int  // of them
	whole   bool // there will be no more
}

// zeroCopies reports whether a connection is to have zero-copy writes, and whether to keep to them if the kernel copies.
func (c *Config) zeroCopies(conn *net.TCPConn) (try, insist bool) {
	insist = c.ZeroCopy == ZeroCopyOn
	return insist || c.ZeroCopy == ZeroCopyAuto && (c.remote || !sameHost(conn)), insist
}

func (c *Config) checkZeroCopy() error {
	if all := []string{ZeroCopyAuto, ZeroCopyOn, ZeroCopyOff}; !slices.Contains(all, c.ZeroCopy) {
		return fmt.Errorf("transfer: zero-copy %.20q: one of %q", c.ZeroCopy, all)
	}
	return nil
}

// spareCopies has a data connection's long bodies not be copied, if that is wanted and possible. Its reader calls it.
func (e *Engine) spareCopies(s *stream) {
	try, insist := e.cfg.zeroCopies(s.conn)
	if !try {
		return
	}
	z := &zeroCopy{counts: &e.counters.zeroCopy, insist: insist}
	err := errors.New("no socket")
	if e := s.raw.Control(func(fd uintptr) { err = z.begin(int(fd)) }); e != nil || err != nil {
		return // it is copied then
	}
	wait, err := z.ready.SyscallConn()
	if err != nil {
		_ = z.ready.Close() // it has not been used
		return
	}
	s.wait, s.try = wait, func(uintptr) bool { return s.readv(uintptr(z.fd)) }
	s.zero.Store(z)
}

func (z *zeroCopy) begin(fd int) error {
	z.fd = fd
	if p, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL); err != nil || p != unix.IPPROTO_TCP {
		return errors.Join(errors.ErrUnsupported, err) // MPTCP takes the flag, and never says that it has let go
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ZEROCOPY, 1); err != nil {
		return err
	}
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return err
	}
	z.origin = info.Bytes_acked
	ready, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return err
	}
	err = unix.EpollCtl(ready, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLRDHUP})
	if err = errors.Join(err, unix.SetNonblock(ready, true)); err != nil {
		return errors.Join(err, unix.Close(ready))
	}
	z.ready = os.NewFile(uintptr(ready), "epoll")
	return nil
}

// pays reports whether so many bodies, of so many bytes in all, are worth not to be copied.
func (z *zeroCopy) pays(bodies int, bytes uint64) bool {
	return z != nil && !z.off.Load() && bytes >= zeroCopyLeast*uint64(bodies) //nolint:gosec // at most burst
}

// answering begins an answer that holds buffers once more, each once. It is nil if there are too many.
func (z *zeroCopy) answering(buffers []*Buffer, by interrupter) *answer {
	z.mu.Lock()
	defer z.mu.Unlock()
	if len(z.open) >= zeroCopyAnswers {
		return nil
	}
	a := &answer{heads: &[burst * headerSize]byte{}}
	if n := len(z.spare); n > 0 {
		a, z.spare = z.spare[n-1], z.spare[:n-1]
	}
	a.by, a.first, a.after, a.left, a.whole = by, z.sent, z.sent, 0, false
	for _, b := range buffers {
		if !slices.Contains(a.buffers, b) {
			b.retain(by)
			a.buffers = append(a.buffers, b)
		}
	}
	z.open = append(z.open, a)
	return a
}

// answered says that an answer has been written, as far as it will be.
func (z *zeroCopy) answered(a *answer) {
	z.mu.Lock()
	defer z.mu.Unlock()
	a.whole = true
	z.letGo()
}

// letGo releases what the kernel has let go of. mu is held.
func (z *zeroCopy) letGo() {
	z.open = slices.DeleteFunc(z.open, func(a *answer) bool {
		if !a.whole || a.left > 0 {
			return false
		}
		for _, b := range a.buffers {
			b.release(a.by)
		}
		clear(a.buffers)
		a.buffers = a.buffers[:0]
		z.spare = append(z.spare, a)
		return true
	})
}

// write sends buffers, which stay as they are until the kernel has let go of them. a is nil if nobody waits for that.
func (z *zeroCopy) write(raw syscall.RawConn, buffers [][]byte, a *answer) error {
	var failed error
	flags := unix.MSG_ZEROCOPY
	err := raw.Write(func(fd uintptr) bool {
		for len(buffers) > 0 {
			z.count(a, flags, 1) // first, for it may end before the call does
			n, err := unix.SendmsgBuffers(int(fd), buffers[:min(len(buffers), iovMax)], nil, nil, flags|unix.MSG_NOSIGNAL)
			if err != nil {
				z.count(a, flags, -1)
			}
			switch {
			case err == nil:
				buffers = skip(buffers, n)
			case errors.Is(err, unix.EINTR):
			case errors.Is(err, unix.EAGAIN):
				z.drain()
				return false
			case flags != 0 && (errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.EFAULT)):
				// Too much is pinned, or it is memory that cannot be: a copy may do.
				flags = 0
				z.counts.refused.Add(1)
			default:
				failed = os.NewSyscallError("sendmsg", err)
				return true
			}
		}
		return true
	})
	return errors.Join(failed, err)
}

// count counts a write, or takes that back.
func (z *zeroCopy) count(a *answer, flags, by int) {
	if flags == 0 {
		return
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	z.sent += uint64(by) //nolint:gosec // wraps for -1
	if a != nil {
		a.after = z.sent
		a.left += by
	}
}

// skip leaves out the first n bytes.
func skip(buffers [][]byte, n int) [][]byte {
	for len(buffers) > 0 && n >= len(buffers[0]) {
		n -= len(buffers[0])
		buffers = buffers[1:]
	}
	if n > 0 {
		buffers[0] = buffers[0][n:]
	}
	return buffers
}

// drain reads the error queue.
func (z *zeroCopy) drain() {
	z.mu.Lock()
	defer z.mu.Unlock()
	for z.ended < z.sent {
		msg := unix.Msghdr{Control: &z.oob[0]}
		msg.SetControllen(len(z.oob))
		_, _, errno := unix.Syscall(unix.SYS_RECVMSG, uintptr(z.fd),
			uintptr(unsafe.Pointer(&msg)), unix.MSG_ERRQUEUE) //nolint:gosec // the kernel wants it so
		switch errno {
		case 0:
		case unix.EINTR:
			continue
		default: // there is nothing
			return
		}
		h, data, _, err := unix.ParseOneSocketControlMessage(z.oob[:msg.Controllen])
		if err != nil || len(data) < int(unsafe.Sizeof(unix.SockExtendedErr{})) || !isSocketError(&h) {
			continue
		}
		ee := (*unix.SockExtendedErr)(unsafe.Pointer(&data[0])) //nolint:gosec // it is one, see above
		if ee.Origin == unix.SO_EE_ORIGIN_ZEROCOPY {
			z.end(ee.Info, ee.Data, ee.Code&unix.SO_EE_CODE_ZEROCOPY_COPIED != 0)
		}
	}
}

func isSocketError(h *unix.Cmsghdr) bool {
	return h.Level == unix.SOL_IP && h.Type == unix.IP_RECVERR || h.Level == unix.SOL_IPV6 && h.Type == unix.IPV6_RECVERR
}

// end says that the kernel has let go of writes. It counts them with 32 bits. mu is held.
func (z *zeroCopy) end(first, last uint32, copied bool) {
	n := uint64(last-first) + 1
	from := z.sent - uint64(uint32(z.sent)-first) //nolint:gosec // its lower half
	z.ended += n
	for _, a := range z.open {
		a.left -= int(max(min(a.after, from+n), max(a.first, from)) - max(a.first, from)) //nolint:gosec // as many as it has
	}
	z.letGo()
	if !copied {
		z.counts.spared.Add(n)
		z.misses = 0
		return
	}
	z.counts.copied.Add(n)
	z.misses += int(min(n, zeroCopyMisses))
	if z.misses >= zeroCopyMisses && !z.insist && !z.off.Swap(true) {
		z.counts.givenUp.Add(1)
	}
}

// received reports whether the peer's TCP has the first n bytes since begin: a peer that says so itself may not be honest, and
// would be sent what the caller puts there next.
func (z *zeroCopy) received(n uint64) bool {
	if z == nil {
		return true
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	if n+z.origin > z.acked {
		info, err := unix.GetsockoptTCPInfo(z.fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil {
			return false
		}
		z.acked = info.Bytes_acked
	}
	return n+z.origin <= z.acked
}

// finish returns when the kernel has let go of all that was written. What it has not after grace is thrown away: the connection is
// reset. It reports false if that took longer than limit. Nobody writes any more.
func (z *zeroCopy) finish(grace, limit time.Duration) bool {
	if z == nil || z.settled(grace) {
		return true
	}
	none := unix.RawSockaddr{Family: unix.AF_UNSPEC} // resets, and leaves the error queue to be read
	_, _, _ = unix.Syscall(unix.SYS_CONNECT, uintptr(z.fd),
		uintptr(unsafe.Pointer(&none)), unsafe.Sizeof(none)) //nolint:gosec // the kernel wants it so
	return z.settled(limit)
}

// settled waits until the kernel has let go of all.
func (z *zeroCopy) settled(limit time.Duration) bool {
	begun := moment()
	for pause := 50 * time.Microsecond; ; pause = min(2*pause, tickEvery) {
		z.drain()
		z.mu.Lock()
		over := z.ended == z.sent
		z.mu.Unlock()
		left := limit - since(begun)
		if over || left <= 0 {
			return over
		}
		<-after(min(pause, left))
	}
}

// forever is a limit that is none.
const forever = time.Duration(math.MaxInt64)
