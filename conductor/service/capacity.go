package service

import (
	"encoding/json"

	"larder/conductor/sched"
)

// Capacity is what the scheduler is to know of an engine.
type Capacity struct {
	Role       string  `json:"role,omitempty"`        // prefill, decode or both; both if it is not said
	KVCapacity int     `json:"kv_capacity,omitempty"` // tokens that decoding has room for; 0: no limit
	MaxBatch   int     `json:"max_batch,omitempty"`   // requests that are decoded at a time; 0: no limit
	Bandwidth  float64 `json:"bandwidth,omitempty"`   // bytes per second of its NIC; defaultBandwidth if it is not said
	Host       string  `json:"host,omitempty"`        // node of the pool near it, as placements name it
}

var capacityFields = []string{"role", "kv_capacity", "max_batch", "bandwidth", "host"}

// Bounds of what an engine may say of itself.
const (
	maxKVCapacity = 1 << 40
	maxBatch      = 1 << 20
	maxBandwidth  = 1e15

	defaultBandwidth = 25e9 // 200 Gbps, one NIC of most
)

// readCapacity reads these fields. What is not sent is as it was.
func readCapacity(req *request, was Capacity) (c Capacity, err error) {
	c = was
	for name, to := range map[string]*string{"role": &c.Role, "host": &c.Host} {
		if req.raw(name) != nil {
			if *to, err = req.text(name); err != nil {
				return c, err
			}
		}
	}
	if _, ok := roles[c.Role]; !ok {
		return c, bad("invalid_value", "role", "role %.40q: prefill, decode or both", c.Role)
	}
	if c.KVCapacity, err = req.number("kv_capacity", 0, maxKVCapacity, c.KVCapacity); err != nil {
		return c, err
	}
	if c.MaxBatch, err = req.number("max_batch", 0, maxBatch, c.MaxBatch); err != nil {
		return c, err
	}
	if raw := req.raw("bandwidth"); raw != nil {
		if json.Unmarshal(raw, &c.Bandwidth) != nil || !(c.Bandwidth >= 0 && c.Bandwidth <= maxBandwidth) {
			return c, bad("out_of_range", "bandwidth", "bandwidth is not a number of bytes per second up to %g", maxBandwidth)
		}
	}
	return c, nil
}

// roles by what they are called.
var roles = map[string]sched.Role{"": sched.Both, "both": sched.Both, "prefill": sched.Prefill, "decode": sched.Decode}
