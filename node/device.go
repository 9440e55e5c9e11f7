package node

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"larder/client"
	"larder/protocol"
	"larder/tiering/ssd"
)

// Times of a device's life.
const (
	// lookEvery is how often a device looks whether it is still sound, and tries again what has failed.
	lookEvery = time.Second
	// settleTime bounds one wait for writes to end: as long as an engine takes to have a connection's end confirmed.
	settleTime = 5 * time.Second
	// pauseFirst and pauseMost bound the pause between two lives of a device.
	pauseFirst = 100 * time.Millisecond
	pauseMost  = 5 * time.Second
	// byeTime bounds the end of a session: masters that do not answer find out by its deadline.
	byeTime = 2 * time.Second
	// attachRounds bounds how often a leader may change its mind about a generation in one attachment: it may retire the
	// device between the two ATTACHes.
	attachRounds = 4
)

// State is what a device does.
type State string

// States of a device.
const (
	StateConnecting State = "connecting" // it has no session yet
	StateAttaching  State = "attaching"  // the leader does not know how to reach it
	StateReady      State = "ready"
	StateFailed     State = "failed"  // its medium has
	StateStopped    State = "stopped" // the node has
)

// Reasons why a life of a device ends.
var (
	errSessionEnded = errors.New("node: the session ended, and with it what the memory held")
	errRenewed      = errors.New("node: the leader wants memory that nobody can write to any more")
)

// device is one device through all of its lives. It is the home that sessions call.
type device struct {
	n      *Node
	name   string // for people: dram, ssd DIR, cxl PATH
	medium medium
	tasks  chan struct{} // 1: there are tasks
	news   chan struct{} // 1: a leader has taken the session
	log    *slog.Logger

	mu      sync.Mutex
	state   State
	why     error // of StateFailed, or the last trouble
	uuid    [16]byte
	session uint64
	id      uint64 // of the device; 0 = not attached yet
	shown   uint64 // the generation that it shows; 0 = none yet
	about   protocol.AttachRequest
	grants  *grants

	counts deviceCounts
}

func newDevice(n *Node, name string, m medium) *device {
	return &device{
		n: n, name: name, medium: m, state: StateConnecting, log: n.cfg.Logger.With(slog.String("device", name)),
		tasks: make(chan struct{}, 1), news: make(chan struct{}, 1),
	}
}

func (d *device) set(s State, why error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.state, d.why = s, why
}

func (d *device) exposes() bool {
	_, ok := d.medium.(*exposed)
	return ok
}

// discards reports whether the medium can forget what lies in an extent.
func (d *device) discards() bool {
	_, ok := d.medium.(discarder)
	return ok
}

// run leads one life after the other until ctx is over or the medium has failed, which is the error.
func (d *device) run(ctx context.Context) error {
	pause := pauseFirst
	for {
		begun := d.n.cfg.clock.now()
		err := d.live(ctx)
		switch {
		case ctx.Err() != nil:
			d.set(StateStopped, nil)
			return nil //nolint:nilerr // it was asked to end
		case errors.Is(err, ErrMedium):
			d.set(StateFailed, err)
			d.log.Error("the device has failed", slog.Any("error", err))
			return err
		}
		d.set(StateConnecting, err)
		level := slog.LevelWarn
		if errors.Is(err, errNotYet) {
			level = slog.LevelDebug // the masters have not made it yet
		}
		d.log.Log(ctx, level, "the device begins anew", slog.Any("reason", err))
		if d.n.cfg.clock.now()-begun > int64(pauseMost) {
			pause = pauseFirst
		}
		if sleep(ctx, d.n.cfg.clock, pause) != nil {
			d.set(StateStopped, nil)
			return nil //nolint:nilerr // it was asked to end
		}
		pause = min(2*pause, pauseMost)
	}
}

// live leads one life: see the package's documentation.
func (d *device) live(ctx context.Context) (err error) {
	uuid, err := d.medium.open()
	if err != nil {
		return err
	}
	l := &life{d: d}
	defer func() { err = errors.Join(err, l.end(ctx)) }()
	d.mu.Lock()
	d.state, d.uuid, d.session, d.id, d.shown = StateConnecting, uuid, 0, 0, 0
	d.grants = newGrants(l.window)
	d.mu.Unlock()
	l.s, err = d.n.cfg.open(ctx, &sessionConfig{
		masters: d.n.cfg.Masters, instance: "node/" + d.n.cfg.Host + "/" + hexID(uuid), engine: d.n.engine,
		expose: d.exposes(), discards: d.discards(), pageSize: d.n.cfg.PageSize, regionSize: d.n.cfg.RegionSize, logger: d.log,
	}, d)
	if err != nil {
		return err
	}
	pool, incarnation := l.s.pool()
	if err := d.medium.prepare(pool, incarnation); err != nil {
		return err
	}
	return l.serve(ctx)
}

// Home: what the session calls.

func (d *device) connected(session uint64) {
	d.mu.Lock()
	d.session = session
	d.mu.Unlock()
	wake(d.news)
}

func (d *device) work() { wake(d.tasks) }

// wake sends to a channel that has room for one, unless it is full.
func wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (d *device) grant(ctx context.Context, p *protocol.GrantPush) (protocol.Endpoint, error) {
	g, err := d.own(p.Device)
	if err != nil {
		return protocol.Endpoint{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	e, err := g.grant(ctx, p)
	if err != nil {
		d.counts.refused.Add(1)
		return e, err
	}
	d.counts.granted.Add(1)
	return e, nil
}

func (d *device) fence(ctx context.Context, p *protocol.FencePush) error {
	g, err := d.own(p.Device)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	if err := g.fence(ctx, p.RegionID, p.Epoch); err != nil {
		d.log.Warn("a fenced region may still be written to: the fence is tried again when the leader repeats it",
			slog.Uint64("region_id", p.RegionID), slog.Any("error", err))
		return err
	}
	d.counts.fenced.Add(1)
	return nil
}

// discard has the medium forget stretches of regions of this home's own. What is not granted any more is left out.
func (d *device) discard(ctx context.Context, list []client.Unused) error {
	d.mu.Lock()
	g := d.grants
	d.mu.Unlock()
	m, ok := d.medium.(discarder)
	if g == nil || !ok {
		return errNotHere
	}
	refused, err := g.discard(list, func(extents []ssd.Extent) error { return m.discard(ctx, extents) })
	if err != nil {
		refused = len(list)
	}
	d.counts.undiscarded.Add(uint64(refused))
	return err
}

// own returns the grants of the device, if that is the one that is meant.
func (d *device) own(id uint64) (*grants, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.id == 0 || d.id != id {
		return nil, errNotHere
	}
	return d.grants, nil
}
