package simtest

import (
	"math"
	"time"

	"github.com/anishathalye/porcupine"
)

// opKind is what was done to a key.
type opKind int

const (
	opPut opKind = iota
	opGet
	opExists
	opDelete
	opDrop // the system removed it: evicted, cleared, lost, expired, returned
)

type input struct {
	kind    opKind
	key     string
	version uint64
}

// output is what an operation returned.
type output struct {
	unknown bool
	done    bool // stored, found, deleted
	version uint64
}

// linear collects what clients did and saw, and asks whether some order explains it.
type linear struct {
	s    *sim
	ops  []*operation
	open map[*client][]*operation
}

type operation struct {
	porcupine.Operation
	c       *client
	dropped bool
	over    bool
}

func newLinear(s *sim) *linear { return &linear{s: s, open: map[*client][]*operation{}} }

func (l *linear) begin(c *client, kind opKind, key string, version uint64) *operation {
	op := &operation{c: c}
	op.ClientId, op.Call = c.n, l.s.now
	op.Input = input{kind, key, version}
	l.ops = append(l.ops, op)
	l.open[c] = append(l.open[c], op)
	return op
}

func (l *linear) end(op *operation, out output) {
	op.over, op.Output, op.Return = true, out, l.s.now
	l.close(op)
}

// cancel takes an operation back that had no effect and saw nothing.
func (l *linear) cancel(op *operation) {
	op.over, op.dropped = true, true
	l.close(op)
}

// unknown says that an operation may have an effect, at any time from its call on.
func (l *linear) unknown(op *operation) {
	op.over, op.Output, op.Return = true, output{unknown: true}, math.MaxInt64
	l.close(op)
}

func (l *linear) close(op *operation) {
	open := l.open[op.c]
	for i, x := range open {
		if x == op {
			l.open[op.c] = append(open[:i], open[i+1:]...)
			return
		}
	}
}

// abandon says that a client is dead: what it was doing may have an effect.
func (l *linear) abandon(c *client) {
	for _, op := range append([]*operation(nil), l.open[c]...) {
		if k := op.Input.(input).kind; k == opPut || k == opDelete {
			l.unknown(op)
		} else {
			l.cancel(op)
		}
	}
}

// drop is the removal of a key by a logged command that was no DELETE, proposed at one time and applied now.
func (l *linear) drop(key string, proposed int64) {
	op := &operation{over: true}
	op.ClientId, op.Call, op.Return = 0, proposed, l.s.now
	op.Input, op.Output = input{kind: opDrop, key: key}, output{done: true}
	l.ops = append(l.ops, op)
	l.s.cover.Drops++
}

// keyModel is a key that is absent (0) or holds a version. A put of a key that is held changes nothing.
var keyModel = porcupine.Model{
	Partition: func(history []porcupine.Operation) (parts [][]porcupine.Operation) {
		at := map[string]int{}
		for _, op := range history {
			key := op.Input.(input).key
			i, ok := at[key]
			if !ok {
				i = len(parts)
				at[key] = i
				parts = append(parts, nil)
			}
			parts[i] = append(parts[i], op)
		}
		return parts
	},
	Init: func() any { return uint64(0) },
	Step: func(state, in, out any) (bool, any) {
		held, i, o := state.(uint64), in.(input), out.(output)
		switch i.kind {
		case opGet:
			return o.unknown || o.done == (held != 0) && (!o.done || o.version == held), held
		case opExists:
			return o.unknown || o.done == (held != 0), held
		case opPut:
			if held == 0 {
				return o.unknown || o.done, i.version
			}
			return o.unknown || !o.done, held
		case opDelete:
			return o.unknown || o.done == (held != 0), uint64(0)
		default:
			return held != 0, uint64(0)
		}
	},
}

// check asks for an order. It is called when the run is over, and takes real time.
func (l *linear) check() porcupine.CheckResult {
	var h []porcupine.Operation
	for _, op := range l.ops {
		if op.dropped {
			continue
		}
		if !op.over {
			if k := op.Input.(input).kind; k != opPut && k != opDelete {
				continue
			}
			op.Output, op.Return = output{unknown: true}, math.MaxInt64
		}
		h = append(h, op.Operation)
	}
	l.s.cover.Linear += uint64(len(h))
	return porcupine.CheckOperationsTimeout(keyModel, h, time.Minute)
}
