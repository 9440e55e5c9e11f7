//go:build cgo

package main

// #include "larder.h"
import "C"

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"unsafe"

	"larder/client"
	"larder/protocol"
)

// clientConfig is what larder_client_open takes, as JSON: client.Config. Times are in seconds.
type clientConfig struct {
	Masters      []string `json:"masters"`
	Instance     string   `json:"instance"`
	Tenant       string   `json:"tenant"`
	PageSize     uint64   `json:"page_size"`
	RegionSize   uint64   `json:"region_size"`
	TTL          float64  `json:"ttl"`
	Checksums    bool     `json:"checksums"`
	Replicas     int      `json:"replicas"`
	WriteThrough string   `json:"write_through"`
	Tier         string   `json:"tier"`
	Near         []string `json:"near"`
	Avoid        []string `json:"avoid"`
	Prefault     bool     `json:"prefault"`
	Timeout      float64  `json:"timeout"`
	CallTimeout  float64  `json:"call_timeout"`
	Connections  int      `json:"connections"`
	Token        string   `json:"token"`
	Events       bool     `json:"events"` // whether somebody takes them
}

// storage is a client of a pool, and what it tells.
type storage struct {
	*client.Client
	events *events
}

var (
	storages = table[*storage]{kind: "client"}
	views    = table[*client.Views]{kind: "view"}
	layers   = table[*layered]{kind: "value by layers"}
	allocs   = table[*client.Alloc]{kind: "allocation"}
)

// maxEvents bounds the events that nobody has taken: the oldest go first. Regions are large, so that a client has far fewer.
const maxEvents = 1024

// events are what a client has to tell.
type events struct {
	mu    sync.Mutex
	list  []revoked
	ready chan struct{} // has a token while list is not empty
	over  chan struct{} // closed when nothing comes any more
}

// revoked is an event: client.Revoked, as JSON.
type revoked struct {
	Region uint64 `json:"region"`
	Bytes  uint64 `json:"bytes"`
	Reason string `json:"reason"`
}

// add takes what Config.OnRevoke hears.
func (v *events) add(r client.Revoked) {
	e := revoked{r.Region, r.Bytes, "revoked"}
	if errors.Is(r.Reason, client.ErrSessionExpired) {
		e.Reason = "session expired"
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.list = append(v.list, e); len(v.list) > maxEvents {
		v.list = v.list[1:]
	}
	select {
	case v.ready <- struct{}{}:
	default:
	}
}

// next waits for events.
func (v *events) next(ctx context.Context) ([]revoked, error) {
	select {
	case <-v.ready:
	case <-v.over:
		return nil, client.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err() //nolint:wrapcheck // says all
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	list := v.list
	v.list = nil
	return list, nil
}

// openStorage opens a client as a caller configures it.
func openStorage(ctx context.Context, c *clientConfig) (*storage, error) {
	s := &storage{events: &events{ready: make(chan struct{}, 1), over: make(chan struct{})}}
	cfg := client.Config{
		Addrs: c.Masters, Instance: c.Instance, Tenant: c.Tenant, PageSize: c.PageSize, RegionSize: c.RegionSize, TTL: seconds(c.TTL),
		Checksums: c.Checksums, Replicas: c.Replicas, WriteThrough: c.WriteThrough, Tier: c.Tier, Near: c.Near, Avoid: c.Avoid,
		Prefault: c.Prefault, Timeout: seconds(c.Timeout), CallTimeout: seconds(c.CallTimeout), Conns: c.Connections,
		TransferToken: c.Token,
	}
	if c.Events {
		cfg.OnRevoke = s.events.add
	}
	var err error
	if s.Client, err = client.Open(ctx, cfg); err != nil {
		return nil, err
	}
	return s, nil
}

// larder_client_open begins to open a client, as a job.
//
//export larder_client_open
func larder_client_open(config *C.char, n C.int64_t, started *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		text, err := input(config, n)
		if err != nil {
			return err
		}
		var c clientConfig
		if err := json.Unmarshal(text, &c); err != nil {
			return invalid("the client's configuration: %v", err)
		}
		h, err := begin(0, closeStorage, func(ctx context.Context) (uint64, error) {
			s, err := openStorage(ctx, &c)
			if err != nil {
				return 0, err
			}
			h, err := storages.add(s)
			if err != nil {
				return 0, errors.Join(err, s.Close(ctx))
			}
			return h, nil
		})
		*started = C.uint64_t(h)
		return err
	})
}

// closeStorage closes a client that nobody has got to know.
func closeStorage(h uint64) {
	if s, err := storages.take(h); err == nil {
		_ = s.Close(context.Background()) // nobody is there to hear of it
	}
}

// larder_client_close begins to close a client, as a job, which takes no longer than timeout. Calls that are under way fail.
//
//export larder_client_close
func larder_client_close(handle C.uint64_t, timeout C.int64_t, started *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		s, err := storages.take(uint64(handle))
		if err != nil {
			return err
		}
		close(s.events.over) // once, since the handle was taken
		h, err := begin(duration(timeout), nil, func(ctx context.Context) (uint64, error) { return 0, s.Close(ctx) })
		*started = C.uint64_t(h)
		return err
	})
}

// larder_view_close ends views. It fails with codeLease if what was read there may be wrong.
//
//export larder_view_close
func larder_view_close(handle C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		v, err := views.take(uint64(handle))
		if err != nil {
			return err
		}
		return v.Close()
	})
}

// larder_view_check fails with codeLease if what was read in views may be wrong.
//
//export larder_view_check
func larder_view_check(handle C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		v, err := views.of(uint64(handle))
		if err != nil {
			return err
		}
		return v.Err()
	})
}

// larder_alloc_abort gives the memory of an allocation back that was not stored.
//
//export larder_alloc_abort
func larder_alloc_abort(handle C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		a, err := allocs.take(uint64(handle))
		if err != nil {
			return err
		}
		a.Abort()
		return nil
	})
}

// larder_prefix_hashes computes the rolling hashes of the whole blocks of tokens. There must be room for n/size of them.
//
//export larder_prefix_hashes
func larder_prefix_hashes(tokens *C.uint32_t, n, size C.int64_t, seed C.uint64_t, hashes *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		if n < 0 || size <= 0 {
			return invalid("%d tokens in blocks of %d: a block has at least one", int64(n), int64(size))
		}
		if n < size {
			return nil
		}
		list := unsafe.Slice((*uint32)(unsafe.Pointer(tokens)), n)
		to := unsafe.Slice((*uint64)(unsafe.Pointer(hashes)), n/size)
		client.AppendPrefixHashes(to[:0], list, int(size), client.PrefixContext{Seed: uint64(seed)})
		return nil
	})
}

// codeWire is what is added to a code of the wire (package protocol) to make one of the library.
const codeWire code = 100

// clientCode finds the code of an error of package client; codeFailed if it is none.
func clientCode(err error) code {
	var failed *client.Error
	switch {
	case errors.Is(err, client.ErrClosed):
		return codeClosed
	case errors.Is(err, client.ErrLease):
		return codeLease
	case errors.Is(err, context.Canceled) || !errors.As(err, &failed):
		return codeFailed
	case failed.Code == protocol.CodeOK:
		return codeFailed
	}
	return codeWire + code(failed.Code)
}
