package cmd

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"

	"larder/conductor/sim"
)

// printSim prints a result as tables.
func printSim(w io.Writer, r *sim.Result) error {
	s := &r.Scenario
	cluster := fmt.Sprintf("%d prefill and %d decode nodes, %s, overload %s", s.Prefill, s.Decode, s.Policy, s.Overload)
	if s.Coupled > 0 {
		cluster = fmt.Sprintf("%d coupled instances", s.Coupled)
	}
	fmt.Fprintf(w, "%d requests in %.0f s of simulated time: %s; %s on 8x%s.\n\n",
		r.Requests, r.Seconds, cluster, s.Model.Name, s.Hardware.Name)
	t := newTable("TIMES", "-MEAN", "-P50", "-P90", "-P99", "-MAX", "-LIMIT", "-MET")
	limit := func(what bool, slo, met float64) (string, string) {
		if !what || slo == 0 {
			return "", ""
		}
		return fmt.Sprintf("%.3f s", slo), fmt.Sprintf("%.1f%%", 100*met)
	}
	for _, row := range []struct {
		name    string
		times   sim.Distribution
		limited bool
		slo     float64
		met     float64
	}{
		{"time to first token", r.TTFT, true, s.TTFTSLO.Seconds(), r.TTFTMet},
		{"between tokens, mean of the longest 10%", r.TBT, s.TBTLimit == sim.MeanLongest10, s.TBTSLO.Seconds(), r.TBTMet},
		{"between tokens, P90", r.TBTP90, s.TBTLimit == sim.P90, s.TBTSLO.Seconds(), r.TBTMet},
	} {
		slo, met := limit(row.limited, row.slo, row.met)
		d := row.times
		t.row(row.name, latencyText(d.Mean), latencyText(d.P50), latencyText(d.P90), latencyText(d.P99), latencyText(d.Max), slo, met)
	}
	if err := t.print(w); err != nil {
		return err
	}
	fmt.Fprintln(w)
	share := func(n int) string { return fmt.Sprintf("%d (%.1f%%)", n, 100*float64(n)/float64(r.Requests)) }
	list := [][2]string{
		{"completed", share(r.Completed)},
		{"rejected before prefill", share(r.RejectedBefore)},
		{"rejected at decode", share(r.RejectedAtDecode)},
	}
	for _, reason := range slices.Sorted(maps.Keys(r.Reasons)) {
		list = append(list, [2]string{"rejected for " + reason, share(r.Reasons[reason])})
	}
	list = append(list,
		[2]string{"within the limits", fmt.Sprintf("%.1f%%, %.3f requests/s", 100*r.Attainment, r.Goodput)},
		[2]string{"hit ratio of blocks, of tokens", fmt.Sprintf("%.4f, %.4f", r.HitRatio, r.PrefixRatio)},
		[2]string{"prefill of a request", fmt.Sprintf("%.3f s of a node", r.PrefillSeconds)},
		[2]string{"prefill wasted on rejected requests", fmt.Sprintf("%.1f s of nodes", r.WastedSeconds)},
		[2]string{"busy with prefill, with decode", fmt.Sprintf("%.1f%%, %.1f%%", 100*r.PrefillBusy, 100*r.DecodeBusy)},
		[2]string{"prefixes moved between caches", fmt.Sprintf("%.1f GB, %d replications", r.TransferredBytes/1e9, r.Replications)},
	)
	if s.DynamicRoles {
		list = append(list, [2]string{"changes of roles", strconv.Itoa(r.RoleChanges)})
	}
	if len(r.HotKeys) > 0 && s.Coupled == 0 && !s.Pool {
		sum := 0
		for _, k := range r.HotKeys {
			sum += k.Replicas
		}
		list = append(list, [2]string{"instances that hold a hot block", fmt.Sprintf("%.1f, mean of the %d used most",
			float64(sum)/float64(len(r.HotKeys)), len(r.HotKeys))})
	}
	return pairs(w, list...)
}

// latencyText is a time with as many digits as matter.
func latencyText(s float64) string {
	if s < 1 {
		return fmt.Sprintf("%.1f ms", 1000*s)
	}
	return fmt.Sprintf("%.2f s", s)
}
