package sched

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// BenchmarkSchedule schedules, prefills, decodes and ends requests on instances of which half prefill, each with some ten
// prefills queued and twenty sequences decoded. A quarter of the prefill instances hold a prefix.
func BenchmarkSchedule(b *testing.B) {
	for _, n := range []int{16, 256} {
		for _, mode := range []Overload{None, Early, Predictive} {
			b.Run(fmt.Sprintf("instances=%d/%s", n, mode), func(b *testing.B) { benchmarkSchedule(b, n, mode) })
		}
	}
}

func benchmarkSchedule(b *testing.B, n int, mode Overload) {
	b.Helper()
	s, err := New(Config{Overload: mode}, preset(b, DefaultPreset))
	if err != nil {
		b.Fatal(err)
	}
	for i := range n {
		add(b, s, Instance{Role: []Role{Prefill, Decode}[i%2], Bandwidth: 100e9, KVCapacity: 1 << 21, MaxBatch: 256})
	}
	rng := rand.New(rand.NewPCG(1, 1))
	r := Request{}
	for i := 0; i < n; i += 8 {
		r.Matches = append(r.Matches, Match{Instance: InstanceID(i)})
	}
	now, id := time.Duration(0), uint64(0)
	queued, decoding := uint64(10*n/2), uint64(20*n/2)
	// A warm system, whose distribution of lengths is known.
	arrive := func() {
		id++
		now += 2 * time.Second / time.Duration(n)
		r.ID, r.Input = id, 1000+rng.IntN(20_000)
		for i := range r.Matches {
			r.Matches[i].Tokens = rng.IntN(r.Input)
		}
	}
	progress := func() {
		if id > queued {
			s.PrefillDone(now, id-queued, 0, -1)
			s.AdmitDecode(now, id-queued)
		}
		if id > queued+decoding {
			s.DecodeDone(now, id-queued-decoding, 300)
		}
	}
	for range 3*queued + decoding {
		arrive()
		s.Schedule(now, &r)
		progress()
	}
	b.ReportAllocs()
	b.Run("decide", func(b *testing.B) { // and forgotten again, which costs a tenth
		arrive()
		for b.Loop() {
			if !s.Schedule(now, &r).Accepted {
				b.Fatal("rejected")
			}
			s.Forget(now, r.ID)
		}
	})
	b.Run("serve", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			arrive()
			s.Schedule(now, &r)
			progress()
		}
	})
}

func BenchmarkLearn(b *testing.B) {
	m := preset(b, DefaultPreset)
	for b.Loop() {
		m.LearnPrefill(10_000, 5000, time.Second)
	}
}
