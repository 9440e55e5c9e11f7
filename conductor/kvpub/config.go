package kvpub

import (
	"fmt"
	"time"

	"larder/conductor/kvevent"
	"larder/zmtp"
)

// Config says where and how events are published. The zero value of each field but Listen stands for its default.
type Config struct {
	Listen string // endpoint of the PUB socket, see package zmtp; vLLM's is tcp://*:5557
	Replay string // endpoint of the ROUTER socket that sends past batches again; empty for none

	Topic  string         // of all messages; others write kv@ADDRESS@MODEL
	Format kvevent.Format // of events
	// Rank is that of data parallelism, which batches name; kvevent.NoRank for none. The zero value is rank 0.
	Rank int
	// TopicInReplay has answers of the ROUTER name the topic, as vLLM's do from 0.26 on. Before, they did not, and more
	// subscribers know that.
	TopicInReplay bool

	Interval    time.Duration // how long an event waits for others to share its batch; 10 ms
	BatchEvents int           // events of a batch; 512
	BatchBytes  int           // bytes from which on a batch is sent; 256 KiB
	// Beat is after how long without a batch one without events is sent, so that subscribers see that the publisher is there,
	// and whether they have missed the last batch; 0 for never, as vLLM has it.
	Beat time.Duration
	// Beating is asked before each beat; without one when it says false, subscribers look for another publisher. nil: always.
	Beating func() bool

	RingBatches int // past batches that can be sent again; 10,000, as vLLM keeps
	RingBytes   int // of their payloads; 64 MiB

	Socket zmtp.Config // bounds of the connections of both sockets; its Type is of no meaning
}

func (c Config) withDefaults() (Config, error) {
	if c.Format > kvevent.RFC1527 {
		return c, fmt.Errorf("kvpub: there is no format %d", c.Format)
	}
	for _, v := range []struct {
		field *int
		value int
	}{{&c.BatchEvents, 512}, {&c.BatchBytes, 256 << 10}, {&c.RingBatches, 10_000}, {&c.RingBytes, 64 << 20}} {
		if *v.field < 0 {
			return c, fmt.Errorf("kvpub: a limit of %d: give a positive one, or 0 for the default", *v.field)
		}
		if *v.field == 0 {
			*v.field = v.value
		}
	}
	if c.Interval <= 0 {
		c.Interval = 10 * time.Millisecond
	}
	return c, nil
}
