package sched

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"time"
)

// Model predicts how long prefills, decode steps and transfers take. It starts from [Costs] and learns from what is
// measured; it is kept as JSON. Its methods must not be called concurrently.
type Model struct {
	costs                     Costs
	prefill, decode, transfer regression
	tail                      [2]float64 // a request's TBT by each measure over the mean step, a moving average
	outputs                   map[string]*lengths
}

// longest bounds every predicted time, so that the sum over all that is remembered fits 64 bits.
const longest = time.Hour

// mostTail bounds the ratio of the tail of the steps to their mean; more is a stall, not a load.
const mostTail = 10.0

// NewModel makes a model that has measured nothing yet.
func NewModel(c Costs) (*Model, error) {
	if err := c.validate(); err != nil {
		return nil, err
	}
	return &Model{
		costs: c, prefill: newRegression(), decode: newRegression(), transfer: newRegression(), tail: [2]float64{1, 1},
		outputs: map[string]*lengths{},
	}, nil
}

// seconds is a time of that many, bounded.
func seconds(s float64) time.Duration {
	if !(s < longest.Seconds()) {
		return longest
	}
	return time.Duration(max(0, s)*float64(time.Second) + 0.5)
}

// Prefill predicts the time to compute a prompt of n tokens of which the KV of the first p is there, on one node.
func (m *Model) Prefill(n, p int) time.Duration {
	return seconds(m.prefill.predict(m.prefillParts(n, p)))
}

// prefillParts are a constant, what is linear in the tokens that are computed, and what is quadratic: attention, for which
// each of them looks at all before it.
func (m *Model) prefillParts(n, p int) [3]float64 {
	x, y := float64(n), float64(min(n, p))
	return [3]float64{m.costs.Prefill, m.costs.PrefillToken * (x - y), m.costs.PrefillSquare * (x*x - y*y)}
}

// LearnPrefill takes note of how long a prefill took.
func (m *Model) LearnPrefill(n, p int, took time.Duration) {
	m.prefill.learn(m.prefillParts(n, p), took.Seconds())
}

// Step predicts the time of a decode step of so many sequences, which have so many tokens of KV together.
func (m *Model) Step(batch, kvTokens int) time.Duration {
	return seconds(m.step(float64(batch), float64(kvTokens)))
}

func (m *Model) step(batch, tokens float64) float64 {
	return m.decode.predict(m.stepParts(batch, tokens))
}

func (m *Model) stepParts(batch, tokens float64) [3]float64 {
	return [3]float64{m.costs.Step, m.costs.StepSequence * batch, m.costs.StepKVToken * tokens}
}

// LearnStep takes note of how long a decode step took.
func (m *Model) LearnStep(batch, kvTokens int, took time.Duration) {
	m.decode.learn(m.stepParts(float64(batch), float64(kvTokens)), took.Seconds())
}

// Transfer predicts the time of a transfer between NICs that have nothing else to do, the slower one of so many bytes a
// second. A bandwidth of 0 stands for one that is no bound.
func (m *Model) Transfer(bytes, bandwidth float64) time.Duration {
	return seconds(m.transfer.predict(m.transferParts(bytes, bandwidth)))
}

func (m *Model) transferParts(bytes, bandwidth float64) [3]float64 {
	if bytes <= 0 || bandwidth <= 0 {
		return [3]float64{}
	}
	return [3]float64{m.costs.Transfer, bytes / (bandwidth * m.costs.TransferShare), 0}
}

// LearnTransfer takes note of how long a transfer took.
func (m *Model) LearnTransfer(bytes, bandwidth float64, took time.Duration) {
	m.transfer.learn(m.transferParts(bytes, bandwidth), took.Seconds())
}

// tbt is a request's TBT by both measures when a step takes so many seconds.
func (m *Model) tbt(step float64) TBT {
	return TBT{seconds(step * m.tail[0]), seconds(step * m.tail[1])}
}

func (m *Model) tailOf(x Measure) float64 {
	if x == P90 {
		return m.tail[1]
	}
	return m.tail[0]
}

// learnTail takes note of the TBT that requests had while steps took so many seconds.
func (m *Model) learnTail(measured TBT, step float64) {
	if !(step > 0) {
		return
	}
	for i, x := range [2]time.Duration{measured.MeanLongest10, measured.P90} {
		if x > 0 {
			m.tail[i] += errorPace * (max(0.5, min(mostTail, x.Seconds()/step)) - m.tail[i])
		}
	}
}

// lengthsOf is the distribution of a class's answers; the caller bounds the classes.
func (m *Model) lengthsOf(class string) *lengths {
	l := m.outputs[class]
	if l == nil {
		l = &lengths{}
		m.outputs[class] = l
	}
	return l
}

// state is the form in which a model is kept.
type state struct {
	Version  int                 `json:"version"`
	Costs    Costs               `json:"costs"`
	Prefill  regression          `json:"prefill"`
	Decode   regression          `json:"decode"`
	Transfer regression          `json:"transfer"`
	Tail     [2]float64          `json:"tail"`
	Outputs  map[string]*lengths `json:"outputs"`
}

// modelVersion is of the form; another one is not read.
const modelVersion = 1

// ErrModel says that a model that was kept cannot be used: start with a new one.
var ErrModel = errors.New("sched: bad model")

// MarshalJSON writes the model.
func (m *Model) MarshalJSON() ([]byte, error) {
	data, err := json.Marshal(state{modelVersion, m.costs, m.prefill, m.decode, m.transfer, m.tail, m.outputs})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrModel, err)
	}
	return data, nil
}

// UnmarshalJSON reads a model that MarshalJSON wrote. On error the model is unchanged.
func (m *Model) UnmarshalJSON(data []byte) error {
	var x state
	if err := json.Unmarshal(data, &x); err != nil {
		return fmt.Errorf("%w: %w", ErrModel, err)
	}
	if x.Version != modelVersion {
		return fmt.Errorf("%w: its version is %d, not %d", ErrModel, x.Version, modelVersion)
	}
	if err := x.Costs.validate(); err != nil {
		return fmt.Errorf("%w: %w", ErrModel, err)
	}
	if !x.Prefill.sane() || !x.Decode.sane() || !x.Transfer.sane() {
		return fmt.Errorf("%w: its factors or covariances are out of bounds", ErrModel)
	}
	for _, t := range x.Tail {
		if !(t > 0) || math.IsInf(t, 1) || t > mostTail {
			return fmt.Errorf("%w: its tail of %v is out of bounds", ErrModel, t)
		}
	}
	if len(x.Outputs) > maxClasses {
		return fmt.Errorf("%w: it has lengths of %d classes, above %d", ErrModel, len(x.Outputs), maxClasses)
	}
	for class, l := range x.Outputs {
		if l == nil || !l.sane() {
			return fmt.Errorf("%w: the lengths of class %q are none", ErrModel, class)
		}
		l.average()
	}
	if x.Outputs == nil {
		x.Outputs = map[string]*lengths{}
	}
	*m = Model{x.Costs, x.Prefill, x.Decode, x.Transfer, x.Tail, x.Outputs}
	return nil
}
