package transfer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
)

// Storage is what a storage buffer lies on, an SSD's store or a file, as one range of bytes from 0 on. Its methods are
// called concurrently. p is aligned to 4096 bytes and is not kept; its length and off need not be whole blocks. ctx ends
// when the buffer is retired: what waits may end then, but a call must return only when nothing of it happens any more.
type Storage interface {
	// ReadAt fills p with the bytes at off. An error that wraps [ErrMissing] says that there are none.
	ReadAt(ctx context.Context, p []byte, off uint64) error
	// WriteAt returns when the storage has taken all of p: a later ReadAt gives it.
	WriteAt(ctx context.Context, p []byte, off uint64) error
}

// storageBit is set in the ids of storage buffers: who has only a handle knows which ways lead there.
const storageBit = 1 << 31

// OnStorage reports whether a handle names a buffer on storage.
func (h Handle) OnStorage() bool { return h.ID&storageBit != 0 }

// RegisterStorage makes bytes of a storage reachable for others, as a buffer that has no memory: the engine reads into
// staging memory of its own and sends that, or receives there and then writes. A WRITE is confirmed when the storage has
// taken it. The storage must stay open until [Buffer.Retire] has returned, which waits for calls that are under way. Its
// errors come as [ErrMissing] or [ErrStorage].
func (e *Engine) RegisterStorage(st Storage, bytes uint64, o BufferOptions) (*Buffer, error) {
	switch {
	case st == nil || bytes == 0 || bytes > math.MaxInt64:
		return nil, fmt.Errorf("transfer: register %q: storage of %d bytes: from 1 to 2^63-1", o.Name, bytes)
	case o.File != nil:
		return nil, fmt.Errorf("transfer: register %q: storage is not mapped, it takes no File", o.Name)
	}
	b := &Buffer{storage: st}
	b.ctx, b.cancel = context.WithCancel(context.Background())
	b.info.Bytes = bytes
	if err := e.add(b, o); err != nil {
		b.cancel()
		return nil, err
	}
	return b, nil
}

// storageJob is one request for storage that is under way.
type storageJob struct {
	b    *Buffer
	op   Op
	off  uint64
	mem  []byte // staging memory
	err  error  // when done is closed
	done chan struct{}
}

// interrupt implements interrupter: the buffer's context ends what waits.
func (*storageJob) interrupt() {}

// store hands a request to the storage of a buffer, beside others. The job's done is closed when nothing of it can happen
// any more. If there is an error nothing has been begun.
func (e *Engine) store(op Op, h Handle, off uint64, mem []byte) (*storageJob, error) {
	j := &storageJob{op: op, off: off, mem: mem, done: make(chan struct{})}
	var err error
	if j.b, _, err = e.hold(op, h, off, uint64(len(mem)), j); err != nil {
		return nil, err
	}
	go j.run()
	return j, nil
}

func (j *storageJob) run() {
	b := j.b
	if j.op == Read {
		j.err = b.storage.ReadAt(b.ctx, j.mem, j.off)
	} else {
		j.err = b.storage.WriteAt(b.ctx, j.mem, j.off)
	}
	j.err = b.judge(j.op, j.off, j.err)
	b.release(j)
	close(j.done)
}

// judge says what a storage's error means to whoever asked. One that fails all the time is logged once.
func (b *Buffer) judge(op Op, off uint64, err error) error {
	switch {
	case err == nil:
		b.failing.Store(false)
		return nil
	case b.ctx.Err() != nil:
		return ErrStale
	case errors.Is(err, ErrMissing):
		return err
	}
	if b.failing.CompareAndSwap(false, true) {
		b.e.cfg.Logger.Warn("transfer: storage fails", slog.String("buffer", b.info.Name), slog.String("op", op.String()),
			slog.Uint64("offset", off), slog.Any("error", err))
	}
	return fmt.Errorf("%w: %w", ErrStorage, err)
}

// retireStorage retires the storage buffers of an engine that is being closed.
func (e *Engine) retireStorage(stop <-chan struct{}) (err error) {
	for b := range e.buffers.all {
		if b.storage == nil {
			continue
		}
		b.fence()
		select {
		case <-b.idle:
		case <-stop:
			err = fmt.Errorf("transfer: close: the storage of buffer %q is in the middle of a call: %w", b.info.Name, ErrUnsettled)
		}
	}
	return err
}
