package p2p

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv(peerEnv) != "" {
		_, _ = fmt.Fprintln(os.Stderr, runPeer()) // it ends with its parent otherwise
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}
