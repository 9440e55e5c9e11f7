package bench

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"larder/client"
	"larder/server"
)

// Sizes of the data path's figures.
const (
	bigValue   = 1 << 20
	smallValue = 64 << 10
	batchItems = 64
	dataPool   = 3 << 30
	warmPasses = 2
	dataPasses = 7
	dataKeys   = 1536 << 20 // bytes that are stored and read: half of the pool, so that nothing is evicted
	// putBytes are under way at a time: callers overlap the durable REGISTER of one value with the copies of others.
	putBytes = 96 << 20
	// getBytes are read at a time: enough to overlap a lookup with a copy. Each caller has a buffer of its own, and
	// together they fit the last cache, as staging buffers do.
	getBytes  = 16 << 20
	getRounds = 2 // so often everything is read in a pass
	copyTime  = 100 * time.Millisecond
)

// data measures Put, Get, PutBatch and GetBatch through the pool.
func (b *bench) data() error {
	memory := newCopier(copySpan)
	for _, c := range []struct {
		name      string
		checksums bool
		size      int
		batch     int
		least     float64
	}{
		{"1 MiB", false, bigValue, 1, 0.8},
		{"1 MiB, checksums", true, bigValue, 1, 0},
		{"64 x 64 KiB", false, smallValue, batchItems, 0.5},
		{"64 x 64 KiB, checksums", true, smallValue, batchItems, 0.5},
	} {
		put, get, err := b.dataRates(memory, c.size, c.batch, c.checksums)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		suffix := ""
		if c.batch > 1 {
			suffix = "Batch"
		}
		for _, row := range []Row{
			{Name: "Put" + suffix + " " + c.name, Value: put.value, Bound: put.bound},
			{Name: "Get" + suffix + " " + c.name, Value: get.value, Bound: get.bound},
		} {
			row.Unit, row.Of = "B/s", "memory copy on all cores, just before and after"
			if c.least == 0 {
				b.add(row)
				continue
			}
			b.atLeast(row, c.least)
		}
	}
	return nil
}

// beside is a rate with what the machine did just before and after it: a shared one changes by the second.
type beside struct{ value, bound float64 }

// middle returns the pass with the median ratio.
func middle(passes []beside) beside {
	slices.SortFunc(passes, func(a, b beside) int { return cmp.Compare(a.value/a.bound, b.value/b.bound) })
	return passes[len(passes)/2]
}

// dataRates stores distinct values and reads them back, and returns bytes per second of both.
func (b *bench) dataRates(memory *copier, size, batch int, checksums bool) (put, get beside, err error) {
	n, err := b.single("data", dataPool+64<<20, true, func(cfg *server.Config) {
		cfg.PageSize = server.Size(size) //nolint:gosec // positive
	})
	if err != nil {
		return put, get, err
	}
	defer func() { err = errors.Join(err, n.remove()) }()
	c, err := client.Open(b.ctx, client.Config{
		Addrs: []string{n.Addr()}, Instance: "data", PageSize: uint64(size), RegionSize: 64 << 20, //nolint:gosec // positive
		Checksums: checksums, Prefault: true, Conns: connections, Timeout: time.Minute,
	})
	if err != nil {
		return put, get, fmt.Errorf("open: %w", err)
	}
	defer func() { err = errors.Join(err, c.Close(context.WithoutCancel(b.ctx))) }()
	value := bytes.Repeat([]byte("larder!\n"), size/8)
	total := dataKeys / size
	var puts, gets []beside
	// The first passes map and fault the pool's pages in; the others, on pages that were used before, count.
	for pass := range warmPasses + dataPasses {
		base := uint64(pass) << 32
		before := memory.rate(b.report.Machine.CPUs, copyTime)
		p, err := b.each(total/batch, func(i int) error {
			return putOne(b.ctx, c, base, i, batch, value)
		}, size*batch, putBytes)
		if err != nil {
			return put, get, err
		}
		between := memory.rate(b.report.Machine.CPUs, copyTime)
		g, err := b.each(getRounds*total/batch, func(i int) error {
			return getOne(b.ctx, c, base, i%(total/batch), batch, value)
		}, size*batch, getBytes)
		if err != nil {
			return put, get, err
		}
		after := memory.rate(b.report.Machine.CPUs, copyTime)
		if pass >= warmPasses {
			puts, gets = append(puts, beside{p, (before + between) / 2}), append(gets, beside{g, (between + after) / 2})
		}
		if err := deleteAll(b.ctx, c, base, total); err != nil {
			return put, get, err
		}
		time.Sleep(n.cfg.ElectionTimeout) // the longest lease: freed pages rest until then
	}
	return middle(puts), middle(gets), nil
}

// each calls do for every number below count, under bytes at a time, and returns bytes per second.
func (b *bench) each(count int, do func(i int) error, size, under int) (float64, error) {
	var next atomic.Int64
	var wg sync.WaitGroup
	var mu sync.Mutex
	var errs []error
	begin := time.Now()
	for range max(2, under/size) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < count; i = int(next.Add(1)) - 1 {
				if err := do(i); err != nil {
					mu.Lock()
					errs = append(errs, err)
					mu.Unlock()
					return
				}
			}
		})
	}
	wg.Wait()
	return float64(count) * float64(size) / time.Since(begin).Seconds(), errors.Join(errs...)
}

// batchKeys makes the keys of a batch.
func batchKeys(base uint64, i, batch int) [][]byte {
	keys := make([][]byte, batch)
	for k := range keys {
		keys[k] = keyOf(nil, base+uint64(i*batch+k)) //nolint:gosec // not negative
	}
	return keys
}

// putOne stores one value, or a batch.
func putOne(ctx context.Context, c *client.Client, base uint64, i, batch int, value []byte) error {
	keys := batchKeys(base, i, batch)
	if batch == 1 {
		_, err := c.Put(ctx, keys[0], value)
		return err //nolint:wrapcheck // says which operation and key
	}
	items := make([]client.Item, batch)
	for k := range items {
		items[k] = client.Item{Key: keys[k], Value: value}
	}
	results, err := c.PutBatch(ctx, items)
	for k := range results {
		err = errors.Join(err, results[k].Err)
	}
	return err //nolint:wrapcheck // says which operation and key
}

// buffers are reused, as an engine's staging buffers are: a fresh one would measure page faults.
var buffers sync.Pool

// getOne reads one value, or a batch, and looks at a byte of each.
func getOne(ctx context.Context, c *client.Client, base uint64, i, batch int, value []byte) error {
	keys := batchKeys(base, i, batch)
	dst, ok := buffers.Get().([][]byte)
	if !ok || len(dst) != batch || cap(dst[0]) < len(value) {
		dst = make([][]byte, batch)
		for k := range dst {
			dst[k] = make([]byte, len(value))
		}
	}
	defer buffers.Put(dst) //nolint:staticcheck // a slice header is small beside what it saves
	var err error
	if batch == 1 {
		dst[0], err = c.Get(ctx, keys[0], dst[0][:0])
	} else {
		dst, err = c.GetBatch(ctx, keys, dst)
	}
	if err != nil {
		return err //nolint:wrapcheck // says which operation and key
	}
	for k := range dst {
		if len(dst[k]) != len(value) || dst[k][len(value)-1] != value[len(value)-1] {
			return fmt.Errorf("get: value %d is not what was put", i*batch+k)
		}
	}
	return nil
}

// deleteAll removes the values of a pass.
func deleteAll(ctx context.Context, c *client.Client, base uint64, total int) error {
	for at := 0; at < total; at += batchItems {
		if _, err := c.Delete(ctx, batchKeys(base, at/batchItems, batchItems)...); err != nil {
			return err //nolint:wrapcheck // says which operation and key
		}
	}
	return nil
}

// fullPool writes flat out into a pool that is full: no store may fail.
func (b *bench) fullPool() (err error) {
	n, err := b.single("full", 256<<20, true, func(cfg *server.Config) { cfg.RegionSize = 16 << 20 })
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.remove()) }()
	var wg sync.WaitGroup
	var stored, failed atomic.Int64
	var first atomic.Pointer[error]
	begin := time.Now()
	for w := range connections {
		c, err := client.Open(b.ctx, client.Config{
			Addrs: []string{n.Addr()}, Instance: fmt.Sprintf("writer-%d", w), PageSize: smallValue, RegionSize: 16 << 20,
			Timeout: time.Minute,
		})
		if err != nil {
			wg.Wait()
			return fmt.Errorf("open: %w", err)
		}
		wg.Go(func() {
			defer c.Close(context.WithoutCancel(b.ctx))        //nolint:errcheck // its regions stay readable
			value := bytes.Repeat([]byte{byte(w)}, smallValue) //nolint:gosec // below connections
			for i := 0; time.Since(begin) < 2*b.Time; i++ {
				if err := putOne(b.ctx, c, uint64(w)<<40, i, batchItems, value); err != nil { //nolint:gosec // small
					failed.Add(1)
					first.CompareAndSwap(nil, &err)
					continue
				}
				stored.Add(batchItems)
			}
		})
	}
	wg.Wait()
	elapsed := time.Since(begin).Seconds()
	status := n.Status()
	note := fmt.Sprintf("%d batches of 64 failed of %d", failed.Load(), failed.Load()+stored.Load()/batchItems)
	if err := first.Load(); err != nil {
		note += "; first: " + (*err).Error()
	}
	b.aim(Row{
		Name: "stores into a full pool, 4 writers of 64 x 64 KiB", Value: float64(stored.Load()) / elapsed, Unit: "stores/s", Note: note,
	}, "no store fails", failed.Load() == 0)
	b.add(Row{Name: "pages evicted meanwhile", Value: float64(status.Stats.Evictions[1] + status.Stats.Evictions[2]), Unit: "pages"})
	return nil
}
