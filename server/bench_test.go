package server

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"
	"github.com/zeebo/xxh3"

	"larder/protocol"
)

// fill registers n entries bench-0 ... over one connection and returns their region.
func fill(b *testing.B, s *Server, n int) protocol.Region {
	b.Helper()
	w := dial(b, "tcp", s.Addr())
	w.open("fill")
	a := w.alloc(protocol.AllocRequest{InstanceID: "fill", Size: uint64(n) * 4096, PageSize: 4096})
	require.NoError(b, a.Err())
	for at := 0; at < n; at += 512 {
		var keys []string
		for i := at; i < min(at+512, n); i++ {
			keys = append(keys, benchKey(i))
		}
		r := w.register(a.Region, uint64(at), keys...)
		require.NoError(b, r.Err())
	}
	return a.Region
}

func benchKey(i int) string { return fmt.Sprintf("bench-%032d", i) }

// pump sends the same frames over and over and reads as many replies, frames at a time.
func (w *wire) pump(rounds int, frames []byte, replies int) error {
	buf := make([]byte, 64<<10)
	for range rounds {
		if _, err := w.c.Write(frames); err != nil {
			return err
		}
		if err := skipReplies(w.c, buf, replies); err != nil {
			return err
		}
	}
	return nil
}

// skipReplies reads n frames, looking at nothing but their lengths. Nothing may follow them.
func skipReplies(r io.Reader, buf []byte, n int) error {
	have := 0
	for n > 0 {
		k, err := r.Read(buf[have:])
		if err != nil {
			return err
		}
		have += k
		at := 0
		for n > 0 && have-at >= protocol.HeaderSize {
			size := protocol.HeaderSize + int(binary.BigEndian.Uint32(buf[at+12:]))
			if size > len(buf) {
				// Pass over a large frame.
				rest := size - (have - at)
				if rest > 0 {
					if _, err := io.CopyN(io.Discard, r, int64(rest)); err != nil {
						return err
					}
					have = at
				} else {
					at += size
				}
				n--
				continue
			}
			if have-at < size {
				break
			}
			at += size
			n--
		}
		have = copy(buf, buf[at:have])
	}
	return nil
}

// BenchmarkLookup has 64 lookups in flight over 4 connections, the client on the same cores.
func BenchmarkLookup(b *testing.B) {
	const keys, conns, window = 100_000, 4, 16
	cfg := testConfig(b)
	cfg.Pool[0].Size = 512 << 20
	s := startServer(b, cfg)
	fill(b, s, keys)
	for _, network := range []string{"tcp", "unix"} {
		for _, batch := range []int{1, 128} {
			b.Run(fmt.Sprintf("%s/batch=%d", network, batch), func(b *testing.B) {
				addr := s.Addr()
				if network == "unix" {
					addr = s.Config().Socket
				}
				var wg sync.WaitGroup
				rounds := b.N/(conns*window*batch) + 1
				b.ReportAllocs()
				b.ResetTimer()
				for c := range conns {
					w := dial(b, network, addr)
					w.open(fmt.Sprintf("reader-%s-%d-%d-%d", network, batch, c, b.N))
					var frames []byte
					for i := range window {
						req := protocol.LookupRequest{Packed: batch > 1}
						t := protocol.TypeLookup
						if batch > 1 {
							t = protocol.TypeBatchLookup
						}
						for k := range batch {
							req.Keys = append(req.Keys, []byte(benchKey((c*7919+i*104729+k*31)%keys)))
						}
						var mark int
						frames, mark = protocol.BeginFrame(frames, t, uint32(i+1))
						frames = protocol.EndFrame(req.AppendAs(frames, t), mark)
					}
					wg.Go(func() {
						if err := w.pump(rounds, frames, window); err != nil {
							b.Error(err)
						}
					})
				}
				wg.Wait()
				b.StopTimer()
				b.ReportMetric(float64(rounds*conns*window*batch)/b.Elapsed().Seconds(), "keys/s")
			})
		}
	}
}

// BenchmarkRegister has 64 clients that register durably, each waiting for its answer, and beside it the same number
// of goroutines that sync one small record each to a bare Pebble: the bound of group commit on this disk.
func BenchmarkRegister(b *testing.B) {
	const clients = 64
	dir := b.TempDir()
	b.Run("bare", func(b *testing.B) {
		db, err := pebble.Open(filepath.Join(dir, fmt.Sprint("bare", b.N)), &pebble.Options{Logger: quiet{}})
		require.NoError(b, err)
		value := make([]byte, 100)
		var wg sync.WaitGroup
		for c := range clients {
			wg.Go(func() {
				for i := range b.N/clients + 1 {
					if err := db.Set([]byte(fmt.Sprintf("%d-%d", c, i)), value, pebble.Sync); err != nil {
						b.Error(err)
					}
				}
			})
		}
		wg.Wait()
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "entries/s")
		require.NoError(b, db.Close())
	})
	for _, batch := range []int{1, 64} {
		b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) {
			cfg := testConfig(b)
			cfg.DataDir = filepath.Join(dir, fmt.Sprint("data", batch, "-", b.N))
			cfg.Pool[0].Size = 1 << 30
			s := startServer(b, cfg)
			benchRegister(b, s, clients, batch, false)
		})
	}
}

// benchRegister registers entries, which are blocks of prefixes or not.
func benchRegister(b *testing.B, s *Server, clients, batch int, blocks bool) {
	b.Helper()
	var wg sync.WaitGroup
	rounds := b.N/(clients*batch) + 1
	ws := make([]*wire, clients)
	regions := make([]protocol.Region, clients)
	pages := uint64(512)
	for c := range ws {
		ws[c] = dial(b, "tcp", s.Addr())
		ws[c].open(fmt.Sprint("writer-", c))
		a := ws[c].alloc(protocol.AllocRequest{InstanceID: "w", Size: pages * 4096, PageSize: 4096})
		require.NoError(b, a.Err())
		regions[c] = a.Region
	}
	b.ReportAllocs()
	b.ResetTimer()
	for c, w := range ws {
		wg.Go(func() {
			w.registerMany(regions[c], rounds, batch, pages, fmt.Sprint("w", c, "-"), blocks)
		})
	}
	wg.Wait()
	b.StopTimer()
	b.ReportMetric(float64(rounds*clients*batch)/b.Elapsed().Seconds(), "entries/s")
	n := s.Counters()
	groups := float64(n.Groups.Load())
	b.ReportMetric(groups, "groups")
	b.ReportMetric(float64(n.GroupNanos.Sum.Load())/groups/1e3, "us/group")
	m := s.Raft()
	syncs := uint64(0)
	for _, c := range m.LogSync.Counts {
		syncs += c
	}
	b.ReportMetric(float64(m.LogSync.SumNanos)/float64(max(syncs, 1))/1e3, "us/sync")
	b.ReportMetric(float64(syncs), "syncs")
}

// registerMany registers new keys round by round; pages that are used up are deleted first, which is not counted.
func (w *wire) registerMany(r protocol.Region, rounds, batch int, pages uint64, prefix string, blocks bool) {
	page := uint64(0)
	t := protocol.TypeBatchRegister
	if batch == 1 {
		t = protocol.TypeRegister
	}
	var old [][]byte
	req := protocol.RegisterRequest{Entries: make([]protocol.RegisterEntry, batch)}
	buf := make([]byte, 0, 16<<10)
	for n := range rounds {
		if page+uint64(batch) > pages {
			for len(old) > 0 {
				k := min(len(old), 256)
				del := protocol.KeysRequest{Mutation: w.next(), Keys: old[:k]}
				w.call(protocol.TypeBatchDelete, del.AppendAs(nil, protocol.TypeBatchDelete))
				old = old[k:]
			}
			page = 0
		}
		req.Mutation = w.next()
		for i := range req.Entries {
			key := []byte(fmt.Sprintf("%s%020d", prefix, n*batch+i))
			old = append(old, key)
			req.Entries[i] = protocol.RegisterEntry{
				Key: key, RegionID: r.RegionID, Epoch: r.Epoch, KVOffset: page * r.PageSize, KVLength: r.PageSize,
				HasPrefix: blocks, Hash: xxh3.Hash(key),
			}
			page++
		}
		var mark int
		buf, mark = protocol.BeginFrame(buf[:0], t, uint32(n+1))
		buf = protocol.EndFrame(req.AppendAs(buf, t), mark)
		if _, err := w.c.Write(buf); err != nil {
			w.tb.Error(err)
			return
		}
		for {
			h, body, err := w.r.Next()
			if err != nil {
				w.tb.Error(err)
				return
			}
			if h.Sequence == uint32(n+1) {
				var reply protocol.RegisterReply
				if err := reply.DecodeAs(body, t); err != nil || reply.Code != 0 || !reply.Results[0].IsNew {
					w.tb.Errorf("register: %v %v", err, reply.Error)
					return
				}
				break
			}
		}
	}
}

type quiet struct{}

func (quiet) Infof(string, ...any)  {}
func (quiet) Errorf(string, ...any) {}
func (quiet) Fatalf(f string, a ...any) {
	fmt.Fprintf(os.Stderr, f, a...)
	os.Exit(1)
}
