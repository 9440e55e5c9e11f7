// Package cxl owns pool devices: the spans of memory that hold the pool's bytes. It formats and opens them, maps
// them, copies in and out of them, and issues the cache and persistence barriers that each medium needs. It never
// knows who owns a region of a device, nor what lies in it.
//
// # Device layout
//
// The first [HeaderSpan] bytes of a device belong to this package; data starts there.
//
//	0      header slot A, 256 bytes
//	4096   header slot B, 256 bytes
//	8192   live line, 64 bytes: generation u64, incarnation u64
//
// A header is versioned, little-endian, and closed by a CRC32C. An update writes slot A, makes it durable, then
// writes slot B, each with the next sequence number, so a torn write leaves the older slot valid; and once an update
// has returned, the loss of either slot cannot bring back what was before it. The live line is what mapped readers
// poll: one aligned 64-bit load says the current generation. It is zero while a generation is being changed, and zero
// is never a generation, so a reader that compares can only err toward a miss. A claiming [Open] rewrites it from the
// header, except on a device whose bytes may be lost, where it stays zero until [Device.SetGeneration].
//
// # Media and barriers
//
//	kind        volatile      what [Mapping.Persist] does, and why that is enough
//	device-DAX  by its parent CLWB of each line and SFENCE: stores reach the memory's persistence domain (none if volatile)
//	fsdax file  no            the same if the kernel gave MAP_SYNC, which promises that block maps are already durable;
//	                          else msync
//	file        no            msync of the pages: the bytes live in the page cache until then
//	tmpfs file  yes           none: nothing of it survives a restart of the host
//	memfd       yes           none: nothing of it survives the processes that hold it
//
// A device-DAX is persistent when the kernel shows an NVDIMM (nd) parent, volatile otherwise; [Options.Medium]
// overrides this for memory with a power supply of its own. Volatile media are bound to the host's boot id: opened
// under another boot of the same host they report [Device.Lost].
//
// # Coherence
//
// With [CoherenceHardware] every host that maps the device sees every other's stores; what remains is a fence after
// non-temporal stores. With [CoherenceNone] the caches of one host do not snoop another's: a writer calls
// [Mapping.Publish] before it tells anyone, a reader calls [Mapping.Refresh] before each copy, and an owner calls
// [Mapping.Surrender] before a page goes to someone else. The three cost nothing but a fence on coherent devices, so
// callers issue them always. On amd64 they are CLWB, CLFLUSHOPT (CLFLUSH where the CPU lacks those) with SFENCE and
// MFENCE; on arm64 DC CVAC and DC CIVAC with DSB, to the point of coherency. Elsewhere devices without coherence are
// refused.
//
// # Faults
//
// A file truncated under a mapping, and memory that the machine reports as failed, raise SIGBUS. [CopyIn], [CopyOut],
// the barriers and [Device.Generation] turn that into [ErrTruncated] or a zero generation; code that touches
// [Mapping.Bytes] itself does so within [Guard]. A file that was truncated and grew again reads as zeros without a
// fault: cutting into the header changes the generation to zero, cutting behind it is for checksums to find. A memfd
// made by [Create] is sealed against both.
//
// # Claims
//
// One server owns a device at a time. On one host an exclusive flock says so, and ends with the process. Between hosts
// a claim record in the header does; it is taken over when its holder is proven dead, and otherwise only by force.
// Clients open without a claim.
package cxl
