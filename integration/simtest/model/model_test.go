package model

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/zeebo/xxh3"

	"larder/meta"
	"larder/meta/policy"
	"larder/protocol"
)

// Random logs, under every policy, with retries, restarts and nonsense: the machine answers every command as the model
// does, and looks like it.
func TestRandomLogs(t *testing.T) {
	steps := 2500
	if testing.Short() {
		steps = 300
	}
	total := map[outcome]int{}
	for seed := range uint64(4) {
		for _, name := range policy.Names() {
			t.Run(fmt.Sprintf("%s/%d", name, seed), func(t *testing.T) { randomRun(t, name, seed, steps, total) })
		}
	}
	all := 0
	for _, n := range total {
		all += n
	}
	if all < 200_000 { // short, or only some were asked for
		return
	}
	for kind, codes := range reached {
		for _, code := range codes {
			require.GreaterOrEqual(t, total[outcome{kind, code}], 5, "%s %s: the generator misses it", kindName(kind), code)
		}
	}
}

// reached is what the random logs have to lead to, for the comparison to mean something.
var reached = map[meta.Kind][]protocol.Code{
	meta.KindOpenSession:  {0, protocol.CodeDuplicate},
	meta.KindCloseSession: {0},
	meta.KindFence:        {0, protocol.CodeBadRequest},
	meta.KindAlloc:        {0, protocol.CodePending, protocol.CodeSessionExpired, protocol.CodeCanceled, protocol.CodeTooOld},
	meta.KindReturn:       {0, protocol.CodeNotFound},
	meta.KindRegister: {
		0, protocol.CodeSessionExpired, protocol.CodeCanceled, protocol.CodeTooOld, protocol.CodeTooManyUnacked,
	},
	kindEntry: {
		0, protocol.CodeBadRequest, protocol.CodeKeyTooLong, protocol.CodeMisaligned, protocol.CodeNotFound,
		protocol.CodeNotOwner, protocol.CodeOutOfRegion, protocol.CodeOverlap, protocol.CodeRevoking,
		protocol.CodeStaleEpoch, protocol.CodeStaleGeneration,
	},
	meta.KindDelete:      {0, protocol.CodeCanceled},
	meta.KindPin:         {0},
	meta.KindUnpin:       {0},
	meta.KindCancel:      {0, protocol.CodeBadRequest, protocol.CodeTooManyUnacked},
	meta.KindClear:       {0, protocol.CodeBadRequest},
	meta.KindSweep:       {0},
	meta.KindMark:        {0, protocol.CodePending},
	meta.KindRevokeDone:  {0, protocol.CodeStaleEpoch, protocol.CodeBadRequest},
	meta.KindFreeRegion:  {0, protocol.CodePending},
	meta.KindAddDevice:   {0, protocol.CodeBadRequest, protocol.CodeUnsupported},
	meta.KindRetire:      {0, protocol.CodeForbidden},
	meta.KindDropDevice:  {0, protocol.CodeBusy, protocol.CodeNotFound},
	meta.KindSettings:    {0, protocol.CodeBusy, protocol.CodeBadRequest},
	meta.KindIncarnation: {0},
	meta.KindEmptyRegion: {0, protocol.CodePending},
	meta.KindExpirePins:  {0},
	meta.KindTenant:      {0, protocol.CodeNoSpace, protocol.CodeNotFound},
	kindCopy: {
		0, protocol.CodeDuplicate, protocol.CodeLimit, protocol.CodeNotFound, protocol.CodeNotOwner, protocol.CodeOverlap,
		protocol.CodeRevoking, protocol.CodeStaleEpoch, protocol.CodeStaleGeneration, protocol.CodeUnsupported,
	},
	meta.KindDevice:       {0, protocol.CodeBadRequest, protocol.CodeNotFound, protocol.CodeUnsupported},
	meta.KindTask:         {0, protocol.CodeBadRequest, protocol.CodeNotFound, protocol.CodeUnsupported},
	meta.KindTaskDone:     {0, protocol.CodeBadRequest, protocol.CodeCanceled},
	meta.KindCancelTask:   {0, protocol.CodeNotFound},
	meta.KindFencedRegion: {0, protocol.CodeStaleEpoch, protocol.CodeUnsupported},
	meta.KindPutName:      {0, protocol.CodeBadRequest, protocol.CodeUnsupported},
	meta.KindDeleteName:   {0, protocol.CodeBadRequest, protocol.CodeUnsupported},
	meta.KindMaru:         {0, protocol.CodePending, protocol.CodeUnsupported},
}

func randomRun(t *testing.T, name string, seed uint64, steps int, total map[outcome]int) {
	t.Helper()
	p := newPool(t)
	g := newGenerator(p, seed+xxh3.HashString(name), 60)
	if seed%4/2 == 0 {
		g.policies = []string{name} // it never changes
	}
	s := meta.DefaultSettings()
	s.Policy, s.MinRegionAgeMS, s.Version = name, 100, meta.VersionTenants
	p.apply(nil, command{Command: &meta.SetSettings{Settings: s}})
	pages := uint64(64) << (2 * (seed % 2)) // tight and roomy
	p.device("d0", pages)
	p.device("d1", pages/2)
	restarts := 0
	for i := range steps {
		if i == steps/16 {
			s = p.m.Settings()
			s.Version = meta.ClusterVersion
			p.apply(nil, command{Command: &meta.SetSettings{Settings: s}})
		}
		g.step()
		if i%20 == 0 {
			require.NoError(t, p.model.CompareState(p.m))
		}
		if seed%3 > 0 && g.one(60) {
			p.restart()
			restarts++
			p.model = p.model.Clone()
		}
	}
	require.NoError(t, p.model.CompareState(p.m))
	if restarts == 0 {
		require.NoError(t, p.model.CompareCounters(p.m))
	}
	for o, n := range p.seen {
		total[o] += n
	}
	t.Logf("%d commands, %d entries left, %+v", p.count, p.m.Stats().Entries, p.model.worlds[0].counts)
}

// FuzzRandomLogs looks for a seed whose log the machine answers in another way than the model.
func FuzzRandomLogs(f *testing.F) {
	for which := range uint8(4) {
		f.Add(uint64(1+which), which)
	}
	f.Fuzz(func(t *testing.T, seed uint64, which uint8) {
		names := policy.Names()
		randomRun(t, names[int(which)%len(names)], seed, 120, map[outcome]int{})
	})
}
