package policy

import "fmt"

func init() {
	Register("lru", func(_ Config, t Table) (Policy, error) { return &lru{NewBase(t)}, nil })
	Register("fifo", func(_ Config, t Table) (Policy, error) { return &fifo{NewBase(t)}, nil })
}

// lru evicts the entry whose last use, or registration, lies furthest back.
type lru struct{ Base }

// Touch moves s to the hot end.
func (p *lru) Touch(s Slot, _ uint32) { p.MoveHot(s, 0) }

// fifo evicts the entry registered (or unpinned) first; uses change nothing.
type fifo struct{ Base }

func errPage(page uint32) error {
	return fmt.Errorf("policy: state page %d is of another policy or release: "+
		"restore the pool from a snapshot of the policy in use", page)
}
