package sim

import (
	"io"

	"larder/internal/workload"
)

// ReadTrace reads a trace in the published format from any source: a JSON object a line, with timestamp, input_length,
// output_length and hash_ids.
func ReadTrace(r io.Reader) (workload.Trace, error) {
	return workload.Read(r) //nolint:wrapcheck // says all
}

// Workload says what to generate.
type Workload struct {
	Name      string  // one of WorkloadNames
	Requests  int     // 0: as many as the papers
	Rate      float64 // arrivals a second; 0: the workload's own
	BlockSize int     // tokens
	Seed      uint64
}

// WorkloadNames are the workloads that can be generated.
func WorkloadNames() []string { return nil }

// Generate makes a workload's trace: the same for the same seed.
func Generate(w Workload) (workload.Trace, error) { return nil, nil }
