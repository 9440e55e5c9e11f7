package server

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"runtime"
	"runtime/pprof"
	"runtime/trace"
	"strconv"
	"strings"
	"sync"
	"time"

	"larder/meta"
	"larder/protocol"
)

// Sizes of pages of lists.
const (
	defaultPage = 100
	maxPage     = protocol.MaxBatch
)

const pprofPrefix = "/debug/pprof/"

// adminRoutes is the whole HTTP interface. Filled by init, since the index shows it.
var adminRoutes map[string]adminRoute

func init() {
	adminRoutes = map[string]adminRoute{
		"/":        {get: (*adminCall).index, about: "this list"},
		"/status":  {get: (*adminCall).status, about: "this member, its cluster and the pool"},
		"/regions": {get: (*adminCall).regions, about: "regions; ?after= &limit="},
		"/clients": {get: (*adminCall).clients, about: "sessions"},
		"/keys":    {get: (*adminCall).listKeys, about: "entries; ?tenant= &prefix= &cursor= &limit="},
		"/names":   {get: (*adminCall).names, about: "names; ?tenant= &prefix= &after= &limit="},
		"/pins":    {get: (*adminCall).listPins, about: "pins; ?tenant= &owner= &cursor= &limit="},
		"/config":  {get: (*adminCall).config, about: "configuration in force, as YAML"},
		"/version": {get: (*adminCall).version, about: "versions of this binary"},
		"/healthz": {get: (*adminCall).healthz, about: "200 while the process runs"},
		"/readyz":  {get: (*adminCall).readyz, about: "200 while this member can serve: leader known, log applied, disk well"},
		"/metrics": {get: (*adminCall).prometheus, about: "Prometheus metrics"},
		"/check":   {get: (*adminCall).check, long: true, about: "compare the index with the devices; ?deep=true reads the bytes"},

		"/members":         {get: (*adminCall).members, post: (*adminCall).addMember, about: "members; POST adds one"},
		"/members/promote": {post: (*adminCall).promoteMember, about: "make a learner a voter"},
		"/members/remove":  {post: (*adminCall).removeMember, about: "remove a member for ever"},
		"/transfer-leader": {post: (*adminCall).transferLeader, about: "hand leadership over"},
		"/policy":          {get: (*adminCall).policy, post: (*adminCall).setPolicy, about: "replicated settings; POST changes them"},
		"/tenants":         {get: (*adminCall).tenants, post: (*adminCall).setTenant, about: "tenants and their limits; POST changes them"},
		"/cluster-version": {post: (*adminCall).setVersion, about: "raise the cluster version"},
		"/pin":             {post: (*adminCall).pin, about: "pin keys"},
		"/unpin":           {post: (*adminCall).unpin, about: "undo it"},
		"/clear":           {post: (*adminCall).clear, about: "drop entries by key prefix or context, or all"},
		"/drain":           {post: (*adminCall).drain, about: "take all regions from a client"},
		"/devices":         {get: (*adminCall).devices, about: "devices of the pool"},
		"/devices/drain":   {post: (*adminCall).drainDevice, about: "give up a device, or all of a node"},
		"/tasks":           {get: (*adminCall).tasks, about: "what is copied between devices"},
		"/tasks/cancel":    {post: (*adminCall).cancelTasks, about: "end tasks"},
		"/copy":            {post: (*adminCall).copyKeys, about: "copy or move entries to a tier, node or device"},
		"/snapshot":        {post: (*adminCall).snapshot, long: true, about: "stream a snapshot"},
		pprofPrefix:        {get: (*adminCall).profile, guarded: true, about: "profiles; ?seconds= &debug="},
	}
}

// IndexEntry is one line of GET /.
type IndexEntry struct {
	Methods string `json:"methods"`
	About   string `json:"about"`
}

func (r *adminCall) index() (any, error) {
	list := make(map[string]IndexEntry, len(adminRoutes))
	for path, rt := range adminRoutes {
		var methods []string
		if rt.get != nil {
			methods = append(methods, "GET")
		}
		if rt.post != nil {
			methods = append(methods, "POST")
		}
		list[path] = IndexEntry{strings.Join(methods, " "), rt.about}
	}
	return list, nil
}

// number reads a query parameter.
func (r *adminCall) number(name string, absent, most uint64) (uint64, error) {
	text := r.QueryArgs().Peek(name)
	if len(text) == 0 {
		return absent, nil
	}
	n, err := strconv.ParseUint(string(text), 10, 64)
	if err != nil || n > most {
		return 0, badRequest("%s: want a whole number up to %d", name, most)
	}
	return n, nil
}

// flag reads a query parameter that is true or false.
func (r *adminCall) flag(name string) (bool, error) {
	text := string(r.QueryArgs().Peek(name))
	if text == "" {
		return r.QueryArgs().Has(name), nil
	}
	v, err := parseBool(text)
	if err != nil {
		return false, badRequest("%s: %v", name, err)
	}
	return v, nil
}

func (r *adminCall) status() (any, error) {
	s := r.admin.server.Status()
	return StatusReply{
		Status:   s,
		Settings: settingsView(s.Settings),
		Stats:    statsView(&s.Stats),
		Disk:     diskView(s.Disk),
		Requests: requestsView(r.admin.server.Counters()),
	}, nil
}

func (r *adminCall) members() (any, error) {
	return orEmpty(r.admin.server.Members()), nil
}

func (r *adminCall) clients() (any, error) {
	return orEmpty(r.admin.server.Clients()), nil
}

// orEmpty makes a list of nothing [] instead of null in JSON.
func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// page reads the parameters of a page of a list.
func (r *adminCall) page(cursor string) (from uint64, limit int, err error) {
	if from, err = r.number(cursor, 0, 1<<64-1); err != nil {
		return 0, 0, err
	}
	n, err := r.number("limit", defaultPage, maxPage)
	return from, int(max(n, 1)), err //nolint:gosec // at most maxPage
}

func (r *adminCall) regions() (any, error) {
	after, limit, err := r.page("after")
	if err != nil {
		return nil, err
	}
	list, next := r.admin.server.Regions(after, limit)
	return RegionsReply{Regions: orEmpty(list), Next: next}, nil
}

func (r *adminCall) listKeys() (any, error) {
	cursor, limit, err := r.page("cursor")
	if err != nil {
		return nil, err
	}
	prefix := r.QueryArgs().Peek("prefix")
	if len(prefix) > protocol.MaxKeyBytes {
		return nil, badRequest("prefix: longer than a key can be (%d bytes)", protocol.MaxKeyBytes)
	}
	list, next := r.admin.server.Keys(string(r.QueryArgs().Peek("tenant")), prefix, cursor, limit)
	reply := KeysReply{Keys: make([]KeyView, len(list)), Next: next}
	for i := range list {
		reply.Keys[i] = keyView(&list[i])
	}
	return reply, nil
}

func (r *adminCall) listPins() (any, error) {
	cursor, limit, err := r.page("cursor")
	if err != nil {
		return nil, err
	}
	filter := PinFilter{Tenant: string(r.QueryArgs().Peek("tenant")), Owner: string(r.QueryArgs().Peek("owner"))}
	list, next := r.admin.server.Pins(filter, cursor, limit)
	reply := PinsReply{Pins: make([]PinView, len(list)), Next: next}
	for i := range list {
		reply.Pins[i] = pinView(&list[i])
	}
	return reply, nil
}

func (r *adminCall) policy() (any, error) {
	return settingsView(r.admin.server.Settings()), nil
}

func (r *adminCall) tenants() (any, error) {
	tenants := r.admin.server.Tenants()
	list := make([]TenantView, len(tenants))
	for i := range tenants {
		list[i] = tenantView(&tenants[i])
	}
	return list, nil
}

func (r *adminCall) config() (any, error) {
	cfg := r.admin.server.Config()
	r.SetContentType("application/yaml")
	return nil, cfg.WriteYAML(r)
}

func (r *adminCall) version() (any, error) {
	return VersionReply{
		Version: r.admin.server.Status().Version, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
		Protocol: protocol.Version, ClusterVersion: meta.ClusterVersion,
	}, nil
}

func (r *adminCall) healthz() (any, error) { return HealthReply{true}, nil }

func (r *adminCall) readyz() (any, error) {
	if err := r.admin.server.Ready(); err != nil {
		return nil, &protocol.Error{Code: protocol.CodeUnavailable, Message: err.Error()}
	}
	return HealthReply{true}, nil
}

func (r *adminCall) prometheus() (any, error) {
	return nil, r.admin.metrics.write(r.RequestCtx)
}

func (r *adminCall) check() (any, error) {
	deep, err := r.flag("deep")
	if err != nil {
		return nil, err
	}
	report, err := r.admin.server.Check(r.ctx, deep)
	if err != nil {
		return nil, err
	}
	return report, nil
}

// maxProfileSeconds keeps a profile inside the listener's write timeout.
const maxProfileSeconds = 50

// profiling makes CPU profiles and traces one at a time, which is all that the runtime can do.
var profiling sync.Mutex

// profile serves the runtime's profiles, in the paths and forms that go tool pprof asks for.
func (r *adminCall) profile() (any, error) {
	name := strings.TrimPrefix(strings.TrimPrefix(string(r.Path()), strings.TrimSuffix(pprofPrefix, "/")), "/")
	seconds, err := r.number("seconds", 0, maxProfileSeconds)
	if err != nil {
		return nil, err
	}
	form, err := r.number("debug", 0, 2)
	if err != nil {
		return nil, err
	}
	switch name {
	case "":
		names := []string{"profile", "trace"}
		for _, p := range pprof.Profiles() {
			names = append(names, p.Name())
		}
		return names, nil
	case "cmdline", "symbol":
		return nil, &protocol.Error{Code: protocol.CodeUnsupported, Message: "not served; the profiles carry their symbols"}
	case "profile":
		return nil, r.record(cmp.Or(seconds, 30), startCPU, pprof.StopCPUProfile)
	case "trace":
		return nil, r.record(cmp.Or(seconds, 1), startTrace, trace.Stop)
	}
	p := pprof.Lookup(name)
	if p == nil {
		return nil, &protocol.Error{Code: protocol.CodeNotFound, Message: "no such profile: GET " + pprofPrefix + " lists them"}
	}
	if name == "heap" && r.QueryArgs().Has("gc") {
		runtime.GC()
	}
	r.SetContentType("application/octet-stream")
	if form > 0 {
		r.SetContentType("text/plain; charset=utf-8")
	}
	if err := p.WriteTo(r, int(form)); err != nil { //nolint:gosec // at most 2
		return nil, fmt.Errorf("profile %s: %w", name, err)
	}
	return nil, nil //nolint:nilnil // the reply is written
}

// record runs a profiler for some seconds, or until the server stops.
func (r *adminCall) record(seconds uint64, start func(w *bytes.Buffer) error, stop func()) error {
	if !profiling.TryLock() {
		return &protocol.Error{Code: protocol.CodeBusy, Message: "another profile is being taken: retry when it is done"}
	}
	defer profiling.Unlock()
	var out bytes.Buffer
	if err := start(&out); err != nil {
		return fmt.Errorf("profile: %w", err)
	}
	ctx, cancel := context.WithTimeout(r.ctx, time.Duration(seconds)*time.Second) //nolint:gosec // at most maxProfileSeconds
	<-ctx.Done()
	cancel()
	stop()
	r.SetContentType("application/octet-stream")
	r.SetBody(out.Bytes())
	return nil
}

// startCPU and startTrace give the runtime's functions one type.
func startCPU(w *bytes.Buffer) error   { return pprof.StartCPUProfile(w) }
func startTrace(w *bytes.Buffer) error { return trace.Start(w) }

// deadlineIn is the time on the clock of connections that is d from now.
func deadlineIn(d time.Duration) time.Time {
	return time.Now().Add(d) //nolint:forbidigo // a connection's deadline is a wall-clock time
}
