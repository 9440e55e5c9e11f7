package ssd

import (
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const sector = 512

// memFS is a directory that can lose power: what was written since the last flush may then be there or not, sector by
// sector. It also injects faults. One that has lost power is left behind: after gives what a restart finds.
type memFS struct {
	mu    sync.Mutex
	files map[string]*memFile
	held  bool

	failWrite func(name string) error // before a write: what it answers
	failSync  func(name string) error
	failRead  func(name string, off int64) error
	onWrite   func(name string) // after a write
}

func newMemFS() *memFS { return &memFS{files: map[string]*memFile{}} }

type memWrite struct {
	off int64
	b   []byte
}

type memFile struct {
	fs      *memFS
	name    string
	now     []byte // as read
	durable []byte
	pending []memWrite
}

func (m *memFS) open(name string, create, direct bool) (file, bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f := m.files[name]
	if f == nil {
		if !create {
			return nil, false, fs.ErrNotExist
		}
		f = &memFile{fs: m, name: name}
		m.files[name] = f
	}
	return f, direct, nil
}

func (m *memFS) syncDir() error { return nil }

type memLock struct{ m *memFS }

func (l memLock) Close() error {
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	l.m.held = false
	return nil
}

func (m *memFS) lock() (io.Closer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held {
		return nil, ErrLocked
	}
	m.held = true
	return memLock{m}, nil
}

func (f *memFile) ReadAt(b []byte, off int64) (int, error) {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if fail := f.fs.failRead; fail != nil {
		if err := fail(f.name, off); err != nil {
			return 0, err
		}
	}
	if off >= int64(len(f.now)) {
		return 0, io.EOF
	}
	n := copy(b, f.now[off:])
	if n < len(b) {
		return n, io.EOF
	}
	return n, nil
}

func put(to []byte, off int64, b []byte) []byte {
	if need := int(off) + len(b); need > len(to) {
		to = append(to, make([]byte, need-len(to))...)
	}
	copy(to[off:], b)
	return to
}

func (f *memFile) writeVec(bufs [][]byte, off int64) error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if fail := f.fs.failWrite; fail != nil {
		if err := fail(f.name); err != nil {
			return err
		}
	}
	var all []byte
	for _, b := range bufs {
		if f.name != superblockName && !aligned(b) {
			return errors.New("not aligned")
		}
		all = append(all, b...)
	}
	f.pending = append(f.pending, memWrite{off, all})
	f.now = put(f.now, off, all)
	if f.fs.onWrite != nil {
		f.fs.onWrite(f.name)
	}
	return nil
}

func (f *memFile) sync() error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if fail := f.fs.failSync; fail != nil {
		if err := fail(f.name); err != nil {
			return err
		}
	}
	for _, w := range f.pending {
		f.durable = put(f.durable, w.off, w.b)
	}
	f.pending = nil
	return nil
}

func (f *memFile) allocate(n int64) error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	if int64(len(f.now)) < n {
		f.now = append(f.now, make([]byte, n-int64(len(f.now)))...)
		f.durable = append(f.durable, make([]byte, n-int64(len(f.durable)))...)
	}
	return nil
}

func (f *memFile) Close() error { return nil }

// after gives what is found after a loss of power at this moment.
func (m *memFS) after(rng *rand.Rand) *memFS {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := newMemFS()
	for name, f := range m.files {
		d := append([]byte(nil), f.durable...)
		for _, w := range f.pending {
			mode := rng.IntN(4)
			for i := 0; i < len(w.b); i += sector {
				if mode == 0 || mode == 1 && rng.IntN(2) == 0 || mode == 2 && i > len(w.b)/2 {
					continue
				}
				d = put(d, w.off+int64(i), w.b[i:min(len(w.b), i+sector)])
			}
		}
		n.files[name] = &memFile{fs: n, name: name, now: d, durable: append([]byte(nil), d...)}
	}
	return n
}

// clone gives a copy of what is read now, as after a clean end.
func (m *memFS) clone() *memFS {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := newMemFS()
	for name, f := range m.files {
		n.files[name] = &memFile{fs: n, name: name, now: append([]byte(nil), f.now...), durable: append([]byte(nil), f.now...)}
	}
	return n
}

// hasty is a clock on which nothing takes long.
type hasty struct{}

func (hasty) after(d time.Duration) (<-chan time.Time, func() bool) {
	t := time.NewTimer(min(d, time.Millisecond))
	return t.C, t.Stop
}
