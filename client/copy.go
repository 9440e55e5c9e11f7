package client

import (
	"context"
	"errors"
	"fmt"

	"larder/protocol"
)

// copyWindow bounds the bytes that CopyIn holds at a time, in memory of this process: enough to keep a disk and a network
// busy. One longer value is held alone.
const copyWindow = 32 << 20

// unleased is the lease of a location that nobody has leased: as long as can be.
const unleased = 1 << 40

// CopyItem is an entry that is to have one more location, in a region of this client's.
type CopyItem struct {
	Key []byte
	// Version of the entry, as a LOOKUP or a task named it: if the entry is another by now, nothing is copied.
	Version uint64
	// Slot names the entry together with Version, whatever its tenant. Only a device's home may use it.
	Slot uint64
	// From are the locations where its bytes lie, the best first; all have the same length. Those that cannot be read are
	// passed over.
	From []protocol.Location
	// Lease keeps the bytes at From where they are for LeaseMS, counted from AskedAt on the client's clock, and is renewed
	// while they are read. 0: nothing does, and only a checksum tells whether they were another's already.
	Lease, LeaseMS uint64
	AskedAt        int64
	// MoveFrom is the device whose locations of the entry go when the copy is there: 0 none, ^0 all but the copy's.
	MoveFrom uint64
}

// CopyOutcome says what became of a CopyItem.
type CopyOutcome uint8

// The outcomes of a CopyItem.
const (
	CopyFailed  CopyOutcome = iota // it could not be read or written: Err says why
	CopyDone                       // it has the copy
	CopySkipped                    // there is nothing to do: it is gone, or another, or has that copy, or as many as it may have
)

// CopyResult says what became of a CopyItem.
type CopyResult struct {
	Outcome CopyOutcome
	Bytes   uint64 // that were copied
	Err     error
}

// errUnreadable says that no location of an entry could be read.
var errUnreadable = errors.New("no location of the entry can be read")

// CopyIn copies entries into this client's own regions: it reads each from the first of its locations that can be read,
// and registers where the copy lies as another location of the entry. It makes room by eviction as PutBatch does. Each
// item has a result; the error is that of the call as a whole, when it could not go on.
//
// A generation is compared before and after, and a checksum if there is one; that the entry is still what it was is for the
// leader to say, which refuses the copy otherwise. What neither shows is that a location was freed, and its page used for
// something else, while the entry lives on at another: that a lease is for. An item whose lease was over too early fails
// with ErrLease: ask for another one. Leases are given back when the bytes are read.
func (c *Client) CopyIn(ctx context.Context, items []CopyItem) ([]CopyResult, error) {
	res := make([]CopyResult, len(items))
	var buf []byte
	hauls := haulsOf(items)
	for i := range hauls {
		c.keep(&hauls[i].hold) // the last may have to wait for all others
		defer c.letGo(&hauls[i].hold)
	}
	from := 0
	for i := range hauls {
		w := &hauls[i]
		to := from + len(w.items)
		var err error
		if buf, err = c.copySome(ctx, w, res[from:to], buf); err != nil {
			for i := from; i < len(res); i++ {
				if res[i].Outcome == CopyFailed && res[i].Err == nil {
					res[i].Err = err
				}
			}
			return res, fail("copy in", nil, err)
		}
		from = to
	}
	return res, nil
}

// haul is items that are copied together, and the hold on their leases until they have been read.
type haul struct {
	items []CopyItem
	hold  hold
}

// haulsOf divides items into hauls of a copyWindow each.
func haulsOf(items []CopyItem) []haul {
	var all []haul
	for len(items) > 0 {
		n, size := 0, uint64(0)
		for ; n < len(items) && n < protocol.MaxBatch; n++ {
			if more := items[n].length(); n > 0 && size+more > copyWindow {
				break
			} else {
				size += more
			}
		}
		all = append(all, haul{items: items[:n]})
		items = items[n:]
	}
	for i := range all {
		w := &all[i]
		w.hold.begin()
		for _, it := range w.items {
			if it.Lease != 0 {
				w.hold.add(&protocol.LookupResult{Lease: it.Lease, LeaseMS: it.LeaseMS}, it.AskedAt)
			}
		}
	}
	return all
}

func (it *CopyItem) length() uint64 {
	if len(it.From) == 0 {
		return 0
	}
	return it.From[0].KVLength
}

// check refuses what no leader would take.
func (it *CopyItem) check(c *Client) error {
	switch err := c.checkKey(it.Key); {
	case err != nil:
		return err
	case it.length() == 0 || it.length() > maxValue:
		return fmt.Errorf("%w: an entry has 1 to %d bytes, and a location", ErrConfig, uint64(maxValue))
	}
	return nil
}

// copySome copies the items of a haul. arena is memory for their bytes, which it gives back, grown if need be.
func (c *Client) copySome(ctx context.Context, w *haul, res []CopyResult, arena []byte) ([]byte, error) {
	items := w.items
	found, buf := make([]protocol.LookupResult, len(items)), make([][]byte, len(items))
	unnamed := make([][]byte, len(items)) // who cannot be sure of a lease condemns nothing
	total := uint64(0)
	for i := range items {
		it := &items[i]
		if res[i].Err = it.check(c); res[i].Err != nil {
			continue
		}
		total += it.length()
		found[i] = protocol.LookupResult{
			Found: true, Location: it.From[0], LeaseMS: unleased, Copies: append([]protocol.Location(nil), it.From[1:]...),
		}
	}
	arena = sized(arena, total)
	for i, at := 0, uint64(0); i < len(items); i++ {
		if found[i].Found {
			buf[i] = arena[at : at : at+items[i].length()]
			at += items[i].length()
		}
	}
	c.readAll(ctx, unnamed, found, c.cfg.Clock(), buf, total, func(i, got int) {
		switch {
		case !found[i].Found:
		case got == late, items[i].Lease != 0 && w.hold.over(c.cfg.Clock()):
			res[i].Err = ErrLease
		case got != good:
			res[i].Err = fmt.Errorf("%w (%w)", errUnreadable, ErrNotFound)
		case !c.cfg.Checksums && found[i].Checksum != 0 && checksum(buf[i]) != found[i].Checksum:
			c.counters.checksumFaults.Add(1)
			res[i].Err = fmt.Errorf("%w: the checksum of the one that was read is wrong (%w)", errUnreadable, ErrNotFound)
		}
	})
	c.letGo(&w.hold)
	c.giveBack(w.hold.leases...)
	if err := ctx.Err(); err != nil {
		return arena, err //nolint:wrapcheck // callers wrap
	}
	op := c.newStore()
	defer c.freeStore(op)
	var stores []Item
	var of []CopyItem
	var at []int
	for i := range items {
		if res[i].Err == nil {
			stores, of, at = append(stores, Item{Key: items[i].Key, Value: buf[i]}), append(of, items[i]), append(at, i)
		}
	}
	out := make([]PutResult, len(stores))
	err := op.storeCopies(ctx, stores, of, out)
	for j, i := range at {
		switch {
		case out[j].Err != nil:
			res[i].Err = out[j].Err
		case out[j].Stored:
			res[i] = CopyResult{Outcome: CopyDone, Bytes: uint64(len(buf[i]))}
		case err == nil || op.skipped[j]:
			res[i].Outcome = CopySkipped
		}
	}
	return arena, err
}

// storeCopies is chunk for copies. What does not fit at once is stored in parts: the first makes room for the rest.
func (op *storeOp) storeCopies(ctx context.Context, items []Item, of []CopyItem, out []PutResult) error {
	op.skipped = make([]bool, len(items))
	limit := len(items)
	for from := 0; from < len(items); {
		n := min(limit, len(items)-from)
		op.of, op.skips = of[from:from+n], op.skipped[from:from+n]
		err := op.chunk(ctx, items[from:from+n], out[from:from+n])
		if errors.Is(err, ErrNoSpace) && n > 1 {
			limit = n / 2
			continue
		}
		if err != nil {
			return err
		}
		from += n
	}
	return nil
}

// skip reports whether the leader's answer to a copy says that there is nothing to do.
func skip(r *protocol.RegisterResult) bool {
	switch r.Code {
	case protocol.CodeOK:
		return !r.IsNew
	case protocol.CodeNotFound, protocol.CodeDuplicate, protocol.CodeLimit:
		return true
	default:
		return false
	}
}

// describe makes a registration that of a copy.
func (it *CopyItem) describe(e *protocol.RegisterEntry) {
	e.Copy, e.Of, e.Slot, e.MoveFrom = true, it.Version, it.Slot, it.MoveFrom
	if e.Checksum == 0 {
		e.Checksum = it.From[0].Checksum
	}
}
