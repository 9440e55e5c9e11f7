package cmd

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/server"
)

func TestDevicesAreListedAndGivenUp(t *testing.T) {
	c := startCluster(t)
	require.Regexp(t, `DEVICE +TIER +NODE`, c.ctl(t, exitDone, "devices"))
	before := decode[[]server.DeviceStatus](t, c.ctl(t, exitDone, "devices", "--json"))
	require.Len(t, before, 1)
	require.Equal(t, "serving", before[0].Mode)
	require.True(t, before[0].Ready)

	require.Contains(t, c.ctl(t, exitDone, "drain", "device", "1", "--wait"), "serving, draining")
	in := filepath.Join(c.dir, "in")
	require.NoError(t, os.WriteFile(in, []byte("bytes"), 0o600))
	c.ctl(t, exitFailed, "--timeout", "1s", "put", "k", in)
	after := decode[[]server.DeviceStatus](t, c.ctl(t, exitDone, "drain", "device", "1", "--cancel", "--json"))
	require.False(t, after[0].Draining)
	c.ctl(t, exitDone, "put", "k", in)

	require.Contains(t, c.ctl(t, exitDone, "drain", "node", before[0].Node), "draining")
	require.Contains(t, c.ctl(t, exitDone, "devices"), "serving, draining")
	c.ctl(t, exitDone, "drain", "node", before[0].Node, "--cancel")
	require.Contains(t, c.ctl(t, exitFailed, "drain", "device", "7"), "larder ctl devices")
	require.Contains(t, c.ctl(t, exitFailed, "drain", "node", "nowhere"), "larder ctl devices")
	require.Contains(t, c.ctl(t, exitUsage, "drain", "device", "1", "--cancel", "--wait"), "nothing to wait for")
	require.Contains(t, c.ctl(t, exitFailed, "drain", "client", "nobody"), "larder ctl clients")
}

func TestCopyingNeedsANode(t *testing.T) {
	c := startCluster(t)
	require.Contains(t, c.ctl(t, exitFailed, "copy", "k", "--to", "ssd"), "no node serves")
	require.Contains(t, c.ctl(t, exitFailed, "move", "k", "--to", "#1"), "no node serves")
	require.Contains(t, c.ctl(t, exitUsage, "move", "k", "--to", "#x"), "#3")
	require.Contains(t, c.ctl(t, exitUsage, "copy", "k"), "--to")
	require.Regexp(t, `TASK +KIND`, c.ctl(t, exitDone, "tasks"))
	require.Equal(t, "[]\n", c.ctl(t, exitDone, "tasks", "--json"))
	require.Contains(t, c.ctl(t, exitFailed, "tasks", "cancel", "7"), "larder ctl tasks")
	require.Regexp(t, `tier low +80%`, c.ctl(t, exitDone, "policy", "set", "--tier-low", "80"))
	require.Regexp(t, `promote after +0 uses`, c.ctl(t, exitDone, "policy", "set", "--promote-after", "0"))
	require.Regexp(t, `tier low +70%,dram=60%,#1=50%\n`, c.ctl(t, exitDone, "policy", "set", "--tier-low", "70,#1=50%,dram=60%"))
	require.Regexp(t, `tier low +75%\n`, c.ctl(t, exitDone, "policy", "set", "--tier-low", "75%"))
	require.Contains(t, c.ctl(t, exitUsage, "policy", "set", "--tier-low", "dram=60%"), "70%,dram=60%")
	text := c.ctl(t, exitDone, "policy", "set", "--promote-rate", "1MiB", "--promote-most", "0")
	require.Regexp(t, `promote most +no limit`, text)
	require.Regexp(t, `promote rate +1.0 MiB/s`, text)
}

func TestWhatADrainWaitsForIsTold(t *testing.T) {
	d := server.DeviceStatus{ID: 3, Regions: 2, Entries: 5, Mode: "serving", Held: &server.DeviceHeld{}}
	require.Equal(t, "device 3: no other device that a node serves takes what lies there", heldText(&d))
	d.Held = &server.DeviceHeld{
		Moving: 4, Pinned: 2, PinnedKey: "a\x00", Tenant: "blue", LeasedMS: 1500,
		Owners: []server.OwnerQuiet{{Instance: "w1", Regions: 1, AskedMS: 9000}, {Instance: "w2", Regions: 2, Ended: true}},
	}
	text := heldTexts([]server.DeviceStatus{{ID: 1}, d})
	for _, part := range []string{
		"4 entries are being copied", `2 entries are pinned, such as "a\x00" of tenant blue`, "for 1.5s",
		"w1 was asked for 1 regions 9s ago", "w2 has ended",
	} {
		require.Contains(t, text, part)
	}
	d.Regions = 0
	require.Empty(t, heldText(&d), "it is done")
}
