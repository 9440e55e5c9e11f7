package cxl

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// ClaimState says what is known of the server named by a claim.
type ClaimState uint8

const (
	// ClaimNone says that nobody claims the device.
	ClaimNone ClaimState = iota
	// ClaimAlive says that the claimant runs on this host.
	ClaimAlive
	// ClaimDead says that the claimant is gone for certain.
	ClaimDead
	// ClaimUnknown says that the claimant is out of sight: on another host or in another pid namespace.
	ClaimUnknown
)

// String gives the state's name: none, alive, dead or unknown.
func (s ClaimState) String() string {
	switch s {
	case ClaimNone:
		return "none"
	case ClaimAlive:
		return "alive"
	case ClaimDead:
		return "dead"
	case ClaimUnknown:
	}
	return "unknown"
}

// Info is what [Inspect] found.
type Info struct {
	Path     string
	Kind     Kind
	Size     int64 // bytes of the medium
	Align    int64 // granularity of mappings in bytes
	NUMANode int   // of a device-DAX, -1 if unknown
	Volatile bool  // as the header says, or as the kernel does where there is no header

	Header    *Header // nil if there is none that can be read
	HeaderErr error   // why the device cannot be opened: ErrNoHeader, ErrForeignHeader, ErrCorruptHeader and so on
	Torn      bool    // one copy of the header is out of date or damaged; the next owner repairs it
	Lost      bool    // volatile, and bound to another boot of this host
	Claim     ClaimState

	slot int
}

// Inspect looks at a device without writing to it, nor locking it. The error says that the path cannot be examined at
// all; what is wrong with its header is in [Info.HeaderErr].
func Inspect(path string) (*Info, error) {
	f, m, err := openPath(path, true)
	if err != nil {
		return nil, err
	}
	info := inspect(f, m)
	if err := f.Close(); err != nil {
		return nil, fmt.Errorf("cxl: inspect: %w", err)
	}
	return &info, nil
}

// inspect reads the header of an open device.
func inspect(f *os.File, m medium) Info {
	info := Info{Path: f.Name(), Kind: m.kind, Size: m.size, Align: m.align, NUMANode: m.numa, Volatile: m.volatile}
	b, err := readStart(f, m, headerBytes)
	if err != nil {
		info.HeaderErr = err
		return info
	}
	s, err := decodeSlots(b)
	if isAny(err, ErrNoHeader, ErrForeignHeader) {
		err = foreignOrBlank(f, m)
	}
	if err != nil {
		info.HeaderErr = err
		return info
	}
	h := s.header
	info.Header, info.Torn, info.slot, info.Volatile = &h, s.torn, s.which, h.Volatile
	info.HeaderErr = checkHeader(h, m)
	info.Claim = judgeClaim(h.Claim, m.kind)
	if boot, err := BootID(); err == nil && h.Volatile && h.BootID != boot {
		// Memory that another host powers keeps its bytes through a restart of this one: its owner knows.
		info.Lost = m.kind != DeviceDAX || h.Claim.Host == HostID() || h.Claim.Host == [16]byte{}
	}
	return info
}

// checkHeader refuses values that no Format writes.
func checkHeader(h Header, m medium) error {
	switch {
	case h.Generation == 0 || h.Size < HeaderSpan || h.Size > 1<<62:
		return fmt.Errorf("%w: generation %d, size %d", ErrCorruptHeader, h.Generation, h.Size)
	case int64(h.Size) > m.size:
		return fmt.Errorf("%w: the header says %d bytes, the medium has %d", ErrTruncated, h.Size, m.size)
	}
	return nil
}

// foreignOrBlank tells a blank header span from one that holds something else.
func foreignOrBlank(f *os.File, m medium) error {
	b, err := readStart(f, m, HeaderSpan)
	if err != nil {
		return err
	}
	if allZero(b) {
		return ErrNoHeader
	}
	return &ForeignError{
		Path: f.Name(), Found: describe(b),
		Hint: "correct the path; or, if nothing of it is needed any more, format it with force",
	}
}

// readStart reads the first n bytes of a device, fewer if a file is shorter.
func readStart(f *os.File, m medium, n int64) ([]byte, error) {
	b := make([]byte, min(n, m.size))
	if m.kind != DeviceDAX {
		got, err := f.ReadAt(b, 0)
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, fmt.Errorf("cxl: read %s: %w", f.Name(), err)
		}
		return b[:got], nil
	}
	// A device-DAX has no read(2). Its lines may be stale if another host wrote them.
	s, err := mapSpan(f, m, 0, int64(len(b)), false)
	if err != nil {
		return nil, err
	}
	err = Guard(func() {
		Invalidate(s.data)
		copy(b, s.data)
	})
	return b, errors.Join(err, s.unmap())
}

// judgeClaim finds out whether a claimant can still be there.
func judgeClaim(c Claim, kind Kind) ClaimState {
	boot, err := BootID()
	switch ns := PIDNamespace(); {
	case c == Claim{}:
		return ClaimNone
	case err != nil:
		return ClaimUnknown
	case c.Boot == boot && ns != 0 && c.PIDNamespace == ns:
		if ProcessDead(int(c.PID), c.Start) {
			return ClaimDead
		}
		return ClaimAlive
	case c.Boot == boot:
		return ClaimUnknown
	case kind == TmpFS || kind == MemFD:
		return ClaimDead // only one host ever reaches it, and that host has restarted
	case c.Host != [16]byte{} && c.Host == HostID():
		return ClaimDead // this machine has restarted since
	}
	return ClaimUnknown
}

// ScanOptions says where [Scan] looks.
type ScanOptions struct {
	Sys   string   // where sysfs is mounted; empty: /sys
	Dev   string   // where device nodes are; empty: /dev
	Globs []string // patterns (path/filepath.Match) of files that may be devices
}

// Scan finds the device-DAX of this host and the files that match the patterns, in that order, each sorted by name. It
// only reads. A device that cannot be examined is listed with the reason in [Info.HeaderErr]. The error reports a
// malformed pattern or an unreadable sysfs.
func Scan(opts ScanOptions) ([]Info, error) {
	if opts.Sys == "" {
		opts.Sys = sysRoot
	}
	if opts.Dev == "" {
		opts.Dev = "/dev"
	}
	found, err := scanDAX(opts.Sys, opts.Dev)
	if err != nil {
		return nil, err
	}
	for _, pattern := range opts.Globs {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return nil, fmt.Errorf("cxl: scan %q: %w", pattern, err)
		}
		for _, path := range paths {
			found = append(found, inspectOr(path, Info{Path: path, NUMANode: -1}))
		}
	}
	return found, nil
}

// scanDAX lists the device-DAX that sysfs below sys knows, with nodes below dev.
func scanDAX(sys, dev string) ([]Info, error) {
	bus := filepath.Join(sys, "bus/dax/devices")
	entries, err := os.ReadDir(bus)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // a kernel without device-DAX
	}
	if err != nil {
		return nil, fmt.Errorf("cxl: scan: %w", err)
	}
	var found []Info
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "dax") {
			continue
		}
		path := filepath.Join(dev, e.Name())
		dir, err := filepath.EvalSymlinks(filepath.Join(bus, e.Name()))
		if err != nil {
			continue // it went away while we looked
		}
		m, err := readDAX(dir)
		if err != nil {
			found = append(found, Info{Path: path, Kind: DeviceDAX, NUMANode: -1, HeaderErr: err})
			continue
		}
		if driver, err := filepath.EvalSymlinks(filepath.Join(dir, "driver")); err == nil && filepath.Base(driver) == "kmem" {
			continue // it was given to the system as ordinary memory
		}
		found = append(found, inspectOr(path, Info{
			Path: path, Kind: DeviceDAX, Size: m.size, Align: m.align,
			Volatile: m.volatile, NUMANode: m.numa,
		}))
	}
	return found, nil
}

// inspectOr inspects a path, or gives what is known of it anyway and the reason.
func inspectOr(path string, known Info) Info {
	info, err := Inspect(path)
	if err != nil {
		known.HeaderErr = err
		return known
	}
	return *info
}
