//go:build rdma && cgo && linux

package verbs

// #cgo LDFLAGS: -libverbs
// #include "shim.h"
import "C"

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"
	"time"
	"unsafe"
)

// Devices are the names of the RDMA devices of this machine, none where it has none. An error says that they cannot be
// listed: of those a missing kernel module is none.
func Devices() ([]string, error) {
	list, n, err := deviceList()
	if err != nil || list == nil {
		return nil, err
	}
	defer C.ibv_free_device_list(list)
	names := make([]string, 0, n)
	for _, d := range unsafe.Slice(list, n) {
		names = append(names, C.GoString(C.ibv_get_device_name(d)))
	}
	return names, nil
}

func deviceList() (list **C.struct_ibv_device, n int, err error) {
	var count C.int
	list, err = C.ibv_get_device_list(&count)
	switch {
	case list != nil:
		return list, int(count), nil
	case errors.Is(err, syscall.ENOSYS): // the kernel has no RDMA
		return nil, 0, nil
	}
	return nil, 0, failedWith("ibv_get_device_list", err)
}

// Context is an open device. Its methods may be called concurrently.
type Context struct {
	object
	c      *C.struct_ibv_context
	name   string
	attr   Attributes
	events *channel
}

// Attributes are a device's bounds.
type Attributes struct {
	Firmware      string
	MaxRegion     uint64 // bytes of a region
	MaxRegions    int
	MaxQP         int // queue pairs
	MaxWR         int // work requests that a queue pair holds
	MaxSGE        int // pieces of a work request
	MaxCQ         int // completion queues
	MaxCQE        int // completions that a queue holds
	MaxWindows    int
	MaxReadAtomic int // READs that a queue pair has under way, as their issuer
	MaxReadServed int // READs of one peer that a queue pair serves at once
	Ports         int // they are numbered from 1
	// Windows2 says that memory windows of type 2 can be used: they are bound and invalidated by work requests.
	Windows2 bool
}

// Open opens the device of that name.
func Open(name string) (*Context, error) {
	list, n, err := deviceList()
	if err != nil {
		return nil, err
	}
	if list != nil {
		defer C.ibv_free_device_list(list)
		for _, d := range unsafe.Slice(list, n) {
			if C.GoString(C.ibv_get_device_name(d)) == name {
				return open(d, name)
			}
		}
	}
	return nil, fmt.Errorf("verbs: there is no device %q: rdma link show lists those there are", name)
}

func open(d *C.struct_ibv_device, name string) (*Context, error) {
	c, err := C.ibv_open_device(d)
	if c == nil {
		return nil, failedWith("ibv_open_device", err)
	}
	x := &Context{c: c, name: name}
	if err := x.query(); err != nil {
		C.ibv_close_device(c)
		return nil, err
	}
	if x.events, err = newChannel(int(c.async_fd), name+" events"); err != nil {
		C.ibv_close_device(c)
		return nil, err
	}
	return x, nil
}

func (x *Context) query() error {
	var a C.struct_ibv_device_attr
	if rc, err := C.ibv_query_device(x.c, &a); rc != 0 {
		return returned("ibv_query_device", rc, err)
	}
	x.attr = Attributes{
		Firmware: C.GoString(&a.fw_ver[0]), MaxRegion: uint64(a.max_mr_size), MaxRegions: int(a.max_mr), MaxQP: int(a.max_qp),
		MaxWR: int(a.max_qp_wr), MaxSGE: int(a.max_sge), MaxCQ: int(a.max_cq), MaxCQE: int(a.max_cqe), MaxWindows: int(a.max_mw),
		MaxReadAtomic: int(a.max_qp_init_rd_atom), MaxReadServed: int(a.max_qp_rd_atom), Ports: int(a.phys_port_cnt),
		Windows2: a.device_cap_flags&(C.IBV_DEVICE_MEM_WINDOW_TYPE_2A|C.IBV_DEVICE_MEM_WINDOW_TYPE_2B) != 0,
	}
	return nil
}

// Name is the device's.
func (x *Context) Name() string { return x.name }

// Attributes are the device's bounds.
func (x *Context) Attributes() Attributes { return x.attr }

// Close closes the device. It fails with [ErrInUse] while anything that was made from it is open.
func (x *Context) Close() error {
	if first, err := x.shut(); !first {
		return err
	}
	x.events.close()
	if rc, err := C.ibv_close_device(x.c); rc != 0 {
		return returned("ibv_close_device", rc, err)
	}
	return nil
}

// GIDType is how packets to and from a GID are made. Both ends of a connection must use the same.
type GIDType uint32

// The kinds of GIDs.
const (
	InfiniBand GIDType = C.IBV_GID_TYPE_IB
	RoCEv1     GIDType = C.IBV_GID_TYPE_ROCE_V1 // Ethernet frames, which no router forwards
	RoCEv2     GIDType = C.IBV_GID_TYPE_ROCE_V2 // UDP
)

// String implements fmt.Stringer.
func (t GIDType) String() string {
	switch t {
	case InfiniBand:
		return "InfiniBand"
	case RoCEv1:
		return "RoCE v1"
	case RoCEv2:
		return "RoCE v2"
	}
	return fmt.Sprintf("GID type %d", uint32(t))
}

// GID is an address of a port.
type GID struct {
	Index   int // in the port's table
	Type    GIDType
	Address netip.Addr // IPv6, or IPv4 mapped into it
}

// Port is the state of a device's port.
type Port struct {
	Number     int
	Active     bool
	Ethernet   bool // its peers are named by GID; otherwise by LID
	LID        uint16
	MTU        int    // bytes of a packet, that are in use
	MaxMessage uint64 // bytes of a work request
	GIDs       []GID
}

// maxGIDs bounds the valid entries that are read, of all ports: the kernel answers with less than 64 KiB, which are 2047.
// Devices have tables of 16 to 256, of which each address of a network device takes one or two.
const maxGIDs = 1024

// Port asks for the state of a port, from 1.
func (x *Context) Port(number int) (Port, error) {
	if err := x.enter(); err != nil {
		return Port{}, err
	}
	defer x.leave()
	var a C.struct_ibv_port_attr
	if rc, err := C.larder_query_port(x.c, C.uint8_t(number), &a); rc != 0 {
		return Port{}, returned("ibv_query_port", rc, err)
	}
	p := Port{
		Number: number, Active: a.state == C.IBV_PORT_ACTIVE, Ethernet: a.link_layer == C.IBV_LINK_LAYER_ETHERNET,
		LID: uint16(a.lid), MTU: mtuBytes(a.active_mtu), MaxMessage: uint64(a.max_msg_sz),
	}
	entries := make([]C.struct_ibv_gid_entry, maxGIDs)
	n, err := C.larder_query_gids(x.c, &entries[0], maxGIDs)
	if n < 0 {
		return Port{}, failed("ibv_query_gid_table", errnoOf(int64(n), err))
	}
	for i := range entries[:n] {
		if e := &entries[i]; int(e.port_num) == number {
			p.GIDs = append(p.GIDs, GID{
				Index: int(e.gid_index), Type: GIDType(e.gid_type), Address: netip.AddrFrom16(e.gid),
			})
		}
	}
	return p, nil
}

func errnoOf(negative int64, err error) syscall.Errno {
	var errno syscall.Errno
	if negative == -1 && errors.As(err, &errno) {
		return errno
	}
	return syscall.Errno(-negative)
}

// PickGID chooses the GID by which peers reach the port best: RoCE v2 before v1, since routers forward it, and of these a
// mapped IPv4 address before a global IPv6 one before a link's own, which two hosts can have in common. Among equals it
// takes the lowest index. It reports false if the port has none.
func (p *Port) PickGID() (GID, bool) {
	best, points := GID{}, -1
	for _, g := range p.GIDs {
		score := 0
		switch {
		case g.Address.Is4In6():
			score = 2
		case !g.Address.IsLinkLocalUnicast():
			score = 1
		}
		if g.Type == RoCEv2 {
			score += 4
		}
		if score > points {
			best, points = g, score
		}
	}
	return best, points >= 0
}

// mtuBytes and mtuCode translate the MTU: verbs number them 1 for 256 to 5 for 4096 bytes.
func mtuBytes(code uint32) int { return 128 << code }

func mtuCode(bytes int) (uint32, error) {
	for code := uint32(C.IBV_MTU_256); code <= C.IBV_MTU_4096; code++ {
		if mtuBytes(code) == bytes {
			return code, nil
		}
	}
	return 0, fmt.Errorf("verbs: an MTU of %d bytes: it is 256, 512, 1024, 2048 or 4096", bytes)
}

// channel waits for a file descriptor of libibverbs by the runtime's poller, so that waiting takes no thread.
type channel struct {
	file *os.File // a duplicate: closing it leaves the library's own open
	raw  syscall.RawConn
}

func newChannel(fd int, name string) (*channel, error) {
	if err := syscall.SetNonblock(fd, true); err != nil {
		return nil, fmt.Errorf("verbs: a channel that does not block: %w", err)
	}
	dup, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_DUPFD_CLOEXEC, 0)
	if errno != 0 {
		return nil, fmt.Errorf("verbs: a second descriptor of a channel: %w", errno)
	}
	f := os.NewFile(dup, name)
	raw, err := f.SyscallConn()
	if err == nil {
		err = f.SetReadDeadline(time.Time{}) // fails where the descriptor cannot be polled
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("verbs: a channel: %w", err), f.Close())
	}
	return &channel{file: f, raw: raw}, nil
}

func (c *channel) close() { _ = c.file.Close() } // a descriptor that only watches
