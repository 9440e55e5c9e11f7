package server

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A client sends its host's boot id as its kernel writes it: that must name this host.
func TestBootIDOfTheKernelIsThisHosts(t *testing.T) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	require.NoError(t, err)
	require.Equal(t, localHost().BootID, bootID(strings.TrimSpace(string(text))))
	require.Equal(t, "0a1b", bootID("0A-1b"))
}
