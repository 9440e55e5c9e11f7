package cmd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/server"
)

// TestClearSaysWhatCannotBeCombined: a scope is never silently dropped from a command that destroys.
func TestClearSaysWhatCannotBeCombined(t *testing.T) {
	for _, args := range [][]string{
		{"--all", "--prefix", "p/"},
		{"--all", "--tenant", "b"},
		{"--prefix", "p/", "--model", "m"},
		{"--prefix", "p/", "--tenant", "b", "--seed", "1"},
	} {
		code, _, stderr := larder(t.Context(), append([]string{"ctl", "clear", "--admin", "127.0.0.1:1"}, args...)...)
		require.Equal(t, exitUsage, code, args)
		require.Contains(t, stderr, "--prefix with --tenant alone")
	}
	code, _, stderr := larder(t.Context(), "ctl", "clear", "--admin", "127.0.0.1:1", "--prefix", "", "--tenant", "b")
	require.Equal(t, exitUsage, code)
	require.Contains(t, stderr, "empty prefix")
	code, stdout, _ := larder(t.Context(), "ctl", "clear", "--help")
	require.Equal(t, exitDone, code)
	require.Contains(t, strings.Join(strings.Fields(stdout), " "), "of all tenants unless --tenant names one")
}

func TestClearOfATenantsPrefix(t *testing.T) {
	c := startCluster(t)
	require.Contains(t, c.ctl(t, exitDone, "clear", "--prefix", "p/", "--tenant", "b"), "done")
	require.Contains(t, c.ctl(t, exitDone, "clear", "--prefix", "p/"), "done")
	require.Contains(t, c.ctl(t, exitDone, "clear", "--tenant", "b"), "done")
}

// TestClearOfABinaryPrefix: what the command line cannot carry is refused, as what it became might be another's prefix.
func TestClearOfABinaryPrefix(t *testing.T) {
	c := startCluster(t)
	in := filepath.Join(c.dir, "in")
	require.NoError(t, os.WriteFile(in, []byte("bytes"), 0o600))
	c.ctl(t, exitDone, "put", "--hex", "ff00", in)
	c.ctl(t, exitDone, "put", "--hex", "efbfbd00", in) // U+FFFD, and a zero
	left := func() (keys []string) {
		for _, k := range decode[server.KeysReply](t, c.ctl(t, exitDone, "keys", "--json")).Keys {
			keys = append(keys, k.KeyHex)
		}
		return keys
	}
	require.Contains(t, c.ctl(t, exitUsage, "clear", "--prefix", "\xff"), "--hex")
	require.Contains(t, c.ctl(t, exitUsage, "clear", "--model", "\xff"), "not UTF-8")
	require.Contains(t, c.ctl(t, exitUsage, "clear", "--hex", "--prefix", "p/"), "not hexadecimal")
	require.Contains(t, c.ctl(t, exitUsage, "clear", "--hex", "--all"), "--hex goes with --prefix")
	require.ElementsMatch(t, []string{"ff00", "efbfbd00"}, left())
	require.Contains(t, c.ctl(t, exitDone, "clear", "--hex", "--prefix", "ff"), "done")
	require.Equal(t, []string{"efbfbd00"}, left())
	require.Contains(t, c.ctl(t, exitDone, "clear", "--hex", "--prefix", "efbfbd", "--tenant", "default"), "done")
	require.Empty(t, left())
}
