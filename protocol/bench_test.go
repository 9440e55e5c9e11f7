package protocol

import (
	"bytes"
	"fmt"
	"testing"
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
