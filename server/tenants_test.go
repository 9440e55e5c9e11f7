package server

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/meta"
	"larder/protocol"
)

// guarantee raises the cluster version and gives a tenant a guarantee of pages.
func (r *rig) guarantee(tenant string, pages uint64) {
	r.t.Helper()
	set := r.m.machine.Settings()
	set.Version = meta.VersionTenants
	r.do(&meta.SetSettings{Settings: set})
	r.do(&meta.SetTenant{Tenant: tenant, Limits: meta.TenantLimits{Guarantee: pages * testPage}})
}

// left counts the entries of a tenant.
func (r *rig) left(tenant string) uint64 {
	for _, x := range r.m.machine.Stats().Tenants {
		if x.Name == tenant {
			return x.Entries
		}
	}
	return 0
}

// What cannot be had for another tenant's guarantee is refused at once, and said and counted as that.
func TestOtherTenantsLeaveAGuarantee(t *testing.T) {
	r := newRig(t)
	r.device(16)
	red := r.tenantClient("owner", "red", protocol.FeaturePush)
	red.store("a", 8)
	red.store("b", 8)
	blue := r.tenantClient("other", "blue", protocol.FeaturePush)
	r.guarantee("red", 9)
	r.afterGrace()
	a := blue.alloc(protocol.AllocRequest{Size: 8 * testPage, PageSize: testPage, Evict: true})
	require.Equal(t, protocol.CodeNoSpace, a.Code)
	require.Contains(t, a.Message, "guaranteed to other tenants")
	require.Equal(t, uint64(1), r.m.n.AllocsKept.Load())
	require.Nil(t, red.pushed(protocol.TypeRevoke))
	require.Equal(t, uint64(16), r.left("red"))

	own := r.tenantClient("own", "red", protocol.FeaturePush)
	own.send(protocol.TypeRequestAlloc, (&protocol.AllocRequest{
		Mutation: own.next(), InstanceID: "own", Size: 8 * testPage, PageSize: testPage, Evict: true,
	}).Append(nil))
	r.settle()
	require.NotNil(t, red.pushed(protocol.TypeRevoke), "its own tenant may evict what is guaranteed to it")
}

// Requests that are planned together do not take together what each of them might have taken alone.
func TestRequestsAtTheSameTimeLeaveAGuarantee(t *testing.T) {
	r := newRig(t)
	r.device(26)
	red := r.tenantClient("owner", "red", protocol.FeaturePush)
	small := red.store("a", 8)
	red.store("b", 8)
	red.store("c", 10)
	blue, green := r.tenantClient("blue", "blue", protocol.FeaturePush), r.tenantClient("green", "green", protocol.FeaturePush)
	r.guarantee("red", 16)
	r.afterGrace()
	ask := func(c *testClient, pages uint64) uint32 {
		req := protocol.AllocRequest{Mutation: c.next(), InstanceID: "x", Size: pages * testPage, PageSize: testPage, Evict: true}
		return c.send(protocol.TypeRequestAlloc, req.Append(nil))
	}
	first, second := ask(blue, 8), ask(green, 10) // into one log entry: 18 pages would be left, or 16, but not both
	r.settle()
	var push protocol.RevokePush
	require.NoError(t, push.Decode(red.pushed(protocol.TypeRevoke)))
	require.Equal(t, small.RegionID, push.RegionID)
	require.Nil(t, red.pushed(protocol.TypeRevoke))
	done := protocol.RevokeDoneRequest{Mutation: red.next(), RegionID: small.RegionID, Epoch: small.Epoch}
	red.call(protocol.TypeRevokeDone, done.Append(nil))
	r.pass(1100 * time.Millisecond)
	require.Equal(t, protocol.CodeOK, allocReply(t, blue.answer(first)).Code)
	require.Equal(t, protocol.CodeNoSpace, allocReply(t, green.answer(second)).Code)
	require.Equal(t, uint64(18), r.left("red"))
}

// Limits outlive a restart, and go with a snapshot.
func TestLimitsOfTenantsAreKept(t *testing.T) {
	cfg := testConfig(t)
	s, err := Start(cfg, testLogger(t))
	require.NoError(t, err)
	require.Equal(t, uint32(meta.ClusterVersion), s.Settings().Version, "a new pool has the newest version")
	want, err := s.SetTenant(t.Context(), "red", func(l *meta.TenantLimits) { l.Guarantee, l.MaxPins = 1<<20, 5 })
	require.NoError(t, err)
	require.Equal(t, meta.TenantStats{Name: "red", TenantLimits: meta.TenantLimits{Guarantee: 1 << 20, MaxPins: 5}}, want)
	_, err = s.SetTenant(t.Context(), "blue", func(l *meta.TenantLimits) { l.Guarantee = 63<<20 + 1 })
	require.Equal(t, protocol.CodeNoSpace, protocol.CodeOf(err))
	require.ErrorContains(t, err, "can be guaranteed")
	var snapshot bytes.Buffer
	require.NoError(t, s.SnapshotSave(t.Context(), &snapshot))
	require.NoError(t, s.Stop(t.Context()))
	restored := cfg
	restored.DataDir = t.TempDir()
	_, err = Restore(&restored, &snapshot, testLogger(t))
	require.NoError(t, err)
	for _, cfg := range []Config{cfg, restored} {
		s, err := Start(cfg, testLogger(t))
		require.NoError(t, err)
		require.Eventually(t, func() bool { return s.Ready() == nil }, 20*time.Second, time.Millisecond)
		require.Contains(t, s.Tenants(), want)
		require.NoError(t, s.Stop(t.Context()))
	}
}
