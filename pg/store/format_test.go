package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/zeebo/xxh3"
)

func FuzzFrame(f *testing.F) {
	for _, message := range []any{
		&request{ID: 1, Op: opPut, Key: "k", Value: []byte{0xff}, Check: true, Revision: 1 << 60, Lease: true},
		&request{Op: opHello, Version: wireVersion, LeaseMS: 3000},
		&reply{ID: 1, Code: codeConflict, Text: "t", Entry: &Entry{Key: "k", Created: 1, Modified: 2}},
		&reply{ID: 1, Entries: []Entry{{Key: "k", Value: []byte("v")}}, More: true, Revision: 7, Changes: []Change{{Entry{Key: "k"}, true}}},
	} {
		b, err := appendFrame(nil, message)
		require.NoError(f, err)
		f.Add(b)
	}
	f.Add([]byte("\x04\x00\x00\x00\x81\xa5entri"))
	f.Add([]byte("\x10\x00\x00\x00\x81\xa7entries\xdd\xff\xff\xff\xff\x80"))
	f.Add([]byte("\x10\x00\x00\x00\x81\xa7entries\xdd\xff\xff\xff\x8e\x8e\x8e\x8e\x8e\xff\x80"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var buf bytes.Buffer
		var q request
		if readFrame(bytes.NewReader(b), maxRequest, &buf, &q) == nil {
			again, err := appendFrame(nil, &q)
			require.NoError(t, err)
			var same request
			require.NoError(t, readFrame(bytes.NewReader(again), uint32(len(again)), &buf, &same))
			require.Equal(t, q.Key, same.Key)
			require.Equal(t, q.ID, same.ID)
			require.True(t, bytes.Equal(q.Value, same.Value))
		}
		var r reply
		if readFrame(bytes.NewReader(b), maxReply, &buf, &r) == nil {
			_ = r.err()
			_ = r.entry()
		}
	})
}

func TestFramesAreBounded(t *testing.T) {
	key, value := strings.Repeat("k", MaxKeyBytes), make([]byte, MaxValueBytes)
	b, err := appendFrame(nil, &request{
		ID: 1 << 63, Op: opForget, Key: key, Value: value, Check: true, Revision: 1 << 63, Lease: true, LeaseMS: 1 << 63, Version: 1 << 40,
	})
	require.NoError(t, err)
	require.LessOrEqual(t, len(b)-4, maxRequest)
	var buf bytes.Buffer
	require.ErrorContains(t, readFrame(bytes.NewReader(b), uint32(len(b)-5), &buf, new(request)), "of at most")

	list := make([]Entry, 100)
	for i := range list {
		list[i] = Entry{key, value, 1 << 63, 1 << 63}
	}
	for pages := 0; len(list) > 0; pages++ {
		require.Less(t, pages, 10)
		var first []Entry
		first, list = page(list)
		changes := make([]Change, len(first))
		for i, e := range first {
			changes[i] = Change{e, true}
		}
		b, err := appendFrame(nil, &reply{ID: 1 << 63, Changes: changes, More: true, Revision: 1 << 63})
		require.NoError(t, err)
		require.LessOrEqual(t, len(b)-4, maxReply)
		require.LessOrEqual(t, len(b), pageBytes+1024)
	}
}

func FuzzEntryFile(f *testing.F) {
	for _, e := range []dirEntry{
		{Entry{"k", []byte("v"), 1, 2}, 0}, {Entry{"k/ключ", nil, 1 << 63, 1 << 63}, 7}, {Entry{"k", make([]byte, 300), 3, 3}, 1 << 63},
	} {
		f.Add(e.appendTo(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= 8 { // as if the sum were right
			b = dirSum(b[:len(b)-8])
		}
		e, err := decodeEntry(b)
		if err != nil {
			require.Equal(t, errGarbage, err)
			return
		}
		require.NoError(t, checkPut(e.Key, e.Value))
		require.Equal(t, b, e.appendTo(nil), "there is one way to write an entry")
		b[len(b)-1]++
		_, err = decodeEntry(b)
		require.Error(t, err)
	})
}

func FuzzLeaseFile(f *testing.F) {
	l := leaseFile{id: 1, duration: int64(time.Second), boot: [16]byte{1}, beat: 9}
	f.Add(l.append())
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) == leaseBytes {
			b = append(dirSum(b[:beatOffset-8]), b[beatOffset:]...)
		}
		l, err := decodeLease(b)
		if err == nil {
			require.Equal(t, b, l.append())
		}
	})
}

func FuzzState(f *testing.F) {
	s := dirState{7, 2, 100}
	slot, _ := s.slot()
	f.Add(append(make([]byte, slotBytes), slot...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, ok := decodeState(b); ok {
			slot, offset := s.slot()
			require.Contains(t, string(b), string(slot))
			require.Less(t, offset, int64(2*slotBytes))
		}
	})
}

// dirSum appends the sum of b.
func dirSum(b []byte) []byte {
	return binary.LittleEndian.AppendUint64(bytes.Clone(b), xxh3.Hash(b))
}

func TestASlotThatIsNotWholeLeavesTheOther(t *testing.T) {
	var b [2 * slotBytes]byte
	for revision := uint64(1); revision < 10; revision++ {
		s := dirState{revision, revision, 0}
		slot, offset := s.slot()
		copy(b[offset:], slot[:slotBytes/2])
		if old, ok := decodeState(b[:]); revision > 1 {
			require.True(t, ok)
			require.Equal(t, revision-1, old.revision)
		}
		copy(b[offset:], slot)
		now, ok := decodeState(b[:])
		require.True(t, ok)
		require.Equal(t, s, now)
	}
}

func TestNamesOfFiles(t *testing.T) {
	for key, want := range map[string]string{
		"a-B_9.x": "a-B_9.x", ".": "%2e", "..": "%2e.", "a/b": "a%2fb", "%2f": "%252f", "~": "%7e", "\x00": "%00",
		strings.Repeat("k", 200): strings.Repeat("k", 200),
	} {
		require.Equal(t, want, entryName(key))
	}
	one, two := entryName(strings.Repeat("k", 201)), entryName(strings.Repeat("k", 202))
	require.NotEqual(t, one, two)
	require.Len(t, one, 133)
}

// Where inotify tells nothing, or what it tells is lost, watches find out by the revision.
func TestAWatchThatInotifyTellsNothing(t *testing.T) {
	for name, spoil := range map[string]func(h *hub){
		"none":  func(h *hub) { h.close(); h.inotify = nil },
		"other": func(h *hub) { h.close(); h.d.remote = true },
		"deaf":  (*hub).close,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, err := os.MkdirTemp("/dev/shm", "larder-store-")
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
			d, err := newDirectory(t.Context(), dir, 0)
			require.NoError(t, err)
			spoil(d.hub)
			require.NoError(t, d.start(t.Context()))
			t.Cleanup(func() { require.NoError(t, d.Close()) })
			ctx, cancel := context.WithCancel(t.Context())
			told, ended := make(chan int, 100), make(chan error)
			go func() {
				ended <- d.Watch(ctx, "", func(changes []Change) error {
					told <- len(changes)
					return nil
				})
			}()
			require.Zero(t, <-told)
			for range 3 {
				_, err = d.Put(ctx, "k", nil)
				require.NoError(t, err)
				require.Equal(t, 1, <-told)
			}
			require.NoError(t, d.Delete(ctx, "k"))
			require.Equal(t, 1, <-told)
			cancel()
			require.ErrorIs(t, <-ended, context.Canceled)
		})
	}
}
