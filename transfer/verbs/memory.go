//go:build rdma && cgo && linux

package verbs

// #include "shim.h"
import "C"

import (
	"fmt"
	"runtime"
	"syscall"
	"unsafe"
)

// Domain is a protection domain: what was made from it may be used together, and nothing else with it. Its methods may be
// called concurrently.
type Domain struct {
	object
	x *Context
	c *C.struct_ibv_pd
}

// NewDomain makes a protection domain.
func (x *Context) NewDomain() (*Domain, error) {
	if err := x.adopt(); err != nil {
		return nil, err
	}
	c, err := C.ibv_alloc_pd(x.c)
	if c == nil {
		x.release()
		return nil, failedWith("ibv_alloc_pd", err)
	}
	return &Domain{x: x, c: c}, nil
}

// Close frees the domain. It fails with [ErrInUse] while anything that was made from it is open.
func (d *Domain) Close() error {
	return d.close(func() error {
		if rc, err := C.ibv_dealloc_pd(d.c); rc != 0 {
			return returned("ibv_dealloc_pd", rc, err)
		}
		d.x.release()
		return nil
	})
}

// Access is what a region or a window may be used for. All of them may be read by local work.
type Access uint32

// The flags of access.
const (
	LocalWrite   Access = C.IBV_ACCESS_LOCAL_WRITE  // a READ lands in it
	RemoteWrite  Access = C.IBV_ACCESS_REMOTE_WRITE // a peer's WRITE does; a region needs LocalWrite, too
	RemoteRead   Access = C.IBV_ACCESS_REMOTE_READ
	AllowWindows Access = C.IBV_ACCESS_MW_BIND // windows may be bound to it
)

// Region is memory that the device may use. Its methods may be called concurrently.
type Region struct {
	object
	d      *Domain
	c      *C.struct_ibv_mr
	memory []byte
	pinner runtime.Pinner
	addr   uint64
	lkey   uint32
	rkey   uint32
}

// Register makes memory known to the device: see "Memory" in the package's documentation for what it may be, and who keeps
// it. All its pages are locked in memory.
func (d *Domain) Register(memory []byte, access Access) (*Region, error) {
	if len(memory) == 0 {
		return nil, fmt.Errorf("verbs: no memory to register: %w", syscall.EINVAL)
	}
	if err := d.adopt(); err != nil {
		return nil, err
	}
	r := &Region{d: d, memory: memory}
	r.pinner.Pin(unsafe.SliceData(memory)) // nothing, if it is not of Go's heap
	c, err := C.larder_reg_mr(d.c, unsafe.Pointer(unsafe.SliceData(memory)), C.size_t(len(memory)), C.uint(access))
	if c == nil {
		r.pinner.Unpin()
		d.release()
		return nil, failedWith("ibv_reg_mr", err)
	}
	r.c, r.addr, r.lkey, r.rkey = c, uint64(uintptr(unsafe.Pointer(unsafe.SliceData(memory)))), uint32(c.lkey), uint32(c.rkey)
	return r, nil
}

// Bytes is the memory. It may be read and written as long as the program orders that with the device's work: by completions
// of its own work, and by messages of its peers for theirs.
func (r *Region) Bytes() []byte { return r.memory }

// Address is where the region begins, as peers name it.
func (r *Region) Address() uint64 { return r.addr }

// RKey is the key by which peers reach all of the region, if its access lets them.
func (r *Region) RKey() uint32 { return r.rkey }

// Close deregisters the memory. When it has returned no peer's work lands in it any more, nor any of this process. It fails
// while a window is bound to the region.
func (r *Region) Close() error {
	return r.close(func() error {
		if rc, err := C.ibv_dereg_mr(r.c); rc != 0 {
			return returned("ibv_dereg_mr", rc, err)
		}
		r.pinner.Unpin()
		r.d.release()
		return nil
	})
}

// Window is a memory window of type 2: a key for a part of a region, which is given and taken by work requests, see
// [List.AddBind], and not by system calls. It is for the queue pair by which it was bound: only that one's peer reaches it.
// Each binding has another key, so that one that a peer has kept is refused; of 256 bindings, two have the same. A window
// whose binding has failed must be closed. One goroutine at a time may bind it.
type Window struct {
	object
	d *Domain
	c *C.struct_ibv_mw
}

// NewWindow makes a window that is bound to nothing. Devices without Attributes.Windows2 refuse.
func (d *Domain) NewWindow() (*Window, error) {
	if err := d.adopt(); err != nil {
		return nil, err
	}
	c, err := C.larder_alloc_mw2(d.c)
	if c == nil {
		d.release()
		return nil, failedWith("ibv_alloc_mw", err)
	}
	return &Window{d: d, c: c}, nil
}

// Close frees the window. Its key is not valid any more, bound or not.
func (w *Window) Close() error {
	return w.close(func() error {
		if rc, err := C.larder_dealloc_mw(w.c); rc != 0 {
			return returned("ibv_dealloc_mw", rc, err)
		}
		w.d.release()
		return nil
	})
}
