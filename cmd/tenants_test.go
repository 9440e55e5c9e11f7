package cmd

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/server"
)

func TestTenants(t *testing.T) {
	c := startCluster(t)
	in := filepath.Join(c.dir, "in")
	require.NoError(t, os.WriteFile(in, []byte("bytes"), 0o600))
	c.ctl(t, exitDone, "put", "--tenant", "blue", "k", in)
	c.ctl(t, exitDone, "pin", "--tenant", "blue", "k", "--owner", "ann")

	require.Regexp(t, `blue +1 +5 B +64\.0 KiB +4\.0 MiB +1 +0 +-`, c.ctl(t, exitDone, "tenants", "set", "blue", "--guarantee", "4MiB"))
	require.Regexp(t, `blue +1 +5 B +64\.0 KiB +4\.0 MiB +1 +0 +1`, c.ctl(t, exitDone, "tenants", "set", "blue", "--max-pins", "1"),
		"what is not named stays")
	require.Contains(t, c.ctl(t, exitFailed, "pin", "--tenant", "blue", "k", "--owner", "bob"), "larder ctl tenants set")
	c.ctl(t, exitDone, "tenants", "set", "green", "--guarantee", "1MiB")

	want := []server.TenantView{
		{Name: "default"},
		{Name: "blue", Entries: 1, Bytes: 5, Space: 64 << 10, Pins: 1, Guarantee: 4 << 20, MaxPins: 1},
		{Name: "green", Guarantee: 1 << 20},
	}
	require.Equal(t, want, decode[[]server.TenantView](t, c.ctl(t, exitDone, "tenants", "--json")))
	require.Equal(t, want, decode[server.StatusReply](t, c.ctl(t, exitDone, "status", "--json")).Stats.Tenants)
	require.Regexp(t, `green +0 +0 B +0 B +1\.0 MiB +0 +0 +-`, c.ctl(t, exitDone, "tenants"))
	set := decode[server.TenantView](t, c.ctl(t, exitDone, "tenants", "set", "green", "--guarantee", "0", "--json"))
	require.Equal(t, server.TenantView{Name: "green"}, set)
}

func TestTenantsSetRefuses(t *testing.T) {
	c := startCluster(t)
	require.Regexp(t, `at most \d+[KMG]iB can be guaranteed to tenant "blue"`,
		c.ctl(t, exitFailed, "tenants", "set", "blue", "--guarantee", "1GiB"))
	require.Contains(t, c.ctl(t, exitFailed, "tenants", "set", "blue", "--guarantee", "0"), `there is no tenant "blue"`)
	require.Contains(t, c.ctl(t, exitFailed, "tenants", "set", "blue", "--max-pins", "65537"), "at most 65536")
	require.Contains(t, c.ctl(t, exitFailed, "tenants", "set", strings.Repeat("n", 257), "--max-pins", "1"), "256 bytes")
	require.Contains(t, c.ctl(t, exitUsage, "tenants", "set", "blue"), "say what")
	require.Contains(t, c.ctl(t, exitUsage, "tenants", "set", "", "--max-pins", "1"), "name the tenant")
	require.Contains(t, c.ctl(t, exitUsage, "tenants", "set", "blue", "--guarantee", "much"), "--guarantee")
	require.Len(t, decode[[]server.TenantView](t, c.ctl(t, exitDone, "tenants", "--json")), 1, "what was refused makes no tenant")
	_, stdout, _ := larder(t.Context(), "ctl", "tenants", "set", "--help")
	require.Contains(t, strings.Join(strings.Fields(stdout), " "), "other tenants' evictions leave it")
}
