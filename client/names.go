package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"larder/protocol"
)

const (
	// watchTime is how long a watch waits at the master before it is asked again: a client that stops watching leaves it
	// there for so long.
	watchTime = 10 * time.Second
	// watchPause is how long to pause where watches cannot wait at the master.
	watchPause = 200 * time.Millisecond
)

// ErrConflict says that a name has another revision than the call asked for: somebody else was first.
var ErrConflict = errors.New("the name has another revision")

// Name is a name of the pool: a small value that processes of a tenant tell each other. Names are kept by the masters as safely
// as entries are. A leased one ends with the session of who has set it last.
type Name struct {
	Key      string
	Value    []byte
	Created  uint64 // the revision that made it; another one if it was removed and made again
	Modified uint64 // the one that changed it last; revisions of all names of the pool grow from change to change
	Session  uint64 // that it ends with; 0 = none
}

// NameChange is what has become of a name. Of one that was removed there is no Value, and Modified is when that was known.
type NameChange struct {
	Name

	Deleted bool
}

// NameOption changes what PutName and DeleteName do.
type NameOption func(o *nameOptions)

type nameOptions struct {
	check, lease bool
	revision     uint64
}

// IfRevision has the call fail with ErrConflict unless the name's Modified is revision; 0 stands for a name that must not be there.
func IfRevision(revision uint64) NameOption {
	return func(o *nameOptions) { o.check, o.revision = true, revision }
}

// IfAbsent is IfRevision(0).
func IfAbsent() NameOption { return IfRevision(0) }

// Leased has the name end with the client's present session: when the client is closed, or the masters have not heard of it for
// Config.TTL. See KeepName for names that outlive that.
func Leased() NameOption { return func(o *nameOptions) { o.lease = true } }

// PutName sets a name, of at most protocol.MaxNameKeyBytes, to a value of at most protocol.MaxNameValueBytes, and returns it with
// its new revision. Without IfRevision the last one who sets it has it.
//
// With ErrConflict the result is the name as it is by now, without its value: zero revisions if it is not there. With ErrTimeout
// the name may be set, now or soon, or not: read it.
func (c *Client) PutName(ctx context.Context, key string, value []byte, opts ...NameOption) (Name, error) {
	s, err := c.session(ctx)
	if err != nil {
		return Name{}, fail("put name", []byte(key), err)
	}
	n, err := c.putName(ctx, s, key, value, opts...)
	return n, fail("put name", []byte(key), err)
}

func (c *Client) putName(ctx context.Context, s *session, key string, value []byte, opts ...NameOption) (Name, error) {
	o, err := checkName(key, opts)
	if err != nil {
		return Name{}, err
	}
	if len(value) > protocol.MaxNameValueBytes {
		return Name{}, fmt.Errorf("%w: a value of %d bytes, of at most %d", ErrConfig, len(value), protocol.MaxNameValueBytes)
	}
	m := &putNameMsg{req: protocol.PutNameRequest{
		Key: []byte(key), Value: value, Check: o.check, Revision: o.revision, Lease: o.lease,
	}}
	err = c.mutate(ctx, s, protocol.TypePutName, m, 0)
	n := Name{Key: key, Created: m.rep.Created, Modified: m.rep.Modified}
	if err == nil {
		n.Value = value
		if o.lease {
			n.Session = s.id
		}
	}
	return n, err
}

// DeleteName removes a name, whoever has set it. The error is ErrNotFound if it is not there, and ErrConflict as with PutName.
func (c *Client) DeleteName(ctx context.Context, key string, opts ...NameOption) error {
	s, err := c.session(ctx)
	if err == nil {
		err = c.deleteName(ctx, s, key, opts...)
	}
	return fail("delete name", []byte(key), err)
}

func (c *Client) deleteName(ctx context.Context, s *session, key string, opts ...NameOption) error {
	o, err := checkName(key, opts)
	if err != nil {
		return err
	}
	m := &deleteNameMsg{req: protocol.DeleteNameRequest{Key: []byte(key), Check: o.check, Revision: o.revision}}
	return c.mutate(ctx, s, protocol.TypeDeleteName, m, 0)
}

func checkName(key string, opts []NameOption) (o nameOptions, err error) {
	for _, opt := range opts {
		opt(&o)
	}
	if key == "" || len(key) > protocol.MaxNameKeyBytes {
		err = fmt.Errorf("%w: a name has 1 to %d bytes, not %d", ErrConfig, protocol.MaxNameKeyBytes, len(key))
	}
	return o, err
}

// GetName reads a name. It sees every change that was acknowledged before the call. The error is ErrNotFound if it is not there.
func (c *Client) GetName(ctx context.Context, key string) (Name, error) {
	if _, err := checkName(key, nil); err != nil {
		return Name{}, fail("get name", []byte(key), err)
	}
	names, _, _, err := c.namesPage(ctx, &protocol.ListNamesRequest{Key: []byte(key)})
	if err == nil && len(names) == 0 {
		err = ErrNotFound
	}
	if err != nil {
		return Name{}, fail("get name", []byte(key), err)
	}
	return names[0], nil
}

// ListNames reads the names that begin with prefix, in the order of their keys. Of names that change meanwhile it may see the
// earlier state or the later one; the revision is one that all of it is at least as new as, to compare with a Name's Modified.
func (c *Client) ListNames(ctx context.Context, prefix string) ([]Name, uint64, error) {
	names, revision, err := c.listNames(ctx, prefix)
	return names, revision, fail("list names", []byte(prefix), err)
}

func (c *Client) listNames(ctx context.Context, prefix string) (names []Name, revision uint64, err error) {
	req := &protocol.ListNamesRequest{Prefix: []byte(prefix)}
	for page := 0; ; page++ {
		part, at, more, err := c.namesPage(ctx, req)
		if err != nil {
			return nil, 0, err
		}
		if page == 0 {
			revision = at
		}
		names = append(names, part...)
		if !more || len(part) == 0 {
			return names, revision, nil
		}
		last := part[len(part)-1].Key
		if last <= string(req.After) {
			return nil, 0, refused(protocol.CodeInternal, "the master's pages of names do not go on")
		}
		req.After = []byte(last)
	}
}

func (c *Client) namesPage(ctx context.Context, req *protocol.ListNamesRequest) (names []Name, revision uint64, more bool, err error) {
	if c.life.Err() != nil {
		return nil, 0, false, ErrClosed
	}
	m := &listNamesMsg{req: req}
	if _, _, err := c.roundTrip(ctx, nil, protocol.TypeListNames, m, 0); err != nil {
		return nil, 0, false, err
	}
	for i := range m.rep.Names {
		names = append(names, copyName(&m.rep.Names[i]))
	}
	return names, m.rep.Revision, m.rep.More, nil
}

// copyName copies a name out of a reply.
func copyName(n *protocol.NameInfo) Name {
	return Name{
		Key: string(n.Key), Value: append([]byte(nil), n.Value...), Created: n.Created, Modified: n.Modified, Session: n.Session,
	}
}

// WatchNames tells of the names that begin with prefix until ctx is over, the client is closed, or fn returns an error, which it
// returns. The first call of fn has those that are there, perhaps none; every other what has changed since, in the order in which
// it did. Where the masters remember no more of that, after a restart or when it was much, names are compared with what was told
// before, and fn is told of the differences: it may so miss a value that was replaced by another soon, but never the last one,
// nor that a name is another one now (its Created has changed).
//
// fn is called by this goroutine; what it is given is its own. A watch costs a request each watchTime, and may be one of sixteen
// of a client before they cost more.
func (c *Client) WatchNames(ctx context.Context, prefix string, fn func(changes []NameChange) error) error {
	w := &nameWatch{c: c, prefix: prefix, known: make(map[string]knownName)}
	for told := false; ; {
		changes, err := w.step(ctx)
		if err != nil {
			return fail("watch names", []byte(prefix), err)
		}
		if len(changes) > 0 || w.listed && !told {
			told = true
			if err := fn(changes); err != nil {
				return err
			}
		}
	}
}

// nameWatch is a WatchNames.
type nameWatch struct {
	c      *Client
	prefix string
	known  map[string]knownName // what fn was told of
	listed bool                 // known is complete up to at
	at     uint64
	polls  bool // the master has no place for another one that waits
}

// knownName are the revisions of a name.
type knownName struct{ created, modified uint64 }

// step is next, past failures that pass.
func (w *nameWatch) step(ctx context.Context) ([]NameChange, error) {
	changes, err := w.next(ctx)
	switch {
	case err == nil:
		return changes, nil
	case w.c.life.Err() != nil:
		return nil, ErrClosed
	case ctx.Err() != nil:
		return nil, ctx.Err() //nolint:wrapcheck // callers wrap
	case w.listed && protocol.CodeOf(err) == protocol.CodeLimit:
		w.polls = true
		return nil, nil
	case passing(err): // an attempt has taken its time
		return nil, nil
	}
	return nil, err
}

// passing reports whether a call failed for a reason that the pool gets over.
func passing(err error) bool {
	return Retryable(err) || protocol.CodeOf(err).Retryable() || protocol.CodeOf(err) == protocol.CodeSessionExpired ||
		errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errConnLost) || errors.Is(err, errCallTimeout)
}

// next returns what has changed, which may be nothing.
func (w *nameWatch) next(ctx context.Context) ([]NameChange, error) {
	if !w.listed {
		return w.list(ctx)
	}
	wait := watchTime
	if w.polls {
		wait = 0
		if err := sleep(ctx, watchPause); err != nil {
			return nil, err
		}
	}
	m := &watchNamesMsg{req: protocol.WatchNamesRequest{
		Prefix: []byte(w.prefix), After: w.at, TimeoutMS: uint64(wait / time.Millisecond),
	}}
	if _, _, err := w.c.roundTrip(ctx, nil, protocol.TypeWatchNames, m, wait.Nanoseconds()); err != nil {
		return nil, err
	}
	if m.rep.Compacted {
		w.listed = false
		return nil, nil
	}
	w.at = m.rep.Revision
	var changes []NameChange
	for i := range m.rep.Changes {
		x := NameChange{copyName(&m.rep.Changes[i]), m.rep.Changes[i].Deleted}
		if x.Modified > w.known[x.Key].modified { // a list of several pages may have been ahead
			changes = append(changes, x)
			w.note(&x)
		}
	}
	return changes, nil
}

func (w *nameWatch) note(x *NameChange) {
	if x.Deleted {
		delete(w.known, x.Key)
	} else {
		w.known[x.Key] = knownName{x.Created, x.Modified}
	}
}

// list finds out by comparison what has changed.
func (w *nameWatch) list(ctx context.Context) ([]NameChange, error) {
	names, revision, err := w.c.listNames(ctx, w.prefix)
	if err != nil {
		return nil, err
	}
	w.at, w.listed = revision, true
	var changes []NameChange
	there := make(map[string]bool, len(names))
	for _, n := range names {
		there[n.Key] = true
		if w.known[n.Key] != (knownName{n.Created, n.Modified}) {
			changes = append(changes, NameChange{n, false})
		}
	}
	for key, old := range w.known {
		if !there[key] {
			changes = append(changes, NameChange{Name{Key: key, Created: old.created, Modified: revision}, true})
		}
	}
	slices.SortFunc(changes, func(a, b NameChange) int {
		return cmp.Or(cmp.Compare(a.Modified, b.Modified), cmp.Compare(a.Key, b.Key))
	})
	for i := range changes {
		w.note(&changes[i])
	}
	return changes, nil
}

type putNameMsg struct {
	req protocol.PutNameRequest
	rep protocol.NameReply
}

func (m *putNameMsg) appendTo(b []byte) []byte     { return m.req.Append(b) }
func (m *putNameMsg) mutation() *protocol.Mutation { return &m.req.Mutation }
func (*putNameMsg) orphan() outcome                { return nothing }
func (m *putNameMsg) decode(p *[]byte) (*protocol.Error, error) {
	return &m.rep.Error, m.rep.Decode(*p)
}

type deleteNameMsg struct {
	req protocol.DeleteNameRequest
	rep protocol.NameReply
}

func (m *deleteNameMsg) appendTo(b []byte) []byte     { return m.req.Append(b) }
func (m *deleteNameMsg) mutation() *protocol.Mutation { return &m.req.Mutation }
func (*deleteNameMsg) orphan() outcome                { return nothing }
func (m *deleteNameMsg) decode(p *[]byte) (*protocol.Error, error) {
	return &m.rep.Error, m.rep.Decode(*p)
}

type listNamesMsg struct {
	replyBuf
	req *protocol.ListNamesRequest
	rep protocol.ListNamesReply
}

func (m *listNamesMsg) appendTo(b []byte) []byte { return m.req.Append(b) }

func (m *listNamesMsg) decode(p *[]byte) (*protocol.Error, error) {
	return &m.rep.Error, m.rep.Decode(m.own(p))
}

type watchNamesMsg struct {
	replyBuf
	req protocol.WatchNamesRequest
	rep protocol.WatchNamesReply
}

func (m *watchNamesMsg) appendTo(b []byte) []byte { return m.req.Append(b) }

func (m *watchNamesMsg) decode(p *[]byte) (*protocol.Error, error) {
	return &m.rep.Error, m.rep.Decode(m.own(p))
}
