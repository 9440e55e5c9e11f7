package model

import (
	"slices"

	"larder/meta"
	"larder/protocol"
)

// setTenant replaces a tenant's limits.
func (w *world) setTenant(c *meta.SetTenant) result {
	known := slices.Contains(w.tenants, c.Tenant)
	left := uint64(0)
	for _, d := range w.devices {
		left += d.capacity()
	}
	for name, l := range w.limits {
		if name != c.Tenant {
			left -= min(left, l.Guarantee)
		}
	}
	switch {
	case w.settings.Version < meta.VersionTenants:
		return refused(protocol.CodeUnsupported)
	case c.Tenant == "" || len(c.Tenant) > protocol.MaxNameBytes || c.Limits.MaxPins > meta.MaxDurablePins:
		return refused(protocol.CodeBadRequest)
	case !known && c.Limits == meta.TenantLimits{}:
		return refused(protocol.CodeNotFound)
	case c.Limits.Guarantee > max(left, w.limits[c.Tenant].Guarantee):
		return refused(protocol.CodeNoSpace)
	case !known && len(w.contexts) >= meta.MaxContexts:
		return refused(protocol.CodeLimit)
	}
	if !known {
		w.addTenant(c.Tenant)
	}
	w.limits[c.Tenant] = c.Limits
	return result{}
}

// capacity is how many bytes of a device regions can be cut from.
func (d *device) capacity() uint64 { return max(d.end(), d.DataOffset) - d.DataOffset }

// space sums up the regions of a tenant's clients, those that are gone included, that were not taken and not lost.
func (w *world) space(tenant string) uint64 {
	n := uint64(0)
	for _, r := range w.regions {
		switch r.state {
		case meta.RegionOwned, meta.RegionOrphaned, meta.RegionDeparted:
			if r.owner.tenant == tenant && !r.lost() {
				n += r.length
			}
		case meta.RegionMarked, meta.RegionDraining:
		}
	}
	return n
}

// guaranteed reports whether a region may not be taken for a session, nil if it has ended: it is another tenant's, which
// would be left with less than its guarantee.
func (w *world) guaranteed(r *region, by *session) bool {
	if r.owner == nil || r.lost() || r.state == meta.RegionMarked || r.state == meta.RegionDraining {
		return false
	}
	t := r.owner.tenant
	return (by == nil || by.tenant != t) && w.limits[t].Guarantee > 0 && w.space(t) < w.limits[t].Guarantee+r.length
}
