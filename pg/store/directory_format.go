package store

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"

	"github.com/zeebo/xxh3"
)

// The files of a directory. Numbers are little-endian, sums are XXH3-64 of what comes before them.
//
//	lock           whose flock is the lock of all, with two slots of 32 bytes: revision, entries, bytes of keys and values, sum. The
//	               slots are written in turn, so that one is always whole; that of the greater revision counts.
//	tmp            what is being written by who holds the lock, before it gets its name
//	entries/NAME   "LPE1", 2 bytes: the length of the key, 2 of zeros, created, modified, the id of the lease or 0, key, value, sum.
//	               NAME is the key, escaped
//	leases/ID      "LPL1", 4 bytes of zeros, id, duration in ns, 16 bytes of the host's boot id, sum; and a number that is another
//	               one whenever its process renews the lease. ID is 16 digits, hexadecimal

const (
	entryMagic, leaseMagic = "LPE1", "LPL1"
	entryHeader            = 32
	slotBytes              = 32
	beatOffset             = 48
	leaseBytes             = 56
	maxEntryFile           = entryHeader + MaxKeyBytes + MaxValueBytes + 8
	// maxPlainName bounds the names of files that are keys, of the 255 bytes that a file system takes.
	maxPlainName = 200
)

var errGarbage = errors.New("not what a store has written, or not all of it")

// dirEntry is an entry and its lease, 0 if it has none.
type dirEntry struct {
	Entry

	lease uint64
}

func (e *dirEntry) appendTo(b []byte) []byte {
	start := len(b)
	b = append(b, entryMagic...)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(e.Key))) //nolint:gosec // at most MaxKeyBytes
	b = append(b, 0, 0)
	b = binary.LittleEndian.AppendUint64(b, e.Created)
	b = binary.LittleEndian.AppendUint64(b, e.Modified)
	b = binary.LittleEndian.AppendUint64(b, e.lease)
	b = append(append(b, e.Key...), e.Value...)
	return binary.LittleEndian.AppendUint64(b, xxh3.Hash(b[start:]))
}

// decodeEntry reads an entry's file. The value shares memory with b.
func decodeEntry(b []byte) (e dirEntry, err error) {
	if len(b) < entryHeader+8 || len(b) > maxEntryFile || string(b[:4]) != entryMagic {
		return e, errGarbage
	}
	body, sum := b[:len(b)-8], binary.LittleEndian.Uint64(b[len(b)-8:])
	n := int(binary.LittleEndian.Uint16(b[4:]))
	if xxh3.Hash(body) != sum || b[6] != 0 || b[7] != 0 || entryHeader+n > len(body) {
		return e, errGarbage
	}
	e.Created, e.Modified = binary.LittleEndian.Uint64(b[8:]), binary.LittleEndian.Uint64(b[16:])
	e.lease = binary.LittleEndian.Uint64(b[24:])
	e.Key, e.Value = string(body[entryHeader:entryHeader+n]), body[entryHeader+n:]
	if checkPut(e.Key, e.Value) != nil || e.Created == 0 || e.Modified < e.Created {
		return dirEntry{}, errGarbage
	}
	return e, nil
}

// dirState is what the lock file says.
type dirState struct{ revision, entries, bytes uint64 }

func (s *dirState) slot() (b []byte, offset int64) {
	b = binary.LittleEndian.AppendUint64(make([]byte, 0, slotBytes), s.revision)
	b = binary.LittleEndian.AppendUint64(b, s.entries)
	b = binary.LittleEndian.AppendUint64(b, s.bytes)
	return binary.LittleEndian.AppendUint64(b, xxh3.Hash(b)), int64(s.revision%2) * slotBytes
}

// decodeState reads the slots. ok is false if none is whole.
func decodeState(b []byte) (s dirState, ok bool) {
	for ; len(b) >= slotBytes; b = b[slotBytes:] {
		x := dirState{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:]), binary.LittleEndian.Uint64(b[16:])}
		if binary.LittleEndian.Uint64(b[24:]) == xxh3.Hash(b[:24]) && x.revision > s.revision {
			s, ok = x, true
		}
	}
	return s, ok
}

// leaseFile is what the file of a lease says.
type leaseFile struct {
	id       uint64
	duration int64 // ns
	boot     [16]byte
	beat     uint64
}

func (l *leaseFile) append() []byte {
	b := append(make([]byte, 0, leaseBytes), leaseMagic+"\x00\x00\x00\x00"...)
	b = binary.LittleEndian.AppendUint64(b, l.id)
	b = binary.LittleEndian.AppendUint64(b, uint64(l.duration)) //nolint:gosec // positive
	b = append(b, l.boot[:]...)
	b = binary.LittleEndian.AppendUint64(b, xxh3.Hash(b))
	return binary.LittleEndian.AppendUint64(b, l.beat)
}

func decodeLease(b []byte) (l leaseFile, err error) {
	if len(b) != leaseBytes || string(b[:8]) != leaseMagic+"\x00\x00\x00\x00" ||
		xxh3.Hash(b[:beatOffset-8]) != binary.LittleEndian.Uint64(b[beatOffset-8:]) {
		return l, errGarbage
	}
	l.id, l.duration = binary.LittleEndian.Uint64(b[8:]), int64(binary.LittleEndian.Uint64(b[16:])) //nolint:gosec // checked below
	copy(l.boot[:], b[24:])
	l.beat = binary.LittleEndian.Uint64(b[beatOffset:])
	if l.id == 0 || l.duration < int64(MinLease) || l.duration > int64(MaxLease) {
		return leaseFile{}, errGarbage
	}
	return l, nil
}

// leaseName is the name of a lease's file.
func leaseName(id uint64) string { return fmt.Sprintf("%016x", id) }

// entryName is the name of the file of a key. Bytes that are not letters, digits, or -, _ and . within, are escaped; of a long key
// only the beginning is there, and a hash of all of it.
func entryName(key string) string {
	const plain = "-_.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
	var b bytes.Buffer
	for i := range len(key) {
		if c := key[i]; strings.IndexByte(plain, c) >= 0 && (c != '.' || i > 0) {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02x", c)
		}
	}
	if b.Len() > maxPlainName {
		sum := sha256.Sum256([]byte(key))
		b.Truncate(maxPlainName / 2)
		b.WriteString("~" + hex.EncodeToString(sum[:16]))
	}
	return b.String()
}
