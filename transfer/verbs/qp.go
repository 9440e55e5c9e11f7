//go:build rdma && cgo && linux

package verbs

// #include "shim.h"
import "C"

import (
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"time"
)

// QueuePair is one end of a reliable connection. Its methods may be called concurrently.
type QueuePair struct {
	object
	d     *Domain
	cq    *CompletionQueue
	c     *C.struct_ibv_qp
	o     Options
	port  Port
	gid   GID
	local Address
}

// Options are what a queue pair is made with. Zero values are the defaults.
type Options struct {
	// Port is the device's, from 1; the default is 1.
	Port int
	// GIDIndex chooses the local address by its index in the port's table plus 1; 0 has [Port.PickGID] choose.
	GIDIndex int
	// Depth is how many work requests may be outstanding. The default of 128 has 8 MiB under way in slices of 64 KiB,
	// more than 400 Gbit/s carry in 100 us.
	Depth int
	// SGE is how many local pieces a work request may have, by default 16, which every device known can do.
	SGE int
	// Access is what the peer may do at all, by default RemoteRead and RemoteWrite; regions and windows narrow it.
	Access Access
	// MTU is the largest packet in bytes, by default that of the port. The connection uses the smaller one of both ends'.
	MTU int
	// Timeout is after what time a packet that is not acknowledged is sent again: 4.096 us times a power of two, rounded up.
	// The default, 67 ms, is the one that is in use everywhere: a switch that pauses a port does so for less.
	Timeout time.Duration
	// Retries is how often, 1 to 7, by default 7: with the default Timeout a dead peer is noticed in half a second at best.
	// Devices may take up to four times as long.
	Retries int
	// ReadAtomic is how many READs are under way at once, from here and to here, by default 16, or as many as the device can
	// do. Devices queue the others.
	ReadAtomic int
	// TrafficClass and HopLimit go into the packets' IP header. A TrafficClass is what lossless networks tell queues by, the
	// default 0. HopLimit is 64 by default, as IP's is.
	TrafficClass uint8
	HopLimit     uint8
}

// Bounds and defaults of options.
const (
	defaultDepth      = 128
	defaultSGE        = 16
	defaultTimeout    = 67 * time.Millisecond
	defaultRetries    = 7
	defaultReadAtomic = 16
	defaultHopLimit   = 64
	maxRetries        = 7  // three bits of a packet
	maxTimeoutCode    = 31 // five bits; 4.096 us times two to that power is 2.4 hours
	timeoutUnit       = 4096 * time.Nanosecond
	// rnrTimer is how long a peer that has no receive buffer asks to wait, code 12 for 0.64 ms. One-sided work needs none,
	// but the field is not optional.
	rnrTimer = 12
	// rnrRetries of 7 means without end; as above.
	rnrRetries = 7
)

func (o *Options) withDefaults(a *Attributes) {
	o.Port = cmp.Or(o.Port, 1)
	o.Depth = cmp.Or(o.Depth, defaultDepth)
	o.SGE = cmp.Or(o.SGE, min(defaultSGE, a.MaxSGE))
	o.Access = cmp.Or(o.Access, RemoteRead|RemoteWrite)
	o.Timeout = cmp.Or(o.Timeout, defaultTimeout)
	o.Retries = cmp.Or(o.Retries, defaultRetries)
	o.ReadAtomic = min(cmp.Or(o.ReadAtomic, defaultReadAtomic), a.MaxReadAtomic, a.MaxReadServed, math.MaxUint8)
	o.HopLimit = cmp.Or(o.HopLimit, defaultHopLimit)
}

func (o *Options) check(a *Attributes) error {
	switch {
	case o.Retries < 0 || o.Retries > maxRetries:
		return fmt.Errorf("verbs: %d retries: 1 to %d", o.Retries, maxRetries)
	case o.Depth < 0 || o.Depth > a.MaxWR:
		return fmt.Errorf("verbs: a depth of %d work requests: the device has at most %d", o.Depth, a.MaxWR)
	case o.SGE < 0 || o.SGE > a.MaxSGE:
		return fmt.Errorf("verbs: %d pieces of a work request: the device has at most %d", o.SGE, a.MaxSGE)
	case o.Port < 0 || o.Port > a.Ports:
		return fmt.Errorf("verbs: there is no port %d: the device has %d", o.Port, a.Ports)
	case o.Timeout < 0 || o.ReadAtomic < 0 || o.GIDIndex < 0:
		return fmt.Errorf("verbs: a negative option: %+v", *o)
	}
	return nil
}

// timeoutCode is the smallest one that is not shorter than d.
func timeoutCode(d time.Duration) uint8 {
	code := uint8(1) // 0 is without end
	for code < maxTimeoutCode && timeoutUnit<<code < d {
		code++
	}
	return code
}

// Address is how a peer finds a queue pair. It is exchanged by other means, as JSON for one. A PSN is the number of the
// first packet, random so that packets of an earlier connection with the same numbers are not taken for this one's.
type Address struct {
	LID   uint16     `json:"lid"`
	GID   netip.Addr `json:"gid"`
	QPN   uint32     `json:"qpn"`
	PSN   uint32     `json:"psn"`
	MTU   int        `json:"mtu"`   // bytes
	Reads int        `json:"reads"` // READs that it serves at once: more would break the connection
}

// bits24 bounds packet and queue pair numbers.
const bits24 = 1<<24 - 1

// NewQueuePair makes a queue pair in the state INIT, whose completions come to cq.
func (d *Domain) NewQueuePair(cq *CompletionQueue, o Options) (*QueuePair, error) {
	o.withDefaults(&d.x.attr)
	if err := o.check(&d.x.attr); err != nil {
		return nil, err
	}
	q := &QueuePair{d: d, cq: cq, o: o}
	if err := q.locate(); err != nil {
		return nil, err
	}
	if err := d.adopt(); err != nil {
		return nil, err
	}
	if err := cq.adopt(); err != nil {
		d.release()
		return nil, err
	}
	err := q.make()
	if err != nil {
		cq.release()
		d.release()
		return nil, err
	}
	return q, nil
}

// locate finds out the local part of the address.
func (q *QueuePair) locate() (err error) {
	if q.port, err = q.d.x.Port(q.o.Port); err != nil {
		return err
	}
	found := false
	if q.o.GIDIndex == 0 {
		q.gid, found = q.port.PickGID()
	}
	for _, g := range q.port.GIDs {
		if g.Index == q.o.GIDIndex-1 {
			q.gid, found = g, true
		}
	}
	if !found && (q.port.Ethernet || q.o.GIDIndex != 0) {
		return fmt.Errorf("verbs: port %d of %s has no such GID: its network device is down, or has no address", q.o.Port, q.d.x.name)
	}
	if q.gid.Index > math.MaxUint8 {
		return fmt.Errorf("verbs: GID index %d of %s: verbs can use those up to 255", q.gid.Index, q.d.x.name)
	}
	mtu := q.port.MTU
	if q.o.MTU != 0 {
		mtu = min(mtu, q.o.MTU)
	}
	if _, err := mtuCode(mtu); err != nil {
		return err
	}
	var psn [4]byte
	_, _ = rand.Read(psn[:]) // it does not fail
	q.local = Address{
		LID: q.port.LID, GID: q.gid.Address, PSN: binary.NativeEndian.Uint32(psn[:]) & bits24, MTU: mtu, Reads: q.o.ReadAtomic,
	}
	return nil
}

func (q *QueuePair) make() error {
	init := &C.struct_ibv_qp_init_attr{send_cq: q.cq.c, recv_cq: q.cq.c, qp_type: C.IBV_QPT_RC}
	init.cap = C.struct_ibv_qp_cap{max_send_wr: C.uint32_t(q.o.Depth), max_recv_wr: 1, max_send_sge: C.uint32_t(q.o.SGE), max_recv_sge: 1}
	c, err := C.ibv_create_qp(q.d.c, init)
	if c == nil {
		return failedWith("ibv_create_qp", err)
	}
	q.c, q.local.QPN = c, uint32(c.qp_num)
	attr := C.struct_ibv_qp_attr{
		qp_state: C.IBV_QPS_INIT, port_num: C.uint8_t(q.o.Port), qp_access_flags: C.uint(q.o.Access),
	}
	err = q.modify("INIT", &attr, C.IBV_QP_STATE|C.IBV_QP_PKEY_INDEX|C.IBV_QP_PORT|C.IBV_QP_ACCESS_FLAGS)
	if err != nil {
		C.ibv_destroy_qp(c)
	}
	return err
}

func (q *QueuePair) modify(state string, attr *C.struct_ibv_qp_attr, mask C.int) error {
	if rc, err := C.ibv_modify_qp(q.c, attr, mask); rc != 0 {
		return returned("ibv_modify_qp to "+state, rc, err)
	}
	return nil
}

// Address is where the queue pair is found by the peer that is to be connected with it.
func (q *QueuePair) Address() Address { return q.local }

// QPN is the queue pair's number, which its completions and events name.
func (q *QueuePair) QPN() uint32 { return q.local.QPN }

// GID is the local address that is in use.
func (q *QueuePair) GID() GID { return q.gid }

// Connect connects a queue pair that is in the state INIT: by RTR, in which it answers, to RTS, in which it asks. The other
// end must have been connected before work that is posted here is tried for the last time. Nothing travels to the peer: an
// address that is wrong is noticed by the first work request.
func (q *QueuePair) Connect(peer Address) error {
	if peer.QPN == 0 || peer.QPN > bits24 || peer.PSN > bits24 || peer.Reads < 0 || peer.Reads > math.MaxUint8 {
		return fmt.Errorf("verbs: %+v is not the address of a queue pair", peer)
	}
	mtu, err := mtuCode(min(q.local.MTU, peer.MTU))
	if err != nil {
		return err
	}
	if q.port.Ethernet && !peer.GID.IsValid() {
		return fmt.Errorf("verbs: the address of queue pair %d has no GID, and the port is Ethernet", peer.QPN)
	}
	if err := q.enter(); err != nil {
		return err
	}
	defer q.leave()
	if err := q.readyToReceive(peer, mtu); err != nil {
		return err
	}
	attr := C.struct_ibv_qp_attr{
		qp_state: C.IBV_QPS_RTS, sq_psn: C.uint32_t(q.local.PSN), timeout: C.uint8_t(timeoutCode(q.o.Timeout)),
		retry_cnt: C.uint8_t(q.o.Retries), rnr_retry: rnrRetries, max_rd_atomic: C.uint8_t(min(q.o.ReadAtomic, peer.Reads)),
	}
	return q.modify("RTS", &attr, C.IBV_QP_STATE|C.IBV_QP_SQ_PSN|C.IBV_QP_TIMEOUT|C.IBV_QP_RETRY_CNT|C.IBV_QP_RNR_RETRY|
		C.IBV_QP_MAX_QP_RD_ATOMIC)
}

func (q *QueuePair) readyToReceive(peer Address, mtu uint32) error {
	attr := C.struct_ibv_qp_attr{
		qp_state: C.IBV_QPS_RTR, path_mtu: mtu, dest_qp_num: C.uint32_t(peer.QPN), rq_psn: C.uint32_t(peer.PSN),
		max_dest_rd_atomic: C.uint8_t(q.o.ReadAtomic), min_rnr_timer: rnrTimer,
	}
	attr.ah_attr = C.struct_ibv_ah_attr{dlid: C.uint16_t(peer.LID), port_num: C.uint8_t(q.o.Port)}
	if q.port.Ethernet {
		attr.ah_attr.is_global = 1
		attr.ah_attr.grh = C.struct_ibv_global_route{
			dgid: peer.GID.As16(), sgid_index: C.uint8_t(q.gid.Index), hop_limit: C.uint8_t(q.o.HopLimit),
			traffic_class: C.uint8_t(q.o.TrafficClass),
		}
	}
	return q.modify("RTR", &attr, C.IBV_QP_STATE|C.IBV_QP_AV|C.IBV_QP_PATH_MTU|C.IBV_QP_DEST_QPN|C.IBV_QP_RQ_PSN|
		C.IBV_QP_MAX_DEST_RD_ATOMIC|C.IBV_QP_MIN_RNR_TIMER)
}

// State is a queue pair's.
type State uint32

// The states that a queue pair can be seen in.
const (
	Reset          State = C.IBV_QPS_RESET
	Init           State = C.IBV_QPS_INIT
	ReadyToReceive State = C.IBV_QPS_RTR
	ReadyToSend    State = C.IBV_QPS_RTS
	Failed         State = C.IBV_QPS_ERR
)

// String implements fmt.Stringer.
func (s State) String() string {
	switch s {
	case Reset:
		return "RESET"
	case Init:
		return "INIT"
	case ReadyToReceive:
		return "RTR"
	case ReadyToSend:
		return "RTS"
	case Failed:
		return "ERR"
	}
	return fmt.Sprintf("state %d", uint32(s))
}

// State asks the device for the state. It is a system call.
func (q *QueuePair) State() (State, error) {
	if err := q.enter(); err != nil {
		return 0, err
	}
	defer q.leave()
	attr, init := new(C.struct_ibv_qp_attr), new(C.struct_ibv_qp_init_attr)
	if rc, err := C.ibv_query_qp(q.c, attr, C.IBV_QP_STATE, init); rc != 0 {
		return 0, returned("ibv_query_qp", rc, err)
	}
	return State(attr.qp_state), nil
}

// Fail puts the queue pair into the state ERR. All outstanding work is flushed: its completions come, with the status
// [Flushed] unless they had another outcome before. The peer's work is not carried out any more. There is no way back:
// close the queue pair when [List.AddMarker]'s completion has come.
func (q *QueuePair) Fail() error {
	if err := q.enter(); err != nil {
		return err
	}
	defer q.leave()
	attr := C.struct_ibv_qp_attr{qp_state: C.IBV_QPS_ERR}
	return q.modify("ERR", &attr, C.IBV_QP_STATE)
}

// Close destroys the queue pair. Nothing of it reads or writes memory here any more. Completions that have not been polled
// are lost.
func (q *QueuePair) Close() error {
	return q.close(func() error {
		if rc, err := C.ibv_destroy_qp(q.c); rc != 0 {
			return returned("ibv_destroy_qp", rc, err)
		}
		q.cq.release()
		q.d.release()
		return nil
	})
}
