package cxl

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Kind is what a device is made of.
type Kind uint8

const (
	// KindUnknown is the zero value; no device has it.
	KindUnknown Kind = iota
	// DeviceDAX is a character device /dev/daxX.Y, memory without a file system.
	DeviceDAX
	// FSDAX is a file whose pages are the memory itself, on a file system mounted with dax.
	FSDAX
	// TmpFS is a file in tmpfs, ramfs or hugetlbfs.
	TmpFS
	// File is a regular file behind the page cache.
	File
	// MemFD is an anonymous file of a process.
	MemFD
)

// kindNames are the names shown to people and in metrics.
var kindNames = [...]string{"unknown", "device-dax", "fsdax", "tmpfs", "file", "memfd"}

// String gives the kind's name: device-dax, fsdax, tmpfs, file or memfd.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return kindNames[KindUnknown]
}

// Volatile reports whether bytes of this kind are lost with the host's power. A device-DAX counts as volatile here;
// what the kernel says of a particular one is in [Info.Volatile].
func (k Kind) Volatile() bool { return k != FSDAX && k != File }

// medium is what is known of an open path before its header is read.
type medium struct {
	kind     Kind
	size     int64 // bytes of the medium
	align    int64 // granularity of mmap offsets and lengths, in bytes
	volatile bool
	numa     int // NUMA node of a device-DAX, -1 if unknown
}

// pageSize is the host's page size, the least alignment of a mapping.
var pageSize = int64(os.Getpagesize())

// defaultDAXAlign is assumed where an old kernel does not export a device's alignment: its own default.
const defaultDAXAlign = 2 << 20

// sysRoot is where sysfs is mounted.
const sysRoot = "/sys"

// probe finds out what an open file is. It reads no content of it.
func probe(f *os.File) (medium, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return medium{}, fmt.Errorf("cxl: stat %s: %w", f.Name(), err)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFCHR:
		return probeDAX(sysRoot, f.Name(), unix.Major(st.Rdev), unix.Minor(st.Rdev))
	case unix.S_IFREG:
		return probeFile(f, st.Size)
	}
	return medium{}, fmt.Errorf("cxl: %s: %w", f.Name(), ErrNotDevice)
}

// probeFile tells the kinds of regular file apart by the file system under them.
func probeFile(f *os.File, size int64) (medium, error) {
	fd := int(f.Fd())
	m := medium{kind: File, size: size, align: pageSize, numa: -1}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return medium{}, fmt.Errorf("cxl: statfs %s: %w", f.Name(), err)
	}
	switch uint32(fs.Type) { //nolint:gosec // magics are 32 bits wide, sign-extended on some architectures
	case unix.TMPFS_MAGIC, unix.RAMFS_MAGIC:
		m.kind = TmpFS
	case unix.HUGETLBFS_MAGIC:
		m.kind, m.align = TmpFS, fs.Bsize
	default:
		var sx unix.Statx_t
		err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, 0, &sx)
		if err == nil && sx.Attributes&unix.STATX_ATTR_DAX != 0 {
			m.kind = FSDAX
		}
	}
	if m.kind == TmpFS {
		// An anonymous file lies in an internal tmpfs; only its name in /proc tells it from a file with a path.
		if link, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd)); err == nil && strings.HasPrefix(link, "/memfd:") {
			m.kind = MemFD
		}
	}
	m.volatile = m.kind.Volatile()
	return m, nil
}

// probeDAX reads the attributes of the character device major:minor from sysfs below root.
func probeDAX(root, path string, major, minor uint32) (medium, error) {
	dir, err := filepath.EvalSymlinks(filepath.Join(root, "dev/char", fmt.Sprintf("%d:%d", major, minor)))
	if err != nil {
		return medium{}, fmt.Errorf("cxl: %s: %w: no entry in sysfs: %w", path, ErrNotDevice, err)
	}
	subsystem, err := filepath.EvalSymlinks(filepath.Join(dir, "subsystem"))
	if err != nil || filepath.Base(subsystem) != "dax" {
		return medium{}, fmt.Errorf("cxl: %s: %w: it is not of the dax subsystem", path, ErrNotDevice)
	}
	return readDAX(dir)
}

// readDAX reads a device-DAX's attributes from its (symlink-free) sysfs directory.
func readDAX(dir string) (medium, error) {
	m := medium{kind: DeviceDAX, align: defaultDAXAlign, volatile: !underNVDIMM(dir), numa: -1}
	var err error
	if m.size, err = readNumber(filepath.Join(dir, "size")); err != nil {
		return medium{}, err
	}
	for _, name := range []string{"align", "dax_region/align", "../dax_region/align"} {
		v, err := readNumber(filepath.Join(dir, name))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return medium{}, err
		}
		if v < pageSize || v&(v-1) != 0 {
			return medium{}, fmt.Errorf("cxl: %s says %d: want a power of two of at least a page", filepath.Join(dir, name), v)
		}
		m.align = v
		break
	}
	for _, name := range []string{"target_node", "numa_node"} {
		if v, err := readNumber(filepath.Join(dir, name)); err == nil && v >= 0 {
			m.numa = int(v)
			break
		}
	}
	return m, nil
}

// underNVDIMM reports whether a device's sysfs path has an NVDIMM bus above it: its memory keeps its bytes.
func underNVDIMM(dir string) bool {
	for part := range strings.SplitSeq(dir, "/") {
		if digits, ok := strings.CutPrefix(part, "ndbus"); ok && digits != "" && strings.Trim(digits, "0123456789") == "" {
			return true
		}
	}
	return false
}

// sysfsBytes bounds what is read of one attribute; a page is what the kernel itself allows.
const sysfsBytes = 4096

// readNumber reads a sysfs attribute that holds one number, decimal or 0x-hexadecimal.
func readNumber(path string) (int64, error) {
	f, err := os.Open(path) //nolint:gosec // a path below sysfs
	if err != nil {
		return 0, fmt.Errorf("cxl: read attribute: %w", err)
	}
	defer f.Close() //nolint:errcheck // opened for reading
	b := make([]byte, sysfsBytes)
	n, err := f.Read(b)
	if err != nil {
		return 0, fmt.Errorf("cxl: read %s: %w", path, err)
	}
	v, err := strconv.ParseInt(strings.TrimSpace(string(b[:n])), 0, 64)
	if err != nil {
		return 0, fmt.Errorf("cxl: %s: %w", path, err)
	}
	return v, nil
}

// isAny reports whether err matches one of targets.
func isAny(err error, targets ...error) bool {
	for _, t := range targets {
		if errors.Is(err, t) {
			return true
		}
	}
	return false
}
