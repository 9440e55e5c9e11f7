// Package link joins the processes of a job. A [Node] is a process's end: it has one connection to each other process, by
// which each learns of the other's death, and builds channels between them: a [Mesh] for the members of one view of a
// group, and pairs for messages from point to point. Whatever the transport, a channel is memory that is polled: a pair of
// rings to each member, and a room with those of the same host, as package shm has them. What waits for any of them sleeps
// on the node's one bell.
//
// # Control connections
//
// Every two processes keep one. The one with the higher rank dials, at the abstract Unix socket of the other, which
// processes of its network namespace reach, or else at its TCP addresses. Each says who it is: version, job, token, rank,
// incarnation, whom it looks for, host, transports. Who does not fit is told why, with a [RefusedError].
//
// A connection's end is the process's: the kernel closes the sockets of a process that is killed at once, and TCP finds
// within some three seconds that a host has vanished (keep-alive probes, TCP_USER_TIMEOUT). Then the lanes to it fail,
// when what had come was read, rooms do not wait for it any more, the bell is rung, and Config.Down is called. A process
// that is stopped is not down: [Node.Ask] tells that it does not answer, and leases say what is to become of it. Lanes
// have connections of their own, and what happens to those concerns the lane only.
//
// Incarnations are random, so which of two is the newer only the store can say: [Node.Connect] names the right one, and
// another is let go of and refused from then on. Somebody who calls while another incarnation of his rank is connected is
// refused for now.
//
// # Who shares memory
//
// Two processes do if they have the same Config.Host, which tells kernel and network namespace by default, if they have
// reached each other by Unix socket, and if each has mapped the other's bell, which was passed along with the greetings.
// All members of a mesh tell all others with whom they share memory, and divide the members into hosts by what all have
// said, so that all come to the same hosts, even if some pair cannot map what all others can.
//
// # Building
//
// Each end of a mesh or pair draws a number for its attempt, which every message and every connection about it names; so
// nothing that is late is taken for a part of another attempt, epoch or incarnation.
//
//	1 offer  to all: the digest of what must be agreed on (members, incarnations, layout, sizes), and whom I share memory
//	         with. One that comes before this process has asked for the mesh is kept, up to maxEarly of a peer
//	2 share  when all have offered: the ring that I write, as a memfd; my outbox for those of my host; where the engine
//	         reaches the ring that it is to write. Lanes by socket are dialed, by the higher rank
//	3 done   when lane and room are ready here; the mesh is there when all have said so
//	  leave  I have given up, and why, or have closed my end
//
// Who has given up may come again: those that had not begun to share wait for its next offer, the others begin anew. An offer
// names the one that it answers, if there is any, so that two that begin anew at once do not miss each other for ever.
//
// Rings between processes of a host are made along with the mesh, though a room may make them needless: they cost some
// system calls and addresses, and no memory until they are written to; made later they would make the first operation that
// needs them wait, and could fail.
//
// # Lanes
//
//	shm          each process has mapped both rings
//	unix, tcp    each has its own ends of rings in its own memory; goroutines move what is in them over a connection for each
//	             lane. Little that is written goes out at once, in the writer's own thread
//	rdma         as before, but moved by WRITEs of the transfer engine into the peer's registered ring. A notification after
//	             them says how far the ring is filled, and how much of the other was read: bytes of a WRITE that is done
//	             land before it. Each lane opens the peer's segment by itself: its notifications wait for no other lane's
//	engine       as rdma, by whatever transport the two engines have: to run without NICs
//
// The first that both processes have and that leads there is taken, in the order of the one with the higher rank.
//
// # Peers that have gone mad
//
// Frames, questions, greetings, early offers, pairs that nobody asked for: all are bounded, and a peer that exceeds a
// bound or sends what cannot be loses its connection, with [ErrFrame]. What it writes into memory is checked by package
// shm, what it notifies by the lane that it is about, which fails. Strangers can keep maxGreeting connections open for
// greetTimeout.
package link
