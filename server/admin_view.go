package server

import (
	"encoding/hex"
	"fmt"
	"strings"

	"larder/meta"
	"larder/raft"
)

// The types here are what the admin's JSON holds. Their names and fields are stable: they may grow, and are decoded by
// larder ctl and by other programs.

// StatusReply answers GET /status.
type StatusReply struct {
	Status

	Settings SettingsView `json:"settings"`
	Stats    StatsView    `json:"stats"`
	Disk     DiskView     `json:"disk"`
	Requests RequestsView `json:"requests"`
}

// SettingsView shows the replicated settings; it answers GET and POST /policy.
type SettingsView struct {
	Version               uint32 `json:"version"`
	Policy                string `json:"policy"`
	TTLMS                 uint64 `json:"ttl_ms"`
	PageSize              uint64 `json:"page_size"`
	RegionSize            uint64 `json:"region_size"`
	MaxRegionsPerInstance uint64 `json:"max_regions_per_instance"`
	MinRegionAgeMS        uint64 `json:"min_region_age_ms"`
	TierLow               uint64 `json:"tier_low"`      // percent
	PromoteAfter          uint64 `json:"promote_after"` // uses
	PromoteMost           uint64 `json:"promote_most"`  // bytes
	PromoteRate           uint64 `json:"promote_rate"`  // bytes per second
	TierLows              string `json:"tier_lows"`     // of tiers and devices: dram=60%,#3=50%
}

// settingsView converts settings.
func settingsView(s meta.Settings) SettingsView { return SettingsView(s) }

// StatsView shows what the index holds, and what it did since this member started.
type StatsView struct {
	Entries        uint64            `json:"entries"`
	EntryBytes     uint64            `json:"entry_bytes"`
	KeyBytes       uint64            `json:"key_bytes"`
	PoolBytes      uint64            `json:"pool_bytes"`
	FreeBytes      uint64            `json:"free_bytes"` // in no region
	Sessions       int               `json:"sessions"`
	ClosedSessions int               `json:"closed_sessions"` // ended, with regions left
	Regions        map[string]int    `json:"regions"`         // by state
	Contexts       int               `json:"contexts"`
	Registered     uint64            `json:"registered"`
	Existing       uint64            `json:"existing"`     // REGISTERs of a key that was held
	Deduplicated   uint64            `json:"deduplicated"` // of those, held under another key
	Touched        uint64            `json:"touched"`
	Removed        map[string]uint64 `json:"removed"`   // entries, by reason
	Evictions      []uint64          `json:"evictions"` // entries, by phase
	Allocs         []uint64          `json:"allocs"`    // REQUEST_ALLOCs carried out, by phase
	Tenants        []TenantView      `json:"tenants"`
}

// TenantView shows what one tenant holds, and its limits; lists of it answer GET /tenants, one answers POST.
type TenantView struct {
	Name        string `json:"name"`
	Entries     uint64 `json:"entries"`
	Bytes       uint64 `json:"bytes"`        // of the entries
	Space       uint64 `json:"space"`        // bytes of the regions that they lie in: what a guarantee is about
	Pins        uint64 `json:"pins"`         // operators', and other durable or soft ones
	SessionPins uint64 `json:"session_pins"` // those that end with their sessions
	Guarantee   uint64 `json:"guarantee"`    // bytes of the pool that others' evictions leave it; 0 = none
	MaxPins     uint64 `json:"max_pins"`     // of both kinds; 0 = no limit of its own
}

// tenantView converts a tenant's counts.
func tenantView(t *meta.TenantStats) TenantView {
	return TenantView{
		Name: t.Name, Entries: t.Entries, Bytes: t.Bytes, Space: t.Space, Pins: t.Pins, SessionPins: t.SessionPins,
		Guarantee: t.Guarantee, MaxPins: t.MaxPins,
	}
}

// regionStateList lists the states that a region can be in.
var regionStateList = []meta.RegionState{
	meta.RegionOwned, meta.RegionOrphaned, meta.RegionDeparted, meta.RegionMarked, meta.RegionDraining,
}

// removalReasons lists why entries leave.
var removalReasons = []meta.Reason{
	meta.ReasonDeleted, meta.ReasonEvicted, meta.ReasonCleared, meta.ReasonLost, meta.ReasonExpired, meta.ReasonTaken,
}

// statsView converts the index's counts.
func statsView(s *meta.Stats) StatsView {
	v := StatsView{
		Entries: s.Entries, EntryBytes: s.LiveBytes, KeyBytes: s.KeyBytes, PoolBytes: s.PoolBytes, FreeBytes: s.FreeBytes,
		Sessions: s.Sessions, ClosedSessions: s.Closed, Contexts: s.Contexts,
		Registered: s.Registered, Existing: s.Existing, Deduplicated: s.Deduplicated, Touched: s.Touched,
		Regions: make(map[string]int), Removed: make(map[string]uint64),
		Evictions: s.Evictions[:], Allocs: s.Allocs[:], Tenants: make([]TenantView, 0, len(s.Tenants)),
	}
	for _, state := range regionStateList {
		v.Regions[state.String()] = s.Regions[state]
	}
	for _, reason := range removalReasons {
		v.Removed[reason.String()] = s.Removed[reason]
	}
	for i := range s.Tenants {
		v.Tenants = append(v.Tenants, tenantView(&s.Tenants[i]))
	}
	return v
}

// DiskView shows the data directory's file system.
type DiskView struct {
	AvailBytes uint64 `json:"avail_bytes"`
	TotalBytes uint64 `json:"total_bytes"`
	Full       bool   `json:"full"`     // changes are refused
	Critical   bool   `json:"critical"` // even those from a leader
}

// diskView converts a measurement.
func diskView(s raft.Space) DiskView { return DiskView(s) }

// RequestsView shows what this member's listeners did since it started: what larder top computes its rates from.
type RequestsView struct {
	ByType         map[string]uint64 `json:"by_type"`
	Errors         map[string]uint64 `json:"errors"`
	Keys           uint64            `json:"keys"` // looked up
	Hits           uint64            `json:"hits"` // and found
	LeasesGranted  uint64            `json:"leases_granted"`
	TouchesDropped uint64            `json:"touches_dropped"`
	RevokesPending int64             `json:"revokes_pending"`
	AllocWaits     uint64            `json:"alloc_waits"`
	BytesIn        uint64            `json:"bytes_in"`
	BytesOut       uint64            `json:"bytes_out"`
}

// requestsView takes the counters that are not zero.
func requestsView(c *Counters) RequestsView {
	v := RequestsView{
		ByType: make(map[string]uint64), Errors: make(map[string]uint64),
		Keys: c.Keys.Load(), Hits: c.Hits.Load(), LeasesGranted: c.LeasesGranted.Load(),
		TouchesDropped: c.TouchesDropped.Load(), RevokesPending: c.RevokesPending.Load(), AllocWaits: c.AllocWaits.Load(),
		BytesIn: c.BytesIn.Load(), BytesOut: c.BytesOut.Load(),
	}
	for _, t := range requestTypes {
		if n := c.Requests[t].Load(); n != 0 {
			v.ByType[t.String()] = n
		}
		if n := c.Errors[t].Load(); n != 0 {
			v.Errors[t.String()] = n
		}
	}
	return v
}

// RegionsReply answers GET /regions.
type RegionsReply struct {
	Regions []RegionStatus `json:"regions"`
	Next    uint64         `json:"next"` // pass as after for the next page; 0 = the end
}

// KeysReply answers GET /keys.
type KeysReply struct {
	Keys []KeyView `json:"keys"`
	Next uint64    `json:"next"` // pass as cursor for the next page; 0 = the end
}

// KeyView shows one entry.
type KeyView struct {
	Tenant       string `json:"tenant"`
	Key          string `json:"key"`     // for people: what is not UTF-8 in it is shown as U+FFFD
	KeyHex       string `json:"key_hex"` // for programs
	Region       uint64 `json:"region"`
	Device       uint64 `json:"device"`
	Generation   string `json:"generation"` // hexadecimal
	Epoch        uint64 `json:"epoch"`
	RegionOffset uint64 `json:"region_offset"` // of the region in the device, bytes
	Offset       uint64 `json:"offset"`        // of the entry in the region, bytes
	Length       uint64 `json:"length"`        // bytes
	Checksum     string `json:"checksum"`      // XXH3-64, hexadecimal; "" = none
	Pins         uint64 `json:"pins"`
	Class        string `json:"class"`
}

// keyView converts an entry.
func keyView(k *KeyStatus) KeyView {
	l := &k.Location
	v := KeyView{
		Tenant: k.Tenant, Key: shown(k.Key), KeyHex: hex.EncodeToString([]byte(k.Key)),
		Region: uint64(l.Region), Device: uint64(l.Device), Generation: hex64(l.Generation), Epoch: l.Epoch,
		RegionOffset: l.RegionOffset, Offset: l.Offset, Length: l.Length, Pins: k.Pins, Class: k.Class,
	}
	if l.Checksum != 0 {
		v.Checksum = hex64(l.Checksum)
	}
	return v
}

// shown is a key as JSON can hold it.
func shown(key string) string { return strings.ToValidUTF8(key, "\uFFFD") }

// PinsReply answers GET /pins.
type PinsReply struct {
	Pins []PinView `json:"pins"`
	Next uint64    `json:"next"` // pass as cursor for the next page; 0 = the end
}

// PinView shows one pin.
type PinView struct {
	Tenant  string `json:"tenant"`
	Key     string `json:"key"`      // for people, as in KeyView
	KeyHex  string `json:"key_hex"`  // for programs
	Class   string `json:"class"`    // hard or soft
	Owner   string `json:"owner"`    // of a durable or soft pin
	Session uint64 `json:"session"`  // of any other, which ends with it
	UntilMS uint64 `json:"until_ms"` // log time at which it ends; 0 = it does not
	LeftMS  int64  `json:"left_ms"`  // until then; -1 = no end
}

// pinView converts a pin.
func pinView(p *PinStatus) PinView {
	return PinView{
		Tenant: p.Tenant, Key: shown(string(p.Key)), KeyHex: hex.EncodeToString(p.Key), Class: p.Class, Owner: p.Owner,
		Session: p.Session, UntilMS: p.UntilMS, LeftMS: p.LeftMS,
	}
}

// VersionReply answers GET /version.
type VersionReply struct {
	Version        string `json:"version"`
	Go             string `json:"go"`
	Platform       string `json:"platform"`
	Protocol       uint64 `json:"protocol"`        // native protocol version
	ClusterVersion uint32 `json:"cluster_version"` // newest that this binary speaks
}

// HealthReply answers GET /healthz and /readyz.
type HealthReply struct {
	OK bool `json:"ok"`
}

// hex64 formats ids and checksums that are shown as hexadecimal.
func hex64(v uint64) string { return fmt.Sprintf("%016x", v) }
