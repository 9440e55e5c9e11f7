// Package p2p matches sends with receives. A [Port] is one process's end of one group's point-to-point messages; with each
// peer it has a lane, which is a ring in each direction. What comes out of the rings is as MPI has it: messages carry a tag, and
// a receive names a sender and a tag or takes any; messages of one sender that match the same receive do not overtake each other;
// a message of no bytes is a message.
//
// Nothing blocks and nothing runs by itself: [Port.Poll] moves what can move, whoever waits calls it. Bytes are copied twice,
// into the ring and out of it, straight from the sender's and into the receiver's buffer, as long as the receive is there before the
// message.
//
// # Frames
//
// A lane carries frames: a header of 32 bytes in the host's byte order (both transports between hosts and within one join
// machines of one architecture; the magic of a header tells when not), a body, and padding to 64 bytes.
//
//	kind   meaning                                       tag  len                      id       body
//	eager  a whole message                               yes  of the message           0        the message
//	ask    a message that waits for its receive          yes  of the message           its own
//	grant  its receive is there                          0    as much as it has room   ask's
//	data   the next part of a message that was granted   0    of the part              ask's    the part
//	credit room for eager messages that is free again    0    bytes                    0
//
// Messages of up to 64 KiB go eagerly. Those that come before their receive are kept, in up to 1 MiB for each peer: the sender counts
// what it has sent, and gets the room back as receives are matched. When it has none left it asks, as it does for longer
// messages; so memory is bounded, nothing that can be received waits behind what cannot, and processes that all send before they
// receive do not deadlock. An ask costs some 100 bytes where it is kept, and a sender has no more than 65536 of them unanswered with
// one peer: later sends wait in their order, as references to their buffers.
//
// # What a finished send means
//
// That its buffer may be used again: an eager one has been copied into the ring, a longer one has been received up to what is
// still in the ring. It does not mean that somebody has received it; an eager message to a process that then dies is lost
// without a word.
//
// # Failures
//
// A frame that makes no sense ends the lane that it came by: its operations fail with a [*DownError] that names the rank and holds
// a [*ProtocolError]. So does the death of a peer; messages of it that have arrived whole can still be received. No
// failure of one lane touches another.
package p2p
