package cmd

import (
	"bytes"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/cmd/pgbench"
)

func TestPGBench(t *testing.T) {
	for _, collective := range pgbench.Collectives {
		t.Run(collective, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			var errs output // of all ranks
			code := run(t.Context(), []string{
				"pg", "bench", "--collective", collective, "-g", "3", "-b", "8", "-e", "64K", "-f", "64", "-n", "3", "-a", "3", "--json",
			}, &out, &errs)
			require.Zero(t, code, errs.String())
			var rows []pgbench.Row
			require.NoError(t, json.Unmarshal(out.Bytes(), &rows))
			require.NotEmpty(t, rows)
			for _, r := range rows {
				require.Zero(t, r.In.Wrong, "%+v", r)
				require.Zero(t, r.Out.Wrong, "%+v", r)
				require.Positive(t, r.Out.Micros)
			}
		})
	}
}

func TestPGBenchOverHosts(t *testing.T) {
	var out bytes.Buffer
	var errs output
	code := run(t.Context(), []string{"pg", "bench", "-g", "3", "--hosts", "2", "-b", "4K", "-e", "4K", "-d", "all", "-o", "all", "-n", "1", "-S", "-p"}, &out, &errs)
	require.Zero(t, code, errs.String())
	for _, column := range []string{"bfloat16", "int8", "float64", "p99", "timestamp"} {
		require.Contains(t, out.String(), column)
	}
}

func TestPGBenchRefuses(t *testing.T) {
	for flags, why := range map[string]string{
		"--collective=all": "none of all_reduce",
		"-g0":              "1 to 64 ranks",
		"-e1K":             "the least first",
		"-dint7":           "int7",
		"-r5":              "root 5",
		"-n0":              "0 iterations",
		"-t2":              "a rank is a process",
		"-Jfile":           "--json",
	} {
		var out, errs bytes.Buffer
		require.Equal(t, exitUsage, run(t.Context(), []string{"pg", "bench", flags}, &out, &errs), flags)
		require.Contains(t, errs.String(), why, fmt.Sprint(flags))
	}
}
