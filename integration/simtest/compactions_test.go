package simtest

import "github.com/cockroachdb/pebble/v2"

// compactions has a store's compactions wait until the process has come to rest: which tables one takes, and how files
// are numbered, would depend on how goroutines are scheduled otherwise. It is a pebble.CompactionScheduler.
type compactions struct {
	db    pebble.DBForCompaction
	asked bool
}

// run begins a compaction that waits. It reports whether there was one.
func (c *compactions) run() bool {
	if !c.asked || c.db == nil {
		return false
	}
	if c.asked, _ = c.db.GetWaitingCompaction(); !c.asked {
		return false
	}
	return c.db.Schedule(grant{})
}

// Register implements pebble.CompactionScheduler.
func (c *compactions) Register(_ int, db pebble.DBForCompaction) { c.db = db }

// Unregister implements pebble.CompactionScheduler.
func (c *compactions) Unregister() {}

// TrySchedule implements pebble.CompactionScheduler.
func (c *compactions) TrySchedule() (bool, pebble.CompactionGrantHandle) {
	c.asked = true // Pebble's lock is held
	return false, nil
}

// UpdateGetAllowedWithoutPermission implements pebble.CompactionScheduler.
func (c *compactions) UpdateGetAllowedWithoutPermission() {}

// grant is the leave to run one compaction. Nobody counts them.
type grant struct{}

// Started implements pebble.CompactionGrantHandle.
func (grant) Started() {}

// MeasureCPU implements pebble.CompactionGrantHandle.
func (grant) MeasureCPU(pebble.CompactionGoroutineKind) {}

// CumulativeStats implements pebble.CompactionGrantHandle.
func (grant) CumulativeStats(pebble.CompactionGrantHandleStats) {}

// Done implements pebble.CompactionGrantHandle.
func (grant) Done() {}
