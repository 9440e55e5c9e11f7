package simtest

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"larder/protocol"
)

// coverage counts what runs have done. It is printed at the end and, with -report, written to a file.
type coverage struct {
	Seeds            uint64            `json:"seeds"`
	Ticks            uint64            `json:"ticks"`
	Events           uint64            `json:"events"`
	Faults           map[string]uint64 `json:"faults"`
	Operations       map[string]uint64 `json:"operations"` // by kind and outcome
	Errors           map[string]uint64 `json:"errors"`     // answers, by code
	Violations       uint64            `json:"violations"`
	PowerLosses      uint64            `json:"power_losses"`
	Syncs            uint64            `json:"syncs"`
	Refusals         uint64            `json:"refused_starts"`
	Replaced         uint64            `json:"members_replaced"`
	Leaders          uint64            `json:"leader_changes"`
	Snapshots        uint64            `json:"snapshots_installed"`
	Generations      uint64            `json:"device_generations"`
	Restores         uint64            `json:"restores"`
	Commands         uint64            `json:"commands"`
	Answers          uint64            `json:"answers_compared"`
	HashChecks       uint64            `json:"state_hashes_compared"`
	Linear           uint64            `json:"operations_linearized"`
	Drops            uint64            `json:"entries_dropped_by_the_system"`
	Leases           uint64            `json:"leases"`
	Late             uint64            `json:"reads_too_late"`
	ViewsGood        uint64            `json:"views_good"`
	ViewsVoid        uint64            `json:"views_void"`
	Renewals         uint64            `json:"renewals"`
	RenewalsRefused  uint64            `json:"renewals_refused"`
	RenewalsLate     uint64            `json:"renewals_too_late"`
	GenerationMisses uint64            `json:"reads_of_lost_bytes"`
	PagesWritten     uint64            `json:"pages_written"`
	PagesRead        uint64            `json:"pages_read"`
	Regions          uint64            `json:"regions_given"`
	Phases           [4]uint64         `json:"allocations_by_phase"`
	Sessions         uint64            `json:"sessions"`
	SessionsLost     uint64            `json:"sessions_lost"`
	Resumed          uint64            `json:"sessions_resumed"`
	Suspended        uint64            `json:"stores_suspended"`
	Disowned         uint64            `json:"answers_disowned"`
	Retries          uint64            `json:"retries"`
	Unknown          uint64            `json:"outcomes_unknown"`
	Revokes          uint64            `json:"revokes_pushed"`
	Freed            uint64            `json:"freed_pushed"`
	Attached         uint64            `json:"devices_attached"`
	Copied           uint64            `json:"copies_registered"`
	Promoted         uint64            `json:"promotions"`
	MadeRoom         uint64            `json:"promotions_made_room"`
	Torn             uint64            `json:"copies_torn"`
	FellOver         uint64            `json:"reads_of_another_copy"`
	Hidden           uint64            `json:"entries_hidden_and_back"`
	Grants           uint64            `json:"grants"`
	Fences           uint64            `json:"fences"`
	NamesTold        uint64            `json:"changes_of_names_told"`
	NamesCompacted   uint64            `json:"watches_of_names_begun_anew"`
	MaruReads        uint64            `json:"maru_lookups_compared"`
	MaruLate         uint64            `json:"maru_registered_late"`
}

func newCoverage() *coverage {
	return &coverage{Faults: map[string]uint64{}, Operations: map[string]uint64{}, Errors: map[string]uint64{}}
}

func (v *coverage) fault(c class) { v.Faults[c.String()]++ }

// op counts an operation and what became of it.
func (v *coverage) op(kind string, e *protocol.Error) {
	outcome := "ok"
	switch {
	case e == nil:
	case e.Code == codeLost:
		outcome = "lost"
	case e.Code == codeQuit:
		outcome = "given up"
	case e.Code == codeExpired:
		outcome = "session expired"
	default:
		outcome = e.Code.String()
	}
	v.Operations[kind+": "+outcome]++
}

// operations is how many there were.
func (v *coverage) operations() (n uint64) {
	for _, x := range v.Operations {
		n += x
	}
	return n
}

// add adds the counts of another run.
func (v *coverage) add(o *coverage) {
	a, b := v.fields(), o.fields()
	for i := range a {
		*a[i] += *b[i]
	}
	for _, m := range [][2]map[string]uint64{{v.Faults, o.Faults}, {v.Operations, o.Operations}, {v.Errors, o.Errors}} {
		for k, n := range m[1] {
			m[0][k] += n
		}
	}
}

func (v *coverage) fields() []*uint64 {
	return []*uint64{
		&v.Seeds, &v.Ticks, &v.Events, &v.Violations, &v.PowerLosses, &v.Syncs, &v.Refusals, &v.Replaced, &v.Leaders,
		&v.Snapshots, &v.Generations, &v.Restores, &v.Commands, &v.Answers, &v.HashChecks, &v.Linear, &v.Drops, &v.Leases,
		&v.Late, &v.GenerationMisses, &v.PagesWritten, &v.PagesRead, &v.Regions, &v.Phases[0], &v.Phases[1], &v.Phases[2],
		&v.Phases[3], &v.Sessions, &v.SessionsLost, &v.Resumed, &v.Suspended, &v.Disowned, &v.Retries, &v.Unknown,
		&v.Revokes, &v.Freed, &v.ViewsGood, &v.ViewsVoid, &v.Renewals, &v.RenewalsRefused, &v.RenewalsLate,
		&v.Attached, &v.Copied, &v.Promoted, &v.MadeRoom, &v.Torn, &v.FellOver, &v.Hidden, &v.Grants, &v.Fences,
		&v.NamesTold, &v.NamesCompacted, &v.MaruReads, &v.MaruLate,
	}
}

// never lists the classes of faults that did not fire, and what else did not happen that runs are to look at.
func (v *coverage) never() (names []string) {
	for _, x := range []struct {
		name string
		n    uint64
	}{
		{"views good", v.ViewsGood},
		{"views void", v.ViewsVoid},
		{"renewals", v.Renewals},
		{"renewals refused", v.RenewalsRefused},
		{"renewals too late", v.RenewalsLate},
		{"copies", v.Copied},
		{"promotions", v.Promoted},
		{"promotions that had room made", v.MadeRoom},
		{"copies torn", v.Torn},
		{"reads of another copy", v.FellOver},
		{"entries hidden", v.Hidden},
		{"grants", v.Grants},
		{"fences", v.Fences},
		{"changes of names", v.NamesTold},
		{"watches of names that begin anew", v.NamesCompacted},
		{"lookups of Maru's clients", v.MaruReads},
	} {
		if x.n == 0 {
			names = append(names, x.name)
		}
	}
	for c := range classes {
		if allClasses.has(c) && v.Faults[c.String()] == 0 {
			names = append(names, c.String())
		}
	}
	return names
}

// String says it in a few lines.
func (v *coverage) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d seeds, %d ticks, %d events, %d operations, %d commands, %d leader changes, %d power losses, "+
		"%d snapshots installed, %d members replaced\n", v.Seeds, v.Ticks, v.Events, v.operations(), v.Commands, v.Leaders,
		v.PowerLosses, v.Snapshots, v.Replaced)
	fmt.Fprintf(&b, "compared: %d state hashes, %d answers, %d operations linearized, %d leases, %d pages read, %d written\n",
		v.HashChecks, v.Answers, v.Linear, v.Leases, v.PagesRead, v.PagesWritten)
	fmt.Fprintf(&b, "allocations by phase %v, %d entries dropped by the system, %d reads too late, %d of lost bytes, %d revokes, "+
		"%d freed pushed, %d sessions, %d lost, %d resumed, %d outcomes unknown, %d answers disowned\n", v.Phases, v.Drops, v.Late,
		v.GenerationMisses, v.Revokes, v.Freed, v.Sessions, v.SessionsLost, v.Resumed, v.Unknown, v.Disowned)
	fmt.Fprintf(&b, "%d views good, %d void, %d renewals, %d refused, %d too late\n", v.ViewsGood, v.ViewsVoid, v.Renewals,
		v.RenewalsRefused, v.RenewalsLate)
	fmt.Fprintf(&b, "%d devices attached, %d copies, %d promotions (%d times room was made), %d copies torn, %d reads of another "+
		"copy, %d entries hidden or back, %d grants, %d fences\n", v.Attached, v.Copied, v.Promoted, v.MadeRoom, v.Torn, v.FellOver,
		v.Hidden, v.Grants, v.Fences)
	fmt.Fprintf(&b, "%d changes of names told, %d watches begun anew\n", v.NamesTold, v.NamesCompacted)
	fmt.Fprintf(&b, "%d lookups of Maru's clients compared, %d keys of theirs registered late\n", v.MaruReads, v.MaruLate)
	line := func(name string, m map[string]uint64) {
		fmt.Fprintf(&b, "%s:", name)
		for _, k := range slices.Sorted(maps.Keys(m)) {
			fmt.Fprintf(&b, " %s=%d", strings.ReplaceAll(k, " ", "_"), m[k])
		}
		b.WriteString("\n")
	}
	line("faults", v.Faults)
	line("operations", v.Operations)
	line("errors", v.Errors)
	return b.String()
}

// write writes the counts to a file, which is whole at all times.
func (v *coverage) write(path string) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the coverage: %w", err)
	}
	if err := os.WriteFile(path+".new", append(b, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
