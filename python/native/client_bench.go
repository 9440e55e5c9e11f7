//go:build cgo

package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"larder/client"
)

// benchOptions says what to measure: the Go client as it is, for comparison with what its callers get.
type benchOptions struct {
	What   string  `json:"what"`   // put, get or exists
	Size   int     `json:"size"`   // of a value, in bytes
	Keys   int     `json:"keys"`   // how many, of which each is used in turn; of exists, as many as one call asks for
	Prefix string  `json:"prefix"` // of the keys
	Time   float64 `json:"time"`   // in seconds
}

// benchResult is how long calls took.
type benchResult struct {
	Calls   int     `json:"calls"`
	Seconds float64 `json:"seconds"`
	P50     float64 `json:"p50"` // in seconds
	P99     float64 `json:"p99"`
}

// maxBench bounds the keys and the length of what is measured.
const maxBench = 1 << 30

// bench measures a client.
func bench(ctx context.Context, c *client.Client, o *benchOptions) (*benchResult, error) {
	if o == nil || o.Size < 0 || o.Size > maxBench || o.Keys <= 0 || o.Keys > maxCallItems {
		return nil, invalid("what to measure: a size of at most %d, and 1 to %d keys", maxBench, maxCallItems)
	}
	keys := make([][]byte, o.Keys)
	for i := range keys {
		keys[i] = fmt.Appendf(nil, "%s%d", o.Prefix, i)
	}
	value := make([]byte, o.Size)
	var once func(i int) error
	switch o.What {
	case "put":
		once = func(i int) error {
			_, err := c.Put(ctx, keys[i%len(keys)], value)
			return err
		}
	case "get":
		once = func(i int) (err error) {
			value, err = c.Get(ctx, keys[i%len(keys)], value)
			return err
		}
	case "exists":
		once = func(int) error {
			_, err := c.ExistsBatch(ctx, keys)
			return err
		}
	default:
		return nil, invalid("there is no %q to measure: put, get or exists", o.What)
	}
	return measure(once, o.What == "put", len(keys), seconds(o.Time))
}

// measure calls once for some time, or, if each key is good for one call, as often as there are keys.
func measure(once func(i int) error, single bool, keys int, limit time.Duration) (*benchResult, error) {
	var took []time.Duration
	begin := stopwatch()
	for i := 0; begin() < limit && (!single || i < keys); i++ {
		one := stopwatch()
		if err := once(i); err != nil {
			return nil, err
		}
		took = append(took, one())
	}
	r := &benchResult{Calls: len(took), Seconds: begin().Seconds()}
	if slices.Sort(took); len(took) > 0 {
		r.P50, r.P99 = took[len(took)/2].Seconds(), took[len(took)*99/100].Seconds()
	}
	return r, nil
}
