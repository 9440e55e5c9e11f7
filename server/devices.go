package server

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"larder/cxl"
	"larder/meta"
	"larder/protocol"
)

// deviceRetry is how long a leader waits before it tries a device again that it could not take into service.
const deviceRetry = 2 * time.Second

func hexID(id [16]byte) string { return hex.EncodeToString(id[:]) }

// devices takes the configured devices into service while this member leads, and holds their claims. A generation is
// in the log before it is in a header, so that no two servers ever give out the same one.
type devices struct {
	s    *Server
	host string
	boot string

	mu   sync.Mutex
	open map[string]*cxl.Device // by configured path
	errs map[string]error

	ready sync.Map // meta.DeviceID -> the generation that its header was seen to have
}

// isReady implements MasterConfig.DeviceReady. What lies on other hosts cannot be seen from here.
func (d *devices) isReady(id meta.DeviceID, node string, generation uint64) bool {
	seen, ok := d.ready.Load(id)
	return ok && seen == generation || node != d.host
}

// namesake is the uuid of the device that a pool has its id from: the first of the masters' own, whose uuids all begin
// alike, or, if they have none, the first of a node's. It is "" if there is none.
func namesake(infos []meta.DeviceInfo) string {
	best := ""
	for i := range infos {
		switch d := &infos[i]; {
		case len(d.UUID) != uuidDigits:
		case d.Home == "":
			return d.UUID
		case best == "":
			best = d.UUID
		}
	}
	return best
}

// poolID is what the headers of this pool's devices carry: the first half of the uuid of each of them, which is random
// and the same for all, and the cluster's id. A pool without devices has none yet.
func (s *Server) poolID() (id [16]byte, ok bool) {
	if raw, err := hex.DecodeString(namesake(s.master.Devices())); err == nil && len(raw) == len(id) {
		copy(id[:8], raw[:8])
		ok = true
	}
	if !ok {
		r := s.master.randomID()
		copy(id[:8], r[:8])
	}
	binary.LittleEndian.PutUint64(id[8:], s.clusterID)
	return id, ok
}

// serve takes all configured devices into service. It is called by the leader, and returns the errors of those that
// could not be.
func (d *devices) serve(ctx context.Context) error {
	var errs []error
	for _, cfg := range d.s.cfg.Pool {
		err := d.serveOne(ctx, cfg)
		if err == nil {
			d.noteReady(cfg.Path)
		}
		if err != nil {
			err = fmt.Errorf("pool device %s: %w", cfg.Path, err)
			errs = append(errs, err)
		}
		d.mu.Lock()
		d.errs[cfg.Path] = err
		d.mu.Unlock()
	}
	return errors.Join(errs...)
}

// close gives up the claims: another member leads, or this one stops.
func (d *devices) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for path, dev := range d.open {
		if strings.HasPrefix(path, cxl.MemFDPrefix) && d.s.ctx.Err() == nil {
			continue // its bytes are gone with its last descriptor
		}
		if err := dev.Close(); err != nil {
			d.s.logger.Warn("closing a pool device failed", slog.String("path", path), slog.Any("error", err))
		}
		delete(d.open, path)
	}
}

// problem returns why a configured device is not in service, nil if all are.
func (d *devices) problem() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	errs := make([]error, 0, len(d.errs))
	for _, err := range d.errs {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// registered finds a device of this host in the index.
func (d *devices) registered(match func(*meta.DeviceInfo) bool) *meta.DeviceInfo {
	for _, x := range d.s.master.Devices() {
		if x.Node == d.host && x.Home == "" && match(&x) {
			return &x
		}
	}
	return nil
}

// noteReady takes note of the generation that a device in service shows.
func (d *devices) noteReady(path string) {
	d.mu.Lock()
	held := d.open[path]
	d.mu.Unlock()
	if held == nil {
		return // claimed by another server: see reopen
	}
	h := held.Header()
	uuid := hexID(h.Device)
	if x := d.registered(func(x *meta.DeviceInfo) bool { return x.UUID == uuid }); x != nil {
		d.ready.Store(x.ID, held.Generation())
	}
}

// serveOne takes one device into service.
func (d *devices) serveOne(ctx context.Context, cfg DeviceConfig) error {
	d.mu.Lock()
	held := d.open[cfg.Path]
	d.mu.Unlock()
	path, memfd := cfg.Path, strings.HasPrefix(cfg.Path, cxl.MemFDPrefix)
	if !memfd {
		abs, err := filepath.Abs(cfg.Path)
		if err != nil {
			return fmt.Errorf("find its absolute path: %w", err)
		}
		path = abs
	}
	if held != nil && d.sound(held, path, memfd) {
		return nil
	}
	if memfd {
		return d.create(ctx, cfg, path, d.registered(func(x *meta.DeviceInfo) bool {
			return strings.HasPrefix(x.Path, "/proc/")
		}))
	}
	info, err := cxl.Inspect(path)
	byPath := d.registered(func(x *meta.DeviceInfo) bool { return x.Path == path })
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return d.create(ctx, cfg, path, byPath)
	case err != nil:
		return err
	case errors.Is(info.HeaderErr, cxl.ErrNoHeader):
		return d.create(ctx, cfg, path, byPath)
	case errors.Is(info.HeaderErr, cxl.ErrTruncated) && info.Header != nil && byPath != nil && d.ours(info.Header):
		// The bytes are lost; the same file is made whole again under a new generation.
		cfg.Force = cfg.Force || byPath.Generation != 0
		return d.create(ctx, cfg, path, byPath)
	case info.HeaderErr != nil || !d.ours(info.Header):
		if cfg.Force {
			return d.discard(ctx, cfg, path, byPath, info)
		}
		if info.HeaderErr == nil {
			return &cxl.ForeignError{
				Path: path, Found: fmt.Sprintf("a device of pool %x", info.Header.Pool),
				Hint: "name another path, or add force to discard what it holds",
			}
		}
		return info.HeaderErr
	}
	return d.reopen(ctx, cfg, path, info)
}

// sound reports whether an open device is still what the index takes it for, and all there.
func (d *devices) sound(held *cxl.Device, path string, memfd bool) bool {
	if memfd {
		path = held.SharePath()
	}
	info, err := cxl.Inspect(path)
	if err != nil || info.HeaderErr != nil || info.Lost || !memfd && held.VerifyClaim() != nil {
		return false
	}
	h := held.Header()
	x := d.registered(func(x *meta.DeviceInfo) bool { return x.UUID == hexID(h.Device) })
	return x != nil && info.Header.Device == h.Device && info.Header.Generation == x.Generation &&
		h.Generation == x.Generation
}

// ours reports whether a header belongs to this pool.
func (d *devices) ours(h *cxl.Header) bool {
	id, known := d.s.poolID()
	return known && h.Pool == id
}

// create formats a device that is blank, or whose content is given up.
func (d *devices) create(ctx context.Context, cfg DeviceConfig, path string, old *meta.DeviceInfo) error {
	opts, err := d.options(cfg)
	if err != nil {
		return err
	}
	if strings.HasPrefix(path, cxl.MemFDPrefix) {
		return d.createMemFD(ctx, cfg, path, opts, old)
	}
	fenced := true // what the index never knew, nobody was given
	if old != nil {
		if fenced, err = replaceFile(path); err == nil && !fenced {
			fenced, err = d.fencedInPlace(old, cfg)
		}
		if err != nil {
			return err
		}
	}
	return d.format(ctx, cfg, path, opts, old, fenced)
}

// format logs a device, as a new one or, if the index knows it, as the same with a new generation, and formats it.
func (d *devices) format(
	ctx context.Context, cfg DeviceConfig, path string, opts cxl.Options, old *meta.DeviceInfo, fenced bool,
) error {
	if old != nil {
		raw, err := hex.DecodeString(old.UUID)
		if err != nil || len(raw) != len(opts.Device) {
			return fmt.Errorf("its uuid %q in the index is malformed", old.UUID)
		}
		copy(opts.Device[:], raw)
		opts.DeviceID = uint64(old.ID)
		if err := d.retire(ctx, old, opts.Generation, path, opts.Size, fenced); err != nil {
			return err
		}
	} else {
		id, err := d.add(ctx, cfg, path, opts)
		if err != nil {
			return err
		}
		opts.DeviceID = id
	}
	d.letGo(cfg.Path)
	dev, err := cxl.Create(path, opts)
	if err != nil {
		return err
	}
	d.keep(cfg.Path, dev)
	d.s.logger.Info("formatted a pool device", slog.String("path", path), slog.Uint64("device", opts.DeviceID),
		slog.Int64("bytes", opts.Size))
	return nil
}

// letGo closes a device that is another inode now, or was truncated, or whose content is given up.
func (d *devices) letGo(path string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if held := d.open[path]; held != nil {
		_ = held.Close() // as above
		delete(d.open, path)
	}
}

// discard formats what an operator says is not needed any more, whatever it is, unless another server uses it. It may be
// a device of this pool that an index which was restored does not know, so a file is replaced.
func (d *devices) discard(
	ctx context.Context, cfg DeviceConfig, path string, old *meta.DeviceInfo, info *cxl.Info,
) error {
	d.letGo(cfg.Path)
	dev, err := cxl.Open(path, cxl.Expect{Claim: true, Force: true})
	if errors.Is(err, cxl.ErrClaimed) {
		return err
	}
	if dev != nil {
		if err := dev.Close(); err != nil {
			return err
		}
	}
	if cfg.Size == 0 {
		cfg.Size = Size(info.Size) &^ (64<<10 - 1) //nolint:gosec // not negative
	}
	if _, err := replaceFile(path); err != nil {
		return err
	}
	return d.create(ctx, cfg, path, old)
}

// replaceFile removes what is left of a pool file, so that what is formatted is a new inode, which no client has mapped:
// nobody who could write to the old bytes can write to the new ones. It returns false for what cannot be replaced.
func replaceFile(path string) (replaced bool, err error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("look at the pool device: %w", err)
	case !info.Mode().IsRegular():
		return false, nil
	}
	if err := os.Remove(path); err != nil {
		return false, fmt.Errorf("replace the pool file: %w", err)
	}
	return true, nil
}

// errUnfenced says why a device stays out of service after a restore.
var errUnfenced = errors.New("the index was restored, and does not know who of before still writes to this device, " +
	"which cannot be replaced as a file can: stop every client of before, on all hosts, then start once with force")

// fencedInPlace reports whether nobody of before can write to a device that cannot be replaced and whose header is gone:
// its memory was without power since the index last knew of it. If the index has been restored since, only an operator
// can say so.
func (d *devices) fencedInPlace(old *meta.DeviceInfo, cfg DeviceConfig) (bool, error) {
	if old.Generation != 0 {
		return old.Volatile && old.BootID != d.boot, nil
	}
	if !cfg.Force {
		return false, errUnfenced
	}
	return true, nil
}

// renew takes a device into service that carries this pool's header, and of which the index cannot say who may still
// write to it: it was restored and has a new incarnation, or does not know the device at all. What lies there is given
// up, and the device made a new one for everybody who has mapped it.
func (d *devices) renew(
	ctx context.Context, cfg DeviceConfig, path string, old *meta.DeviceInfo, info *cxl.Info,
) error {
	cfg.Size = Size(info.Header.Size)
	opts, err := d.options(cfg)
	if err != nil {
		return err
	}
	replaced, err := replaceFile(path)
	if err != nil {
		return err
	}
	if !replaced {
		// The header was written by whoever served the device last, whether the index knows of that or not. Nothing is left
		// of a device that this incarnation has dropped.
		dropped := old == nil && info.Header.Incarnation == d.s.master.incarnation()
		if !info.Lost && !dropped && !cfg.Force {
			return errUnfenced
		}
		opts.Force = true
	}
	return d.format(ctx, cfg, path, opts, old, true)
}

// elsewhere returns an error if the index says that a device of another host is in service, which this one, having the
// same uuid, must be.
func (d *devices) elsewhere(uuid string) error {
	for _, x := range d.s.master.Devices() {
		if x.UUID == uuid && x.Node != d.host && x.Generation != 0 {
			return fmt.Errorf("it is in service as device %d of host %s: leave it to the servers there, or drop it there first",
				x.ID, x.Node)
		}
	}
	return nil
}

// createMemFD makes anonymous memory, whose path is known only afterwards. What is not in the log yet is of no use to
// anybody, so the order does not matter here.
func (d *devices) createMemFD(
	ctx context.Context, cfg DeviceConfig, path string, opts cxl.Options, old *meta.DeviceInfo,
) error {
	if old != nil {
		raw, err := hex.DecodeString(old.UUID)
		if err != nil || len(raw) != len(opts.Device) {
			return fmt.Errorf("its uuid %q in the index is malformed", old.UUID)
		}
		copy(opts.Device[:], raw)
	}
	dev, err := cxl.Create(path, opts)
	if err != nil {
		return err
	}
	d.keep(cfg.Path, dev)
	if old != nil {
		return d.retire(ctx, old, opts.Generation, dev.SharePath(), opts.Size, true)
	}
	_, err = d.add(ctx, cfg, dev.SharePath(), opts)
	return err
}

// options are what a device is formatted with.
func (d *devices) options(cfg DeviceConfig) (cxl.Options, error) {
	coherence, err := cxl.ParseCoherence(cfg.Coherence)
	if err != nil {
		return cxl.Options{}, err
	}
	o := cxl.Options{
		Size: int64(cfg.Size), Coherence: coherence, Force: cfg.Force, Incarnation: d.s.master.incarnation(), //nolint:gosec // checked by Validate
	}
	o.Generation = d.s.master.cfg.Random() | 1
	o.Pool, _ = d.s.poolID()
	o.Device = d.s.master.randomID()
	copy(o.Device[:8], o.Pool[:8])
	if o.Size == 0 {
		if info, err := cxl.Inspect(cfg.Path); err == nil {
			o.Size = info.Size &^ (64<<10 - 1)
		}
	}
	return o, nil
}

// add logs a new device and returns its id.
func (d *devices) add(ctx context.Context, cfg DeviceConfig, path string, o cxl.Options) (uint64, error) {
	cmd := &meta.AddDevice{
		UUID: hexID(o.Device), Path: path, Node: d.host, Tier: cfg.Tier, Coherence: cfg.Coherence,
		Size: uint64(o.Size), DataOffset: cxl.HeaderSpan, Align: regionAlign, Generation: o.Generation, //nolint:gosec // not negative
		Volatile: d.volatile(path), BootID: d.boot,
	}
	result, err := d.s.do(ctx, cmd)
	if err != nil {
		return 0, err
	}
	r, err := meta.DecodeCount(result)
	return r.Count, err
}

// regionAlign is what regions are aligned to, so that clients can map them with huge pages.
const regionAlign = 64 << 10

// volatile reports whether what lies at a path is lost with the host's power; a new file's file system tells.
func (d *devices) volatile(path string) bool {
	if info, err := cxl.Inspect(path); err == nil {
		return info.Volatile
	}
	return strings.HasPrefix(path, "/proc/") || strings.HasPrefix(path, shmDir+"/")
}

// retire logs a new generation for a device whose bytes are lost. fenced says that no earlier client can reach the new
// bytes: they are of another boot, or another inode.
func (d *devices) retire(
	ctx context.Context, old *meta.DeviceInfo, generation uint64, path string, size int64, fenced bool,
) error {
	d.s.logger.Warn("the bytes of a pool device may be lost: what lay there is dropped",
		slog.String("path", path), slog.Uint64("device", uint64(old.ID)))
	_, err := d.s.do(ctx, &meta.Retire{
		Device: old.ID, Generation: generation, BootID: d.boot, Path: path, Size: uint64(size), Fenced: fenced, //nolint:gosec // not negative
	})
	return err
}

func (d *devices) keep(path string, dev *cxl.Device) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open[path] = dev
}

// reopen takes a device into service that carries this pool's header.
func (d *devices) reopen(ctx context.Context, cfg DeviceConfig, path string, info *cxl.Info) error {
	h := info.Header
	uuid := hexID(h.Device)
	x := d.registered(func(x *meta.DeviceInfo) bool { return x.UUID == uuid })
	if x == nil {
		if err := d.elsewhere(uuid); err != nil {
			return err
		}
	}
	sound := x != nil && x.Generation == h.Generation && !info.Lost && x.Path == path
	dev, err := cxl.Open(path, cxl.Expect{Pool: h.Pool, Device: h.Device, Claim: true, Force: cfg.Force})
	if errors.Is(err, cxl.ErrClaimed) && sound {
		// The member that led before still holds the claim. Nothing has to be written, so it can be had later: this is
		// tried again and again.
		d.s.logger.Debug("a pool device is still claimed by another server", slog.String("path", path))
		d.ready.Store(x.ID, x.Generation)
		return nil
	}
	if err != nil {
		return err
	}
	if x == nil || x.Generation == 0 {
		if err := dev.Close(); err != nil { // that it could be claimed says that no other server uses it
			return err
		}
		return d.renew(ctx, cfg, path, x, info)
	}
	d.mu.Lock()
	held := d.open[cfg.Path]
	d.open[cfg.Path] = dev
	d.mu.Unlock()
	if held != nil {
		_ = held.Close() // another inode than the one that is there now
	}
	if sound {
		return nil
	}
	generation := d.s.master.cfg.Random() | 1
	if err := d.retire(ctx, x, generation, path, int64(h.Size), info.Lost); err != nil { //nolint:gosec // checked by cxl
		return err
	}
	return dev.SetGeneration(generation, d.s.master.incarnation())
}

// Devices describes the devices in the index.
func (m *Master) Devices() []meta.DeviceInfo {
	m.state.RLock()
	defer m.state.RUnlock()
	return m.machine.Devices()
}

func (m *Master) incarnation() uint64 {
	m.state.RLock()
	defer m.state.RUnlock()
	return m.machine.Incarnation()
}

// do logs a command and waits for its result, without its code.
func (s *Server) do(ctx context.Context, cmd meta.Command) ([]byte, error) {
	return s.await(ctx, func(done func(protocol.Code, []byte)) error { return s.master.Do(cmd, done) })
}

// await waits for the result, without its code, of a command that start queues, as Master.Do does.
func (s *Server) await(ctx context.Context, start func(done func(protocol.Code, []byte)) error) ([]byte, error) {
	type outcome struct {
		code   protocol.Code
		result []byte
	}
	ch := make(chan outcome, 1)
	err := start(func(code protocol.Code, result []byte) { ch <- outcome{code, slices.Clone(result)} })
	if err != nil {
		return nil, err
	}
	select {
	case o := <-ch:
		switch o.code {
		case protocol.CodeOK:
			_, rest, err := meta.DecodeCode(o.result)
			return rest, err
		case protocol.CodeNotLeader, protocol.CodeUnavailable:
			f := s.master.notLeader()
			return nil, &f
		default:
			return nil, &protocol.Error{Code: o.code, Message: codeTexts[o.code]}
		}
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-s.ctx.Done():
		return nil, &protocol.Error{Code: protocol.CodeUnavailable, Message: "the server is stopping"}
	}
}
