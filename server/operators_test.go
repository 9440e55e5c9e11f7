package server

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/meta"
	"larder/protocol"
)

// tenantClient opens a session of a tenant with one region, and stores keys there.
func tenantClient(t *testing.T, s *Server, instance, tenant string, keys ...string) *wire {
	t.Helper()
	w := dial(t, "unix", s.Config().Socket)
	require.NoError(t, w.handshakeErr(protocol.HandshakeRequest{InstanceID: instance, Tenant: tenant}))
	w.fill(instance, keys...)
	return w
}

func (w *wire) handshakeErr(req protocol.HandshakeRequest) error {
	w.tb.Helper()
	r := w.handshake(req)
	return r.Err()
}

// fill takes a region of 64 KiB and stores keys there.
func (w *wire) fill(instance string, keys ...string) protocol.Region {
	w.tb.Helper()
	a := w.alloc(protocol.AllocRequest{InstanceID: instance, Size: 64 << 10, PageSize: 4096})
	require.NoError(w.tb, a.Err())
	r := w.register(a.Region, 0, keys...)
	require.NoError(w.tb, r.Err())
	return a.Region
}

// get decodes the answer to a GET of the admin.
func get[T any](t *testing.T, a *Admin, path string) (v T) {
	t.Helper()
	code, body := ask(t, a, "GET", path, "")
	require.Equal(t, http.StatusOK, code, "%s", body)
	require.NoError(t, json.Unmarshal(body, &v))
	return v
}

func TestPinsAreListed(t *testing.T) {
	s, a := startAdminTest(t, nil)
	w := tenantClient(t, s, "one", "", "a", "b", "c\xff")
	tenantClient(t, s, "two", "blue", "a")
	for _, body := range []string{
		`{"keys":["a","b"]}`, `{"keys":["a"],"owner":"ann","ttl_ms":60000}`, `{"keys_hex":["63ff"],"owner":"ann","ttl_ms":60000,"soft":true}`,
		`{"tenant":"blue","keys":["a"],"owner":"bob"}`,
	} {
		code, answer := ask(t, a, "POST", "/pin", body)
		require.Equal(t, http.StatusOK, code, "%s", answer)
		require.NotContains(t, string(answer), "false", body)
	}
	own := protocol.KeysRequest{Mutation: w.next(), Keys: [][]byte{[]byte("b")}}
	var reply protocol.KeysReply
	require.NoError(t, reply.DecodeAs(w.call(protocol.TypePin, own.AppendAs(nil, protocol.TypePin)), protocol.TypePin))
	require.NoError(t, reply.Err())

	all := get[PinsReply](t, a, "/pins")
	require.Zero(t, all.Next)
	require.Len(t, all.Pins, 6)
	seen := map[string]PinView{}
	for _, p := range all.Pins {
		seen[p.Tenant+"/"+p.KeyHex+"/"+p.Owner] = p
	}
	require.Equal(t, PinView{Tenant: "default", Key: "a", KeyHex: "61", Class: "hard", Owner: "operator", LeftMS: -1}, seen["default/61/operator"])
	require.Equal(t, PinView{Tenant: "blue", Key: "a", KeyHex: "61", Class: "hard", Owner: "bob", LeftMS: -1}, seen["blue/61/bob"])
	require.Equal(t, w.session, seen["default/62/"].Session, "a pin of a client's session says whose")
	soft := seen["default/63ff/ann"]
	require.Equal(t, "soft", soft.Class)
	require.Equal(t, "c\uFFFD", soft.Key)
	require.NotZero(t, soft.UntilMS)
	require.InDelta(t, 60000, soft.LeftMS, 30000)

	require.Len(t, get[PinsReply](t, a, "/pins?owner=ann").Pins, 2)
	require.Len(t, get[PinsReply](t, a, "/pins?tenant=blue").Pins, 1)
	require.NotNil(t, get[PinsReply](t, a, "/pins?owner=nobody").Pins)
	var paged []PinView
	for cursor, pages := uint64(0), 0; pages == 0 || cursor != 0; pages++ {
		require.Less(t, pages, 10)
		page := get[PinsReply](t, a, "/pins?limit=1&cursor="+jsonNumber(cursor))
		paged, cursor = append(paged, page.Pins...), page.Next
	}
	require.Len(t, paged, 6, "pages hold every pin once, those of one entry together")
}

func jsonNumber(n uint64) string { b, _ := json.Marshal(n); return string(b) } //nolint:errchkjson // a number

// An operator reaches the keys of every tenant, whatever bytes are in them, and leaves no session behind.
func TestOperatorsReachEveryTenantsKeys(t *testing.T) {
	s, a := startAdminTest(t, nil)
	tenantClient(t, s, "one", "", "same", "\xff\x00")
	tenantClient(t, s, "two", "blue", "same")

	keys := get[KeysReply](t, a, "/keys?tenant=blue").Keys
	require.Len(t, keys, 1)
	require.Equal(t, "blue", keys[0].Tenant)
	keys = get[KeysReply](t, a, "/keys?prefix=%ff").Keys
	require.Len(t, keys, 1)
	require.Equal(t, "ff00", keys[0].KeyHex)
	require.Equal(t, "default", keys[0].Tenant)
	require.Equal(t, "\uFFFD\x00", keys[0].Key, "for people")
	require.Len(t, get[KeysReply](t, a, "/keys").Keys, 3)

	post := func(path, body string) string {
		code, answer := ask(t, a, "POST", path, body)
		require.Equal(t, http.StatusOK, code, "%s", answer)
		return strings.TrimSpace(string(answer))
	}
	require.JSONEq(t, `{"results":[true,false]}`, post("/pin", `{"tenant":"blue","keys":["same","nope"]}`))
	pins := map[string]uint64{}
	for _, k := range get[KeysReply](t, a, "/keys?prefix=same").Keys {
		pins[k.Tenant] = k.Pins
	}
	require.Equal(t, map[string]uint64{"blue": 1, "default": 0}, pins)
	require.JSONEq(t, `{"results":[false]}`, post("/unpin", `{"keys":["same"]}`), "the default tenant's is not pinned")
	require.JSONEq(t, `{"results":[true,false]}`, post("/unpin", `{"tenant":"blue","keys":["same","nope"]}`))
	require.JSONEq(t, `{"results":[false]}`, post("/pin", `{"tenant":"unheard-of","keys":["same"]}`))
	for _, tenant := range s.Status().Stats.Tenants {
		require.NotEqual(t, "unheard-of", tenant.Name, "asking for a tenant does not make it")
	}
	require.Eventually(t, func() bool { return len(s.Clients()) == 2 }, 10*time.Second, 5*time.Millisecond, "%v", s.Clients())
	code, answer := ask(t, a, "POST", "/pin", `{"keys":["a"],"tenant":"`+strings.Repeat("t", protocol.MaxNameBytes+1)+`"}`)
	require.Equal(t, http.StatusBadRequest, code, "%s", answer)
}

// A drain asks for every region that it may, and says which it may not and why.
func TestDrainTellsWhatItLeaves(t *testing.T) {
	s, a := startAdminTest(t, func(cfg *Config) {
		cfg.ElectionTimeout, cfg.DefaultLease = 300*time.Millisecond, 200*time.Millisecond
	})
	w := tenantClient(t, s, "full", "", "a")
	pinned := w.fill("full", "b")
	w.fill("full", "c")
	require.NoError(t, dial(t, "unix", s.Config().Socket).handshakeErr(protocol.HandshakeRequest{InstanceID: "idle"}))
	_, err := s.Pin(t.Context(), [][]byte{[]byte("b")}, PinSpec{Owner: "ann"})
	require.NoError(t, err)

	drain := func(instance string) (reply DrainReply) {
		code, body := ask(t, a, "POST", "/drain", `{"instance":"`+instance+`"}`)
		require.Equal(t, http.StatusOK, code, "%s", body)
		require.NoError(t, json.Unmarshal(body, &reply))
		return reply
	}
	reply := drain("full")
	require.Equal(t, 2, reply.Regions)
	require.Len(t, reply.Kept, 1)
	require.Equal(t, pinned.RegionID, reply.Kept[0].Region)
	require.Contains(t, reply.Kept[0].Reason, "1 pinned entries")
	require.Contains(t, reply.Kept[0].Reason, "larder ctl pins")
	found := w.lookup(0, "a", "b", "c").Results
	require.Equal(t, []bool{false, true, false}, []bool{found[0].Found, found[1].Found, found[2].Found})
	states := map[string]int{}
	regions, _ := s.Regions(0, 0)
	for i := range regions {
		states[regions[i].State]++
	}
	require.Equal(t, 2, states[meta.RegionMarked.String()], "%v", states)

	undone, err := s.Unpin(t.Context(), "", [][]byte{[]byte("b")}, "ann")
	require.NoError(t, err)
	require.Equal(t, []bool{true}, undone)
	require.Equal(t, DrainReply{Regions: 1, Kept: []KeptRegion{}}, drain("full"))
	require.Equal(t, DrainReply{Kept: []KeptRegion{}}, drain("full"), "what was asked for is not asked for again")
	require.Equal(t, DrainReply{Kept: []KeptRegion{}}, drain("idle"), "an instance may have nothing to give")

	code, body := ask(t, a, "POST", "/drain", `{"instance":"nobody"}`)
	require.Equal(t, http.StatusNotFound, code)
	require.Contains(t, string(body), "larder ctl clients")
}

// A check says which devices it could not look at.
func TestCheckNamesDevicesOfOtherHosts(t *testing.T) {
	s, a := startAdminTest(t, nil)
	report := get[CheckReport](t, a, "/check")
	require.Equal(t, 1, report.Devices)
	require.Empty(t, report.Foreign)
	_, err := s.do(t.Context(), &meta.AddDevice{
		UUID: "00112233445566778899aabbccddeeff", Path: "/dev/dax7.0", Node: "elsewhere", Tier: "cxl", Coherence: "none",
		Size: 16 << 20, DataOffset: 2 << 20, Align: 64 << 10, Generation: 7,
	})
	require.NoError(t, err)
	report = get[CheckReport](t, a, "/check")
	require.Empty(t, report.Problems)
	require.Equal(t, 2, report.Devices)
	require.Len(t, report.Foreign, 1)
	require.Equal(t, "/dev/dax7.0", report.Foreign[0].Path)
	require.Equal(t, "elsewhere", report.Foreign[0].Node)
}

func TestProfilesAreListedWithAndWithoutTheSlash(t *testing.T) {
	_, a := startAdminTest(t, func(cfg *Config) { cfg.AdminToken = "hunter2" })
	code, _ := ask(t, a, "GET", "/debug/pprof", "")
	require.Equal(t, http.StatusUnauthorized, code, "it is no way around the token")
	for _, path := range []string{"/debug/pprof", "/debug/pprof/"} {
		code, body := ask(t, a, "GET", path, "", "Authorization", "Bearer hunter2")
		require.Equal(t, http.StatusOK, code, path)
		require.Contains(t, string(body), `"heap"`)
	}
	code, _ = ask(t, a, "GET", "/debug/pprofile", "")
	require.Equal(t, http.StatusNotFound, code)
}

// A session that serves one request of an operator ends though nobody waited for its opening.
func TestAnOperatorsSessionEndsThoughNobodyWaits(t *testing.T) {
	cfg := testConfig(t)
	cfg.SessionTTL = 5 * cfg.ElectionTimeout
	s := startServer(t, cfg)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	opened := uint64(0)
	for lost := false; !lost; opened++ { // the log may be quicker than it is noticed that nobody waits
		_, err := s.openFor(ctx, "blue")
		lost = err != nil
	}
	require.Eventually(t, func() bool { return s.Counters().SessionsExpired.Load() == opened }, 20*time.Second, 5*time.Millisecond)
}

// A member that cannot know says so, instead of that there is no such tenant.
func TestPinsOfAnUnknownTenantAreNotAnsweredByFollowers(t *testing.T) {
	servers := startCluster(t)
	leader := leaderOf(t, servers)
	keys := [][]byte{[]byte("k")}
	for _, tenant := range []string{"", "unheard-of"} {
		pinned, err := leader.Pin(t.Context(), keys, PinSpec{Tenant: tenant, Owner: "ann"})
		require.NoError(t, err)
		require.Equal(t, []bool{false}, pinned)
		for _, s := range followers(t, servers, leader) {
			_, err = s.Pin(t.Context(), keys, PinSpec{Tenant: tenant, Owner: "ann"})
			require.Equal(t, protocol.CodeNotLeader, protocol.CodeOf(err), "%q: %v", tenant, err)
			_, err = s.Unpin(t.Context(), tenant, keys, "ann")
			require.Equal(t, protocol.CodeNotLeader, protocol.CodeOf(err), "%q: %v", tenant, err)
		}
	}
	leader.master.restored.Store(true)
	leader.master.serving.Store(false)
	_, err := leader.Pin(t.Context(), keys, PinSpec{Tenant: "unheard-of", Owner: "ann"})
	require.Equal(t, protocol.CodeUnavailable, protocol.CodeOf(err), "nor while a restored index has no incarnation: %v", err)
}

// What may be asked for is asked for, whatever changes meanwhile; what is not, and is still there, is told.
func TestDrainOfARegionWhosePinsChange(t *testing.T) {
	pending := &protocol.Error{Code: protocol.CodePending}
	down := &protocol.Error{Code: protocol.CodeUnavailable}
	region := func(state meta.RegionState, pinned uint32) meta.RegionInfo {
		return meta.RegionInfo{ID: 7, State: state, Pinned: pinned}
	}
	for name, tc := range map[string]struct {
		marks []error
		seen  []meta.RegionInfo // after each mark that is pending; ID 0: it is gone
		asked bool
		kept  string
		err   error
	}{
		"free":           {marks: []error{nil}, asked: true},
		"down":           {marks: []error{down}, err: down},
		"pinned":         {marks: []error{pending}, seen: []meta.RegionInfo{region(meta.RegionOwned, 2)}, kept: "2 pinned entries"},
		"gone":           {marks: []error{pending}, seen: []meta.RegionInfo{{}}},
		"marked already": {marks: []error{pending}, seen: []meta.RegionInfo{region(meta.RegionMarked, 0)}},
		"drained, though pinned": {
			marks: []error{pending}, seen: []meta.RegionInfo{region(meta.RegionDraining, 1)},
		},
		"unpinned meanwhile": {
			marks: []error{pending, nil}, seen: []meta.RegionInfo{region(meta.RegionOwned, 0)}, asked: true,
		},
		"orphaned and unpinned meanwhile": {
			marks: []error{pending, nil}, seen: []meta.RegionInfo{region(meta.RegionOrphaned, 0)}, asked: true,
		},
		"pinned again": {
			marks: []error{pending, pending}, seen: []meta.RegionInfo{region(meta.RegionOwned, 0), region(meta.RegionOwned, 1)},
			kept: "1 pinned entries",
		},
		"pinned and unpinned all the time": {
			marks: []error{pending, pending}, seen: []meta.RegionInfo{region(meta.RegionOwned, 0), region(meta.RegionOwned, 0)},
			kept: "drain it again",
		},
		"down the second time": {
			marks: []error{pending, down}, seen: []meta.RegionInfo{region(meta.RegionOwned, 0)}, err: down,
		},
	} {
		t.Run(name, func(t *testing.T) {
			marks, looks := 0, 0
			asked, kept, err := askFor(func() error {
				marks++
				return tc.marks[marks-1]
			}, func() (meta.RegionInfo, bool) {
				looks++
				return tc.seen[looks-1], tc.seen[looks-1].ID != 0
			})
			require.Equal(t, tc.asked, asked)
			require.Equal(t, tc.err, err)
			require.Equal(t, len(tc.marks), marks)
			require.Equal(t, len(tc.seen), looks)
			require.Contains(t, kept, tc.kept)
			require.Equal(t, tc.kept == "", kept == "")
		})
	}
}
