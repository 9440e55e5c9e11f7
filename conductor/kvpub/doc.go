// Package kvpub publishes KV events as vLLM does, so that whoever can follow an engine can follow this: a PUB socket with three
// parts in each message, topic, sequence (u64, big-endian) and payload, and a ROUTER socket that sends past batches again to
// those who have missed some. The sequence begins with 0 in every process.
//
// Nobody who publishes ever waits for a subscriber: one who reads too slowly loses batches, sees that by the sequence, and asks
// for them again, out of a ring of batches that is bounded in number and bytes.
package kvpub
