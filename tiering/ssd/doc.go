// Package ssd is the store behind an SSD device: a logical address space of a fixed size, kept as a log. Whoever owns
// an extent of it writes, reads and discards that; the store knows neither keys nor owners.
//
// # Files
//
// A directory holds a superblock, a lock file, and segments of one size, all of them allocated when the store is made.
// The superblock says which segments exist: for each the sequence of its first group, which names it, and, once it is
// sealed, that of its last and where its footer lies. All numbers are little-endian, all checksums CRC32C, and a random
// salt, which no client knows, is part of each header.
//
//	superblock  two copies, at 0 and at a fixed stride, each with a sequence number. An update makes one durable
//	            before it writes the other. 128 bytes of header (magic, version, crc, sequence, salt, pool, device,
//	            generation, logical size, segment size, number of segments, floor, next, uuid), and 24 for each segment
//	segment     groups, one behind the other, in blocks of 4096 bytes; then, if it is sealed, a footer
//	group       a header block, and the payloads of its records, each in whole blocks
//	header      the same 2048 bytes twice, so that one bad bit or sector costs nothing: salt, crc, version, flags,
//	            number of records, the segment's first group, the own sequence, blocks; then 32 bytes a record
//	record      offset u64, length u64, stored u32, crc u32 of the payload, block of the segment u32,
//	            kind u32: data, compressed data, or discard, which has no payload
//	footer      magic, crc, number of records, salt, first and last group; then all records of the segment
//
// # What is found after a crash
//
// One group at a time is under way. The log is read in the order of its groups, and later records replace earlier ones.
// Groups of a segment follow each other in sequence: a hole says that durable ones are lost. What they replaced or
// discarded is not known, so everything older is dropped (the floor), and the generation is 0 from then on, until the
// store is given another: content that somebody was told is durable is gone. The end of the newest segment is where no
// header follows, which costs nothing that was acknowledged; a record of the very last group whose payload is not whole
// counts as a discard, or, if compaction was copying it, as not written. What rots in that group's header, both copies
// of it, before the next is written cannot be told from a write that never landed; elsewhere rot is a miss at most.
//
// # Compaction
//
// The segment with the least live bytes is emptied when few are free: its live pieces are copied to the end of the
// log, and its discards logged anew as long as an older segment exists, one for each stretch that is empty. A reserve
// of segments is never usable, so that there is always one with something to gain. Two of them are compaction's alone:
// writes wait for it, until it finds nothing to gain.
//
// # Faults
//
// A write or flush that fails stops the store: nobody knows what has reached the disk, and a second flush would say
// that all is well. Reads that fail or do not match their CRC are [ErrDamaged], a miss.
//
// # Memory
//
// The index takes 32 bytes a piece in leaves of 4 KiB. Copies of payloads lie in pools of a bounded size: one for
// writes, one for reads, and one of 12 MiB for compaction, which must not wait for those that wait for it.
package ssd
