package meta

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMaruKeysWithOneHash: keys whose hashes are the same are told apart, in whatever order they go.
func TestMaruKeysWithOneHash(t *testing.T) {
	names := []string{"a", "b", "c"}
	for _, order := range [][]string{{"a", "b", "c"}, {"c", "b", "a"}, {"b", "a", "c"}, {"b", "c", "a"}} {
		x := newMaruTable()
		slots := map[string]Slot{}
		for _, name := range names {
			slots[name] = x.insert([]byte(name))
			x.at(slots[name]).birth = 1
		}
		// No two have the same hash here: what a chain is made of is put together by hand, for each hash that leads to it.
		x.at(slots["c"]).same, x.at(slots["b"]).same = slots["b"], slots["a"]
		for _, name := range names {
			x.index[maphash.String(x.seed, name)] = slots["c"]
		}
		for i, name := range order {
			require.Equal(t, slots[name], x.find([]byte(name)))
			x.remove(slots[name])
			first := Slot(0)
			for _, left := range slices.Backward(names) {
				if first == 0 && !slices.Contains(order[:i+1], left) {
					first = slots[left]
				}
			}
			require.Equal(t, first, x.index[maphash.String(x.seed, name)], "%s goes, of %v", name, order)
			for _, left := range names {
				x.index[maphash.String(x.seed, left)] = first
			}
			for j, other := range order {
				if want := slots[other]; j > i {
					require.Equal(t, want, x.find([]byte(other)), "%s is found when %s is gone, of %v", other, name, order)
				}
			}
		}
		require.Zero(t, x.count)
		require.Zero(t, x.bytes)
	}
}

// blocks are those of both arenas.
func (t *maruTable) blocks() int { return len(t.keys[0].blocks) + len(t.keys[1].blocks) }

// TestMaruKeysOfOtherLengths: keys that come and go, each time of other lengths, do not take more and more memory.
func TestMaruKeysOfOtherLengths(t *testing.T) {
	x := newMaruTable()
	kept := map[string]Slot{}
	insert := func(key string) Slot {
		s := x.insert([]byte(key))
		x.at(s).birth = 1
		return s
	}
	const round = 48 << 20
	for n := 1 << 10; n <= MaxMaruKeyBytes; n *= 2 {
		var slots []Slot
		for i := range round / n {
			slots = append(slots, insert(fmt.Sprintf("%d/%d/%s", n, i, strings.Repeat("x", n-20))))
		}
		for i, s := range slots {
			if i%1000 == 0 {
				kept[string(x.key(x.at(s)))] = s
				continue
			}
			x.remove(s)
		}
		require.LessOrEqual(t, x.blocks(), 3*fewBlocks)
	}
	require.Len(t, kept, x.count)
	for key, s := range kept {
		require.Equal(t, s, x.find([]byte(key)))
	}
	longest := bytes.Repeat([]byte("y"), MaxMaruKeyBytes)
	require.Equal(t, longest, x.key(x.at(x.insert(longest))))
}

// TestMaruKeysMoveAFewAtATime: no key that comes has to wait until all others have been moved, and they are found all the while.
func TestMaruKeysMoveAFewAtATime(t *testing.T) {
	const n = 400_000 // of 200 bytes, of which one in four stays: 77 blocks that are gaps for the most part
	x := newMaruTable()
	name := func(i int) []byte { return fmt.Appendf(nil, "%0200d", i) }
	slots := make([]Slot, n)
	for i := range slots {
		slots[i] = x.insert(name(i))
	}
	for i := range slots {
		if i%4 > 0 {
			x.remove(slots[i])
		}
	}
	require.Zero(t, x.moved)
	full := x.blocks()
	require.Greater(t, full, fewBlocks)
	steps := 0
	for i, size := 0, 1<<10; steps == 0 && i < n || x.moved != 0; i++ { // of a length for which there is no gap
		before := x.moved
		s := x.insert(fmt.Appendf(nil, "%0*d", size, i))
		if x.moved != 0 {
			steps++
			require.LessOrEqual(t, int(x.moved-before), max(packedSlots, 4*(packedBytes*size/200+1)))
		}
		if steps > 0 {
			x.remove(s)
		}
		require.Equal(t, slots[0], x.find(name(0)))
		require.Equal(t, slots[4*i%n], x.find(name(4*i%n)))
	}
	require.Greater(t, steps, 1000)
	require.Empty(t, x.keys[1-x.in].blocks)
	require.Less(t, x.blocks(), full*2/3)
	for i := 0; i < n; i += 4 {
		require.Equal(t, slots[i], x.find(name(i)))
	}
}

// TestMaruTableIsGivenBack: the memory of keys that have all gone goes too, also of those that nobody has written to disk.
func TestMaruTableIsGivenBack(t *testing.T) {
	x := newMaruTable()
	for range 2 {
		var slots []Slot
		for i := range 2*slabSize + 1 {
			slots = append(slots, x.insert(fmt.Append(nil, i)))
			x.mark(slots[i])
		}
		require.Len(t, x.slabs, 3)
		for _, s := range slots {
			x.remove(s)
		}
		require.Empty(t, x.slabs)
		require.Empty(t, x.dirty)
		require.Zero(t, x.find([]byte("1")))
	}
}
