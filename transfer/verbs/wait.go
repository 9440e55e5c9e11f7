//go:build rdma && cgo && linux

package verbs

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"
)

// past is a deadline that has passed: it ends a wait.
var past = time.Unix(1, 0)

// wait calls take, first at once and then whenever the descriptor is readable, until take gives anything but EAGAIN.
// One goroutine at a time may wait. It ends with ctx's error when ctx ends.
func (c *channel) wait(ctx context.Context, take func() error) (err error) {
	if ctx.Done() != nil {
		ended := make(chan struct{})
		stop := context.AfterFunc(ctx, func() {
			defer close(ended)
			_ = c.file.SetReadDeadline(past) // fails when the channel is closed, which ends the wait, too
		})
		defer func() {
			if stop() {
				return
			}
			<-ended                                 // otherwise it could end the next wait
			_ = c.file.SetReadDeadline(time.Time{}) // as above
			if errors.Is(err, os.ErrDeadlineExceeded) {
				err = ctx.Err()
			}
		}()
	}
	var taken error
	err = c.raw.Read(func(uintptr) bool {
		taken = take()
		return !errors.Is(taken, syscall.EAGAIN)
	})
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return err
	case err != nil:
		return ErrClosed // a descriptor that is being closed gives an error which has no name
	}
	return taken
}
