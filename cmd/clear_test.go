package cmd

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
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
