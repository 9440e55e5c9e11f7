package replay

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestScratchOfAKilledRunIsRemovedByTheNext, that of one that goes on is not, and a run leaves nothing behind.
func TestScratchOfAKilledRunIsRemovedByTheNext(t *testing.T) {
	base := filepath.Join(t.TempDir(), "state", "larder")
	var outside []string
	also := func(dir string) error { outside = append(outside, dir); return nil }

	first, removeFirst, err := Scratch(base, also)
	require.NoError(t, err)
	killed := filepath.Join(base, scratchPrefix+"killed")
	require.NoError(t, os.MkdirAll(filepath.Join(killed, "db"), 0o700))
	other := filepath.Join(base, "db")
	require.NoError(t, os.Mkdir(other, 0o700))

	second, removeSecond, err := Scratch(base, also)
	require.NoError(t, err)
	require.NoDirExists(t, killed)
	require.Equal(t, []string{killed}, outside, "and what it had elsewhere")
	require.DirExists(t, first, "its run goes on")
	require.DirExists(t, other, "it is no run's")
	require.NotEqual(t, first, second)

	require.NoError(t, removeSecond())
	require.NoError(t, removeFirst())
	require.NoDirExists(t, first)
	require.NoDirExists(t, second)
	require.DirExists(t, base, "somebody else uses it")

	require.NoError(t, os.Remove(other))
	require.NoError(t, os.Remove(base))
	_, remove, err := Scratch(base, nil)
	require.NoError(t, err)
	require.NoError(t, remove())
	require.NoDirExists(t, base, "it was not there before")

	_, _, err = Scratch("/dev/null/x", nil)
	require.ErrorContains(t, err, "--data")
}
