package simtest

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"larder/integration/simtest/model"
	"larder/meta"
	"larder/protocol"
)

// namePrefixes begin the names that clients use; one of them is watched at a time.
var namePrefixes = []string{"a/", "b/"}

// nameOp does something with names.
func (c *client) nameOp(p *proc) {
	key := fmt.Sprint(namePrefixes[c.rng.IntN(len(namePrefixes))], c.rng.IntN(4))
	switch c.rng.IntN(6) {
	case 0, 1, 2:
		c.putName(p, key)
	case 3:
		c.deleteName(p, key)
	case 4:
		c.listNames(p, key[:2], "")
	default:
		if !c.watching {
			c.watching = true
			c.later(func(p *proc) {
				c.watchNames(p, key[:2])
				c.watching = false
			})
		}
	}
}

// readName reads the reply to a change of a name.
func readName(rep *protocol.NameReply) reader {
	return func(b []byte) (*protocol.Error, error) {
		err := rep.Decode(b)
		return &rep.Error, err
	}
}

// putName sets a name: perhaps only if it is what it was when it was read.
func (c *client) putName(p *proc, key string) {
	req := &protocol.PutNameRequest{Key: []byte(key), Value: fmt.Append(nil, c.rng.Uint32()), Lease: c.rng.IntN(3) > 0}
	if c.rng.IntN(2) == 0 {
		got := c.listNames(p, "", key)
		if got == nil {
			return
		}
		if req.Check = true; len(got.Names) > 0 {
			req.Revision = got.Names[0].Modified
		}
	}
	var rep protocol.NameReply
	e := c.mutate(p, c.sess, &mutation{
		typ: protocol.TypePutName, mut: &req.Mutation, body: func() []byte { return req.Append(nil) }, read: readName(&rep),
	})
	c.s.cover.op("put-name", e)
	if e == nil {
		c.s.named = max(c.s.named, rep.Modified)
	}
}

// deleteName removes a name, of whatever revision.
func (c *client) deleteName(p *proc, key string) {
	req := &protocol.DeleteNameRequest{Key: []byte(key)}
	var rep protocol.NameReply
	e := c.mutate(p, c.sess, &mutation{
		typ: protocol.TypeDeleteName, mut: &req.Mutation, body: func() []byte { return req.Append(nil) }, read: readName(&rep),
	})
	c.s.cover.op("delete-name", e)
	if e == nil {
		c.s.named = max(c.s.named, rep.Modified)
	}
}

// listNames reads the names with a prefix, or one. They must be those of a moment since the call.
func (c *client) listNames(p *proc, prefix, key string) *protocol.ListNamesReply {
	s, log, known := c.s, c.s.log, c.s.named
	req := protocol.ListNamesRequest{Key: []byte(key), Prefix: []byte(prefix)}
	rep := &protocol.ListNamesReply{}
	_, _, e := c.roundTrip(p, nil, protocol.TypeListNames, func() []byte { return req.Append(nil) }, 0, c.patience(),
		func(b []byte) (*protocol.Error, error) {
			err := rep.Decode(b)
			return &rep.Error, err
		})
	s.cover.op("list-names", e)
	if e != nil {
		return nil
	}
	if log == s.log {
		s.compareList(log, known, prefix, key, rep)
	}
	return rep
}

// compareList compares a list of names with what the log says of that moment, which must not be before what was known.
func (s *sim) compareList(log *history, known uint64, prefix, key string, rep *protocol.ListNamesReply) {
	if rep.Revision < known || rep.Revision > log.revision {
		s.fail("names", "a list is as of revision %d of %d, after %d was acknowledged", rep.Revision, log.revision, known)
	}
	want := log.namesAt(rep.Revision, func(k string) bool { return key != "" && k == key || key == "" && strings.HasPrefix(k, prefix) })
	if len(want) != len(rep.Names) || rep.More {
		s.fail("names", "a list of %q%q as of revision %d has %d names, and there are %d", prefix, key, rep.Revision, len(rep.Names), len(want))
		return
	}
	for i := range want {
		s.sameName("list", &want[i], &rep.Names[i])
	}
}

// watchNames lists names and then watches them for a while. What it is told must be all that happens, and in that order.
func (c *client) watchNames(p *proc, prefix string) {
	s := c.s
	start := c.listNames(p, prefix, "")
	for n := 0; start != nil && n < 12 && !s.quiet; n++ {
		log, at := s.log, start.Revision
		req := protocol.WatchNamesRequest{Prefix: []byte(prefix), After: at, TimeoutMS: 500 + c.rng.Uint64N(4000)}
		var rep protocol.WatchNamesReply
		_, _, e := c.roundTrip(p, nil, protocol.TypeWatchNames, func() []byte { return req.Append(nil) }, int64(req.TimeoutMS)*ms,
			c.patience(), func(b []byte) (*protocol.Error, error) {
				rep = protocol.WatchNamesReply{}
				err := rep.Decode(b)
				return &rep.Error, err
			})
		s.cover.op("watch-names", e)
		switch {
		case e != nil || log != s.log:
			return
		case rep.Compacted:
			s.cover.NamesCompacted++
			start = c.listNames(p, prefix, "")
			continue
		}
		s.compareChanges(log, prefix, at, &rep)
		start.Revision = rep.Revision
	}
}

// compareChanges compares what a watch was told with what the log has changed.
func (s *sim) compareChanges(log *history, prefix string, after uint64, rep *protocol.WatchNamesReply) {
	if rep.Revision < after || rep.Revision > log.revision {
		s.fail("names", "a watch from revision %d is told that it is at %d of %d", after, rep.Revision, log.revision)
	}
	var want []model.NameChange
	for _, x := range log.changes {
		if x.Modified > after && x.Modified <= rep.Revision && strings.HasPrefix(x.Key, prefix) {
			want = append(want, x)
		}
	}
	if len(want) != len(rep.Changes) {
		s.fail("names", "a watch of %q from revision %d to %d is told of %d changes, and there are %d", prefix, after, rep.Revision,
			len(rep.Changes), len(want))
		return
	}
	for i := range want {
		s.sameName("watch", &want[i], &rep.Changes[i])
	}
	s.cover.NamesTold += uint64(len(want))
}

// sameName compares a name that a client was told of with what the log says.
func (s *sim) sameName(how string, want *model.NameChange, got *protocol.NameInfo) {
	if want.Key != string(got.Key) || string(want.Value) != string(got.Value) || want.Created != got.Created ||
		want.Modified != got.Modified || uint64(want.Session) != got.Session || want.Deleted != got.Deleted {
		s.fail("names", "a %s says %+v, and the log %+v", how, *got, *want)
	}
}

// note keeps what an entry of the log has changed of names.
func (h *history) noteNames() {
	if m, ok := h.model.(*model.Model); ok {
		h.changes = append(h.changes, m.NameChanges()...)
		h.revision = m.NamesRevision()
	}
}

// namesAt returns those of the names that want selects as of a revision, by their keys.
func (h *history) namesAt(revision uint64, want func(key string) bool) []model.NameChange {
	at := map[string]model.NameChange{}
	for _, x := range h.changes {
		switch {
		case x.Modified > revision || !want(x.Key):
		case x.Deleted:
			delete(at, x.Key)
		default:
			at[x.Key] = x
		}
	}
	list := make([]model.NameChange, 0, len(at))
	for _, x := range at {
		list = append(list, x)
	}
	slices.SortFunc(list, func(a, b model.NameChange) int { return strings.Compare(a.Key, b.Key) })
	return list
}

// compareName checks that the answer to a change of a name is what the log led to.
func (s *sim) compareName(k seqKey, a answer, rest, body []byte) {
	var r protocol.NameReply
	x, err := meta.DecodeName(rest)
	if err != nil || r.Decode(body) != nil || r.Code != x.Code || r.Success != (x.Code == 0) || r.Created != x.Created || r.Modified != x.Modified {
		s.fail("once", "request %d of session %d was answered %+v, and entry %d says %+v", k.seq, k.session, r, a.index, x)
	}
}

// ofNames reports whether an answer with a code is one that the log has for a change of a name.
func ofNames(t protocol.Type, code protocol.Code) bool {
	return (t == protocol.TypePutName || t == protocol.TypeDeleteName) && (code == protocol.CodeConflict || code == protocol.CodeNotFound)
}

// namesLog is a log that has set a/1, and again, set b/1, and removed it.
func namesLog(s *sim) *history {
	set := func(key string, created, modified uint64) model.NameChange {
		return model.NameChange{NameInfo: meta.NameInfo{Key: key, Created: created, Modified: modified}}
	}
	gone := set("b/1", 3, 4)
	gone.Deleted = true
	s.log.changes, s.log.revision = []model.NameChange{set("a/1", 1, 1), set("a/1", 1, 2), set("b/1", 3, 3), gone}, 4
	return s.log
}

// told makes what a client is told of names, by their keys and revisions.
func told(key string, created, modified uint64) protocol.NameInfo {
	return protocol.NameInfo{Key: []byte(key), Created: created, Modified: modified}
}

func TestOraclesOfNamesFail(t *testing.T) {
	list := func(known, revision uint64, names ...protocol.NameInfo) func(s *sim) {
		return func(s *sim) {
			s.compareList(namesLog(s), known, "", "", &protocol.ListNamesReply{Revision: revision, Names: names})
		}
	}
	watch := func(after, revision uint64, changes ...protocol.NameInfo) func(s *sim) {
		return func(s *sim) {
			s.compareChanges(namesLog(s), "a/", after, &protocol.WatchNamesReply{Revision: revision, Changes: changes})
		}
	}
	answered := func(got uint64) func(s *sim) {
		return func(s *sim) {
			rep := protocol.NameReply{Success: true, Created: 1, Modified: got}
			s.compareName(seqKey{1, 1}, answer{}, []byte{0, 1, 2}, rep.Append(nil))
		}
	}
	checkOracles(t, map[string]lie{
		"a list of before what is known":   {"names", list(3, 2, told("a/1", 1, 2)), list(2, 2, told("a/1", 1, 2))},
		"a list of what is to come":        {"names", list(0, 5, told("a/1", 1, 2)), list(0, 4, told("a/1", 1, 2))},
		"a list with what is gone":         {"names", list(0, 4, told("a/1", 1, 2), told("b/1", 3, 3)), list(0, 3, told("a/1", 1, 2), told("b/1", 3, 3))},
		"a list of an earlier value":       {"names", list(0, 4, told("a/1", 1, 1)), list(0, 1, told("a/1", 1, 1))},
		"a list without what is there":     {"names", list(0, 1), list(0, 0)},
		"a change is not told":             {"names", watch(0, 4, told("a/1", 1, 2)), watch(1, 4, told("a/1", 1, 2))},
		"a change is told twice":           {"names", watch(1, 4, told("a/1", 1, 1), told("a/1", 1, 2)), watch(0, 4, told("a/1", 1, 1), told("a/1", 1, 2))},
		"a change of another prefix":       {"names", watch(2, 4, told("b/1", 3, 3)), watch(2, 4)},
		"a watch goes back":                {"names", watch(3, 2), watch(3, 3)},
		"a watch says what is to come":     {"names", watch(4, 5), watch(4, 4)},
		"an answer that is not of the log": {"once", answered(3), answered(2)},
	})
}
