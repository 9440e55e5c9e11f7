package transfer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// Directory is where engines find each other by name, instead of by address. Its methods are called concurrently.
type Directory interface {
	// Publish says how a name's segment is reached, in place of what was said before. The directory may forget it after
	// three times [Config.PublishEvery].
	Publish(ctx context.Context, name string, d Descriptor) error
	// Lookup finds a name's segment. The error wraps [ErrUnknown] if there is none.
	Lookup(ctx context.Context, name string) (Descriptor, error)
}

// ErrUnknown says that a directory has no segment of that name.
var ErrUnknown = errors.New("transfer: no segment of that name is published")

const (
	// publishTimeout is how long a directory may take.
	publishTimeout = 5 * time.Second
	// publishSoon is how long an engine waits for more changes before it publishes one.
	publishSoon = 20 * time.Millisecond
)

// OpenName opens the segment that has been published under a name.
func (e *Engine) OpenName(ctx context.Context, name string) (*Segment, error) {
	if e.cfg.Directory == nil {
		return nil, fmt.Errorf("transfer: open the segment %q: the engine has no directory", name)
	}
	d, err := e.cfg.Directory.Lookup(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("transfer: open the segment %q: %w", name, err)
	}
	return e.OpenDescriptor(d)
}

// changed has the engine publish itself soon.
func (e *Engine) changed() {
	select {
	case e.news <- struct{}{}:
	default:
	}
}

// publish tells the directory of this engine whenever its buffers have changed, and from time to time, until the engine is
// closed. What fails is tried again, later each time.
func (e *Engine) publish() {
	wait, failing := e.cfg.PublishEvery, false
	for {
		err := e.publishOnce()
		switch {
		case e.ctx.Err() != nil:
			return
		case err == nil:
			wait, failing = e.cfg.PublishEvery, false
		case !failing:
			e.cfg.Logger.Warn("transfer: publish the segment", slog.String("name", e.cfg.Name), slog.Any("error", err))
			wait, failing = retryEvery, true
		default:
			wait = min(2*wait, e.cfg.PublishEvery)
		}
		select {
		case <-e.news:
			if !failing { // more may come at once
				wait = publishSoon
			}
		case <-after(wait):
			continue
		case <-e.ctx.Done():
			return
		}
		select {
		case <-after(wait):
		case <-e.ctx.Done():
			return
		}
	}
}

func (e *Engine) publishOnce() error {
	ctx, cancel := context.WithTimeout(e.ctx, publishTimeout)
	defer cancel()
	err := e.cfg.Directory.Publish(ctx, e.cfg.Name, e.Describe())
	if err == nil {
		e.published.Add(1)
	} else {
		e.unpublished.Add(1)
	}
	return err
}
