package server

import (
	"context"
	"time"

	"larder/meta"
	"larder/raft"
)

// Status is what one member knows of itself, its cluster and the pool.
type Status struct {
	NodeID      uint64         `json:"node_id"`
	ClusterName string         `json:"cluster_name"`
	ClusterID   string         `json:"cluster_id"` // hexadecimal
	Pool        string         `json:"pool"`       // pool id, hexadecimal: what device headers carry
	Incarnation uint64         `json:"incarnation"`
	Version     string         `json:"version"`
	UptimeMS    int64          `json:"uptime_ms"`
	LogTimeMS   uint64         `json:"log_time_ms"` // last stamped log time
	Role        string         `json:"role"`        // leader, follower, candidate, learner
	Leader      uint64         `json:"leader"`      // 0 = none known
	Term        uint64         `json:"term"`
	Commit      uint64         `json:"commit"`
	Applied     uint64         `json:"applied"`
	FirstIndex  uint64         `json:"first_index"`
	LastIndex   uint64         `json:"last_index"`
	StateHash   string         `json:"state_hash"` // hexadecimal; equal on all members at the same applied index
	Serving     bool           `json:"serving"`    // this member leads and answers
	GraceMS     int64          `json:"grace_ms"`   // what is left of a new leader's wait before it evicts
	Connections int            `json:"connections"`
	Settings    meta.Settings  `json:"settings"`
	Stats       meta.Stats     `json:"stats"`
	Disk        raft.Space     `json:"disk"`
	Members     []MemberStatus `json:"members"`
	Devices     []DeviceStatus `json:"devices"`
}

// MemberStatus is one member of the cluster. Match, Lag and Active are known to the leader only.
type MemberStatus struct {
	ID      uint64 `json:"id"`
	Addr    string `json:"addr"`   // for the other members
	Client  string `json:"client"` // for clients
	Socket  string `json:"socket,omitempty"`
	Admin   string `json:"admin,omitempty"`
	Learner bool   `json:"learner"`
	Leader  bool   `json:"leader"`
	Active  bool   `json:"active"`
	Match   uint64 `json:"match"`
	Lag     uint64 `json:"lag"` // entries behind the leader's log
}

// DeviceStatus is one device of the pool.
type DeviceStatus struct {
	ID          uint64 `json:"id"`
	UUID        string `json:"uuid"`
	Path        string `json:"path"`
	Node        string `json:"node"` // the host it is attached to
	Tier        string `json:"tier"`
	Coherence   string `json:"coherence"`
	Size        uint64 `json:"size"`
	Free        uint64 `json:"free"`
	LargestFree uint64 `json:"largest_free"`
	Regions     int    `json:"regions"`
	Volatile    bool   `json:"volatile"`
	Generation  string `json:"generation"` // hexadecimal
	Home        string `json:"home"`       // instance that serves it; "" = the masters do
	Mode        string `json:"mode"`       // serving, or away: its home is gone
	LostInMS    uint64 `json:"lost_in_ms"` // while away: when what lies there is given up; 0 = it is
	Draining    bool   `json:"draining"`   // it is given up: what lies there is moved away
	Ready       bool   `json:"ready"`      // regions may be given there; leader only
	Entries     uint64 `json:"entries"`    // entries' locations there, copies included
	LiveBytes   uint64 `json:"live_bytes"` // of them
	CopyBytes   uint64 `json:"copy_bytes"` // of the copies among them
	Tasks       int    `json:"tasks"`      // that copy to it and are not over

	Held *DeviceHeld `json:"held,omitempty"` // while it is given up: what that waits for
}

// RegionStatus is one region.
type RegionStatus struct {
	ID         uint64 `json:"id"`
	Device     uint64 `json:"device"`
	Offset     uint64 `json:"offset"`
	Length     uint64 `json:"length"`
	PageSize   uint64 `json:"page_size"`
	Epoch      uint64 `json:"epoch"`
	State      string `json:"state"`
	Instance   string `json:"instance"`
	Session    uint64 `json:"session"`
	Entries    uint64 `json:"entries"`
	Bytes      uint64 `json:"bytes"`
	Pinned     uint64 `json:"pinned"`
	AgeMS      uint64 `json:"age_ms"`
	LeasedMS   int64  `json:"leased_ms"` // longest lease that may be left inside; leader only
	RevokingMS int64  `json:"revoking_ms,omitempty"`
}

// ClientStatus is one session.
type ClientStatus struct {
	Session     uint64 `json:"session"`
	Instance    string `json:"instance"`
	Tenant      string `json:"tenant"`
	Open        bool   `json:"open"`
	Fenced      bool   `json:"fenced"`
	TTLMS       uint64 `json:"ttl_ms"`
	ExpiresMS   int64  `json:"expires_ms"` // until it expires unless it is heard from; leader only, -1 = never or unknown
	Connections int    `json:"connections"`
	Regions     int    `json:"regions"`
	Pins        int    `json:"pins"`
	Acked       uint64 `json:"acked"`
	PID         uint64 `json:"pid,omitempty"`
	LocalHost   bool   `json:"local_host"` // its process can be watched from here
	OpenedMS    uint64 `json:"opened_ms"`  // log time
}

// KeyStatus is one entry.
type KeyStatus struct {
	Tenant   string        `json:"tenant"`
	Key      string        `json:"key"` // any bytes
	Location meta.Location `json:"location"`
	Pins     uint64        `json:"pins"`
	Class    string        `json:"class"`
}

// PinStatus is one pin.
type PinStatus struct {
	Tenant  string
	Key     []byte
	Class   string // hard or soft
	Owner   string // of a durable or soft pin
	Session uint64 // of any other, which ends with it
	UntilMS uint64 // log time at which it ends; 0 = it does not
	LeftMS  int64  // until then; -1 = no end
}

// PinFilter selects pins; empty fields match everything.
type PinFilter struct {
	Tenant string
	Owner  string
}

// DrainReport is the outcome of Drain.
type DrainReport struct {
	Asked int // regions that the instance was asked to give up
	Kept  []KeptRegion
}

// KeptRegion is a region that Drain did not ask for, and why.
type KeptRegion struct {
	Region uint64 `json:"region"`
	Reason string `json:"reason"` // and what to do
}

// CheckReport is the outcome of Check.
type CheckReport struct {
	Deep     bool            `json:"deep"`
	Devices  int             `json:"devices"`
	Foreign  []ForeignDevice `json:"foreign"` // of Devices, those that were not checked since another host has them
	Regions  int             `json:"regions"`
	Entries  uint64          `json:"entries"`
	Verified uint64          `json:"verified"` // entries whose checksum was compared with their bytes
	Skipped  uint64          `json:"skipped"`  // entries without a checksum, on devices that are not reachable from here, or gone meanwhile
	Problems []string        `json:"problems"` // at most maxProblems; empty = all is well
}

// ForeignDevice is a device that a member of another host has to check, or one that a node serves.
type ForeignDevice struct {
	ID   uint64 `json:"id"`
	Path string `json:"path"`
	Node string `json:"node"` // the host it is attached to
	Home string `json:"home"` // the node's instance; "" = the masters serve it
}

// maxProblems bounds a CheckReport: an operator needs examples, not millions of lines.
const maxProblems = 1000

// PinSpec is an operator's pin.
type PinSpec struct {
	Tenant string        // whose keys; "" = the default tenant
	Owner  string        // name that it is listed and undone by
	TTL    time.Duration // 0 = until undone
	Soft   bool          // evicted last instead of never
}

// NewMember is a member to add. ID 0 draws a random one.
type NewMember struct {
	ID     uint64
	Addr   string // host:port for the other members
	Client string // host:port for clients
	Admin  string // host:port of the admin
	Voter  bool   // add as a voter at once instead of as a learner
}

// ctxDefault bounds operators' calls that bring no deadline of their own.
const ctxDefault = 30 * time.Second

// bounded returns ctx with ctxDefault's deadline unless it has one.
func bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, ctxDefault)
}
