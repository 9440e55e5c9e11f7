package raft

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"
)

// bootIndex is the index, of term 1, at which the members of a new cluster agree
// without having talked: it holds the first configuration and no state. A log
// that starts behind it makes every later joiner begin with a snapshot, which is
// how it learns the configuration.
const bootIndex, bootTerm = 1, 1

// identity says to whom a store belongs.
type identity struct{ cluster, member uint64 }

// Identity gives the cluster and member that the store belongs to, zeros if none.
func (s *Store) Identity() (cluster, member uint64) { return s.id.cluster, s.id.member }

func (s *Store) readIdentity() (id identity, ok bool, err error) {
	v, ok, err := s.get(keyIdentity)
	if err != nil || !ok {
		return identity{}, false, err
	}
	b, err := unseal("the identity", v)
	if err == nil && len(b) != 16 {
		err = &CorruptionError{What: "the identity", Cause: errors.New("the record has a wrong size")}
	}
	if err != nil {
		return identity{}, false, err
	}
	return identity{cluster: binary.BigEndian.Uint64(b), member: binary.BigEndian.Uint64(b[8:])}, true, nil
}

// Bootstrap makes a new store the member id of a new cluster. Every first member
// must be bootstrapped with the same cluster id and members. If the store already
// is that member, nothing is done; if it is another, a ForeignStoreError says so.
func (s *Store) Bootstrap(cluster, id uint64, members []Member) error {
	c := &conf{Index: bootIndex, Members: slices.Clone(members)}
	slices.SortFunc(c.Members, func(a, b Member) int { return cmp.Compare(a.ID, b.ID) })
	for i := range c.Members {
		if err := c.Members[i].validate(); err != nil {
			return err
		}
		if i > 0 && c.Members[i].ID == c.Members[i-1].ID {
			return fmt.Errorf("raft: two of the first members have the id %x", c.Members[i].ID)
		}
	}
	if m, ok := c.find(id); !ok || m.Learner {
		return fmt.Errorf("raft: member %x is not a voter among the first members; list it, or join instead", id)
	}
	return s.initialise(identity{cluster, id}, logBase{index: bootIndex, term: bootTerm}, c, nil)
}

// Join makes a new store the member id of an existing cluster. It waits until the
// leader, told by AddLearner or AddMember, sends it a snapshot.
func (s *Store) Join(cluster, id uint64) error {
	m := Member{ID: id}
	if err := m.validate(); err != nil {
		return err
	}
	return s.initialise(identity{cluster, id}, logBase{}, nil, nil)
}

// initialise writes everything a new member needs, the identity last: a crash
// before that leaves a store that belongs to nobody. Restored is the manifest of a
// snapshot whose state is already here, nil if the state begins empty.
func (s *Store) initialise(id identity, base logBase, c *conf, restored *manifest) error {
	if id.cluster == 0 {
		return errors.New("raft: the cluster id must not be 0")
	}
	if s.id != (identity{}) {
		return s.CheckIdentity(id.cluster, id.member)
	}
	hard := hardState{term: base.term, commit: base.index}
	b := s.db.NewBatch()
	putBase(b, base)
	putHard(b, hard)
	if c != nil {
		if err := putConf(b, c); err != nil {
			return err
		}
	}
	if restored == nil {
		_ = b.DeleteRange(stateLow, stateHigh, nil) // what an interrupted restore left; fails only on an indexed batch
	} else {
		_ = b.Set(keyRestored, sealedNumbers(restored.Index, restored.Term), nil) // as above
	}
	// The witness of an empty log claims nothing, so it may come first.
	if err := s.wit.write(witnessRecord{term: hard.term}); err != nil {
		return err
	}
	_ = b.Set(keyIdentity, sealedNumbers(id.cluster, id.member), nil) // fails only on an indexed batch
	if err := errors.Join(b.Commit(pebble.Sync), b.Close(), syncDir(s.fs, s.dir)); err != nil {
		return fmt.Errorf("raft: initialise the data directory: %w", err)
	}
	s.id = id
	return s.log.load()
}

// CheckIdentity returns nil if the store belongs to the member, ErrNotInitialised
// if to nobody, else a ForeignStoreError.
func (s *Store) CheckIdentity(cluster, member uint64) error {
	switch s.id {
	case identity{}:
		return ErrNotInitialised
	case identity{cluster, member}:
		return nil
	}
	return &ForeignStoreError{
		WantCluster: cluster, WantID: member, HaveCluster: s.id.cluster, HaveID: s.id.member,
	}
}

// TakeRestoredMarker reports, once, that this store was made by RestoreSnapshot:
// what it holds is older than what clients may have seen, and needs a new
// incarnation. The marker is gone only when done is called, which the server does
// after the new incarnation is in the log.
func (s *Store) TakeRestoredMarker() (restored bool, done func() error, err error) {
	_, ok, err := s.get(keyRestored)
	if err != nil || !ok {
		return false, nil, err
	}
	return true, func() error {
		if err := s.db.Delete(keyRestored, pebble.Sync); err != nil {
			return fmt.Errorf("raft: remove the restore marker: %w", err)
		}
		return nil
	}, nil
}
