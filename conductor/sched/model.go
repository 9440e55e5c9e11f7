package sched

// Costs are what a model starts from before anything is measured, in seconds.
type Costs struct {
	Prefill       float64 `json:"prefill"`         // of every prefill
	PrefillToken  float64 `json:"prefill_token"`   // of a token that is computed
	PrefillSquare float64 `json:"prefill_square"`  // times the difference of the squares of the prompt's and the prefix's lengths
	Step          float64 `json:"step"`            // of every decode step
	StepSequence  float64 `json:"step_sequence"`   // of a sequence in it
	StepKVToken   float64 `json:"step_kv_token"`   // of a token of KV in it
	Transfer      float64 `json:"transfer"`        // of every transfer
	TransferShare float64 `json:"transfer_share"`  // of a NIC's bandwidth that transfers reach
	BytesPerToken int     `json:"bytes_per_token"` // of KV
}

// NewModel makes a model.
func NewModel(c Costs) (*Model, error) { return &Model{}, nil }
