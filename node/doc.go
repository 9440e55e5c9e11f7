// Package node contributes devices to a pool: DRAM of its process, SSD stores, CXL memory. Masters know what lies on
// them; clients of the same host map them, and others read and write them by transfer. docs/TIERS.md has the contract.
//
// # A device's life
//
// Each device has a session of its own, which is its home. A life of it begins with taking the medium, opening the session
// and ATTACH, and ends with the session, with the node, or when the medium fails.
//
//	medium   a session that was not resumed                             generation that the leader wants changed
//	dram     new memory under a new uuid: clients may still write to    the same
//	         the old
//	ssd      handles to write are retired, and it is attached again     its content is dropped
//	cxl      the same                                                   its header is written
//
// Everything that is told to a leader is told to the next one again.
//
// # Who writes
//
// The whole device is registered for reading, once. Each region that its owner does not map is registered for writing, for
// its owner alone, under an epoch, when the leader asks for that. A fence of an epoch retires what was registered under it
// and before, is answered when nothing lands there any more, and is remembered: nothing is registered under such an epoch
// again. What the leader asks for twice is done once.
//
// # What is free
//
// A disk keeps what nobody wants until it is told. The home's client says which pages of its own regions are free, and writes
// nothing there until they have been discarded. That is done under the region's grant: whatever takes the grant back waits for
// it, as it does for writes, and what is asked for under another epoch is refused.
//
// # Tiering work
//
// A worker asks for tasks and copies their entries to the device, in chunks, each under leases that the leader grants with the
// answer. The log knows how far each task has come, so that nothing here is kept: whoever is the home next goes on.
//
// # Failures
//
// A medium that fails stops its device, not the node: nobody knows what of it is sound. Everything else is tried again.
package node
