package client

import (
	"bytes"
	"compress/flate"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"

	"larder/protocol"
	"larder/transfer"
)

const (
	// segmentPrefix begins the names under which segments are published.
	segmentPrefix = "segment/"
	// maxDescriptor bounds a descriptor that is unpacked.
	maxDescriptor = 16 << 20
)

// Directory is a [transfer.Directory] that a pool's masters keep: engines publish their segments under leased names, and find
// others', without a directory service beside the pool. It is made before the engine that uses it, and before the client
// that may be given that engine in its turn, and works from Bind on:
//
//	d := client.NewDirectory()
//	e, err := transfer.New(transfer.Config{Name: "prefill-3", Listen: ..., Directory: d})
//	c, err := client.Open(ctx, client.Config{Addrs: ..., Transfer: e})
//	d.Bind(c)
//
// What is published is as good as a key for all clients of the tenant that have the engines' token: they may write to its
// buffers. It goes with the client, and with nothing before. Methods may be called concurrently.
type Directory struct {
	bound chan struct{} // closed when there is a client

	mu   sync.Mutex
	c    *Client
	kept map[string]*KeptName // by the segment's name
	last map[string][]byte    // what they were set to
}

var _ transfer.Directory = (*Directory)(nil)

// NewDirectory returns a Directory for which there is no client yet: its methods wait for that.
func NewDirectory() *Directory {
	return &Directory{bound: make(chan struct{}), kept: make(map[string]*KeptName), last: make(map[string][]byte)}
}

// Bind has the directory use a client, once.
func (d *Directory) Bind(c *Client) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.c == nil {
		d.c = c
		close(d.bound)
	}
}

func (d *Directory) client(ctx context.Context) (*Client, error) {
	select {
	case <-d.bound:
		return d.c, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("the directory has no client yet: %w", ctx.Err())
	}
}

// Publish implements [transfer.Directory]. What was published before stays as long as the client does.
func (d *Directory) Publish(ctx context.Context, name string, s transfer.Descriptor) error {
	value, err := packDescriptor(s)
	if err != nil {
		return err
	}
	c, err := d.client(ctx)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	k := d.kept[name]
	switch {
	case k == nil:
		if k, err = c.KeepName(ctx, segmentPrefix+name, value); err != nil {
			return err
		}
		d.kept[name] = k
	case bytes.Equal(d.last[name], value):
		return nil
	default:
		delete(d.last, name)
		if err := k.Set(ctx, value); err != nil {
			return err
		}
	}
	d.last[name] = value
	return nil
}

// Lookup implements [transfer.Directory].
func (d *Directory) Lookup(ctx context.Context, name string) (transfer.Descriptor, error) {
	c, err := d.client(ctx)
	if err != nil {
		return transfer.Descriptor{}, err
	}
	n, err := c.GetName(ctx, segmentPrefix+name)
	if errors.Is(err, ErrNotFound) {
		err = fmt.Errorf("%w: %w", transfer.ErrUnknown, err)
	}
	if err != nil {
		return transfer.Descriptor{}, err
	}
	return unpackDescriptor(n.Value)
}

// packDescriptor writes a descriptor as JSON, compressed if it does not fit a name otherwise.
func packDescriptor(s transfer.Descriptor) ([]byte, error) {
	text, err := json.Marshal(s)
	if err != nil || len(text) <= protocol.MaxNameValueBytes {
		return text, err //nolint:wrapcheck // cannot be
	}
	var b bytes.Buffer
	w, err := flate.NewWriter(&b, flate.BestCompression)
	if err == nil {
		_, err = w.Write(text)
		err = errors.Join(err, w.Close())
	}
	if err == nil && b.Len() > protocol.MaxNameValueBytes {
		err = fmt.Errorf("client: publish the segment %q: its %d buffers take %d bytes, of at most %d: register fewer", s.Name,
			len(s.Buffers), b.Len(), protocol.MaxNameValueBytes)
	}
	return b.Bytes(), err
}

// unpackDescriptor reads what packDescriptor wrote, whoever it comes from.
func unpackDescriptor(value []byte) (s transfer.Descriptor, err error) {
	if len(value) > 0 && value[0] != '{' {
		r := flate.NewReader(bytes.NewReader(value))
		if value, err = io.ReadAll(io.LimitReader(r, maxDescriptor)); err != nil {
			return s, fmt.Errorf("client: the segment's descriptor: %w", err)
		}
	}
	if err = json.Unmarshal(value, &s); err != nil {
		err = fmt.Errorf("client: the segment's descriptor: %w", err)
	}
	return s, err
}
