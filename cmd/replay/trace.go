package replay

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
)

// maxLine bounds one line of a trace in bytes: a request of a million tokens in blocks of 16 fits.
const maxLine = 4 << 20

// Request is one line of a trace: a request to a serving engine, and the blocks that make up its input.
type Request struct {
	Timestamp float64  `json:"timestamp"`     // ms since the start
	Input     int      `json:"input_length"`  // tokens
	Output    int      `json:"output_length"` // tokens
	HashIDs   []uint64 `json:"hash_ids"`      // rolling ids of its prefix blocks, in order
}

// ReadTrace reads a trace in the published format: one JSON object a line with timestamp, input_length, output_length
// and hash_ids. Other fields are passed over, and so are empty lines.
func ReadTrace(r io.Reader) ([]Request, error) {
	var all []Request
	s := bufio.NewScanner(r)
	s.Buffer(make([]byte, 64<<10), maxLine)
	for line := 1; s.Scan(); line++ {
		if len(s.Bytes()) == 0 {
			continue
		}
		var q Request
		if err := json.Unmarshal(s.Bytes(), &q); err != nil {
			return nil, fmt.Errorf("trace: line %d: %w", line, err)
		}
		if math.IsNaN(q.Timestamp) || q.Timestamp < 0 {
			return nil, fmt.Errorf("trace: line %d: timestamp %v is not a time since the start", line, q.Timestamp)
		}
		all = append(all, q)
	}
	if err := s.Err(); err != nil {
		return nil, fmt.Errorf("trace: after %d requests: %w", len(all), err)
	}
	if len(all) == 0 {
		return nil, errors.New("trace: no requests in it: one JSON object a line is expected")
	}
	return all, nil
}

// WriteTrace writes a trace in the same format.
func WriteTrace(w io.Writer, trace []Request) error {
	b := bufio.NewWriter(w)
	enc := json.NewEncoder(b)
	for i := range trace {
		if err := enc.Encode(&trace[i]); err != nil {
			return fmt.Errorf("trace: %w", err)
		}
	}
	if err := b.Flush(); err != nil {
		return fmt.Errorf("trace: %w", err)
	}
	return nil
}

// Sample describes a generated trace: conversations of several turns, each of which sends all that was said before,
// and which begin with one of a few system prompts, some far more popular than others. Zero fields take the defaults.
type Sample struct {
	Seed          uint64  // the same seed gives the same trace
	Requests      int     // default 2000
	SystemPrompts int     // default 16
	Turns         float64 // mean turns of a conversation; default 4
	PerSecond     float64 // arrivals; default 4
	BlockTokens   int     // tokens of a block; default 512
}

// The shape of generated requests, close to the published conversation trace: a mean of some 23 blocks a request, of
// which about 40% are repeated.
const (
	sampleSystemBlocks = 4    // a system prompt has 1 to this many blocks
	sampleTailIndex    = 1.3  // Pareto index of the blocks that a turn adds: heavy-tailed
	sampleMaxTurn      = 200  // blocks of the longest turn
	sampleMeanTurn     = 3.0  // scale of that distribution
	samplePopularity   = 1.2  // Zipf exponent of system prompts
	sampleOpenTalks    = 200  // conversations that may be continued at a time
	sampleMeanOutput   = 340. // tokens
)

// Generate makes a trace.
func (s Sample) Generate() []Request {
	if s.Requests <= 0 {
		s.Requests = 2000
	}
	if s.SystemPrompts <= 0 {
		s.SystemPrompts = 16
	}
	if s.Turns <= 0 {
		s.Turns = 4
	}
	if s.PerSecond <= 0 {
		s.PerSecond = 4
	}
	if s.BlockTokens <= 0 {
		s.BlockTokens = 512
	}
	g := &generator{Sample: s, rng: rand.New(rand.NewPCG(s.Seed, 0x6c617264_6572))} //nolint:gosec // reproducible on purpose
	g.popular = rand.NewZipf(g.rng, samplePopularity, 1, uint64(s.SystemPrompts-1)) //nolint:gosec // positive
	for range s.SystemPrompts {
		g.system = append(g.system, g.fresh(nil, 1+g.rng.IntN(sampleSystemBlocks)))
	}
	trace := make([]Request, 0, s.Requests)
	for range s.Requests {
		trace = append(trace, g.request())
	}
	return trace
}

type generator struct {
	Sample
	rng     *rand.Rand
	popular *rand.Zipf
	system  [][]uint64
	talks   [][]uint64 // conversations that may go on
	next    uint64     // the next id
	now     float64    // ms
}

// fresh appends n new blocks.
func (g *generator) fresh(ids []uint64, n int) []uint64 {
	for range n {
		ids = append(ids, g.next)
		g.next++
	}
	return ids
}

func (g *generator) request() Request {
	g.now += g.rng.ExpFloat64() / g.PerSecond * 1000
	at := -1
	var ids []uint64
	if len(g.talks) > 0 && g.rng.Float64() < 1-1/g.Turns {
		at = g.rng.IntN(len(g.talks))
		ids = append(ids, g.talks[at]...)
	} else {
		ids = append(ids, g.system[g.popular.Uint64()]...)
	}
	turn := int(sampleMeanTurn * math.Pow(1-g.rng.Float64(), -1/sampleTailIndex))
	ids = g.fresh(ids, max(1, min(turn, sampleMaxTurn)))
	switch {
	case at >= 0 && g.rng.Float64() < 1/g.Turns: // the last turn
		g.talks[at] = g.talks[len(g.talks)-1]
		g.talks = g.talks[:len(g.talks)-1]
	case at >= 0:
		g.talks[at] = ids
	case len(g.talks) < sampleOpenTalks:
		g.talks = append(g.talks, ids)
	default:
		g.talks[g.rng.IntN(len(g.talks))] = ids
	}
	return Request{
		Timestamp: math.Round(g.now), Input: len(ids)*g.BlockTokens - g.rng.IntN(g.BlockTokens),
		Output: 1 + int(g.rng.ExpFloat64()*sampleMeanOutput), HashIDs: ids,
	}
}
