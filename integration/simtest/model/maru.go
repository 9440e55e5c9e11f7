package model

import (
	"slices"

	"larder/meta"
	"larder/protocol"
)

// maruKey is a key of Maru's: what its client said of it, and the region that it hangs on.
type maruKey struct {
	meta.MaruEntry
	key    string
	pins   int
	region *region // nil: it was not there, or another kind of client's
}

// maruAnswer is what a command of a client of Maru's answers.
type maruAnswer struct {
	Op    meta.MaruOp
	Bools []bool
	Found []meta.MaruFound
}

// maruAt returns a key that is there, and where among all, or nil and -1.
func (w *world) maruAt(key []byte) (*maruKey, int) {
	for i, k := range w.maru {
		if k.key == string(key) && (k.region == nil || k.region.sound()) {
			return k, i
		}
	}
	return nil, -1
}

// maruIn returns the keys that hang on a region, the oldest first.
func (w *world) maruIn(r *region) (in []*maruKey) {
	for _, k := range w.maru {
		if k.region == r {
			in = append(in, k)
		}
	}
	return in
}

// dropMaru removes a key, and with the last one of a region that nobody writes to, what that had.
func (w *world) dropMaru(k *maruKey) {
	w.maru = slices.DeleteFunc(w.maru, func(x *maruKey) bool { return x == k })
	if k.region != nil {
		w.emptied(k.region)
	}
}

// emptyMaru takes keys away from a region that is being taken, the oldest first, at most so many.
func (w *world) emptyMaru(r *region, most int) int {
	in := w.maruIn(r)
	in = in[:min(len(in), most)]
	w.maru = slices.DeleteFunc(w.maru, func(k *maruKey) bool { return slices.Contains(in, k) })
	w.counts.Removed[meta.ReasonTaken] += uint64(len(in))
	return len(in)
}

func (w *world) maruCommand(c *meta.Maru) result {
	switch {
	case w.settings.Version < meta.VersionMaru:
		return refused(protocol.CodeUnsupported)
	case c.DeadlineMS != 0 && w.now > c.DeadlineMS:
		return refused(protocol.CodePending)
	}
	a := maruAnswer{Op: c.Op}
	for i := range c.Entries {
		if c.Op == meta.MaruRegister {
			a.Bools = append(a.Bools, w.maruRegister(&c.Entries[i], c.Again))
		} else {
			a.Bools = append(a.Bools, w.maruUndo(&c.Entries[i]))
		}
	}
	stopped := false
	for _, key := range c.Keys {
		k, _ := w.maruAt(key)
		if c.Op == meta.MaruLookup {
			a.Found = append(a.Found, k.found())
			continue
		}
		ok := !stopped && k != nil && w.maruKeyed(c.Op, k)
		stopped = stopped || c.Strict && !ok
		a.Bools = append(a.Bools, ok)
	}
	if c.Op == meta.MaruReturn {
		a.Bools = append(a.Bools, w.maruReturn(c))
	}
	return result{value: a}
}

// found is where a key lies, for those who ask.
func (k *maruKey) found() meta.MaruFound {
	if k == nil || k.region == nil || k.region.device.mode != meta.DeviceServing {
		return meta.MaruFound{}
	}
	return meta.MaruFound{Region: k.region.id, Epoch: k.region.epoch, Offset: k.Offset, Length: k.Length}
}

func (k *maruKey) lies(e *meta.MaruEntry) bool {
	return k != nil && k.Region == e.Region && k.Offset == e.Offset && k.Length == e.Length
}

func (w *world) maruRegister(e *meta.MaruEntry, again bool) bool {
	if k, _ := w.maruAt(e.Key); k != nil {
		return again && k.lies(e)
	}
	for _, k := range slices.Clone(w.maru) {
		if k.key == string(e.Key) { // its bytes are lost
			w.dropMaru(k)
		}
	}
	w.births++
	k := &maruKey{MaruEntry: *e, key: string(e.Key)}
	if e.Region == (meta.MaruInt{Abs: e.Region.Abs}) {
		r := w.regions[meta.RegionID(e.Region.Abs)]
		if r != nil && r.sound() && r.owner != nil && r.owner.info.TTLMS == 0 {
			k.region = r
		}
	}
	w.maru = append(w.maru, k)
	return true
}

func (w *world) maruUndo(e *meta.MaruEntry) bool {
	k, _ := w.maruAt(e.Key)
	if !k.lies(e) {
		return false
	}
	w.dropMaru(k)
	return true
}

// maruKeyed carries out an operation on a key that is there.
func (w *world) maruKeyed(op meta.MaruOp, k *maruKey) bool {
	switch op {
	case meta.MaruDelete:
		if k.pins > 0 {
			return false
		}
		w.dropMaru(k)
	case meta.MaruPin:
		k.pins++
	case meta.MaruUnpin:
		if k.pins == 0 {
			return false
		}
		k.pins--
	default: // MaruExists
	}
	return true
}

// maruReturn has an instance return a region; with its last one its session ends.
func (w *world) maruReturn(c *meta.Maru) bool {
	r := w.regions[c.Region]
	if r == nil || r.owner == nil || r.owner.info.TTLMS != 0 || r.owner.info.Instance != c.Instance {
		return false
	}
	s := r.owner
	switch r.state {
	case meta.RegionOwned, meta.RegionOrphaned:
		w.depart(r)
	case meta.RegionDeparted:
		return true
	case meta.RegionMarked, meta.RegionDraining:
		return false
	}
	if !s.open || slices.ContainsFunc(w.owned(s), func(r *region) bool { return r.state == meta.RegionOwned }) {
		return true
	}
	w.end(s)
	w.fenced(s)
	return true
}

// decodeMaru decodes the result of a command of a client of Maru's: as many answers as there are.
func decodeMaru(body []byte) (maruAnswer, error) {
	r := meta.DecodeMaru(body)
	a := maruAnswer{Op: r.Op}
	for range body {
		if all := r; all.End() == nil {
			break
		}
		if a.Op == meta.MaruLookup {
			a.Found = append(a.Found, r.Found())
		} else {
			a.Bools = append(a.Bools, r.Bool())
		}
	}
	return a, r.End()
}

// compareMaru compares Maru's keys, one by one and in sum.
func (w *world) compareMaru(m *meta.Machine) error {
	var size meta.MaruSum
	used := map[*region]meta.MaruSum{}
	for _, k := range w.maru {
		size.Add(k.Length)
		if k.region != nil {
			sum := used[k.region]
			sum.Add(k.Length)
			used[k.region] = sum
			if !k.region.sound() {
				continue // it is there until it is swept away, and nobody sees it
			}
		}
		if !m.MaruExists(k.Key) {
			return w.violation("the state: a key of Maru's is there", k.key, "it is not")
		}
		if err := w.same("where "+k.key+" lies", k.found(), m.MaruLookup(k.Key)); err != nil {
			return err
		}
	}
	keys, total := m.MaruTotal()
	if err := w.same("how many keys of Maru's there are", len(w.maru), keys); err != nil {
		return err
	}
	for _, r := range w.regionList() {
		if err := w.same("what Maru's keys use of a region", used[r], m.MaruUsed(r.id)); err != nil {
			return err
		}
	}
	return w.same("what Maru's keys name in all", size, total)
}
