package cxl

import (
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// claimSettle is how long a claim on memory that several hosts reach is left to settle before it is read back. It is
// far above the time a store takes to reach the memory, so of two hosts that claim at once at most one still finds its
// own record.
const claimSettle = 100 * time.Millisecond

// Expect says what [Open] must find. Zero fields match anything.
type Expect struct {
	Pool     [16]byte
	Device   [16]byte
	DeviceID uint64

	Claim    bool // own the device: refuse if another server does
	Force    bool // with Claim: take over another host's claim; never one that a live process of this host holds
	ReadOnly bool // open and map for reading only
}

// Device is an open pool device. Its methods may be called concurrently; Close must come last.
type Device struct {
	path     string
	file     *os.File
	medium   medium
	readOnly bool
	coherent bool // of immutable fact: no cache maintenance is needed
	ownFD    bool // a memfd that this process made: others reach it through this process's descriptors
	head     span // the part of the header span in use
	live     *uint64

	mu       sync.Mutex // guards what follows
	header   Header
	slot     int // the slot that holds header
	claimed  bool
	lost     bool
	closed   bool
	mappings int
}

// Open opens a formatted device. Reasons to refuse match [ErrNoHeader], [ErrForeignHeader], [ErrCorruptHeader],
// [ErrHeaderVersion], [ErrTruncated], [ErrClaimed] or [ErrNotDevice].
func Open(path string, want Expect) (*Device, error) {
	if want.Claim && want.ReadOnly {
		return nil, fmt.Errorf("cxl: open %s: a claim needs writing: %w", path, ErrReadOnly)
	}
	f, m, err := openPath(path, want.ReadOnly)
	if err != nil {
		return nil, err
	}
	if want.Claim {
		err = lock(f, m)
	}
	var d *Device
	if err == nil {
		d, err = attach(f, m, want)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return d, nil
}

// openPath opens an existing path and finds out what it is.
func openPath(path string, readOnly bool) (*os.File, medium, error) {
	flags := os.O_RDWR
	if readOnly {
		flags = os.O_RDONLY
	}
	// O_NONBLOCK: opening a FIFO by mistake must not hang. It changes nothing for files and device-DAX.
	f, err := os.OpenFile(path, flags|unix.O_NONBLOCK, 0) //nolint:gosec // the path is the operator's to choose
	if err != nil {
		return nil, medium{}, fmt.Errorf("cxl: open: %w", err)
	}
	m, err := probe(f)
	if err != nil {
		return nil, medium{}, errors.Join(err, f.Close())
	}
	return f, m, nil
}

// lock takes the exclusive lock of an owner, or says who has it.
func lock(f *os.File, m medium) error {
	err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		held := &ClaimedError{
			Path: f.Name(), Reason: "another process of this host has it open as its owner",
			Hint: "stop that server first; force does not override it",
		}
		if info := inspect(f, m); info.Header != nil {
			held.Claim = info.Header.Claim
		}
		return held
	}
	if err != nil {
		return fmt.Errorf("cxl: lock %s: %w", f.Name(), err)
	}
	return nil
}

// attach makes a device of an open file whose lock, if wanted, is held.
func attach(f *os.File, m medium, want Expect) (*Device, error) {
	info := inspect(f, m)
	if info.HeaderErr != nil {
		return nil, fmt.Errorf("cxl: open %s: %w", f.Name(), info.HeaderErr)
	}
	h := *info.Header
	if err := want.matches(f.Name(), h); err != nil {
		return nil, err
	}
	if h.Coherence == CoherenceNone && !canControlCache {
		return nil, fmt.Errorf("cxl: open %s: %w", f.Name(), ErrNoCacheControl)
	}
	m.volatile = h.Volatile
	d := &Device{
		path: f.Name(), file: f, medium: m, readOnly: want.ReadOnly, coherent: h.Coherence == CoherenceHardware,
		header: h, slot: info.slot, lost: info.Lost,
	}
	var err error
	if d.head, err = mapSpan(f, m, 0, headerBytes, !want.ReadOnly); err != nil {
		return nil, err
	}
	d.live = uint64At(d.head.data, liveOffset)
	if want.Claim {
		if err := d.takeClaim(info, want.Force); err != nil {
			return nil, errors.Join(err, d.head.unmap())
		}
	}
	return d, nil
}

// matches compares a header with what was expected.
func (want Expect) matches(path string, h Header) error {
	var zero [16]byte
	switch {
	case want.Pool != zero && want.Pool != h.Pool:
		return foreign(path, h)
	case want.Device != zero && want.Device != h.Device:
		return &ForeignError{
			Path: path, Found: fmt.Sprintf("device %x of this pool", h.Device),
			Hint: fmt.Sprintf("device %x was expected: correct the configured path or uuid", want.Device),
		}
	case want.DeviceID != 0 && want.DeviceID != h.DeviceID:
		return &ForeignError{
			Path: path, Found: fmt.Sprintf("device number %d of this pool", h.DeviceID),
			Hint: fmt.Sprintf("number %d was expected: correct the configured path or number", want.DeviceID),
		}
	}
	return nil
}

// foreign refuses a device of another pool.
func foreign(path string, h Header) error {
	return &ForeignError{
		Path: path, Found: fmt.Sprintf("device %x of pool %x", h.Device, h.Pool),
		Hint: "it belongs to another pool: correct the path, or format it with force to take it, which loses its content",
	}
}

// takeClaim writes this process's claim into the header and repairs what a torn update left.
func (d *Device) takeClaim(info Info, force bool) error {
	state, old := info.Claim, d.header.Claim
	// Of two processes under one kernel only one can hold the lock on an inode, so the lock overrules the record,
	// except that device nodes of one device-DAX in several containers are several inodes.
	boot, err := BootID()
	if err != nil {
		return err
	}
	overruled := d.medium.kind != DeviceDAX && old.Boot == boot
	takeable := state == ClaimNone || state == ClaimDead || overruled || (force && state == ClaimUnknown)
	if !takeable {
		return refuse(d.path, state, old)
	}
	mine, err := ownClaim()
	if err != nil {
		return err
	}
	if err := d.update(func(h *Header) { h.Claim = mine }); err != nil {
		return err
	}
	d.claimed = true
	if d.medium.kind == DeviceDAX {
		time.Sleep(claimSettle) //nolint:forbidigo // waits for other hosts' stores, which no injected clock moves
		if err := d.verifyClaim(); err != nil {
			return &ClaimedError{
				Path: d.path, Claim: old, Reason: "another host claimed it at the same moment",
				Hint: "try again once its server has stopped",
			}
		}
	}
	if d.lost {
		return d.setLive(0, 0) // nobody may trust the bytes until the master has given a new generation
	}
	return d.setLive(d.header.Generation, d.header.Incarnation)
}

// refuse explains why a claim stands.
func refuse(path string, state ClaimState, c Claim) error {
	e := &ClaimedError{Path: path, Claim: c}
	if state == ClaimAlive {
		e.Reason, e.Hint = "that process is alive", "stop that server first"
		return e
	}
	e.Reason = fmt.Sprintf("it runs, or ran, on host %x or in another container, out of sight", c.Host)
	e.Hint = "make sure that it is stopped, then open with force"
	return e
}

// ownClaim is the claim of this process.
func ownClaim() (Claim, error) {
	boot, err := BootID()
	if err != nil {
		return Claim{}, err
	}
	start, _, err := ProcessStart(os.Getpid())
	if err != nil {
		return Claim{}, err
	}
	return Claim{
		Host: HostID(), Boot: boot, PIDNamespace: PIDNamespace(),
		PID:   uint32(os.Getpid()), //nolint:gosec // the kernel's limit is 2^22
		Start: start, Since: wallNanos(),
	}, nil
}

// update changes the header in both slots, the one that does not hold first, each made durable before the next.
func (d *Device) update(change func(*Header)) error {
	h := d.header
	change(&h)
	for range slotCount {
		h.sequence++
		slot := 1 - d.slot
		if err := d.writeSlot(slot, &h); err != nil {
			return fmt.Errorf("cxl: write header of %s: %w", d.path, err)
		}
		d.slot, d.header = slot, h
	}
	return nil
}

// writeSlot writes one slot and makes it durable.
func (d *Device) writeSlot(slot int, h *Header) error {
	e, err := h.AppendBinary(make([]byte, 0, HeaderSize))
	if err != nil {
		return err
	}
	return d.store(d.head.data[slot*slotStride:][:HeaderSize], e)
}

// store copies src into dst, a part of the head, and passes it through every barrier the device needs.
func (d *Device) store(dst, src []byte) error {
	if err := CopyIn(dst, src); err != nil {
		return err
	}
	return d.flush(dst)
}

// flush passes b, a part of the head, through every barrier the device needs.
func (d *Device) flush(b []byte) error {
	if !d.coherent {
		if err := Guard(func() { WriteBack(b) }); err != nil {
			return err
		}
	}
	return d.head.persist(d.medium, b)
}

// setLive publishes the generation to everyone who has the device mapped, through zero, so that nobody reads an old
// generation with a new incarnation.
func (d *Device) setLive(generation, incarnation uint64) error {
	line := d.head.data[liveOffset:][:liveBytes]
	err := Guard(func() {
		atomic.StoreUint64(d.live, 0)
		atomic.StoreUint64(uint64At(d.head.data, liveOffset+8), incarnation)
		atomic.StoreUint64(d.live, generation)
	})
	if err != nil {
		return fmt.Errorf("cxl: write generation of %s: %w", d.path, err)
	}
	return d.flush(line)
}

// uint64At is the word at an aligned offset of mapped memory.
func uint64At(b []byte, offset int) *uint64 { return (*uint64)(unsafe.Pointer(&b[offset])) } //nolint:gosec // the word lies inside mapped memory

// liveBytes is what the live line takes, in bytes.
const liveBytes = 64

// verifyClaim reads the header again and fails unless the claim in it is this process's.
func (d *Device) verifyClaim() error {
	if !d.claimed {
		return fmt.Errorf("cxl: %s: %w", d.path, ErrNotClaimed)
	}
	b := make([]byte, headerBytes)
	err := Guard(func() {
		if !d.coherent {
			Invalidate(d.head.data[:liveOffset])
		}
		copy(b, d.head.data)
	})
	if err != nil {
		return fmt.Errorf("cxl: read header of %s: %w", d.path, err)
	}
	s, err := decodeSlots(b)
	if err != nil {
		return fmt.Errorf("cxl: read header of %s: %w", d.path, err)
	}
	if !s.header.Claim.same(d.header.Claim) {
		return fmt.Errorf("cxl: %s was taken over by pid %d: %w", d.path, s.header.Claim.PID, ErrNotClaimed)
	}
	return nil
}

// VerifyClaim reads the header again and returns [ErrNotClaimed] unless this process still owns the device: another
// host may have taken it by force.
func (d *Device) VerifyClaim() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return fmt.Errorf("cxl: %s: %w", d.path, ErrClosed)
	}
	return d.verifyClaim()
}

// SetGeneration writes a new generation, chosen at random and committed by the master beforehand, and the pool's
// incarnation. When it returns the header is durable as far as the medium can, and every mapped reader sees the new
// generation; in between readers see zero. It needs the claim. A volatile device is bound to this boot by it.
func (d *Device) SetGeneration(generation, incarnation uint64) error {
	return d.renew(generation, incarnation, func(*Header) {})
}

// Assign gives a device its number in the pool, and a generation as SetGeneration does. It is for a device that was
// formatted before the pool knew of it.
func (d *Device) Assign(id, generation, incarnation uint64) error {
	return d.renew(generation, incarnation, func(h *Header) { h.DeviceID = id })
}

// renew writes a new generation, and what else change says.
func (d *Device) renew(generation, incarnation uint64, change func(*Header)) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.closed:
		return fmt.Errorf("cxl: %s: %w", d.path, ErrClosed)
	case generation == 0:
		return fmt.Errorf("cxl: %s: %w", d.path, errZeroGeneration)
	}
	if err := d.verifyClaim(); err != nil {
		return err
	}
	boot, err := bootFor(d.header.Volatile)
	if err != nil {
		return err
	}
	if err := d.setLive(0, 0); err != nil {
		return err
	}
	err = d.update(func(h *Header) {
		h.Generation, h.Incarnation, h.BootID = generation, incarnation, boot
		change(h)
	})
	if err != nil {
		return err
	}
	d.lost = false
	return d.setLive(generation, incarnation)
}

var errZeroGeneration = errors.New("generation zero means none: the master must draw another")

// bootFor is the boot id that a header must carry.
func bootFor(volatile bool) ([16]byte, error) {
	if !volatile {
		return [16]byte{}, nil
	}
	return BootID()
}

// Generation reads the device's current generation from shared memory: one atomic load, preceded by the drop of its
// cache line where hosts are not coherent. It is zero while the generation is being changed and when the header was
// truncated away; zero is never a generation. It does not allocate.
func (d *Device) Generation() (generation uint64) {
	var gone error
	defer caught(debugPanicOnFault(), &gone)
	if !d.coherent {
		invalidateLines(unsafe.Pointer(d.live), 1) //nolint:gosec // the word lies inside mapped memory
	}
	return atomic.LoadUint64(d.live)
}

// debugPanicOnFault makes memory faults of this goroutine panic; [caught] puts the returned setting back.
func debugPanicOnFault() bool { return debug.SetPanicOnFault(true) }

// Header is the header as this process read or last wrote it.
func (d *Device) Header() Header {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.header
}

// Lost reports whether the bytes may be gone: the device is volatile and was last given a generation under another
// boot. The owner asks the master for a new generation and calls SetGeneration.
func (d *Device) Lost() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lost
}

// Path is the path the device was opened by.
func (d *Device) Path() string { return d.path }

// Kind is what the device is made of.
func (d *Device) Kind() Kind { return d.medium.kind }

// Align is the granularity of mappings in bytes; regions need not keep to it.
func (d *Device) Align() int64 { return d.medium.align }

// SharePath is the path by which other processes of this host open the device. For a memfd that this process made it
// names this process and its descriptor, and works as long as both last.
func (d *Device) SharePath() string {
	if d.ownFD {
		return "/proc/" + strconv.Itoa(os.Getpid()) + "/fd/" + strconv.Itoa(int(d.file.Fd()))
	}
	return d.path
}

// Close gives up the claim and closes the device. It fails, and leaves the device open, while mappings are open.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return fmt.Errorf("cxl: %s: %w", d.path, ErrClosed)
	}
	if d.mappings > 0 {
		return fmt.Errorf("cxl: close %s: %d mappings are open: close them first", d.path, d.mappings)
	}
	d.closed = true
	var err error
	if d.claimed && d.verifyClaim() == nil { // else it is another's to clear
		err = d.update(func(h *Header) { h.Claim = Claim{} })
	}
	return errors.Join(err, d.head.unmap(), d.file.Close())
}
