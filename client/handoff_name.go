package client

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// receivePrefix begins the names of Receivers: the instance and a hash of the key follow.
const receivePrefix = "receive/"

// errFound ends a watch.
var errFound = errors.New("found")

// receiveName is the name of the Receiver of an instance for a key, which may be longer than names can be.
func receiveName(instance string, key []byte) string {
	sum := sha256.Sum256(key)
	return receivePrefix + instance + "/" + hex.EncodeToString(sum[:16])
}

// Publish has senders find the Receiver by the client's instance name and the key: see [Client.SendTo]. It is withdrawn when all
// layers are there, when the sender gives up, and by Close; and found again under another session of the client. Of two
// Receivers of one key the one that was published last is found. All clients of the tenant can read the Ticket then, and so write
// to the memory if they have the engine's token.
func (r *Receiver) Publish(ctx context.Context) error {
	r.publishing.Lock()
	defer r.publishing.Unlock()
	if r.over() {
		return fail("publish receiver", r.ticket.Key, fmt.Errorf("%w: it is over", ErrConfig))
	}
	if r.published != nil {
		return nil
	}
	value, err := json.Marshal(r.ticket)
	if err == nil {
		r.published, err = r.c.KeepName(ctx, receiveName(r.ticket.Instance, r.ticket.Key), value)
	}
	if err != nil {
		return fail("publish receiver", r.ticket.Key, err)
	}
	if r.over() { // while the name was being set: nobody else withdraws it
		return r.drop(ctx)
	}
	return nil
}

// over reports whether nothing is to be sent there any more.
func (r *Receiver) over() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.aborted:
		return true
	default:
		return r.missing == 0 || r.closed
	}
}

// withdraw undoes Publish.
func (r *Receiver) withdraw(ctx context.Context) error {
	r.publishing.Lock()
	defer r.publishing.Unlock()
	return r.drop(ctx)
}

// drop is withdraw for a caller that holds publishing.
func (r *Receiver) drop(ctx context.Context) error {
	k := r.published
	if k == nil {
		return nil
	}
	if err := k.Drop(ctx); err != nil {
		return err
	}
	r.published = nil
	return nil
}

// withdrawSoon is withdraw for who must not wait.
func (r *Receiver) withdrawSoon() {
	r.c.spawn(func() { _ = r.withdraw(r.c.life) }) // it goes with the session otherwise
}

// SendTo begins to send the value of key to the memory that an instance has published for it, as Send does with a Ticket that came
// otherwise. It waits for that until ctx is over; without a deadline, for Config.Timeout. Both are clients of one tenant.
func (c *Client) SendTo(ctx context.Context, instance string, key []byte) (*Sender, error) {
	t, err := c.findTicket(ctx, instance, key)
	if err != nil {
		return nil, fail("send", key, err)
	}
	return c.Send(t)
}

// findTicket waits for the ticket of a Receiver.
func (c *Client) findTicket(ctx context.Context, instance string, key []byte) (t Ticket, err error) {
	if err := c.checkKey(key); err != nil {
		return t, err
	}
	if instance == "" || strings.ContainsRune(instance, 0) {
		return t, fmt.Errorf("%w: name the receiving instance", ErrConfig)
	}
	if _, has := ctx.Deadline(); !has {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.cfg.Timeout)
		defer cancel()
	}
	name := receiveName(instance, key)
	err = c.WatchNames(ctx, name, func(changes []NameChange) error {
		for i := len(changes) - 1; i >= 0; i-- {
			x := &changes[i]
			if x.Key != name || x.Deleted {
				continue
			}
			t = Ticket{}
			if err := json.Unmarshal(x.Value, &t); err != nil || t.Instance != instance || string(t.Key) != string(key) {
				return fmt.Errorf("%w: %q is not what a Receiver publishes", ErrConfig, name)
			}
			return errFound
		}
		return nil
	})
	if errors.Is(err, errFound) {
		err = nil
	}
	return t, err
}
