package cxl

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A process that forks must not leave a writer behind: its bytes may be another owner's by then.
func TestOnlyReadersPassMappingsOnToChildren(t *testing.T) {
	d := create(t, onTmpFS(t), testOptions())
	writable := mapAll(t, d, MapOptions{})
	readable := mapAll(t, d, MapOptions{ReadOnly: true})
	require.Contains(t, flagsAt(t, writable), " dc ", "do not copy on fork")
	require.NotContains(t, flagsAt(t, readable), " dc ")
}

// flagsAt returns the kernel's flags of a mapping.
func flagsAt(t *testing.T, m *Mapping) string {
	t.Helper()
	f, err := os.Open("/proc/self/smaps")
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	start := fmt.Sprintf("%08x-", address(m.span.whole))
	inside := false
	for lines := bufio.NewScanner(f); lines.Scan(); {
		switch line := lines.Text(); {
		case strings.HasPrefix(line, start):
			inside = true
		case inside && strings.HasPrefix(line, "VmFlags:"):
			return line + " "
		}
	}
	t.Fatal("the mapping is not listed")
	return ""
}
