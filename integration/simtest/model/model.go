package model

import (
	"errors"
	"fmt"
	"slices"

	"larder/meta"
)

// Violation says what a real machine did that it must not. It is an error.
type Violation struct { //nolint:errname // it is what an oracle finds, not what goes wrong in it
	Index   uint64 // of the log entry
	Command int    // its position in the entry; -1 = the entry as a whole, or the state after it
	Name    string // of the command, such as "register"; "" with Command -1
	Rule    string // what was broken
	Want    string
	Got     string
}

// Error says it to people.
func (v *Violation) Error() string {
	at := ""
	if v.Command >= 0 {
		at = fmt.Sprintf(" command %d (%s)", v.Command, v.Name)
	}
	return fmt.Sprintf("log entry %d%s: %s\n  want: %s\n  got:  %s", v.Index, at, v.Rule, v.Want, v.Got)
}

// maxWorlds bounds how many states a model holds possible. It takes two sweeps in a row whose results fit two
// explanations to get more than two.
const maxWorlds = 8

// Model is what the state must be after the log so far. It is not safe for concurrent use.
//
// There is one state, except for a moment after some sweeps: whether a sweep under way starts anew, when the pool's
// policy changes away from one that holds entries back, cannot be told from its result alone. Then all that fit are
// followed, until later results leave one.
type Model struct{ worlds []*world }

// New returns the model of a new pool, to which no log entry has been applied.
func New() *Model { return &Model{worlds: []*world{newWorld()}} }

// Clone returns an independent copy, to go on from later, as from a snapshot.
func (m *Model) Clone() *Model {
	c := &Model{}
	for _, w := range m.worlds {
		c.worlds = append(c.worlds, w.clone())
	}
	return c
}

// Applied returns the index of the last applied log entry.
func (m *Model) Applied() uint64 { return m.worlds[0].applied }

// Apply replays one committed log entry and compares what a real machine answered for it, and nothing else, in got. It
// returns a *Violation if that is not what it must be, and another error if the entry does not decode; after either the
// model is of no use any more. data is not kept.
func (m *Model) Apply(index uint64, data []byte, got *meta.Results) error {
	group, err := meta.DecodeGroup(data)
	if err != nil {
		return fmt.Errorf("model: log entry %d: %w", index, err)
	}
	var next []*world
	var why error
	for _, w := range m.worlds {
		for guess := w.guesses(&group); ; guess-- {
			v := w
			if guess > 0 {
				v = w.clone()
			}
			v.guess, v.asked, v.sweeps = guess, 0, 0
			next = append(next, v)
			if guess == 0 {
				break
			}
		}
	}
	next = slices.DeleteFunc(next, func(w *world) bool {
		err := w.apply(index, data, &group, got)
		if err != nil && w.guess == 0 {
			why = err
		}
		return err != nil || w.guess&^w.asked != 0 // another one guessed the same where it mattered
	})
	return m.keep(next, why)
}

// keep goes on with the worlds that fit, or fails with the reason why the last did not.
func (m *Model) keep(fit []*world, why error) error {
	if len(fit) == 0 {
		return why
	}
	m.worlds = fit[:min(len(fit), maxWorlds)]
	return nil
}

// apply replays one log entry.
func (w *world) apply(index uint64, data []byte, group *meta.Group, got *meta.Results) error {
	fail := func(rule string, want, have any) error {
		return &Violation{index, -1, "", rule, fmt.Sprint(want), fmt.Sprint(have)}
	}
	if index <= w.applied {
		return fail("log entries are applied once and in order", fmt.Sprintf("above %d", w.applied), index)
	}
	w.applied = index
	w.effects, w.dropped, w.moved, w.changes = nil, nil, nil, nil
	if len(got.Spans) != len(group.Commands) {
		return fail("a result per command", len(group.Commands), len(got.Spans))
	}
	if len(data) > 0 {
		w.now = max(w.now, group.NowMS)
	}
	for _, t := range group.Touches {
		if e := w.at(t.Slot); e != nil && t.Count > 0 {
			w.touch(e, uint64(t.Count))
		}
	}
	for i := range group.Commands {
		c := &group.Commands[i]
		if err := w.command(c.Header, c.Command, got, &got.Spans[i]); err != nil {
			if v, ok := errors.AsType[*Violation](err); ok {
				v.Index, v.Command, v.Name = index, i, kindName(c.Header.Kind)
			}
			return err
		}
	}
	if err := w.compareEffects(got); err != nil {
		return err
	}
	w.settle()
	return w.check()
}

// compareEffects compares which pages owners have to be told of. Only those that ask are given any.
func (w *world) compareEffects(got *meta.Results) error {
	wantEffects, wantDropped, wantMoved := w.effects, w.dropped, w.moved
	if !got.WantEffects {
		wantEffects, wantDropped, wantMoved = nil, nil, nil
	}
	if len(wantEffects) != len(got.Effects) || !slices.EqualFunc(wantEffects, got.Effects, func(a, b meta.Effect) bool {
		return a.Reason == b.Reason && equal(a.Page, b.Page)
	}) {
		return w.violation("effects: the pages of open owners that others freed", wantEffects, got.Effects)
	}
	// Their order means nothing.
	a, b := slices.Sorted(slices.Values(wantDropped)), slices.Sorted(slices.Values(got.Dropped))
	if !slices.Equal(a, b) {
		return w.violation("dropped: the slots freed without anybody's being told", a, b)
	}
	a, b = slices.Sorted(slices.Values(wantMoved)), slices.Sorted(slices.Values(got.Parted))
	if !slices.Equal(a, b) {
		return w.violation("parted: the slots of entries that lost a location and live on", a, b)
	}
	return nil
}

// violation makes one about the present log entry.
func (w *world) violation(rule string, want, got any) error {
	return &Violation{w.applied, -1, "", rule, describe(want), describe(got)}
}
