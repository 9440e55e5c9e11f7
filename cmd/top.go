package cmd

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/term"

	"larder/server"
)

// topCmd is larder top.
type topCmd struct {
	clusterFlags `embed:""`

	Interval time.Duration `default:"1s" help:"Between two looks (default 1s)."`
	Once     bool          `help:"Print one view, of one interval, and stop."`
}

// view is what one look, compared with the one before, says.
type view struct {
	Status    *server.StatusReply `json:"status"`
	Seconds   float64             `json:"seconds"`        // between the looks
	Rates     map[string]float64  `json:"requests_per_s"` // by message type
	KeyRate   float64             `json:"lookup_keys_per_s"`
	HitRatio  float64             `json:"hit_ratio"` // of the keys looked up in the interval; -1 = none was
	Registers float64             `json:"registered_per_s"`
	Evictions float64             `json:"evicted_per_s"`
	InRate    float64             `json:"received_bytes_per_s"`
	OutRate   float64             `json:"sent_bytes_per_s"`
}

// Run implements the command.
func (t *topCmd) Run(e *env) error {
	if t.Interval < 100*time.Millisecond {
		return usageError(fmt.Errorf("top: --interval %v is too short; at least 100ms", t.Interval))
	}
	a := t.newAdmin()
	screen, isFile := e.stdout.(*os.File)
	live := !t.Once && !t.JSON && isFile && term.IsTerminal(int(screen.Fd()))
	if live {
		fmt.Fprint(e.stdout, "\x1b[?1049h\x1b[?25l")       // other screen, no cursor
		defer fmt.Fprint(e.stdout, "\x1b[?25h\x1b[?1049l") // and back
	}
	last, lastAt, err := t.look(e.ctx, a)
	if err != nil {
		return err
	}
	ticker := time.NewTicker(t.Interval)
	defer ticker.Stop()
	for {
		select {
		case <-e.ctx.Done():
			return nil
		case <-ticker.C:
		}
		now, at, err := t.look(e.ctx, a)
		if err != nil {
			if e.ctx.Err() != nil {
				return nil
			}
			if t.Once {
				return err
			}
			fmt.Fprintf(e.stdout, "%s%v\n", clearScreen(live), err)
			continue
		}
		v := compare(last, now, at.Sub(lastAt))
		last, lastAt = now, at
		if err := t.show(e.stdout, v, live); err != nil || t.Once {
			return err
		}
	}
}

// look asks the leader for its status.
func (t *topCmd) look(ctx context.Context, a *admin) (*server.StatusReply, time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(t.Timeout, adminDialWait))
	defer cancel()
	var s server.StatusReply
	err := a.getLeader(ctx, "/status", nil, &s)
	return &s, time.Now(), err
}

// compare computes rates. Counters are those of one member since its start: after a change of leader or a restart an
// interval shows nothing rather than nonsense.
func compare(last, now *server.StatusReply, elapsed time.Duration) *view {
	v := &view{Status: now, Seconds: elapsed.Seconds(), Rates: make(map[string]float64), HitRatio: -1}
	if last.NodeID != now.NodeID || last.UptimeMS > now.UptimeMS || elapsed <= 0 {
		return v
	}
	rate := func(before, after uint64) float64 { return float64(after-min(before, after)) / v.Seconds }
	for name, n := range now.Requests.ByType {
		if r := rate(last.Requests.ByType[name], n); r > 0 {
			v.Rates[name] = r
		}
	}
	v.KeyRate = rate(last.Requests.Keys, now.Requests.Keys)
	if keys := now.Requests.Keys - min(last.Requests.Keys, now.Requests.Keys); keys > 0 {
		v.HitRatio = float64(now.Requests.Hits-min(last.Requests.Hits, now.Requests.Hits)) / float64(keys)
	}
	v.Registers = rate(last.Stats.Registered, now.Stats.Registered)
	v.Evictions = rate(evicted(last), evicted(now))
	v.InRate, v.OutRate = rate(last.Requests.BytesIn, now.Requests.BytesIn), rate(last.Requests.BytesOut, now.Requests.BytesOut)
	return v
}

// evicted counts the entries that left to make room.
func evicted(s *server.StatusReply) uint64 {
	return s.Stats.Removed["evicted"] + s.Stats.Removed["taken"]
}

// clearScreen goes to the top of the screen and clears what follows.
func clearScreen(live bool) string {
	if live {
		return "\x1b[H\x1b[J"
	}
	return ""
}

// show prints a view.
func (t *topCmd) show(w io.Writer, v *view, live bool) error {
	if t.JSON {
		return printJSON(w, v)
	}
	var b strings.Builder
	b.WriteString(clearScreen(live))
	v.render(&b)
	if !live {
		b.WriteString("\n")
	}
	_, err := io.WriteString(w, b.String())
	if err != nil {
		return fmt.Errorf("top: %w", err)
	}
	return nil
}

// barWidth is the width of a bar in columns.
const barWidth = 40

// bar draws the shares of a whole that are full (#) and half full (-).
func bar(full, half float64) string {
	f := int(full*barWidth + 0.5)
	h := min(int(half*barWidth+0.5), barWidth-min(f, barWidth))
	f = min(f, barWidth)
	return "[" + strings.Repeat("#", f) + strings.Repeat("-", max(h, 0)) + strings.Repeat(" ", barWidth-f-max(h, 0)) + "]"
}

// render writes the view as text.
func (v *view) render(b *strings.Builder) {
	s := v.Status
	fmt.Fprintf(b, "cluster %s   member %d (%s)   leader %d, term %d   applied %d   up %s\n",
		s.ClusterName, s.NodeID, s.Role, s.Leader, s.Term, s.Applied, millis(s.UptimeMS))
	for i := range s.Members {
		m := &s.Members[i]
		state := "up"
		if !m.Active {
			state = "SILENT"
		}
		fmt.Fprintf(b, "  member %d  %s  lag %d  %s\n", m.ID, state, m.Lag, m.Client)
	}
	x := &s.Stats
	total := float64(max(x.PoolBytes, 1))
	given := x.PoolBytes - min(x.FreeBytes, x.PoolBytes)
	fmt.Fprintf(b, "\npool     %s  %s of entries (#) in %s of regions (-), of %s\n",
		bar(float64(x.EntryBytes)/total, float64(given-min(x.EntryBytes, given))/total),
		bytesText(x.EntryBytes), bytesText(given), bytesText(x.PoolBytes))
	fmt.Fprintf(b, "entries  %d   policy %s   registered %.0f/s   evicted %.0f/s   in all: %s\n",
		x.Entries, s.Settings.Policy, v.Registers, v.Evictions, evictionsText(x))
	hits := "-"
	if v.HitRatio >= 0 {
		hits = fmt.Sprintf("%.1f%%", 100*v.HitRatio)
	}
	fmt.Fprintf(b, "lookups  %.0f keys/s, %s found   leases %d   clients %d, %d connections   revokes pending %d\n",
		v.KeyRate, hits, s.Requests.LeasesGranted, x.Sessions, s.Connections, s.Requests.RevokesPending)
	fmt.Fprintf(b, "network  in %s/s, out %s/s   disk %s free%s\n\n", bytesText(uint64(v.InRate)), bytesText(uint64(v.OutRate)),
		bytesText(s.Disk.AvailBytes), map[bool]string{true: ", FULL"}[s.Disk.Full])
	t := newTable("REQUEST", "-PER SECOND", "-IN ALL", "-ERRORS")
	for _, name := range slices.Sorted(maps.Keys(s.Requests.ByType)) {
		t.row(name, fmt.Sprintf("%.0f", v.Rates[name]), s.Requests.ByType[name], s.Requests.Errors[name])
	}
	t.print(b) //nolint:errcheck,gosec // a builder does not fail
}
