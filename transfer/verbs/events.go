//go:build rdma && cgo && linux

package verbs

// #include "shim.h"
import "C"

import (
	"context"
	"fmt"
	"syscall"
)

// EventType is what has happened to a device.
type EventType uint32

// The events that matter to one-sided work. Others are printed as the library calls them.
const (
	CompletionsLost EventType = C.IBV_EVENT_CQ_ERR        // a completion queue overflowed: it and its queue pairs are lost
	QPFatal         EventType = C.IBV_EVENT_QP_FATAL      // a queue pair failed
	QPRequestError  EventType = C.IBV_EVENT_QP_REQ_ERR    // a peer's request was not valid: its queue pair here failed
	QPAccessError   EventType = C.IBV_EVENT_QP_ACCESS_ERR // a peer's request was not allowed: its queue pair here failed
	DeviceFatal     EventType = C.IBV_EVENT_DEVICE_FATAL  // nothing works any more: close all of it
	PortActive      EventType = C.IBV_EVENT_PORT_ACTIVE
	PortDown        EventType = C.IBV_EVENT_PORT_ERR
	LIDChange       EventType = C.IBV_EVENT_LID_CHANGE // peers must be told the new address
	GIDChange       EventType = C.IBV_EVENT_GID_CHANGE // peers must be told, if the GID in use has changed
)

// String implements fmt.Stringer.
func (t EventType) String() string { return C.GoString(C.ibv_event_type_str(uint32(t))) }

// Event is something that has happened to a device, and that no completion tells.
type Event struct {
	Type EventType
	Port int    // which, from 1, for events of ports
	QPN  uint32 // which, for events of queue pairs
}

// String implements fmt.Stringer.
func (e Event) String() string {
	switch {
	case e.Port != 0:
		return fmt.Sprintf("%s on port %d", e.Type, e.Port)
	case e.QPN != 0:
		return fmt.Sprintf("%s on queue pair %d", e.Type, e.QPN)
	}
	return e.Type.String()
}

// NextEvent waits for an event. It ends with ctx's error when ctx ends, and with [ErrClosed] when the device is closed. One
// goroutine at a time may call it.
func (x *Context) NextEvent(ctx context.Context) (Event, error) {
	var c C.struct_larder_event
	err := x.events.wait(ctx, func() error {
		if err := x.enter(); err != nil {
			return err
		}
		defer x.leave()
		switch rc := C.larder_take_async(x.c, &c); rc {
		case 0:
			return nil
		case C.EAGAIN:
			return syscall.EAGAIN
		default:
			return failed("ibv_get_async_event", syscall.Errno(rc))
		}
	})
	if err != nil {
		return Event{}, err
	}
	return Event{Type: EventType(c._type), Port: int(c.port), QPN: uint32(c.qpn)}, nil
}
