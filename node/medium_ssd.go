package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"

	"larder/cxl"
	"larder/protocol"
	"larder/tiering/ssd"
	"larder/transfer"
)

// SSD is a store on a disk.
type SSD struct {
	Dir  string
	Size uint64 // bytes of the device; 0 = what the store has

	Compression ssd.Compression
	CompactRate int64 // bytes a second that compaction writes while no write waits for it; 0 = the store's default
}

// options are those that are no part of the store itself.
func (d *ssdMedium) options() ssd.Options {
	return ssd.Options{Size: d.cfg.Size, Compression: d.cfg.Compression, CompactRate: d.cfg.CompactRate, Logger: d.logger}
}

// ssdMedium is an SSD store. Nobody maps it: all access is by transfer, and so can be fenced.
type ssdMedium struct {
	cfg    SSD
	logger *slog.Logger
	store  *ssd.Store
	seen   atomic.Pointer[ssd.Store] // the same, for statistics and discards, which come from other goroutines
	uuid   [16]byte
	broken chan error // 1: why the store stopped
}

func newSSD(cfg SSD, logger *slog.Logger) *ssdMedium {
	return &ssdMedium{cfg: cfg, logger: logger, broken: make(chan error, 1)}
}

func (d *ssdMedium) open() ([16]byte, error) {
	store, err := ssd.Open(d.cfg.Dir, d.options())
	switch {
	case errors.Is(err, ssd.ErrNoStore), errors.Is(err, os.ErrNotExist):
		if d.cfg.Size == 0 {
			return d.uuid, fmt.Errorf("%w: ssd %s: there is no store yet: say how large one to make", ErrMedium, d.cfg.Dir)
		}
		d.uuid = newUUID()
		return d.uuid, nil
	case errors.Is(err, ssd.ErrLocked):
		return d.uuid, fmt.Errorf("%w: ssd %s: another process serves it: stop that, or name another directory: %w",
			ErrMedium, d.cfg.Dir, err)
	case errors.Is(err, ssd.ErrMismatch):
		return d.uuid, fmt.Errorf("%w: ssd %s: leave the size out to have what is there, or remove the store: %w",
			ErrMedium, d.cfg.Dir, err)
	case err != nil:
		return d.uuid, fmt.Errorf("%w: ssd %s: %w", ErrMedium, d.cfg.Dir, err)
	}
	d.store = store
	d.seen.Store(store)
	d.uuid, _ = store.Identity()
	return d.uuid, nil
}

func (d *ssdMedium) prepare(pool [16]byte, _ uint64) (err error) {
	if d.store == nil {
		// Large enough to be seen in a log: all of its disk space is taken now.
		d.logger.Info("making an SSD store", slog.String("dir", d.cfg.Dir), slog.Uint64("bytes", d.cfg.Size))
		o := d.options()
		o.Create, o.UUID, o.Pool, o.SegmentBytes = true, d.uuid, pool, segmentBytes(d.cfg.Size)
		if d.store, err = ssd.Open(d.cfg.Dir, o); err != nil {
			return fmt.Errorf("%w: ssd %s: %w", ErrMedium, d.cfg.Dir, err)
		}
		d.seen.Store(d.store)
		return nil
	}
	if _, has := d.store.Identity(); has != pool {
		return fmt.Errorf("%w: ssd %s: its store is of pool %x, not %x: point masters at that pool, or remove the store",
			ErrMedium, d.cfg.Dir, has, pool)
	}
	return nil
}

// segmentBytes gives small stores enough segments for compaction to choose from; 0 leaves it to the store.
func segmentBytes(size uint64) int64 {
	const most, least, wanted = 64 << 20, 1 << 20, 64
	if size >= most*wanted {
		return 0
	}
	segment := uint64(most)
	for segment > least && segment*wanted > size {
		segment /= 2
	}
	return int64(segment)
}

// describe implements medium. What would be a header elsewhere is left out here, too, so that offsets mean the same.
func (d *ssdMedium) describe() protocol.AttachRequest {
	return protocol.AttachRequest{
		UUID: hexID(d.uuid), Tier: "ssd", Coherence: cxl.CoherenceHardware.String(), Size: d.store.Size(),
		DataOffset: cxl.HeaderSpan, Align: regionAlign, Generation: d.store.Generation(), BootID: cxl.BootName(),
	}
}

// show drops the content if it is another generation's, or known to nobody: compaction would carry it on for ever.
func (d *ssdMedium) show(ctx context.Context, _, generation uint64, fresh bool) error {
	if d.store.Generation() == generation && (!fresh || d.store.Stats().Extents == 0) {
		return nil
	}
	return d.note(d.store.SetGeneration(ctx, generation))
}

func (d *ssdMedium) register(e *transfer.Engine, name string) (*transfer.Buffer, uint64, error) {
	b, err := e.RegisterStorage(storage{d, d.store, 0}, d.store.Size(), transfer.BufferOptions{Name: name, ReadOnly: true})
	return b, 0, err //nolint:wrapcheck // says what to do
}

func (d *ssdMedium) window(e *transfer.Engine, offset, length uint64, name string) (*transfer.Buffer, error) {
	if size := d.store.Size(); offset > size || length == 0 || length > size-offset {
		return nil, fmt.Errorf("node: %d bytes at %d are not within the device's %d", length, offset, size)
	}
	return e.RegisterStorage(storage{d, d.store, offset}, length, transfer.BufferOptions{Name: name, Unlisted: true}) //nolint:wrapcheck // as above
}

func (*ssdMedium) keeps() bool { return true }

func (*ssdMedium) sound() error { return nil }

func (d *ssdMedium) failed() <-chan error { return d.broken }

// stats implements storeStats.
func (d *ssdMedium) stats() *ssd.Stats {
	if store := d.seen.Load(); store != nil {
		s := store.Stats()
		return &s
	}
	return nil
}

// discard implements discarder. The store stays open as long as a grant is held.
func (d *ssdMedium) discard(ctx context.Context, extents []ssd.Extent) error {
	return d.note(d.seen.Load().Discard(ctx, extents...))
}

// note tells of a store that has stopped.
func (d *ssdMedium) note(err error) error {
	if errors.Is(err, ssd.ErrFailed) {
		select {
		case d.broken <- err:
		default: // told before
		}
	}
	return err
}

func (d *ssdMedium) close(leak bool) error {
	if d.store == nil || leak {
		d.store = nil
		return nil
	}
	err := d.store.Close()
	d.store = nil
	if err != nil {
		return fmt.Errorf("node: ssd %s: close: %w", d.cfg.Dir, err)
	}
	return nil
}

// storage is a part of a store, from an offset on.
type storage struct {
	d     *ssdMedium
	store *ssd.Store
	from  uint64
}

// ReadAt implements transfer.Storage. What is not there, or rotten, is a miss.
func (s storage) ReadAt(ctx context.Context, p []byte, off uint64) error {
	err := s.store.Read(ctx, s.from+off, p)
	if errors.Is(err, ssd.ErrNotFound) || errors.Is(err, ssd.ErrDamaged) {
		return fmt.Errorf("%w: %w", transfer.ErrMissing, err)
	}
	return s.d.note(err)
}

// WriteAt implements transfer.Storage.
func (s storage) WriteAt(ctx context.Context, p []byte, off uint64) error {
	return s.d.note(s.store.Write(ctx, s.from+off, p))
}
