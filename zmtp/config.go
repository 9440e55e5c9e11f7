package zmtp

import (
	"fmt"
	"time"
)

// SocketType is what kind of socket a side is.
type SocketType string

// The socket types of this side, and those that peers of theirs may be.
const (
	PUB    SocketType = "PUB"
	SUB    SocketType = "SUB"
	XPUB   SocketType = "XPUB"
	XSUB   SocketType = "XSUB"
	REQ    SocketType = "REQ"
	REP    SocketType = "REP"
	DEALER SocketType = "DEALER"
	ROUTER SocketType = "ROUTER"
)

// peers are the types that a type may be connected to.
var peers = map[SocketType][]SocketType{
	PUB:    {SUB, XSUB},
	SUB:    {PUB, XPUB},
	REQ:    {REP, ROUTER},
	DEALER: {REP, DEALER, ROUTER},
	ROUTER: {REQ, DEALER, ROUTER},
}

// Config bounds connections. The zero value of each field but Type stands for its default.
type Config struct {
	Type     SocketType
	Identity string // what a ROUTER calls this side; at most 255 bytes

	MaxMessage int // bytes of all parts of a message that is read; 16 MiB: a batch of events with its tokens is less
	MaxParts   int // of a message that is read; 64
	MaxPeers   int // connections of a listener at once; 1024

	HandshakeTimeout time.Duration // for all of it; 5 s
	WriteTimeout     time.Duration // for one message; 10 s
	// Heartbeat is how often the peer is asked whether it is there, 0 for never: if nothing came for three times as long the
	// connection ends with [ErrSilent]. A peer's own questions are always answered.
	Heartbeat time.Duration

	// For publishers: what waits for one subscriber, in messages and bytes; what comes when it is full is dropped, for this
	// subscriber alone. 10,000, as many batches as vLLM keeps, and 64 MiB.
	QueueMessages int
	QueueBytes    int
}

const (
	maxIdentity      = 255
	maxCommand       = 4 << 10 // bytes of a command's body: READY with its properties is the longest
	maxSubscriptions = 1024    // of one subscriber, counted as often as they are made
	readBuffer       = 64 << 10
)

func (c Config) withDefaults() (Config, error) {
	if _, ok := peers[c.Type]; !ok {
		return c, fmt.Errorf("zmtp: socket type %q: one of PUB, SUB, REQ, DEALER, ROUTER", c.Type)
	}
	if len(c.Identity) > maxIdentity {
		return c, fmt.Errorf("zmtp: an identity of %d bytes, at most %d", len(c.Identity), maxIdentity)
	}
	for _, v := range []struct {
		field *int
		value int
	}{{&c.MaxMessage, 16 << 20}, {&c.MaxParts, 64}, {&c.MaxPeers, 1024}, {&c.QueueMessages, 10_000}, {&c.QueueBytes, 64 << 20}} {
		if *v.field < 0 {
			return c, fmt.Errorf("zmtp: a limit of %d: give a positive one, or 0 for the default", *v.field)
		}
		if *v.field == 0 {
			*v.field = v.value
		}
	}
	if c.HandshakeTimeout <= 0 {
		c.HandshakeTimeout = 5 * time.Second
	}
	if c.WriteTimeout <= 0 {
		c.WriteTimeout = 10 * time.Second
	}
	return c, nil
}
