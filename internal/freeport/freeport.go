// Package freeport finds ports to listen at, for tests and benchmarks that must know one before they start what listens there.
package freeport

import (
	"errors"
	"fmt"
	"net"
	"sync"
)

// The ports that are given: below those that Linux gives to outgoing connections (32768 and up), so that none of these sits on a
// port whose listener is about to start, or to start again. A process takes them by the slot, of which each has one owner.
const (
	first = 20_000
	slots = 60
	width = 200
)

var (
	mu    sync.Mutex
	locks []*net.UnixListener // a slot's is held as long as the process lives
	tried int                 // slots that were taken, here or elsewhere
	port  int                 // given next
	end   int                 // of the slot
)

// errNone says that the machine has no port left.
var errNone = errors.New("freeport: no port is free: end other tests and benchmarks on this machine")

// Addr returns an address of the loopback interface that nobody listens at, and that neither this nor another process is given again
// while this one lives.
func Addr() (string, error) {
	mu.Lock()
	defer mu.Unlock()
	for {
		for ; port < end; port++ {
			addr := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port}
			if l, err := net.ListenTCP("tcp", addr); err == nil {
				port++
				return addr.String(), l.Close() //nolint:wrapcheck // nothing to add
			}
		}
		if err := take(); err != nil {
			return "", err
		}
	}
}

// take takes the next slot that is nobody's. An abstract socket says so: it goes with its process, and is seen where the ports are.
func take() error {
	for ; tried < slots; tried++ {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: fmt.Sprintf("@larder-ports-%d", tried), Net: "unix"})
		if err != nil {
			continue
		}
		locks = append(locks, l)
		port = first + tried*width
		end = port + width
		tried++
		return nil
	}
	return errNone
}

// For is Addr for a test, or a benchmark, which ends where there is none.
func For(tb interface {
	Helper()
	Fatal(args ...any)
},
) string {
	tb.Helper()
	addr, err := Addr()
	if err != nil {
		tb.Fatal(err)
	}
	return addr
}
