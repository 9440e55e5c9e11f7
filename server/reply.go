package server

import (
	"larder/meta"
	"larder/protocol"
)

// deliver answers a request whose command has been applied, and everybody who asked the same.
func (m *Master) deliver(r *request, result []byte, now int64) {
	if r.told != nil && resultCode(result) == protocol.CodeOK {
		m.pushCleared(r.told)
	}
	if r.done != nil {
		r.done(resultCode(result), result)
		return
	}
	if r.client == nil {
		return
	}
	m.answer(waiter{r.client, r.h}, r, result, r.bytes, now)
	for _, w := range r.also {
		m.answer(w, r, result, 0, now)
	}
}

func (m *Master) answer(w waiter, r *request, result []byte, bytes int, now int64) {
	b := w.client.peer.Lock()
	b = m.appendResult(b, r, w, result, now)
	w.client.peer.Unlock(b)
	w.client.answered(bytes)
	m.box.add(w.client)
	m.n.observeLatency(w.h.Type, now-r.arrived)
}

// deliverPlanned answers a REQUEST_ALLOC that needed no command.
func (m *Master) deliverPlanned(r *request, now int64) {
	for i := -1; i < len(r.also); i++ {
		w, bytes := waiter{r.client, r.h}, r.bytes
		if i >= 0 {
			w, bytes = r.also[i], 0
		}
		reply := protocol.AllocReply{Success: true, Found: r.plan.Found}
		if r.plan.Kind == meta.PlanRefuse {
			reply = protocol.AllocReply{Error: protocol.Error{Code: r.plan.Code, Message: r.plan.Message}}
			m.n.Errors[w.h.Type].Add(1)
		}
		w.client.frame(w.h, reply.Append)
		w.client.answered(bytes)
		m.box.add(w.client)
		m.n.observeLatency(w.h.Type, now-r.arrived)
	}
}

// fail answers a request, and everybody who asked the same, with an error.
func (m *Master) fail(r *request, f *protocol.Error, box *outbox) {
	if r.done != nil {
		r.done(f.Code, nil)
		return
	}
	if r.client == nil {
		return
	}
	for i := -1; i < len(r.also); i++ {
		w, bytes := waiter{r.client, r.h}, r.bytes
		if i >= 0 {
			w, bytes = r.also[i], 0
		}
		m.n.Errors[w.h.Type].Add(1)
		w.client.frameError(w.h, f)
		w.client.answered(bytes)
		box.add(w.client)
	}
}

// codeTexts say what to do about the codes that the state machine answers with.
var codeTexts = map[protocol.Code]string{
	protocol.CodeBadRequest:      "a field is out of range (kv_length: 1 to 4294967295), or does not fit the region",
	protocol.CodeTooOld:          "the seq lies below acked: its answer is forgotten",
	protocol.CodeCanceled:        "the seq was canceled: use a new one",
	protocol.CodeSessionExpired:  "the session has ended: open a new one with HANDSHAKE",
	protocol.CodeStaleEpoch:      "the region is no longer yours under this epoch: drop it and allocate another",
	protocol.CodeStaleGeneration: "the device may have lost its bytes: drop its regions and allocate others",
	protocol.CodeOutOfRegion:     "the location leaves its region",
	protocol.CodeOverlap:         "the location overlaps another entry",
	protocol.CodeMisaligned:      "the offset is not a multiple of the region's page size",
	protocol.CodeKeyTooLong:      "the key is over 1024 bytes",
	protocol.CodeLimit:           "a limit of the instance, the session, the tenant or the pool is reached",
	protocol.CodePinned:          "the entry is pinned",
	protocol.CodeNotFound:        "there is no such key or region",
	protocol.CodeNotOwner:        "the region belongs to another session",
	protocol.CodeRevoking:        "the region is being taken away: use another",
	protocol.CodeDuplicate:       "another process has just opened a session under this instance id: choose another, or retry",
	protocol.CodeTooManyUnacked:  "too many seqs are unanswered: wait for some, and raise acked",
	protocol.CodeBusy:            "too many CLEARs, or an earlier change of the same thing, are in progress: retry",
	protocol.CodePending:         "not decided in time: retry with the same seq",
}

// appendResult appends the whole frame that answers w with the result of r's command.
func (m *Master) appendResult(b []byte, r *request, w waiter, result []byte, now int64) []byte {
	code, rest, err := meta.DecodeCode(result)
	if err != nil {
		code = protocol.CodeInternal
	}
	if code == protocol.CodeCanceled && w.h.Type == protocol.TypeTaskDone {
		return appendSuccess(b, w.h, false) // the task is
	}
	if code != protocol.CodeOK {
		return m.appendFailure(b, w.h, code)
	}
	h := w.h
	b, mark := protocol.BeginReply(b, h)
	switch h.Type {
	case protocol.TypeRegister, protocol.TypeBatchRegister:
		b = m.appendRegister(b, h.Type, rest, w.client.native())
	case protocol.TypeRequestAlloc:
		b = m.appendAlloc(b, rest, w.client.native(), now)
	case protocol.TypeDelete, protocol.TypeBatchDelete:
		b = m.appendDelete(b, h.Type, rest, w.client, now)
	case protocol.TypePin, protocol.TypeUnpin, protocol.TypeBatchPin, protocol.TypeBatchUnpin:
		b = appendCodes(b, h.Type, rest, w.client.native())
	case protocol.TypeCancel:
		b = appendCanceled(b, rest)
	case protocol.TypePutName, protocol.TypeDeleteName:
		b = m.appendName(b, h.Type, rest)
	case protocol.TypeHandshake:
		b = m.opened(r, rest).Append(b)
	default:
		reply := protocol.SuccessReply{Success: true}
		if h.Type == protocol.TypeReturnAlloc || h.Type == protocol.TypeRevokeDone {
			reply.FreeAfterMS = m.graceMS(now)
		}
		b = reply.Append(b)
	}
	return protocol.EndFrame(b, mark)
}

// appendFailure appends a frame for a result that is an error, in the form that the type's reply has.
func (m *Master) appendFailure(b []byte, h protocol.Header, code protocol.Code) []byte {
	m.n.Errors[h.Type].Add(1)
	f := protocol.Error{Code: code, Message: codeTexts[code]}
	if text := nameFaults[code]; text != "" && (h.Type == protocol.TypePutName || h.Type == protocol.TypeDeleteName) {
		f.Message = text
	}
	if f.Message == "" {
		f.Message = "the request was refused"
	}
	b, mark := protocol.BeginReply(b, h)
	switch h.Type {
	case protocol.TypeReturnAlloc:
		b = (&protocol.SuccessReply{Error: f}).Append(b)
	case protocol.TypeRequestAlloc:
		b = (&protocol.AllocReply{Error: f}).Append(b)
	default:
		b = protocol.AppendErrorReply(b, &f)
	}
	return protocol.EndFrame(b, mark)
}

// appendRegister appends the reply to REGISTER_KV or its batch. Clients without a session are told no more than Maru
// tells them.
func (m *Master) appendRegister(b []byte, t protocol.Type, rest []byte, native bool) []byte {
	reply := protocol.RegisterReply{Success: true}
	it := meta.DecodeRegister(rest)
	reply.Results = make([]protocol.RegisterResult, 0, it.Len())
	var x meta.RegisterResult
	for it.Next(&x) {
		r := protocol.RegisterResult{IsNew: x.New, Code: x.Code}
		if native && !x.New && x.Code == 0 {
			r.Existing, r.ExistingKey = x.Existing.Wire(), x.Key
		}
		reply.Results = append(reply.Results, r)
	}
	if it.Err() != nil {
		reply = protocol.RegisterReply{Error: protocol.Error{Code: protocol.CodeInternal, Message: "a result is corrupt"}}
	} else if !t.Batch() && len(reply.Results) == 1 && reply.Results[0].Code != 0 {
		code := reply.Results[0].Code
		m.n.Errors[t].Add(1)
		reply.Success = false
		reply.Error = protocol.Error{Code: code, Message: codeTexts[code]}
	}
	return reply.AppendAs(b, t)
}

// appendAlloc appends the reply to REQUEST_ALLOC.
func (m *Master) appendAlloc(b, rest []byte, native bool, now int64) []byte {
	a, err := meta.DecodeAlloc(rest)
	if err != nil {
		f := protocol.Error{Code: protocol.CodeInternal, Message: "a result is corrupt"}
		return (&protocol.AllocReply{Error: f}).Append(b)
	}
	reply := protocol.AllocReply{Success: true, Phase: uint64(a.Phase), Occupied: a.Occupied}
	if a.Given {
		reply.Region = a.Location.Wire().Region
		if native {
			reply.Device = m.wireDeviceOf(a.Device)
		}
	}
	for i := range a.Keys {
		reply.Found = append(reply.Found, a.FoundKey(int(i)))
	}
	if len(a.Evicted) > 0 {
		reply.Evicted = m.wirePages(a.Evicted, now)
	}
	return reply.Append(b)
}

// wireDeviceOf describes a device, nil if it is gone. It is called with and without state held, as replies from memory
// and from Apply are, so it looks into a copy.
func (m *Master) wireDeviceOf(id meta.DeviceID) *protocol.Device {
	m.devMu.Lock()
	defer m.devMu.Unlock()
	return m.devices[id]
}

// wirePages converts freed pages, with how long each must not be reused.
func (m *Master) wirePages(pages []meta.Page, now int64) []protocol.Page {
	out := make([]protocol.Page, len(pages))
	m.leases.mu.Lock()
	for i := range pages {
		p := &pages[i]
		out[i] = protocol.Page{
			Key: p.Key, RegionID: uint64(p.Region), KVOffset: p.Offset, KVLength: p.Length,
			FreeAfterMS: m.leases.freeAfter(p.Region, p.Offset, now),
		}
	}
	m.leases.mu.Unlock()
	return out
}

// appendDelete appends the reply to DELETE_KV or its batch. Only pages of the client's own session are its to reuse;
// those of others are pushed to their owners.
func (m *Master) appendDelete(b []byte, t protocol.Type, rest []byte, c *Client, now int64) []byte {
	d, err := meta.DecodeDelete(rest)
	if err != nil {
		f := protocol.Error{Code: protocol.CodeInternal, Message: "a result is corrupt"}
		return (&protocol.KeysReply{Error: f}).AppendAs(b, t)
	}
	var reply protocol.KeysReply
	for _, code := range d.Codes {
		reply.Results = append(reply.Results, code == 0)
	}
	var own []meta.Page
	for _, p := range d.Freed {
		if p.Owner != 0 && p.Owner == c.session() {
			own = append(own, p)
		}
	}
	if len(own) > 0 {
		reply.Freed = m.wirePages(own, now)
		if !t.Batch() {
			reply.FreeAfterMS = reply.Freed[0].FreeAfterMS
		}
	}
	if !t.Batch() && c.native() && len(d.Codes) == 1 && d.Codes[0] != 0 {
		reply.Error = protocol.Error{Code: d.Codes[0], Message: codeTexts[d.Codes[0]]}
	}
	return reply.AppendAs(b, t)
}

// appendCodes appends the reply to PIN_KV, UNPIN_KV or their batches.
func appendCodes(b []byte, t protocol.Type, rest []byte, native bool) []byte {
	codes, err := meta.DecodeCodes(rest)
	if err != nil {
		f := protocol.Error{Code: protocol.CodeInternal, Message: "a result is corrupt"}
		return (&protocol.KeysReply{Error: f}).AppendAs(b, t)
	}
	var reply protocol.KeysReply
	for _, code := range codes {
		reply.Results = append(reply.Results, code == 0)
	}
	if !t.Batch() && native && len(codes) == 1 && codes[0] != 0 {
		reply.Error = protocol.Error{Code: codes[0], Message: codeTexts[codes[0]]}
	}
	return reply.AppendAs(b, t)
}

// appendCanceled appends the reply to CANCEL.
func appendCanceled(b, rest []byte) []byte {
	codes, err := meta.DecodeCodes(rest)
	if err != nil {
		return protocol.AppendErrorReply(b, &protocol.Error{Code: protocol.CodeInternal, Message: "a result is corrupt"})
	}
	reply := protocol.CancelReply{Success: true}
	for _, applied := range codes {
		reply.Applied = append(reply.Applied, applied != 0)
	}
	return reply.Append(b)
}
