package client

import (
	"context"
	"log/slog"
	"sync/atomic"

	"larder/protocol"
)

// maxPushes bounds the pushes of one kind that are being carried out for a node. What comes beyond is dropped: GRANT and
// FENCE come again, and TASKS_PUSH says no more than that there is something to ask for.
const maxPushes = 64

// handlers counts the calls of Config.OnGrant and the like that are under way.
type handlers struct{ grants, fences, tasks, dropped atomic.Int64 }

// handle runs f for a push, unless too many of its kind are under way.
func (c *Client) handle(busy *atomic.Int64, f func()) {
	if busy.Add(1) > maxPushes {
		busy.Add(-1)
		c.handlers.dropped.Add(1)
		c.cfg.Logger.Warn("a push is dropped: too many of its kind are being carried out", slog.Int("limit", maxPushes))
		return
	}
	if !c.spawn(func() {
		defer busy.Add(-1)
		f()
	}) {
		busy.Add(-1)
	}
}

// pushedHome handles the pushes that a device's home gets. They hold nothing of the reader's memory.
func (c *Client) pushedHome(t protocol.Type, payload []byte) error {
	switch t {
	case protocol.TypeGrant:
		var p protocol.GrantPush
		if err := p.Decode(payload); err != nil {
			return err //nolint:wrapcheck // typed
		}
		if c.cfg.OnGrant != nil {
			c.handle(&c.handlers.grants, func() { c.cfg.OnGrant(p) })
		}
	case protocol.TypeFence:
		var p protocol.FencePush
		if err := p.Decode(payload); err != nil {
			return err //nolint:wrapcheck // typed
		}
		if c.cfg.OnFence != nil {
			c.handle(&c.handlers.fences, func() { c.cfg.OnFence(p) })
		}
	default:
		var p protocol.TasksPush
		if err := p.Decode(payload); err != nil {
			return err //nolint:wrapcheck // typed
		}
		if c.cfg.OnTasks != nil {
			c.handle(&c.handlers.tasks, func() { c.cfg.OnTasks(p) })
		}
	}
	return nil
}

// news tells Config.OnSession of connections, one call at a time. Those that are made during a call are one more call.
type sessionNews struct {
	due, fresh, telling bool // under Client.linkMu
}

// tellSession notes that a connection was made, in a session that is fresh or resumed.
func (c *Client) tellSession(fresh bool) {
	if c.cfg.OnSession == nil {
		return
	}
	c.linkMu.Lock()
	n := &c.news
	n.due, n.fresh = true, n.fresh || fresh
	start := !n.telling
	n.telling = true
	c.linkMu.Unlock()
	if !start {
		return
	}
	c.spawn(func() {
		for {
			c.linkMu.Lock()
			due, fresh := n.due, n.fresh
			n.due, n.fresh, n.telling = false, false, due
			c.linkMu.Unlock()
			if !due {
				return
			}
			c.cfg.OnSession(!fresh)
		}
	})
}

// adopt makes the regions of a device's home its own again, which it had in an earlier session: their entries stay. What has
// gone from there meanwhile may have been read until a moment ago: free pages rest for restMS first.
func (c *Client) adopt(s *session, owned []protocol.OwnedRegion, restMS uint64) {
	defer c.pool.adopts(-1)
	for i := range owned {
		o := &owned[i]
		if o.PageSize != c.cfg.PageSize {
			c.returnRegion(s, o.Region) // it is of no use to who asks for other pages
			continue
		}
		if err := c.addRegionAs(s, &o.Region, false, &inherited{o.Occupied, restMS}); err != nil {
			c.cfg.Logger.Warn("cannot take a region over", slog.Uint64("region_id", o.RegionID), slog.Any("error", err))
		}
	}
	c.pool.wakeAllocator()
}

// Attach is ATTACH: it tells the leader what device this session serves, see docs/TIERS.md. It needs Config.Home, unless
// the request has Expose.
func (c *Client) Attach(ctx context.Context, req protocol.AttachRequest) (protocol.AttachReply, error) {
	m := &attachMsg{req: req}
	err := c.inSession(ctx, protocol.TypeAttach, m)
	return m.rep, fail("attach", nil, err)
}

// Tasks is TASKS: it asks what is to be done on a device whose home this session is.
func (c *Client) Tasks(ctx context.Context, req protocol.TasksRequest) (protocol.TasksReply, error) {
	m := &tasksMsg{req: req}
	_, _, err := c.roundTrip(ctx, nil, protocol.TypeTasks, m, 0)
	return m.rep, fail("tasks", nil, err)
}

// TaskDone is TASK_DONE: it says how far a task has come. It reports false if the task is canceled.
func (c *Client) TaskDone(ctx context.Context, req protocol.TaskDoneRequest) (bool, error) {
	m := &taskDoneMsg{req: req}
	err := c.inSession(ctx, protocol.TypeTaskDone, m)
	return m.rep.Success, fail("task done", nil, err)
}

// Granted is GRANTED, the answer to a push that Config.OnGrant heard.
func (c *Client) Granted(ctx context.Context, req protocol.GrantedRequest) error {
	_, _, err := c.roundTrip(ctx, nil, protocol.TypeGranted, &grantedMsg{req: req}, 0)
	return fail("granted", nil, err)
}

// Fenced is FENCED, the answer to a push that Config.OnFence heard.
func (c *Client) Fenced(ctx context.Context, req protocol.FencedRequest) error {
	_, _, err := c.roundTrip(ctx, nil, protocol.TypeFenced, &fencedMsg{req: req}, 0)
	return fail("fenced", nil, err)
}

// Copy has entries copied, or moved, to a tier, a node or a device, by the homes there: tasks that TaskStatus follows.
// Exactly one of Tier, Node and Device of the request is set. At most protocol.MaxBatch keys.
func (c *Client) Copy(ctx context.Context, req protocol.CopyRequest) (protocol.CopyReply, error) {
	m := &copyMsg{req: req}
	err := c.inSession(ctx, protocol.TypeCopy, m)
	return m.rep, fail("copy", nil, err)
}

// TaskStatus says how far tasks have come: those with the ids, or all.
func (c *Client) TaskStatus(ctx context.Context, ids ...uint64) ([]protocol.TaskStatus, error) {
	m := &taskStatusMsg{req: protocol.TaskStatusRequest{Tasks: ids}}
	_, _, err := c.roundTrip(ctx, nil, protocol.TypeTaskStatus, m, 0)
	return m.rep.Tasks, fail("task status", nil, err)
}

// CancelTasks ends tasks, and says how far they had come. What has been copied stays.
func (c *Client) CancelTasks(ctx context.Context, ids ...uint64) ([]protocol.TaskStatus, error) {
	m := &taskStatusMsg{req: protocol.TaskStatusRequest{Tasks: ids}}
	err := c.inSession(ctx, protocol.TypeCancelTask, m)
	return m.rep.Tasks, fail("cancel tasks", nil, err)
}

// inSession makes a mutation in the present session.
func (c *Client) inSession(ctx context.Context, t protocol.Type, m mutator) error {
	s, err := c.session(ctx)
	if err != nil {
		return err
	}
	return c.mutate(ctx, s, t, m, 0)
}

type attachMsg struct {
	replyBuf
	req protocol.AttachRequest
	rep protocol.AttachReply
}

func (m *attachMsg) appendTo(b []byte) []byte     { return m.req.Append(b) }
func (m *attachMsg) mutation() *protocol.Mutation { return &m.req.Mutation }
func (*attachMsg) orphan() outcome                { return nothing }

func (m *attachMsg) decode(p *[]byte) (*protocol.Error, error) {
	return &m.rep.Error, m.rep.Decode(m.own(p))
}

type tasksMsg struct {
	replyBuf
	req protocol.TasksRequest
	rep protocol.TasksReply
}

func (m *tasksMsg) appendTo(b []byte) []byte { return m.req.Append(b) }

func (m *tasksMsg) decode(p *[]byte) (*protocol.Error, error) {
	return &m.rep.Error, m.rep.Decode(m.own(p))
}

type taskDoneMsg struct {
	req protocol.TaskDoneRequest
	successMsg
}

func (m *taskDoneMsg) appendTo(b []byte) []byte     { return m.req.Append(b) }
func (m *taskDoneMsg) mutation() *protocol.Mutation { return &m.req.Mutation }

type grantedMsg struct {
	req protocol.GrantedRequest
	successMsg
}

func (m *grantedMsg) appendTo(b []byte) []byte { return m.req.Append(b) }

type fencedMsg struct {
	req protocol.FencedRequest
	successMsg
}

func (m *fencedMsg) appendTo(b []byte) []byte { return m.req.Append(b) }

type copyMsg struct {
	replyBuf
	req protocol.CopyRequest
	rep protocol.CopyReply
}

func (m *copyMsg) appendTo(b []byte) []byte     { return m.req.Append(b) }
func (m *copyMsg) mutation() *protocol.Mutation { return &m.req.Mutation }
func (*copyMsg) orphan() outcome                { return nothing }

func (m *copyMsg) decode(p *[]byte) (*protocol.Error, error) {
	return &m.rep.Error, m.rep.Decode(m.own(p))
}

type taskStatusMsg struct {
	replyBuf
	req protocol.TaskStatusRequest
	rep protocol.TaskStatusReply
}

func (m *taskStatusMsg) appendTo(b []byte) []byte     { return m.req.Append(b) }
func (m *taskStatusMsg) mutation() *protocol.Mutation { return &m.req.Mutation }
func (*taskStatusMsg) orphan() outcome                { return nothing }

func (m *taskStatusMsg) decode(p *[]byte) (*protocol.Error, error) {
	return &m.rep.Error, m.rep.Decode(m.own(p))
}
