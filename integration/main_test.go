package integration

import (
	"testing"

	"larder/integration/cluster"
)

// TestMain runs the tests, or, in a child process, what the parent asked for.
func TestMain(m *testing.M) { cluster.Main(m) }
