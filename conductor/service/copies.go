package service

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"larder/client"
	"larder/conductor"
	"larder/conductor/sched"
	"larder/protocol"
)

// Limits of copying. A hot prefix is asked for again and again, so that what is left out now is copied with another request.
const (
	copyQueue  = 256              // prefixes that wait
	copyWithin = 10 * time.Second // to ask for one; the bytes move afterwards, between nodes
	copyAgain  = 30 * time.Second // the same prefix is not asked for again within
	copyMost   = 4096             // prefixes that are remembered for that
)

// copies has hot prefixes that lie in the pool copied to the node near an instance that is to serve them. Nodes move the bytes;
// what engines hold in memory of their own is theirs to fetch, as the answer of /schedule tells them.
type copies struct {
	pool   map[string]*client.Client // by tenant
	seed   uint64                    // of names
	logger *slog.Logger
	queue  chan *copyOf
	asked  map[copyKey]time.Duration // of the one goroutine

	tasks, blocks, dropped, failed atomic.Uint64
}

// copyOf is a prefix that is to lie near an instance.
type copyOf struct {
	scope conductor.Scope
	names []uint64
	host  string
}

// copyKey is the same, by its last block.
type copyKey struct {
	host string
	name uint64
}

func newCopies(cfg *Config) *copies {
	return &copies{
		pool: cfg.Pool, seed: cfg.Seed, logger: cfg.Logger, queue: make(chan *copyOf, copyQueue),
		asked: map[copyKey]time.Duration{},
	}
}

// copyTo is the node that a decision wants the prefix copied to, "" if it is nothing that the pool can do. mu is held.
func (sc *scheduler) copyTo(d *sched.Decision) string {
	if d.Replicate.Tokens <= 0 {
		return ""
	}
	return sc.caps[sc.names[d.Replicate.To]].Host
}

// add queues a copy, if there is room.
func (c *copies) add(x *copyOf) {
	if c.pool[x.scope.Tenant] == nil {
		return
	}
	select {
	case c.queue <- x:
	default:
		c.dropped.Add(1)
	}
}

// run asks for copies until ctx ends.
func (c *copies) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case x := <-c.queue:
			if !c.fresh(now(), x) {
				continue
			}
			bounded, cancel := context.WithTimeout(ctx, copyWithin)
			err := c.ask(bounded, x)
			cancel()
			if err != nil && ctx.Err() == nil {
				c.failed.Add(1)
				c.logger.LogAttrs(ctx, slog.LevelDebug, "a prefix could not be copied", slog.String("host", x.host), slog.Any("error", err))
			}
		}
	}
}

// fresh reports whether a copy has not been asked for lately, and notes that it is now.
func (c *copies) fresh(at time.Duration, x *copyOf) bool {
	key := copyKey{x.host, x.names[len(x.names)-1]}
	if last, there := c.asked[key]; there && at-last < copyAgain {
		return false
	}
	if len(c.asked) >= copyMost {
		for k, last := range c.asked {
			if at-last >= copyAgain {
				delete(c.asked, k)
			}
		}
		if len(c.asked) >= copyMost {
			c.dropped.Add(1)
			return false
		}
	}
	c.asked[key] = at
	return true
}

// ask finds the entries of a prefix and has them copied.
func (c *copies) ask(ctx context.Context, x *copyOf) error {
	of := client.PrefixContext{
		Model: x.scope.Model, LoRA: x.scope.LoRA, Salt: x.scope.Salt, BlockSize: uint64(x.scope.BlockSize), Seed: c.seed, //nolint:gosec // positive
	}
	pool := c.pool[x.scope.Tenant]
	for names := x.names; len(names) > 0; {
		n := min(len(names), protocol.MaxBatch)
		matched, keys, err := pool.PrefixMatch(ctx, of, names[:n], 0, true)
		if err != nil {
			return err
		}
		if len(keys) > 0 {
			rep, err := pool.Copy(ctx, protocol.CopyRequest{Keys: keys, Node: x.host})
			if err != nil {
				return err
			}
			c.tasks.Add(uint64(len(rep.Tasks)))
			c.blocks.Add(uint64(len(keys)))
		}
		if matched < n {
			break // what follows is not in the pool
		}
		names = names[n:]
	}
	return nil
}

// collect emits the metrics.
func (c *copies) collect(e emitter) {
	e.counter("replication_tasks_total", "Tasks that the pool was given to copy hot prefixes.", c.tasks.Load())
	e.counter("replicated_blocks_total", "Blocks that these copy.", c.blocks.Load())
	e.counter("replications_failed_total", "Prefixes that could not be asked for.", c.failed.Load())
	e.counter("replications_dropped_total", "Prefixes that had no room among those that wait.", c.dropped.Load())
}
