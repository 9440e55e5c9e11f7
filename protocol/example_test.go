package protocol_test

import (
	"bytes"
	"fmt"

	"larder/protocol"
)

// A client asks where a key's bytes are, and the server has moved.
func Example() {
	ask := protocol.LookupRequest{Keys: [][]byte{[]byte("block-7")}, LeaseMS: 500}
	buf, mark := protocol.BeginFrame(nil, protocol.TypeLookup, 1)
	wire := protocol.EndFrame(ask.AppendAs(buf, protocol.TypeLookup), mark)

	// The server, with a Reader on the other end of the connection:
	head, payload, err := protocol.NewReader(bytes.NewReader(wire)).Next()
	if err != nil {
		fmt.Println(err)
		return
	}
	var request protocol.LookupRequest
	if err := request.DecodeAs(payload, head.Type); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%s %s for %d ms\n", head.Type, request.Keys[0], request.LeaseMS)
	buf, mark = protocol.BeginReply(nil, head)
	wire = protocol.EndFrame(protocol.AppendErrorReply(buf, &protocol.Error{
		Code: protocol.CodeNotLeader, Message: "this member follows", Leader: "10.0.0.2:7400",
	}), mark)

	// The client again:
	_, payload, err = protocol.NewReader(bytes.NewReader(wire)).Next()
	if err != nil {
		fmt.Println(err)
		return
	}
	var reply protocol.LookupReply
	if err := reply.DecodeAs(payload, protocol.TypeLookup); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(reply.Err(), reply.Code.Retryable())
	// Output:
	// LOOKUP_KV block-7 for 500 ms
	// NOT_LEADER: this member follows (leader: 10.0.0.2:7400) true
}
