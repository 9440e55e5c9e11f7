package protocol

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func benchKey(i int) []byte { return fmt.Appendf(nil, "%032x", uint64(i)*0x9e3779b97f4a7c15) }

func benchResult(i int) LookupResult {
	return LookupResult{
		Found: true,
		Location: Location{
			Region: Region{
				Handle:     Handle{RegionID: 147, Offset: 4 << 20, Length: 64 << 20, AuthToken: 0xd15d9cdc5f2d0575},
				Device:     1,
				Generation: 0x8a5cd789635d2dff,
				Epoch:      12,
				PageSize:   64 << 10,
			},
			KVOffset: uint64(i) << 16,
			KVLength: 64 << 10,
			Checksum: 0x121fd2a0b5a2d7f3,
		},
		Lease:   uint64(i) + 1<<40,
		LeaseMS: 1000,
	}
}

func BenchmarkLookupEncodeRequest(b *testing.B) {
	m := LookupRequest{Keys: [][]byte{benchKey(1)}}
	buf := make([]byte, 0, 1<<10)
	b.ReportAllocs()
	for b.Loop() {
		out, mark := BeginFrame(buf[:0], TypeLookup, 7)
		out = m.AppendAs(out, TypeLookup)
		buf = EndFrame(out, mark)
	}
}

func BenchmarkLookupDecodeRequest(b *testing.B) {
	m := LookupRequest{Keys: [][]byte{benchKey(1)}}
	in := m.AppendAs(nil, TypeLookup)
	b.ReportAllocs()
	for b.Loop() {
		if err := m.DecodeAs(in, TypeLookup); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkLookupEncodeReply(b *testing.B) {
	r := benchResult(3)
	buf := make([]byte, 0, 1<<10)
	b.ReportAllocs()
	for b.Loop() {
		buf = AppendLookupResult(buf[:0], &r)
	}
	b.ReportMetric(float64(len(buf)), "bytes")
}

func BenchmarkLookupDecodeReply(b *testing.B) {
	r := benchResult(3)
	in := AppendLookupResult(nil, &r)
	var m LookupReply
	b.ReportAllocs()
	for b.Loop() {
		if err := m.DecodeAs(in, TypeLookup); err != nil {
			b.Fatal(err)
		}
	}
}

const benchBatch = 128

func perKey(b *testing.B, n int) {
	b.Helper()
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/key")
}

func benchBatchRequest() *LookupRequest {
	m := &LookupRequest{Packed: true}
	for i := range benchBatch {
		m.Keys = append(m.Keys, benchKey(i))
	}
	return m
}

func BenchmarkBatchLookupEncodeRequest(b *testing.B) {
	m := benchBatchRequest()
	buf := make([]byte, 0, 64<<10)
	b.ReportAllocs()
	for b.Loop() {
		buf = m.AppendAs(buf[:0], TypeBatchLookup)
	}
	perKey(b, benchBatch)
}

func BenchmarkBatchLookupDecodeRequest(b *testing.B) {
	m := benchBatchRequest()
	in := m.AppendAs(nil, TypeBatchLookup)
	b.ReportAllocs()
	for b.Loop() {
		if err := m.DecodeAs(in, TypeBatchLookup); err != nil {
			b.Fatal(err)
		}
	}
	perKey(b, benchBatch)
}

func benchBatchReply() *LookupReply {
	m := &LookupReply{}
	for i := range benchBatch {
		m.Results = append(m.Results, benchResult(i))
	}
	return m
}

func BenchmarkBatchLookupEncodePacked(b *testing.B) {
	m := benchBatchReply()
	buf := make([]byte, 0, 64<<10)
	b.ReportAllocs()
	for b.Loop() {
		buf = AppendPackedHead(buf[:0], len(m.Results))
		for i := range m.Results {
			buf = AppendPacked(buf, &m.Results[i])
		}
	}
	perKey(b, benchBatch)
}

func BenchmarkBatchLookupDecodePacked(b *testing.B) {
	m := benchBatchReply()
	in := m.AppendPacked(nil)
	b.ReportAllocs()
	for b.Loop() {
		if err := m.DecodeAs(in, TypeBatchLookup); err != nil {
			b.Fatal(err)
		}
	}
	perKey(b, benchBatch)
}

func benchRegister() *RegisterRequest {
	m := &RegisterRequest{
		Mutation: Mutation{Seq: 1000, Acked: 990},
		Context:  &Context{Model: "meta-llama/Llama-3.1-8B", BlockSize: 512},
	}
	for i := range 64 {
		m.Entries = append(m.Entries, RegisterEntry{
			Key: benchKey(i), RegionID: 147, KVOffset: uint64(i) << 16, KVLength: 64 << 10, Epoch: 12,
			Checksum: 0x121fd2a0b5a2d7f3, HasPrefix: true, Hash: 0x8a5cd789635d2dff, Parent: 0x8a5cd789635d2dfe,
			Index: uint64(i),
		})
	}
	return m
}

func BenchmarkBatchRegisterEncode(b *testing.B) {
	m := benchRegister()
	buf := make([]byte, 0, 64<<10)
	b.ReportAllocs()
	for b.Loop() {
		buf = m.AppendAs(buf[:0], TypeBatchRegister)
	}
	perKey(b, len(m.Entries))
}

func BenchmarkBatchRegisterDecode(b *testing.B) {
	m := benchRegister()
	in := m.AppendAs(nil, TypeBatchRegister)
	b.ReportAllocs()
	for b.Loop() {
		if err := m.DecodeAs(in, TypeBatchRegister); err != nil {
			b.Fatal(err)
		}
	}
	perKey(b, len(m.Entries))
}

func BenchmarkReader(b *testing.B) {
	m := LookupRequest{Keys: [][]byte{benchKey(1)}}
	var stream []byte
	for i := range 1000 {
		buf, mark := BeginFrame(stream, TypeLookup, uint32(i))
		stream = EndFrame(m.AppendAs(buf, TypeLookup), mark)
	}
	src := bytes.NewReader(stream)
	r := NewReader(src)
	b.ReportAllocs()
	for b.Loop() {
		if !r.Buffered() && src.Len() == 0 {
			src.Reset(stream)
		}
		if _, _, err := r.Next(); err != nil {
			b.Fatal(err)
		}
	}
}

// TestHotPathsDoNotAllocate holds what the benchmarks show: structs and buffers that are used again cost nothing.
func TestHotPathsDoNotAllocate(t *testing.T) {
	buf := make([]byte, 0, 256<<10)
	lookup, batch := &LookupRequest{Keys: [][]byte{benchKey(1)}}, benchBatchRequest()
	results, register := benchBatchReply(), benchRegister()
	registered := &RegisterReply{Success: true, Results: make([]RegisterResult, 64)}
	exists := &KeysRequest{Keys: batch.Keys}
	alloc := &AllocRequest{InstanceID: "instance", Size: 1 << 20, Tier: "cxl", Keys: batch.Keys}
	one := &LookupReply{Results: []LookupResult{benchResult(1)}}
	for name, c := range map[string]struct {
		encode func(b []byte) []byte
		decode func(b []byte) error
	}{
		"lookup": {
			func(b []byte) []byte { return lookup.AppendAs(b, TypeLookup) },
			func(b []byte) error { return lookup.DecodeAs(b, TypeLookup) },
		},
		"lookup reply": {
			func(b []byte) []byte { return one.AppendAs(b, TypeLookup) },
			func(b []byte) error { return one.DecodeAs(b, TypeLookup) },
		},
		"batch lookup": {
			func(b []byte) []byte { return batch.AppendAs(b, TypeBatchLookup) },
			func(b []byte) error { return batch.DecodeAs(b, TypeBatchLookup) },
		},
		"batch lookup reply": {
			func(b []byte) []byte { return results.AppendAs(b, TypeBatchLookup) },
			func(b []byte) error { return results.DecodeAs(b, TypeBatchLookup) },
		},
		"packed reply": {
			func(b []byte) []byte { return results.AppendPacked(b) },
			func(b []byte) error { return results.DecodeAs(b, TypeBatchLookup) },
		},
		"register": {
			func(b []byte) []byte { return register.AppendAs(b, TypeBatchRegister) },
			func(b []byte) error { return register.DecodeAs(b, TypeBatchRegister) },
		},
		"register reply": {
			func(b []byte) []byte { return registered.AppendAs(b, TypeBatchRegister) },
			func(b []byte) error { return registered.DecodeAs(b, TypeBatchRegister) },
		},
		"exists": {
			func(b []byte) []byte { return exists.AppendAs(b, TypeBatchExists) },
			func(b []byte) error { return exists.DecodeAs(b, TypeBatchExists) },
		},
		"alloc": {
			func(b []byte) []byte { return alloc.Append(b) },
			func(b []byte) error { return alloc.Decode(b) },
		},
	} {
		wire := c.encode(nil)
		require.Zero(t, testing.AllocsPerRun(20, func() { buf = c.encode(buf[:0]) }), name+": encode")
		require.Zero(t, testing.AllocsPerRun(20, func() {
			if c.decode(wire) != nil {
				panic(name)
			}
		}), name+": decode")
	}
}
