package simtest

import (
	"cmp"
	"math"
	"slices"
	"sort"
	"time"

	"github.com/anishathalye/porcupine"

	"larder/meta"
)

// opKind is what was done to a key.
type opKind int

const (
	opPut opKind = iota
	opGet
	opExists
	opDelete
	opDrop // the system removed it: evicted, cleared, lost, expired, returned
	opHide // it is not served: the device where it lies is away
	opBack // it is served again
)

// hiddenKey marks the version of a key that is hidden.
const hiddenKey = uint64(1) << 63

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
	log  *history // set when the cluster is restored and another history begins
	ops  []*operation
	open map[*client][]*operation
}

type operation struct {
	porcupine.Operation
	of      *linear
	c       *client
	dropped bool
	over    bool
	tries   []seqKey // the requests that were to do it
}

func newLinear(s *sim) *linear { return &linear{s: s, open: map[*client][]*operation{}} }

func (l *linear) begin(c *client, kind opKind, key string, version uint64) *operation {
	op := &operation{c: c, of: l}
	op.ClientId, op.Call = c.n, l.s.now
	op.Input = input{kind, key, version}
	l.ops = append(l.ops, op)
	l.open[c] = append(l.open[c], op)
	return op
}

func (l *linear) end(op *operation, out output) { l.endAt(op, out, l.s.now) }

// endAt ends an operation that had its effect, or saw what it returns, until a time before now.
func (l *linear) endAt(op *operation, out output, at int64) {
	if l.straddles(op) {
		return
	}
	op.over, op.Output, op.Return = true, out, at
	l.close(op)
}

// cancel takes an operation back that had no effect and saw nothing.
func (l *linear) cancel(op *operation) {
	if op.of != l {
		return
	}
	op.over, op.dropped = true, true
	l.close(op)
}

// unknown says that an operation may have an effect, at any time from its call on.
func (l *linear) unknown(op *operation) {
	if l.straddles(op) {
		return
	}
	op.over, op.Output, op.Return = true, output{unknown: true}, math.MaxInt64
	l.close(op)
}

// straddles handles an operation that began before the cluster was restored: what it saw may be of either history, and
// what it does may be in both.
func (l *linear) straddles(op *operation) bool {
	if op.of == l {
		return false
	}
	if k := op.Input.(input).kind; k == opPut || k == opDelete {
		again := &operation{over: true, of: l}
		again.ClientId, again.Call, again.Return = op.ClientId, op.Call, math.MaxInt64
		again.Input, again.Output, again.tries = op.Input, output{unknown: true}, op.tries
		l.ops = append(l.ops, again)
	}
	return true
}

// over ends a history: what is in progress may have had an effect.
func (l *linear) over() {
	l.log = l.s.log
	for _, open := range l.open {
		for _, op := range append([]*operation(nil), open...) {
			op.over, op.Output, op.Return = true, output{unknown: true}, math.MaxInt64
			if k := op.Input.(input).kind; k != opPut && k != opDelete {
				op.dropped = true
			}
		}
	}
	clear(l.open)
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

// drop is the removal of a key by a logged command that was no DELETE, proposed at one time and applied now. Under ttl
// it is over when its time is, which is before, though not before it was there: but what was over once does not come back.
func (l *linear) drop(key string, proposed, since int64) {
	if l.s.mix.policy == "ttl" {
		proposed = min(proposed, since)
	}
	op := &operation{over: true}
	op.ClientId, op.Call, op.Return = 0, proposed, l.s.now
	op.Input, op.Output = input{kind: opDrop, key: key}, output{done: true}
	l.ops = append(l.ops, op)
	l.s.cover.Drops++
}

// hide is that a key is not served from now on, and back that it is again.
func (l *linear) hide(key string, proposed int64) { l.system(opHide, key, proposed) }
func (l *linear) back(key string, proposed int64) { l.system(opBack, key, proposed) }

func (l *linear) system(kind opKind, key string, proposed int64) {
	op := &operation{over: true}
	op.ClientId, op.Call, op.Return = 0, proposed, l.s.now
	op.Input, op.Output = input{kind: kind, key: key}, output{done: true}
	l.ops = append(l.ops, op)
	l.s.cover.Hidden++
}

// keyModel is a key that is absent (0) or holds a version, perhaps hidden. A put of a key that is held changes nothing; one
// that is hidden can be replaced, and deleted, by who knows of it.
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
		all, i, o := state.(uint64), in.(input), out.(output)
		held := all
		if all&hiddenKey != 0 {
			held = 0
		}
		switch i.kind {
		case opHide:
			return held != 0, held | hiddenKey
		case opBack:
			return all&hiddenKey != 0, all &^ hiddenKey
		case opGet:
			return o.unknown || o.done == (held != 0) && (!o.done || o.version == held), all
		case opExists:
			return o.unknown || o.done == (held != 0), all
		case opPut:
			if held == 0 {
				return o.unknown || o.done, i.version
			}
			return o.unknown || !o.done, held
		case opDelete:
			return o.unknown || o.done == (all != 0), uint64(0)
		default:
			return held != 0, uint64(0)
		}
	},
}

// settle looks into the committed log for what became of an operation whose caller never heard: nothing, or its effect,
// which everybody could see from when the first member applied it. Without that each such operation may come anywhere
// until the end, and to try all orders of a few dozen of them takes longer than anybody waits.
func (l *linear) settle(op *operation) {
	log := l.log
	if log == nil {
		log = l.s.log
	}
	if log == nil || len(op.tries) == 0 {
		return
	}
	var done []answer
	for _, k := range op.tries {
		if a, ok := log.answers[k]; ok && a.changed() {
			done = append(done, a)
		}
	}
	switch len(done) {
	case 0:
		op.dropped = true
	case 1:
		op.Output = output{done: true, version: op.Input.(input).version}
		op.Return = log.entries[done[0].index-log.first].when
	}
}

// changed reports whether a request for one key has stored or deleted it.
func (a *answer) changed() bool {
	code, body, err := meta.DecodeCode(a.result)
	if err != nil || code != 0 {
		return false
	}
	switch a.kind {
	case meta.KindRegister:
		it, r := meta.DecodeRegister(body), meta.RegisterResult{}
		return it.Next(&r) && r.New
	case meta.KindDelete:
		r, err := meta.DecodeDelete(body)
		return err == nil && len(r.Codes) == 1 && r.Codes[0] == 0
	default:
		return false
	}
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
		if op.Return == math.MaxInt64 {
			if l.settle(op); op.dropped {
				continue
			}
		}
		h = append(h, op.Operation)
	}
	l.s.cover.Linear += uint64(len(h))
	r := porcupine.CheckOperationsTimeout(keyModel, h, time.Minute)
	if r != porcupine.Ok {
		l.explain(h)
	}
	return r
}

// explain logs the shortest beginning of a key's history that no order explains.
func (l *linear) explain(h []porcupine.Operation) {
	for _, part := range keyModel.Partition(h) {
		if porcupine.CheckOperationsTimeout(keyModel, part, time.Minute) == porcupine.Ok {
			continue
		}
		slices.SortStableFunc(part, func(a, b porcupine.Operation) int { return cmp.Compare(a.Return, b.Return) })
		n := sort.Search(len(part), func(n int) bool {
			return porcupine.CheckOperationsTimeout(keyModel, began(part, n), time.Minute) != porcupine.Ok
		})
		for _, op := range part[max(0, n-12):min(n+3, len(part))] {
			l.s.logf("client %d from %.4f to %.4f: %+v -> %+v", op.ClientId, float64(op.Call)/1e9, float64(op.Return)/1e9, op.Input, op.Output)
		}
		return
	}
}

// began is the history up to the end of operation n: those that had begun by then may have had an effect.
func began(part []porcupine.Operation, n int) (h []porcupine.Operation) {
	h = append(h, part[:n]...)
	for _, op := range part[n:] {
		k := op.Input.(input).kind
		if n == 0 || op.Call > part[n-1].Return || k == opGet || k == opExists {
			continue
		}
		op.Return = math.MaxInt64
		if k != opDrop && k != opHide && k != opBack {
			op.Output = output{unknown: true}
		}
		h = append(h, op)
	}
	return h
}
