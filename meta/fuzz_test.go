package meta

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// sampleCommands is a command of every kind with its fields set.
func sampleCommands() []Command {
	ctx := &protocol.Context{Model: "m", LoRA: "l", Salt: "s", BlockSize: 16, Seed: 9}
	return []Command{
		&OpenSession{Instance: "i", Tenant: "t", TTLMS: 5, Secret: 7, Replaces: 3, Proof: 8, Process: Process{BootID: "b", PID: 2}},
		&CloseSession{ID: 1, Fenced: true}, &Fence{ID: 1},
		&Alloc{
			Device: 1, Size: 4096, PageSize: 4096, Region: 2, Victims: []Victim{{Slot: 3, Birth: 9}}, Phase: 2,
			Touched: []Slot{1, 2}, Found: []byte{5}, Keys: 3, MaxOwned: 4,
		},
		&ReturnRegion{Region: 3}, &ReturnRegion{Region: 3, Epoch: 4},
		&Register{Context: ctx, Entries: []protocol.RegisterEntry{{
			Key: []byte("k"), RegionID: 1, KVOffset: 4096, KVLength: 100, Epoch: 2, Checksum: 3, TTLMS: 4,
			HasPrefix: true, Hash: 5, Parent: 6, Index: 7, Group: 1<<16 | 2, Touch: true, Replicas: 2,
		}}},
		&Delete{Keys: [][]byte{[]byte("a"), []byte("b")}}, &Delete{Keys: [][]byte{[]byte("a")}, Region: 3, Offset: 4096},
		&Pin{Class: ClassHard, Owner: "o", Until: 9, Strict: true, Keys: [][]byte{[]byte("a")}},
		&Pin{Undo: true, Keys: [][]byte{[]byte("a")}},
		&Cancel{Seqs: []uint64{1, 2}}, &Clear{All: true, Prefix: []byte("p"), Context: &Context{Tenant: "t", Model: "m"}},
		&Sweep{Limit: 7}, &Mark{Region: 1, For: 2}, &RevokeDone{Region: 1, Epoch: 2}, &FreeRegion{Region: 1},
		&AddDevice{UUID: "u", Path: "p", Node: "n", Tier: "cxl", Coherence: "none", Size: 1, Align: 2, Volatile: true, Generation: 3},
		&AddDevice{UUID: "u", Path: "p", Node: "n", Tier: "ssd", Size: 1, Align: 2, Generation: 3, Home: "node/n/u", NUMA: 2},
		&SetDevice{Device: 1, Mode: DeviceAway, UntilMS: 9, Mark: true, Draining: true}, &FencedRegion{Region: 3, Epoch: 4},
		&AddTask{TaskKind: TaskMove, Device: 1, MoveFrom: 2, Items: []Victim{{1, 2}, {3, 4}}},
		&PutName{Key: []byte("k"), Value: []byte("v"), Check: true, Revision: 3, Lease: true}, &DeleteName{Key: []byte("k"), Check: true, Revision: 4},
		&TaskDone{Task: 1, Done: 5, Copied: 2, Skipped: 2, Failed: 1, Bytes: 6}, &CancelTask{Task: 7},
		&Retire{Device: 1, Generation: 2, BootID: "b", Size: 3, Path: "p", Fenced: true}, &DropDevice{Device: 1},
		&SetSettings{Settings: DefaultSettings()}, &NewIncarnation{Incarnation: 3}, &EmptyRegion{Region: 1}, &ExpirePins{},
		&Maru{Op: MaruRegister, Again: true, DeadlineMS: 9, Entries: []MaruEntry{
			{Key: []byte("k"), Region: MaruInt{Abs: 3}, Offset: MaruInt{Neg: true, Abs: 5}, Length: MaruInt{Raw: "\xa1x"}},
		}},
		&Maru{Op: MaruPin, Strict: true, Keys: [][]byte{[]byte("a"), {}}}, &Maru{Op: MaruReturn, Instance: "i", Region: 3},
		&EmptyRegion{Region: 1, For: 2}, &SetTenant{Tenant: "t", Limits: TenantLimits{Guarantee: 3, MaxPins: 4}},
	}
}

// blankCommand is an empty command of the type that decodes a kind's body.
func blankCommand(k Kind) Command {
	for _, c := range []Command{
		&OpenSession{}, &CloseSession{}, &Fence{}, &Alloc{}, &ReturnRegion{}, &Register{}, &Delete{}, &Pin{}, &Pin{Undo: true},
		&Cancel{}, &Clear{}, &Sweep{}, &Mark{}, &RevokeDone{}, &FreeRegion{}, &AddDevice{}, &Retire{}, &DropDevice{},
		&SetDevice{}, &AddTask{}, &TaskDone{}, &CancelTask{}, &FencedRegion{}, &PutName{}, &DeleteName{},
		&SetSettings{}, &NewIncarnation{}, &EmptyRegion{}, &ExpirePins{}, &SetTenant{}, &Maru{},
	} {
		if c.Kind() == k {
			return c
		}
	}
	return nil
}

// FuzzCommand decodes any body as any command: it ends in ErrCorrupt, or in a command that is written and read again
// without a change.
func FuzzCommand(f *testing.F) {
	seen := map[Kind]bool{}
	for _, c := range sampleCommands() {
		seen[c.Kind()] = true
		f.Add(uint8(c.Kind()), c.appendTo(nil))
	}
	for k := KindOpenSession; k <= KindMaru; k++ {
		require.True(f, seen[k], "kind %d has no sample", k)
	}
	f.Fuzz(func(t *testing.T, kind uint8, body []byte) {
		c := blankCommand(Kind(kind))
		if c == nil {
			t.Skip("no such kind")
		}
		d := decoder{b: body}
		c.decode(&d)
		if err := d.end(); err != nil {
			require.ErrorIs(t, err, ErrCorrupt)
			return
		}
		once := c.appendTo(nil)
		again := blankCommand(Kind(kind))
		d = decoder{b: once}
		again.decode(&d)
		require.NoError(t, d.end())
		require.Equal(t, once, again.appendTo(nil))
	})
}

// FuzzResult reads any bytes as every kind of result, as a server does with what Apply wrote and response memory kept:
// it ends in ErrCorrupt, and what it returns is not larger than what it was given can hold.
func FuzzResult(f *testing.F) {
	p := newPool(f)
	g := generator{r: rand.New(rand.NewPCG(3, 4)), p: p}
	p.device(16 * page)
	for range 200 {
		p.now += 3
		g.step()
		f.Add(bytes.Clone(p.res.buf))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		check := func(n int, err error) {
			require.True(t, err == nil || errors.Is(err, ErrCorrupt), "%v", err)
			require.LessOrEqual(t, n, len(b))
		}
		_, rest, err := DecodeCode(b)
		check(len(rest), err)
		_, err = DecodeSession(b)
		check(0, err)
		a, err := DecodeAlloc(b)
		check(len(a.Evicted)+len(a.Found), err)
		del, err := DecodeDelete(b)
		check(max(len(del.Codes), len(del.Freed)), err)
		codes, err := DecodeCodes(b)
		check(len(codes), err)
		_, err = DecodeCount(b)
		check(0, err)
		_, err = DecodeName(b)
		check(0, err)
		it := DecodeRegister(b)
		check(it.Len(), it.Err())
		var r RegisterResult
		for it.Next(&r) {
			check(len(r.Key), it.Err())
		}
		check(0, it.Err())
	})
}

// sampleStore is what a machine that has done a bit of everything wrote.
func sampleStore(tb testing.TB) *memStore {
	tb.Helper()
	p := namesPool(tb)
	g := generator{r: rand.New(rand.NewPCG(11, 5)), p: p}
	p.device(16 * page)
	for range 400 {
		p.now += 3
		g.step()
	}
	p.flush()
	return p.store
}

// openDamaged opens sound with one record replaced, or removed if value is empty: that fails, or gives a machine that
// goes on like any other. It never panics, nor does it take memory for what a damaged number promises.
func openDamaged(tb testing.TB, sound *memStore, key, value []byte) {
	tb.Helper()
	if len(key) > 0 && key[0] == recHead {
		// Memory is got for the slots that the head names, as no other record can tell how many there were: what
		// guards that number is the store's checksum.
		var h head
		if h.decode(&decoder{b: value}) == nil && h.slots > 1<<16 {
			return
		}
	}
	store := newMemStore()
	maps.Copy(store.records, sound.records)
	if len(value) == 0 {
		delete(store.records, string(key))
	} else {
		store.records[string(key)] = value
	}
	m, err := Open(store)
	if x, ok := errors.AsType[*IncompleteError](err); ok { // as if whoever damaged the record had known how to hide it
		top := store.records[string([]byte{recHead})]
		store.records[string([]byte{recHead})] = appendU64(bytes.Clone(top[:len(top)-8]), x.Hash)
		m, err = Open(store)
	}
	if err != nil {
		return
	}
	again := newMemStore()
	m.Flush(again)
	var out Results
	group := AppendCommand(BeginGroup(nil, 1, nil), Header{}, &OpenSession{Instance: "late", Secret: 1})
	require.NoError(tb, m.Apply(m.Applied()+1, group, &out))
	m.Flush(again)
}

// FuzzOpen puts any bytes in the place of a record.
func FuzzOpen(f *testing.F) {
	sound := sampleStore(f)
	for k, v := range sound.records {
		f.Add([]byte(k), v)
	}
	f.Add([]byte(nil), []byte(nil))
	f.Add(binary.BigEndian.AppendUint32([]byte{recEntry}, 1<<32-1), []byte{1, 1, 'k', 1, 0, 1, 1, 1, 0, 0})
	f.Add(binary.BigEndian.AppendUint32([]byte{recOrder}, 1<<32-2), []byte{1, 1, 1, 1, 1})
	f.Fuzz(func(t *testing.T, key, value []byte) { openDamaged(t, sound, key, value) })
}

// TestOpenWithAnyByteDamaged damages every byte of every record in a few ways.
func TestOpenWithAnyByteDamaged(t *testing.T) {
	sound := sampleStore(t)
	for k, v := range sound.records {
		openDamaged(t, sound, []byte(k), nil)
		for at := range v {
			for _, to := range []byte{0, 1, 0x7f, 0x80, 0xff, v[at] + 1, v[at] ^ 0x40} {
				damaged := bytes.Clone(v)
				damaged[at] = to
				openDamaged(t, sound, []byte(k), damaged)
			}
			openDamaged(t, sound, []byte(k), v[:at])
			openDamaged(t, sound, []byte(k), slices.Concat(v[:at], bytes.Repeat([]byte{0xff}, 9), []byte{1}, v[at:]))
		}
		for at := range k {
			moved := []byte(k)
			moved[at]++
			openDamaged(t, sound, moved, v)
		}
	}
}

// TestOpenRefusesWhatNoMachineWrote: numbers that decode, but for which memory would be taken, or written beyond.
func TestOpenRefusesWhatNoMachineWrote(t *testing.T) {
	p := newPool(t)
	p.device(1 << 40)
	a := p.open("a")
	_, r := p.alloc(a, &protocol.AllocRequest{Size: 4 * page, PageSize: page})
	p.register(a, nil, entryAt("k", r, 0))
	slot, ok := p.m.Find(TenantID{}, []byte("k"))
	require.True(t, ok)
	p.flush()
	keyOf := func(slot Slot) []byte { return binary.BigEndian.AppendUint32([]byte{recEntry}, slot) }
	record := p.store.records[string(keyOf(slot))]
	d := decoder{b: record}
	long := appendBytes(binary.AppendUvarint(nil, d.uvarint()), make([]byte, protocol.MaxKeyBytes+8))
	require.Equal(t, []byte("k"), d.bytes())
	head, wide := p.m.head, *p.m.regions[r.Region]
	head.slots = 1 << 31
	wide.pageSize, wide.length = 1, 1<<39
	for name, c := range map[string]struct{ key, value []byte }{
		"a slot beyond the last":        {keyOf(1<<32 - 2), record},
		"more slots than births":        {[]byte{recHead}, head.appendTo(nil)},
		"a key longer than keys can be": {keyOf(slot), append(long, d.b...)},
		"more pages than a region has":  {wide.appendKey(nil), wide.appendValue(nil)},
	} {
		t.Run(name, func(t *testing.T) {
			store := newMemStore()
			maps.Copy(store.records, p.store.records)
			store.records[string(c.key)] = c.value
			_, err := Open(store)
			require.ErrorIs(t, err, ErrCorrupt)
		})
	}
}

// TestOpenRefusesALaterVersion: what the pool is raised to, every binary that goes on must know.
func TestOpenRefusesALaterVersion(t *testing.T) {
	p := newPool(t)
	require.Equal(t, uint32(VersionFirst), p.m.Settings().Version, "a log must lead to the same state under every binary")
	p.m.settings.Version = ClusterVersion + 1
	p.m.changed(&p.m.set)
	p.flush()
	_, err := Open(p.store)
	require.ErrorContains(t, err, fmt.Sprintf("version is %d, this binary supports up to %d: run a newer one", ClusterVersion+1, ClusterVersion))
}
