package model

import (
	"cmp"
	"math"
	"slices"

	"larder/meta"
	"larder/protocol"
)

// maxPinsPerEntry bounds the holders of one entry.
const maxPinsPerEntry = 1024

func (w *world) register(s *session, c *meta.Register) result {
	var all []meta.RegisterResult
	ctx := w.contextFor(tenantOf(s), c.Context)
	w.inUse, w.before = ctx, w.births
	for i := range c.Entries {
		if ctx == nil {
			all = append(all, meta.RegisterResult{Code: protocol.CodeLimit})
			continue
		}
		all = append(all, w.registerOne(s, ctx, &c.Entries[i]))
	}
	w.inUse = nil
	if ctx != nil {
		w.forgetContext(ctx)
	}
	return result{value: all}
}

// contextFor returns the context of a REGISTER, nil if there are too many.
func (w *world) contextFor(tenant string, c *protocol.Context) *context {
	full := meta.Context{Tenant: tenant}
	if c != nil {
		full = meta.Context{Tenant: tenant, Model: c.Model, LoRA: c.LoRA, Salt: c.Salt, BlockSize: c.BlockSize, Seed: c.Seed}
	}
	for _, x := range w.contexts {
		if x.Context == full {
			return x
		}
	}
	if len(w.contexts) >= meta.MaxContexts {
		return nil
	}
	x := &context{Context: full}
	w.contexts = append(w.contexts, x)
	return x
}

func (w *world) registerOne(s *session, ctx *context, x *protocol.RegisterEntry) meta.RegisterResult {
	if x.Copy {
		return w.registerCopy(s, ctx.Tenant, x)
	}
	key := string(x.Key)
	if e := w.find(ctx.Tenant, key); e != nil {
		if w.alive(e) {
			return w.exists(e, x)
		}
		if !x.Touch {
			w.drop(e, w.death(e), true)
		}
	}
	if x.HasPrefix && !x.Touch {
		if e := w.twin(ctx, x); e != nil {
			w.counts.Deduplicated++
			return w.exists(e, x)
		}
	}
	r, code := w.admit(s, x)
	if code != 0 {
		return meta.RegisterResult{Code: code}
	}
	w.births++
	e := &entry{
		birth: w.births, key: key, ctx: ctx, length: x.KVLength, checksum: x.Checksum, added: w.now, prefix: x.HasPrefix,
	}
	e.at = []*location{{e, r, x.KVOffset, e.birth}}
	w.wish(e, x.Replicas)
	if x.HasPrefix {
		e.hash, e.group = x.Hash, x.Group
	}
	ttl := x.TTLMS
	if ttl == 0 && w.settings.Policy == "ttl" {
		ttl = w.settings.TTLMS
	}
	if ttl != 0 {
		e.expires = w.now + min(ttl, math.MaxUint64-w.now)
	}
	w.insert(e)
	w.joins(e)
	w.counts.Registered++
	return meta.RegisterResult{New: true}
}

// insert puts an entry into the lowest free slot.
func (w *world) insert(e *entry) {
	i := slices.Index(w.entries, nil)
	if i < 0 {
		i = len(w.entries)
		w.entries = append(w.entries, nil)
		if w.sweepAt+w.sweepLeft > uint64(i) { // the sweep in progress comes by the new slot before it is done
			w.sweepLeft++
		}
		for _, x := range w.marks {
			if w.sweepAt+x.left > uint64(i) {
				x.left++
			}
		}
	}
	e.slot = meta.Slot(i)
	w.entries[i] = e
}

// exists counts a use of an entry that a REGISTER has found.
func (w *world) exists(e *entry, x *protocol.RegisterEntry) meta.RegisterResult {
	w.touch(e, 1)
	w.wish(e, x.Replicas)
	w.counts.Existing++
	r := meta.RegisterResult{Existing: e.found().describe()}
	if e.key != string(x.Key) {
		r.Key = []byte(e.key)
	}
	return r
}

// twin returns the oldest entry with the same prefix hash and group.
func (w *world) twin(ctx *context, x *protocol.RegisterEntry) *entry {
	return w.oldest(func(e *entry) bool {
		return e.ctx == ctx && e.prefix && e.hash == x.Hash && e.group == x.Group
	})
}

// oldest returns the oldest entry that is alive and matches.
func (w *world) oldest(match func(e *entry) bool) *entry {
	var best *entry
	for _, e := range w.entries {
		if e != nil && w.alive(e) && match(e) && (best == nil || e.birth < best.birth) {
			best = e
		}
	}
	return best
}

// admit says why a new entry is refused.
func (w *world) admit(s *session, x *protocol.RegisterEntry) (*region, protocol.Code) {
	r := w.regions[meta.RegionID(x.RegionID)]
	native := x.Epoch != 0 || s != nil && s.info.TTLMS != 0
	switch {
	case x.Touch:
		return nil, protocol.CodeNotFound
	case len(x.Key) > protocol.MaxKeyBytes:
		return nil, protocol.CodeKeyTooLong
	case x.KVLength == 0, x.KVLength > meta.MaxEntryBytes, x.Group > math.MaxUint32, x.Index > math.MaxUint32,
		x.Group%(1<<16) > meta.MaxGroupMembers:
		return nil, protocol.CodeBadRequest
	case r == nil, r.state == meta.RegionDraining, native && r.epoch != x.Epoch:
		return nil, protocol.CodeStaleEpoch
	case native && (s == nil || r.owner != s):
		return nil, protocol.CodeNotOwner
	case r.state == meta.RegionMarked:
		return nil, protocol.CodeRevoking
	case native && r.state != meta.RegionOwned:
		return nil, protocol.CodeStaleEpoch
	case r.lost(), r.device.mode != meta.DeviceServing:
		return nil, protocol.CodeStaleGeneration
	case x.KVOffset > r.length, x.KVLength > r.length-x.KVOffset:
		return nil, protocol.CodeOutOfRegion
	case x.KVOffset%r.pageSize != 0:
		return nil, protocol.CodeMisaligned
	}
	wanted := &location{entry: &entry{length: x.KVLength}, region: r, offset: x.KVOffset}
	first, end := wanted.pages()
	if end > r.length/r.pageSize {
		return nil, protocol.CodeOutOfRegion
	}
	for _, l := range w.in(r) {
		if from, to := l.pages(); from < end && first < to {
			return nil, protocol.CodeOverlap
		}
	}
	return r, 0
}

func (w *world) delete(s *session, c *meta.Delete) result {
	var d meta.DeleteResult
	for _, key := range c.Keys {
		e := w.find(tenantOf(s), string(key))
		switch {
		case e == nil || w.over(e):
			d.Codes = append(d.Codes, protocol.CodeNotFound)
		case e.hard():
			d.Codes = append(d.Codes, protocol.CodePinned)
		case c.Region != 0:
			w.deleteAt(s, e, c, &d)
		default:
			d.Codes = append(d.Codes, 0)
			d.Freed = append(d.Freed, e.primary().page())
			w.drop(e, meta.ReasonDeleted, s == nil || e.primary().region.owner != s)
		}
	}
	return result{value: d}
}

// deleteAt removes the location of an entry that has the byte which a client found damaged.
func (w *world) deleteAt(s *session, e *entry, c *meta.Delete, d *meta.DeleteResult) {
	i := slices.IndexFunc(e.at, func(l *location) bool {
		return l.region.id == c.Region && l.offset <= c.Offset && c.Offset < l.offset+e.length
	})
	switch {
	case w.settings.Version < meta.VersionTiers:
		d.Codes = append(d.Codes, protocol.CodeUnsupported)
		return
	case i < 0:
		d.Codes = append(d.Codes, protocol.CodeNotFound)
		return
	}
	l := e.at[i]
	p, mine := l.page(), s != nil && l.region.owner == s
	p.Copy = l != e.primary() || w.heir(e) != nil
	d.Codes, d.Freed = append(d.Codes, 0), append(d.Freed, p)
	if !p.Copy {
		w.drop(e, meta.ReasonLost, !mine)
		return
	}
	if !mine {
		w.tell(l, meta.ReasonLost)
	}
	w.leaves(l)
}

// holding is a pin and what it holds.
type holding struct {
	*pin
	entry *entry
}

// pinList returns the pins that match, in the order of their making.
func (w *world) pinList(match func(p *pin) bool) []holding {
	var list []holding
	for _, e := range w.entries {
		if e == nil {
			continue
		}
		for _, p := range e.pins {
			if match(p) {
				list = append(list, holding{p, e})
			}
		}
	}
	slices.SortFunc(list, func(a, b holding) int { return cmp.Compare(a.id, b.id) })
	return list
}

// hold and unhold change an entry's pins, which takes it out of its policy and puts it back as if it had been used.
func (w *world) hold(h holding) {
	w.leavesOld(h.entry)
	h.entry.pins = append(h.entry.pins, h.pin)
	w.joins(h.entry)
}

func (w *world) unhold(h holding) {
	w.leavesOld(h.entry)
	h.entry.pins = slices.DeleteFunc(h.entry.pins, func(p *pin) bool { return p == h.pin })
	w.joins(h.entry)
}

func (w *world) pin(s *session, c *meta.Pin) result {
	if len(c.Owner) > protocol.MaxNameBytes || c.Class != meta.ClassHard && c.Class != meta.ClassSoft {
		return refused(protocol.CodeBadRequest)
	}
	var codes []protocol.Code
	stopped := false
	for _, key := range c.Keys {
		code := protocol.CodeNotFound
		if e := w.find(tenantOf(s), string(key)); !stopped && e != nil && w.alive(e) {
			code = w.pinOne(s, c, e)
		}
		stopped = stopped || c.Strict && code != 0
		codes = append(codes, code)
	}
	return result{value: codes}
}

// pinOne pins or unpins one entry.
func (w *world) pinOne(s *session, c *meta.Pin, e *entry) protocol.Code {
	durable := c.Owner != "" || c.Class == meta.ClassSoft
	holder := meta.SessionID(0)
	if !durable && s != nil {
		holder = s.id
	}
	i := slices.IndexFunc(e.pins, func(p *pin) bool {
		return p.class == c.Class && p.owner == c.Owner && p.session == holder
	})
	switch {
	case c.Undo && i < 0:
		return protocol.CodeNotFound
	case c.Undo && !durable && e.pins[i].count > 1:
		e.pins[i].count--
		return 0
	case c.Undo:
		w.unhold(holding{e.pins[i], e})
		return 0
	case i >= 0:
		e.pins[i].count++
		e.pins[i].until = c.Until
		return 0
	case !durable && s == nil:
		return protocol.CodeBadRequest
	case !durable && len(w.pinList(func(p *pin) bool { return p.session == holder })) >= meta.MaxSessionPins,
		durable && w.pinsOf(tenantOf(s), true) >= meta.MaxDurablePins, len(e.pins) >= maxPinsPerEntry, w.atPinLimit(tenantOf(s)):
		return protocol.CodeLimit
	}
	w.pinIDs++
	w.hold(holding{&pin{id: w.pinIDs, session: holder, owner: c.Owner, class: c.Class, until: c.Until, count: 1}, e})
	return 0
}

// atPinLimit reports whether a tenant has as many pins as it may.
func (w *world) atPinLimit(tenant string) bool {
	limit := w.limits[tenant].MaxPins
	return limit != 0 && uint64(w.pinsOf(tenant, true)+w.pinsOf(tenant, false)) >= limit
}

// pinsOf counts a tenant's durable and soft pins, or those of its sessions.
func (w *world) pinsOf(tenant string, durable bool) int {
	n := 0
	for _, e := range w.entries {
		if e == nil || e.ctx.Tenant != tenant {
			continue
		}
		for _, p := range e.pins {
			if (p.session == 0) == durable {
				n++
			}
		}
	}
	return n
}

// timed returns the durable and soft pins that end.
func (w *world) timed() []holding {
	return w.pinList(func(p *pin) bool { return p.session == 0 && p.until != 0 })
}

func (w *world) expirePins() result {
	over := slices.DeleteFunc(w.timed(), func(h holding) bool { return h.until > w.now })
	slices.SortFunc(over, func(a, b holding) int { return cmp.Or(cmp.Compare(a.until, b.until), cmp.Compare(a.id, b.id)) })
	left := 0
	if len(over) > meta.MaxDropPerCommand {
		over, left = over[:meta.MaxDropPerCommand], 1
	}
	for _, h := range over {
		w.unhold(h)
	}
	return result{value: meta.CountResult{Count: uint64(len(over)), Left: uint64(left)}}
}
