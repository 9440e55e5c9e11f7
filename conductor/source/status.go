package source

import "time"

// State is how a source is.
type State string

// The states of a source.
const (
	Connecting   State = "connecting"   // it has not been reached yet
	Replaying    State = "replaying"    // it is being asked for what was missed
	Live         State = "live"         // all is known since it began, or since it was first heard of
	Stale        State = "stale"        // batches were lost for good: what was known was dropped, and it is followed from there on
	Disconnected State = "disconnected" // it was reached before
)

// Counters count what came from a source. They only grow.
type Counters struct {
	Batches    uint64 `json:"batches"`    // that were applied, those of replays among them
	Events     uint64 `json:"events"`     // of these
	Bad        uint64 `json:"bad"`        // batches that are none, events that cannot be read, and those that the index refuses
	Unknown    uint64 `json:"unknown"`    // events of types that are not known
	Gaps       uint64 `json:"gaps"`       // in the batches' numbers
	Replays    uint64 `json:"replays"`    // that were asked for
	Replayed   uint64 `json:"replayed"`   // batches that came by them, and were applied
	Dropped    uint64 `json:"dropped"`    // batches that were missed for good
	Stale      uint64 `json:"stale"`      // how often what was known was dropped because of that
	Restarts   uint64 `json:"restarts"`   // how often the engine was seen to have begun anew
	Expired    uint64 `json:"expired"`    // how often what was known was dropped because the engine was away for too long
	Connects   uint64 `json:"connects"`   // how often it was reached
	Verified   uint64 `json:"verified"`   // blocks whose engine's hash is as configured
	Mismatched uint64 `json:"mismatched"` // blocks whose engine's hash is another: its seed differs
}

// Status is a service and how it is.
type Status struct {
	Service

	State    State         `json:"state"`
	Epoch    uint64        `json:"epoch"`           // from 1 on; one more each time the engine was restarted
	Sequence int64         `json:"sequence"`        // of the last batch that was applied; -1 before the first
	Idle     time.Duration `json:"idle"`            // since something came from it; since it was registered if nothing has
	Error    string        `json:"error,omitempty"` // why it is not reached, or what was bad last

	Counters
}

// Stats sums up all sources, those included that are registered no more.
type Stats struct {
	Services map[State]int
	Counters
}

// read is what has been counted.
func (c *counters) read() Counters {
	return Counters{
		Batches: c.batches.Load(), Events: c.events.Load(), Bad: c.bad.Load(), Unknown: c.unknown.Load(), Gaps: c.gaps.Load(),
		Replays: c.replays.Load(), Replayed: c.replayed.Load(), Dropped: c.dropped.Load(), Stale: c.stale.Load(),
		Restarts: c.restarts.Load(), Expired: c.expired.Load(), Connects: c.connects.Load(),
		Verified: c.verified.Load(), Mismatched: c.mismatched.Load(),
	}
}

// add adds what another source has counted.
func (c *Counters) add(o Counters) {
	c.Batches += o.Batches
	c.Events += o.Events
	c.Bad += o.Bad
	c.Unknown += o.Unknown
	c.Gaps += o.Gaps
	c.Replays += o.Replays
	c.Replayed += o.Replayed
	c.Dropped += o.Dropped
	c.Stale += o.Stale
	c.Restarts += o.Restarts
	c.Expired += o.Expired
	c.Connects += o.Connects
	c.Verified += o.Verified
	c.Mismatched += o.Mismatched
}
