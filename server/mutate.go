package server

import (
	"time"

	"larder/meta"
	"larder/protocol"
)

// request is a command on its way through the log.
type request struct {
	client    *Client // nil: the Master's own, or an operator's
	h         protocol.Header
	key       seqKey // zero seq: not protected against repetition
	acked     uint64
	cmd       []byte                 // encoded with its header; empty for an alloc that is not planned yet
	alloc     *protocol.AllocRequest // for REQUEST_ALLOC
	keys      []byte                 // what alloc's keys alias
	also      []waiter               // the same request again, over the same or another connection
	done      func(code protocol.Code, result []byte)
	handshake *handshake // for HANDSHAKE
	told      *cleared   // for CLEAR: what is told once it is applied
	arrived   int64
	lateAt    int64 // of a REGISTER_KV of Maru's: if it is applied later, that is undone; 0 = never
	undone    bool  // it was
	bytes     int   // counted against the client

	// For REQUEST_ALLOC.
	deadline int64
	wakeAt   int64 // when to plan again at the latest
	plan     meta.AllocPlan
	silent   bool // in its group without a command
	replan   bool // its plan was out of date
	tries    int
	waits    bool // has been parked
}

// waiter is where an answer goes.
type waiter struct {
	client *Client
	h      protocol.Header
}

// maruOwner is the name that pins of clients without a session are kept under.
const maruOwner = "maru"

// mutate serves what changes the state: it decodes and encodes the command and queues it.
func (m *Master) mutate(c *Client, sc *scratch, h protocol.Header, payload, out []byte, now int64) []byte {
	var (
		mut protocol.Mutation
		cmd meta.Command
		err error
	)
	session := c.session()
	var told *cleared // whom a CLEAR is to be told to
	switch h.Type {
	case protocol.TypeRequestAlloc:
		return m.requestAlloc(c, h, payload, out, now)
	case protocol.TypeRegister, protocol.TypeBatchRegister:
		err = m.decodeRegister(c, &sc.register, h.Type, payload, now)
		mut, cmd = sc.register.Mutation, &meta.Register{Context: sc.register.Context, Entries: sc.register.Entries}
	case protocol.TypeDelete, protocol.TypeBatchDelete:
		cmd, err = m.deleteCommand(sc, h.Type, payload)
		mut = sc.keys.Mutation
	case protocol.TypePin, protocol.TypeUnpin, protocol.TypeBatchPin, protocol.TypeBatchUnpin:
		if err = sc.keys.DecodeAs(payload, h.Type); err == nil {
			mut = sc.keys.Mutation
			cmd, err = m.pinCommand(c, sc, h.Type, now)
		}
	case protocol.TypeReturnAlloc:
		var req protocol.ReturnAllocRequest
		err = req.Decode(payload)
		mut, cmd = req.Mutation, m.returnCommand(&req)
		if session == 0 && err == nil {
			session = m.implicitSession(req.InstanceID)
			mut = protocol.Mutation{}
		}
	case protocol.TypeCancel:
		err = sc.cancel.Decode(payload)
		mut, cmd = sc.cancel.Mutation, &meta.Cancel{Seqs: sc.cancel.Seqs}
	case protocol.TypeClear:
		var req protocol.ClearRequest
		if err = req.Decode(payload); err == nil {
			mut = req.Mutation
			cmd, told, err = clearCommand(&req, c.tenantName())
		}
	case protocol.TypeGoodbye:
		var req protocol.GoodbyeRequest
		err = req.Decode(payload)
		mut, cmd = req.Mutation, &meta.CloseSession{ID: session, Fenced: true}
	case protocol.TypeRevokeDone:
		var req protocol.RevokeDoneRequest
		err = req.Decode(payload)
		mut, cmd = req.Mutation, &meta.RevokeDone{Region: meta.RegionID(req.RegionID), Epoch: req.Epoch}
	case protocol.TypeTaskDone:
		mut, cmd, err = m.taskDone(c, payload)
	case protocol.TypePutName, protocol.TypeDeleteName:
		mut, cmd, err = m.nameCommand(h.Type, payload)
	default:
		return m.refuse(out, h, &protocol.Error{
			Code: protocol.CodeUnsupported, Message: "this server does not know the message type " + h.Type.String(),
		})
	}
	if err != nil {
		return m.refuseErr(out, h, err)
	}
	if session == 0 && needsSession(h.Type) {
		return m.refuse(out, h, &errNeedsSession)
	}
	if session == 0 {
		mut = protocol.Mutation{}
	}
	r := &request{client: c, h: h, key: seqKey{session, mut.Seq}, acked: mut.Acked, arrived: now, bytes: len(payload), told: told}
	head := meta.Header{Session: session, Seq: mut.Seq, Acked: mut.Acked}
	r.cmd = meta.AppendCommand(make([]byte, 0, len(payload)+64), head, cmd)
	return m.submit(r, out)
}

// deleteCommand reads a DELETE, of which a location alone needs a cluster version that has them.
func (m *Master) deleteCommand(sc *scratch, t protocol.Type, payload []byte) (meta.Command, error) {
	err := sc.keys.DecodeAs(payload, t)
	if err == nil && sc.keys.RegionID != 0 {
		err = m.needTiers()
	}
	return &meta.Delete{Keys: sc.keys.Keys, Region: meta.RegionID(sc.keys.RegionID), Offset: sc.keys.KVOffset}, err
}

// decodeRegister reads a REGISTER, whose copies need a cluster version that has them. Without it no replicas are
// remembered either, which nobody was promised.
func (m *Master) decodeRegister(c *Client, req *protocol.RegisterRequest, t protocol.Type, payload []byte, now int64) error {
	if err := req.DecodeAs(payload, t); err != nil {
		return err
	}
	copies, replicas := copiesIn(req.Entries)
	if !copies && !replicas {
		return nil
	}
	err := m.needTiers()
	if err != nil && !copies {
		for i := range req.Entries {
			req.Entries[i].Replicas = 0
		}
		return nil
	}
	if err == nil {
		m.copying(c, req.Entries, now)
	}
	return err
}

// copiesIn reports whether one of the entries is a copy, and whether one asks for any.
func copiesIn(entries []protocol.RegisterEntry) (copies, replicas bool) {
	for i := range entries {
		copies = copies || entries[i].Copy
		replicas = replicas || entries[i].Replicas != 0
	}
	return copies, replicas
}

// needsSession reports whether a type makes no sense without a session. CLEAR reaches a session's tenant, and without a
// session would be an operator's, who come by the admin.
func needsSession(t protocol.Type) bool {
	switch t {
	case protocol.TypeClear, protocol.TypeCancel, protocol.TypeGoodbye, protocol.TypeRevokeDone, protocol.TypeTaskDone,
		protocol.TypePutName, protocol.TypeDeleteName:
		return true
	default:
		return false
	}
}

// returnCommand makes the command for RETURN_ALLOC.
func (m *Master) returnCommand(req *protocol.ReturnAllocRequest) *meta.ReturnRegion {
	cmd := &meta.ReturnRegion{Region: meta.RegionID(req.RegionID), Epoch: req.Epoch}
	m.state.RLock()
	defer m.state.RUnlock()
	if m.machine.Settings().Version < meta.VersionTenants {
		cmd.Epoch = 0
	}
	return cmd
}

// pinCommand makes the command for the PIN and UNPIN in sc.keys.
func (m *Master) pinCommand(c *Client, sc *scratch, t protocol.Type, now int64) (meta.Command, error) {
	req := &sc.keys
	p := &meta.Pin{
		Undo:  t == protocol.TypeUnpin || t == protocol.TypeBatchUnpin,
		Class: meta.ClassHard, Owner: req.Pin.Owner, Keys: req.Keys,
	}
	switch req.Pin.Kind {
	case "", "session":
		if req.Pin.Owner != "" || req.Pin.TTLMS != 0 {
			return nil, &protocol.Error{
				Code: protocol.CodeBadRequest, Message: "a session's pin has no owner and no ttl_ms: say kind durable or soft",
			}
		}
		if !c.native() {
			p.Owner, p.Strict = maruOwner, t == protocol.TypeBatchPin
		}
	case "durable":
		if p.Owner == "" {
			return nil, &protocol.Error{Code: protocol.CodeBadRequest, Message: "a durable pin needs an owner's name"}
		}
	case "soft":
		if p.Class = meta.ClassSoft; req.Pin.TTLMS == 0 && !p.Undo {
			return nil, &protocol.Error{Code: protocol.CodeBadRequest, Message: "a soft pin needs a ttl_ms"}
		}
	default:
		return nil, &protocol.Error{
			Code: protocol.CodeBadRequest, Message: "the kind of a pin is session, durable or soft",
		}
	}
	if req.Pin.TTLMS != 0 {
		m.state.RLock()
		m.mu.Lock()
		p.Until = m.logTime(now) + min(req.Pin.TTLMS, 1<<50)
		m.mu.Unlock()
		m.state.RUnlock()
	}
	return p, nil
}

// sessionOf returns the open session of an instance, 0 if there is none.
func (m *Master) sessionOf(instance string) meta.SessionID {
	m.state.RLock()
	defer m.state.RUnlock()
	id, _ := m.machine.SessionOf(instance)
	return id
}

// implicitSession returns the session of an instance that never made a HANDSHAKE, 0 if there is none: what belongs to a
// session with a secret is not to be given back by those who only know its name.
func (m *Master) implicitSession(instance string) meta.SessionID {
	m.state.RLock()
	defer m.state.RUnlock()
	id, _ := m.machine.SessionOf(instance)
	if info, ok := m.machine.Session(id); !ok || info.TTLMS != 0 {
		return 0
	}
	return id
}

// submit answers a request from memory if its seq has been applied, joins it to the same one if that is on its way,
// or queues it.
func (m *Master) submit(r *request, out []byte) []byte {
	if r.key.seq != 0 {
		m.state.RLock()
		result, st := m.machine.Remembered(r.key.session, r.key.seq)
		if st == meta.SeqAhead && r.key.seq-r.acked < protocol.Window {
			st = meta.SeqUnknown // the request itself moves the window on when it is applied
		}
		fault := seqFault(st)
		if st == meta.SeqAnswered {
			out = m.appendResult(out, r, waiter{r.client, r.h}, result, m.now())
		}
		m.state.RUnlock()
		if st == meta.SeqAnswered {
			return out
		}
		if fault != nil {
			return m.refuse(out, r.h, fault)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if fault := m.enqueue(r); fault != nil {
		return m.refuse(out, r.h, fault)
	}
	return out
}

// seqFault is the error that a seq's state stands for, nil if it may be applied or was.
func seqFault(st meta.SeqState) *protocol.Error {
	switch st {
	case meta.SeqCanceled:
		return &protocol.Error{Code: protocol.CodeCanceled, Message: "the seq was canceled: use a new one"}
	case meta.SeqTooOld:
		return &protocol.Error{Code: protocol.CodeTooOld, Message: "the seq lies below acked: its answer is forgotten"}
	case meta.SeqAhead:
		return &protocol.Error{
			Code: protocol.CodeTooManyUnacked, RetryAfterMS: uint64(busyRetry / time.Millisecond),
			Message: "too many seqs are unanswered: wait for some, and raise acked",
		}
	default:
		return nil
	}
}

// enqueue queues a request, or joins it to the same one. The caller holds mu.
func (m *Master) enqueue(r *request) *protocol.Error {
	if !m.leading {
		f := m.notLeader()
		return &f
	}
	if r.key.seq != 0 {
		if first := m.inflight[r.key]; first != nil {
			// The same request over again: both connections get the answer, the later one in place of an earlier try.
			for _, w := range first.also {
				if w.client == r.client && w.h.Sequence == r.h.Sequence {
					return nil
				}
			}
			if len(first.also) >= maxRetries {
				return &protocol.Error{
					Code: protocol.CodeBusy, RetryAfterMS: uint64(busyRetry / time.Millisecond),
					Message: "the same seq is on its way several times already: wait for its answer",
				}
			}
			r.client.took(0)
			first.also = append(first.also, waiter{r.client, r.h})
			return nil
		}
	}
	if m.queued+r.bytes > maxQueuedBytes {
		return &protocol.Error{
			Code: protocol.CodeBusy, RetryAfterMS: uint64(busyRetry / time.Millisecond),
			Message: "too much waits to be written: retry",
		}
	}
	if r.key.seq != 0 {
		m.inflight[r.key] = r
	}
	if r.client != nil {
		r.client.took(r.bytes)
	}
	m.queued += r.bytes
	m.queue = append(m.queue, r)
	if len(m.groups) == 0 && len(m.queue) == 1 {
		m.cfg.Wake()
	}
	return nil
}

// maxRetries bounds the repetitions of one seq that wait for its answer.
const maxRetries = 16

// Do queues a command of the Master's own or of an operator's. done is called once, from the goroutine that applies or
// the one that learns that leadership is lost, with CodeUnavailable or CodeNotLeader if the outcome is unknown. It
// must not block.
func (m *Master) Do(cmd meta.Command, done func(code protocol.Code, result []byte)) error {
	if k := cmd.Kind(); m.barred() && k != meta.KindIncarnation && k != meta.KindSettings {
		f := m.notLeader()
		return &f
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.do(cmd, done)
}

// do is Do for a caller that holds mu.
func (m *Master) do(cmd meta.Command, done func(code protocol.Code, result []byte)) error {
	r := &request{cmd: meta.AppendCommand(nil, meta.Header{}, cmd), arrived: m.now(), done: done}
	if c, ok := cmd.(*meta.Clear); ok {
		r.told = clearedBy(c)
	}
	if fault := m.enqueue(r); fault != nil {
		return fault
	}
	return nil
}
