package kvpub

import (
	"encoding/binary"
	"math"

	"larder/zmtp"
)

const (
	maxRequest = 1 << 10 // bytes of a request: it has 8, and what a client puts in front of them
	// replayStep is how many batches are looked up at a time for an answer: publishing waits for that, not for the client.
	replayStep = 64
)

// serveReplay answers requests for past batches: each is an empty part and the sequence to begin with. The answer is a message
// for each batch from there on that is still kept, and one with a sequence of all ones and no payload at the end. A client that
// asks for something else, or does not read, loses its connection.
func (p *Publisher) serveReplay(c *zmtp.Conn) {
	for {
		m, err := c.Read()
		if err != nil || len(m) != 2 || len(m[0]) != 0 || len(m[1]) != 8 {
			return
		}
		if p.replay(c, binary.BigEndian.Uint64(m[1])) != nil {
			return
		}
	}
}

func (p *Publisher) replay(c *zmtp.Conn, from uint64) error {
	p.replays.Add(1)
	p.mu.Lock()
	end := p.next // what comes later is published
	p.mu.Unlock()
	var list []batch
	for {
		p.mu.Lock()
		list = p.ring.since(list[:0], from, end, replayStep)
		p.mu.Unlock()
		for _, b := range list {
			if err := p.answer(c, p.topic, b); err != nil {
				return err
			}
		}
		if len(list) < replayStep {
			return p.answer(c, nil, batch{sequence: math.MaxUint64})
		}
		from = list[len(list)-1].sequence + 1
	}
}

// answer sends one message of an answer.
func (p *Publisher) answer(c *zmtp.Conn, topic []byte, b batch) error {
	sequence := binary.BigEndian.AppendUint64(nil, b.sequence)
	if p.cfg.TopicInReplay {
		return c.Write(nil, topic, sequence, b.payload)
	}
	return c.Write(nil, sequence, b.payload)
}
