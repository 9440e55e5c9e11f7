package policytest

import (
	"cmp"
	"slices"

	"larder/meta/policy"
)

// Pool calls a policy as the machine does for one partition: it keeps the tree
// of prefixes, which entries are pinned, and what would be on disk.
type Pool struct {
	Table  *Table
	Policy policy.Policy
	// Pages are the pages of state that were flushed.
	Pages map[uint32][]byte

	name     string
	cfg      policy.Config
	held     map[policy.Slot]bool // live entries; true while in the policy
	children map[policy.Slot][]policy.Slot
}

// NewPool makes an empty pool under a registered policy.
func NewPool(name string, cfg policy.Config) (*Pool, error) {
	t := &Table{}
	p, err := policy.New(name, cfg, t)
	if err != nil {
		return nil, err //nolint:wrapcheck // it names the policy already
	}
	return &Pool{
		Table: t, Policy: p, Pages: make(map[uint32][]byte), name: name, cfg: cfg,
		held: make(map[policy.Slot]bool), children: make(map[policy.Slot][]policy.Slot),
	}, nil
}

// Add registers an entry. Its Parent, if any, must be live.
func (p *Pool) Add(info Entry) policy.Slot {
	s := p.Table.Insert(info)
	p.held[s] = true
	if parent := info.Parent; parent != policy.None {
		p.children[parent] = append(p.children[parent], s)
		if p.held[parent] {
			p.Policy.ChildAdded(parent)
		}
	}
	p.Policy.Add(s)
	return s
}

// Touch reports n uses, unless s is pinned.
func (p *Pool) Touch(s policy.Slot, n uint32) {
	if p.held[s] {
		p.Policy.Touch(s, n)
	}
}

// Pin takes s out of the policy, Unpin puts it back.
func (p *Pool) Pin(s policy.Slot) {
	if p.held[s] {
		p.held[s] = false
		p.Policy.Remove(s)
	}
}

// Unpin undoes Pin.
func (p *Pool) Unpin(s policy.Slot) {
	if held, live := p.held[s]; live && !held {
		p.held[s] = true
		p.Policy.Add(s)
	}
}

// Delete removes s, pinned or not.
func (p *Pool) Delete(s policy.Slot) {
	if p.held[s] {
		p.Policy.Remove(s)
	}
	p.drop(s)
}

// Evict removes s by the policy's decision.
func (p *Pool) Evict(s policy.Slot) {
	p.Policy.Evict(s)
	p.drop(s)
}

func (p *Pool) drop(s policy.Slot) {
	order, parent := p.Table.Order(s), p.Table.Parent(s)
	for _, child := range p.children[s] {
		p.Table.Orphan(child)
	}
	delete(p.children, s)
	delete(p.held, s)
	p.Table.Delete(s)
	if parent == policy.None {
		return
	}
	p.children[parent] = slices.DeleteFunc(p.children[parent], func(c policy.Slot) bool { return c == s })
	if p.held[parent] {
		p.Policy.ChildGone(parent, order)
	}
}

// Plan returns the first n victims at log time now, or fewer, of those that
// stays does not keep back. A nil stays keeps none.
func (p *Pool) Plan(now uint64, n int, stays func(policy.Slot) bool) []policy.Slot {
	var plan []policy.Slot
	p.Policy.Victims(now, func(s policy.Slot) policy.Verdict {
		switch {
		case len(plan) == n:
			return policy.Stop
		case stays != nil && stays(s):
			return policy.Skip
		}
		plan = append(plan, s)
		return policy.Take
	})
	return plan
}

// Live returns the live entries, pinned ones too, by slot.
func (p *Pool) Live() []policy.Slot {
	live := make([]policy.Slot, 0, len(p.held))
	for s := range p.held {
		live = append(live, s)
	}
	slices.Sort(live)
	return live
}

// Held reports whether s is live and in the policy.
func (p *Pool) Held(s policy.Slot) bool { return p.held[s] }

// Flush writes the policy's changed pages to Pages.
func (p *Pool) Flush() { p.Policy.FlushState(false, p.put) }

func (p *Pool) put(page uint32, data []byte) {
	if len(data) == 0 {
		delete(p.Pages, page)
		return
	}
	p.Pages[page] = slices.Clone(data)
}

// Rebuild flushes and replaces the policy by one restored from what is
// persisted: orders, pages and stamps, but no links.
func (p *Pool) Rebuild() error {
	p.Flush()
	fresh, err := policy.New(p.name, p.cfg, p.Table)
	if err != nil {
		return err //nolint:wrapcheck // it names the policy already
	}
	pages := make([]uint32, 0, len(p.Pages))
	for page := range p.Pages {
		pages = append(pages, page)
	}
	slices.Sort(pages)
	for _, page := range pages {
		if err := fresh.RestoreState(page, p.Pages[page]); err != nil {
			return err //nolint:wrapcheck // it names the page already
		}
	}
	var entries []policy.Slot
	for _, s := range p.Live() {
		if p.held[s] {
			entries = append(entries, s)
			*p.Table.Links(s) = policy.Links{Colder: policy.None, Hotter: policy.None}
		}
	}
	slices.SortStableFunc(entries, func(a, b policy.Slot) int {
		return cmp.Compare(p.Table.Order(a).Stamp, p.Table.Order(b).Stamp)
	})
	for _, s := range entries {
		fresh.Restore(s)
	}
	p.Policy = fresh
	return nil
}
