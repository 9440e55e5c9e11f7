package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"larder/zmtp"
)

// Maru's message types that the load sends.
const (
	maruAlloc         = 0x01
	maruRegister      = 0x10
	maruLookup        = 0x11
	maruExists        = 0x12
	maruPin           = 0x14
	maruUnpin         = 0x15
	maruBatchRegister = 0x20
	maruBatchLookup   = 0x21
	maruBatchExists   = 0x22
	maruBatchPin      = 0x23
	maruBatchUnpin    = 0x24

	maruHeader   = 16
	maruMagic    = 0xcf000100 // with the version
	maruReplyBit = 0x80
)

const (
	// maruKeys are registered before a server is measured.
	maruKeys = 20_000
	// maruBatch keys are in a batch: as many as LMCache has of a prompt of 16,384 tokens.
	maruBatch = 64
	// maruLength is what an entry is said to have, and maruRegion the region that they lie in, one behind the other and from
	// the front again. No byte of it is touched.
	maruLength = 1 << 10
	maruRegion = 64 << 20
	// maruInFlight requests are sent ahead in async mode, as Maru's async client does.
	maruInFlight = 64
	// maruPatience is how long a server may take for a reply.
	maruPatience = 10 * time.Second
)

// maruClient is a connection with the state of its load.
type maruClient struct {
	conn   *zmtp.Conn
	number uint64 // from 1
	region uint64
	fresh  uint64 // keys that it registered
	turns  uint64
	rng    *rand.Rand
	body   []byte
	lap    []time.Duration
}

// maruRequest appends a request's payload to c.body and returns its type.
type maruRequest func(c *maruClient) byte

// maruOp is a kind of load.
type maruOp struct {
	name    string
	request maruRequest
}

// maruOps are what is measured, in the order of the table.
var maruOps = []maruOp{
	{"lookup", func(c *maruClient) byte { return c.keyed(maruLookup, c.known()) }},
	{"exists", func(c *maruClient) byte { return c.keyed(maruExists, c.known()) }},
	{"register", func(c *maruClient) byte { c.entry(); return maruRegister }},
	{"pin, unpin", func(c *maruClient) byte { return c.pinning() }},
	{"batch_lookup", func(c *maruClient) byte { return c.batch(maruBatchLookup) }},
	{"batch_exists", func(c *maruClient) byte { return c.batch(maruBatchExists) }},
	{"batch_register", func(c *maruClient) byte { return c.batchRegister() }},
	{"batch_pin, batch_unpin", func(c *maruClient) byte {
		if c.turns++; c.turns%2 == 1 {
			return c.run(maruBatchPin, c.turns/2)
		}
		return c.run(maruBatchUnpin, c.turns/2-1)
	}},
	{"mixed", func(c *maruClient) byte { return c.mixed() }},
}

// known is a key that is registered.
func (c *maruClient) known() uint64 { return c.rng.Uint64N(maruKeys) }

// appendMaruKey appends a key of 40 bytes, about what engines call a block.
func appendMaruKey(b []byte, n uint64) []byte {
	b = append(b, 0xd9, 40)
	b = append(b, "larder-bench@block@"...)
	at := len(b)
	b = append(b, "000000000000000000000"...)
	for i := len(b) - 1; n > 0 && i >= at; i-- {
		b[i] = byte('0' + n%10)
		n /= 10
	}
	return b
}

func appendMaruText(b []byte, s string) []byte { return append(append(b, 0xa0|byte(len(s))), s...) } //nolint:gosec // names are short

func appendMaruUint(b []byte, n uint64) []byte {
	return binary.BigEndian.AppendUint64(append(b, 0xcf), n)
}

func (c *maruClient) keyed(kind byte, key uint64) byte {
	c.body = appendMaruKey(append(c.body, "\x81\xa3key"...), key)
	return kind
}

// entry appends a new entry as a map.
func (c *maruClient) entry() {
	n := c.fresh
	c.fresh++
	b := appendMaruKey(append(c.body, "\x84\xa3key"...), c.number<<40|n)
	b = appendMaruUint(appendMaruText(b, "region_id"), c.region)
	b = appendMaruUint(appendMaruText(b, "kv_offset"), n*maruLength%maruRegion)
	c.body = appendMaruUint(appendMaruText(b, "kv_length"), maruLength)
}

// pinning pins and unpins keys in turns, which each connection does to its own.
func (c *maruClient) pinning() byte {
	key := c.turns / 2 % maruKeys
	if c.turns++; c.turns%2 == 1 {
		return c.keyed(maruPin, key)
	}
	return c.keyed(maruUnpin, key)
}

func (c *maruClient) batch(kind byte) byte {
	c.body = append(c.body, "\x81\xa4keys\xdc\x00\x40"...)
	for range maruBatch {
		c.body = appendMaruKey(c.body, c.known())
	}
	return kind
}

// run appends a batch of consecutive keys.
func (c *maruClient) run(kind byte, n uint64) byte {
	c.body = append(c.body, "\x81\xa4keys\xdc\x00\x40"...)
	for i := range uint64(maruBatch) {
		c.body = appendMaruKey(c.body, (n*maruBatch+i)%maruKeys)
	}
	return kind
}

func (c *maruClient) batchRegister() byte {
	c.body = append(c.body, "\x81\xa7entries\xdc\x00\x40"...)
	for range maruBatch {
		c.entry()
	}
	return maruBatchRegister
}

// mixed is what a handler does that finds most of its chunks: of ten requests six look up, two ask, one stores, one pins.
func (c *maruClient) mixed() byte {
	switch c.rng.Uint32N(10) {
	case 0:
		c.entry()
		return maruRegister
	case 1:
		return c.pinning()
	case 2, 3:
		return c.keyed(maruExists, c.known())
	default:
		return c.keyed(maruLookup, c.known())
	}
}

// request makes a request's frame in c.body.
func (c *maruClient) request(next maruRequest, sequence uint32) {
	c.body = append(c.body[:0], make([]byte, maruHeader)...)
	kind := next(c)
	binary.BigEndian.PutUint32(c.body, maruMagic|uint32(kind))
	binary.BigEndian.PutUint32(c.body[8:], sequence)
	binary.BigEndian.PutUint32(c.body[12:], uint32(len(c.body)-maruHeader)) //nolint:gosec // a batch at most
}

// reply checks a reply and returns its sequence and payload.
func (c *maruClient) reply() (sequence uint32, payload []byte, err error) {
	parts, err := c.conn.Read()
	if err != nil {
		return 0, nil, err //nolint:wrapcheck // says all
	}
	b := parts[len(parts)-1]
	if len(b) < maruHeader || binary.BigEndian.Uint32(b)&^0xff != maruMagic || b[3]&maruReplyBit == 0 {
		return 0, nil, fmt.Errorf("a reply of %d bytes that begins with %x", len(b), b[:min(len(b), 4)])
	}
	payload = b[maruHeader:]
	if len(payload) > 7 && string(payload[1:7]) == "\xa5error" {
		return 0, nil, fmt.Errorf("the server refuses a request: %.200q", payload)
	}
	return binary.BigEndian.Uint32(b[8:]), payload, nil
}

// call sends a request and waits for its reply.
func (c *maruClient) call(next maruRequest) (payload []byte, err error) {
	c.request(next, 1)
	if err := c.conn.Write(nil, c.body); err != nil {
		return nil, err //nolint:wrapcheck // says all
	}
	_, payload, err = c.reply()
	return payload, err
}

// drive keeps depth requests in flight until a time, and waits for their replies. It writes as many requests in one piece as
// replies came in one, so that the client costs as little as one can. A server may answer in any order: a sequence modulo
// depth tells which of those in flight it was. The first one is 1, as it is with Maru's clients.
func (c *maruClient) drive(next maruRequest, depth int, end time.Time) (requests int, err error) {
	sent := make([]time.Time, depth)
	free := make([]uint32, 0, depth)
	for i := range depth {
		free = append(free, uint32(depth-1-i)) //nolint:gosec // small
	}
	c.lap = c.lap[:0]
	var round uint32
	for {
		now := time.Now()
		for more := now.Before(end); more && len(free) > 0; free = free[:len(free)-1] {
			slot := free[len(free)-1]
			c.request(next, 1+round*uint32(depth)+slot) //nolint:gosec // as above
			round++
			sent[slot] = now
			if err := c.conn.Queue(nil, c.body); err != nil {
				return requests, err //nolint:wrapcheck // says all
			}
		}
		if len(free) == depth {
			return requests, nil
		}
		if err := c.conn.Flush(); err != nil {
			return requests, err //nolint:wrapcheck // says all
		}
		for more := true; more; more = c.conn.Buffered() && len(free) < depth {
			sequence, _, err := c.reply()
			if err != nil {
				return requests, err
			}
			slot := (sequence - 1) % uint32(depth) //nolint:gosec // as above
			free = append(free, slot)
			requests++
			if len(c.lap) < latencySamples {
				c.lap = append(c.lap, time.Since(sent[slot]))
			}
		}
	}
}

// maruLoad drives a server with clients of one kind.
type maruLoad struct {
	clients []*maruClient
}

// openMaru connects, and gives each client a region to register in.
func openMaru(ctx context.Context, address string, kind zmtp.SocketType, clients int, region uint64) (*maruLoad, error) {
	l := &maruLoad{}
	for i := range clients {
		conn, err := zmtp.Dial(ctx, "tcp://"+address, zmtp.Config{Type: kind, WriteTimeout: maruPatience})
		if err != nil {
			l.close()
			return nil, err //nolint:wrapcheck // says all
		}
		l.clients = append(l.clients, &maruClient{
			conn: conn, number: nextMaru.Add(1), region: region, rng: rand.New(rand.NewPCG(1, uint64(i))), //nolint:gosec // a load
		})
	}
	return l, nil
}

// nextMaru numbers clients, so that no two register the same keys.
var nextMaru atomic.Uint64

func (l *maruLoad) close() {
	for _, c := range l.clients {
		_ = c.conn.Close() // it returns nil
	}
}

// run drives the server with one kind of request for a time.
func (l *maruLoad) run(ctx context.Context, next maruRequest, depth int, each time.Duration) (*outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, each+maruPatience)
	defer cancel()
	defer context.AfterFunc(ctx, l.close)() // a server that does not answer is not waited for
	return together(len(l.clients), each, func(i int, end time.Time) (*outcome, error) {
		c := l.clients[i]
		n, err := c.drive(next, depth, end)
		return &outcome{requests: n, latency: c.lap}, err
	})
}
