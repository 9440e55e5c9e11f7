//go:build cgo

package main

// #include "larder.h"
import "C"

import (
	"cmp"
	"errors"
	"unsafe"

	"larder/client"
)

// layered is a value that is written or read layer by layer: one of the two.
type layered struct {
	w *client.LayerWriter
	r *client.LayerReader
}

func (c *call) putLayers(s *storage) error {
	if err := c.need(false, 1); err != nil || c.count != 1 {
		return cmp.Or(err, invalid("%d keys of layers: one", c.count))
	}
	w, err := s.PutLayers(c.ctx, c.keys[0], c.options.Sizes, client.WithAttrs(c.attrsOf(0)))
	if err != nil {
		return err
	}
	h, err := layers.add(&layered{w: w})
	if err != nil {
		w.Abort()
		return err
	}
	c.results[0] = C.int64_t(h)
	return nil
}

func (c *call) getLayers(s *storage) error {
	if err := c.need(false, 1); err != nil || c.count != 1 {
		return cmp.Or(err, invalid("%d keys of layers: one", c.count))
	}
	c.results[0] = -1
	r, err := s.GetLayers(c.ctx, c.keys[0], c.options.Sizes)
	if errors.Is(err, client.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	h, err := layers.add(&layered{r: r})
	if err != nil {
		return errors.Join(err, r.Close())
	}
	c.results[0] = C.int64_t(h)
	return nil
}

// larder_layer_launch begins to copy a layer to or from the caller's memory, which is used until a call of kindLayer, or one of
// kindEndLayers, has ended.
//
//export larder_layer_launch
func larder_layer_launch(handle C.uint64_t, i C.int64_t, address unsafe.Pointer, bytes C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		l, err := layers.of(uint64(handle))
		if err != nil {
			return err
		}
		mem := unsafe.Slice((*byte)(address), bytes)
		if l.w != nil {
			return l.w.Launch(int(i), mem)
		}
		return l.r.Launch(int(i), mem)
	})
}

func (c *call) waitLayer() error {
	l, err := layers.of(c.target)
	switch {
	case err != nil:
		return err
	case l.w != nil:
		return l.w.Wait(c.ctx, c.count)
	}
	return l.r.Wait(c.ctx, c.count)
}

func (c *call) endLayers() error {
	l, err := layers.take(c.target)
	switch {
	case err != nil:
		return err
	case l.r != nil:
		return l.r.Close()
	case c.count == 0:
		l.w.Abort()
		return nil
	}
	r, err := l.w.Finish(c.ctx)
	if len(c.results) > 0 {
		c.results[0] = truth(r.Stored)
	}
	return err
}
