package node

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"

	"larder/cxl"
	"larder/protocol"
	"larder/tiering/ssd"
	"larder/transfer"
)

// regionAlign is what regions are aligned to, so that clients can map them with huge pages.
const regionAlign = 64 << 10

// medium is what a device is made of. A life of it is open, prepare, show, then register and window in any number, close.
// register, window, sound and failed may be called concurrently, the others not.
type medium interface {
	// open takes the medium for this process, and says which device it is.
	open() (uuid [16]byte, err error)
	// prepare makes what is not there yet, as a part of a pool, and refuses what is another pool's.
	prepare(pool [16]byte, incarnation uint64) error
	// describe says of the device what ATTACH does, but for its node and how it is reached.
	describe() protocol.AttachRequest
	// show has the device show its number and generation. With fresh nothing of its content is known to the index.
	show(ctx context.Context, id, generation uint64, fresh bool) error
	// register lets peers read all of the device. The buffer begins at offset.
	register(e *transfer.Engine, name string) (b *transfer.Buffer, offset uint64, err error)
	// window lets a peer write to an extent.
	window(e *transfer.Engine, offset, length uint64, name string) (*transfer.Buffer, error)
	// keeps says whether the bytes outlive the session: another one may go on with the same device.
	keeps() bool
	// sound returns an error if the device is not any more what was attached: it is given up then, and begun with anew.
	sound() error
	// failed is sent to once, when the storage has failed for good.
	failed() <-chan error
	// close gives the medium up. With leak its memory stays mapped: somebody may still write to it.
	close(leak bool) error
}

// discarder is a medium on which it costs something that bytes are kept which nobody wants.
type discarder interface {
	// discard forgets extents of the device. Nothing of it happens after it has returned.
	discard(ctx context.Context, extents []ssd.Extent) error
}

// Reasons why a device cannot be used. Compare with errors.Is.
var (
	// ErrMedium says that what a device is to be made of is not to be had. The node cannot start with it.
	ErrMedium = errors.New("node: the device cannot be used")
	// errPool says that a device belongs to another pool.
	errPool = errors.New("it belongs to another pool: point masters at that one, or name another place; with force it is taken, " +
		"and its content lost")
)

// newUUID draws a device's uuid.
func newUUID() (id [16]byte) {
	_, _ = rand.Read(id[:]) // never fails: see crypto/rand
	return id
}

// random draws a number that is not 0.
func random() uint64 {
	id := newUUID()
	n := uint64(1)
	for _, b := range id[:8] {
		n = n<<8 | uint64(b)
	}
	return max(n, 1)
}

func hexID(id [16]byte) string { return hex.EncodeToString(id[:]) }

// mapped is a device that processes of this host can map: the common part of dram, cxl and those that are exposed.
type mapped struct {
	dev *cxl.Device
	m   *cxl.Mapping
}

// mapAll maps all data of the device. numa is the NUMA node that its pages come from, plus 1; 0 = any.
func (d *mapped) mapAll(prefault bool, numa int) (err error) {
	size := int64(d.dev.Header().Size) - cxl.HeaderSpan //nolint:gosec // checked by cxl
	d.m, err = d.dev.Map(cxl.HeaderSpan, size, cxl.MapOptions{HugePages: true, Populate: prefault, NUMA: numa})
	return err //nolint:wrapcheck // says which and what to do
}

// describe implements medium, but for the tier.
func (d *mapped) describe() protocol.AttachRequest {
	h := d.dev.Header()
	req := protocol.AttachRequest{
		UUID: hexID(h.Device), Path: d.dev.SharePath(), Coherence: h.Coherence.String(), Size: h.Size,
		DataOffset: cxl.HeaderSpan, Align: regionAlign, Volatile: h.Volatile, Generation: h.Generation, BootID: cxl.BootName(),
	}
	if d.dev.Lost() {
		req.Generation = 0
	}
	return req
}

// plain reports whether stores to the mapping are all that is needed: others see them, and nothing has to be made durable.
func (d *mapped) plain() bool {
	h := d.dev.Header()
	return h.Volatile && h.Coherence == cxl.CoherenceHardware
}

func (d *mapped) register(e *transfer.Engine, name string) (*transfer.Buffer, uint64, error) {
	h := d.dev.Header()
	b, err := d.buffer(e, 0, h.Size-cxl.HeaderSpan, transfer.BufferOptions{Name: name, ReadOnly: true})
	return b, cxl.HeaderSpan, err
}

func (d *mapped) window(e *transfer.Engine, offset, length uint64, name string) (*transfer.Buffer, error) {
	size := d.dev.Header().Size
	if offset < cxl.HeaderSpan || offset > size || length == 0 || length > size-offset {
		return nil, fmt.Errorf("node: %d bytes at %d are not within the device's %d", length, offset, size)
	}
	return d.buffer(e, offset-cxl.HeaderSpan, length, transfer.BufferOptions{Name: name, Unlisted: true})
}

// buffer registers a part of the mapping. Memory that needs barriers is registered as a storage, whose accesses have them.
func (d *mapped) buffer(e *transfer.Engine, from, length uint64, o transfer.BufferOptions) (*transfer.Buffer, error) {
	if part := d.m.Bytes()[from : from+length : from+length]; d.plain() {
		return e.Register(part, o) //nolint:wrapcheck // says what to do
	}
	return e.RegisterStorage(barriers{d.m, from}, length, o) //nolint:wrapcheck // the same
}

// sound implements medium.
func (d *mapped) sound() error { return d.dev.VerifyClaim() } //nolint:wrapcheck // says which and why

// failed implements medium: memory that is gone is found out access by access.
func (*mapped) failed() <-chan error { return nil }

// close implements medium.
func (d *mapped) close(leak bool) error {
	if d.dev == nil || leak {
		d.dev, d.m = nil, nil
		return nil
	}
	var err error
	if d.m != nil {
		err = d.m.Close()
	}
	err = errors.Join(err, d.dev.Close())
	d.dev, d.m = nil, nil
	return err
}

// barriers is memory whose stores other hosts do not see by themselves, or that has to be made durable.
type barriers struct {
	m    *cxl.Mapping
	from uint64
}

// ReadAt implements transfer.Storage.
func (s barriers) ReadAt(_ context.Context, p []byte, off uint64) error {
	src := s.m.Bytes()[s.from+off:][:len(p)]
	if err := s.m.Refresh(src); err != nil {
		return err //nolint:wrapcheck // the engine wraps
	}
	return cxl.CopyOut(p, src) //nolint:wrapcheck // the engine wraps
}

// WriteAt implements transfer.Storage.
func (s barriers) WriteAt(_ context.Context, p []byte, off uint64) error {
	dst := s.m.Bytes()[s.from+off:][:len(p)]
	if err := cxl.CopyIn(dst, p); err != nil {
		return err //nolint:wrapcheck // the engine wraps
	}
	if err := s.m.Publish(dst); err != nil {
		return err //nolint:wrapcheck // the engine wraps
	}
	return s.m.Persist(dst) //nolint:wrapcheck // the engine wraps
}

// dram is memory of this process. Each life of it has new memory, and is a new device: clients that have mapped the old one
// may still write to it.
type dram struct {
	mapped
	size     uint64
	prefault bool
	numa     memoryNode
	log      *slog.Logger
	uuid     [16]byte
}

func (d *dram) open() ([16]byte, error) {
	d.uuid = newUUID()
	return d.uuid, nil
}

func (d *dram) prepare(pool [16]byte, incarnation uint64) (err error) {
	d.dev, err = cxl.Create(cxl.MemFDPrefix+"larder-node", cxl.Options{
		Pool: pool, Device: d.uuid, Generation: random(), Incarnation: incarnation, Size: int64(d.size), //nolint:gosec // checked by Config
		Coherence: cxl.CoherenceHardware,
	})
	if err != nil {
		return err //nolint:wrapcheck // says what to do
	}
	err = d.mapAll(d.prefault, d.numa.bind())
	switch {
	case err == nil || d.numa.bind() == 0:
	case d.numa.asked:
		return fmt.Errorf("%w: %w; containers need CAP_SYS_NICE for that", ErrMedium, err)
	default:
		d.log.Warn("the memory is on no NUMA node in particular", slog.Any("error", err))
		d.numa = memoryNode{}
		err = d.mapAll(d.prefault, 0)
	}
	return err
}

func (d *dram) describe() protocol.AttachRequest {
	req := d.mapped.describe()
	req.Tier, req.NUMA = "dram", d.numa.plus1
	if d.dev.Header().DeviceID == 0 {
		req.Generation = 0 // the one that it was made with is nobody's
	}
	return req
}

func (d *dram) show(_ context.Context, id, generation uint64, _ bool) error {
	return d.dev.Assign(id, generation, d.dev.Header().Incarnation) //nolint:wrapcheck // says what to do
}

func (*dram) keeps() bool { return false }
