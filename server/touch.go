package server

import "larder/meta"

// Layout of slotLease.touch.
const (
	slotCondemned = 1 << 31   // a plan that evicts the entry is on its way
	slotLogged    = 1 << 30   // a use of the entry is in the group on its way
	touchMask     = 1<<30 - 1 // 1 + place in touchTable.pending; 0 = no use is waiting
)

// Limits of the uses that wait for a group.
const (
	// maxLiveTouches bounds the entries with a use that waits: more than the budget brings in a flush interval.
	maxLiveTouches = 1 << 15
	// maxPendingTouches bounds them with the superseded ones, which are removed when it is reached: at least half of
	// all then, so that this costs little per use. 512 KiB.
	maxPendingTouches = 2 * maxLiveTouches
	// maxGroupTouches go into one group: about 2 ms of the state machine's time. The others keep their entries from
	// eviction until they follow in the next.
	maxGroupTouches = 1 << 13
)

// touchTable collects uses of entries until a group takes them along: one element per entry, in the order of the last
// use of each. It lives in leases, whose records say where an entry's element is.
type touchTable struct {
	pending []meta.Touch // Count 0: superseded by a later one, or its entry is gone
	live    int          // of those, the others
	logged  []meta.Touch // in the group on its way
	since   int64        // when the oldest waiting use came

	perSec   float64 // uses of different entries that may go into the log
	budget   float64
	lastFill int64
}

func (t *touchTable) reset() {
	t.pending, t.logged, t.live = t.pending[:0], t.logged[:0], 0
	t.lastFill, t.since, t.budget = 0, 0, 0
}

// spend takes one use from the budget, which grows with time up to one second's worth.
func (t *touchTable) spend(now int64) bool {
	if t.budget < 1 {
		if t.lastFill == 0 {
			t.budget = t.perSec
		} else {
			t.budget = min(t.perSec, t.budget+t.perSec*float64(now-t.lastFill)/1e9)
		}
		t.lastFill = now
	}
	if t.budget < 1 {
		return false
	}
	t.budget--
	return true
}

// used counts a use of the entry in slot s. It returns false if the use had to be dropped.
func (l *leases) used(s meta.Slot, now int64) bool {
	t := &l.touches
	x := l.at(s)
	at := int(x.touch & touchMask)
	switch {
	case at != 0 && at == len(t.pending): // it is the last already
		t.pending[at-1].Count++
		return true
	case at == 0 && (t.live == maxLiveTouches || !t.spend(now)):
		return false
	case len(t.pending) == maxPendingTouches:
		l.compactTouches()
		at = int(x.touch & touchMask)
	}
	count := uint32(1)
	if at != 0 {
		count += t.pending[at-1].Count
		t.pending[at-1].Count = 0
		t.live--
	}
	if t.live == 0 {
		t.since = now
	}
	t.live++
	t.pending = append(t.pending, meta.Touch{Slot: s, Count: count})
	x.touch = x.touch&^touchMask | uint32(len(t.pending)) //nolint:gosec // at most maxPendingTouches
	return true
}

// compactTouches removes the superseded elements.
func (l *leases) compactTouches() {
	t := &l.touches
	n := 0
	for _, p := range t.pending {
		if p.Count == 0 {
			continue
		}
		t.pending[n] = p
		n++
		x := l.at(p.Slot)
		x.touch = x.touch&^touchMask | uint32(n)
	}
	t.pending = t.pending[:n]
}

// dropTouch forgets the waiting use of an entry that is gone.
func (l *leases) dropTouch(x *slotLease) {
	if at := x.touch & touchMask; at != 0 {
		l.touches.pending[at-1].Count = 0
		l.touches.live--
		x.touch &^= touchMask
	}
}

// takeTouches hands waiting uses to a group, the oldest first, at most maxGroupTouches. They count as uses of their
// entries until settleTouches. The result is valid until then.
func (l *leases) takeTouches() []meta.Touch {
	t := &l.touches
	t.logged = t.logged[:0]
	n := 0
	for ; n < len(t.pending) && len(t.logged) < maxGroupTouches; n++ {
		p := t.pending[n]
		if p.Count == 0 {
			continue
		}
		x := l.at(p.Slot)
		x.touch = x.touch&slotCondemned | slotLogged
		t.logged = append(t.logged, p)
		t.pending[n].Count = 0
	}
	t.live -= len(t.logged)
	if t.live == 0 {
		t.pending = t.pending[:0]
		return t.logged
	}
	l.compactTouches()
	return t.logged
}

// settleTouches says that the group that took uses along has been applied or is lost.
func (l *leases) settleTouches() {
	for _, p := range l.touches.logged {
		if x := l.peek(p.Slot); x != nil {
			x.touch &^= slotLogged
		}
	}
	l.touches.logged = l.touches.logged[:0]
}
