package model

import (
	"bytes"
	"cmp"
	"slices"
	"strings"

	"larder/meta"
	"larder/protocol"
)

// name is a name of a tenant.
type name struct {
	tenant, key string
	value       []byte
	made        uint64 // the revision of its first value
	changed     uint64 // and of the last
	session     meta.SessionID
}

// NameChange is a change of a name by the last log entry.
type NameChange struct {
	Tenant string
	meta.NameInfo
	Deleted bool
}

// NameChanges returns what the last log entry has changed of names, in order.
func (m *Model) NameChanges() []NameChange { return m.worlds[0].changes }

// NamesRevision returns the revision of the last change of any name.
func (m *Model) NamesRevision() uint64 { return m.worlds[0].revision }

// nameAt returns where a tenant's name is among all, -1 if it is not there.
func (w *world) nameAt(tenant string, key []byte) int {
	return slices.IndexFunc(w.names, func(n name) bool { return n.tenant == tenant && n.key == string(key) })
}

// nameResult is what a change of a name answers.
func nameResult(code protocol.Code, n name) result {
	return result{value: meta.NameResult{Code: code, Created: n.made, Modified: n.changed}}
}

// nameOf returns a name as it is, with no revisions if it is not there.
func (w *world) nameOf(tenant string, key []byte) name {
	if i := w.nameAt(tenant, key); i >= 0 {
		return w.names[i]
	}
	return name{tenant: tenant, key: string(key)}
}

// tellName notes a change, under the next revision.
func (w *world) tellName(n *name, deleted bool) {
	if w.revision == 0 {
		w.revision = w.epochs / idsPerIncarnation * idsPerIncarnation
	}
	w.revision++
	n.changed = w.revision
	c := NameChange{n.tenant, meta.NameInfo{Key: n.key, Value: n.value, Created: n.made, Modified: n.changed, Session: n.session}, deleted}
	if deleted {
		c.Value, c.Session = nil, 0
	}
	w.changes = append(w.changes, c)
}

func (w *world) putName(s *session, c *meta.PutName) result {
	tenant, id := tenantOf(s), meta.SessionID(0)
	if s != nil && c.Lease {
		id = s.id
	}
	switch {
	case w.settings.Version < meta.VersionTiers:
		return refused(protocol.CodeUnsupported)
	case len(c.Key) == 0 || len(c.Key) > protocol.MaxNameKeyBytes, len(c.Value) > protocol.MaxNameValueBytes,
		c.Lease && s == nil:
		return refused(protocol.CodeBadRequest)
	}
	n := w.nameOf(tenant, c.Key)
	if c.Check && n.changed != c.Revision {
		return nameResult(protocol.CodeConflict, n)
	}
	old := n
	n.value, n.session = bytes.Clone(c.Value), id
	if !w.namesFit(old, n) {
		return refused(protocol.CodeLimit)
	}
	w.tellName(&n, false)
	if old.made == 0 {
		n.made = n.changed
		w.changes[len(w.changes)-1].Created = n.made
		w.names = append(w.names, n)
	} else {
		w.names[w.nameAt(tenant, c.Key)] = n
	}
	return nameResult(0, n)
}

// namesFit reports whether one name may take another's place, which may not have been there.
func (w *world) namesFit(old, next name) bool {
	all, bytes, own, ownBytes, held := 1, 0, 1, 0, 1
	size := func(n *name) int { return len(n.key) + len(n.value) }
	for i := range w.names {
		n := &w.names[i]
		if n.tenant == old.tenant && n.key == old.key {
			continue
		}
		all, bytes = all+1, bytes+size(n)
		if n.tenant == next.tenant {
			own, ownBytes = own+1, ownBytes+size(n)
		}
		if n.session == next.session {
			held++
		}
	}
	grows := old.made == 0 || size(&next) > size(&old)
	return all <= meta.MaxNames && own <= meta.MaxTenantNames && (next.session == 0 || held <= meta.MaxSessionNames) &&
		(!grows || bytes+size(&next) <= meta.MaxNamesBytes && ownBytes+size(&next) <= meta.MaxTenantNamesBytes)
}

func (w *world) deleteName(s *session, c *meta.DeleteName) result {
	switch {
	case w.settings.Version < meta.VersionTiers:
		return refused(protocol.CodeUnsupported)
	case len(c.Key) == 0 || len(c.Key) > protocol.MaxNameKeyBytes:
		return refused(protocol.CodeBadRequest)
	}
	i := w.nameAt(tenantOf(s), c.Key)
	n := w.nameOf(tenantOf(s), c.Key)
	switch {
	case c.Check && n.changed != c.Revision:
		return nameResult(protocol.CodeConflict, n)
	case i < 0:
		return nameResult(protocol.CodeNotFound, name{})
	}
	w.names = slices.Delete(w.names, i, i+1)
	w.tellName(&n, true)
	return nameResult(0, n)
}

// endNames removes the names that end with sessions, tenant by tenant in the order of their keys.
func (w *world) endNames(of func(id meta.SessionID) bool) {
	var gone []name
	w.names = slices.DeleteFunc(w.names, func(n name) bool {
		ends := n.session != 0 && of(n.session)
		if ends {
			gone = append(gone, n)
		}
		return ends
	})
	slices.SortFunc(gone, func(a, b name) int { return cmp.Or(strings.Compare(a.tenant, b.tenant), strings.Compare(a.key, b.key)) })
	for i := range gone {
		w.tellName(&gone[i], true)
	}
}

// newNames is what a new incarnation makes of names: revisions go on beyond all that were given before, and no session is left.
func (w *world) newNames(first uint64) {
	if w.revision > 0 {
		w.revision = max(w.revision, first)
		w.endNames(func(meta.SessionID) bool { return true })
	}
}

// checkNames verifies that a name which ends with a session is one of an open session.
func (w *world) checkNames() error {
	for i := range w.names {
		n := &w.names[i]
		if n.made == 0 || n.made > n.changed || n.changed > w.revision {
			return w.violation("a name's revisions are of the past", w.revision, *n)
		}
		if s := w.sessions[n.session]; n.session != 0 && (s == nil || !s.open || s.tenant != n.tenant) {
			return w.violation("names go with the session that they end with", "", *n)
		}
	}
	return nil
}

// compareNames compares the names of each tenant.
func (w *world) compareNames(m *meta.Machine) error {
	total := 0
	for _, tenant := range w.tenants {
		var want, got []meta.NameInfo
		for i := range w.names {
			if n := &w.names[i]; n.tenant == tenant {
				want = append(want, meta.NameInfo{
					Key: n.key, Value: emptyNil(n.value), Created: n.made, Modified: n.changed, Session: n.session,
				})
				total += len(n.key) + len(n.value)
			}
		}
		slices.SortFunc(want, func(a, b meta.NameInfo) int { return strings.Compare(a.Key, b.Key) })
		id := m.Tenant(tenant)
		m.EachName(id, "", "", func(n meta.NameInfo) bool {
			got = append(got, n)
			return true
		})
		if err := w.same("names of "+tenant, want, got); err != nil {
			return err
		}
		for i := range want {
			if one, ok := m.Name(id, []byte(want[i].Key)); !ok || one.Modified != want[i].Modified {
				return w.violation("the state: name", want[i], one)
			}
		}
	}
	count, bytes := m.NamesTotal()
	return w.same("names in all, their bytes and revision", [3]uint64{uint64(len(w.names)), uint64(total), w.revision},
		[3]uint64{uint64(count), uint64(bytes), m.NamesRevision()})
}
