package transfer

import (
	"encoding/json"
	"errors"
	"fmt"
)

// Bodies of frames on an RDMA control connection, as JSON. Of the header seq numbers a question, and gen is a link's id.

// connectAsk is the body of connect: who asks has made queue pairs and wants as many to connect them with.
type connectAsk struct {
	From string      `json:"from"` // the asker's NIC
	To   string      `json:"to"`   // the NIC that is asked for
	QPs  []QPAddress `json:"qps"`
}

// connectAnswer is the body of connected.
type connectAnswer struct {
	QPs []QPAddress `json:"qps"`
}

// grant is the body of granted: how a buffer is reached by NICs.
type grant struct {
	Address  uint64            `json:"address,string"` // in its process
	Bytes    uint64            `json:"bytes"`
	ReadOnly bool              `json:"read_only,omitempty"`
	Keys     map[string]uint32 `json:"keys"` // by the NIC's name there
}

// refusal is the body of fail.
type refusal struct {
	Error string `json:"error"`
}

const (
	bits24     = 1<<24 - 1
	maxRefusal = 1 << 10 // bytes of its text
)

func parseConnectAsk(b []byte) (*connectAsk, error) {
	a := &connectAsk{}
	if err := json.Unmarshal(b, a); err != nil {
		return nil, fmt.Errorf("transfer: read a connect: %w", err)
	}
	if !validNIC(a.From) || !validNIC(a.To) {
		return nil, fmt.Errorf("transfer: read a connect: a NIC's name is from 1 to %d bytes", maxName)
	}
	return a, checkQPs(a.QPs)
}

func parseConnectAnswer(b []byte) (*connectAnswer, error) {
	a := &connectAnswer{}
	if err := json.Unmarshal(b, a); err != nil {
		return nil, fmt.Errorf("transfer: read a connected: %w", err)
	}
	return a, checkQPs(a.QPs)
}

func checkQPs(list []QPAddress) error {
	if len(list) == 0 || len(list) > maxQPsPerEndpoint {
		return fmt.Errorf("transfer: %d queue pairs to connect: from 1 to %d", len(list), maxQPsPerEndpoint)
	}
	for i := range list {
		if q := &list[i]; q.QPN == 0 || q.QPN > bits24 || q.PSN > bits24 {
			return fmt.Errorf("transfer: %+v is not the address of a queue pair", *q)
		}
	}
	return nil
}

func parseGrant(b []byte) (*grant, error) {
	g := &grant{}
	if err := json.Unmarshal(b, g); err != nil {
		return nil, fmt.Errorf("transfer: read a grant: %w", err)
	}
	if len(g.Keys) > maxNICs || g.Address+g.Bytes < g.Address {
		return nil, errors.New("transfer: read a grant: it cannot be")
	}
	return g, nil
}

// refused is the error of a fail frame.
func refused(h *header, body []byte) error {
	err := failure(h.status)
	var r refusal
	if json.Unmarshal(body, &r) != nil || r.Error == "" {
		return err
	}
	return fmt.Errorf("%w: %.*s", err, maxRefusal, r.Error)
}
