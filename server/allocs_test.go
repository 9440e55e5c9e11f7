//go:build !race

// The race detector has sync.Pool forget at random, and allocates for itself.

package server

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// TestALookupAllocatesNothing: what Master.serveLookup promises. Leases are given back with the next request, as clients
// do.
func TestALookupAllocatesNothing(t *testing.T) {
	const n = 128
	r := newRig(t)
	r.device(2 * n)
	r.afterGrace()
	c := r.client("a")
	c.store("p", n)
	maru := r.connect() // without a session
	for name, tc := range map[string]struct {
		client *testClient
		typ    protocol.Type
		keys   []string
		packed bool
		found  int
	}{
		"one key":         {c, protocol.TypeLookup, []string{"p0"}, false, 1},
		"a miss":          {c, protocol.TypeLookup, []string{"none"}, false, 0},
		"a batch":         {c, protocol.TypeBatchLookup, many("p", n), false, n},
		"a packed batch":  {c, protocol.TypeBatchLookup, many("p", n), true, n},
		"without session": {maru, protocol.TypeLookup, []string{"p0"}, false, 1},
	} {
		t.Run(name, func(t *testing.T) {
			req := protocol.LookupRequest{Packed: tc.packed}
			for _, k := range tc.keys {
				req.Keys = append(req.Keys, []byte(k))
			}
			var body, out []byte
			var reply protocol.LookupReply
			served := func() {
				body = req.AppendAs(body[:0], tc.typ)
				h := protocol.Header{Type: tc.typ, Sequence: 7, Length: uint32(len(body))}
				var outcome Outcome
				out, outcome = r.m.Serve(tc.client.c, h, body, out[:0], r.clock.now)
				if outcome != Served || reply.DecodeAs(out[protocol.HeaderSize:], tc.typ) != nil {
					t.Fatal("the lookup was not served")
				}
				req.Release = req.Release[:0]
				found := 0
				for i := range reply.Results {
					if reply.Results[i].Found {
						found++
						req.Release = append(req.Release, reply.Results[i].Lease)
					}
				}
				if found != tc.found {
					t.Fatal(found, "keys were found, not", tc.found)
				}
			}
			for range 10 * latencySample { // tables and buffers grow to what they need
				served()
			}
			require.Zero(t, testing.AllocsPerRun(10*latencySample, served))
		})
	}
}

// many are the keys that testClient.store gives.
func many(prefix string, n int) (keys []string) {
	for i := range n {
		keys = append(keys, fmt.Sprint(prefix, i))
	}
	return keys
}
