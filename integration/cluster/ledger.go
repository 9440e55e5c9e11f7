package cluster

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/zeebo/xxh3"
)

// Ledger holds what was tried and acknowledged for keys that have one writer each, so that what a read may return is
// known exactly.
type Ledger struct {
	mu   sync.Mutex
	keys map[string]*History
	list []string // keys in the order of their first store
}

// History is the life of one key: states 0, 1, 2, ... in the order of its writer's operations. State 0 is absence.
type History struct {
	mu     sync.Mutex
	states []state
}

// state is what a key is after an operation.
type state struct {
	version uint64    // 0 = absent
	begun   time.Time // when the operation that made it was called
	acked   time.Time // when it was acknowledged; zero = not yet, or never
	sum     uint64    // checksum of the value; 0 = not computed
}

// NewLedger is a ledger without keys.
func NewLedger() *Ledger { return &Ledger{keys: make(map[string]*History)} }

// Of returns the history of a key.
func (l *Ledger) Of(key string) *History {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.keys[key]
	if h == nil {
		h = &History{states: []state{{}}}
		l.keys[key] = h
		l.list = append(l.list, key)
	}
	return h
}

// All lists the keys.
func (l *Ledger) All() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.list)
}

// Begin notes that an operation is called which makes the key what version says.
func (h *History) Begin(version uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.states = append(h.states, state{version: version, begun: now()})
}

// Ack notes that the last operation was acknowledged.
func (h *History) Ack() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.states[len(h.states)-1].acked = now()
}

// Now returns the version after the last operation, and whether that is certain.
func (h *History) Now() (version uint64, certain bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	last := h.states[len(h.states)-1]
	return last.version, len(h.states) == 1 || !last.acked.IsZero()
}

// Allows says why a read, sent at sent and answered at answered with a version (0 = absent), may not be; nil if it may.
// It may show the last state that was acknowledged before it was sent, or one whose operation was called later and
// before the answer. gone says that entries may have left by themselves, so that absence is always right.
func (h *History) Allows(version uint64, sent, answered time.Time, gone bool) error {
	if version == 0 && gone {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	oldest := 0
	for i, s := range h.states {
		if !s.acked.IsZero() && s.acked.Before(sent) {
			oldest = i
		}
	}
	var may []uint64
	for i, s := range h.states[oldest:] {
		if i == 0 || s.begun.Before(answered) {
			if s.version == version {
				return nil
			}
			may = append(may, s.version)
		}
	}
	return fmt.Errorf("a read shows version %d, and only %v may be seen (0 = absent): sent %v, answered %v, history %v",
		version, may, clock(sent), clock(answered), h.text(oldest))
}

// text shows the states from one on.
func (h *History) text(from int) []string {
	var text []string
	for i := max(0, from-1); i < len(h.states); i++ {
		s := h.states[i]
		text = append(text, fmt.Sprintf("#%d v%d called %s acked %s", i, s.version, clock(s.begun), clock(s.acked)))
	}
	return text
}

// clock formats a time of day to microseconds.
func clock(t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	return t.Format("15:04:05.000000")
}

// Next is a version that the key has not had.
func (h *History) Next() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return uint64(len(h.states))
}

// VersionOf finds the version of a key by the checksum of its value; 0 if it has none such.
func (h *History) VersionOf(key string, checksum uint64) uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.states {
		s := &h.states[i]
		if s.version == 0 {
			continue
		}
		if s.sum == 0 {
			s.sum = xxh3.Hash(ValueOf(nil, key, s.version))
		}
		if s.sum == checksum {
			return s.version
		}
	}
	return 0
}
