package protocol

import "io"

func (m *HandshakeRequest) Append(b []byte) []byte          { return b }
func (m *HandshakeRequest) Decode(b []byte) error           { return nil }
func (m *HandshakeReply) Append(b []byte) []byte            { return b }
func (m *HandshakeReply) Decode(b []byte) error             { return nil }
func (m *AllocRequest) Append(b []byte) []byte              { return b }
func (m *AllocRequest) Decode(b []byte) error               { return nil }
func (m *AllocReply) Append(b []byte) []byte                { return b }
func (m *AllocReply) Decode(b []byte) error                 { return nil }
func (m *ReturnAllocRequest) Append(b []byte) []byte        { return b }
func (m *ReturnAllocRequest) Decode(b []byte) error         { return nil }
func (m *SuccessReply) Append(b []byte) []byte              { return b }
func (m *SuccessReply) Decode(b []byte) error               { return nil }
func (m *ListAllocationsRequest) Append(b []byte) []byte    { return b }
func (m *ListAllocationsRequest) Decode(b []byte) error     { return nil }
func (m *ListAllocationsReply) Append(b []byte) []byte      { return b }
func (m *ListAllocationsReply) Decode(b []byte) error       { return nil }
func (m *LeasesRequest) Append(b []byte) []byte             { return b }
func (m *LeasesRequest) Decode(b []byte) error              { return nil }
func (m *LeasesReply) Append(b []byte) []byte               { return b }
func (m *LeasesReply) Decode(b []byte) error                { return nil }
func (m *CancelRequest) Append(b []byte) []byte             { return b }
func (m *CancelRequest) Decode(b []byte) error              { return nil }
func (m *CancelReply) Append(b []byte) []byte               { return b }
func (m *CancelReply) Decode(b []byte) error                { return nil }
func (m *PrefixMatchRequest) Append(b []byte) []byte        { return b }
func (m *PrefixMatchRequest) Decode(b []byte) error         { return nil }
func (m *PrefixMatchReply) Append(b []byte) []byte          { return b }
func (m *PrefixMatchReply) Decode(b []byte) error           { return nil }
func (m *ClearRequest) Append(b []byte) []byte              { return b }
func (m *ClearRequest) Decode(b []byte) error               { return nil }
func (m *ListKeysRequest) Append(b []byte) []byte           { return b }
func (m *ListKeysRequest) Decode(b []byte) error            { return nil }
func (m *ListKeysReply) Append(b []byte) []byte             { return b }
func (m *ListKeysReply) Decode(b []byte) error              { return nil }
func (m *RevokePush) Append(b []byte) []byte                { return b }
func (m *RevokePush) Decode(b []byte) error                 { return nil }
func (m *FreedPush) Append(b []byte) []byte                 { return b }
func (m *FreedPush) Decode(b []byte) error                  { return nil }
func (m *RevokeDoneRequest) Append(b []byte) []byte         { return b }
func (m *RevokeDoneRequest) Decode(b []byte) error          { return nil }
func (m *FreedAckRequest) Append(b []byte) []byte           { return b }
func (m *FreedAckRequest) Decode(b []byte) error            { return nil }
func (m *HeartbeatReply) Append(b []byte) []byte            { return b }
func (m *HeartbeatReply) Decode(b []byte) error             { return nil }
func (m *ReportStatsRequest) Append(b []byte) []byte        { return b }
func (m *ReportStatsRequest) Decode(b []byte) error         { return nil }
func (m *GetStatsReply) Append(b []byte) []byte             { return b }
func (m *GetStatsReply) Decode(b []byte) error              { return nil }
func (m *GetUsageReply) Append(b []byte) []byte             { return b }
func (m *GetUsageReply) Decode(b []byte) error              { return nil }
func (m *MutationRequest) Append(b []byte) []byte           { return b }
func (m *MutationRequest) Decode(b []byte) error            { return nil }
func (m *RegisterRequest) AppendAs(b []byte, t Type) []byte { return b }
func (m *RegisterRequest) DecodeAs(b []byte, t Type) error  { return nil }
func (m *RegisterReply) AppendAs(b []byte, t Type) []byte   { return b }
func (m *RegisterReply) DecodeAs(b []byte, t Type) error    { return nil }
func (m *LookupRequest) AppendAs(b []byte, t Type) []byte   { return b }
func (m *LookupRequest) DecodeAs(b []byte, t Type) error    { return nil }
func (m *LookupReply) AppendAs(b []byte, t Type) []byte     { return b }
func (m *LookupReply) DecodeAs(b []byte, t Type) error      { return nil }
func (m *KeysRequest) AppendAs(b []byte, t Type) []byte     { return b }
func (m *KeysRequest) DecodeAs(b []byte, t Type) error      { return nil }
func (m *KeysReply) AppendAs(b []byte, t Type) []byte       { return b }
func (m *KeysReply) DecodeAs(b []byte, t Type) error        { return nil }

type MutationRequest struct{ Mutation }

const PackedSize = 88

func AppendErrorReply(b []byte, e *Error) []byte          { return b }
func AppendEmpty(b []byte) []byte                         { return append(b, 0x80) }
func AppendLookupResult(b []byte, r *LookupResult) []byte { return b }
func BeginLookupEntries(b []byte) (_ []byte, mark int)    { return b, 0 }
func EndLookupEntries(b []byte, mark, n int) []byte       { return b }
func AppendLookupHead(b []byte, n int) []byte             { return b }
func AppendPackedHead(b []byte, n int) []byte             { return b }
func BeginPacked(b []byte) (_ []byte, mark int)           { return b, 0 }
func EndPacked(b []byte, mark int) []byte                 { return b }
func AppendPacked(b []byte, r *LookupResult) []byte       { return b }
func EndFrameCompressed(buf []byte, mark int) []byte      { return buf }
func Decompress(dst, payload []byte) ([]byte, error)      { return dst, nil }

type Reader struct{}

func NewReader(r io.Reader) *Reader             { return nil }
func (r *Reader) Next() (Header, []byte, error) { return Header{}, nil, nil }
func (r *Reader) Buffered() bool                { return false }
