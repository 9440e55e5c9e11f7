//go:build !rdma || !cgo || !linux

package verbs

import (
	"errors"
	"fmt"

	"larder/transfer"
)

// ErrNotBuilt says that NICs were named and that this program cannot use any.
var ErrNotBuilt = errors.New("this program is built without RDMA: build it on Linux, where libibverbs-dev is installed, with " +
	"CGO_ENABLED=1 go build -tags rdma ./cmd/larder")

// OpenNICs opens the ports of that name. In this build there are none: naming one is an error.
func OpenNICs(names []string) (nics []transfer.NIC, stop func() error, err error) {
	stop = func() error { return nil }
	if len(names) == 0 || len(names) == 1 && names[0] == "none" {
		return nil, stop, nil
	}
	return nil, nil, fmt.Errorf("verbs: NIC %s: %w", names[0], ErrNotBuilt)
}
