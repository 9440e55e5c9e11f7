package reduce

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestKernelsAreGenerated has the kernels written once more, where what that needs can be had.
func TestKernelsAreGenerated(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles the generator")
	}
	if out, err := exec.Command("go", "-C", "asm", "mod", "download").CombinedOutput(); err != nil {
		t.Skipf("what the generator needs cannot be had: %s", out)
	}
	dir := t.TempDir()
	out, err := exec.Command("go", "-C", "asm", "run", ".", dir).CombinedOutput()
	require.NoError(t, err, "%s", out)
	files, err := filepath.Glob("kernels_*")
	require.NoError(t, err)
	require.Len(t, files, 3)
	for _, name := range files {
		want, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		got, err := os.ReadFile(name)
		require.NoError(t, err)
		require.True(t, bytes.Equal(want, got), "%s is not what its generator writes: run go generate ./pg/reduce", name)
	}
}
