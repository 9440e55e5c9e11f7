//go:build cgo

package main

// #include "larder.h"
import "C"

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"larder/client"
	"larder/transfer"
	"larder/transfer/verbs"
)

// engineConfig is what larder_engine_open takes, as JSON. Times are in seconds, and all have transfer.Config's defaults.
type engineConfig struct {
	Name         string   `json:"name"`
	Listen       []string `json:"listen"`
	Advertise    []string `json:"advertise"`
	From         []string `json:"source"`
	SliceSize    int      `json:"slice_size"`
	Connections  int      `json:"connections"`
	Timeout      float64  `json:"timeout"`
	StallTimeout float64  `json:"stall_timeout"`
	AbortTimeout float64  `json:"abort_timeout"`
	IdleTimeout  float64  `json:"idle_timeout"`
	Retries      int      `json:"retries"`
	ZeroCopy     string   `json:"zero_copy"`
	Checksums    bool     `json:"checksums"`
	Token        string   `json:"token"`
	Transports   []string `json:"transports"`
	NICs         []string `json:"nics"`    // as larder transfer's --nics
	Masters      []string `json:"masters"` // of a pool: segments have names there
	Tenant       string   `json:"tenant"`
}

// engine is a transfer engine and what it needs besides.
type engine struct {
	*transfer.Engine
	client *client.Client // of the masters; nil if there are none
	nics   func() error   // closes them
}

// buffer is registered memory.
type buffer struct {
	*transfer.Buffer
	file *os.File // that it is mapped from; nil if it is nobody's but this process's
}

var (
	engines  = table[*engine]{kind: "engine"}
	buffers  = table[*buffer]{kind: "buffer"}
	segments = table[*segment]{kind: "segment"}
	batches  = table[*transfer.Batch]{kind: "transfer"}
)

// segment is a peer's, and the engine that it was opened by.
type segment struct {
	*transfer.Segment
	engine *engine
}

// seconds is a time as callers have it.
func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// masterTimeout is how long the masters of a pool may take to answer when an engine is opened.
const masterTimeout = 10 * time.Second

// openEngine makes an engine as a caller configures it.
func openEngine(ctx context.Context, text []byte) (_ *engine, err error) {
	var c engineConfig
	if err := json.Unmarshal(text, &c); err != nil {
		return nil, invalid("the engine's configuration: %v", err)
	}
	nics, closeNICs, err := verbs.OpenNICs(c.NICs)
	if err != nil {
		return nil, invalid("%v", err)
	}
	cfg := transfer.Config{
		Name: c.Name, Listen: c.Listen, Advertise: c.Advertise, From: c.From, SliceSize: c.SliceSize, Connections: c.Connections,
		Timeout: seconds(c.Timeout), StallTimeout: seconds(c.StallTimeout), AbortTimeout: seconds(c.AbortTimeout),
		IdleTimeout: seconds(c.IdleTimeout), Retries: c.Retries, ZeroCopy: c.ZeroCopy, Checksums: c.Checksums, Token: c.Token,
		Transports: c.Transports, NICs: nics,
	}
	directory := client.NewDirectory()
	if len(c.Masters) > 0 {
		cfg.Directory = directory
	}
	e := &engine{nics: closeNICs}
	if e.Engine, err = transfer.New(cfg); err != nil {
		return nil, errors.Join(invalid("%v", err), closeNICs())
	}
	if len(c.Masters) == 0 {
		return e, nil
	}
	ctx, cancel := context.WithTimeout(ctx, masterTimeout)
	defer cancel()
	e.client, err = client.Open(ctx, client.Config{Addrs: c.Masters, Tenant: c.Tenant})
	if err != nil {
		return nil, errors.Join(err, e.close(ctx))
	}
	directory.Bind(e.client)
	return e, nil
}

// close ends an engine, whether ctx has ended or not. When it returns nil nobody uses memory of the process for it any more.
func (e *engine) close(ctx context.Context) error {
	err := e.Close()
	if e.client != nil {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), masterTimeout)
		defer cancel()
		_ = e.client.Close(ctx) // the name ends with the session otherwise
	}
	return errors.Join(err, e.nics())
}

// larder_engine_open begins to make an engine, as a job.
//
//export larder_engine_open
func larder_engine_open(config *C.char, n C.int64_t, started *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		text, err := input(config, n)
		if err != nil {
			return err
		}
		h, err := begin(0, closeEngine, func(ctx context.Context) (uint64, error) {
			engine, err := openEngine(ctx, text)
			if err != nil {
				return 0, err
			}
			h, err := engines.add(engine)
			if err != nil {
				return 0, errors.Join(err, engine.close(ctx))
			}
			return h, nil
		})
		*started = C.uint64_t(h)
		return err
	})
}

// closeEngine closes an engine that nobody has got to know.
func closeEngine(h uint64) {
	if e, err := engines.take(h); err == nil {
		_ = e.close(context.Background()) // nobody is there to hear of it
	}
}

// larder_engine_close begins to close an engine, as a job. When that has ended without an error nobody uses memory of the
// caller's for it any more.
//
//export larder_engine_close
func larder_engine_close(handle C.uint64_t, started *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		engine, err := engines.take(uint64(handle))
		if err != nil {
			return err
		}
		h, err := begin(0, nil, func(ctx context.Context) (uint64, error) { return 0, engine.close(ctx) })
		*started = C.uint64_t(h)
		return err
	})
}

// larder_engine_describe gives the engine's descriptor as JSON. If length comes out as more than capacity, nothing was copied.
//
//export larder_engine_describe
func larder_engine_describe(handle C.uint64_t, out *C.char, capacity C.int64_t, length *C.int64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		engine, err := engines.of(uint64(handle))
		if err != nil {
			return err
		}
		text, err := json.Marshal(engine.Describe())
		output(out, capacity, length, text)
		return err
	})
}

// bufferConfig is what larder_buffer_register takes, as JSON.
type bufferConfig struct {
	Name     string `json:"name"`
	ReadOnly bool   `json:"read_only"`
	Unlisted bool   `json:"unlisted"`
	Location string `json:"location"`
	File     *int   `json:"file"` // the descriptor that the memory is mapped from, shared; it stays the caller's
	Offset   int64  `json:"offset"`
}

// register registers memory, with a descriptor of its own for the file.
func (e *engine) register(mem []byte, c *bufferConfig) (*buffer, error) {
	o := transfer.BufferOptions{Name: c.Name, ReadOnly: c.ReadOnly, Unlisted: c.Unlisted, Location: c.Location, Offset: c.Offset}
	b := &buffer{}
	if c.File != nil {
		fd, err := unix.FcntlInt(uintptr(*c.File), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, invalid("register %q: file descriptor %d: %v", c.Name, *c.File, err)
		}
		b.file = os.NewFile(uintptr(fd), "larder-buffer")
		o.File = b.file
	}
	var err error
	if b.Buffer, err = e.Register(mem, o); err != nil {
		return nil, errors.Join(err, b.closeFile())
	}
	return b, nil
}

// closeFile closes the buffer's descriptor.
func (b *buffer) closeFile() error {
	if b.file == nil {
		return nil
	}
	return b.file.Close()
}

// larder_buffer_register registers memory of the caller's, which must stay where it is until larder_buffer_retire or the job of
// larder_engine_close has succeeded.
//
//export larder_buffer_register
func larder_buffer_register(
	handle C.uint64_t, address unsafe.Pointer, bytes C.uint64_t, config *C.char, n C.int64_t,
	registered *C.uint64_t, info *C.larder_handle, e *C.larder_error,
) C.int32_t {
	return guard(e, func() error {
		engine, err := engines.of(uint64(handle))
		if err != nil {
			return err
		}
		text, err := input(config, n)
		if err != nil {
			return err
		}
		var c bufferConfig
		if err := json.Unmarshal(text, &c); err != nil {
			return invalid("the buffer's options: %v", err)
		}
		b, err := engine.register(unsafe.Slice((*byte)(address), bytes), &c)
		if err != nil {
			return err
		}
		h, err := buffers.add(b)
		if err != nil {
			return errors.Join(err, b.Retire(context.Background()), b.closeFile())
		}
		*registered = C.uint64_t(h)
		info.id, info.generation = C.uint64_t(b.Info().ID), C.uint64_t(b.Info().Generation)
		return nil
	})
}

// larder_buffer_retire takes a buffer back: when it succeeds nobody uses its memory any more. It may have to be called again.
//
//export larder_buffer_retire
func larder_buffer_retire(handle C.uint64_t, limit C.int64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		b, err := buffers.of(uint64(handle))
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), min(time.Duration(limit), sliceMost))
		defer cancel()
		if err := b.Retire(ctx); errors.Is(err, context.DeadlineExceeded) {
			return errAgain
		} else if err != nil {
			return err
		}
		buffers.drop(uint64(handle))
		return b.closeFile()
	})
}

// larder_buffer_forget closes the handle of a buffer whose engine is closed.
//
//export larder_buffer_forget
func larder_buffer_forget(handle C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		b, err := buffers.take(uint64(handle))
		if err != nil {
			return err
		}
		return b.closeFile()
	})
}

// segmentConfig is how larder_segment_open finds a segment, as JSON: by one of addresses, name and descriptor.
type segmentConfig struct {
	Addresses  []string        `json:"addresses"`
	Name       string          `json:"name"`
	Descriptor json.RawMessage `json:"descriptor"`
	Timeout    float64         `json:"timeout"` // in seconds
}

// open finds a segment.
func (e *engine) open(ctx context.Context, c *segmentConfig) (*transfer.Segment, error) {
	switch {
	case len(c.Descriptor) > 0:
		d, err := transfer.ParseDescriptor(c.Descriptor)
		if err != nil {
			return nil, invalid("%v", err)
		}
		return e.OpenDescriptor(*d)
	case c.Name != "" && e.client == nil:
		return nil, invalid("open the segment %q: without masters segments have no names: give the engine some", c.Name)
	case c.Name != "":
		return e.OpenName(ctx, c.Name)
	}
	return e.Open(ctx, c.Addresses...)
}

// larder_segment_open begins to open a segment, as a job.
//
//export larder_segment_open
func larder_segment_open(handle C.uint64_t, config *C.char, n C.int64_t, started *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		engine, err := engines.of(uint64(handle))
		if err != nil {
			return err
		}
		text, err := input(config, n)
		if err != nil {
			return err
		}
		var c segmentConfig
		if err := json.Unmarshal(text, &c); err != nil {
			return invalid("how to open a segment: %v", err)
		}
		h, err := begin(seconds(c.Timeout), closeSegment, func(ctx context.Context) (uint64, error) {
			s, err := engine.open(ctx, &c)
			if err != nil {
				return 0, err
			}
			h, err := segments.add(&segment{s, engine})
			if err != nil {
				return 0, errors.Join(err, s.Close())
			}
			return h, nil
		})
		*started = C.uint64_t(h)
		return err
	})
}

// closeSegment closes a segment that nobody has got to know.
func closeSegment(h uint64) {
	if s, err := segments.take(h); err == nil {
		_ = s.Close() // it cannot fail
	}
}

// larder_segment_refresh begins to ask a segment's process again which buffers it has, as a job.
//
//export larder_segment_refresh
func larder_segment_refresh(handle C.uint64_t, timeout C.int64_t, started *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		s, err := segments.of(uint64(handle))
		if err != nil {
			return err
		}
		h, err := begin(time.Duration(timeout), nil, func(ctx context.Context) (uint64, error) { return 0, s.Refresh(ctx) })
		*started = C.uint64_t(h)
		return err
	})
}

// larder_segment_describe gives the segment's descriptor as larder_engine_describe does.
//
//export larder_segment_describe
func larder_segment_describe(handle C.uint64_t, out *C.char, capacity C.int64_t, length *C.int64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		s, err := segments.of(uint64(handle))
		if err != nil {
			return err
		}
		text, err := json.Marshal(s.Descriptor())
		output(out, capacity, length, text)
		return err
	})
}

// larder_segment_close begins to close a segment, as a job. When that has ended nothing lands in local memory any more.
//
//export larder_segment_close
func larder_segment_close(handle C.uint64_t, started *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		s, err := segments.take(uint64(handle))
		if err != nil {
			return err
		}
		h, err := begin(0, nil, func(context.Context) (uint64, error) { return 0, s.Close() })
		*started = C.uint64_t(h)
		return err
	})
}

// larder_notify begins to send a notification, as a job.
//
//export larder_notify
func larder_notify(
	handle C.uint64_t, name *C.char, nameLen C.int64_t, body *C.char, bodyLen, timeout C.int64_t,
	started *C.uint64_t, e *C.larder_error,
) C.int32_t {
	return guard(e, func() error {
		s, err := segments.of(uint64(handle))
		if err != nil {
			return err
		}
		about, err := input(name, nameLen)
		if err != nil {
			return err
		}
		text, err := input(body, bodyLen)
		if err != nil {
			return err
		}
		h, err := begin(time.Duration(timeout), nil, func(ctx context.Context) (uint64, error) {
			return 0, s.Notify(ctx, string(about), text)
		})
		*started = C.uint64_t(h)
		return err
	})
}

// notificationRoom is how many bytes a notification may have, of which all must fit: the sender's id, a name, a body.
const notificationRoom = 32 + 128 + transfer.MaxNotification

// larder_notified takes the next notification of an engine. out must have notificationRoom bytes.
//
//export larder_notified
func larder_notified(
	handle C.uint64_t, limit C.int64_t, out *C.char, capacity C.int64_t, lengths *C.larder_notification, e *C.larder_error,
) C.int32_t {
	return guard(e, func() error {
		engine, err := engines.of(uint64(handle))
		if err != nil {
			return err
		}
		if capacity < notificationRoom {
			return invalid("%d bytes of room for a notification: %d are needed", int64(capacity), notificationRoom)
		}
		n, err := engine.nextNotification(time.Duration(limit))
		if err != nil {
			return err
		}
		*lengths = C.larder_notification{
			engine: C.uint32_t(len(n.Engine)), name: C.uint32_t(len(n.Name)), body: C.uint32_t(len(n.Body)),
		}
		to := unsafe.Slice((*byte)(unsafe.Pointer(out)), notificationRoom)
		at := copy(to, n.Engine)
		at += copy(to[at:], n.Name)
		copy(to[at:], n.Body)
		return nil
	})
}

// nextNotification waits for one, for a slice of limit.
func (e *engine) nextNotification(limit time.Duration) (transfer.Notification, error) {
	over, stop := timer(min(limit, sliceMost))
	defer stop()
	select {
	case n, open := <-e.Notifications():
		if !open {
			return n, transfer.ErrClosed
		}
		return n, nil
	case <-over:
		return transfer.Notification{}, errAgain
	}
}

// Operations of larder_batch_submit.
const (
	opRead  = 1
	opWrite = 2
)

// maxBatch bounds the requests of a batch, as transfer does.
const maxBatch = 64 << 10

// larder_batch_submit begins to carry out requests with one segment: op is 1 to read from it, 2 to write to it. The memory that
// they name is used until larder_batch_wait says that the batch has ended; requests are read during the call only.
//
//export larder_batch_submit
func larder_batch_submit(
	handle C.uint64_t, op C.int32_t, list *C.larder_request, count, timeout C.int64_t, submitted *C.uint64_t, e *C.larder_error,
) C.int32_t {
	return guard(e, func() error {
		s, err := segments.of(uint64(handle))
		if err != nil {
			return err
		}
		if op != opRead && op != opWrite {
			return invalid("operation %d: 1 reads, 2 writes", int32(op))
		}
		if count < 0 || count > maxBatch {
			return invalid("%d requests in a batch, at most %d: split it", int64(count), maxBatch)
		}
		requests := make([]transfer.Request, count)
		for i, r := range unsafe.Slice(list, count) {
			requests[i] = transfer.Request{
				Op: transfer.Op(op), Segment: s.Segment, Offset: uint64(r.offset),
				Buffer: transfer.Handle{ID: uint32(r.id), Generation: uint64(r.generation)},
				Local:  unsafe.Slice((*byte)(r.address), r.length),
			}
		}
		b, err := s.engine.Submit(requests, time.Duration(timeout))
		if err != nil {
			return err
		}
		h, err := batches.add(b)
		if err != nil {
			b.Cancel()
			return errors.Join(err, b.Wait(context.Background()))
		}
		*submitted = C.uint64_t(h)
		return nil
	})
}

// larder_batch_wait waits until all requests have ended, and fails with what the first that failed has failed with. Anything but
// LARDER_AGAIN says that they have.
//
//export larder_batch_wait
func larder_batch_wait(handle C.uint64_t, limit C.int64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		b, err := batches.of(uint64(handle))
		if err != nil {
			return err
		}
		if err := await(b.Done(), time.Duration(limit)); err != nil {
			return err
		}
		return b.Wait(context.Background())
	})
}

// larder_batch_settled waits until, besides, nothing of a batch that has ended can land any more.
//
//export larder_batch_settled
func larder_batch_settled(handle C.uint64_t, limit C.int64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		b, err := batches.of(uint64(handle))
		if err != nil {
			return err
		}
		return await(b.Settled(), time.Duration(limit))
	})
}

// larder_batch_status tells how far each request has come, as transfer.State.
//
//export larder_batch_status
func larder_batch_status(handle C.uint64_t, states *C.uint8_t, count C.int64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		b, err := batches.of(uint64(handle))
		if err != nil {
			return err
		}
		if int(count) != b.Len() {
			return invalid("room for %d states: the batch has %d requests", int64(count), b.Len())
		}
		for i, to := 0, unsafe.Slice(states, count); i < len(to); i++ {
			state, _ := b.Status(i) // larder_batch_error tells why
			to[i] = C.uint8_t(state)
		}
		return nil
	})
}

// larder_batch_error returns what one request has failed with, 0 if it has not.
//
//export larder_batch_error
func larder_batch_error(handle C.uint64_t, i C.int64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		b, err := batches.of(uint64(handle))
		if err != nil {
			return err
		}
		if i < 0 || int(i) >= b.Len() {
			return invalid("request %d of %d", int64(i), b.Len())
		}
		if _, err := b.Status(int(i)); err != nil {
			return fmt.Errorf("request %d of %d: %w", int64(i), b.Len(), err)
		}
		return nil
	})
}

// larder_batch_cancel has a batch end soon.
//
//export larder_batch_cancel
func larder_batch_cancel(handle C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		b, err := batches.of(uint64(handle))
		if err != nil {
			return err
		}
		b.Cancel()
		return nil
	})
}

// larder_batch_free forgets a batch that has ended.
//
//export larder_batch_free
func larder_batch_free(handle C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		b, err := batches.of(uint64(handle))
		if err != nil {
			return err
		}
		if await(b.Done(), 0) != nil {
			return invalid("the transfer has not ended: cancel it, and wait for it")
		}
		_, err = batches.take(uint64(handle))
		return err
	})
}
