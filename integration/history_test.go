package integration

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

// recorder writes down a history.
type recorder struct {
	t     *testing.T
	begun time.Time
	mu    sync.Mutex
	ops   []porcupine.Operation
}

// do carries out one operation. What fails has an unknown outcome, and no end.
func (r *recorder) do(parent context.Context, id int, in opInput, f func(ctx context.Context) (opOutput, error)) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(parent), 700*time.Millisecond) // some end in an election
	defer cancel()
	call := time.Since(r.begun)
	out, err := f(ctx)
	ret := time.Since(r.begun).Nanoseconds()
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

// TestHistoriesAreLinearizable has clients fight over a few keys while leaders are killed and paused, and asks whether
// there is an order of what they did that explains what they saw.
func TestHistoriesAreLinearizable(t *testing.T) {
	skipShort(t)
	const clients, keys = 6, 24
	c := startCluster(t, clusterOptions{members: 3})
	r := &recorder{t: t, begun: time.Now()}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for id := range clients {
		x := c.open(client.Config{})
		wg.Go(func() { r.work(ctx, id, x, keys) })
	}
	for i := range 4 {
		time.Sleep(time.Second)
		leader := c.leader()
		if i%2 == 0 {
			leader.kill()
			c.leader()
			leader.restart()
		} else {
			pause(leader, 1500*time.Millisecond)
		}
	}
	time.Sleep(time.Second)
	cancel()
	wg.Wait()
	unknown := 0
	for _, op := range r.ops {
		if op.Output.(opOutput).unknown {
			unknown++
		}
	}
	begun := time.Now()
	result, info := porcupine.CheckOperationsVerbose(keyModel, r.ops, time.Minute)
	t.Logf("%d operations, %d with an unknown outcome: %s in %v", len(r.ops), unknown, result, time.Since(begun))
	if result != porcupine.Ok {
		path := t.ArtifactDir() + "/history.html"
		require.NoError(t, porcupine.VisualizePath(keyModel, info, path))
		t.Errorf("the history is %s: see %s", result, path)
	}
	require.Greater(t, len(r.ops), 1000)
	require.Equal(t, []uint64{0, 0, 0}, c.settled().Stats.Evictions[1:4], "this pool has room for everything")
}

// work does what a client does in a history.
func (r *recorder) work(ctx context.Context, id int, x *client.Client, keys int) {
	random := rand.New(rand.NewPCG(rand.Uint64(), 3))
	for n := uint64(1); ctx.Err() == nil; n++ {
		in := opInput{kind: opKind(random.IntN(3)), key: fmt.Sprintf("shared/%d", random.IntN(keys))}
		switch in.kind {
		case opPut:
			in.version = uint64(id+1)<<32 | n
			value := makeValue(nil, in.key, in.version, 2000)
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
				version, err := checkValue(in.key, value)
				if err != nil {
					r.t.Errorf("WRONG BYTES: %v", err)
				}
				return opOutput{version: version}, nil
			})
		}
		time.Sleep(time.Duration(random.Int64N(int64(2 * pace))))
	}
}
