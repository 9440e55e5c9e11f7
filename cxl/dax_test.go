package cxl

import (
	"bytes"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// daxEnv names a device-DAX whose content the test may destroy.
const daxEnv = "LARDER_TEST_DAX"

// TestDeviceDAX goes through a device's life on real device-DAX, or on one that an emulator gives to a guest.
func TestDeviceDAX(t *testing.T) {
	path := os.Getenv(daxEnv)
	if path == "" {
		t.Skipf("set %s to a device-DAX that may be overwritten", daxEnv)
	}
	opts := testOptions()
	opts.Size, opts.Coherence, opts.Force = 0, CoherenceNone, true
	require.NoError(t, Format(path, opts))
	opts.Force = false
	require.ErrorIs(t, Format(path, opts), ErrFormatted)
	opts.Pool[5]++
	require.ErrorIs(t, Format(path, opts), ErrForeignHeader)
	opts.Pool[5]--
	opts.Force, opts.Size = true, 1<<50
	require.ErrorIs(t, Format(path, opts), ErrNoSpace, "a device cannot grow")

	found, err := Scan(ScanOptions{})
	require.NoError(t, err)
	require.NotEmpty(t, found)
	info, err := Inspect(path)
	require.NoError(t, err)
	require.Contains(t, found, *info)
	require.NoError(t, info.HeaderErr)
	require.Equal(t, DeviceDAX, info.Kind)
	require.EqualValues(t, info.Size, info.Header.Size)
	require.False(t, info.Lost)
	t.Logf("size %d, align %d, volatile %v", info.Size, info.Align, info.Volatile)

	owner := open(t, path, Expect{Pool: testPool, Claim: true})
	_, said := holder(t, path)
	require.Contains(t, said, "claimed")
	writer, err := owner.Map(HeaderSpan+4097, 1<<20+5, MapOptions{Populate: true, HugePages: true})
	require.NoError(t, err)
	client := open(t, path, Expect{Pool: testPool, ReadOnly: true})
	reader, err := client.Map(HeaderSpan, info.Size-HeaderSpan, MapOptions{ReadOnly: true, Populate: true})
	require.NoError(t, err)

	want := bytes.Repeat([]byte("cxl"), 1<<20)[:len(writer.Bytes())]
	require.NoError(t, CopyIn(writer.Bytes(), want))
	require.NoError(t, writer.Publish(writer.Bytes()))
	require.NoError(t, writer.Persist(writer.Bytes()))
	got, from := make([]byte, len(want)), reader.Bytes()[4097:][:len(want)]
	require.NoError(t, reader.Refresh(from))
	require.NoError(t, CopyOut(got, from))
	require.True(t, bytes.Equal(want, got))
	require.NoError(t, writer.Surrender(writer.Bytes()))

	require.NoError(t, owner.SetGeneration(77, 5))
	require.EqualValues(t, 77, reader.Generation())
	require.NoError(t, writer.Close())
	require.NoError(t, reader.Close())
	require.NoError(t, owner.Close())
	info, err = Inspect(path)
	require.NoError(t, err)
	require.EqualValues(t, 77, info.Header.Generation)
	require.Equal(t, ClaimNone, info.Claim)
}
