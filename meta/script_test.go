package meta

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// TestScripts runs the scripts in testdata. Each is a conversation with the state machine: a command as the leader logs
// it, and what came of it. To accept new output run with -rewrite, and commit it only if you understand every line.
//
//	device pages=N [node=X] [tier=T]          a device with room for N pages
//	drain device=D [cancel]                   it is given up
//	settings [policy=P] [max-regions=N] [min-age=MS] [version=N]
//	tenant NAME [guarantee=PAGES] [bytes=N] [max-pins=N]
//	                                          its limits, anew; bytes are added to the guarantee
//	open NAME [tenant=T]                      a session for an instance
//	alloc NAME need=N | size=N [whole] [keys=(a,b)] [free=N] [evict=false] [last] [on=D] [promote]
//	                                          plan a REQUEST_ALLOC, and log what the plan says
//	register NAME region=R page=N KEY ... [hash=(h,parent,index)] [group=(member,members)] [model=M] [ttl=MS] [touch]
//	         [replicas=N] [copy]              KEYs go to pages N, N+1, ...
//	find KEY ... [tenant=T]                   a lookup
//	match model=M hashes=(h,h,...) [members=N]
//	delete|pin|unpin NAME KEY ... [owner=O] [soft] [until=MS]
//	return NAME region=R [epoch=E]            revoke-done NAME region=R
//	mark|free|empty region=R [for=NAME]   give NAME region=R
//	close|fence NAME [fenced]                 clear NAME [all] [prefix=P] [model=M]
//	sweep N    retire device=D [fenced] [pages=N]       expire-pins    time MS    incarnation N
//	touch KEY ...                             lookups that the leader collected
//	put NAME KEY VALUE [if=REVISION] [lease]  drop NAME KEY [if=REVISION]
//	                                          set and remove a name; NAME of a session, - for none
//	names [prefix=P] [after=KEY] [tenant=T]   a tenant's names
//	since REVISION [prefix=P] [tenant=T]      what has changed
//	maru open|return NAME ...                 a client of Maru's comes, and returns region=R
//	maru register KEY ... region=R [offset=N] [length=N] [by=MS] [again]
//	maru lookup|exists|delete|pin|unpin KEY ...   its keys; pins and what follows them stop at a key that is missing
//	restart                                   rebuild from the store
//	state                                     regions, entries, order
//	tenants                                   what each has, and its limits
func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		t.Helper()
		s := script{pool: newPool(t), names: map[string]SessionID{}}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			t.Helper()
			s.tb = t
			return s.run(t, d)
		})
	})
}

const scriptPage = 4096

type script struct {
	*pool
	names map[string]SessionID
}

// words are the arguments without a value.
func words(d *datadriven.TestData, from int) []string {
	var out []string
	for _, a := range d.CmdArgs[from:] {
		if len(a.Vals) == 0 {
			out = append(out, a.Key)
		}
	}
	return out
}

func (s *script) arg(t *testing.T, d *datadriven.TestData, key string) uint64 {
	t.Helper()
	var v uint64
	d.MaybeScanArgs(t, key, &v)
	return v
}

func (s *script) text(t *testing.T, d *datadriven.TestData, key string) string {
	t.Helper()
	var v string
	d.MaybeScanArgs(t, key, &v)
	return v
}

// secretOf is the secret of a session, which its client knows.
func (s *script) secretOf(name string) uint64 {
	info, _ := s.m.Session(s.names[name])
	return info.Secret
}

// verdict runs a command and shows its code.
func (s *script) verdict(id SessionID, c Command) string {
	code, _ := s.send(id, c)
	return fmt.Sprintf("%s\n", code)
}

func (s *script) send(id SessionID, c Command) (protocol.Code, []byte) {
	s.res.WantEffects = true
	var code protocol.Code
	var body []byte
	if id == 0 {
		code, body = s.apply(Header{}, c)
	} else {
		code, body = s.do(id, c)
	}
	return code, body
}

// effects shows which pages their owners are told of.
func (s *script) effects() string {
	var b strings.Builder
	for _, e := range s.res.Effects {
		fmt.Fprintf(&b, "tell session %d: %s (%s), region %d page %d\n", e.Owner, e.Key, e.Reason, e.Region, e.Offset/scriptPage)
	}
	s.res.Effects = s.res.Effects[:0]
	return b.String()
}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	switch d.Cmd {
	case "device":
		id, tier := DeviceID(len(s.m.devices)+1), "cxl"
		d.MaybeScanArgs(t, "tier", &tier)
		code, _ := s.apply(Header{}, &AddDevice{
			UUID: fmt.Sprint("uuid-", id), Path: "/dev/shm/x", Node: s.text(t, d, "node"), Tier: tier, Coherence: "hardware", DataOffset: scriptPage,
			Size: (s.arg(t, d, "pages") + 1) * scriptPage, Generation: 1,
		})
		return fmt.Sprintf("device %d: %s\n", id, code)
	case "settings":
		n := s.m.Settings()
		d.MaybeScanArgs(t, "policy", &n.Policy)
		d.MaybeScanArgs(t, "max-regions", &n.MaxRegionsPerInstance)
		d.MaybeScanArgs(t, "min-age", &n.MinRegionAgeMS)
		d.MaybeScanArgs(t, "version", &n.Version)
		return s.verdict(0, &SetSettings{n})
	case "open":
		name, features := d.CmdArgs[0].Key, protocol.FeaturePush
		if d.HasArg("deaf") {
			features = 0
		}
		code, body := s.apply(Header{}, &OpenSession{
			Instance: name, Tenant: s.text(t, d, "tenant"), TTLMS: 1000, Secret: 5 + s.index, Replaces: s.names[s.text(t, d, "replaces")],
			Proof: s.secretOf(s.text(t, d, "replaces")), Features: features,
		})
		if code != 0 {
			return code.String() + "\n"
		}
		r, err := DecodeSession(body)
		require.NoError(t, err)
		s.names[name] = r.ID
		return fmt.Sprintf("session %d\n", r.ID)
	case "maru":
		return s.scriptMaru(t, d)
	case "alloc":
		return s.scriptAlloc(t, d)
	case "register":
		return s.scriptRegister(t, d)
	case "find":
		return s.scriptFind(t, d)
	case "match":
		return s.scriptMatch(t, d)
	case "time":
		scanNumber(t, d.CmdArgs[0].Key, &s.now)
		return ""
	case "touch":
		s.index++
		var touches []Touch
		for _, k := range words(d, 0) {
			slot, ok := s.m.Find(TenantID{}, []byte(k))
			require.True(t, ok, k)
			touches = append(touches, Touch{slot, 1})
		}
		require.NoError(t, s.m.Apply(s.index, BeginGroup(nil, s.now, touches), &s.res))
		return ""
	case "restart":
		s.m = s.rebuilt()
		return "same state\n"
	case "state":
		return s.scriptState()
	case "tenants":
		return s.scriptTenants()
	case "put", "drop":
		return s.scriptPutName(t, d)
	case "names", "since":
		return s.scriptNames(t, d)
	}
	return s.scriptSimple(t, d) + s.effects()
}

func (s *script) scriptSimple(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	var id SessionID
	if len(d.CmdArgs) > 0 {
		id = s.names[d.CmdArgs[0].Key]
	}
	region := RegionID(s.arg(t, d, "region"))
	switch d.Cmd {
	case "delete":
		code, body := s.send(id, &Delete{Keys: toKeys(words(d, 1))})
		require.Zero(t, code)
		r, err := DecodeDelete(body)
		require.NoError(t, err)
		return fmt.Sprintln(r.Codes)
	case "pin", "unpin":
		c := &Pin{Undo: d.Cmd == "unpin", Class: ClassHard, Owner: s.text(t, d, "owner"), Until: s.arg(t, d, "until")}
		keys := words(d, 1)
		if keys[len(keys)-1] == "soft" {
			keys, c.Class = keys[:len(keys)-1], ClassSoft
		}
		c.Keys = toKeys(keys)
		code, body := s.send(id, c)
		require.Zero(t, code)
		codes, err := DecodeCodes(body)
		require.NoError(t, err)
		return fmt.Sprintln(codes)
	case "return":
		return s.verdict(id, &ReturnRegion{region, s.arg(t, d, "epoch")})
	case "revoke-done":
		r, _ := s.m.Region(region)
		return s.verdict(id, &RevokeDone{region, r.Epoch})
	case "mark":
		return s.verdict(0, &Mark{region, s.names[s.text(t, d, "for")]})
	case "free":
		return s.verdict(0, &FreeRegion{region})
	case "empty":
		return s.verdict(0, &EmptyRegion{region, s.names[s.text(t, d, "for")]})
	case "give":
		return s.verdict(id, &Alloc{Phase: 2, Region: region, PageSize: scriptPage})
	case "close":
		return s.verdict(0, &CloseSession{ID: id, Fenced: d.HasArg("fenced")})
	case "fence":
		return s.verdict(0, &Fence{id})
	case "clear":
		c := &Clear{All: d.HasArg("all"), Prefix: []byte(s.text(t, d, "prefix"))}
		if m := s.text(t, d, "model"); m != "" {
			c.Context = &Context{Model: m}
		}
		return s.verdict(id, c)
	case "sweep":
		var n uint32
		scanNumber(t, d.CmdArgs[0].Key, &n)
		_, body := s.send(0, &Sweep{n})
		r, err := DecodeCount(body)
		require.NoError(t, err)
		return fmt.Sprintf("%d removed, %d left\n", r.Count, r.Left)
	case "retire":
		dev := s.m.devices[DeviceID(s.arg(t, d, "device"))]
		c := &Retire{Device: dev.id, Generation: dev.Generation + 1, Fenced: d.HasArg("fenced")}
		if n := s.arg(t, d, "pages"); n != 0 {
			c.Size = (n + 1) * scriptPage
		}
		return s.verdict(0, c)
	case "drain":
		return s.verdict(0, &SetDevice{Device: DeviceID(s.arg(t, d, "device")), Mark: true, Draining: !d.HasArg("cancel")})
	case "expire-pins":
		_, body := s.send(0, &ExpirePins{})
		r, err := DecodeCount(body)
		require.NoError(t, err)
		return fmt.Sprintf("%d ended\n", r.Count)
	case "tenant":
		return s.verdict(0, &SetTenant{d.CmdArgs[0].Key, TenantLimits{
			Guarantee: s.arg(t, d, "guarantee")*scriptPage + s.arg(t, d, "bytes"), MaxPins: s.arg(t, d, "max-pins"),
		}})
	case "incarnation":
		var n uint64
		scanNumber(t, d.CmdArgs[0].Key, &n)
		return s.verdict(0, &NewIncarnation{n})
	}
	d.Fatalf(t, "unknown command %q", d.Cmd)
	return ""
}

func toKeys(words []string) [][]byte {
	keys := make([][]byte, len(words))
	for i, w := range words {
		keys[i] = []byte(w)
	}
	return keys
}

func (s *script) scriptAlloc(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	id := s.names[d.CmdArgs[0].Key]
	req := &protocol.AllocRequest{
		Size: s.arg(t, d, "size") * scriptPage, PageSize: scriptPage, NeedPages: s.arg(t, d, "need"),
		RunPages: s.arg(t, d, "run"), FreePages: s.arg(t, d, "free"), Whole: d.HasArg("whole"), Evict: true,
		Device: s.arg(t, d, "on"),
	}
	if req.Promote = d.HasArg("promote"); req.Promote {
		req.Evict = false
	}
	d.MaybeScanArgs(t, "evict", &req.Evict)
	if d.HasArg("keys") {
		for _, a := range d.CmdArgs {
			if a.Key == "keys" {
				req.Keys = toKeys(a.Vals)
			}
		}
	}
	if req.Size == 0 {
		req.Size = 4 * scriptPage
	}
	plan := s.m.PlanAlloc(id, req, noGuard{}, d.HasArg("last"))
	switch plan.Kind {
	case PlanNothing:
		return fmt.Sprintf("nothing needed, found %v\n", plan.Found)
	case PlanRefuse:
		return fmt.Sprintf("%s: %s\n", plan.Code, plan.Message)
	case PlanWait:
		return "wait\n"
	case PlanMark:
		return fmt.Sprintf("mark region %d: %s", plan.Region, s.verdict(0, &Mark{plan.Region, id})) + s.effects()
	case PlanEmpty:
		return fmt.Sprintf("empty region %d: %s", plan.Region, s.verdict(0, &EmptyRegion{plan.Region, plan.For})) + s.effects()
	case PlanCommand:
	}
	code, body := s.send(id, &plan.Cmd)
	if code != 0 {
		return code.String() + "\n"
	}
	r, err := DecodeAlloc(body)
	require.NoError(t, err)
	out := fmt.Sprintf("phase %d:", r.Phase)
	if r.Given {
		out += fmt.Sprintf(" region %d epoch %d at page %d, %d pages", r.Region, r.Epoch, r.RegionOffset/scriptPage, r.RegionLength/scriptPage)
	}
	var outSb283 strings.Builder
	for _, p := range r.Evicted {
		fmt.Fprintf(&outSb283, " evicted %s from region %d page %d;", p.Key, p.Region, p.Offset/scriptPage)
	}
	out += outSb283.String()
	var outSb286 strings.Builder
	for i, k := range req.Keys {
		if r.FoundKey(i) {
			fmt.Fprintf(&outSb286, " found %s;", k)
		}
	}
	out += outSb286.String()
	return out + "\n" + s.effects()
}

func (s *script) scriptRegister(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	region, _ := s.m.Region(RegionID(s.arg(t, d, "region")))
	page := s.arg(t, d, "page")
	var ctx *protocol.Context
	if m := s.text(t, d, "model"); m != "" {
		ctx = &protocol.Context{Model: m}
	}
	c := &Register{Context: ctx}
	for i, k := range words(d, 1) {
		if k == "touch" || k == "copy" {
			continue
		}
		e := protocol.RegisterEntry{
			Key: []byte(k), RegionID: uint64(region.ID), Epoch: region.Epoch, KVOffset: (page + uint64(i)) * scriptPage,
			KVLength: scriptPage, TTLMS: s.arg(t, d, "ttl"), Touch: d.HasArg("touch"),
			Replicas: s.arg(t, d, "replicas"), Copy: d.HasArg("copy"),
		}
		if slot, ok := s.m.Find(TenantID{}, e.Key); ok && e.Copy {
			e.Of = s.m.Birth(slot)
		}
		if d.HasArg("hash") {
			e.HasPrefix = true
			d.ScanArgs(t, "hash", &e.Hash, &e.Parent, &e.Index)
		}
		if d.HasArg("group") {
			var member, members uint64
			d.ScanArgs(t, "group", &member, &members)
			e.Group = member<<16 | members
		}
		c.Entries = append(c.Entries, e)
	}
	code, body := s.send(s.names[d.CmdArgs[0].Key], c)
	if code != 0 {
		return code.String() + "\n"
	}
	it := DecodeRegister(body)
	out := ""
	for i, r := 0, (RegisterResult{}); it.Next(&r); i++ {
		switch {
		case r.New:
			out += fmt.Sprintf("%s: new\n", c.Entries[i].Key)
		case r.Code != 0:
			out += fmt.Sprintf("%s: %s\n", c.Entries[i].Key, r.Code)
		default:
			out += fmt.Sprintf("%s: exists", c.Entries[i].Key)
			if len(r.Key) > 0 {
				out += fmt.Sprintf(" as %s", r.Key)
			}
			out += fmt.Sprintf(" in region %d page %d\n", r.Existing.Region, r.Existing.Offset/scriptPage)
		}
	}
	require.NoError(t, it.Err())
	return out + s.effects()
}

func (s *script) scriptFind(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	out := ""
	var outSb347 strings.Builder
	for _, k := range words(d, 0) {
		slot, ok := s.m.Find(s.m.Tenant(s.text(t, d, "tenant")), []byte(k))
		if !ok {
			outSb347.WriteString(k + ": miss\n")
			continue
		}
		var l Location
		s.m.Location(slot, &l)
		fmt.Fprintf(&outSb347, "%s: region %d epoch %d page %d\n", k, l.Region, l.Epoch, l.Offset/scriptPage)
	}
	out += outSb347.String()
	return out
}

func (s *script) scriptMatch(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	var hashes []uint64
	for _, a := range d.CmdArgs {
		if a.Key == "hashes" {
			for _, v := range a.Vals {
				var h uint64
				scanNumber(t, v, &h)
				hashes = append(hashes, h)
			}
		}
	}
	var keys []string
	n := s.m.PrefixMatch(&Context{Tenant: DefaultTenant, Model: s.text(t, d, "model")}, hashes, s.arg(t, d, "members"),
		func(k []byte) { keys = append(keys, string(k)) })
	return fmt.Sprintf("%d %v\n", n, keys)
}

func (s *script) scriptState() string {
	var b strings.Builder
	for _, r := range s.m.Regions() {
		fmt.Fprintf(&b, "region %d %s owner=%d epoch=%d for=%d live=%d pinned=%d\n", r.ID, r.State, r.Owner, r.Epoch, r.For, r.Live, r.Pinned)
		s.m.EachEntry(r.ID, func(slot Slot) bool {
			e := s.m.Entry(slot)
			fmt.Fprintf(&b, "  %s page %d %s", s.m.Key(slot), e.Offset/scriptPage, e.Class)
			if !s.m.Live(slot) {
				fmt.Fprintf(&b, " dead (%s)", s.m.whyDead(s.m.table.at(slot)))
			}
			b.WriteByte('\n')
			return true
		})
	}
	if n := s.m.SweepPending(); n > 0 {
		fmt.Fprintf(&b, "%d to sweep\n", n)
	}
	for _, d := range s.m.Devices() {
		fmt.Fprintf(&b, "device %d: %d pages free\n", d.ID, d.Free/scriptPage)
	}
	s.m.EachLacking(0, func(slot Slot) bool {
		fmt.Fprintf(&b, "%s lies on %d of %d nodes\n", s.m.Key(slot), s.m.spread(s.m.table.at(slot), nil), s.m.Replicas(slot))
		return true
	})
	return b.String()
}

func (s *script) scriptTenants() string {
	var b strings.Builder
	for _, x := range s.m.Stats().Tenants {
		fmt.Fprintf(&b, "%s: %d entries, %d pages, %d+%d pins", x.Name, x.Entries, x.Space/scriptPage, x.Pins, x.SessionPins)
		if x.TenantLimits != (TenantLimits{}) {
			fmt.Fprintf(&b, "; guarantee %d pages + %d bytes, max-pins %d", x.Guarantee/scriptPage, x.Guarantee%scriptPage, x.MaxPins)
		}
		fmt.Fprintf(&b, "; %d pages can be guaranteed\n", s.m.Guaranteeable(x.Name)/scriptPage)
	}
	return b.String()
}

// scriptPutName sets or removes a name.
func (s *script) scriptPutName(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	w := words(d, 0)
	id, revision := s.names[w[0]], s.arg(t, d, "if")
	var c Command = &DeleteName{Key: []byte(w[1]), Check: d.HasArg("if"), Revision: revision}
	if d.Cmd == "put" {
		c = &PutName{Key: []byte(w[1]), Value: []byte(w[2]), Check: d.HasArg("if"), Revision: revision, Lease: d.HasArg("lease")}
	}
	code, body := s.send(id, c)
	if code != 0 {
		return code.String() + "\n"
	}
	r, err := DecodeName(body)
	require.NoError(t, err)
	return fmt.Sprintf("%s, created %d, modified %d\n", r.Code, r.Created, r.Modified)
}

// scriptNames shows names, or their changes.
func (s *script) scriptNames(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	var b strings.Builder
	show := func(n *NameInfo) {
		fmt.Fprintf(&b, "%s = %q, created %d, modified %d", n.Key, n.Value, n.Created, n.Modified)
		if n.Session != 0 {
			fmt.Fprintf(&b, ", of session %d", n.Session)
		}
		b.WriteByte('\n')
	}
	tenant, prefix := s.m.Tenant(s.text(t, d, "tenant")), s.text(t, d, "prefix")
	if d.Cmd == "names" {
		s.m.EachName(tenant, prefix, s.text(t, d, "after"), func(n NameInfo) bool {
			show(&n)
			return true
		})
		count, bytes := s.m.NamesTotal()
		return b.String() + fmt.Sprintf("%d names, %d bytes, revision %d\n", count, bytes, s.m.NamesRevision())
	}
	var after uint64
	scanNumber(t, d.CmdArgs[0].Key, &after)
	if !s.m.NamesSince(tenant, prefix, after, func(e *NameEvent) bool {
		if e.Deleted {
			b.WriteString("gone: ")
		}
		show(&e.NameInfo)
		return true
	}) {
		return "compacted\n"
	}
	return b.String()
}

// scanNumber reads a number of a script.
func scanNumber(t *testing.T, word string, to any) {
	t.Helper()
	_, err := fmt.Sscan(word, to)
	require.NoError(t, err)
}
