package cxl

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// fakeSysfs writes files below a directory; a value that starts with -> is a symbolic link.
func fakeSysfs(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, value := range files {
		path := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		if to, ok := strings.CutPrefix(value, "->"); ok {
			require.NoError(t, os.Symlink(to, path))
			continue
		}
		require.NoError(t, os.WriteFile(path, []byte(value), 0o600))
	}
	return root
}

const (
	pmemDir = "devices/LNXSYSTM:00/ACPI0012:00/ndbus0/region0/dax0.0/dax0.0"
	cxlDir  = "devices/platform/ACPI0017:00/root0/decoder0.0/region1/dax_region1/dax1.0"
	oldDir  = "devices/platform/hmem.0/dax2.0"
	kmemDir = "devices/platform/hmem.1/dax3.0"
)

// sysfs is laid out as Linux does it.
func sysfs(t *testing.T) string {
	t.Helper()
	return fakeSysfs(t, map[string]string{
		pmemDir + "/size": "1073741824\n", pmemDir + "/align": "2097152\n", pmemDir + "/numa_node": "1\n",
		pmemDir + "/target_node": "-1\n", pmemDir + "/subsystem": "->../../../../../../../bus/dax",
		cxlDir + "/size": "0x40000000\n", cxlDir + "/align": "1073741824\n", cxlDir + "/target_node": "2\n",
		cxlDir + "/subsystem": "->../../../../../../../../bus/dax",
		oldDir + "/size":      "4194304\n", oldDir + "/dax_region/align": "4096\n",
		oldDir + "/subsystem": "->../../../../bus/dax",
		kmemDir + "/size":     "4194304\n", kmemDir + "/driver": "->../../../../bus/dax/drivers/kmem",
		"bus/dax/drivers/kmem/bind": "", "bus/dax/devices/dax0.0": "->../../../" + pmemDir,
		"bus/dax/devices/dax1.0": "->../../../" + cxlDir, "bus/dax/devices/dax2.0": "->../../../" + oldDir,
		"bus/dax/devices/dax3.0": "->../../../" + kmemDir,
		"bus/tty/name":           "", "devices/tty0/subsystem": "->../../bus/tty",
		"dev/char/252:0": "->../../" + pmemDir, "dev/char/252:1": "->../../" + cxlDir,
		"dev/char/252:2": "->../../" + oldDir, "dev/char/4:0": "->../../devices/tty0",
	})
}

func TestProbeDAX(t *testing.T) {
	root := sysfs(t)
	for minor, want := range []medium{
		{kind: DeviceDAX, size: 1 << 30, align: 2 << 20, volatile: false, numa: 1},
		{kind: DeviceDAX, size: 1 << 30, align: 1 << 30, volatile: true, numa: 2},
		{kind: DeviceDAX, size: 4 << 20, align: 4096, volatile: true, numa: -1},
	} {
		got, err := probeDAX(root, "/dev/dax", 252, uint32(minor))
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	for _, minor := range []uint32{0, 9} {
		_, err := probeDAX(root, "/dev/tty0", 4, minor)
		require.ErrorIs(t, err, ErrNotDevice)
	}
}

func TestReadDAXRefusesNonsense(t *testing.T) {
	for name, files := range map[string]map[string]string{
		"no size":       {"d/align": "4096"},
		"empty size":    {"d/size": "", "d/align": "4096"},
		"size of words": {"d/size": "big", "d/align": "4096"},
		"odd align":     {"d/size": "4096", "d/align": "5000"},
		"zero align":    {"d/size": "4096", "d/align": "0"},
	} {
		_, err := readDAX(filepath.Join(fakeSysfs(t, files), "d"))
		require.Error(t, err, name)
	}
	m, err := readDAX(filepath.Join(fakeSysfs(t, map[string]string{"d/size": "4194304"}), "d"))
	require.NoError(t, err)
	require.EqualValues(t, defaultDAXAlign, m.align, "an old kernel's default")
}

func TestScan(t *testing.T) {
	root, dev := sysfs(t), t.TempDir()
	pool := onTmpFS(t)
	require.NoError(t, Format(pool, testOptions()))
	blank := filepath.Join(dev, "blank.pool")
	require.NoError(t, os.WriteFile(blank, make([]byte, 4096), 0o600))
	found, err := Scan(ScanOptions{Sys: root, Dev: dev, Globs: []string{pool, filepath.Join(dev, "*.pool")}})
	require.NoError(t, err)
	require.Len(t, found, 5, "kmem's is ordinary memory now")
	for i, want := range []struct {
		path string
		size int64
		err  error
	}{
		{filepath.Join(dev, "dax0.0"), 1 << 30, os.ErrNotExist},
		{filepath.Join(dev, "dax1.0"), 1 << 30, os.ErrNotExist},
		{filepath.Join(dev, "dax2.0"), 4 << 20, os.ErrNotExist},
		{pool, testSize, nil},
		{blank, 4096, ErrNoHeader},
	} {
		require.Equal(t, want.path, found[i].Path)
		require.Equal(t, want.size, found[i].Size)
		if want.err != nil {
			require.ErrorIs(t, found[i].HeaderErr, want.err)
		} else {
			require.Equal(t, testDevice, found[i].Header.Device)
		}
	}
	_, err = Scan(ScanOptions{Sys: t.TempDir(), Globs: []string{"["}})
	require.ErrorIs(t, err, filepath.ErrBadPattern)
	found, err = Scan(ScanOptions{Sys: t.TempDir()})
	require.NoError(t, err)
	require.Empty(t, found, "a kernel without device-DAX")
}
