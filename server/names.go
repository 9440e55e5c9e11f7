package server

import (
	"fmt"
	"slices"
	"time"

	"larder/meta"
	"larder/protocol"
)

// Limits of reading names.
const (
	// maxNamesBytes of keys and values are in one reply; a single name is always less.
	maxNamesBytes = 4 << 20
	// maxSessionWatches of one session wait at a time, and maxNameWatches of all.
	maxSessionWatches = 16
	maxNameWatches    = 16384
	// maxWatchTime is the longest that a watch waits: connections that are gone without a word are so noticed.
	maxWatchTime = time.Minute
)

// nameWatch is a WATCH_NAMES that waits. Its client counts it as a request on its way.
type nameWatch struct {
	client  *Client
	session *session
	h       protocol.Header
	prefix  string
	after   uint64
	until   int64
}

// nameWatches are those that wait, the oldest first. Guarded by Master.mu.
type nameWatches struct {
	list []*nameWatch
	told uint64 // the revision up to which they have been told
}

// namespace is what changes can be looked for in once for all who watch it.
type namespace struct{ tenant, prefix string }

func (w *nameWatch) namespace() namespace { return namespace{w.session.tenant, w.prefix} }

// nameCommand reads a PUT_NAME or DELETE_NAME.
func (m *Master) nameCommand(t protocol.Type, payload []byte) (protocol.Mutation, meta.Command, error) {
	if err := m.needTiers(); err != nil {
		return protocol.Mutation{}, nil, err
	}
	if t == protocol.TypeDeleteName {
		var req protocol.DeleteNameRequest
		err := req.Decode(payload)
		return req.Mutation, &meta.DeleteName{Key: req.Key, Check: req.Check, Revision: req.Revision}, err
	}
	var req protocol.PutNameRequest
	err := req.Decode(payload)
	return req.Mutation, &meta.PutName{
		Key: req.Key, Value: req.Value, Check: req.Check, Revision: req.Revision, Lease: req.Lease,
	}, err
}

// nameFaults say what to do about the codes that a change of a name may be answered with.
var nameFaults = map[protocol.Code]string{
	protocol.CodeConflict: "the name has another revision by now, which modified says (0: there is none): read it, and decide again",
	protocol.CodeNotFound: "there is no such name",
	protocol.CodeBadRequest: fmt.Sprintf("the key of a name has 1 to %d bytes, its value at most %d", protocol.MaxNameKeyBytes,
		protocol.MaxNameValueBytes),
	protocol.CodeLimit: fmt.Sprintf("too many names: a session holds at most %d, a tenant has at most %d and %d MiB of keys and values, "+
		"all together twice that", meta.MaxSessionNames, meta.MaxTenantNames, meta.MaxTenantNamesBytes>>20),
}

// appendName appends the reply to PUT_NAME or DELETE_NAME.
func (m *Master) appendName(b []byte, t protocol.Type, rest []byte) []byte {
	r, err := meta.DecodeName(rest)
	if err != nil {
		r.Code = protocol.CodeInternal
	}
	reply := protocol.NameReply{Success: r.Code == 0, Created: r.Created, Modified: r.Modified}
	if r.Code != 0 {
		m.n.Errors[t].Add(1)
		reply.Error = protocol.Error{Code: r.Code, Message: nameFaults[r.Code]}
	}
	return reply.Append(b)
}

// listNames serves LIST_NAMES.
func (m *Master) listNames(c *Client, h protocol.Header, payload, out []byte) []byte {
	var req protocol.ListNamesRequest
	err := req.Decode(payload)
	if err == nil {
		err = m.needTiers()
	}
	if err != nil {
		return m.refuseErr(out, h, err)
	}
	m.state.RLock()
	reply := m.namesOf(c.tenantName(), &req)
	m.state.RUnlock()
	b, mark := protocol.BeginReply(out, h)
	return protocol.EndFrame(reply.Append(b), mark)
}

// namesOf makes a page of names. The caller holds state.
func (m *Master) namesOf(tenant string, req *protocol.ListNamesRequest) protocol.ListNamesReply {
	reply := protocol.ListNamesReply{Revision: m.machine.NamesRevision()}
	id := m.machine.Tenant(tenant)
	if len(req.Key) > 0 {
		if n, ok := m.machine.Name(id, req.Key); ok {
			reply.Names = append(reply.Names, wireName(&n))
		}
		return reply
	}
	limit := protocol.MaxNames
	if req.Limit > 0 {
		limit = int(min(req.Limit, protocol.MaxNames))
	}
	size := 0
	m.machine.EachName(id, string(req.Prefix), string(req.After), func(n meta.NameInfo) bool {
		size += len(n.Key) + len(n.Value)
		reply.More = len(reply.Names) == limit || size > maxNamesBytes
		if !reply.More {
			reply.Names = append(reply.Names, wireName(&n))
		}
		return !reply.More
	})
	return reply
}

// wireName converts a name to the protocol's form, which shares the value.
func wireName(n *meta.NameInfo) protocol.NameInfo {
	return protocol.NameInfo{
		Key: []byte(n.Key), Value: n.Value, Created: n.Created, Modified: n.Modified, Session: uint64(n.Session),
	}
}

// watchNames serves WATCH_NAMES: at once if there is something to tell, or else when there is.
func (m *Master) watchNames(c *Client, h protocol.Header, payload, out []byte, now int64) []byte {
	var req protocol.WatchNamesRequest
	err := req.Decode(payload)
	if err == nil {
		err = m.needTiers()
	}
	if err != nil {
		return m.refuseErr(out, h, err)
	}
	s := c.sess.Load()
	if s == nil {
		return m.refuse(out, h, &errNeedsSession)
	}
	wait := min(time.Duration(min(req.TimeoutMS, 1<<30))*time.Millisecond, maxWatchTime)
	w := &nameWatch{client: c, session: s, h: h, prefix: string(req.Prefix), after: req.After, until: now + int64(wait)}
	m.state.RLock() // until the watch is in the list: no change comes in between
	defer m.state.RUnlock()
	reply := m.changesFor(w)
	if len(reply.Changes) > 0 || reply.Compacted || wait == 0 {
		b, mark := protocol.BeginReply(out, h)
		return protocol.EndFrame(reply.Append(b), mark)
	}
	if f := m.addWatch(w); f != nil {
		return m.refuse(out, h, f)
	}
	return out
}

// addWatch has a watch wait. The caller holds state.
func (m *Master) addWatch(w *nameWatch) *protocol.Error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case !m.leading:
		f := m.notLeader()
		return &f
	case w.session.watches >= maxSessionWatches:
		return &protocol.Error{
			Code:    protocol.CodeLimit,
			Message: fmt.Sprintf("%d watches of the session wait already: watch a common prefix", maxSessionWatches),
		}
	case len(m.watches.list) >= maxNameWatches:
		return &protocol.Error{
			Code: protocol.CodeBusy, RetryAfterMS: uint64(time.Second / time.Millisecond),
			Message: "too many watches wait: retry, or list the names from time to time",
		}
	}
	if len(m.watches.list) == 0 {
		m.watches.told = m.machine.NamesRevision()
	}
	w.session.watches++
	w.client.took(0)
	m.watches.list = append(m.watches.list, w)
	m.n.NameWatches.Add(1)
	return nil
}

// changesFor collects what a watch has not been told yet. The caller holds state.
func (m *Master) changesFor(w *nameWatch) protocol.WatchNamesReply {
	reply := protocol.WatchNamesReply{Revision: m.machine.NamesRevision()}
	size := 0
	id := m.machine.Tenant(w.session.tenant)
	reply.Compacted = !m.machine.NamesSince(id, w.prefix, w.after, func(e *meta.NameEvent) bool {
		size += len(e.Key) + len(e.Value)
		if n := len(reply.Changes); n == protocol.MaxNames || size > maxNamesBytes {
			reply.Revision = reply.Changes[n-1].Modified
			return false
		}
		change := wireName(&e.NameInfo)
		change.Deleted = e.Deleted
		reply.Changes = append(reply.Changes, change)
		return true
	})
	return reply
}

// end answers a watch that is taken off the list. The caller holds mu.
func (m *Master) endWatch(w *nameWatch, box *outbox, body func(b []byte) []byte) {
	w.session.watches--
	m.n.NameWatches.Add(-1)
	w.client.frame(w.h, body)
	w.client.answered(0)
	box.add(w.client)
}

// failWatch is endWatch with an error.
func (m *Master) failWatch(w *nameWatch, box *outbox, f *protocol.Error) {
	m.n.Errors[w.h.Type].Add(1)
	m.endWatch(w, box, func(b []byte) []byte { return protocol.AppendErrorReply(b, f) })
}

// tellWatches answers the watches for which there is something new. What it says has been committed, whoever leads now; that
// nothing else has happened is not said. It is called after each log entry that this leader applies.
func (m *Master) tellWatches() {
	if m.n.NameWatches.Load() == 0 {
		return
	}
	m.state.RLock()
	defer m.state.RUnlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	x := &m.watches
	if m.machine.NamesRevision() == x.told {
		return
	}
	changed := map[namespace]bool{}
	x.list = slices.DeleteFunc(x.list, func(w *nameWatch) bool {
		in := w.namespace()
		news, known := changed[in]
		if !known {
			news = !m.machine.NamesSince(m.machine.Tenant(in.tenant), in.prefix, x.told, func(*meta.NameEvent) bool {
				news = true
				return false
			}) || news
			changed[in] = news
		}
		if !news {
			return false
		}
		reply := m.changesFor(w)
		if len(reply.Changes) == 0 && !reply.Compacted {
			return false // it came after that
		}
		m.endWatch(w, &m.box, reply.Append)
		return true
	})
	x.told = m.machine.NamesRevision()
}

// tickWatches answers the watches whose time is over, and those of sessions that have ended. The caller holds state for
// reading, and mu.
func (m *Master) tickWatches(now int64, box *outbox) {
	m.watches.list = slices.DeleteFunc(m.watches.list, func(w *nameWatch) bool {
		switch {
		case w.session.ended.Load():
			m.failWatch(w, box, &errSessionEnded)
		case now >= w.until:
			reply := m.changesFor(w)
			m.endWatch(w, box, reply.Append)
		default:
			return false
		}
		return true
	})
}

// dropWatches forgets those of a connection that is gone. The caller holds mu.
func (m *Master) dropWatches(c *Client) {
	m.watches.list = slices.DeleteFunc(m.watches.list, func(w *nameWatch) bool {
		if w.client != c {
			return false
		}
		w.session.watches--
		m.n.NameWatches.Add(-1)
		return true
	})
}

// failWatches ends all of them with the term. The caller holds mu.
func (m *Master) failWatches(box *outbox, f *protocol.Error) {
	for _, w := range m.watches.list {
		m.failWatch(w, box, f)
	}
	m.watches.list = nil
}

// NameStatus is one name, with its key and value as they are.
type NameStatus struct {
	Key, Value        []byte
	Created, Modified uint64
	Session           uint64 // that it ends with; 0 = none
	Instance          string // of that session
}

// Names lists names of a tenant ("" = the default one) whose keys have a prefix and are greater than after, in the order of
// their keys. more says that there are others.
func (s *Server) Names(tenant string, prefix, after []byte, limit int) (names []NameStatus, more bool) {
	m := s.master
	m.state.RLock()
	defer m.state.RUnlock()
	page := m.namesOf(tenant, &protocol.ListNamesRequest{
		Prefix: prefix, After: after, Limit: uint64(max(limit, 1)),
	})
	for i := range page.Names {
		n := &page.Names[i]
		x := NameStatus{Key: n.Key, Value: n.Value, Created: n.Created, Modified: n.Modified, Session: n.Session}
		if info, ok := m.machine.Session(meta.SessionID(n.Session)); ok {
			x.Instance = info.Instance
		}
		names = append(names, x)
	}
	return names, page.More
}
