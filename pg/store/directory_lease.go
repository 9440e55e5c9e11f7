package store

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// looks is how many times the leases of others are looked at between two renewals, so that the end of one is seen within
	// a ninth of it.
	looks = 3
	// maxLook bounds the time between two looks: others' leases may be shorter than this one.
	maxLook = 300 * time.Millisecond
)

// afterwards is when to look again after something has become of a lease's file: the kernel tells that a file of a process that dies
// is closed a little before its flock is gone.
var afterwards = []time.Duration{0, 2 * time.Millisecond, 20 * time.Millisecond}

// ownLease is the lease of this process: a file that it has a flock on, and writes to from time to time.
type ownLease struct {
	id uint64
	f  *os.File
}

// holds reports whether nobody has removed a lease of this process.
func (d *directory) holds(l *ownLease) bool {
	return named(int(l.f.Fd()), d.file("leases", leaseName(l.id)))
}

// take takes a lease, and what is to follow from that the old one is lost if there was one.
func (d *directory) take(ctx context.Context) error {
	return d.locked(ctx, unix.LOCK_EX, func(s *dirState) error {
		if err := d.held(s); err != nil {
			return d.unavailable(err)
		}
		return nil
	})
}

// held makes sure that there is a lease. The caller holds the lock, LOCK_EX.
func (d *directory) held(s *dirState) error {
	old := d.own.Load()
	if old != nil && d.holds(old) {
		return nil
	}
	if d.isClosed() {
		return ErrClosed
	}
	at := now()
	l := &ownLease{id: newID()}
	file := leaseFile{id: l.id, duration: int64(d.lease), boot: d.boot, beat: 1}
	f, err := d.write(file.append(), true, "leases", leaseName(l.id))
	if err != nil {
		return err
	}
	l.f = f
	if err := d.provesLocks(l); err != nil {
		return errors.Join(err, os.Remove(d.file("leases", leaseName(l.id))), f.Close())
	}
	if old == nil {
		err = d.save(s) // from here on there is a state
	} else {
		d.lose()
		_ = d.hub.begin() // or the revision tells that there was no event
		d.hub.all()
		err = old.f.Close()
	}
	d.own.Store(l)
	d.confirmed.Store(at)
	return err
}

// provesLocks finds out whether a flock keeps another one away.
func (d *directory) provesLocks(l *ownLease) error {
	if free, err := unlocked(d.file("leases", leaseName(l.id))); err != nil || free {
		return errors.Join(err, fmt.Errorf("two have the same lock: %w", unix.ENOLCK))
	}
	return nil
}

// lose tells that the lease is lost, unless that was told for good.
func (d *directory) lose() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closed {
		close(d.lost)
		d.lost = make(chan struct{})
	}
}

func (d *directory) isClosed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.closed
}

// newID is a number that no other lease has.
func newID() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails: see crypto/rand
	return binary.LittleEndian.Uint64(b[:]) | 1
}

// unlocked reports whether nobody has a flock on a file; if it is not there nobody has.
func unlocked(path string) (bool, error) {
	fd, err := open(path, unix.O_RDONLY)
	if err != nil {
		return errors.Is(err, unix.ENOENT), err
	}
	defer func() { _ = unix.Close(fd) }()
	err = unix.Flock(fd, unix.LOCK_SH|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err //nolint:wrapcheck // the caller's file
}

// keeper renews the lease of this process, and ends those of processes that are gone.
type keeper struct {
	d      *directory
	every  time.Duration
	ticks  int
	beats  uint64
	looked int64           // when it looked at the others last
	others map[string]seen // by name of the lease's file
	kicked chan struct{}   // the hub's
}

// seen is what was seen of another's lease.
type seen struct {
	beat  uint64
	since int64 // when it first had that
}

func newKeeper(d *directory) *keeper {
	return &keeper{d: d, every: min(d.lease/beats/looks, maxLook), beats: 1, others: make(map[string]seen), kicked: d.hub.leases}
}

func (k *keeper) run(ctx context.Context) {
	tick, stop := every(k.every)
	defer stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick:
			k.beat(ctx)
			k.look(ctx)
		case <-k.kicked:
			for _, after := range afterwards {
				_ = sleep(ctx, after)
				k.look(ctx)
			}
			k.renew(ctx)
		}
	}
}

// beat renews the lease when it is time to.
func (k *keeper) beat(ctx context.Context) {
	if k.ticks++; time.Duration(k.ticks)*k.every >= k.d.lease/beats {
		k.ticks = 0
		k.renew(ctx)
	}
}

// renew writes to the lease's file. While it has the lock nobody can decide that the lease is over: if the file is still there then,
// it is renewed from when this began. Without the lock that is not known, but the others see that the process lives.
func (k *keeper) renew(ctx context.Context) {
	d, at := k.d, now()
	ctx, cancel := context.WithTimeout(ctx, d.lease/beats)
	defer cancel()
	k.beats++
	lost := false
	err := d.locked(ctx, unix.LOCK_SH, func(*dirState) error {
		own := d.own.Load()
		if lost = !d.holds(own); !lost && k.write(own) == nil {
			d.confirmed.Store(at)
		}
		return nil
	})
	if err != nil {
		_ = k.write(d.own.Load())
	}
	if lost {
		_ = d.take(ctx) // or else the next time
	}
}

func (k *keeper) write(own *ownLease) error {
	_, err := own.f.WriteAt(binary.LittleEndian.AppendUint64(nil, k.beats), beatOffset)
	return err //nolint:wrapcheck // only whether
}

// look ends the leases that are over.
func (k *keeper) look(ctx context.Context) {
	at := now()
	if k.looked != 0 && time.Duration(at-k.looked) > k.d.lease/beats+k.every {
		clear(k.others) // this process was stopped, and cannot tell how long the others were silent
	}
	k.looked = at
	names, err := namesIn(k.d.file("leases"))
	if err != nil {
		return
	}
	var over []string
	own := leaseName(k.d.own.Load().id)
	for _, name := range names {
		if name != own && k.over(name, at) {
			over = append(over, name)
		}
	}
	for name := range k.others {
		if !slices.Contains(names, name) {
			delete(k.others, name)
		}
	}
	if len(over) > 0 {
		ctx, cancel := context.WithTimeout(ctx, k.d.lease)
		defer cancel()
		_ = k.d.sweep(ctx, func(name string) bool { return slices.Contains(over, name) && k.over(name, at) }) // or else the next time
	}
}

// over reports whether a lease is over: its process is dead, or has not renewed it.
func (k *keeper) over(name string, at int64) bool {
	path := k.d.file("leases", name)
	b, err := readFile(path, leaseBytes+1)
	if err != nil || b == nil {
		return false // it is no more there, or cannot be told
	}
	l, err := decodeLease(b)
	if err != nil {
		l = leaseFile{duration: int64(MaxLease)} // of another release, or what a host left when it crashed
	}
	if l.boot == k.d.boot && l.boot != [16]byte{} {
		if free, err := unlocked(path); err == nil && free {
			return true
		}
	}
	s, known := k.others[name]
	if !known || s.beat != l.beat {
		k.others[name] = seen{l.beat, at}
		return false
	}
	return at-s.since > l.duration
}

// sweep removes the leases that are over, and the entries that end with them, or with leases that are not there. It counts the others,
// and removes garbage: nobody is in the middle of writing it, since who writes has the lock.
func (d *directory) sweep(ctx context.Context, over func(name string) bool) error {
	return d.locked(ctx, unix.LOCK_EX, func(s *dirState) error {
		names, err := namesIn(d.file("leases"))
		if err != nil {
			return d.unavailable(err)
		}
		live := make(map[uint64]bool)
		var dead []string
		for _, name := range names {
			var id uint64
			if over(name) { // still: another process may have been here
				dead = append(dead, name)
			} else if _, err := fmt.Sscanf(name, "%016x", &id); err == nil {
				live[id] = true
			}
		}
		if len(dead) == 0 {
			return nil
		}
		kept := dirState{}
		err = d.each(func(name string, e *dirEntry) error {
			if e.Modified == 0 || e.lease != 0 && !live[e.lease] {
				return d.remove(s, name, len(e.Key)+len(e.Value))
			}
			kept.entries++
			kept.bytes += uint64(len(e.Key) + len(e.Value))
			return nil
		})
		if err != nil {
			return err
		}
		s.entries, s.bytes = kept.entries, kept.bytes
		if err := d.save(s); err != nil {
			return d.unavailable(err)
		}
		for _, name := range dead { // last: who is killed before leaves it to another
			err = errors.Join(err, os.Remove(d.file("leases", name)))
		}
		return err
	})
}
