package chaos

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/integration/cluster"
)

// cases are all cases; the first ones are those of a short run.
var cases = []struct {
	name string
	run  func(t *testing.T, name string)
}{
	{"leader-killed", leaderKilled},
	{"leader-paused-10s", leaderPausedLong},
	{"disk-full-leader", diskFullLeader},
	{"all-killed", allKilled},
	{"partition-leader", partitionLeader},
	{"partition-one-way", partitionOneWay},
	{"pauses", pauses},
	{"blackhole-clients", blackholeClients},
	{"bridge", bridge},
	{"delay", delay},
	{"follower-killed", followerKilled},
	{"resets-and-drops", resetsAndDrops},
	{"partition-five", partitionFive},
	{"clog", clog},
	{"disk-full-follower", diskFullFollower},
	{"disk-eio-write", diskFails("write eio *.log")},
	{"disk-eio-sync", diskFails("sync eio")},
	{"network-namespaces", networkNamespaces},
	{"slow-disk-follower", slowDiskFollower},
	{"slow-disk-leader", slowDiskLeader},
	{"disk-stalled", diskStalled},
	{"cpu-starved", cpuStarved},
	{"client-killed", clientKilled},
	{"pool-cut", poolCut},
	{"pool-replaced", poolReplaced},
	{"members-changed", membersChanged},
	{"previous-release", previousRelease},
}

// caseTime is about how long the faults of a case go on.
const caseTime = 12 * time.Second

// TestChaos runs the cases that -cases asks for.
func TestChaos(t *testing.T) {
	cluster.SkipShort(t)
	if *minutesFlag > 0 && *casesFlag == "3" {
		t.Skip("only random faults are asked for")
	}
	n, err := strconv.Atoi(*casesFlag)
	switch {
	case *casesFlag == "all":
		n = len(cases)
	case err != nil:
		n = 0
	}
	names := strings.Split(*casesFlag, ",")
	ran := 0
	for i, c := range cases {
		if i >= n && !slices.Contains(names, c.name) {
			continue
		}
		ran++
		t.Run(c.name, func(t *testing.T) { runCase(t, c.name, c.run) })
	}
	require.NotZero(t, ran, "no case has a name of %s", *casesFlag)
}

// runCase runs a case and reports its outcome.
func runCase(t *testing.T, name string, run func(*testing.T, string)) {
	t.Helper()
	begun := time.Now()
	defer func() {
		outcome := "passed"
		if t.Failed() {
			outcome = "FAILED"
		} else if t.Skipped() {
			outcome = "skipped: see its log"
		}
		total.mu.Lock()
		defer total.mu.Unlock()
		total.Cases = append(total.Cases, caseReport{name, outcome, time.Since(begun).Seconds()})
	}()
	run(t, name)
}
