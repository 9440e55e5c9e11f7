package cmd

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/cmd/bench"
)

func TestMaruBenchSaysWhatIsWrong(t *testing.T) {
	nothing := t.TempDir()
	for name, v := range map[string]struct {
		args []string
		want string
	}{
		"no checkout":      {nil, "--maru"},
		"an empty one":     {[]string{"--maru", nothing}, "is no checkout of Maru"},
		"no clients":       {[]string{"--maru", nothing, "--clients", "0"}, "from 1 to 256"},
		"too many clients": {[]string{"--maru", nothing, "--clients", "1,257"}, "from 1 to 256"},
		"no time":          {[]string{"--maru", nothing, "--time", "1ms"}, "too short"},
		"no turns":         {[]string{"--maru", nothing, "--rounds", "0"}, "at least 1"},
		"a bad regexp":     {[]string{"--maru", nothing, "--run", "("}, "--run"},
		"no such figure":   {[]string{"--maru", nothing, "--run", "sync/nothing"}, "sync/ and async/ and one of lookup; exists; register; "},
	} {
		t.Run(name, func(t *testing.T) {
			var out, errs bytes.Buffer
			require.Equal(t, exitUsage, run(t.Context(), append([]string{"maru", "bench"}, v.args...), &out, &errs))
			require.Contains(t, errs.String(), v.want)
		})
	}
}

func TestMaruTable(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, printMaru(&out, &bench.MaruReport{CPUs: 2, SyncMicros: 431.2, Rows: []bench.MaruRow{{
		Mode: "sync", Op: "lookup", Clients: 8, Ratio: 3.5, Larder: bench.MaruSpeed{Server: "larder", Requests: 70000.4, P50: 90, P99: 400, CPU: 8.44},
		Maru: bench.MaruSpeed{Server: "maru-server", Requests: 20000, P50: 300, P99: 1200, CPU: 35},
	}}}))
	require.Equal(t, `2 CPUs, which servers and clients share. Larder's changes are on its disk when they are answered, where a
synced append takes 431 us; Maru's are in memory. CPU us is the processor time that a server takes for a request:
Larder's from all processors, Maru's (Python) from one at a time.

MODE  OPERATION  CLIENTS  LARDER/s  p50 us  p99 us  CPU us  MARU/s  p50 us  p99 us  CPU us  RATIO  MARU'S SERVER
sync  lookup           8     70000      90     400     8.4   20000     300    1200    35.0   3.50  maru-server
`, out.String())
}
