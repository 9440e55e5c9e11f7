package node

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/cxl"
	"larder/protocol"
	"larder/transfer"
)

const mib = 1 << 20

// region is where tests put a region: behind what a header takes.
const region = 4 * mib

// grantOf asks for a region as a leader does.
func grantOf(t *testing.T, s *fakeSession, d *indexed, id, epoch, offset, length uint64) (protocol.Endpoint, error) {
	t.Helper()
	return s.h.grant(t.Context(), &protocol.GrantPush{
		RegionID: id, Epoch: epoch, Device: d.id, Offset: offset, Length: length,
	})
}

func TestMemoryIsContributed(t *testing.T) {
	m := newMasters(t)
	n, stop := m.start(Config{DRAM: 8 * mib})
	s := ready(t, n)
	require.Equal(t, "dram", s.Devices[0].Tier)
	d := m.device("")
	require.Equal(t, s.Devices[0].ID, d.id)
	require.Equal(t, "here", d.ready.Node)
	require.True(t, d.ready.Volatile)
	require.EqualValues(t, 8*mib, d.ready.Size)
	require.Equal(t, "node/here/"+s.Devices[0].UUID, m.last().cfg.instance)

	// Processes of the same host map it.
	dev, err := cxl.Open(d.ready.Path, cxl.Expect{DeviceID: d.id, Pool: m.poolID})
	require.NoError(t, err)
	require.Equal(t, d.generation, dev.Generation())
	mapping, err := dev.Map(region, mib, cxl.MapOptions{})
	require.NoError(t, err)
	require.NoError(t, cxl.CopyIn(mapping.Bytes(), bytes.Repeat([]byte("lard"), mib/4)))

	// Others read it, and do not write to it.
	p := newPeer(t)
	b, err := p.read(&d.ready.Endpoint, region, 8)
	require.NoError(t, err)
	require.Equal(t, "lardlard", string(b))
	require.ErrorIs(t, p.do(transfer.Write, &d.ready.Endpoint, region, b), transfer.ErrReadOnly)
	require.NoError(t, errors.Join(mapping.Close(), dev.Close()))
	require.NoError(t, stop())
	require.True(t, m.last().closed, "it said goodbye")
	require.Equal(t, StateStopped, n.Status().Devices[0].State)
}

func TestMemoryThatNobodyMaps(t *testing.T) {
	m := newMasters(t)
	n, _ := m.start(Config{DRAM: 8 * mib, NoMap: true})
	ready(t, n)
	d := m.device("")
	require.Empty(t, d.ready.Path)
	_, err := newPeer(t).read(&d.ready.Endpoint, region, 8)
	require.NoError(t, err)
}

func TestRegionsAreWrittenByTheirOwnersAlone(t *testing.T) {
	dir := t.TempDir()
	for name, cfg := range map[string]Config{
		"dram": {DRAM: 8 * mib},
		"ssd":  {SSD: []SSD{{Dir: filepath.Join(dir, "ssd"), Size: 16 * mib}}},
		"cxl":  {CXL: []CXL{{Path: filepath.Join(dir, "cxl"), Size: 8 * mib, Coherence: "hardware"}}},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMasters(t)
			n, _ := m.start(cfg)
			ready(t, n)
			d, s, p := m.device(""), m.last(), newPeer(t)
			w, err := grantOf(t, s, &d, 1, 7, region, mib)
			require.NoError(t, err)
			require.EqualValues(t, region, w.Offset)
			value := bytes.Repeat([]byte{7}, 8192)
			require.NoError(t, p.do(transfer.Write, &w, region+4096, value))
			got, err := p.read(&d.ready.Endpoint, region+4096, len(value))
			require.NoError(t, err)
			require.Equal(t, value, got)
			require.ErrorIs(t, p.do(transfer.Write, &w, region+mib-4096, value), transfer.ErrRange, "not beyond its end")

			require.NoError(t, s.h.fence(t.Context(), &protocol.FencePush{RegionID: 1, Epoch: 7, Device: d.id}))
			require.ErrorIs(t, p.do(transfer.Write, &w, region, value), transfer.ErrStale)
			_, err = grantOf(t, s, &d, 1, 7, region, mib)
			require.ErrorIs(t, err, errFenced)
			_, err = grantOf(t, s, &d, 1, 8, region, mib)
			require.NoError(t, err)
			_, err = grantOf(t, s, &d, 2, 9, d.ready.Size-mib, 2*mib)
			require.ErrorContains(t, err, "not within")
			d.id++
			_, err = grantOf(t, s, &d, 3, 10, region, mib)
			require.ErrorIs(t, err, errNotHere)
		})
	}
}

// TestFreePagesAreDiscarded: bytes of a region that the home says are free are forgotten, and those that are written there
// afterwards, or by whoever owns the region next, are not.
func TestFreePagesAreDiscarded(t *testing.T) {
	m := newMasters(t)
	n, _ := m.start(Config{DRAM: 8 * mib, SSD: []SSD{{Dir: filepath.Join(t.TempDir(), "ssd"), Size: 16 * mib}}})
	ready(t, n)
	disk := n.Status().Devices[1]
	d, p, s := m.device(disk.UUID), newPeer(t), m.of(disk.UUID)
	require.True(t, s.cfg.discards)
	w, err := grantOf(t, s, &d, 1, 7, region, mib)
	require.NoError(t, err)
	old, later := bytes.Repeat([]byte{7}, 8192), bytes.Repeat([]byte{8}, 8192)
	for at := range uint64(4) {
		require.NoError(t, p.do(transfer.Write, &w, region+at*8192, old))
	}
	require.NoError(t, s.h.discard(t.Context(), []client.Unused{unused(1, 7, 0, 8192), unused(1, 7, 2*8192, 8192), unused(1, 6, 8192, 8192)}))
	for at, there := range []bool{false, true, false, true} {
		got, err := p.read(&d.ready.Endpoint, region+uint64(at)*8192, 8192)
		if there {
			require.NoError(t, err)
			require.Equal(t, old, got)
		} else {
			require.ErrorIs(t, err, transfer.ErrMissing)
		}
	}
	store := n.Status().Devices[1].Store
	require.EqualValues(t, 2*8192, store.DiscardedBytes)
	require.EqualValues(t, 2, store.Extents)
	require.EqualValues(t, 1, n.Status().Devices[1].Undiscarded)

	require.NoError(t, p.do(transfer.Write, &w, region, later))
	got, err := p.read(&d.ready.Endpoint, region, 8192)
	require.NoError(t, err)
	require.Equal(t, later, got)
	require.NoError(t, s.h.fence(t.Context(), &protocol.FencePush{RegionID: 1, Epoch: 7, Device: d.id}))
	w, err = grantOf(t, s, &d, 2, 8, region, mib)
	require.NoError(t, err)
	require.NoError(t, p.do(transfer.Write, &w, region, later))
	require.NoError(t, s.h.discard(t.Context(), []client.Unused{unused(1, 7, 0, mib)}), "it comes late")
	got, err = p.read(&d.ready.Endpoint, region, 8192)
	require.NoError(t, err)
	require.Equal(t, later, got)
	require.EqualValues(t, 2, n.Status().Devices[1].Undiscarded)

	memory := m.of(n.Status().Devices[0].UUID)
	require.False(t, memory.cfg.discards)
	require.ErrorIs(t, memory.h.discard(t.Context(), nil), errNotHere)
}

func TestNewLeaderIsToldAnew(t *testing.T) {
	m := newMasters(t)
	n, _ := m.start(Config{DRAM: 8 * mib})
	ready(t, n)
	before := m.device("")
	s := m.last()
	w, err := grantOf(t, s, &before, 1, 7, region, mib)
	require.NoError(t, err)
	s.h.connected(s.number) // the same session, and another leader
	within(t, func() error {
		if d := m.device(""); d.readies < 2 {
			return errors.New("not attached again")
		}
		return nil
	})
	require.Equal(t, before.ready.Endpoint, m.device("").ready.Endpoint, "by the same handle")
	require.NoError(t, newPeer(t).do(transfer.Write, &w, region, []byte("still")), "what was granted stays so")
}

func TestMemoryDoesNotOutliveItsSession(t *testing.T) {
	m := newMasters(t)
	n, _ := m.start(Config{DRAM: 8 * mib})
	ready(t, n)
	old := m.device("")
	dev, err := cxl.Open(old.ready.Path, cxl.Expect{})
	require.NoError(t, err)
	defer dev.Close() //nolint:errcheck // of a test
	mapping, err := dev.Map(region, mib, cxl.MapOptions{})
	require.NoError(t, err)
	defer mapping.Close() //nolint:errcheck // of a test
	s := m.last()
	w, err := grantOf(t, s, &old, 1, 7, region, mib)
	require.NoError(t, err)
	s.expire()
	within(t, func() error {
		if s := n.Status(); s.Devices[0].ID == old.id || !s.Ready() {
			return errors.New("the old memory still serves")
		}
		return nil
	})
	status := n.Status()
	fresh := m.device(status.Devices[0].UUID)
	require.NotEqual(t, old.id, fresh.id)
	require.NoError(t, cxl.CopyIn(mapping.Bytes(), bytes.Repeat([]byte("late"), mib/4)), "a late store harms nobody")
	p := newPeer(t)
	b, err := p.read(&fresh.ready.Endpoint, region, 4)
	require.NoError(t, err)
	require.Equal(t, make([]byte, 4), b)
	_, err = p.read(&old.ready.Endpoint, region, 4)
	require.ErrorIs(t, err, transfer.ErrStale)
	require.ErrorIs(t, p.do(transfer.Write, &w, region, b), transfer.ErrStale)
}

func TestStoreOutlivesItsNode(t *testing.T) {
	m := newMasters(t)
	cfg := Config{SSD: []SSD{{Dir: filepath.Join(t.TempDir(), "ssd"), Size: 16 * mib}}}
	n, stop := m.start(cfg)
	first := ready(t, n)
	d, p := m.device(""), newPeer(t)
	require.True(t, d.ready.Endpoint.Storage)
	require.Empty(t, d.ready.Path, "nobody maps it")
	w, err := grantOf(t, m.last(), &d, 1, 7, region, mib)
	require.NoError(t, err)
	require.NoError(t, p.do(transfer.Write, &w, region, []byte("kept")))
	m.mu.Lock()
	m.devices[first.Devices[0].UUID].fresh = false
	m.mu.Unlock()
	m.last().expire()
	within(t, func() error {
		if d := m.device(""); d.readies < 2 {
			return errors.New("not attached again")
		}
		return nil
	})
	require.ErrorIs(t, p.do(transfer.Write, &w, region, []byte("late")), transfer.ErrStale, "its session ended")
	require.NoError(t, stop())
	_, err = p.read(&d.ready.Endpoint, region, 4)
	require.Error(t, err, "nobody serves it")

	n, _ = m.start(Config{SSD: []SSD{{Dir: cfg.SSD[0].Dir}}})
	again := ready(t, n)
	require.Equal(t, first.Devices[0].UUID, again.Devices[0].UUID)
	require.Equal(t, first.Devices[0].Generation, again.Devices[0].Generation)
	d = m.device("")
	b, err := p.read(&d.ready.Endpoint, region, 4)
	require.NoError(t, err)
	require.Equal(t, "kept", string(b))
	_, err = p.read(&d.ready.Endpoint, region+mib, 4)
	require.ErrorIs(t, err, transfer.ErrMissing)
}

func TestContentThatNobodyKnowsIsDropped(t *testing.T) {
	m := newMasters(t)
	cfg := Config{SSD: []SSD{{Dir: filepath.Join(t.TempDir(), "ssd"), Size: 16 * mib}}}
	n, stop := m.start(cfg)
	uuid := ready(t, n).Devices[0].UUID
	d, p := m.device(""), newPeer(t)
	w, err := grantOf(t, m.last(), &d, 1, 7, region, mib)
	require.NoError(t, err)
	require.NoError(t, p.do(transfer.Write, &w, region, []byte("lost")))
	require.True(t, d.fresh, "every leader says so as long as nothing is registered")
	m.last().h.connected(m.last().number)
	within(t, func() error {
		if d := m.device(""); d.readies < 2 {
			return errors.New("not attached again")
		}
		return nil
	})
	_, err = p.read(&d.ready.Endpoint, region, 4)
	require.NoError(t, err, "what is being written is not dropped")
	require.NoError(t, stop())
	n, _ = m.start(cfg)
	ready(t, n)
	d = m.device(uuid)
	_, err = p.read(&d.ready.Endpoint, region, 4)
	require.ErrorIs(t, err, transfer.ErrMissing)
}

// TestStoreThatLostContentSaysSo: what the log of a store has lost would stay in the index for ever, and be missed by each
// reader, if the leader did not hear of it.
func TestStoreThatLostContentSaysSo(t *testing.T) {
	m := newMasters(t)
	cfg := Config{SSD: []SSD{{Dir: filepath.Join(t.TempDir(), "ssd"), Size: 16 * mib}}}
	n, stop := m.start(cfg)
	before := ready(t, n).Devices[0]
	d, p := m.device(""), newPeer(t)
	w, err := grantOf(t, m.last(), &d, 1, 7, region, mib)
	require.NoError(t, err)
	for i := range uint64(3) {
		require.NoError(t, p.do(transfer.Write, &w, region+i*4096, []byte("lost")))
	}
	m.mu.Lock()
	m.devices[before.UUID].fresh = false
	m.mu.Unlock()
	require.NoError(t, stop())
	f, err := os.OpenFile(filepath.Join(cfg.SSD[0].Dir, "0000.segment"), os.O_RDWR, 0)
	require.NoError(t, err)
	for _, block := range []int64{2, 6} { // the header of the second write, and the footer
		_, err = f.WriteAt(make([]byte, 4096), block*4096)
		require.NoError(t, err)
	}
	require.NoError(t, f.Close())
	n, _ = m.start(cfg)
	after := ready(t, n).Devices[0]
	require.Equal(t, before.UUID, after.UUID)
	require.NotEqual(t, before.Generation, after.Generation)
	d = m.device("")
	_, err = p.read(&d.ready.Endpoint, region+2*4096, 4)
	require.ErrorIs(t, err, transfer.ErrMissing, "also what was not lost: nobody knows of it")
}

// retire has the leader give a device another generation.
func (m *masters) retire(uuid string) uint64 {
	m.mu.Lock()
	m.next++
	d := m.devices[uuid]
	d.generation = m.next
	m.mu.Unlock()
	s := m.last()
	s.h.connected(s.number)
	return m.next
}

func TestGenerationThatTheLeaderRetired(t *testing.T) {
	t.Run("memory is made anew", func(t *testing.T) {
		m := newMasters(t)
		n, _ := m.start(Config{DRAM: 8 * mib})
		uuid := ready(t, n).Devices[0].UUID
		m.retire(uuid)
		within(t, func() error {
			if s := n.Status(); !s.Ready() || s.Devices[0].UUID == uuid {
				return errors.New("the old memory still serves")
			}
			return nil
		})
	})
	t.Run("a store drops its content", func(t *testing.T) {
		m := newMasters(t)
		n, _ := m.start(Config{SSD: []SSD{{Dir: filepath.Join(t.TempDir(), "ssd"), Size: 16 * mib}}})
		uuid := ready(t, n).Devices[0].UUID
		d, p := m.device(""), newPeer(t)
		w, err := grantOf(t, m.last(), &d, 1, 7, region, mib)
		require.NoError(t, err)
		require.NoError(t, p.do(transfer.Write, &w, region, []byte("lost")))
		generation := m.retire(uuid)
		within(t, func() error {
			if s := n.Status(); !s.Ready() || s.Devices[0].Generation != generation {
				return fmt.Errorf("not attached: %+v", s)
			}
			return nil
		})
		require.ErrorIs(t, p.do(transfer.Write, &w, region, []byte("late")), transfer.ErrStale)
		d = m.device("")
		_, err = p.read(&d.ready.Endpoint, region, 4)
		require.ErrorIs(t, err, transfer.ErrMissing)
	})
}

func TestDevicesThatCannotBeUsed(t *testing.T) {
	dir := t.TempDir()
	m := newMasters(t)
	own := Config{
		SSD: []SSD{{Dir: filepath.Join(dir, "ssd"), Size: 16 * mib}},
		CXL: []CXL{{Path: filepath.Join(dir, "cxl"), Size: 8 * mib, Coherence: "hardware"}},
	}
	n, stop := m.start(own)
	ready(t, n)
	refused := func(m *masters, cfg Config, words string) {
		t.Helper()
		n, stop := m.start(cfg)
		within(t, func() error {
			if s := n.Status().Devices[0].State; s != StateFailed {
				return fmt.Errorf("it is %s", s)
			}
			return nil
		})
		err := stop()
		require.ErrorIs(t, err, ErrMedium)
		require.ErrorContains(t, err, words)
	}
	refused(m, Config{SSD: own.SSD}, "another process serves it")
	refused(m, Config{CXL: own.CXL}, "stop that server first")
	require.NoError(t, stop())
	other := newMasters(t)
	other.poolID = [16]byte{9}
	refused(other, Config{SSD: own.SSD}, "point masters at that pool")
	refused(other, Config{CXL: own.CXL}, "belongs to another pool")
	refused(m, Config{SSD: []SSD{{Dir: own.SSD[0].Dir, Size: 32 * mib}}}, "leave the size out")
	refused(m, Config{SSD: []SSD{{Dir: filepath.Join(dir, "none")}}}, "how large")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "precious"), bytes.Repeat([]byte("precious"), 8*mib/8), 0o600))
	refused(m, Config{CXL: []CXL{{Path: filepath.Join(dir, "precious"), Coherence: "hardware"}}}, "holds data")
	n, _ = m.start(own)
	ready(t, n) // nothing was lost by all that
}

func TestDeviceOfTheMastersIsExposed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pool")
	m := newMasters(t)
	n, _ := m.start(Config{Expose: []string{path}})
	within(t, func() error {
		if n.Status().Devices[0].Why == "" {
			return errors.New("it has not looked yet")
		}
		return nil
	})
	uuid := [16]byte{5}
	m.devices[hexID(uuid)] = &indexed{id: 1, generation: 77}
	owner, err := cxl.Create(path, cxl.Options{
		Pool: m.poolID, Device: uuid, DeviceID: 1, Generation: 77, Size: 8 * mib, Coherence: cxl.CoherenceHardware,
	})
	require.NoError(t, err)
	defer owner.Close() //nolint:errcheck // of a test
	ready(t, n)
	d, p := m.device(""), newPeer(t)
	require.True(t, d.ready.Expose)
	w, err := grantOf(t, m.last(), &d, 1, 7, region, mib)
	require.NoError(t, err)
	require.NoError(t, p.do(transfer.Write, &w, region, []byte("there")))
	mapping, err := owner.Map(region, mib, cxl.MapOptions{})
	require.NoError(t, err)
	require.Equal(t, "there", string(mapping.Bytes()[:5]))
	require.NoError(t, mapping.Close())

	m.mu.Lock()
	m.devices[hexID(uuid)].generation = 78
	m.mu.Unlock()
	require.NoError(t, owner.SetGeneration(78, 1))
	within(t, func() error {
		if s := n.Status(); !s.Ready() || s.Devices[0].Generation != 78 {
			return errors.New("the new generation is not served")
		}
		return nil
	})
	require.ErrorIs(t, p.do(transfer.Write, &w, region, []byte("late")), transfer.ErrStale)
}

func TestMediumThatFails(t *testing.T) {
	m := newMasters(t)
	n, stop := m.start(Config{DRAM: 8 * mib, SSD: []SSD{{Dir: filepath.Join(t.TempDir(), "ssd"), Size: 16 * mib}}})
	ready(t, n)
	n.devices[1].medium.(*ssdMedium).broken <- errors.New("the disk is gone")
	within(t, func() error {
		if s := n.Status(); s.Devices[1].State != StateFailed {
			return fmt.Errorf("it is %s", s.Devices[1].State)
		}
		return nil
	})
	require.Equal(t, StateReady, n.Status().Devices[0].State, "the others go on")
	require.ErrorContains(t, stop(), "the disk is gone")
}

func TestConfigurationsThatAreRefused(t *testing.T) {
	for words, cfg := range map[string]Config{
		"no masters":            {DRAM: 8 * mib},
		"nothing to contribute": {Masters: []string{"a:1"}},
		"the header alone":      {Masters: []string{"a:1"}, DRAM: mib},
		"a multiple of 64 KiB":  {Masters: []string{"a:1"}, DRAM: 8*mib + 1},
		"by transfer alone":     {Masters: []string{"a:1"}, SSD: []SSD{{Dir: "x"}}},
		"one of its own":        {Masters: []string{"a:1"}, Listen: []string{":0"}, SSD: []SSD{{Dir: "x"}, {Dir: "x"}}},
		"each device once":      {Masters: []string{"a:1"}, CXL: []CXL{{Path: ""}}},
	} {
		_, err := New(cfg)
		require.ErrorIs(t, err, ErrConfig)
		require.ErrorContains(t, err, words)
	}
}
