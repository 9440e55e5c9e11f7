package sched

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// Costs are what a [Model] starts from before anything is measured, in seconds where nothing else is said.
type Costs struct {
	Prefill       float64 `json:"prefill"`         // of every prefill
	PrefillToken  float64 `json:"prefill_token"`   // of a token that is computed
	PrefillSquare float64 `json:"prefill_square"`  // times n*n - p*p, of the lengths of the prompt and of the prefix that is there
	Step          float64 `json:"step"`            // of every decode step: reading the weights
	StepSequence  float64 `json:"step_sequence"`   // of a sequence in it
	StepKVToken   float64 `json:"step_kv_token"`   // of a token of KV in it
	Transfer      float64 `json:"transfer"`        // of every transfer
	TransferShare float64 `json:"transfer_share"`  // of a NIC's bandwidth that transfers reach
	BytesPerToken int     `json:"bytes_per_token"` // of KV
}

// System is a model on a node, whose costs follow from FAST'25, table 1.
type System struct {
	Layers, Dim, GQA, ElementBytes int
	Quadratic, Linear              float64 // a and b of a layer's FLOPs for n tokens: a n^2 d + b n d^2
	Parameters                     float64
	FLOPS, HBMBandwidth            float64       // of all GPUs of the node
	MFU, HBMShare, NICShare        float64       // how much of the FLOPS, of that bandwidth and of the NIC's is reached
	Overhead                       time.Duration // of each prefill and step beside its kernels
}

// Costs works the costs out. A prefill of n tokens of which p are there takes layers (a (n^2-p^2) d + b (n-p) d^2) FLOPs; a
// decode step reads the weights once and the KV of every sequence, and computes a token of each.
func (y *System) Costs() Costs {
	layers, d, bytes := float64(y.Layers), float64(y.Dim), float64(y.ElementBytes)
	kv := layers * 2 * d / float64(y.GQA) * bytes
	flops, hbm := y.FLOPS*y.MFU, y.HBMBandwidth*y.HBMShare
	return Costs{
		Prefill:       y.Overhead.Seconds(),
		PrefillToken:  layers * y.Linear * d * d / flops,
		PrefillSquare: layers * y.Quadratic * d / flops,
		Step:          y.Overhead.Seconds() + y.Parameters*bytes/hbm,
		StepSequence:  layers * y.Linear * d * d / flops,
		StepKVToken:   kv / hbm,
		Transfer:      time.Millisecond.Seconds(),
		TransferShare: y.NICShare,
		BytesPerToken: int(kv),
	}
}

// llama3 is LLaMA3-70B on 8 GPUs. Half of the FLOPS and 60% of the memory's bandwidth are what serving engines are known to
// reach; 87% is what the papers' transfer engine reached of 4x200 Gbps: 87 GB/s.
func llama3(flops, hbm float64) System {
	return System{
		Layers: 80, Dim: 8192, GQA: 8, ElementBytes: 2, Quadratic: 4, Linear: 22, Parameters: 70.6e9,
		FLOPS: 8 * flops, HBMBandwidth: 8 * hbm, MFU: 0.5, HBMShare: 0.6, NICShare: 0.87, Overhead: 5 * time.Millisecond,
	}
}

var presets = []struct {
	name   string
	system System
}{
	{"llama3-70b-8xa800", llama3(312e12, 2.039e12)},
	{"llama3-70b-8xh800", llama3(989e12, 3.35e12)},
}

// DefaultPreset is the papers' main testbed.
const DefaultPreset = "llama3-70b-8xa800"

// ErrCosts says that costs cannot be.
var ErrCosts = errors.New("sched: bad costs")

// Preset is the costs of a known system.
func Preset(name string) (Costs, error) {
	names := make([]string, len(presets))
	for i := range presets {
		if names[i] = presets[i].name; names[i] == name {
			return presets[i].system.Costs(), nil
		}
	}
	return Costs{}, fmt.Errorf("%w: no preset %q: choose one of %s", ErrCosts, name, strings.Join(names, ", "))
}

func (c *Costs) validate() error {
	parts := []float64{
		c.Prefill, c.PrefillToken, c.PrefillSquare, c.Step, c.StepSequence, c.StepKVToken, c.Transfer, c.TransferShare,
		float64(c.BytesPerToken),
	}
	if slices.ContainsFunc(parts, func(x float64) bool { return !(x >= 0) || math.IsInf(x, 1) }) {
		return fmt.Errorf("%w: %+v: give 0 or more for each", ErrCosts, *c)
	}
	if c.PrefillToken == 0 || c.Step == 0 || c.TransferShare == 0 || c.TransferShare > 1 {
		return fmt.Errorf("%w: %+v: prefill_token, step and transfer_share are above 0, the last at most 1", ErrCosts, *c)
	}
	return nil
}
