// Package zmtp speaks the ZeroMQ Message Transport Protocol 3.1, with the mechanism NULL, as libzmq does: SUB, DEALER and REQ
// connect, PUB and ROUTER listen. It moves messages, lists of parts, and knows nothing of what they say.
//
// Everything a peer can make this side keep or wait for has a bound: see [Config]. A peer that says nothing, sends what
// cannot be, or reads slowly costs its own connection and no other. There is no queue behind a socket and no reconnection:
// a [Conn] is one connection, and whoever uses it sees it end; a [Publisher] alone has a bounded queue for each subscriber.
//
// The protocol is described in https://rfc.zeromq.org/spec/37/; what libzmq 4.3 does beside it is taken from there, too.
// Tests talk to libzmq where Python has its binding.
package zmtp
