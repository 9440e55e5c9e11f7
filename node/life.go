package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"larder/cxl"
	"larder/protocol"
	"larder/transfer"
)

// life is one life of a device. Its fields belong to the goroutine that leads it.
type life struct {
	d       *device
	s       session
	session uint64           // the number that the device was attached under
	read    *transfer.Buffer // the whole device; nil = it is not registered
	offset  uint64           // of read, in the device
	stop    func()           // ends the worker; nil = it does not run
}

// serve attaches the device, again whenever a leader does not know of it, and looks after it until ctx is over or the life
// has to end.
func (l *life) serve(ctx context.Context) error {
	d, attached := l.d, false
	for {
		if !attached {
			select {
			case <-d.news: // what is heard of from here on is news
			default:
			}
			err := l.attach(ctx)
			if errors.Is(err, errSessionEnded) || errors.Is(err, errRenewed) || errors.Is(err, ErrMedium) {
				return err
			}
			if attached = err == nil; !attached && ctx.Err() == nil {
				d.set(StateAttaching, err)
				d.log.Warn("the device is not attached yet", slog.Any("error", err))
			}
		}
		if attached && l.stop == nil {
			l.stop = l.startWorker(ctx)
		}
		ready, stop := d.n.cfg.clock.timer(lookEvery)
		select {
		case <-ctx.Done():
			stop()
			return ctx.Err() //nolint:wrapcheck // nobody hears it
		case err := <-d.medium.failed():
			stop()
			return fmt.Errorf("%w: %w", ErrMedium, err)
		case <-d.news:
			attached = false
		case <-ready:
		}
		stop()
		if err := d.medium.sound(); err != nil {
			return err
		}
	}
}

// startWorker lets tasks be done until the function that it returns is called.
func (l *life) startWorker(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	w := newWorker(l.d, l.s)
	go func() {
		defer close(ended)
		w.run(ctx)
	}()
	return func() {
		cancel()
		<-ended
	}
}

// attach tells the leader of the device until both agree on the generation that it shows and the leader knows how it is
// reached.
func (l *life) attach(ctx context.Context) error {
	if err := l.adopt(ctx); err != nil {
		return err
	}
	d := l.d
	for range attachRounds {
		req := d.medium.describe()
		req.Node = d.n.cfg.Host
		if d.n.cfg.NoMap {
			req.Path = ""
		}
		if d.exposes() && req.Generation == 0 {
			return errNotYet
		}
		d.mu.Lock()
		d.about = req
		ready := l.read != nil && req.Generation == d.shown
		d.mu.Unlock()
		if ready {
			req.Ready, req.Endpoint = true, d.endpoint(l.read, l.offset)
		}
		reply, err := l.s.attach(ctx, &req)
		if err != nil {
			return fmt.Errorf("node: attach: %w", err)
		}
		if ready && reply.Generation == req.Generation && reply.Device == d.number() {
			d.set(StateReady, nil)
			d.counts.attached.Add(1)
			d.log.Info("the device serves", slog.Uint64("id", reply.Device), slog.String("uuid", req.UUID),
				slog.String("tier", req.Tier), slog.Uint64("bytes", req.Size))
			return nil
		}
		if err := l.show(ctx, reply); err != nil {
			return err
		}
	}
	return errors.New("node: the leader named another generation each time: it is tried again")
}

// adopt takes note of the session that the device is attached under. What was granted under another one is taken back.
func (l *life) adopt(ctx context.Context) error {
	d := l.d
	d.mu.Lock()
	session := d.session
	d.mu.Unlock()
	if l.session != 0 && l.session != session {
		if !d.medium.keeps() {
			return errSessionEnded
		}
		ctx, cancel := context.WithTimeout(ctx, settleTime)
		defer cancel()
		if err := d.grants.retireAll(ctx); err != nil {
			return err
		}
	}
	l.session = session
	return nil
}

// show has the device show what the leader named, and registers it for reading.
func (l *life) show(ctx context.Context, reply *protocol.AttachReply) error {
	d := l.d
	d.mu.Lock()
	id, shown := d.id, d.shown
	d.mu.Unlock()
	if shown == 0 || shown != reply.Generation || id != reply.Device {
		if shown != 0 && !d.medium.keeps() {
			return errRenewed
		}
		if err := l.unregister(ctx); err != nil {
			return err
		}
		// What a device was told to forget may lie there again by the time that a later leader says the same.
		if err := d.medium.show(ctx, reply.Device, reply.Generation, reply.Fresh && shown == 0); err != nil {
			return err
		}
		d.mu.Lock()
		d.id, d.shown = reply.Device, reply.Generation
		d.mu.Unlock()
	}
	if l.read != nil {
		return nil
	}
	var err error
	l.read, l.offset, err = d.medium.register(d.n.engine, fmt.Sprintf("device %d", reply.Device))
	return err
}

// unregister has nobody reach the device by transfer any more.
func (l *life) unregister(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	if err := l.d.grants.retireAll(ctx); err != nil {
		return err
	}
	if l.read != nil {
		if err := l.read.Retire(ctx); err != nil {
			return err //nolint:wrapcheck // says which
		}
		l.read = nil
	}
	return nil
}

// window registers an extent for writing.
func (l *life) window(offset, length uint64) (buffer, protocol.Endpoint, error) {
	b, err := l.d.medium.window(l.d.n.engine, offset, length, "")
	if err != nil {
		return nil, protocol.Endpoint{}, err
	}
	return b, l.d.endpoint(b, offset), nil
}

// end says goodbye and gives the medium up. It has a time of its own, since the node's is over.
func (l *life) end(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	if l.stop != nil {
		l.stop()
	}
	bye, cancel := context.WithTimeout(ctx, byeTime)
	defer cancel()
	if l.s != nil {
		if err := l.s.close(bye); err != nil {
			l.d.log.Info("no goodbye was said: the masters find out by the session's deadline", slog.Any("error", err))
		}
	}
	settle, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	err := l.d.grants.close(settle)
	if err == nil && l.read != nil {
		err = l.read.Retire(settle)
	}
	if err != nil {
		l.d.counts.leaked.Add(1)
		l.d.log.Error("the device's memory stays mapped: a process of this host may be in the middle of a copy", slog.Any("error", err))
	}
	return l.d.medium.close(err != nil)
}

// number is the device's id, 0 before it is attached.
func (d *device) number() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.id
}

// endpoint says how a buffer is reached. A node that listens nowhere is not.
func (d *device) endpoint(b *transfer.Buffer, offset uint64) protocol.Endpoint {
	e := d.n.engine
	if len(d.n.cfg.Listen) == 0 {
		return protocol.Endpoint{}
	}
	info := b.Info()
	d.mu.Lock()
	defer d.mu.Unlock()
	return protocol.Endpoint{
		Engine: e.ID(), Host: cxl.BootName(), Rails: e.Addresses(), NICs: e.NICs(),
		Buffer: uint64(info.ID), BufferGeneration: info.Generation, Offset: offset, Storage: d.about.Tier == "ssd",
	}
}
