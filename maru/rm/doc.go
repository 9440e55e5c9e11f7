// Package rm speaks the protocol of Maru's resource manager, version 2, as its clients do: they ask it where a region lies
// before they map it, and Maru's own metadata server has its regions from it. Regions come from whatever the listener was
// given as [Regions]; the package itself knows addresses of clients, frames and what was answered lately, and nothing of
// where regions come from.
//
// # Frames
//
// All integers are little-endian. A frame is a header of 12 bytes, magic u32, version u16, type u16 and payload length u32,
// and the payload. A connection carries one request at a time, and its reply. There is no greeting: a peer that connects and
// closes has asked whether somebody listens.
//
// # Identity
//
// A client says in its requests who it is, as HOST:PID. The first one that is named on a connection holds for all that
// follow: another one ends the connection. What is asked for twice under one name and one request id, by whichever
// connection, is done once (replies.go).
//
// # Regions of those who left
//
// The end of a connection frees nothing, and neither does silence: a client that holds two connections and closes one is
// alive, and its regions with it. Whose regions may be taken from them when the pool is full is up to the [Regions]. In a
// server those that were given by Maru's REQUEST_ALLOC are, by eviction, once their owner is gone; those that were given by
// ALLOC are FREE's alone, since whoever asks for them is a metadata server, whose clients are not seen from here.
package rm
