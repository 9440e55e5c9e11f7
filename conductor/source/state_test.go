package source

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/conductor"
	"larder/server"
)

// TestRestartedConductor begins with what it knew, and is told what it has missed: nothing is counted twice.
func TestRestartedConductor(t *testing.T) {
	for name, c := range map[string]struct {
		change func(t *testing.T, e *engine) // while there is no conductor
		want   map[string]int
		epoch  uint64
		stale  uint64
	}{
		"the engine has done nothing": {func(*testing.T, *engine) {}, map[string]int{"a": 8}, 1, 0},
		"it has stored more": {func(_ *testing.T, e *engine) {
			e.miss(stored(2, seq(8, 12), 3))
		}, map[string]int{"a": 12}, 1, 0},
		"it has removed a copy": {func(_ *testing.T, e *engine) { e.miss(removed(1)) }, map[string]int{"a": 8}, 1, 0},
		"it has removed both": {func(_ *testing.T, e *engine) {
			e.miss(removed(1))
			e.miss(removed(1))
		}, map[string]int{}, 1, 0},
		"it has been restarted": {func(t *testing.T, e *engine) {
			t.Helper()
			e.stop()
			e.start()
		}, map[string]int{}, 2, 0},
		"it has done more than it can tell": {func(_ *testing.T, e *engine) {
			e.keeps = 2
			e.miss()
			e.miss()
			e.miss(stored(nil, seq(0, 4), 5))
		}, map[string]int{"a": 4}, 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			e, st := newEngine(t), Dir(t.TempDir())
			w := newWorld(t, Config{})
			w.follow(e, e.service("a"))
			e.publish(stored(nil, seq(0, 8), 1, 2), stored(nil, seq(0, 4), 1))
			before := w.sync(e, "a")
			require.NoError(t, w.Save(t.Context(), st))
			w.Close()
			c.change(t, e)

			w = newWorld(t, Config{})
			require.NoError(t, w.Load(t.Context(), st))
			eventually(t, func() bool { s := w.of("a"); return w.is(e, "a") && (s.State == Live || s.State == Stale) })
			w.hears(e, "a")
			s := w.of("a")
			require.Equal(t, before.Service, s.Service)
			require.Equal(t, c.epoch, s.Epoch)
			require.Equal(t, c.stale, s.Stale)
			require.Equal(t, c.want, w.longest(seq(0, 12)))
			fresh, err := w.Register(e.service("a"))
			require.NoError(t, err)
			require.False(t, fresh, "it is registered already")
			_, err = w.Unregister(Filter{InstanceID: "a"})
			require.NoError(t, err)
			require.Empty(t, w.longest(seq(0, 12)), "what was loaded goes with the service, too")
		})
	}
}

// TestLoadedAndGone: what was loaded of an engine that does not come is dropped after a time.
func TestLoadedAndGone(t *testing.T) {
	e, st := newEngine(t), Dir(t.TempDir())
	w := newWorld(t, Config{})
	sql := testScope
	sql.LoRA = "sql"
	w.follow(e, alone(e.service("a")))
	e.publish(stored(nil, seq(0, 8), 1, 2), []any{"BlockStored", []int{3}, nil, seq(0, 4), 4, 7, "GPU", "sql"})
	w.sync(e, "a")
	require.NoError(t, w.Save(t.Context(), st))
	w.Close()
	require.NoError(t, e.pub.Close())
	w = newWorld(t, Config{DisconnectTTL: 500 * time.Millisecond})
	require.NoError(t, w.Load(t.Context(), st))
	require.Equal(t, map[string]int{"a": 8}, w.longest(seq(0, 8)), "it is there at once")
	require.Equal(t, map[string]int{"a": 4}, w.longestIn(sql, seq(0, 8)))
	eventually(t, func() bool { return len(w.longest(seq(0, 8)))+len(w.longestIn(sql, seq(0, 8))) == 0 })
	e.again()
}

// failingStore fails while it is written to.
type failingStore struct{ Dir }

func (f failingStore) Save(ctx context.Context, write func(io.Writer) error) error {
	return f.Dir.Save(ctx, func(w io.Writer) error {
		return write(io.MultiWriter(w, failing{}))
	})
}

type failing struct{}

var errDisk = errors.New("the disk is full")

func (failing) Write(b []byte) (int, error) { return len(b) / 2, errDisk }

// TestStateThatCannotBeUsed is refused, whole; a save that fails leaves what was saved before.
func TestStateThatCannotBeUsed(t *testing.T) {
	e, dir := newEngine(t), Dir(t.TempDir())
	w := newWorld(t, Config{})
	require.ErrorIs(t, w.Load(t.Context(), dir), ErrNoState)
	w.follow(e, e.service("a"))
	e.publish(stored(nil, seq(0, 8), 1, 2))
	w.sync(e, "a")
	require.ErrorIs(t, w.Save(t.Context(), failingStore{dir}), errDisk)
	require.ErrorIs(t, w.Load(t.Context(), dir), ErrNoState)
	require.NoError(t, w.Save(t.Context(), dir))
	require.ErrorIs(t, w.Load(t.Context(), dir), ErrLate)
	path := filepath.Join(string(dir), stateFile)
	whole, err := os.ReadFile(path)
	require.NoError(t, err)
	require.ErrorIs(t, w.Save(t.Context(), failingStore{dir}), errDisk)
	same, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, whole, same)
	left, err := os.ReadDir(string(dir))
	require.NoError(t, err)
	require.Len(t, left, 1, "nothing is left of a save that failed")

	v := newWorld(t, Config{})
	for i := range whole {
		bad := bytes.Clone(whole)
		bad[i] ^= 0x20
		for _, b := range [][]byte{bad, whole[:i]} {
			require.NoError(t, os.WriteFile(path, b, 0o600))
			err := v.Load(t.Context(), dir)
			require.True(t, errors.Is(err, ErrState) || errors.Is(err, conductor.ErrImport), "%d: %v", i, err)
		}
	}
	require.Empty(t, v.Services())
	require.NoError(t, os.WriteFile(path, whole, 0o600))
	small := newWorld(t, Config{MaxServices: 1})
	require.NoError(t, small.Load(t.Context(), dir))
}

// TestKeep saves now and then, and at the end.
func TestKeep(t *testing.T) {
	w, dir := newWorld(t, Config{}), Dir(t.TempDir())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.Keep(ctx, dir, time.Millisecond)
	}()
	path := filepath.Join(string(dir), stateFile)
	eventually(t, func() bool { _, err := os.Stat(path); return err == nil })
	_, err := w.Register(valid())
	require.NoError(t, err)
	cancel()
	<-done
	v := newWorld(t, Config{})
	require.NoError(t, v.Load(t.Context(), dir))
	require.Len(t, v.Services(), 1, "what was registered last is saved")
}

// sealed is the beginning of a state that says so of its services.
func sealed(services []byte) []byte {
	b := binary.LittleEndian.AppendUint32([]byte(stateMark), uint32(len(services)))
	b = append(b, services...)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(services, castagnoli))
}

// FuzzState: whatever a state says of services, what is taken can be followed, saved and loaded again.
func FuzzState(f *testing.F) {
	f.Add([]byte(`[{"endpoint":"tcp://127.0.0.1:1","type":"vLLM","modelname":"m","tenant_id":"default","instance_id":"a","block_size":4,
		"dp_rank":0,"epoch":3,"known":true,"next":7,"sum":9,"held":[{"tenant":"t","instance":"a","rank":-1,"medium":2}],
		"also":[{"Tenant":"t","Model":"m","LoRA":"l","BlockSize":4,"Salt":""}]}]`))
	f.Add([]byte(`[]`))
	f.Fuzz(func(t *testing.T, services []byte) {
		m := New(Config{Index: conductor.NewIndex(conductor.IndexConfig{}), SweepEvery: -1})
		defer m.Close()
		list, err := m.read(bytes.NewReader(sealed(services)))
		if err != nil {
			return
		}
		for i := range list {
			s := m.restored(&list[i])
			s.m.sources[s.key()] = s
			s.status()
			s.drop(func(held) bool { return i%2 == 0 })
		}
		var b bytes.Buffer
		require.NoError(t, m.write(&b))
		again, err := m.read(&b)
		require.NoError(t, err)
		require.Len(t, again, len(list))
		clear(m.sources) // they are not followed
	})
}

// startServer starts a real cluster of one, whose pool has so many MiB.
func startServer(t *testing.T, mib int) *server.Server {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "larder-source-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	cfg := server.Default()
	cfg.DataDir = t.TempDir()
	cfg.Listen, cfg.PeerListen, cfg.AdminListen = "127.0.0.1:0", "127.0.0.1:0", server.Off
	cfg.Socket = filepath.Join(dir, "s")
	cfg.ElectionTimeout, cfg.DefaultLease = 300*time.Millisecond, 200*time.Millisecond
	cfg.MinFreeDisk = 1 << 20
	cfg.Pool = []server.DeviceConfig{{Path: filepath.Join(dir, "cxl"), Tier: "cxl", Size: server.Size((mib + 2) << 20)}}
	s, err := server.Start(cfg, nil)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(t, s.Stop(ctx))
	})
	return s
}

// pool is a store of a conductor that has its own client.
func pool(t *testing.T, s *server.Server) *Pool {
	t.Helper()
	c, err := client.Open(t.Context(), client.Config{Addrs: []string{s.Addr()}, PageSize: 4 << 10, RegionSize: 1 << 20})
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	return &Pool{Client: c, Name: "main", Chunk: 100}
}

// entries are those that a store has in the pool.
func entries(t *testing.T, p *Pool) (n int) {
	t.Helper()
	for cursor := uint64(0); ; {
		list, next, err := p.Client.ListKeys(t.Context(), []byte(poolPrefix), cursor, 0)
		require.NoError(t, err)
		n += len(list)
		if cursor = next; next == 0 {
			return n
		}
	}
}

// TestSecondConductor begins with what the first one knows, from the pool; both follow the engine then.
func TestSecondConductor(t *testing.T) {
	cluster := startServer(t, 8)
	e, p := newEngine(t), pool(t, cluster)
	w := newWorld(t, Config{})
	require.ErrorIs(t, w.Load(t.Context(), p), ErrNoState)
	w.follow(e, e.service("a"))
	e.publish(stored(nil, seq(0, 8), 1, 2), stored(nil, seq(0, 4), 1))
	w.sync(e, "a")
	require.NoError(t, w.Save(t.Context(), p))
	one := entries(t, p)
	require.Greater(t, one, 3, "it is in several entries")
	e.publish(removed(1), stored(2, seq(8, 12), 3))
	w.sync(e, "a")

	v, q := newWorld(t, Config{}), pool(t, cluster)
	require.NoError(t, v.Load(t.Context(), q))
	eventually(t, func() bool { return v.is(e, "a") && v.of("a").State == Live })
	v.hears(e, "a")
	for _, x := range []*world{w, v} {
		require.Equal(t, map[string]int{"a": 12}, x.longest(seq(0, 12)))
	}
	e.publish(removed(1))
	for _, x := range []*world{w, v} {
		x.sync(e, "a")
		require.Empty(t, x.longest(seq(0, 12)), "there was no second copy any more")
	}

	for range 2 {
		require.NoError(t, w.Save(t.Context(), p))
		require.NoError(t, v.Save(t.Context(), q))
	}
	require.LessOrEqual(t, entries(t, p), 2*one+4, "the last one, and the one before")
}

// TestEvictedState: of a state that is not whole any more nothing is used, but the one before it.
func TestEvictedState(t *testing.T) {
	cluster := startServer(t, 8)
	p := pool(t, cluster)
	w := newWorld(t, Config{})
	_, err := w.Register(valid())
	require.NoError(t, err)
	evict := func() {
		r, _, err := p.last(t.Context())
		require.NoError(t, err)
		_, err = p.Client.Delete(t.Context(), p.keys(r)[r.Chunks/2])
		require.NoError(t, err)
	}
	require.NoError(t, w.Save(t.Context(), p))
	require.NoError(t, w.Save(t.Context(), p))
	evict()
	v := newWorld(t, Config{})
	require.NoError(t, v.Load(t.Context(), p))
	require.Len(t, v.Services(), 1)
	require.NoError(t, w.Save(t.Context(), p))
	evict()
	require.ErrorIs(t, newWorld(t, Config{}).Load(t.Context(), p), ErrNoState)
	_, err = p.Client.PutName(t.Context(), p.name(), []byte("{"))
	require.NoError(t, err)
	require.ErrorIs(t, newWorld(t, Config{}).Load(t.Context(), p), ErrNoState)
	require.NoError(t, w.Save(t.Context(), p), "it is replaced")
	require.NoError(t, newWorld(t, Config{}).Load(t.Context(), p))
}
