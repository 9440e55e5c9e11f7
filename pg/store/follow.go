package store

import (
	"cmp"
	"slices"
	"strings"
	"sync"
)

// follower is what the function of a watch has been told.
type follower struct {
	fn    func(changes []Change) error
	known map[string]revisions // by key
	told  bool                 // fn has been called
	err   error                // fn's, which ends the watch
}

type revisions struct{ created, modified uint64 }

func newFollower(fn func(changes []Change) error) *follower {
	return &follower{fn: fn, known: make(map[string]revisions)}
}

// tell calls the function, unless there is nothing to tell. The first time that is something, too.
func (f *follower) tell(changes []Change) error {
	if len(changes) > 0 || !f.told {
		f.told = true
		f.err = f.fn(changes)
	}
	return f.err
}

// fresh leaves of changes those that are news, and takes note of them. What is deleted is what was told of last: others of that key
// may have come and gone since.
func (f *follower) fresh(changes []Change) (news []Change) {
	for _, x := range changes {
		old, there := f.known[x.Key]
		switch {
		case x.Deleted && there:
			delete(f.known, x.Key)
			x.Created = old.created
			news = append(news, x)
		case !x.Deleted && x.Modified > old.modified:
			f.known[x.Key] = revisions{x.Created, x.Modified}
			news = append(news, x)
		}
	}
	return news
}

// compare finds out what has changed if list is all that is there at revision, and takes note of it.
func (f *follower) compare(list []Entry, revision uint64) (changes []Change) {
	there := make(map[string]bool, len(list))
	for _, e := range list {
		there[e.Key] = true
		if now := (revisions{e.Created, e.Modified}); f.known[e.Key] != now {
			f.known[e.Key] = now
			changes = append(changes, Change{e, false})
		}
	}
	for key, old := range f.known {
		if !there[key] {
			delete(f.known, key)
			changes = append(changes, Change{Entry{Key: key, Created: old.created, Modified: revision}, true})
		}
	}
	sortChanges(changes)
	return changes
}

func sortChanges(changes []Change) {
	slices.SortFunc(changes, func(a, b Change) int {
		return cmp.Or(cmp.Compare(a.Modified, b.Modified), cmp.Compare(a.Key, b.Key))
	})
}

func sortEntries(list []Entry) {
	slices.SortFunc(list, func(a, b Entry) int { return strings.Compare(a.Key, b.Key) })
}

// backlog is changes that somebody has yet to be told of: of each key the last one, so that who is slow has no more of them than
// there are keys.
type backlog struct {
	wake chan struct{} // has an element when there is something to take

	mu      sync.Mutex
	changes map[string]Change
}

func newBacklog() *backlog {
	return &backlog{wake: make(chan struct{}, 1), changes: make(map[string]Change)}
}

func (b *backlog) add(changes ...Change) {
	b.mu.Lock()
	for _, x := range changes {
		b.changes[x.Key] = x
	}
	b.mu.Unlock()
	b.kick()
}

func (b *backlog) kick() { kick(b.wake) }

// kick has whoever waits for c, which has room for one, look what there is to do.
func kick(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// take returns the oldest changes, of about limit bytes; more says that others are left.
func (b *backlog) take(limit int) (changes []Change, more bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, x := range b.changes {
		changes = append(changes, x)
	}
	sortChanges(changes)
	size, n := 0, 0
	for n < len(changes) && (n == 0 || size+frameBytes(&changes[n].Entry) <= limit) {
		size += frameBytes(&changes[n].Entry)
		delete(b.changes, changes[n].Key)
		n++
	}
	return changes[:n], n < len(changes)
}
