package link

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"

	"larder/pg/shm"
)

const (
	// sendTimeout is how long a peer may leave its control connection unread when the socket's buffer is full: it is as good as dead
	// then, for it does not hear that others are.
	sendTimeout = greetTimeout
	// maxQuestions bounds the questions of a peer that wait for an answer.
	maxQuestions = 16
	// maxEarly bounds the meshes that a peer may offer before they are asked for here.
	maxEarly = 64
)

// control is the connection to another process, kept for as long as both live. Its end is how its death is known.
type control struct {
	n      *Node
	conn   net.Conn
	r      *frameReader
	who    identity
	dialed bool    // by this process
	at     address // of the peer, if dialed
	bell   *shm.Bell
	before *control // the one that this has replaced

	sending sync.Mutex

	questions chan question
	asking    sync.Mutex
	asks      map[uint64]chan reply // nil when over
	lastAsk   uint64

	early map[scope]*partyMessage // under the node's lock

	up   chan struct{} // closed when Up has been called
	over chan struct{} // closed when the connection has ended; err says why
	done chan struct{} // closed when Down has been called
	once sync.Once
	err  error
}

type question struct {
	id   uint64
	text []byte
}

type reply struct {
	text []byte
	err  error
}

func (n *Node) newControl(r *frameReader, who identity) *control {
	r.most = maxBody
	return &control{
		n: n, conn: r.conn, r: r, who: who, questions: make(chan question, maxQuestions), asks: map[uint64]chan reply{},
		early: map[scope]*partyMessage{}, up: make(chan struct{}), over: make(chan struct{}), done: make(chan struct{}),
	}
}

// local reports whether the connection is a Unix socket.
func (c *control) local() bool { return c.r.unix != nil }

// fail ends the connection. The first reason stays.
func (c *control) fail(err error) {
	c.once.Do(func() {
		c.err = err
		close(c.over)
		_ = c.conn.Close() // nothing that was written matters any more
	})
}

// down is the error of what needed the connection.
func (c *control) down() *DownError {
	<-c.over
	return &DownError{Rank: c.who.Rank, Incarnation: c.who.Incarnation, Err: c.err}
}

// send writes a frame. One that cannot be written ends the connection.
func (c *control) send(kind byte, files files, body ...[]byte) error {
	c.sending.Lock()
	defer c.sending.Unlock()
	_ = c.conn.SetWriteDeadline(soon(sendTimeout)) // it fails for closed ones only
	if err := writeFrame(c.conn, kind, files, body...); err != nil {
		c.fail(fmt.Errorf("%w: %w", ErrLost, err))
		return c.down()
	}
	return nil
}

func (c *control) sendJSON(kind byte, files files, body any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	return c.send(kind, files, b)
}

// run serves the connection for as long as it lasts.
func (c *control) run() {
	if c.before != nil {
		<-c.before.done
	}
	if c.n.cfg.Up != nil {
		c.n.cfg.Up(c.who.Rank, c.who.Incarnation)
	}
	close(c.up)
	c.n.wg.Go(c.answer)
	var err error
	for err == nil {
		err = c.receive()
	}
	if !errors.Is(err, ErrLeft) && !errors.Is(err, ErrFrame) {
		err = fmt.Errorf("%w: %w", ErrLost, err)
	}
	c.fail(err)
	c.r.close()
	close(c.questions)
	c.loseAsks()
	c.n.drop(c)
	close(c.done)
}

// receive takes the next frame.
func (c *control) receive() error {
	f, err := c.r.next()
	if err != nil {
		return err
	}
	switch f.kind {
	case frameBye:
		err = ErrLeft
	case frameAsk, frameAnswer, frameBusy:
		err = c.exchange(&f)
	case frameOffer, frameShare, frameDone, frameLeave:
		m := &partyMessage{}
		if err = f.decode(m); err == nil {
			err = m.check(f.kind)
		}
		if err == nil {
			c.n.deliver(c, event{kind: f.kind, message: m, files: f.files})
			return nil
		}
	default:
		err = fmt.Errorf("%w: kind %d on a control connection", ErrFrame, f.kind)
	}
	f.drop()
	return err
}

// exchange takes a question or an answer.
func (c *control) exchange(f *frame) error {
	if len(f.body) < 8 {
		return fmt.Errorf("%w: a question of %d bytes has no number", ErrFrame, len(f.body))
	}
	id, text := binary.LittleEndian.Uint64(f.body), append([]byte(nil), f.body[8:]...)
	if f.kind == frameAsk {
		select {
		case c.questions <- question{id, text}:
			return nil
		default:
			return c.send(frameBusy, nil, f.body[:8])
		}
	}
	c.asking.Lock()
	waits := c.asks[id]
	delete(c.asks, id)
	c.asking.Unlock()
	if waits == nil { // nobody waits for it any more
		return nil
	}
	if f.kind == frameBusy {
		waits <- reply{err: ErrBusy}
	} else {
		waits <- reply{text: text}
	}
	return nil
}

// answer answers questions until the connection is over.
func (c *control) answer() {
	for q := range c.questions {
		id := binary.LittleEndian.AppendUint64(nil, q.id)
		kind, text := byte(frameBusy), []byte(nil)
		if c.n.cfg.Answer != nil {
			kind, text = frameAnswer, c.n.cfg.Answer(c.who.Rank, q.text)
		}
		if len(text) > MaxAsk {
			kind, text = frameBusy, nil
		}
		_ = c.send(kind, nil, id, text) // the connection is over if it fails
	}
}

// ask asks, and waits for the answer.
func (c *control) ask(ctx context.Context, text []byte) ([]byte, error) {
	waits := make(chan reply, 1)
	c.asking.Lock()
	if c.asks == nil {
		c.asking.Unlock()
		return nil, c.down()
	}
	c.lastAsk++
	id := c.lastAsk
	c.asks[id] = waits
	c.asking.Unlock()
	if err := c.send(frameAsk, nil, binary.LittleEndian.AppendUint64(nil, id), text); err != nil {
		return nil, err
	}
	select {
	case r := <-waits:
		return r.text, r.err
	case <-ctx.Done():
		c.asking.Lock()
		defer c.asking.Unlock()
		delete(c.asks, id)
		return nil, fmt.Errorf("link: ask rank %d: %w", c.who.Rank, ctx.Err())
	}
}

// loseAsks ends those that wait for answers.
func (c *control) loseAsks() {
	c.asking.Lock()
	defer c.asking.Unlock()
	for _, waits := range c.asks {
		waits <- reply{err: c.down()}
	}
	c.asks = nil
}
