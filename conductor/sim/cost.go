package sim

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Model is what the cost of a model's tokens depends on: FAST'25, table 1.
type Model struct {
	Name         string  `json:"name"`
	Layers       int     `json:"layers"`
	Dim          int     `json:"dim"`           // d
	GQA          int     `json:"gqa"`           // query heads that share a KV head
	ElementBytes int     `json:"element_bytes"` // s
	Quadratic    float64 `json:"quadratic"`     // a of the FLOPs of a layer: a n^2 d + b n d^2
	Linear       float64 `json:"linear"`        // b
	Parameters   float64 `json:"parameters"`
}

// models are the presets. Both have 80 layers of dimension 8192 and share each KV head among 8 query heads: 320 KB a token.
// The constants a and b are FAST'25's for LLaMA3-70B; LLaMA2-70B differs in its vocabulary alone.
var models = []Model{
	{Name: "llama2-70b", Layers: 80, Dim: 8192, GQA: 8, ElementBytes: 2, Quadratic: 4, Linear: 22, Parameters: 69.0e9},
	{Name: "llama3-70b", Layers: 80, Dim: 8192, GQA: 8, ElementBytes: 2, Quadratic: 4, Linear: 22, Parameters: 70.6e9},
}

// Hardware is a node, and how much of it is reached: the calibration, which is one for all experiments.
type Hardware struct {
	Name         string  `json:"name"`
	FLOPS        float64 `json:"flops"`         // of all GPUs of the node
	HBMBytes     float64 `json:"hbm_bytes"`     // of all GPUs
	HBMBandwidth float64 `json:"hbm_bandwidth"` // bytes a second of all GPUs
	HostToDevice float64 `json:"host_to_device"`
	NIC          float64 `json:"nic"` // bytes a second, each way
	SSD          float64 `json:"ssd"` // bytes a second read

	MFU          float64       `json:"mfu"`           // share of FLOPS that prefill reaches
	WeightReads  float64       `json:"weight_reads"`  // share of HBMBandwidth that reading weights reaches
	KVReads      float64       `json:"kv_reads"`      // share of HBMBandwidth that reading KV caches in a decode step reaches
	LinkShare    float64       `json:"link_share"`    // share of HostToDevice, NIC and SSD that transfers reach
	StepOverhead time.Duration `json:"step_overhead"` // of each step of an engine beside its kernels
	KVMemory     float64       `json:"kv_memory"`     // share of HBM beyond the weights that holds KV caches
}

var hardwares = []Hardware{
	calibrated(Hardware{
		Name: "a800", FLOPS: 8 * 312e12, HBMBytes: 8 * 80e9, HBMBandwidth: 8 * 2.039e12, HostToDevice: 128e9, NIC: 100e9, SSD: 24e9,
	}),
	calibrated(Hardware{
		Name: "h800", FLOPS: 8 * 989e12, HBMBytes: 8 * 80e9, HBMBandwidth: 8 * 3.35e12, HostToDevice: 256e9, NIC: 200e9, SSD: 48e9,
	}),
}

// calibrated sets how much of a node is reached. It is the only calibration, the same for all experiments and both nodes:
//
//   - MFU 0.42, of prefill. What the papers tell of it is how the four prefill policies compare under load: on 16 prefill
//     nodes the mean TTFT of random is 6.4 times that of the best in FAST'25. That ratio grows with utilisation: it is 6.7 here
//     at an MFU of 0.35, 5.2 at 0.42 and 4.2 at 0.50. In the overload experiment, at twice the trace's speed, it is decode that
//     the papers find short and not prefill, for which 8 nodes need an MFU above 0.40.
//   - KVReads 0.06, of decode steps. Kernels of the time read a KV head once for each of the 8 query heads that share it, at
//     about half of the bandwidth. The papers' best ratio of prefill to decode nodes, near 1:1 on the synthetic workload with a
//     TBT limit of 100 ms, says the same: a decode node is full there with some 100,000 tokens.
//   - WeightReads 0.6, what matrices of few rows reach of the bandwidth on eight GPUs with an all-reduce after each.
//   - LinkShare 0.87, of 4x200 Gbps: the papers' transfer engine moves 87 GB/s.
//   - StepOverhead 5 ms: launching kernels, sampling, scheduling.
//   - KVMemory 0.9 of what the weights leave: vLLM's gpu_memory_utilization.
func calibrated(h Hardware) Hardware {
	h.MFU, h.WeightReads, h.KVReads, h.LinkShare = 0.42, 0.6, 0.06, 0.87
	h.StepOverhead, h.KVMemory = 5*time.Millisecond, 0.9
	return h
}

// FindModel is the preset of a name.
func FindModel(name string) (Model, error) {
	i := slices.IndexFunc(models, func(m Model) bool { return m.Name == name })
	if i < 0 {
		return Model{}, fmt.Errorf("%w: model %q: choose one of %s", ErrScenario, name, strings.Join(ModelNames(), ", "))
	}
	return models[i], nil
}

// FindHardware is the preset of a name.
func FindHardware(name string) (Hardware, error) {
	i := slices.IndexFunc(hardwares, func(h Hardware) bool { return h.Name == name })
	if i < 0 {
		return Hardware{}, fmt.Errorf("%w: hardware %q: choose one of %s", ErrScenario, name, strings.Join(HardwareNames(), ", "))
	}
	return hardwares[i], nil
}

// ModelNames are the presets of models.
func ModelNames() []string {
	names := make([]string, len(models))
	for i := range models {
		names[i] = models[i].Name
	}
	return names
}

// HardwareNames are the presets of nodes.
func HardwareNames() []string {
	names := make([]string, len(hardwares))
	for i := range hardwares {
		names[i] = hardwares[i].Name
	}
	return names
}

func (m *Model) validate() error {
	if min(m.Layers, m.Dim, m.GQA, m.ElementBytes) < 1 || !positive(m.Quadratic) || !positive(m.Linear) || !positive(m.Parameters) {
		return fmt.Errorf("%w: model %+v: all its figures are above 0", ErrScenario, *m)
	}
	return nil
}

func (h *Hardware) validate() error {
	for _, x := range []float64{h.FLOPS, h.HBMBytes, h.HBMBandwidth, h.HostToDevice, h.NIC, h.SSD} {
		if !positive(x) {
			return fmt.Errorf("%w: hardware %+v: all its figures are above 0", ErrScenario, *h)
		}
	}
	for _, x := range []float64{h.MFU, h.WeightReads, h.KVReads, h.LinkShare, h.KVMemory} {
		if !positive(x) || x > 1 {
			return fmt.Errorf("%w: hardware %+v: MFU and the other shares are above 0 and at most 1", ErrScenario, *h)
		}
	}
	if h.StepOverhead < 0 {
		return fmt.Errorf("%w: hardware %+v: step_overhead is not negative", ErrScenario, *h)
	}
	return nil
}

// Cost is what a model costs on a node.
type Cost struct {
	linear, quadratic float64 // seconds of prefill a token, and a token squared
	weights           float64 // seconds to read all
	kv                float64 // seconds to read a token's in a decode step
	load              float64 // seconds to move a token's KV between host and device
	bytes             float64 // KV of a token
	overhead          float64 // seconds of a step
	capacity          int     // tokens of KV memory
}

// NewCost works out the costs.
func NewCost(m *Model, h *Hardware) Cost {
	layers, d, s := float64(m.Layers), float64(m.Dim), float64(m.ElementBytes)
	c := Cost{
		linear:    layers * m.Linear * d * d / (h.FLOPS * h.MFU),
		quadratic: layers * m.Quadratic * d / (h.FLOPS * h.MFU),
		weights:   m.Parameters * s / (h.HBMBandwidth * h.WeightReads),
		bytes:     layers * 2 * d / float64(m.GQA) * s,
		overhead:  h.StepOverhead.Seconds(),
	}
	c.kv = c.bytes / (h.HBMBandwidth * h.KVReads)
	c.load = c.bytes / (h.HostToDevice * h.LinkShare)
	c.capacity = max(0, int((h.HBMBytes-m.Parameters*s)*h.KVMemory/c.bytes))
	return c
}

// Prefill is the time to compute a prompt of n tokens of which a prefix of p is there.
func (c *Cost) Prefill(n, p int) time.Duration { return seconds(c.prefill(n, p)) }

// prefill reads the weights at least: few tokens are no faster than that.
func (c *Cost) prefill(n, p int) float64 { return c.overhead + max(c.weights, c.compute(n, p)) }

func (c *Cost) compute(n, p int) float64 {
	x, y := float64(n), float64(p)
	return c.linear*(x-y) + c.quadratic*(x*x-y*y)
}

// Step is the time of a decode step of a batch of sequences with so many tokens of KV together: the weights are read once,
// however many there are, unless their computation takes longer, and the KV of each.
func (c *Cost) Step(batch, tokens int) time.Duration { return seconds(c.step(batch, tokens)) }

func (c *Cost) step(batch, tokens int) float64 {
	return c.overhead + max(c.weights, c.linear*float64(batch)) + c.kv*float64(tokens)
}

// BytesPerToken is the KV of a token.
func (c *Cost) BytesPerToken() int { return int(c.bytes) }

// Capacity is the tokens whose KV the GPUs of a node hold.
func (c *Cost) Capacity() int { return c.capacity }

// maxSeconds bounds every time, so that sums of some fit 64 bits of nanoseconds: a year.
const maxSeconds = 365 * 24 * 3600

func seconds(s float64) time.Duration {
	return time.Duration(min(s, maxSeconds)*float64(time.Second) + 0.5)
}
