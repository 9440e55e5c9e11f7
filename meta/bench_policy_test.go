package meta

import (
	"fmt"
	"testing"

	"larder/meta/policy"
	"larder/protocol"
)

// benchBlocks is the length of a request, in blocks.
const benchBlocks = 64

// benchPrefix makes entry i a block of a request, behind the block before it.
func benchPrefix(i int, e *protocol.RegisterEntry) {
	e.HasPrefix, e.Hash, e.Index = true, uint64(i)+1, uint64(i%benchBlocks)
	if e.Index > 0 {
		e.Parent = uint64(i)
	}
}

// BenchmarkPolicies measures what the calls to a policy cost over the machine's own table, where what a policy asks of an
// entry may be dear: policytest's table answers everything at the same price.
func BenchmarkPolicies(b *testing.B) {
	for _, name := range policy.Names() {
		for _, n := range []int{10_000, 100_000, 1_000_000} {
			if testing.Short() && n > 100_000 {
				continue
			}
			b.Run(fmt.Sprintf("%s/entries=%d", name, n), func(b *testing.B) {
				p := newPool(b)
				p.m.settings.Policy = name
				p.device(1 << 50)
				fillWith(b, p, p.open("a"), n, benchPrefix)
				benchPolicy(b, p.m, n)
			})
		}
	}
}

func benchPolicy(b *testing.B, m *Machine, n int) {
	b.Helper()
	i := 0
	each := func(name string, call func(p policy.Policy, s Slot)) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				s := Slot(uint64(i) * 2_654_435_761 % uint64(n))
				call(m.policyOf(m.table.at(s)), s)
				if i++; m.DirtyLen() > 4096 {
					b.StopTimer()
					m.Flush(discard{})
					b.StartTimer()
				}
			}
		})
	}
	each("remove_add", func(p policy.Policy, s Slot) {
		p.Remove(s)
		p.Add(s)
	})
	each("touch", func(p policy.Policy, s Slot) { p.Touch(s, 1) })
	var victim Slot
	first := func(s Slot) policy.Verdict {
		victim = s
		return policy.Stop
	}
	each("evict_add", func(p policy.Policy, _ Slot) {
		p.Victims(m.head.now, first)
		p.Evict(victim)
		(*policyTable)(m).SetOrder(victim, policy.Order{}) // as of an entry that is new
		p.Add(victim)
	})
}
