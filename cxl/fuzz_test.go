package cxl

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzInspect opens files that begin with any bytes, as a path that somebody mistyped, or a device that another host
// has written to. The header's checksum is made right, so that its numbers are what is tested: neither looking nor
// opening panics, nor does it map what is not there.
func FuzzInspect(f *testing.F) {
	h := sampleHeader()
	h.Size, h.Volatile, h.BootID = 1<<20+HeaderSpan, false, [16]byte{}
	good, err := h.AppendBinary(nil)
	require.NoError(f, err)
	f.Add(good, good, uint32(1<<20))
	f.Add(good, []byte{}, uint32(0))
	h.Claim = Claim{}
	h.Generation++
	free, err := h.AppendBinary(nil)
	require.NoError(f, err)
	f.Add(good, free, uint32(1<<20))
	f.Add(make([]byte, HeaderSize), []byte("LARDERDV"), uint32(100))
	f.Add([]byte("\xebH\x90GRUB"), []byte{}, uint32(4096))
	path := filepath.Join(f.TempDir(), "device")
	seal := func(b []byte) []byte {
		b = append([]byte(nil), b[:min(len(b), slotStride)]...)
		if len(b) >= HeaderSize && string(b[:8]) == headerMagic {
			binary.LittleEndian.PutUint32(b[offCRC:], headerCRC(b))
		}
		return b
	}
	f.Fuzz(func(t *testing.T, a, b []byte, rest uint32) {
		require.NoError(t, os.WriteFile(path, twoSlots(seal(a), seal(b)), 0o600))
		size := HeaderSpan + int64(rest%(2<<20))
		require.NoError(t, os.Truncate(path, size))
		info, err := Inspect(path)
		require.NoError(t, err, "a file can always be looked at")
		require.Equal(t, size, info.Size)
		require.True(t, (info.Header == nil) == isAny(info.HeaderErr, ErrNoHeader, ErrForeignHeader, ErrCorruptHeader, ErrHeaderVersion) ||
			info.Header != nil, "%v", info.HeaderErr)
		d, err := Open(path, Expect{})
		if info.HeaderErr != nil {
			require.Error(t, err)
			return
		}
		if err != nil {
			return // a claim of somebody who cannot be asked, or bytes that a restart has lost
		}
		defer func() { require.NoError(t, d.Close()) }()
		held := int64(d.Header().Size)
		require.LessOrEqual(t, held, size)
		require.GreaterOrEqual(t, held, int64(HeaderSpan))
		if held == HeaderSpan {
			return
		}
		m, err := d.Map(HeaderSpan, held-HeaderSpan, MapOptions{ReadOnly: true})
		if err != nil {
			return
		}
		defer func() { require.NoError(t, m.Close()) }()
		all := make([]byte, len(m.Bytes()))
		require.NoError(t, CopyOut(all, m.Bytes()), "what is mapped is there")
	})
}

// FuzzParseStat reads any line as a process's state: the name in it may hold anything.
func FuzzParseStat(f *testing.F) {
	b, err := os.ReadFile("/proc/self/stat")
	require.NoError(f, err)
	f.Add(string(b))
	f.Add("1 (a) b) R 1 1 1 0 -1 4194560 1 0 0 0 1 1 0 0 20 0 1 0 77 1 1")
	f.Add("1 (a) \x00 1 1 1 0 -1 4194560 1 0 0 0 1 1 0 0 20 0 1 0 77 1 1")
	f.Add(")")
	f.Add("")
	f.Fuzz(func(t *testing.T, line string) {
		start, state, err := parseStat(line)
		if err != nil {
			require.Zero(t, start)
			require.Zero(t, state)
		} else {
			require.True(t, letter(state))
		}
	})
}
