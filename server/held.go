package server

import (
	"slices"

	"larder/meta"
)

// DeviceHeld says what a device that is given up waits for.
type DeviceHeld struct {
	Moving    uint64       `json:"moving"`               // entries that tasks have yet to copy elsewhere
	Pinned    uint64       `json:"pinned"`               // entries that are pinned there
	PinnedKey string       `json:"pinned_key,omitempty"` // one of them
	Tenant    string       `json:"pinned_tenant,omitempty"`
	LeasedMS  int64        `json:"leased_ms"` // for how long readers may still read there; leader only
	Owners    []OwnerQuiet `json:"owners"`    // who has regions there and has not let go of them, though asked, or without a word
}

// OwnerQuiet is an instance that does not let go of regions.
type OwnerQuiet struct {
	Instance string `json:"instance"`
	Regions  int    `json:"regions"`
	Ended    bool   `json:"ended"`    // its session has ended, and nothing proves that it writes no more
	AskedMS  int64  `json:"asked_ms"` // how long ago this leader knows it to be asked
}

// pinWindow is how many entries are looked at for one that is pinned.
const pinWindow = 1 << 16

// waitsOf says what the devices among some that are given up wait for. The caller holds state, and mu.
func (m *Master) waitsOf(devices []meta.DeviceInfo, now int64) map[meta.DeviceID]*DeviceHeld {
	held := map[meta.DeviceID]*DeviceHeld{}
	for i := range devices {
		if d := &devices[i]; d.Draining {
			held[d.ID] = &DeviceHeld{Owners: []OwnerQuiet{}}
		}
	}
	if len(held) == 0 {
		return held
	}
	for _, t := range m.machine.Tasks() {
		if h := held[t.MoveFrom]; h != nil && t.State < meta.TaskFinished {
			h.Moving += uint64(t.Total - t.Done)
		}
	}
	m.leases.mu.Lock()
	defer m.leases.mu.Unlock()
	for _, r := range m.machine.Regions() {
		if h := held[r.Device]; h != nil {
			m.heldRegion(h, &r, now)
		}
	}
	return held
}

// heldRegion adds what a region waits for.
func (m *Master) heldRegion(h *DeviceHeld, r *meta.RegionInfo, now int64) {
	if h.Pinned += uint64(r.Pinned); r.Pinned > 0 && h.PinnedKey == "" {
		looked := 0
		m.machine.EachEntry(r.ID, func(s meta.Slot) bool {
			if x := m.machine.Entry(s); x.Class == meta.ClassHard {
				h.PinnedKey, h.Tenant = string(m.machine.Key(s)), x.Tenant
			}
			looked++
			return h.PinnedKey == "" && looked < pinWindow
		})
	}
	if l := m.leases.regions[r.ID]; l != nil {
		h.LeasedMS = max(h.LeasedMS, int64(msUp(l.until-now))) //nolint:gosec // an election timeout at most
	}
	if r.State != meta.RegionMarked && r.State != meta.RegionOrphaned {
		return
	}
	i := slices.IndexFunc(h.Owners, func(o OwnerQuiet) bool { return o.Instance == r.Instance })
	if i < 0 {
		i, h.Owners = len(h.Owners), append(h.Owners, OwnerQuiet{Instance: r.Instance, Ended: !m.machine.SessionOpen(r.Owner)})
	}
	h.Owners[i].Regions++
	if v := m.revokes[r.ID]; v != nil {
		h.Owners[i].AskedMS = max(h.Owners[i].AskedMS, int64(msUp(now-v.since))) //nolint:gosec // milliseconds fit
	}
}
