//go:build cgo

package main

// #include "larder.h"
import "C"

import (
	"cmp"
	"encoding/json"
	"errors"
	"sync"
	"time"
	"unsafe"

	"larder/client"
	"larder/protocol"
)

// Kinds of calls. Keys are packed as unpackKeys has it; there are count of them, if the kind says nothing else. Results are by key.
const (
	kindPut       = 1  // of a client: stores a region for each key. 1 is a new entry, 0 was held. options.attrs
	kindGet       = 2  // reads values, into regions that have their lengths already or are brought. The length, -1 for a miss
	kindGetInto   = 3  // reads values into regions that are as long at least
	kindExists    = 4  // 1 is held
	kindDelete    = 5  // 1 was removed
	kindPin       = 6  // 1 is held. options.pin
	kindUnpin     = 7  // 1 was pinned. options.pin
	kindMatch     = 8  // keys are 64-bit hashes. One result: how many match. options.context, options.members
	kindView      = 9  // address, length (-1: a miss), region, offset; then a handle, and how many there are. options.stop
	kindPutLayers = 10 // one key, options.sizes. One result: a handle
	kindGetLayers = 11 // the same; -1 for a miss
	kindLayer     = 12 // of layers: waits for the layer that count names
	kindEndLayers = 13 // of layers: finishes them if count is 1, else gives them up. One result, as of kindPut
	kindAlloc     = 14 // of a client: allocates options.sizes. Six results each: a handle, address, length; region, offset, its length
	kindStore     = 15 // of a client: stores options.handles, as kindPut; -1 failed
	kindControl   = 16 // of a client: what options.do says. One result: the handle of a text
	kindEvents    = 17 // of a client: waits for events. One result: the handle of a text
)

// maxStores bounds the allocations of a call that are registered at a time: they fill a log entry of the leader's.
const maxStores = 64

// callKind says how calls of a kind are carried out.
type callKind struct {
	do         func(c *call) error
	wants      bool // they may want memory
	repeatable bool // to begin them again does no harm
	change     bool // they end by themselves, and want no memory
}

// kinds are the calls.
var kinds = map[C.int32_t]callKind{
	kindPut:       {do: ofClient((*call).put), change: true},
	kindGet:       {do: ofClient((*call).get), wants: true, repeatable: true},
	kindGetInto:   {do: ofClient((*call).get), repeatable: true},
	kindExists:    {do: ofClient((*call).exists), repeatable: true},
	kindDelete:    {do: ofClient((*call).remove), change: true},
	kindPin:       {do: ofClient((*call).pin), change: true},
	kindUnpin:     {do: ofClient((*call).unpin), change: true},
	kindMatch:     {do: ofClient((*call).match), repeatable: true},
	kindView:      {do: ofClient((*call).view), repeatable: true},
	kindPutLayers: {do: ofClient((*call).putLayers)},
	kindGetLayers: {do: ofClient((*call).getLayers)},
	kindLayer:     {do: (*call).waitLayer, repeatable: true},
	kindEndLayers: {do: (*call).endLayers},
	kindAlloc:     {do: ofClient((*call).alloc)},
	kindStore:     {do: (*call).store, change: true},
	kindControl:   {do: ofClient((*call).control)},
	kindEvents:    {do: ofClient((*call).takeEvents)},
}

// ofClient is a call of a client.
func ofClient(do func(c *call, s *storage) error) func(c *call) error {
	return func(c *call) error {
		s, err := storages.of(c.target)
		if err != nil {
			return err
		}
		return do(c, s)
	}
}

// callOptions are what kinds take besides, as JSON. Times are in seconds.
type callOptions struct {
	Attrs   []*attrs       `json:"attrs"` // one for each key, or one for all
	Pin     pinOptions     `json:"pin"`
	Context *prefixContext `json:"context"`
	Members int            `json:"members"`
	Stop    bool           `json:"stop"`
	Sizes   []int          `json:"sizes"`
	Handles []uint64       `json:"handles"`
	Do      string         `json:"do"`
	Cursor  uint64         `json:"cursor"`
	Limit   int            `json:"limit"`
	Bench   *benchOptions  `json:"bench"`
}

type pinOptions struct {
	Kind  string  `json:"kind"`
	Owner string  `json:"owner"`
	TTL   float64 `json:"ttl"`
}

func (p *pinOptions) spec() client.PinSpec {
	return client.PinSpec{Kind: p.Kind, Owner: p.Owner, TTLMS: uint64(max(seconds(p.TTL), 0) / time.Millisecond)}
}

type prefixContext struct {
	Model     string `json:"model"`
	LoRA      string `json:"lora"`
	Salt      string `json:"salt"`
	BlockSize uint64 `json:"block_size"`
	Seed      uint64 `json:"seed"`
}

func (p *prefixContext) context() *client.PrefixContext {
	if p == nil {
		return nil
	}
	return &client.PrefixContext{Model: p.Model, LoRA: p.LoRA, Salt: p.Salt, BlockSize: p.BlockSize, Seed: p.Seed}
}

// attrs are client.Attrs.
type attrs struct {
	TTL      float64        `json:"ttl"`
	Replicas int            `json:"replicas"`
	Context  *prefixContext `json:"context"`
	Prefix   *struct {
		Hash   uint64 `json:"hash"`
		Parent uint64 `json:"parent"`
		Index  uint64 `json:"index"`
	} `json:"prefix"`
	Shard *[2]uint16 `json:"shard"` // member, members
}

// attrsOf are those of the i-th value.
func (c *call) attrsOf(i int) (a client.Attrs) {
	list := c.options.Attrs
	if len(list) == 1 {
		i = 0
	}
	if i >= len(list) || list[i] == nil {
		return a
	}
	of := list[i]
	a.TTL, a.Replicas, a.Context = seconds(of.TTL), of.Replicas, of.Context.context()
	if p := of.Prefix; p != nil {
		a.HasPrefix, a.Hash, a.Parent, a.Index = true, p.Hash, p.Parent, p.Index
	}
	if of.Shard != nil {
		a.Member, a.Members = of.Shard[0], of.Shard[1]
	}
	return a
}

// bytes is memory of the caller's.
func bytes(r C.larder_region) []byte { return unsafe.Slice((*byte)(r.address), r.bytes) }

// need refuses a call that does not have a region, or so many results, for each key.
func (c *call) need(regions bool, results int) error {
	if len(c.keys) != c.count || regions && len(c.regions) != c.count || len(c.results) < results {
		return invalid("a call of %d: %d keys, %d pieces of memory and room for %d results",
			c.count, len(c.keys), len(c.regions), len(c.results))
	}
	return nil
}

// truth is a result.
func truth(b bool) C.int64_t {
	if b {
		return 1
	}
	return 0
}

func (c *call) put(s *storage) error {
	if err := c.need(true, c.count); err != nil {
		return err
	}
	if c.count == 1 && len(c.options.Attrs) == 0 {
		r, err := s.Put(c.ctx, c.keys[0], bytes(c.regions[0]))
		c.results[0] = truth(r.Stored)
		return err
	}
	items := make([]client.Item, c.count)
	for i := range items {
		items[i] = client.Item{Key: c.keys[i], Value: bytes(c.regions[i]), Attrs: c.attrsOf(i)}
	}
	res, err := s.PutBatch(c.ctx, items)
	for i := range res {
		c.results[i] = truth(res[i].Stored)
	}
	return err
}

// get reads values into memory that the caller has, or brings when it knows how much is needed.
func (c *call) get(s *storage) error {
	if err := c.need(true, c.count); err != nil {
		return err
	}
	for i := range c.results[:c.count] {
		c.results[i] = -1
	}
	if c.count == 1 {
		value, err := s.GetWith(c.ctx, c.keys[0], func(size int) ([]byte, error) {
			var dst [1][]byte
			err := c.room(0, []int{size}, dst[:])
			return dst[0], err
		})
		if errors.Is(err, client.ErrNotFound) {
			return nil
		}
		if err == nil {
			c.results[0] = C.int64_t(len(value))
		}
		return err
	}
	dst, err := s.GetBatchWith(c.ctx, c.keys, c.room)
	for i := range c.results[:c.count] {
		c.results[i] = -1
		if err == nil && dst[i] != nil {
			c.results[i] = C.int64_t(len(dst[i]))
		}
	}
	return err
}

// room finds memory for values of these lengths, from the given one on.
func (c *call) room(from int, sizes []int, dst [][]byte) error {
	fits := true
	for i, n := range sizes {
		r := c.regions[from+i]
		if !c.kind.wants && n > int(r.bytes) {
			return invalid("the value of %.64q has %d bytes and its buffer %d: bring a longer one", c.keys[from+i], n, uint64(r.bytes))
		}
		fits = fits && (n == 0 || n == int(r.bytes))
	}
	if c.kind.wants && !fits {
		brought, err := c.ask(from, sizes)
		if err != nil {
			return err
		}
		copy(c.regions[from:], brought)
	}
	for i, n := range sizes {
		r := c.regions[from+i]
		if n > int(r.bytes) {
			return invalid("a value of %d bytes was brought %d", n, uint64(r.bytes))
		}
		if n > 0 {
			dst[i] = bytes(r)[:0]
		}
	}
	return nil
}

// answer gives the results of a call that answers for each key.
func (c *call) answer(answers []bool, err error) error {
	for i, yes := range answers {
		c.results[i] = truth(yes)
	}
	return err
}

func (c *call) exists(s *storage) error {
	if err := c.need(false, c.count); err != nil {
		return err
	}
	return c.answer(s.ExistsBatch(c.ctx, c.keys))
}

func (c *call) remove(s *storage) error {
	if err := c.need(false, c.count); err != nil {
		return err
	}
	return c.answer(s.Delete(c.ctx, c.keys...))
}

func (c *call) pin(s *storage) error {
	if err := c.need(false, c.count); err != nil {
		return err
	}
	return c.answer(s.Pin(c.ctx, c.options.Pin.spec(), c.keys...))
}

func (c *call) unpin(s *storage) error {
	if err := c.need(false, c.count); err != nil {
		return err
	}
	return c.answer(s.Unpin(c.ctx, c.options.Pin.spec(), c.keys...))
}

func (c *call) match(s *storage) error {
	if len(c.results) < 1 {
		return invalid("no room for a result")
	}
	var in client.PrefixContext
	if p := c.options.Context.context(); p != nil {
		in = *p
	}
	n, _, err := s.PrefixMatch(c.ctx, in, c.numbers, c.options.Members, false)
	c.results[0] = C.int64_t(n)
	return err
}

// view opens views. What is not mapped here is memory of Go's, which does not move, and which the table keeps.
func (c *call) view(s *storage) error {
	if err := c.need(false, 4*c.count+2); err != nil {
		return err
	}
	if c.count > protocol.MaxBatch {
		return invalid("%d keys to view, at most %d: split them", c.count, protocol.MaxBatch)
	}
	v, err := s.ViewBatch(c.ctx, c.keys, c.options.Stop)
	if err != nil {
		return err
	}
	for i := range c.count {
		to := c.results[4*i : 4*i+4]
		to[0], to[1], to[2], to[3] = 0, -1, 0, 0
		if i >= v.Len() {
			continue
		}
		if b := v.Bytes(i); b != nil {
			region, offset := v.Region(i)
			to[0], to[1] = C.int64_t(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), C.int64_t(len(b))
			to[2], to[3] = C.int64_t(region), C.int64_t(offset)
		}
	}
	h, err := views.add(v)
	if err != nil {
		return errors.Join(err, v.Close())
	}
	c.results[4*c.count], c.results[4*c.count+1] = C.int64_t(h), C.int64_t(v.Len())
	return nil
}

// alloc allocates memory for values of which all, or none, are allocated.
func (c *call) alloc(s *storage) error {
	sizes := c.options.Sizes
	if len(c.results) < 6*len(sizes) {
		return invalid("%d allocations, and room for %d results", len(sizes), len(c.results))
	}
	all, err := s.AllocBatch(c.ctx, sizes)
	if err != nil {
		return err
	}
	var made []uint64
	for i, a := range all {
		h, err := allocs.add(a)
		if err != nil {
			for _, h := range made {
				allocs.drop(h)
			}
			for _, a := range all {
				a.Abort()
			}
			return err
		}
		made = append(made, h)
		region, offset, length := a.Region()
		b, to := a.Bytes(), c.results[6*i:6*i+6]
		to[0], to[1], to[2] = C.int64_t(h), C.int64_t(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), C.int64_t(len(b))
		to[3], to[4], to[5] = C.int64_t(region), C.int64_t(offset), C.int64_t(length)
	}
	return nil
}

// store registers allocations, some at a time: the leader takes what comes together in one log entry. Those that fail are
// given up; the error is that of the first.
func (c *call) store() error {
	if err := c.need(false, c.count); err != nil || len(c.options.Handles) != c.count {
		return cmp.Or(err, invalid("%d keys for %d allocations", c.count, len(c.options.Handles)))
	}
	errs := make([]error, c.count)
	room := make(chan struct{}, maxStores)
	var open sync.WaitGroup
	for i, h := range c.options.Handles {
		room <- struct{}{}
		open.Go(func() {
			defer func() { <-room }()
			errs[i] = protect(func() error {
				c.results[i] = -1
				a, err := allocs.take(h)
				if err != nil {
					return err
				}
				r, err := a.StoreAs(c.ctx, c.keys[i], client.WithAttrs(c.attrsOf(i)))
				if err == nil {
					c.results[i] = truth(r.Stored)
				}
				return err
			})
		})
	}
	open.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// give makes JSON the result of a call, unless that has failed.
func (c *call) give(v any, err error) error {
	switch {
	case err != nil:
		return err
	case len(c.results) < 1:
		return invalid("no room for a result")
	}
	text, err := json.Marshal(v)
	if err != nil {
		return err //nolint:wrapcheck // says what it is
	}
	h, err := texts.add(text)
	c.results[0] = C.int64_t(h)
	return err
}

func (c *call) takeEvents(s *storage) error {
	return c.give(s.events.next(c.ctx))
}

// listing is a page of keys.
type listing struct {
	Keys   [][]byte `json:"keys"` // in base64
	Cursor uint64   `json:"cursor"`
}

// description is what there is to know of a client.
type description struct {
	Instance string `json:"instance"`
	Session  uint64 `json:"session"`
	Leader   string `json:"leader"`
	PageSize uint64 `json:"page_size"`
}

// control carries out what need not be fast.
func (c *call) control(s *storage) error {
	var prefix []byte
	if len(c.keys) > 0 {
		prefix = c.keys[0]
	}
	switch c.options.Do {
	case "stats":
		return c.give(s.Stats(), nil)
	case "describe":
		return c.give(description{s.Instance(), s.Session(), s.Leader(), s.PageSize()}, nil)
	case "server_stats":
		return c.give(s.ServerStats(c.ctx))
	case "usage":
		return c.give(s.Usage(c.ctx))
	case "list":
		found, cursor, err := s.ListKeys(c.ctx, prefix, c.options.Cursor, c.options.Limit)
		if err != nil {
			return err
		}
		page := listing{Cursor: cursor}
		for i := range found {
			page.Keys = append(page.Keys, found[i].Key)
		}
		return c.give(page, nil)
	case "clear":
		return c.give(struct{}{}, s.Clear(c.ctx, client.Scope{All: len(prefix) == 0, Prefix: prefix}))
	case "bench":
		return c.give(bench(c.ctx, s.Client, c.options.Bench))
	}
	return invalid("there is no %q to do", c.options.Do)
}
