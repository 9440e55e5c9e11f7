package transfer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// directory keeps what is published in memory.
type directory struct {
	mu    sync.Mutex
	err   error // of each Publish
	count int
	names map[string]Descriptor
}

func (d *directory) Publish(_ context.Context, name string, of Descriptor) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.count++
	if d.err == nil {
		d.names[name] = of
	}
	return d.err
}

func (d *directory) Lookup(_ context.Context, name string) (Descriptor, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	of, ok := d.names[name]
	if !ok {
		return Descriptor{}, fmt.Errorf("%w: %q", ErrUnknown, name)
	}
	return of, nil
}

// forget loses all that is known, and has Publish fail with err from now on.
func (d *directory) forget(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.names, d.err = map[string]Descriptor{}, err
}

// published waits until a name is known with so many buffers.
func (d *directory) published(t *testing.T, name string, buffers int) {
	t.Helper()
	require.Eventually(t, func() bool {
		of, err := d.Lookup(t.Context(), name)
		return err == nil && len(of.Buffers) == buffers
	}, 20*time.Second, time.Millisecond)
}

// TestADirectory finds engines by name, knows of their buffers, and is told again what it has forgotten.
func TestADirectory(t *testing.T) {
	d := &directory{names: map[string]Descriptor{}}
	there := engine(t, Config{Name: "n1", Listen: []string{anyPort}, Directory: d, PublishEvery: 50 * time.Millisecond})
	here := engine(t, Config{Directory: d})
	d.published(t, "n1", 0)
	b := register(t, there, noise(t, 1000), BufferOptions{Name: "pool"})
	d.published(t, "n1", 1)
	seg, err := here.OpenName(t.Context(), "n1")
	require.NoError(t, err)
	info, ok := seg.Buffer("pool")
	require.True(t, ok)
	in := make([]byte, 1000)
	require.NoError(t, carry(t, here, Request{Op: Read, Segment: seg, Buffer: info.Handle, Local: in}))
	require.True(t, holds(b, 0, in))
	d.forget(nil)
	d.published(t, "n1", 1)
	d.forget(errors.New("no leader"))
	_, err = here.OpenName(t.Context(), "n1")
	require.ErrorIs(t, err, ErrUnknown)
	d.forget(nil)
	d.published(t, "n1", 1)
	require.NoError(t, b.Retire(t.Context()))
	d.published(t, "n1", 0)
	_, err = engine(t, Config{}).OpenName(t.Context(), "n1")
	require.ErrorContains(t, err, "no directory")
}

// TestManyChangesArePublishedTogether has many buffers registered at once.
func TestManyChangesArePublishedTogether(t *testing.T) {
	d := &directory{names: map[string]Descriptor{}}
	there := engine(t, Config{Name: "n1", Listen: []string{anyPort}, Directory: d, PublishEvery: time.Hour})
	for range 500 {
		register(t, there, make([]byte, 1), BufferOptions{})
	}
	d.published(t, "n1", 500)
	d.mu.Lock()
	defer d.mu.Unlock()
	require.Less(t, d.count, 250)
}
