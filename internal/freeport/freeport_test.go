package freeport

import (
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const child = "LARDER_FREEPORT_CHILD"

// TestMain has a second process say what it was given.
func TestMain(m *testing.M) {
	if os.Getenv(child) != "" {
		addr, err := Addr()
		if err != nil {
			addr = err.Error()
		}
		_, _ = os.Stdout.WriteString(addr)
		return
	}
	os.Exit(m.Run())
}

func TestAddr(t *testing.T) {
	given := map[string]bool{}
	for range width + 3 { // more than a slot has
		addr := For(t)
		require.False(t, given[addr], addr)
		given[addr] = true
		l, err := net.Listen("tcp", addr)
		require.NoError(t, err)
		require.NoError(t, l.Close())
	}
	require.Len(t, locks, 2)
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), child+"=1")
	out, err := cmd.Output()
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(string(out), "127.0.0.1:"), "%s", out)
	require.False(t, given[string(out)], "another process has others")
}
