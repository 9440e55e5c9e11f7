// Package policytest plays the machine for an eviction policy: a table in
// plain slices, a pool that calls the policy as the machine does, a cache for
// measuring hit ratios, and Check, the contract that every policy must keep.
// Use it to test a policy of your own.
package policytest

import (
	"fmt"

	"larder/meta/policy"
)

// Entry is what is known of an entry from the start.
type Entry struct {
	policy.Info

	KeyHash uint64      // Table.KeyHash
	Parent  policy.Slot // Table.Parent
}

// Table is a policy.Table in plain slices. The zero Table is empty and usable.
type Table struct {
	orders []policy.Order
	links  []policy.Links
	infos  []Entry
	free   []policy.Slot
	hot    int64
	cold   int64
}

// Order returns what was last set.
func (t *Table) Order(s policy.Slot) policy.Order { return t.orders[s] }

// SetOrder replaces it.
func (t *Table) SetOrder(s policy.Slot, o policy.Order) {
	if o.List >= policy.MaxLists {
		panic(fmt.Sprintf("policytest: list %d of slot %d is not below %d", o.List, s, policy.MaxLists))
	}
	t.orders[s] = o
}

// Links returns the links of s.
func (t *Table) Links(s policy.Slot) *policy.Links { return &t.links[s] }

// Info returns what Insert was given, and the children that came since.
func (t *Table) Info(s policy.Slot) policy.Info { return t.infos[s].Info }

// KeyHash returns what Insert was given.
func (t *Table) KeyHash(s policy.Slot) uint64 { return t.infos[s].KeyHash }

// Parent returns what Insert was given, None when it has left.
func (t *Table) Parent(s policy.Slot) policy.Slot { return t.infos[s].Parent }

// NextStamp counts up.
func (t *Table) NextStamp() int64 { t.hot++; return t.hot }

// ColdStamp counts down.
func (t *Table) ColdStamp() int64 { t.cold--; return t.cold }

// Insert gives an entry a slot and counts it as a child of its parent.
func (t *Table) Insert(info Entry) policy.Slot {
	var s policy.Slot
	if n := len(t.free); n > 0 {
		s, t.free = t.free[n-1], t.free[:n-1]
	} else {
		s = policy.Slot(len(t.orders)) //nolint:gosec // a test's table is small
		t.orders = append(t.orders, policy.Order{})
		t.links = append(t.links, policy.Links{})
		t.infos = append(t.infos, Entry{})
	}
	info.Children = 0
	t.orders[s] = policy.Order{}
	t.links[s] = policy.Links{Colder: policy.None, Hotter: policy.None}
	t.infos[s] = info
	if info.Parent != policy.None {
		t.infos[info.Parent].Children++
	}
	return s
}

// Delete takes the slot back, after the policy has let go of it, and counts the
// entry out of its parent's children.
func (t *Table) Delete(s policy.Slot) {
	if parent := t.infos[s].Parent; parent != policy.None {
		t.infos[parent].Children--
	}
	t.free = append(t.free, s)
}

// Orphan makes s a block without a known parent.
func (t *Table) Orphan(s policy.Slot) { t.infos[s].Parent = policy.None }
