package source

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"larder/client"
)

const (
	poolPrefix = "larder/conductor/" // of keys and names
	poolChunk  = 1 << 20             // bytes of an entry: no more than a client's regions have
	poolTTLMS  = 24 * 3600 * 1000    // how long an entry is evicted last; each save has others
	poolTries  = 5                   // to be the one who says what was saved last
)

// Pool is a Store in the pool: any conductor that reaches the masters begins with what one of them has saved last. The state lies
// in entries that are evicted last, and a name says which ones: so it is there as a whole or not at all, however many save.
type Pool struct {
	Client *client.Client
	Name   string // of the state, among those of the client's tenant

	// Chunk is the longest entry in bytes; 1 MiB. It is at most the client's RegionSize.
	Chunk int
}

// record says where a state lies.
type record struct {
	Version  string  `json:"version"`
	Chunks   int     `json:"chunks"`
	Previous *record `json:"previous,omitempty"` // somebody may be reading it
}

func (p *Pool) name() string { return poolPrefix + p.Name }

// keys are the entries of a state.
func (p *Pool) keys(r *record) (list [][]byte) {
	for i := range r.Chunks {
		list = append(list, fmt.Appendf(nil, "%s%s/%s/%d", poolPrefix, p.Name, r.Version, i))
	}
	return list
}

// Save implements Store. What is written goes to a temporary file first: that takes no longer than it must, whatever the network
// does.
func (p *Pool) Save(ctx context.Context, write func(io.Writer) error) error {
	f, err := os.CreateTemp("", "larder-conductor-*")
	if err != nil {
		return err //nolint:wrapcheck // it names the path
	}
	defer func() { _ = f.Close() }()
	if err := os.Remove(f.Name()); err != nil { // it is there while it is open
		return err //nolint:wrapcheck // it names the path
	}
	if err := write(f); err != nil {
		return err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err //nolint:wrapcheck // it names the path
	}
	r := &record{Version: rand.Text()}
	if err := p.upload(ctx, f, r); err != nil {
		p.drop(context.WithoutCancel(ctx), r)
		return err
	}
	return p.publish(ctx, r) // if that fails the name may have been set
}

// upload stores what f has as the entries of r.
func (p *Pool) upload(ctx context.Context, f io.Reader, r *record) error {
	buf := make([]byte, p.chunk())
	pin := client.PinSpec{Kind: string(client.PinSoft), TTLMS: poolTTLMS}
	for {
		n, err := io.ReadFull(f, buf)
		if n == 0 && errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
			return err //nolint:wrapcheck // it names the path
		}
		r.Chunks++
		key := p.keys(r)[r.Chunks-1]
		if _, err := p.Client.Put(ctx, key, buf[:n]); err != nil {
			return err //nolint:wrapcheck // it names the key
		}
		there, err := p.Client.Pin(ctx, pin, key)
		if err != nil {
			return err //nolint:wrapcheck // it names the call
		}
		if !there[0] {
			return fmt.Errorf("the pool has evicted %s at once: it is too small, or pinned", key)
		}
	}
}

func (p *Pool) chunk() int {
	if p.Chunk > 0 {
		return p.Chunk
	}
	return poolChunk
}

// publish has the name say that r was saved last, and drops what was saved before the last one.
func (p *Pool) publish(ctx context.Context, r *record) error {
	for range poolTries {
		old, revision, err := p.last(ctx)
		if err != nil && !errors.Is(err, ErrNoState) {
			return err
		}
		r.Previous = old
		var gone *record
		if old != nil {
			gone, old.Previous = old.Previous, nil
		}
		value, err := json.Marshal(r)
		if err != nil {
			return err //nolint:wrapcheck // it cannot be
		}
		_, err = p.Client.PutName(ctx, p.name(), value, client.IfRevision(revision))
		if errors.Is(err, client.ErrConflict) {
			continue
		}
		if err == nil && gone != nil {
			p.drop(ctx, gone)
		}
		return err //nolint:wrapcheck // it names the key
	}
	return fmt.Errorf("%w: %d times: many conductors save at once", client.ErrConflict, poolTries)
}

// drop deletes the entries of a state. Those that are left are evicted some day.
func (p *Pool) drop(ctx context.Context, r *record) {
	if r.Chunks > 0 {
		_, _ = p.Client.Delete(ctx, p.keys(r)...)
	}
}

// last is what was saved last, and the revision of the name that says so: 0 if there is none.
func (p *Pool) last(ctx context.Context) (*record, uint64, error) {
	n, err := p.Client.GetName(ctx, p.name())
	if errors.Is(err, client.ErrNotFound) {
		return nil, 0, ErrNoState
	}
	if err != nil {
		return nil, 0, err //nolint:wrapcheck // it names the key
	}
	r := &record{}
	if err := json.Unmarshal(n.Value, r); err != nil || r.Chunks < 0 || r.Chunks > maxChunks {
		return nil, n.Modified, fmt.Errorf("%w: the name %s has %.100q", ErrNoState, p.name(), n.Value)
	}
	return r, n.Modified, nil
}

// maxChunks bounds the entries of a state: a terabyte of them.
const maxChunks = 1 << 20

// Load implements Store. If entries of what was saved last have been evicted it gives what was saved before, if that is whole.
func (p *Pool) Load(ctx context.Context) (io.ReadCloser, error) {
	r, _, err := p.last(ctx)
	if err != nil {
		return nil, err
	}
	for ; r != nil; r = r.Previous {
		keys := p.keys(r)
		there, err := p.Client.ExistsBatch(ctx, keys)
		if err != nil {
			return nil, err //nolint:wrapcheck // it names the call
		}
		if !slices.Contains(there, false) {
			return &poolReader{ctx: ctx, c: p.Client, keys: keys}, nil
		}
	}
	return nil, fmt.Errorf("%w: the pool has evicted a part of it", ErrNoState)
}

// poolReader reads entries one after the other.
type poolReader struct {
	ctx  context.Context //nolint:containedctx // of the Load that made it
	c    *client.Client
	keys [][]byte
	buf  []byte
	left []byte // of buf
}

// Read implements io.Reader.
func (r *poolReader) Read(b []byte) (n int, err error) {
	for len(r.left) == 0 {
		if len(r.keys) == 0 {
			return 0, io.EOF
		}
		if r.buf, err = r.c.Get(r.ctx, r.keys[0], r.buf); err != nil {
			return 0, err //nolint:wrapcheck // it names the key
		}
		r.left, r.keys = r.buf, r.keys[1:]
	}
	n = copy(b, r.left)
	r.left = r.left[n:]
	return n, nil
}

// Close implements io.Closer.
func (*poolReader) Close() error { return nil }
