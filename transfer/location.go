package transfer

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// locationSamples is how many pages of a buffer are asked for, spread over it, where they lie.
const locationSamples = 64

// memoryLocation says on which NUMA node most of some memory lies, as a location; empty if it cannot be told: pages that
// nobody has touched lie nowhere.
func memoryLocation(mem []byte) string {
	page := uintptr(os.Getpagesize())
	first := addressOf(mem) &^ (page - 1)
	count := (addressOf(mem) + uintptr(len(mem)) - first + page - 1) / page
	step := max(count/locationSamples, 1)
	addresses := make([]uintptr, 0, locationSamples+1)
	for i := uintptr(0); i < count && len(addresses) < locationSamples; i += step {
		addresses = append(addresses, first+i*page)
	}
	return mostCommon(pageNodes(addresses))
}

// addressOf is where memory begins.
func addressOf(b []byte) uintptr {
	return uintptr(unsafe.Pointer(unsafe.SliceData(b))) //nolint:gosec // only looked at
}

// pageNodes asks the kernel for the nodes of pages, without moving any. What it cannot tell is negative.
func pageNodes(addresses []uintptr) []int32 {
	status := make([]int32, len(addresses))
	if len(addresses) == 0 {
		return nil
	}
	_, _, errno := unix.Syscall6(unix.SYS_MOVE_PAGES, 0, uintptr(len(addresses)),
		uintptr(unsafe.Pointer(unsafe.SliceData(addresses))), 0, //nolint:gosec // as below
		uintptr(unsafe.Pointer(unsafe.SliceData(status))), 0) //nolint:gosec // the kernel wants it so
	if errno != 0 {
		return nil
	}
	return status
}

// mostCommon is the location of the node that occurs most often among those that are known.
func mostCommon(nodes []int32) string {
	counts := map[int32]int{}
	best, most := int32(-1), 0
	for _, n := range nodes {
		if counts[n]++; n >= 0 && counts[n] > most {
			best, most = n, counts[n]
		}
	}
	if best < 0 {
		return ""
	}
	return cpuLocation(int(best))
}

// locate fills in where a buffer lies.
func (e *Engine) locate(b *Buffer, o *BufferOptions) {
	b.info.Location = o.Location
	if o.Location == "" && b.mem != nil && len(e.topology.Nodes) > 1 {
		b.info.Location = memoryLocation(b.mem)
	}
}

// localLocation is where local memory of a request lies, if it matters. Memory that is registered here is known; for other
// memory the kernel is asked for one page.
func (e *Engine) localLocation(mem []byte) string {
	if len(mem) == 0 || !e.choosy {
		return ""
	}
	at := addressOf(mem)
	for b := range e.buffers.all {
		if at-addressOf(b.mem) < uintptr(len(b.mem)) { // the difference wraps if it lies before
			return b.info.Location
		}
	}
	return mostCommon(pageNodes([]uintptr{at &^ uintptr(os.Getpagesize()-1)}))
}

// maxPreferences bounds the pairs of locations that are kept: more are worked out each time.
const maxPreferences = 1024

// prefers tells the lane's rails, one bit each, that are close to memory here and to a buffer there. 0 means any. The lane's
// mu is held.
func (l *lane) prefers(here, there string) uint64 {
	if len(l.rails) < 2 || here == "" && there == "" {
		return 0
	}
	key := [2]string{here, there}
	if mask, known := l.preferences[key]; known {
		return mask
	}
	mine, peers := l.seg.e.topology, l.seg.peerTopology()
	best, mask := 3, uint64(0)
	for i, r := range l.rails {
		distance := 0
		if mine.far(here, r.from) {
			distance++
		}
		if peers.far(there, r.to) {
			distance++
		}
		if distance < best {
			best, mask = distance, 0
		}
		if distance == best {
			mask |= 1 << i
		}
	}
	if mask == uint64(1)<<len(l.rails)-1 {
		mask = 0
	}
	if l.preferences == nil {
		l.preferences = map[[2]string]uint64{}
	}
	if len(l.preferences) < maxPreferences {
		l.preferences[key] = mask
	}
	return mask
}

const (
	// muchSlower is by how much a preferred rail must be behind before another takes what is its.
	muchSlower = 4
	// compareEvery is how often a rail that is not preferred carries a slice, so that it can be compared.
	compareEvery = int64(1e9)
)

// leaves reports whether a rail leaves a slice to those that it prefers. The lane's mu is held.
func (l *lane) leaves(r *rail, s *slice, now int64) bool {
	if s.prefer == 0 || r == nil || s.prefer&(1<<r.index) != 0 {
		return false
	}
	own := r.pace.load()
	for i, o := range l.rails {
		if s.prefer&^s.avoid&(1<<i) == 0 || now < o.pausedUntil || o.probing || o.running == 0 {
			continue
		}
		if pace := o.pace.load(); own == 0 || pace <= muchSlower*own {
			if now-r.compared < compareEvery || pace == 0 {
				return true
			}
			r.compared = now
		}
	}
	return false
}
