package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"larder/cxl"
	"larder/protocol"
)

// CXL is a device of CXL memory, or a file in its place.
type CXL struct {
	Path      string
	Size      uint64 // bytes, header included; 0 = all of an existing device or file
	Coherence string // hardware or none
	Force     bool   // take the device though it holds something else, which is lost, or is claimed by another host
}

// cxlMedium is CXL memory that this node has claimed.
type cxlMedium struct {
	mapped
	cfg         CXL
	prefault    bool
	uuid, pool  [16]byte
	incarnation uint64
	info        *cxl.Info
	blank       bool // there is no device of ours yet
}

func (d *cxlMedium) open() ([16]byte, error) {
	path, err := filepath.Abs(d.cfg.Path)
	if err != nil {
		return d.uuid, fmt.Errorf("%w: cxl %s: %w", ErrMedium, d.cfg.Path, err)
	}
	d.cfg.Path = path
	d.info, err = cxl.Inspect(path)
	switch {
	case err != nil && d.cfg.Size == 0:
		return d.uuid, fmt.Errorf("%w: cxl %s: %w", ErrMedium, path, err)
	case err != nil || errors.Is(d.info.HeaderErr, cxl.ErrNoHeader), d.info.HeaderErr != nil && d.cfg.Force:
		d.uuid, d.blank = newUUID(), true
		return d.uuid, nil //nolint:nilerr // it is to be made
	case d.info.HeaderErr != nil:
		return d.uuid, fmt.Errorf("%w: %w", ErrMedium, d.info.HeaderErr)
	}
	d.uuid, d.blank = d.info.Header.Device, false
	return d.uuid, nil
}

func (d *cxlMedium) prepare(pool [16]byte, incarnation uint64) (err error) {
	d.pool, d.incarnation = pool, incarnation
	if !d.blank && d.info.Header.Pool != pool {
		if !d.cfg.Force {
			return fmt.Errorf("%w: cxl %s: %w", ErrMedium, d.cfg.Path, errPool)
		}
		d.blank = true // under the uuid that the session has been opened with
	}
	if d.blank {
		err = d.format()
	} else {
		d.dev, err = cxl.Open(d.cfg.Path, cxl.Expect{Pool: pool, Device: d.uuid, Claim: true, Force: d.cfg.Force})
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrMedium, err)
	}
	return d.mapAll(d.prefault, 0)
}

// format makes the device. Its number and generation come with ATTACH.
func (d *cxlMedium) format() error {
	coherence, err := cxl.ParseCoherence(d.cfg.Coherence)
	if err != nil {
		return err //nolint:wrapcheck // the caller wraps
	}
	d.dev, err = cxl.Create(d.cfg.Path, cxl.Options{
		Pool: d.pool, Device: d.uuid, Generation: random(), Incarnation: d.incarnation, Size: int64(d.cfg.Size), //nolint:gosec // checked by Config
		Coherence: coherence, Force: d.cfg.Force,
	})
	return err //nolint:wrapcheck // the caller wraps
}

func (d *cxlMedium) describe() protocol.AttachRequest {
	req := d.mapped.describe()
	req.Tier = "cxl"
	if d.info != nil && d.info.Kind == cxl.DeviceDAX && d.info.NUMANode >= 0 {
		req.NUMA = uint64(d.info.NUMANode) + 1
	}
	if d.dev.Header().DeviceID == 0 {
		req.Generation = 0 // the one that it was made with is nobody's
	}
	return req
}

func (d *cxlMedium) show(_ context.Context, id, generation uint64, _ bool) error {
	return d.dev.Assign(id, generation, d.incarnation) //nolint:wrapcheck // says what to do
}

func (*cxlMedium) keeps() bool { return true }

// exposed is a device of the masters of this host: they have formatted it, claim it, and give it its generations.
type exposed struct {
	mapped
	path string
	uuid [16]byte
	seen uint64 // the generation that was described
}

// errNotYet says that a device is not there yet, which passes.
var errNotYet = errors.New("node: the device is not there yet")

func (d *exposed) open() ([16]byte, error) {
	info, err := cxl.Inspect(d.path)
	if err == nil {
		err = info.HeaderErr
	}
	if err != nil {
		return d.uuid, fmt.Errorf("%w: %w", errNotYet, err)
	}
	d.uuid = info.Header.Device
	return d.uuid, nil
}

func (d *exposed) prepare([16]byte, uint64) (err error) {
	if d.dev, err = cxl.Open(d.path, cxl.Expect{Device: d.uuid}); err != nil {
		return fmt.Errorf("%w: %w", errNotYet, err)
	}
	return d.mapAll(false, 0)
}

// describe tells the generation that is in force: the header's copy in this process does not follow.
func (d *exposed) describe() protocol.AttachRequest {
	req := d.mapped.describe()
	d.seen = d.dev.Generation()
	req.Generation, req.Expose = d.seen, true
	return req
}

// show waits for the masters to show it.
func (d *exposed) show(_ context.Context, _, generation uint64, _ bool) error {
	if d.dev.Generation() != generation {
		return fmt.Errorf("%w: its header shows another generation than the leader says", errNotYet)
	}
	return nil
}

// sound implements medium: a device that was formatted anew is another inode.
func (d *exposed) sound() error {
	if d.dev.Generation() != d.seen {
		return fmt.Errorf("%w: its generation has changed", errNotYet)
	}
	info, err := cxl.Inspect(d.path)
	if err == nil {
		err = info.HeaderErr
	}
	if err != nil || info.Header.Device != d.uuid || info.Header.Generation != d.seen {
		return fmt.Errorf("%w: it was replaced: %w", errNotYet, err)
	}
	return nil
}

func (*exposed) keeps() bool { return true }
