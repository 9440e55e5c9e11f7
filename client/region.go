package client

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"larder/cxl"
	"larder/protocol"
)

// region is memory of the pool that this client owns. Every page of it is in one of these states:
//
//	free     in the set of free pages: may be given to a store
//	taken    a store is writing it, or has sent its REGISTER and does not know the outcome yet
//	used     holds an entry
//	resting  in quarantine: the entry is gone, but a reader may still hold a lease
//
// Fields without a comment do not change. The others belong to pool.mu.
type region struct {
	id, epoch, generation uint64
	length                uint64
	pageSize              uint64
	dev                   *device
	mapping               *cxl.Mapping
	mem                   []byte
	far                   bool   // it is not mapped: it is written by transfer, and mem is nil
	offset                uint64 // in the device, if it is far
	second                bool   // it holds replicas alone

	free    *bitset
	used    *bitset
	keys    []uint64      // per page: hash of the key whose entry begins there, or is about to
	dirty   *bitset       // free pages that have not been discarded; nil if none is to be
	early   map[int]int64 // taken pages whose entry was freed before its REGISTER was known to have worked: end of rest
	changed *bitset       // pages whose state changed since the HANDSHAKE in progress was sent; nil if none is
	since   *bitset       // pages whose state changed since the last HANDSHAKE, while an older REQUEST_ALLOC is not answered; else nil
	copies  int           // stores that are writing now, and discards
	drained chan struct{} // closed when copies reaches 0; nil if nobody waits
	allocs  int           // open Allocs, whose memory the user may write to at any time
	idle    chan struct{} // closed when allocs reaches 0 after the region was given up
	lost    error         // why it was given up: ErrRevoked or ErrSessionExpired; nil while it is owned
	covered bool          // the mapping was replaced by private memory
	told    bool          // OnRevoke has heard of it

	access    *access // how it is written, if it is far; nil after the end
	adopted   bool    // keys of entries that lie there are not known
	regaining bool    // access is being asked for anew
	loose     int     // transfers that may still land there, though they have failed
}

// newRegion maps a region of pages of pageSize bytes for writing. dev is held by the region from then on.
func newRegion(given *protocol.Region, pageSize uint64, dev *device, prefault bool) (*region, error) {
	if err := checkRegion(given, pageSize); err != nil {
		return nil, err
	}
	m, err := dev.dev.Map(int64(given.Offset), int64(given.Length), //nolint:gosec // checked by Map
		cxl.MapOptions{Populate: prefault, HugePages: true})
	if err != nil {
		return nil, fmt.Errorf("map region %d: %w", given.RegionID, err)
	}
	r := emptyRegion(given, dev)
	r.mapping, r.mem = m, m.Bytes()
	return r, nil
}

// checkRegion refuses regions that cannot be divided into pages.
func checkRegion(r *protocol.Region, pageSize uint64) error {
	if r.PageSize != pageSize || r.Length < pageSize {
		return fmt.Errorf("%w: the master gave region %d of %d bytes in pages of %d, where pages of %d were asked for",
			ErrConfig, r.RegionID, r.Length, r.PageSize, pageSize)
	}
	return nil
}

// emptyRegion is a region all of whose pages are free, and that cannot be written yet.
func emptyRegion(r *protocol.Region, dev *device) *region {
	n := int(r.Length / r.PageSize) //nolint:gosec // bounded by the device
	return &region{
		id: r.RegionID, epoch: r.Epoch, generation: r.Generation, length: r.Length, pageSize: r.PageSize,
		dev:  dev,
		free: newBitset(n, true), used: newBitset(n, false), keys: make([]uint64, n),
	}
}

// occupy notes that entries lie in a region that was just given: offset, length, offset, length ...
func (r *region) occupy(occupied []uint64) {
	r.adopted = len(occupied) > 0
	for i := 0; i+1 < len(occupied); i += 2 {
		page, n := r.pagesAt(occupied[i], occupied[i+1])
		for j := range n {
			r.free.remove(page + j)
			r.used.add(page + j)
		}
	}
}

// run is consecutive pages of one region. The zero run is none.
type run struct {
	r    *region
	page int
	n    int
}

// bytes is the memory of the run, cut to size bytes.
func (t run) bytes(size int) []byte {
	from := uint64(t.page) * t.r.pageSize //nolint:gosec // not negative
	to := from + uint64(size)             //nolint:gosec // not negative
	return t.r.mem[from:to:to]
}

// offset is where the run begins in its region.
func (t run) offset() uint64 { return uint64(t.page) * t.r.pageSize } //nolint:gosec // not negative

// note records that pages changed state.
func (r *region) note(page, n int) {
	for _, b := range [...]*bitset{r.changed, r.since} {
		for i := 0; b != nil && i < n; i++ {
			b.add(page + i)
		}
	}
}

// pagesAt converts a place in the region to pages; n is 0 if it is not one that an entry can have.
func (r *region) pagesAt(offset, length uint64) (page, n int) {
	if length == 0 || offset%r.pageSize != 0 || offset > r.length || length > r.length-offset {
		return 0, 0
	}
	return int(offset / r.pageSize), int((length + r.pageSize - 1) / r.pageSize) //nolint:gosec // within the region
}

// cover puts private memory in the place of the mapping, so that what the user still stores through the bytes of an
// Alloc harms nobody. It fails where the medium cannot be unmapped piecewise.
func (r *region) cover() error {
	base := unsafe.Pointer(unsafe.SliceData(r.mem)) //nolint:gosec // the address of a mapping that stays
	_, err := unix.MmapPtr(-1, 0, base, uintptr(len(r.mem)), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED|unix.MAP_NORESERVE)
	if err != nil {
		return fmt.Errorf("replace the mapping of region %d: %w", r.id, err)
	}
	return nil
}

// unmap gives the memory up. Nobody uses it any more.
func (r *region) unmap() {
	if r.access != nil {
		r.access.drop()
		r.access = nil
		r.dev.drop()
	}
	if r.mapping != nil {
		_ = r.mapping.Close() // unmapping fails only for a range that is none
		r.mapping, r.mem = nil, nil
		r.dev.drop()
	}
}
