package client

import "larder/protocol"

// The exchanges of the simple calls. Those of reads and stores are in read.go and store.go.

type handshakeMsg protocol.HandshakeRequest

func (m *handshakeMsg) appendTo(b []byte) []byte { return (*protocol.HandshakeRequest)(m).Append(b) }

// replyBuf owns a reply's payload, for replies that alias it.
type replyBuf struct{ buf []byte }

// own takes the payload and leaves another buffer in its place.
func (r *replyBuf) own(p *[]byte) []byte {
	r.buf, *p = *p, r.buf[:0]
	return r.buf
}

// emptyMsg is HEARTBEAT, and whatever else has no fields.
type emptyMsg struct{ rep protocol.HeartbeatReply }

func (*emptyMsg) appendTo(b []byte) []byte { return protocol.AppendEmpty(b) }

func (m *emptyMsg) decode(p *[]byte) (*protocol.Error, error) { return &m.rep.Error, m.rep.Decode(*p) }

type cancelMsg struct {
	req protocol.CancelRequest
	rep protocol.CancelReply
}

func (m *cancelMsg) appendTo(b []byte) []byte { return m.req.Append(b) }

func (m *cancelMsg) decode(p *[]byte) (*protocol.Error, error) { return &m.rep.Error, m.rep.Decode(*p) }

type leasesMsg struct {
	req protocol.LeasesRequest
	rep protocol.LeasesReply
}

func (m *leasesMsg) appendTo(b []byte) []byte { return m.req.Append(b) }

func (m *leasesMsg) decode(p *[]byte) (*protocol.Error, error) { return &m.rep.Error, m.rep.Decode(*p) }

type freedAckMsg protocol.FreedAckRequest

func (m *freedAckMsg) appendTo(b []byte) []byte { return (*protocol.FreedAckRequest)(m).Append(b) }

// nothing is the orphan of mutations that own no pages: their outcome concerns nobody once the caller has gone.
func nothing([]byte, bool) {}

// successMsg is the reply that many mutations share.
type successMsg struct{ rep protocol.SuccessReply }

func (m *successMsg) decode(p *[]byte) (*protocol.Error, error) {
	return &m.rep.Error, m.rep.Decode(*p)
}
func (*successMsg) orphan() outcome { return nothing }

type revokeDoneMsg struct {
	req protocol.RevokeDoneRequest
	successMsg
}

func (m *revokeDoneMsg) appendTo(b []byte) []byte     { return m.req.Append(b) }
func (m *revokeDoneMsg) mutation() *protocol.Mutation { return &m.req.Mutation }

type returnMsg struct {
	req protocol.ReturnAllocRequest
	successMsg
}

func (m *returnMsg) appendTo(b []byte) []byte     { return m.req.Append(b) }
func (m *returnMsg) mutation() *protocol.Mutation { return &m.req.Mutation }

type goodbyeMsg struct {
	req protocol.GoodbyeRequest
	successMsg
}

func (m *goodbyeMsg) appendTo(b []byte) []byte     { return m.req.Append(b) }
func (m *goodbyeMsg) mutation() *protocol.Mutation { return &m.req.Mutation }

type clearMsg struct {
	req protocol.ClearRequest
	successMsg
}

func (m *clearMsg) appendTo(b []byte) []byte     { return m.req.Append(b) }
func (m *clearMsg) mutation() *protocol.Mutation { return &m.req.Mutation }

type allocMsg struct {
	replyBuf
	req  protocol.AllocRequest
	rep  protocol.AllocReply
	told outcome
	left bool // its outcome is found out in the background
}

func (m *allocMsg) appendTo(b []byte) []byte     { return m.req.Append(b) }
func (m *allocMsg) mutation() *protocol.Mutation { return &m.req.Mutation }
func (m *allocMsg) decode(p *[]byte) (*protocol.Error, error) {
	return &m.rep.Error, m.rep.Decode(m.own(p))
}

func (m *allocMsg) orphan() outcome {
	m.left = true
	return m.told
}

type keysMsg struct {
	replyBuf
	typ  protocol.Type
	req  protocol.KeysRequest
	rep  protocol.KeysReply
	told outcome
}

func (m *keysMsg) appendTo(b []byte) []byte     { return m.req.AppendAs(b, m.typ) }
func (m *keysMsg) mutation() *protocol.Mutation { return &m.req.Mutation }
func (m *keysMsg) orphan() outcome              { return m.told }

func (m *keysMsg) decode(p *[]byte) (*protocol.Error, error) {
	return &m.rep.Error, m.rep.DecodeAs(m.own(p), m.typ)
}

type matchMsg struct {
	replyBuf
	req protocol.PrefixMatchRequest
	rep protocol.PrefixMatchReply
}

func (m *matchMsg) appendTo(b []byte) []byte { return m.req.Append(b) }
func (m *matchMsg) decode(p *[]byte) (*protocol.Error, error) {
	return &m.rep.Error, m.rep.Decode(m.own(p))
}

type listMsg struct {
	replyBuf
	req protocol.ListKeysRequest
	rep protocol.ListKeysReply
}

func (m *listMsg) appendTo(b []byte) []byte { return m.req.Append(b) }
func (m *listMsg) decode(p *[]byte) (*protocol.Error, error) {
	return &m.rep.Error, m.rep.Decode(m.own(p))
}

type blocksMsg struct {
	req protocol.ListBlocksRequest
	rep protocol.ListBlocksReply
}

func (m *blocksMsg) appendTo(b []byte) []byte { return m.req.Append(b) }
func (m *blocksMsg) decode(p *[]byte) (*protocol.Error, error) {
	return &m.rep.Error, m.rep.Decode(*p)
}

type usageMsg struct{ rep protocol.GetUsageReply }

func (*usageMsg) appendTo(b []byte) []byte                    { return protocol.AppendEmpty(b) }
func (m *usageMsg) decode(p *[]byte) (*protocol.Error, error) { return &m.rep.Error, m.rep.Decode(*p) }

type statsMsg struct{ rep protocol.GetStatsReply }

func (*statsMsg) appendTo(b []byte) []byte                    { return protocol.AppendEmpty(b) }
func (m *statsMsg) decode(p *[]byte) (*protocol.Error, error) { return &m.rep.Error, m.rep.Decode(*p) }
