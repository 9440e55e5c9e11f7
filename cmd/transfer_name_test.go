package cmd

import (
	"bytes"
	"encoding/json"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/cmd/bench"
	"larder/server"
)

// TestTransferByName has the masters tell where a target is.
func TestTransferByName(t *testing.T) {
	c := startCluster(t)
	masters := c.flags[3]
	at := target(t, "--name", "n1", "--size", "1MiB", "--masters", masters)
	var list server.NamesReply
	require.Eventually(t, func() bool {
		list = decode[server.NamesReply](t, c.ctl(t, exitDone, "names", "--json", "--prefix", "segment/"))
		return len(list.Names) == 1
	}, 60*time.Second, 20*time.Millisecond)
	require.Equal(t, "segment/n1", list.Names[0].Key)
	require.Contains(t, list.Names[0].Value, at)
	text := c.ctl(t, exitDone, "names")
	require.Regexp(t, `(?m)^NAME +VALUE +CREATED +MODIFIED +SESSION +INSTANCE$`, text)
	require.Contains(t, text, "segment/n1")
	require.NotContains(t, c.ctl(t, exitDone, "names", "--tenant", "other"), "segment/n1")
	require.Contains(t, c.ctl(t, exitDone, "names", "--hex", "--prefix", "73"), "7365676d656e742f6e31")

	var out, failed bytes.Buffer
	args := []string{"transfer", "probe", "--name", "n1", "--masters", masters}
	require.Equal(t, exitDone, run(t.Context(), args, &out, &failed), failed.String())
	require.Regexp(t, `(?m)^Segment n1, engine [0-9a-f]{32}$`, out.String())
	out.Reset()
	args = []string{"transfer", "bench", "--name", "n1", "--masters", masters, "--time", "10ms", "--block", "4KiB", "--transport", "tcp", "--json"}
	require.Equal(t, exitDone, run(t.Context(), args, &out, &failed), failed.String())
	var r bench.TransferReport
	require.NoError(t, json.Unmarshal(out.Bytes(), &r))
	require.Len(t, r.Rows, 2)

	failed.Reset()
	require.Equal(t, exitFailed, run(t.Context(), []string{"transfer", "probe", "--name", "n2", "--masters", masters}, io.Discard, &failed))
	require.Contains(t, failed.String(), "ctl names")
	for _, args := range [][]string{
		{"transfer", "probe"},
		{"transfer", "probe", "--name", "n1"},
		{"transfer", "bench", "--name", "n1", "--masters", masters, "--to", at},
		{"transfer", "target", "--masters", masters},
	} {
		require.Equal(t, exitUsage, run(t.Context(), args, io.Discard, &failed), "%v", args)
	}
}
