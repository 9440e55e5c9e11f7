package client

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"larder/cxl"
	"larder/protocol"
)

// reopenEvery is how often, in ns, a device whose generation does not match is opened again: its file may have been
// replaced, or its header not yet been written.
const reopenEvery = 50e6

// device is an open device with all of its data mapped for reading. Regions are mapped for writing on their own, so
// that taking one away never disturbs a reader.
type device struct {
	id   uint64
	dev  *cxl.Device
	read *cxl.Mapping
	data []byte       // everything behind the header
	refs atomic.Int64 // users, and one while it is in the table
}

// generation is the device's present one; 0 if its bytes may be lost.
func (d *device) generation() uint64 { return d.dev.Generation() }

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

	table atomic.Pointer[map[uint64]*device]

	mu     sync.Mutex
	pool   [16]byte
	infos  map[uint64]protocol.Device
	tried  map[uint64]int64 // when each was last opened
	closed bool
}

func newDevices(cfg *Config) *devices {
	d := &devices{
		prefault: cfg.Prefault, clock: cfg.Clock, log: cfg.Logger,
		infos: make(map[uint64]protocol.Device), tried: make(map[uint64]int64),
	}
	d.table.Store(&map[uint64]*device{})
	return d
}

// learn keeps what a master said of devices.
func (d *devices) learn(pool string, list []protocol.Device) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if id, err := parseID(pool); err == nil {
		d.pool = id
	}
	for i := range list {
		d.infos[list[i].ID] = list[i]
	}
}

func (d *devices) known(id uint64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, ok := d.infos[id]
	return ok
}

// get returns the device with this id and generation, held for the caller; nil if there is none here whose bytes are
// of that generation. It opens and maps the device when it must.
func (d *devices) get(id, generation uint64) *device {
	if dev := (*d.table.Load())[id]; dev != nil && dev.generation() == generation && dev.hold() {
		return dev
	}
	dev, err := d.reopen(id, generation)
	if err != nil {
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

// open opens and maps a device: at the path that the master knows it by, or, on another host, wherever a device with
// its identity is.
func (d *devices) open(info *protocol.Device) (*device, error) {
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
	opened := &device{id: info.ID, dev: dev, read: m, data: m.Bytes()}
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
	defer d.mu.Unlock()
	d.closed = true
	for _, dev := range *d.table.Swap(&map[uint64]*device{}) {
		dev.drop()
	}
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

// device returns the device of a location, held; nil if its bytes are not to be had. A device that joined after the
// last HANDSHAKE is asked for.
func (c *Client) device(ctx context.Context, id, generation uint64) *device {
	if d := c.devices.get(id, generation); d != nil || c.devices.known(id) {
		return d
	}
	cn, err := c.conn(ctx)
	if err != nil {
		return nil
	}
	reply, _, err := c.sendHandshake(ctx, cn, c.handshakeRequest(cn.sess.Load()))
	if err != nil {
		return nil
	}
	c.devices.learn(reply.Pool, reply.Devices)
	return c.devices.get(id, generation)
}
