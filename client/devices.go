package client

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"larder/cxl"
	"larder/protocol"
)

// reopenEvery is how often, in ns, a device whose generation does not match is opened again: its file may have been
// replaced, or its header not yet been written.
const reopenEvery = 50e6

// device is an open device with all of its data mapped for reading, or one that is far. Regions are mapped for writing on
// their own, so that taking one away never disturbs a reader.
type device struct {
	id         uint64
	tier, node string
	dev        *cxl.Device
	read       *cxl.Mapping
	data       []byte       // everything behind the header
	far        *remote      // how it is reached; nil if it is mapped
	refs       atomic.Int64 // users, and one while it is in the table
	failures   atomic.Int64 // transfers in a row
	avoid      atomic.Int64 // until when, on Config.Clock, other devices are preferred
}

// generation is the device's present one; 0 if its bytes may be lost. What is known of a far one is what the leader said
// last, and whether the node still has the buffer that was valid then.
func (d *device) generation() uint64 {
	switch {
	case d.far == nil:
		return d.dev.Generation()
	case d.far.stale.Load():
		return 0
	default:
		return d.far.generation
	}
}

// hold adds a user. It fails if the last has gone already.
func (d *device) hold() bool {
	for {
		n := d.refs.Load()
		if n == 0 {
			return false
		}
		if d.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// drop ends a use. After the last one the device is unmapped and closed.
func (d *device) drop() {
	if d.refs.Add(-1) > 0 {
		return
	}
	if d.far != nil {
		d.far.carrier.drop(d.far.seg)
		return
	}
	_ = d.read.Close() // unmapping fails only for a range that is none
	_ = d.dev.Close()  // all of its mappings are closed
}

// bytes returns where an entry's bytes lie, nil if that is not within the device.
func (d *device) bytes(l *protocol.Location) []byte {
	size := uint64(len(d.data)) + cxl.HeaderSpan
	switch {
	case l.Offset < cxl.HeaderSpan || l.Offset > size || l.Length > size-l.Offset:
		return nil
	case l.KVOffset > l.Length || l.KVLength > l.Length-l.KVOffset:
		return nil
	}
	from := l.Offset - cxl.HeaderSpan + l.KVOffset
	return d.data[from : from+l.KVLength : from+l.KVLength]
}

// devices are the devices of the pool that this process has opened.
type devices struct {
	prefault bool
	clock    func() int64
	log      *slog.Logger
	carrier  *carrier

	table atomic.Pointer[map[uint64]*device]

	mu     sync.Mutex
	pool   [16]byte
	infos  map[uint64]protocol.Device
	tried  map[uint64]int64 // when each was last opened
	closed bool

	asking   chan struct{} // a token for who asks the leader what devices there are
	answered int64         // when the leader last said it; whose token it is

	// When the leader is asked again is under mu.
	next  int64             // not before, on Config.Clock, unless there is certain to be news
	pause time.Duration     // what was waited for next; the longer the longer there was no news
	sure  map[uint64]uint64 // the generation of each device that was asked for because of certain news
	busy  int               // who ask now, or are about to
}

func newDevices(cfg *Config) *devices {
	d := &devices{
		prefault: cfg.Prefault, clock: cfg.Clock, log: cfg.Logger, carrier: newCarrier(cfg),
		infos: make(map[uint64]protocol.Device), tried: make(map[uint64]int64), sure: make(map[uint64]uint64),
		asking: make(chan struct{}, 1),
	}
	d.table.Store(&map[uint64]*device{})
	return d
}

// learn keeps what a master said of devices, and reports whether that was news.
func (d *devices) learn(pool string, list []protocol.Device) (news bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if id, err := parseID(pool); err == nil {
		d.pool = id
	}
	for i := range list {
		info := &list[i]
		old := d.infos[info.ID]
		if old.Generation != info.Generation || old.Path != info.Path {
			delete(d.tried, info.ID)
		}
		news = news || old.Generation != info.Generation || old.Path != info.Path || !sameEndpoint(old.Endpoint, info.Endpoint)
		d.infos[info.ID] = *info
		dev := (*d.table.Load())[info.ID]
		if dev == nil || dev.far == nil || dev.far.is(info) {
			continue
		}
		table := maps.Clone(*d.table.Load())
		delete(table, info.ID)
		d.table.Store(&table)
		delete(d.tried, info.ID)
		if dev.far.generation != info.Generation {
			dev.far.stale.Store(true) // what is being read from it does not count
		}
		dev.drop()
	}
	return news
}

// sameEndpoint reports whether two endpoints are the same way to a device.
func sameEndpoint(a, b *protocol.Endpoint) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Engine == b.Engine && a.Host == b.Host && a.Buffer == b.Buffer && a.BufferGeneration == b.BufferGeneration &&
		a.Offset == b.Offset && slices.Equal(a.Rails, b.Rails) && slices.Equal(a.NICs, b.NICs)
}

// news says whether the leader can know more of a device than this client does.
type news int

const (
	newsNone    news = iota
	newsMaybe        // it is not mapped, and its node may have come back
	newsCertain      // a location names a device or a generation that the leader has not told of yet
)

// wants says whether the leader is to be asked what devices there are, for one whose bytes are not to be had.
func (d *devices) wants(id, generation uint64) news {
	d.mu.Lock()
	defer d.mu.Unlock()
	info, ok := d.infos[id]
	dev := (*d.table.Load())[id]
	switch {
	case !ok || info.Generation != generation:
		return newsCertain
	case dev == nil || dev.far != nil:
		return newsMaybe
	default:
		return newsNone
	}
}

// mapped reports whether a device is mapped here.
func (d *devices) mapped(id uint64) bool {
	dev := (*d.table.Load())[id]
	return dev != nil && dev.far == nil
}

// get returns the device with this id and generation, held for the caller; nil if there is none here whose bytes are
// of that generation. It opens and maps the device when it must.
func (d *devices) get(id, generation uint64) *device {
	if dev := (*d.table.Load())[id]; dev != nil && dev.generation() == generation && dev.hold() {
		return dev
	}
	dev, err := d.reopen(id, generation)
	switch {
	case errors.Is(err, errNotServed): // that passes, and is told where it began
	case err != nil:
		d.log.Warn("cannot use a device of the pool", slog.Uint64("device", id), slog.Any("error", err))
	}
	return dev
}

func (d *devices) reopen(id, generation uint64) (*device, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	old := (*d.table.Load())[id]
	if old != nil && old.generation() == generation && old.hold() {
		return old, nil // somebody else was faster
	}
	if old != nil && old.far != nil {
		return nil, nil //nolint:nilnil // the leader has said nothing else of it yet: see learn
	}
	now := d.clock()
	if t, ok := d.tried[id]; d.closed || ok && now-t < reopenEvery {
		return nil, nil //nolint:nilnil // nothing to use, and nothing new to say
	}
	d.tried[id] = now
	info, ok := d.infos[id]
	if !ok {
		return nil, fmt.Errorf("device %d: %w: the master has not described it", id, ErrConfig)
	}
	dev, err := d.open(&info)
	if err != nil {
		return nil, err
	}
	table := maps.Clone(*d.table.Load())
	table[id] = dev
	d.table.Store(&table)
	if old != nil {
		old.drop()
	}
	if dev.generation() != generation || !dev.hold() {
		return nil, nil //nolint:nilnil // the bytes of that generation are not here: a miss, not a fault
	}
	return dev, nil
}

// errNotServed says that a device which nobody maps has no node at the moment.
var errNotServed = errors.New("its node is away")

// open opens a device: maps it, or, if that cannot be and a node serves it, makes it one that is reached by transfer.
func (d *devices) open(info *protocol.Device) (*device, error) {
	switch served := info.Endpoint != nil && info.Endpoint.Engine != ""; {
	case !served && info.Path == "":
		return nil, fmt.Errorf("device %d: %w", info.ID, errNotServed)
	case !served:
		return d.openMapped(info)
	}
	if info.Path != "" && !info.Endpoint.Storage {
		if dev, err := d.openMapped(info); err == nil && dev.generation() == info.Generation {
			return dev, nil
		} else if err == nil {
			dev.drop() // a file of another time
		}
	}
	return d.carrier.openFar(info)
}

// openMapped opens and maps a device: at the path that the master knows it by, or, on another host, wherever a device with
// its identity is.
func (d *devices) openMapped(info *protocol.Device) (*device, error) {
	want := cxl.Expect{DeviceID: info.ID}
	if id, err := parseID(info.UUID); err == nil {
		want.Device = id // which no device of another pool has
	} else {
		want.Pool = d.pool
	}
	dev, err := openEither(info.Path, want)
	if err != nil {
		path, found := findDevice(want)
		if !found {
			return nil, err
		}
		if dev, err = openEither(path, want); err != nil {
			return nil, err
		}
	}
	size := int64(dev.Header().Size) - cxl.HeaderSpan //nolint:gosec // checked by Open
	m, err := dev.Map(cxl.HeaderSpan, size, cxl.MapOptions{ReadOnly: true, Populate: d.prefault, HugePages: true})
	if err != nil {
		return nil, errors.Join(err, dev.Close())
	}
	opened := &device{id: info.ID, tier: info.Tier, node: info.Node, dev: dev, read: m, data: m.Bytes()}
	opened.refs.Store(1)
	return opened, nil
}

// openEither opens a device for writing, or for reading if that is all this process may do.
func openEither(path string, want cxl.Expect) (*cxl.Device, error) {
	dev, err := cxl.Open(path, want)
	if !errors.Is(err, fs.ErrPermission) && !errors.Is(err, syscall.EROFS) {
		// Other errors pass, such as that of a header which is just being written: a device opened for reading then
		// would stay so.
		return dev, err //nolint:wrapcheck // says the path and what to do
	}
	want.ReadOnly = true
	return cxl.Open(path, want) //nolint:wrapcheck // as above
}

// findDevice looks for a device by its identity among this host's device-DAX.
func findDevice(want cxl.Expect) (path string, ok bool) {
	if want.Device == [16]byte{} {
		return "", false
	}
	infos, err := cxl.Scan(cxl.ScanOptions{})
	if err != nil {
		return "", false
	}
	for i := range infos {
		if h := infos[i].Header; h != nil && h.Device == want.Device {
			return infos[i].Path, true
		}
	}
	return "", false
}

// close gives all devices up. Those in use go when their last user is done.
func (d *devices) close() {
	d.mu.Lock()
	d.closed = true
	for _, dev := range *d.table.Swap(&map[uint64]*device{}) {
		dev.drop()
	}
	d.mu.Unlock()
	d.carrier.close()
}

// parseID reads 16 bytes in hexadecimal, with or without dashes.
func parseID(s string) (id [16]byte, err error) {
	b, err := hex.DecodeString(strings.ReplaceAll(s, "-", ""))
	if err != nil || len(b) != len(id) {
		return id, fmt.Errorf("%w: %.64q is no 128-bit id", ErrConfig, s)
	}
	copy(id[:], b)
	return id, nil
}

// device returns the device of a location, held; nil if its bytes are not to be had. A device that joined, or whose node
// came back, after the last HANDSHAKE is asked for.
func (c *Client) device(ctx context.Context, id, generation uint64) *device {
	d := c.devices.get(id, generation)
	if d != nil {
		return d
	}
	why := c.devices.wants(id, generation)
	if why == newsNone || !c.devices.due(why == newsCertain, id, generation) || !c.askDevices(ctx) {
		return nil
	}
	return c.devices.get(id, generation)
}

// failed notes that a transfer to or from a device failed. Its node may be back as another process: if it cannot be
// reached the leader is asked in the background.
func (c *Client) failed(dev *device, err error) {
	now := c.cfg.Clock()
	dev.failed(now, err)
	if dev.far.stale.Load() {
		return // who reads asks at once
	}
	if c.devices.due(false, dev.id, dev.far.generation) {
		if !c.spawn(func() { c.askDevices(c.life) }) {
			c.devices.asked()
		}
	}
}

// askEvery is how often the leader is asked again what devices there are when the last answer was news. While there is none
// the pause grows up to askMost: a node that comes back is found that late, and many clients of one that stays away cost
// the leader little.
const (
	askEvery = 100 * time.Millisecond
	askMost  = time.Second
)

// due reports whether it is time to ask what devices there are: who gets true calls askDevices. A generation that nobody has
// told of is asked for at once, by all who wait for it together, and from then on as all else is.
func (d *devices) due(certain bool, id, generation uint64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.clock()
	if certain {
		certain = d.busy > 0 || d.sure[id] != generation
		d.sure[id] = generation
	}
	if !certain && now < d.next {
		return false
	}
	d.wait(now, max(d.pause, askEvery))
	d.busy++
	return true
}

// wait has nobody ask for a while, of which chance takes up to half: what has many clients ask comes to all of them at once.
// d.mu is held.
func (d *devices) wait(now int64, pause time.Duration) {
	d.pause = pause
	d.next = now + int64(pause/2+rand.N(pause/2)) //nolint:gosec // no secret
}

// asked takes note that who got true from due has asked.
func (d *devices) asked() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.busy--
}

// heard takes note of an answer.
func (d *devices) heard(news bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	pause := askEvery
	if !news {
		pause = min(2*max(d.pause, askEvery), askMost)
	}
	d.wait(d.clock(), pause)
}

// askDevices asks the leader what devices there are. Many who need to know share one HANDSHAKE. It reports whether there may
// be news.
func (c *Client) askDevices(ctx context.Context) bool {
	d := c.devices
	defer d.asked()
	came := c.cfg.Clock()
	ctx, cancel := context.WithTimeout(ctx, c.cfg.CallTimeout)
	defer cancel()
	select {
	case d.asking <- struct{}{}:
		defer func() { <-d.asking }()
	case <-ctx.Done():
		return false
	}
	if d.answered > came {
		return true
	}
	cn, err := c.conn(ctx)
	if err != nil {
		return false
	}
	req := c.handshakeRequest(cn.sess.Load())
	req.DevicesOnly = true
	reply, sentAt, err := c.sendHandshake(ctx, cn, req)
	if err != nil {
		return false
	}
	d.answered = sentAt
	d.heard(d.learn(reply.Pool, reply.Devices))
	return true
}
