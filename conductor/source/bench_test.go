package source

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"larder/conductor"
)

// BenchmarkApply is what a block costs from msgpack to the index: events of 64 blocks of 16 tokens, as vLLM sends them, of 64 Ki
// blocks, first for one engine and then for others that have the same ones.
func BenchmarkApply(b *testing.B) {
	const blocks, perEvent, tokens = 64 << 10, 64, 16
	rng := rand.New(rand.NewPCG(1, 2))
	var payloads [][]byte
	for from := 0; from < blocks; from += perEvent {
		var hashes [][]byte
		var list []uint32
		for i := range perEvent {
			hashes = append(hashes, binary.BigEndian.AppendUint64(make([]byte, 24), uint64(from+i+1)))
			for range tokens {
				list = append(list, rng.Uint32N(128_000))
			}
		}
		parent := any(nil)
		if from%512 != 0 {
			parent = binary.BigEndian.AppendUint64(make([]byte, 24), uint64(from))
		}
		p, err := msgpack.Marshal([]any{1.5, []any{[]any{"BlockStored", hashes, parent, list, tokens, nil, "GPU"}}, 0})
		if err != nil {
			b.Fatal(err)
		}
		payloads = append(payloads, p)
	}
	m := New(Config{Index: conductor.NewIndex(conductor.IndexConfig{}), SweepEvery: -1})
	defer m.Close()
	n := 0
	for b.Loop() {
		b.StopTimer()
		svc := valid()
		svc.InstanceID = fmt.Sprint(n % 8)
		s := newSource(m, svc)
		b.StartTimer()
		for i, p := range payloads {
			s.apply(uint64(i), sumOf(p), p, false)
		}
		if n++; n%8 == 0 {
			b.StopTimer()
			m.cfg.Index = conductor.NewIndex(conductor.IndexConfig{})
			b.StartTimer()
		}
		if s.counters.bad.Load() > 0 {
			b.Fatal(s.problem)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/blocks, "ns/block")
}
