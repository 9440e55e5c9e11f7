package poolfeed

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"larder/client"
	"larder/conductor"
	"larder/conductor/kvevent"
	"larder/zmtp"
)

// Limits of a feed.
const (
	// pageBlocks are listed at a time: a few milliseconds of a master, and of the events that wait meanwhile.
	pageBlocks = 4096
	// listTimeout is for one page, through an election if need be.
	listTimeout = 20 * time.Second
	// maxWaiting batches wait while a page is listed; others wait at the publisher, whose queue is bounded, too.
	maxWaiting = 64
	// retryLeast and retryMost are how long a feed waits after it has tried a member in vain, or all of them again and again.
	retryLeast, retryMost = 50 * time.Millisecond, time.Second
)

// Config configures a feed. The zero value of each field below Tenants stands for its default.
type Config struct {
	Index *conductor.Index
	// Members are the endpoints at which masters publish, as tcp://host:5557, in RFC 1527's format. One is followed; the
	// next one if it is not heard.
	Members []string
	// Tenants are those whose blocks are followed, by name, each with a client of that tenant. They stay the caller's, who
	// closes them after the feed.
	Tenants map[string]*client.Client

	Instance string // what the pool is called in answers; pool
	// EngineHashes says that blocks are stored under hashes of engines, and not RFC 1527's rolling ones with the index's
	// seed: they are known once an engine has told of the same hashes.
	EngineHashes bool
	Silence      time.Duration // without a word of a member, which speaks every second, until the next one is tried; 4 s
	Stale        time.Duration // without any member until what is known is forgotten; 30 s
	Logger       *slog.Logger  // nobody's
}

// Feed follows a pool. Its methods may be called concurrently.
type Feed struct {
	cfg    Config
	cancel context.CancelFunc
	wg     sync.WaitGroup

	synced                                                atomic.Bool
	members, listings, listed, gaps, events, foreign, bad atomic.Uint64

	// Of the goroutine that follows.
	batch   kvevent.Batch
	next    uint64           // sequence of the batch that is due
	epoch   uint32           // of what is applied now
	whole   uint32           // of what was listed to its end
	src     conductor.Source // of what was applied last
	hashes  []uint64         // scratch
	current time.Duration    // when the index was last known to follow
	refused bool             // the index has refused an event, and that is logged
}

// Stats are what a feed has done.
type Stats struct {
	Synced   bool   // the index follows a member
	Members  uint64 // that were followed, those included that were again
	Listings uint64 // of all that the pool holds
	Listed   uint64 // blocks
	Gaps     uint64 // in the events of a member
	Events   uint64
	Foreign  uint64 // events that are of other tenants, or of blocks without a size
	Bad      uint64 // events that could not be read, or that the index refused
}

// Start begins to follow.
func Start(cfg Config) (*Feed, error) {
	if cfg.Index == nil || len(cfg.Members) == 0 || len(cfg.Tenants) == 0 {
		return nil, errors.New("poolfeed: name an index, members that publish, and the tenants to follow, with a client for each")
	}
	for _, m := range cfg.Members {
		if err := zmtp.CheckEndpoint(m, false); err != nil {
			return nil, fmt.Errorf("poolfeed: %w", err)
		}
	}
	if cfg.Instance == "" {
		cfg.Instance = "pool"
	}
	if cfg.Silence <= 0 {
		cfg.Silence = 4 * time.Second
	}
	if cfg.Stale <= 0 {
		cfg.Stale = 30 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	ctx, cancel := context.WithCancel(context.Background())
	f := &Feed{cfg: cfg, cancel: cancel, current: clock()}
	f.wg.Go(func() { f.run(ctx) })
	return f, nil
}

// Close ends following. What the index knows of the pool stays there, as it is.
func (f *Feed) Close() {
	f.cancel()
	f.wg.Wait()
}

// Stats tells what the feed has done.
func (f *Feed) Stats() Stats {
	return Stats{
		Synced: f.synced.Load(), Members: f.members.Load(), Listings: f.listings.Load(), Listed: f.listed.Load(), Gaps: f.gaps.Load(),
		Events: f.events.Load(), Foreign: f.foreign.Load(), Bad: f.bad.Load(),
	}
}

// run follows one member after the other.
func (f *Feed) run(ctx context.Context) {
	wait := retryLeast
	for i := 0; ctx.Err() == nil; i++ {
		member := f.cfg.Members[i%len(f.cfg.Members)]
		err := f.follow(ctx, member)
		if ctx.Err() != nil {
			return
		}
		if clock()-f.current < retryMost { // it was followed until now
			wait = retryLeast
		}
		f.cfg.Logger.Warn("a member of the pool is not followed any more", slog.String("member", member), slog.Any("error", err))
		if clock()-f.current > f.cfg.Stale {
			f.cfg.Index.Clear(f.cfg.Instance, kvevent.NoRank, kvevent.Media)
		}
		pause(ctx, wait)
		wait = min(2*wait, retryMost)
	}
}

// message is a batch as it came in.
type message struct {
	sequence uint64
	payload  []byte
}

var (
	errGap    = errors.New("poolfeed: events are missing")
	errSilent = errors.New("poolfeed: the member is not heard: it is gone, or has no leader")
)

// follow follows a member until it is not heard any more.
func (f *Feed) follow(ctx context.Context, member string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	dialing, done := context.WithTimeout(ctx, f.cfg.Silence)
	c, err := zmtp.Dial(dialing, member, zmtp.Config{Type: zmtp.SUB, HandshakeTimeout: f.cfg.Silence})
	done()
	if err != nil {
		return fmt.Errorf("poolfeed: %w", err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer func() { _ = c.Close() }() // it returns nil, and ends the reader
	if err := c.Subscribe(""); err != nil {
		return fmt.Errorf("poolfeed: %w", err)
	}
	in := make(chan message, maxWaiting)
	wg.Go(func() {
		defer close(in)
		read(ctx, c, in)
	})
	m, err := f.receive(ctx, in) // from here on nothing is missed
	if err != nil {
		return err
	}
	f.members.Add(1)
	f.next = m.sequence + 1
	for {
		err := f.list(ctx, in)
		if err == nil {
			f.synced.Store(true)
			err = f.listen(ctx, in)
			f.synced.Store(false)
			f.current = clock()
		}
		if !errors.Is(err, errGap) {
			return err
		}
	}
}

// read passes on what a member publishes, until it is gone.
func read(ctx context.Context, c *zmtp.Conn, in chan<- message) {
	for {
		m, err := c.Read()
		if err != nil {
			return
		}
		if len(m) != 3 || len(m[1]) != 8 {
			continue // whoever publishes something else at the same endpoint
		}
		select {
		case in <- message{binary.BigEndian.Uint64(m[1]), append([]byte(nil), m[2]...)}:
		case <-ctx.Done():
			return
		}
	}
}

// receive waits for the next batch.
func (f *Feed) receive(ctx context.Context, in <-chan message) (message, error) {
	silence := timer(f.cfg.Silence)
	defer silence.Stop()
	select {
	case m, ok := <-in:
		if !ok {
			return m, errSilent
		}
		return m, nil
	case <-ctx.Done():
		return message{}, ctx.Err()
	case <-silence.C:
		return message{}, errSilent
	}
}

// listen applies what the member publishes, until there is a gap, or it is not heard.
func (f *Feed) listen(ctx context.Context, in <-chan message) error {
	for {
		m, err := f.receive(ctx, in)
		if err == nil {
			err = f.apply(m)
		}
		if err != nil {
			return err
		}
	}
}

// drain applies what has come so far.
func (f *Feed) drain(in <-chan message) error {
	for {
		select {
		case m, ok := <-in:
			if !ok {
				return errSilent
			}
			if err := f.apply(m); err != nil {
				return err
			}
		default:
			return nil
		}
	}
}

// list lists what the pool holds, beside what is known, and forgets that at the end.
func (f *Feed) list(ctx context.Context, in <-chan message) error {
	f.supersede(f.whole) // what an earlier attempt may have left
	f.epoch++
	f.listings.Add(1)
	for tenant, c := range f.cfg.Tenants {
		for cursor, more := uint64(0), true; more; more = cursor != 0 {
			if err := f.drain(in); err != nil {
				return err
			}
			asking, done := context.WithTimeout(ctx, listTimeout)
			blocks, contexts, next, err := c.ListBlocks(asking, cursor, pageBlocks)
			done()
			if err != nil {
				return fmt.Errorf("poolfeed: list what tenant %q holds: %w", tenant, err)
			}
			f.page(tenant, blocks, contexts)
			cursor = next
		}
	}
	f.supersede(f.epoch)
	f.whole = f.epoch
	return nil
}

// supersede forgets what is not of an epoch.
func (f *Feed) supersede(epoch uint32) {
	f.cfg.Index.Supersede(&conductor.Source{Instance: f.cfg.Instance, Epoch: epoch})
}
