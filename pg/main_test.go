package pg

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// TestMain also is a rank of its own process, for tests that kill some: see ranks_test.go.
func TestMain(m *testing.M) {
	if os.Getenv(rankEnv) != "" {
		os.Exit(beRank())
	}
	goleak.VerifyTestMain(m)
}
