package cluster

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"larder/client"
)

// What was done to a key, in a history.
type opKind int

const (
	opPut opKind = iota
	opGet
	opDelete
)

// opInput is an operation, opOutput what it returned.
type (
	opInput struct {
		kind    opKind
		key     string
		version uint64 // of the value to put
	}
	opOutput struct {
		unknown bool   // it failed: it may have been carried out or not
		done    bool   // the value was stored, the key was deleted
		version uint64 // of the value that was read; 0 = absent
	}
)

// keyModel is a key that is absent (0) or holds a version. A put of a key that is held changes nothing.
var keyModel = porcupine.Model{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		by := make(map[string][]porcupine.Operation)
		for _, op := range history {
			key := op.Input.(opInput).key
			by[key] = append(by[key], op)
		}
		parts := make([][]porcupine.Operation, 0, len(by))
		for _, part := range by {
			parts = append(parts, part)
		}
		return parts
	},
	Init: func() any { return uint64(0) },
	Step: func(s, input, output any) (bool, any) {
		held, in, out := s.(uint64), input.(opInput), output.(opOutput)
		switch in.kind {
		case opGet:
			return out.unknown || out.version == held, held
		case opPut:
			if held == 0 {
				return out.unknown || out.done, in.version
			}
			return out.unknown || !out.done, held
		default:
			return out.unknown || out.done == (held != 0), uint64(0)
		}
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%+v -> %+v", input, output) },
}

// Recorder writes down a history.
type Recorder struct {
	t     *testing.T
	begun time.Time
	mu    sync.Mutex
	ops   []porcupine.Operation
}

// NewRecorder begins a history.
func NewRecorder(t *testing.T) *Recorder {
	t.Helper()
	return &Recorder{t: t, begun: now()}
}

// checkTime bounds the search for an order that explains a history. A search that does not end is a failure.
const checkTime = time.Minute

// Check fails the test unless there is an order of the operations that explains what they returned. It returns how many
// there were, and how many of them have an unknown outcome. Nothing may be recorded at the same time.
func (r *Recorder) Check() (ops, unknown int) {
	r.t.Helper()
	for _, op := range r.ops {
		if out, ok := op.Output.(opOutput); ok && out.unknown {
			unknown++
		}
	}
	begun := now()
	result, info := porcupine.CheckOperationsVerbose(keyModel, r.ops, checkTime)
	r.t.Logf("%d operations, %d with an unknown outcome: %s in %v", len(r.ops), unknown, result, since(begun))
	if result != porcupine.Ok {
		path := r.t.ArtifactDir() + "/history.html"
		require.NoError(r.t, porcupine.VisualizePath(keyModel, info, path))
		r.t.Errorf("the history is %s: see %s", result, path)
	}
	return len(r.ops), unknown
}

// do carries out one operation. What fails has an unknown outcome, and no end.
func (r *Recorder) do(parent context.Context, id int, in opInput, f func(ctx context.Context) (opOutput, error)) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(parent), 700*time.Millisecond) // some end in an election
	defer cancel()
	call := since(r.begun)
	out, err := f(ctx)
	ret := since(r.begun).Nanoseconds()
	if err != nil {
		if in.kind == opGet {
			return // says nothing
		}
		out, ret = opOutput{unknown: true}, math.MaxInt64
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ops = append(r.ops, porcupine.Operation{
		ClientId: id, Input: in, Call: call.Nanoseconds(), Output: out, Return: ret,
	})
}

// Work does what a client does in a history.
func (r *Recorder) Work(ctx context.Context, id int, x *client.Client, keys int) {
	random := rand.New(rand.NewPCG(rand.Uint64(), 3))
	for n := uint64(1); ctx.Err() == nil; n++ {
		in := opInput{kind: opKind(random.IntN(3)), key: fmt.Sprintf("shared/%d", random.IntN(keys))}
		switch in.kind {
		case opPut:
			in.version = uint64(id+1)<<32 | n
			value := MakeValue(nil, in.key, in.version, 2000)
			r.do(ctx, id, in, func(ctx context.Context) (opOutput, error) {
				res, err := x.Put(ctx, []byte(in.key), value)
				return opOutput{done: res.Stored}, err
			})
		case opDelete:
			r.do(ctx, id, in, func(ctx context.Context) (opOutput, error) {
				found, err := x.Delete(ctx, []byte(in.key))
				return opOutput{done: err == nil && found[0]}, err
			})
		default:
			r.do(ctx, id, in, func(ctx context.Context) (opOutput, error) {
				value, err := x.Get(ctx, []byte(in.key), nil)
				if errors.Is(err, client.ErrNotFound) {
					return opOutput{}, nil
				}
				if err != nil {
					return opOutput{}, err
				}
				version, err := CheckValue(in.key, value)
				if err != nil {
					r.t.Errorf("WRONG BYTES: %v", err)
				}
				return opOutput{version: version}, nil
			})
		}
		sleep(time.Duration(random.Int64N(int64(2 * pace))))
	}
}
