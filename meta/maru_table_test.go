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

// TestMaruKeysOfOtherLengths: keys that come and go, each time of other lengths, take no more memory than twice what is there.
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
		require.LessOrEqual(t, len(x.keys.blocks), 2*fewBlocks)
	}
	require.Len(t, kept, x.count)
	for key, s := range kept {
		require.Equal(t, s, x.find([]byte(key)))
	}
	longest := bytes.Repeat([]byte("y"), MaxMaruKeyBytes)
	require.Equal(t, longest, x.key(x.at(x.insert(longest))))
}
