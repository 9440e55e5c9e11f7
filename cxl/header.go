package cxl

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"time"
)

// HeaderSpan is how many bytes at the start of a device are reserved for headers and alignment; data starts here. It
// is the usual alignment of device-DAX, so that data is aligned to huge pages.
const HeaderSpan = 2 << 20

// HeaderSize is the size of one encoded header in bytes.
const HeaderSize = 256

const (
	headerMagic   = "LARDERDV"
	headerVersion = 1

	slotStride = 4096 // slots lie on pages of their own, so that one bad page or torn sector costs one slot
	slotCount  = 2
	liveOffset = slotStride * slotCount
	// headerBytes is how much of the header span is in use, and mapped where alignment allows.
	headerBytes = liveOffset + 4096

	flagVolatile  = 1 << 0
	flagCoherent  = 1 << 1
	flagsKnown    = flagVolatile | flagCoherent
	offCRC        = 12
	offReserved   = 176
	crcFieldBytes = 4
)

var crcTable = crc32.MakeTable(crc32.Castagnoli)

// Coherence says whether hosts that share a device see each other's stores without cache maintenance.
type Coherence uint8

const (
	// CoherenceNone means that software must write back and invalidate caches.
	CoherenceNone Coherence = iota
	// CoherenceHardware means that hardware keeps caches coherent; always so on one host.
	CoherenceHardware
)

// String gives the name used in configuration: hardware or none.
func (c Coherence) String() string {
	if c == CoherenceHardware {
		return "hardware"
	}
	return "none"
}

// ParseCoherence reads the name used in configuration.
func ParseCoherence(s string) (Coherence, error) {
	switch s {
	case "hardware":
		return CoherenceHardware, nil
	case "none":
		return CoherenceNone, nil
	}
	return CoherenceNone, fmt.Errorf("cxl: unknown coherence %q: want hardware or none", s)
}

// Claim is the record of the server that owns a device. The zero value means that nobody does.
type Claim struct {
	Host         [16]byte // machine id, zero if the machine has none
	Boot         [16]byte // boot id of that machine when the claim was made
	PIDNamespace uint64   // inode of the claimant's pid namespace
	PID          uint32
	Start        uint64 // start time of the process in clock ticks since boot
	Since        int64  // wall clock, Unix nanoseconds; for people only, nothing is decided by it
}

// SinceTime is when the claim was made by the claimant's wall clock.
func (c Claim) SinceTime() time.Time { return time.Unix(0, c.Since) }

// same reports whether two claims name the same process.
func (c Claim) same(o Claim) bool { return c.Boot == o.Boot && c.PID == o.PID && c.Start == o.Start }

// Header is what a device says of itself.
type Header struct {
	Pool        [16]byte // id of the pool it belongs to
	Device      [16]byte // uuid of the device
	DeviceID    uint64   // number of the device in the pool
	Generation  uint64   // random and never zero; changed whenever bytes may have been lost
	Incarnation uint64   // incarnation of the pool that wrote the generation
	Size        uint64   // bytes of the device that the pool may use, the header span included
	BootID      [16]byte // boot that a volatile device's bytes belong to; zero on persistent media
	Volatile    bool
	Coherence   Coherence
	Claim       Claim

	sequence uint64 // counts slot writes; the valid slot with the higher one holds
}

// AppendBinary appends the encoded header, [HeaderSize] bytes, to b. It never fails.
func (h *Header) AppendBinary(b []byte) ([]byte, error) {
	var e [HeaderSize]byte
	le := binary.LittleEndian
	copy(e[0:8], headerMagic)
	le.PutUint16(e[8:], headerVersion)
	le.PutUint16(e[10:], HeaderSize)
	le.PutUint64(e[16:], h.sequence)
	var flags uint32
	if h.Volatile {
		flags |= flagVolatile
	}
	if h.Coherence == CoherenceHardware {
		flags |= flagCoherent
	}
	le.PutUint32(e[24:], flags)
	copy(e[32:48], h.Pool[:])
	copy(e[48:64], h.Device[:])
	le.PutUint64(e[64:], h.DeviceID)
	le.PutUint64(e[72:], h.Generation)
	le.PutUint64(e[80:], h.Incarnation)
	le.PutUint64(e[88:], h.Size)
	copy(e[96:112], h.BootID[:])
	copy(e[112:128], h.Claim.Host[:])
	copy(e[128:144], h.Claim.Boot[:])
	le.PutUint64(e[144:], h.Claim.PIDNamespace)
	le.PutUint32(e[152:], h.Claim.PID)
	le.PutUint64(e[160:], h.Claim.Start)
	le.PutUint64(e[168:], uint64(h.Claim.Since)) //nolint:gosec // two's complement, read back the same way
	le.PutUint32(e[offCRC:], headerCRC(e[:]))
	return append(b, e[:]...), nil
}

// headerCRC is the CRC32C of an encoded header with its own field taken as zero.
func headerCRC(e []byte) uint32 {
	var zero [crcFieldBytes]byte
	c := crc32.Update(0, crcTable, e[:offCRC])
	c = crc32.Update(c, crcTable, zero[:])
	return crc32.Update(c, crcTable, e[offCRC+crcFieldBytes:HeaderSize])
}

// DecodeHeader reads one encoded header from the first [HeaderSize] bytes of b. The error is [ErrNoHeader] for zeros,
// [ErrForeignHeader] for another magic, [ErrHeaderVersion] for a later format, [ErrCorruptHeader] for everything else
// that AppendBinary would not have written.
func DecodeHeader(b []byte) (Header, error) {
	if len(b) < HeaderSize {
		return Header{}, fmt.Errorf("%w: %d bytes of %d", ErrCorruptHeader, len(b), HeaderSize)
	}
	b = b[:HeaderSize]
	le := binary.LittleEndian
	if string(b[:8]) != headerMagic {
		if allZero(b) {
			return Header{}, ErrNoHeader
		}
		return Header{}, ErrForeignHeader
	}
	version, size, flags := le.Uint16(b[8:]), le.Uint16(b[10:]), le.Uint32(b[24:])
	if le.Uint32(b[offCRC:]) != headerCRC(b) {
		return Header{}, fmt.Errorf("%w: checksum", ErrCorruptHeader)
	}
	if version > headerVersion {
		return Header{}, fmt.Errorf("%w: version %d", ErrHeaderVersion, version)
	}
	if version != headerVersion || size != HeaderSize || flags&^flagsKnown != 0 || le.Uint32(b[28:]) != 0 ||
		le.Uint32(b[156:]) != 0 || !allZero(b[offReserved:]) {
		return Header{}, fmt.Errorf("%w: version %d, size %d, flags %#x", ErrCorruptHeader, version, size, flags)
	}
	h := Header{
		sequence: le.Uint64(b[16:]), DeviceID: le.Uint64(b[64:]), Generation: le.Uint64(b[72:]),
		Incarnation: le.Uint64(b[80:]), Size: le.Uint64(b[88:]), Volatile: flags&flagVolatile != 0,
		Claim: Claim{
			PIDNamespace: le.Uint64(b[144:]), PID: le.Uint32(b[152:]), Start: le.Uint64(b[160:]),
			Since: int64(le.Uint64(b[168:])), //nolint:gosec // two's complement, as written
		},
	}
	if flags&flagCoherent != 0 {
		h.Coherence = CoherenceHardware
	}
	copy(h.Pool[:], b[32:])
	copy(h.Device[:], b[48:])
	copy(h.BootID[:], b[96:])
	copy(h.Claim.Host[:], b[112:])
	copy(h.Claim.Boot[:], b[128:])
	return h, nil
}

// slots is what the two header copies of a device say together.
type slots struct {
	header Header // of the valid slot with the higher sequence
	which  int    // index of that slot
	torn   bool   // the other slot is older in content, damaged or empty: an owner should write both again
}

// decodeSlots reads both slots from the start of a header span.
func decodeSlots(b []byte) (slots, error) {
	var got [slotCount]Header
	var errs [slotCount]error
	for i := range slotCount {
		if len(b) < i*slotStride+HeaderSize {
			errs[i] = ErrNoHeader // beyond the end of a file
			if !allZero(b[min(len(b), i*slotStride):]) {
				errs[i] = ErrForeignHeader
			}
			continue
		}
		got[i], errs[i] = DecodeHeader(b[i*slotStride:])
	}
	a, z := got[0], got[1]
	switch {
	case errs[0] == nil && errs[1] == nil:
		if a.sequence == z.sequence { // every slot write takes a new sequence number: we never wrote these
			return slots{}, fmt.Errorf("%w: both copies have sequence %d", ErrCorruptHeader, a.sequence)
		}
		which := 0
		if z.sequence > a.sequence {
			which, a, z = 1, z, a
		}
		z.sequence = a.sequence
		return slots{header: a, which: which, torn: z != a}, nil
	case errs[0] == nil:
		return slots{header: a, which: 0, torn: true}, keepVersion(errs[1])
	case errs[1] == nil:
		return slots{header: z, which: 1, torn: true}, keepVersion(errs[0])
	}
	return slots{}, worstSlot(errs)
}

// keepVersion keeps only the error of a later format: a valid old slot beside it must not be mistaken for the truth.
func keepVersion(err error) error {
	if isAny(err, ErrHeaderVersion) {
		return err
	}
	return nil
}

// worstSlot tells why no slot is valid: ours but damaged weighs more than foreign, and foreign more than blank.
func worstSlot(errs [slotCount]error) error {
	for _, kind := range []error{ErrHeaderVersion, ErrCorruptHeader, ErrForeignHeader} {
		for _, err := range errs {
			if isAny(err, kind) {
				return err
			}
		}
	}
	return ErrNoHeader
}

// zeroBlock is what allZero compares with, a block at a time.
var zeroBlock [4096]byte

// allZero reports whether b holds only zero bytes.
func allZero(b []byte) bool {
	for len(b) > len(zeroBlock) {
		if !bytes.Equal(b[:len(zeroBlock)], zeroBlock[:]) {
			return false
		}
		b = b[len(zeroBlock):]
	}
	return bytes.Equal(b, zeroBlock[:len(b)])
}

// signatures are contents that people recognise, to tell them what they were about to overwrite.
var signatures = []struct {
	offset int
	magic  string
	name   string
}{
	{0, "MARUDEV\x00", "a Maru device header"},
	{0, "XFSB", "an XFS file system"},
	{0, "LUKS\xba\xbe", "a LUKS volume"},
	{0, "\x7fELF", "an ELF program"},
	{0x200, "LABELONE", "an LVM volume"},
	{0x200, "EFI PART", "a GPT partition table"},
	{0x1fe, "\x55\xaa", "a partition table or boot sector"},
	{0x438, "\x53\xef", "an ext2, ext3 or ext4 file system"},
	{0x10040, "_BHRfS_M", "a btrfs file system"},
	{0x1000, "NVDIMM_PFN_INFO", "an NVDIMM namespace label"},
}

// describe says in words what the start of a device holds.
func describe(b []byte) string {
	for _, s := range signatures {
		if end := s.offset + len(s.magic); len(b) >= end && string(b[s.offset:end]) == s.magic {
			return s.name
		}
	}
	return "data that is not a pool header"
}
