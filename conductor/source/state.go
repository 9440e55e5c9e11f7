package source

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"slices"
	"time"

	"larder/conductor"
)

// Store keeps what a manager knows, from one process to the next.
type Store interface {
	// Save keeps what write writes in place of what it has: all of it or, with an error, nothing. It calls write once, which
	// is to take no longer than it must: no event is applied meanwhile.
	Save(ctx context.Context, write func(io.Writer) error) error
	// Load gives what was saved last. The error is ErrNoState if nothing was.
	Load(ctx context.Context) (io.ReadCloser, error)
}

var (
	// ErrNoState says that there is nothing to begin with.
	ErrNoState = errors.New("source: nothing has been saved")
	// ErrState says that what was saved is damaged, or that it does not fit the configuration.
	ErrState = errors.New("source: what was saved cannot be used")
	// ErrLate says that services have been registered already.
	ErrLate = errors.New("source: what was saved is to be loaded before services are registered")
)

// A state is a mark, the length u32 of the services as JSON, these, their CRC-32C u32, and the index as it is exported. Numbers
// are little-endian.
const (
	stateMark = "larder conductor 1\n"
	stateMost = 256 << 20 // bytes of the services: as many as there may be, each with as many places
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// savedSource is what is kept of a source.
type savedSource struct {
	Service

	Epoch   uint64            `json:"epoch"`
	Partial bool              `json:"partial,omitempty"`
	Known   bool              `json:"known"`
	Next    uint64            `json:"next"`
	Sum     uint64            `json:"sum"`
	Held    []held            `json:"held,omitempty"`
	Also    []conductor.Scope `json:"also,omitempty"`
}

// Save keeps the services, up to where each is known, and the index, as of one moment.
func (m *Manager) Save(ctx context.Context, st Store) error {
	err := st.Save(ctx, func(w io.Writer) (err error) {
		b := bufio.NewWriterSize(w, 1<<20)
		m.changes.Lock()
		defer m.changes.Unlock()
		m.Frozen(func() { err = m.write(b) })
		return errors.Join(err, b.Flush())
	})
	if err != nil {
		return fmt.Errorf("source: save: %w", err)
	}
	return nil
}

// write writes the state. changes is held, and the manager is frozen.
func (m *Manager) write(w io.Writer) error {
	list := make([]savedSource, 0, len(m.sources))
	for _, s := range m.sources {
		list = append(list, s.saved())
	}
	slices.SortFunc(list, func(a, b savedSource) int { return a.key().compare(b.key()) })
	b, err := json.Marshal(list)
	if err != nil {
		return err //nolint:wrapcheck // Save wraps
	}
	if len(b) > stateMost {
		return fmt.Errorf("the services take %d bytes, at most %d", len(b), stateMost)
	}
	head := binary.LittleEndian.AppendUint32([]byte(stateMark), uint32(len(b))) //nolint:gosec // checked
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	for _, part := range [][]byte{head, b} {
		if _, err := w.Write(part); err != nil {
			return err //nolint:wrapcheck // Save wraps
		}
	}
	return m.cfg.Index.Export(w)
}

// saved is what is kept of a source. The manager is frozen.
func (s *source) saved() savedSource {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := savedSource{
		Service: s.Service, Epoch: s.epoch, Partial: s.partial, Known: s.pos.known, Next: s.pos.next, Sum: s.pos.sum, Also: s.own.Also,
	}
	for at := range s.held {
		x.Held = append(x.Held, at)
	}
	slices.SortFunc(x.Held, held.compare)
	return x
}

func (h held) compare(o held) int {
	return cmp.Or(cmp.Compare(h.Tenant, o.Tenant), cmp.Compare(h.Instance, o.Instance), cmp.Compare(h.Rank, o.Rank),
		cmp.Compare(h.Medium, o.Medium))
}

// Load takes over what was saved, and goes on from there: each engine is asked for what it has done since, and what is known of
// one that cannot tell, or is not reached in time, is dropped. It is for a manager without services; those that are registered
// then and were saved otherwise are in conflict with what was saved. The error is ErrNoState,
// ErrState, conductor.ErrImport, ErrLate, or the store's; with any, nothing has changed.
func (m *Manager) Load(ctx context.Context, st Store) error {
	r, err := st.Load(ctx)
	if err != nil {
		return fmt.Errorf("source: load: %w", err)
	}
	defer func() { _ = r.Close() }() // it was read
	m.changes.Lock()
	defer m.changes.Unlock()
	if len(m.sources) > 0 {
		return ErrLate
	}
	b := bufio.NewReaderSize(r, 1<<20)
	list, err := m.read(b)
	if err == nil {
		err = m.cfg.Index.Import(b)
	}
	if err != nil {
		return fmt.Errorf("source: load: %w", err)
	}
	for i := range list {
		m.start(m.restored(&list[i])) //nolint:contextcheck // it is followed beyond this call
	}
	return nil
}

// read reads the services of a state.
func (m *Manager) read(r io.Reader) (list []savedSource, err error) {
	head := make([]byte, len(stateMark)+4)
	switch _, err := io.ReadFull(r, head); {
	case err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF):
		return nil, err //nolint:wrapcheck // Load wraps
	case err != nil || string(head[:len(stateMark)]) != stateMark:
		return nil, fmt.Errorf("%w: it does not begin with %q", ErrState, stateMark)
	}
	n := binary.LittleEndian.Uint32(head[len(stateMark):])
	if n > stateMost {
		return nil, fmt.Errorf("%w: services of %d bytes", ErrState, n)
	}
	b, err := io.ReadAll(io.LimitReader(r, int64(n)+4)) // as they come: there need not be so many
	if err != nil {
		return nil, err //nolint:wrapcheck // Load wraps
	}
	if len(b) != int(n)+4 || binary.LittleEndian.Uint32(b[n:]) != crc32.Checksum(b[:n], castagnoli) {
		return nil, fmt.Errorf("%w: the services are damaged", ErrState)
	}
	if err := json.Unmarshal(b[:n], &list); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrState, err)
	}
	seen := map[key]bool{}
	for i := range list {
		x := &list[i]
		if err := x.Validate(); err != nil {
			return nil, fmt.Errorf("%w: %s: %w", ErrState, x.key(), err)
		}
		if seen[x.key()] || len(list) > m.cfg.MaxServices || len(x.Held) > maxPlaces || len(x.Also) > maxAlso {
			return nil, fmt.Errorf("%w: %s is there twice, or has too much", ErrState, x.key())
		}
		seen[x.key()] = true
	}
	return list, nil
}

// restored is a source as it was.
func (m *Manager) restored(x *savedSource) *source {
	s := newSource(m, x.Service)
	s.epoch, s.partial = x.Epoch, x.Partial
	s.pos = position{known: x.Known, next: x.Next, sum: x.Sum}
	for _, at := range x.Held {
		s.held[at] = struct{}{}
	}
	for _, scope := range x.Also {
		s.remember(scope)
	}
	if s.pos.known {
		s.gone = now() // its time begins
	}
	return s
}

// Keep saves now and then until ctx is over, and once more then.
func (m *Manager) Keep(ctx context.Context, st Store, every time.Duration) {
	for done := false; !done; {
		done = pause(ctx, every) != nil
		save, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(every, leastSave))
		if err := m.Save(save, st); err != nil {
			m.cfg.Logger.Warn("what is known of engines is not saved: a restarted conductor would know less", slog.Any("error", err))
		}
		cancel()
	}
}

// leastSave is how long a save may take at least.
const leastSave = 30 * time.Second
