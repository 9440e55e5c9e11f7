package policy_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"larder/meta/policy"
	"larder/meta/policy/policytest"
)

// script runs the commands of testdata: readable specifications of the order
// in which each policy lets entries go. After every command the order is
// printed, coldest first.
//
//	new policy=NAME            an empty pool
//	add KEY ...                [parent=KEY] [index=N] [at=MS] [expires=MS]
//	touch KEY ...              [n=N]
//	pin, unpin, delete KEY ...
//	evict N                    [keep=(KEY,...)] those that stay
//	rebuild                    from what is persisted
type script struct {
	pool *policytest.Pool
	slot map[string]policy.Slot
}

func (x *script) name(s policy.Slot) string {
	for _, key := range slices.Sorted(maps.Keys(x.slot)) {
		if x.slot[key] == s {
			return key
		}
	}
	return "?"
}

func (x *script) names(slots []policy.Slot) string {
	names := make([]string, len(slots))
	for i, s := range slots {
		names[i] = x.name(s)
	}
	return strings.Join(names, " ")
}

func (x *script) add(t *testing.T, d *datadriven.TestData, key string) {
	t.Helper()
	info := known{Info: policy.Info{Bytes: 1}, Parent: policy.None}
	for _, c := range []byte(key) { // the same key has the same hash
		info.KeyHash = info.KeyHash*31 + uint64(c)
	}
	var parent string
	var index int
	d.MaybeScanArgs(t, "parent", &parent)
	d.MaybeScanArgs(t, "index", &index)
	d.MaybeScanArgs(t, "at", &info.AddedMS)
	d.MaybeScanArgs(t, "expires", &info.ExpiresMS)
	info.Index = uint32(index)
	if parent != "" {
		info.Parent = x.slot[parent]
	}
	x.slot[key] = x.pool.Add(info)
}

func (x *script) evict(t *testing.T, d *datadriven.TestData, n int) string {
	t.Helper()
	var keep []string
	for _, arg := range d.CmdArgs {
		if arg.Key == "keep" {
			keep = arg.Vals
		}
	}
	plan := x.pool.Plan(0, n, func(s policy.Slot) bool { return slices.Contains(keep, x.name(s)) })
	names := x.names(plan)
	for _, s := range plan {
		delete(x.slot, x.name(s))
		x.pool.Evict(s)
	}
	require.NotContains(t, names, "?")
	return "evicted: " + names + "\n"
}

func (x *script) run(t *testing.T, d *datadriven.TestData) string {
	t.Helper()
	out := ""
	switch d.Cmd {
	case "new":
		var name string
		d.ScanArgs(t, "policy", &name)
		pool, err := policytest.NewPool(name, policy.Config{TTLMS: 60_000})
		require.NoError(t, err)
		*x = script{pool: pool, slot: map[string]policy.Slot{}}
	case "rebuild":
		require.NoError(t, x.pool.Rebuild())
	case "evict":
		var n int
		_, err := fmt.Sscan(d.CmdArgs[0].Key, &n)
		require.NoError(t, err)
		out = x.evict(t, d, n)
	default:
		n := 1
		d.MaybeScanArgs(t, "n", &n)
		for _, arg := range d.CmdArgs {
			if len(arg.Vals) == 0 {
				x.apply(t, d, arg.Key, uint32(n))
			}
		}
	}
	return out + "order: " + x.names(x.pool.Plan(0, 1<<30, nil)) + "\n"
}

func (x *script) apply(t *testing.T, d *datadriven.TestData, key string, n uint32) {
	t.Helper()
	if d.Cmd == "add" {
		x.add(t, d, key)
		return
	}
	s, ok := x.slot[key]
	require.True(t, ok, "%s: no entry %q", d.Pos, key)
	switch d.Cmd {
	case "touch":
		x.pool.Touch(s, n)
	case "pin":
		x.pool.Pin(s)
	case "unpin":
		x.pool.Unpin(s)
	case "delete":
		delete(x.slot, key)
		x.pool.Delete(s)
	default:
		t.Fatalf("%s: unknown command %q", d.Pos, d.Cmd)
	}
}

func TestScripts(t *testing.T) {
	datadriven.Walk(t, "testdata/order", func(t *testing.T, path string) {
		t.Helper()
		x := &script{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			t.Helper()
			return x.run(t, d)
		})
	})
}
