package client

import (
	"context"
	"errors"
	"time"

	"larder/transfer"
)

// patience is how long a device has to begin with a transfer: of one that needs longer a call that cannot wait says that it
// is slow, and others are preferred.
const patience = 100 * time.Millisecond

// flight is a batch of transfers under way for one call.
type flight struct {
	batch *transfer.Batch
	err   error         // why there is none
	given time.Duration // how long it may take
	fair  time.Duration // how long it may take before the device is to blame
	short bool          // the call's time is over before that of the transfers
	over  bool          // so it was
}

// submit begins transfers of so many bytes, which are given up when ctx is over or they take too long.
func (c *Client) submit(ctx context.Context, reqs []transfer.Request, bytes uint64) (f flight) {
	if f.err = ctx.Err(); f.err != nil {
		f.err = errors.Join(transfer.ErrCanceled, f.err)
		return f
	}
	most := c.transferTime(bytes)
	f.given = max(timeLeft(ctx, most), 1)
	f.short, f.fair = f.given < most, most-c.cfg.CallTimeout+patience
	f.batch, f.err = c.devices.carrier.submit(reqs, f.given)
	return f
}

// half is a context of at most half of the time that a store with replicas has, if that is bounded, for a transfer of so many
// bytes: a replica that takes its time is no reason to have none left for the REGISTER.
func (c *Client) half(ctx context.Context, bytes uint64) (context.Context, context.CancelFunc) {
	if _, has := ctx.Deadline(); !has {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, timeLeft(ctx, 2*c.transferTime(bytes))/2)
}

// wait waits for the batch. When ctx is over it is canceled, and ends a moment later: nobody uses the callers' memory then.
func (f *flight) wait(ctx context.Context) {
	if f.batch == nil {
		return
	}
	select {
	case <-f.batch.Done():
		if f.short && f.expired() {
			<-ctx.Done() // any moment: so that the caller sees why
			f.over = true
		}
		return
	case <-ctx.Done():
	}
	f.over = errors.Is(ctx.Err(), context.DeadlineExceeded)
	f.batch.Cancel()
	<-f.batch.Done()
}

// expired reports whether a transfer was given up because the batch's time was over.
func (f *flight) expired() bool {
	for j := range f.batch.Len() {
		if _, err := f.batch.Status(j); errors.Is(err, transfer.ErrTimeout) {
			return true
		}
	}
	return false
}

// status tells how the j-th transfer ended. The error is ErrCanceled if the call's time was over: that says nothing of the
// way there, but see slow.
func (f *flight) status(j int) (transfer.State, error) {
	if f.batch == nil {
		return transfer.Failed, f.err
	}
	state, err := f.batch.Status(j)
	if f.over && errors.Is(err, transfer.ErrTimeout) {
		err = errors.Join(transfer.ErrCanceled, err)
	}
	return state, err
}

// slow reports whether the call's time was over although a transfer had as long as it may need.
func (f *flight) slow() bool { return f.over && f.given >= f.fair }
