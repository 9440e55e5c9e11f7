package meta

import (
	"maps"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestAStoreThatHasLostRecordsIsRefused: whichever record is gone, or is one of an earlier flush, the rest is not taken for
// the state.
func TestAStoreThatHasLostRecordsIsRefused(t *testing.T) {
	earlier := sampleStore(t)
	m, err := Open(earlier)
	require.NoError(t, err)
	later := &memStore{records: maps.Clone(earlier.records)}
	p := &pool{tb: t, m: m, store: later, seqs: map[SessionID]uint64{}, now: m.NowMS() + 1, index: m.Applied()}
	p.open("another")
	p.m.Flush(later)
	_, err = Open(later)
	require.NoError(t, err)
	for key := range later.records {
		if key == string([]byte{recHead}) {
			continue // without a head there is no state, and the log begins at its first entry
		}
		part := &memStore{records: maps.Clone(later.records)}
		delete(part.records, key)
		_, err := Open(part)
		require.Error(t, err, "without record %q", key)
		if old, ok := earlier.records[key]; !ok || old == nil || string(old) == string(later.records[key]) {
			continue
		}
		part.records[key] = earlier.records[key]
		_, err = Open(part)
		require.ErrorIs(t, err, ErrCorrupt, "with record %q as it was", key)
	}
}
