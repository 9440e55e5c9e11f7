package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"net/url"
	"reflect"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"

	"larder/protocol"
)

// FuzzConfigEnv sets any option from the text of an environment variable: it is refused with the variable's name, or
// what is written out as YAML reads as the same.
func FuzzConfigEnv(f *testing.F) {
	options := Options()
	for i, o := range options {
		f.Add(uint8(i), o.Default)
	}
	for i, o := range options {
		switch o.Name {
		case "pool":
			f.Add(uint8(i), "640MiB;/dev/dax0.0,tier=cxl,coherence=none,force")
		case "peers":
			f.Add(uint8(i), "1=10.0.0.1:7401/:7400/:7402;2=[::1]:1")
		case "session_ttl":
			f.Add(uint8(i), "1h0m3.5s")
		case "admin_token", "transfer_token":
			f.Add(uint8(i), "let me in")
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, text string) {
		o := options[int(which)%len(options)]
		c := Default()
		if err := c.readEnv([]string{"LARDER_PORT=tcp://1.2.3.4:5", o.Env + "=" + text}); err != nil {
			require.ErrorContains(t, err, o.Env)
			return
		}
		_ = c.Validate() // what it refuses, it refuses without a panic
		var out bytes.Buffer
		require.NoError(t, c.WriteYAML(&out))
		back := Default()
		require.NoError(t, back.ReadYAML(out.Bytes()), "%s", out.String())
		forgetSecrets(&c) // of which only that there is one is written
		forgetSecrets(&back)
		out.Reset()
		require.NoError(t, c.WriteYAML(&out))
		var again bytes.Buffer
		require.NoError(t, back.WriteYAML(&again))
		require.Equal(t, out.String(), again.String())
	})
}

// forgetSecrets empties every option that is a Secret.
func forgetSecrets(c *Config) {
	for i, v := 0, reflect.ValueOf(c).Elem(); i < v.NumField(); i++ {
		if _, secret := reflect.TypeAssert[Secret](v.Field(i)); secret {
			v.Field(i).SetZero()
		}
	}
}

// FuzzConfigText reads the forms that flags and files share: what is taken is written in a form that means the same.
func FuzzConfigText(f *testing.F) {
	for _, s := range []string{
		"0", "64KiB", "1.5GiB", "8191PiB", "9e18B", "-1KiB", "NaNGiB", "0x10B", "1=a:1", "0x2=[::1]:7/:8/x:9", "=:/",
		"/dev/dax0.0,size=1GiB,force=no", ",,", "1h", "1_000",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if s, err := ParseSize(text); err == nil {
			require.LessOrEqual(t, uint64(s), uint64(math.MaxInt64))
			back, err := ParseSize(s.String())
			require.NoError(t, err)
			require.Equal(t, s, back)
		}
		if p, err := ParsePeer(text); err == nil {
			require.NotZero(t, p.ID)
			back, err := ParsePeer(p.String())
			require.NoError(t, err)
			require.Equal(t, p, back)
		}
		if d, err := ParseDevice(text); err == nil && d.Path != "" {
			back, err := ParseDevice(d.String())
			require.NoError(t, err)
			require.Equal(t, d, back)
		}
		if d, err := parseDuration(text); err == nil {
			back, err := parseDuration(formatDuration(d))
			require.NoError(t, err)
			require.Equal(t, d, back)
		}
		c := decodeContext([]byte(text))
		require.Equal(t, c, decodeContext(encodeContext(c)), "what a member says of itself")
	})
}

// adminBodies are what POSTs read, by path.
var adminBodies = map[string]reflect.Type{
	"/members": reflect.TypeFor[MemberRequest](), "/members/promote": reflect.TypeFor[MemberRequest](),
	"/members/remove": reflect.TypeFor[MemberRequest](), "/transfer-leader": reflect.TypeFor[MemberRequest](),
	"/tenants": reflect.TypeFor[TenantRequest](), "/policy": reflect.TypeFor[PolicyRequest](), "/cluster-version": reflect.TypeFor[VersionRequest](),
	"/pin": reflect.TypeFor[PinRequest](), "/unpin": reflect.TypeFor[PinRequest](), "/clear": reflect.TypeFor[ClearRequest](),
	"/drain": reflect.TypeFor[DrainRequest](), "/snapshot": nil, "/devices/drain": reflect.TypeFor[DeviceDrainRequest](),
	"/tasks/cancel": reflect.TypeFor[CancelRequest](), "/copy": reflect.TypeFor[CopyRequest](),
}

// FuzzAdminRequest calls every path with any query and any body, without a network in between: the answer is an object
// of ours, and none is an accident. Changes of the membership are only decoded: they could leave the fuzzer's cluster of
// one without a majority.
func FuzzAdminRequest(f *testing.F) {
	var paths []string
	for path, rt := range adminRoutes {
		if rt.post != nil {
			require.Contains(f, adminBodies, path, "say what it reads")
		}
		if path != pprofPrefix && path != "/snapshot" { // which takes time on purpose, and which needs a connection
			paths = append(paths, path)
		}
	}
	slices.Sort(paths)
	s, a := startAdminTest(f, nil)
	for i, path := range paths {
		if body := adminBodies[path]; body != nil {
			b, err := json.Marshal(reflect.New(body).Interface())
			require.NoError(f, err)
			f.Add(uint8(i), "", b)
		}
		f.Add(uint8(i), "limit=1&after=2&cursor=3&prefix=%00&deep=true", []byte(nil))
	}
	for i, path := range paths {
		switch path {
		case "/policy":
			f.Add(uint8(i), "", []byte(`{"policy":"sieve","page_size":4096,"region_size":1048576,"ttl_ms":18446744073709551615}`))
		case "/pin":
			f.Add(uint8(i), "", []byte(`{"keys":["a","ff"],"hex":true,"ttl_ms":1}`))
		case "/clear":
			f.Add(uint8(i), "", []byte(`{"all":true,"prefix":"a"}`))
		}
	}
	f.Fuzz(func(t *testing.T, which uint8, query string, body []byte) {
		path := paths[int(which)%len(paths)]
		var c fasthttp.RequestCtx
		c.Request.SetRequestURI((&url.URL{Path: path, RawQuery: query}).String())
		if rt := adminRoutes[path]; rt.post != nil && (rt.get == nil || len(body) > 0) {
			c.Request.Header.SetMethod(fasthttp.MethodPost)
			c.Request.Header.SetContentType("application/json")
			c.Request.SetBody(body)
		}
		if body := adminBodies[path]; body == reflect.TypeFor[MemberRequest]() && c.IsPost() {
			v := reflect.New(body).Interface()
			if err := (&adminCall{RequestCtx: &c, admin: a}).decode(v); err != nil {
				var bad *protocol.Error
				require.ErrorAs(t, err, &bad)
			}
			return
		}
		a.serve(&c)
		answer := c.Response.Body()
		require.NotContains(t, string(answer), "internal error", "%s %q", path, body)
		if c.Response.StatusCode()/100 == 2 {
			return
		}
		var failure AdminError
		require.NoError(t, json.Unmarshal(answer, &failure), "%s", answer)
		require.NotEmpty(t, failure.Error)
		require.NotEmpty(t, failure.Code)
		require.NoError(t, s.Ready(), "one request does not stop the server")
	})
}

// FuzzSession sends any message in a session of a real server: it costs at most the session, and the next client is
// served.
func FuzzSession(f *testing.F) {
	cfg := testConfig(f)
	cfg.Listen = Off
	s := startServer(f, cfg)
	types := []protocol.Type{
		protocol.TypeRequestAlloc, protocol.TypeReturnAlloc, protocol.TypeListAllocations, protocol.TypeRegister,
		protocol.TypeBatchRegister, protocol.TypeLookup, protocol.TypeBatchLookup, protocol.TypeDelete, protocol.TypeBatchDelete,
		protocol.TypePin, protocol.TypeUnpin, protocol.TypeExists, protocol.TypePrefixMatch, protocol.TypeClear,
		protocol.TypeListKeys, protocol.TypeCancel, protocol.TypeRevokeDone, protocol.TypeFreedAck, protocol.TypeHeartbeat,
		protocol.TypeHandshake, protocol.TypeGetStats, protocol.TypeReportStats, protocol.TypeAttach, protocol.TypeTasks,
		protocol.TypeTaskDone, protocol.TypeGranted, protocol.TypeFenced, protocol.TypeCopy, protocol.TypeTaskStatus,
		protocol.TypeCancelTask, protocol.TypePutName, protocol.TypeDeleteName, protocol.TypeListNames, protocol.TypeWatchNames,
		protocol.TypeListBlocks,
	}
	index := func(t protocol.Type) uint8 { return uint8(slices.Index(types, t)) }
	alloc := protocol.AllocRequest{InstanceID: "fuzz1", Size: 1 << 20, PageSize: 4096, NeedPages: 1}
	f.Add(index(protocol.TypeRequestAlloc), alloc.Append(nil))
	alloc.Size, alloc.PageSize, alloc.NeedPages = 1<<62, 1<<40, math.MaxUint32
	f.Add(index(protocol.TypeRequestAlloc), alloc.Append(nil))
	reg := protocol.RegisterRequest{Entries: []protocol.RegisterEntry{{
		Key: []byte("k"), RegionID: 1, KVOffset: math.MaxUint64 - 4095, KVLength: 4096, Epoch: 1, TTLMS: math.MaxUint64,
	}}}
	f.Add(index(protocol.TypeBatchRegister), reg.AppendAs(nil, protocol.TypeBatchRegister))
	f.Add(index(protocol.TypeRegister), reg.AppendAs(nil, protocol.TypeRegister))
	look := protocol.LookupRequest{Keys: [][]byte{[]byte("k")}, LeaseMS: math.MaxUint64, Release: []uint64{1, math.MaxUint64}}
	f.Add(index(protocol.TypeBatchLookup), look.AppendAs(nil, protocol.TypeBatchLookup))
	attach := protocol.AttachRequest{
		UUID: "0123456789abcdef0123456789abcdef", Node: "n", Tier: "ssd", Size: 1 << 20, Align: 4096, Ready: true, Generation: 1,
	}
	f.Add(index(protocol.TypeAttach), attach.Append(nil))
	order := protocol.CopyRequest{Keys: [][]byte{[]byte("k")}, Tier: "ssd", Move: true}
	f.Add(index(protocol.TypeCopy), order.Append(nil))
	ask := protocol.TasksRequest{Device: math.MaxUint64, After: math.MaxUint64, Limit: math.MaxUint64}
	f.Add(index(protocol.TypeTasks), ask.Append(nil))
	done := protocol.TaskDoneRequest{Task: 1, Done: math.MaxUint64, Bytes: math.MaxUint64}
	f.Add(index(protocol.TypeTaskDone), done.Append(nil))
	put := protocol.PutNameRequest{Key: []byte("k"), Value: []byte("v"), Check: true, Revision: math.MaxUint64, Lease: true}
	f.Add(index(protocol.TypePutName), put.Append(nil))
	list := protocol.ListNamesRequest{Prefix: []byte("k"), After: []byte("a"), Limit: math.MaxUint64}
	f.Add(index(protocol.TypeListNames), list.Append(nil))
	watch := protocol.WatchNamesRequest{Prefix: []byte("k"), After: math.MaxUint64, TimeoutMS: 1}
	f.Add(index(protocol.TypeWatchNames), watch.Append(nil))
	for i := range types {
		f.Add(uint8(i), []byte{0x80})
	}
	instances, w := 0, (*wire)(nil)
	f.Fuzz(func(t *testing.T, which uint8, body []byte) {
		if w == nil {
			c, err := net.Dial("unix", s.Config().Socket) // lives on from input to input; the server's end closes it
			require.NoError(t, err)
			w = &wire{tb: t, c: c, r: protocol.NewReader(c)}
			instances++
			opened := w.handshake(protocol.HandshakeRequest{
				InstanceID: fmt.Sprint("fuzz", instances), Features: protocol.FeatureCopies | protocol.FeatureNode,
			})
			require.NoError(t, opened.Err())
			if instances == 1 {
				a := w.alloc(protocol.AllocRequest{InstanceID: "fuzz1", Size: 1 << 20, PageSize: 4096})
				require.NoError(t, a.Err())
				w.register(a.Region, 0, "k")
			}
		}
		w.tb = t
		typ := types[int(which)%len(types)]
		var code protocol.HeartbeatReply
		require.NoError(t, code.Decode(w.call(typ, body)))
		require.NotEqual(t, protocol.CodeInternal, code.Code, "%v: %s", typ, code.Message)
		if typ == protocol.TypeHandshake && code.Code == 0 {
			w = nil // it may have become another's
			return
		}
		var alive protocol.HeartbeatReply
		require.NoError(t, alive.Decode(w.call(protocol.TypeHeartbeat, []byte{0x80})))
		if alive.Code != 0 {
			w = nil
		}
	})
}
