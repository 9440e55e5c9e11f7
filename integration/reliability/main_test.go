package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPageTellsWhatReportsSay(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{
		"sim.json": `{"seeds":3,"ticks":12345,"violations":1,"faults":{"crash":7,"clog":9},"operations":{"get: ok":5,"get: lost":2}}`,
		"chaos.json": `{"seconds":61,"cases":[{"name":"kill-leader","outcome":"failed","seconds":20}],
			"figures":[{"case":"kill-leader","name":"gap","value":2.5,"unit":"s","goal":"<= 2 s","met":false}]}`,
		"planted.json": `[{"bug":"map-order","caught":false},{"bug":"quorum","caught":true,"by":[{"layer":"unit","test":"raft TestX","seconds":0.5}]}]`,
		"found.json":   `[{"layer":"sim","seed":"go test -seed=1","what":"a | b","fix":"c"}]`,
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	var out strings.Builder
	require.NoError(t, run(&out, dir, filepath.Join(dir, "found.json")))
	for _, want := range []string{
		"3 seeds, 12345 ticks", "**1 violations.**", "| clog | 9 |\n| crash | 7 |", "| get | 7 |",
		"0 of 1 cases passed", "| kill-leader: gap | 2.5 s | <= 2 s | **no** |",
		"1 of 2 are caught", "| map-order | **nothing** |", "| quorum | unit: raft TestX | 0.5 s |",
		"| sim | a \\| b | c | `go test -seed=1` |", "REQUEST_ALLOC that was retried",
	} {
		require.Contains(t, out.String(), want)
	}
}

func TestPageSaysWhichReportsAreMissing(t *testing.T) {
	var out strings.Builder
	require.NoError(t, run(&out, t.TempDir(), "none"))
	require.Equal(t, 3, strings.Count(out.String(), "No report of a run was found."))
}

func TestDamagedReportsAreRefused(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "sim.json"), []byte("{"), 0o600))
	require.ErrorContains(t, run(&strings.Builder{}, dir, "none"), "sim.json")
}
