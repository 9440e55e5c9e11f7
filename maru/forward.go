package maru

import (
	"context"
	"time"

	"larder/zmtp"
)

// Flags of requests and replies between members' listeners. Maru gives those bits no meaning.
const (
	flagAgain     = 0x40 // of a request: it may have been carried out before
	flagElsewhere = 0x80 // of a reply: it was not carried out, another member leads
)

// link is a connection to the leader's listener, for one client: so its requests keep their order, and end with it.
type link struct {
	c    *zmtp.Conn
	addr string
}

func (c *conn) unlink() {
	if c.link != nil {
		_ = c.link.c.Close() // it returns nil
		c.link = nil
	}
}

// connect makes the link to the present leader, with linking held. It returns false if there is none, or it cannot be reached.
func (c *conn) connect(deadline time.Time) bool {
	addr := c.s.index.Leader()
	if c.link != nil && c.link.addr == addr {
		return true
	}
	c.unlink()
	left := deadline.Sub(now())
	if addr == "" || left <= 0 {
		return false
	}
	ctx, cancel := context.WithTimeout(c.ctx, left)
	defer cancel()
	zc, err := zmtp.Dial(ctx, "tcp://"+addr, zmtp.Config{
		Type: zmtp.ROUTER, Identity: c.client.Host + "/" + c.client.Identity, MaxMessage: 4 * MaxBody, MaxParts: maxParts,
	})
	if err != nil {
		return false
	}
	c.link = &link{zc, addr}
	return true
}

// forward passes what is open of the burst on to the leader, and its replies back.
func (c *conn) forward(deadline time.Time) {
	c.linking.Lock()
	defer c.linking.Unlock()
	if !c.connect(deadline) {
		return
	}
	l := c.link
	// The leader may be silent for as long as the requests may wait, and no longer.
	left := max(deadline.Sub(now()), leaderRetry)
	ctx, cancel := context.WithTimeout(c.ctx, left)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = l.c.Close() })()
	age := uint32(max(now().Sub(c.arrived).Milliseconds(), 0)) //nolint:gosec // Patience at most
	sent, err := 0, error(nil)
	for i := 0; i < c.n && err == nil; i++ {
		x := &c.slots[i]
		if x.state != open {
			continue
		}
		x.state = logged
		setAge(x.body, age)
		x.body[4] = x.h.Flags &^ (flagAgain | flagElsewhere)
		if x.again {
			x.body[4] |= flagAgain
		}
		err = l.c.Queue(nil, x.body)
		sent++
	}
	if err == nil {
		err = l.c.Flush()
	}
	c.s.Forwarded.Add(uint64(sent))
	for i := 0; i < c.n && err == nil; i++ {
		if x := &c.slots[i]; x.state == logged {
			err = c.passBack(x, l)
		}
	}
	if err != nil {
		c.unlink()
	}
	for i := range c.slots[:c.n] {
		if x := &c.slots[i]; x.state == logged { // sent, and not answered
			x.state, x.again = open, true
		}
	}
	c.inDoubt()
}

// passBack reads the leader's reply to a request.
func (c *conn) passBack(x *slot, l *link) error {
	parts, err := l.c.Read()
	if err != nil {
		return err
	}
	body := parts[len(parts)-1]
	if len(body) < headerSize {
		return errBody
	}
	if flags := body[4]; body[3] == replyBit && flags&flagElsewhere != 0 {
		x.state = open
		x.again = x.again || flags&flagAgain != 0
		return nil
	}
	x.reply = append(x.reply[:0], body...)
	x.reply[4] = x.h.Flags
	x.state = settled
	return nil
}
