package cluster

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// wire is a network of the kernel's own: each member lives in a network namespace, and cables lead to one bridge, which
// has an address for the clients. What is cut here is cut below TCP: nobody is told, retransmissions go on, and
// connections are whole again when the cable is back before the kernel gives up.
type wire struct {
	t      *testing.T
	tag    string // names interfaces, with at most 15 letters each
	subnet int
}

// Ports of a member that has an address of its own.
const (
	wireClient = 7400
	wirePeer   = 7401
	wireAdmin  = 7402
	// wireToken opens the admins, which are no loopback addresses here.
	wireToken = "chaos"
	// nowhere is an Ethernet address that nobody has.
	nowhere = "02:00:00:00:00:99"
)

// newWire makes the bridge, or skips the test and says why.
func newWire(t *testing.T) *wire {
	t.Helper()
	w := &wire{t: t, tag: fmt.Sprintf("lr%04x", rand.IntN(1<<16)), subnet: 1 + rand.IntN(250)}
	if err := w.ip("link", "add", w.bridge(), "type", "bridge"); err != nil {
		t.Skipf("SKIPPED: no networks can be made here (it takes root and iproute2): %v", err)
	}
	t.Cleanup(func() { w.must("link", "del", w.bridge()) })
	w.must("addr", "add", w.address(254)+"/24", "dev", w.bridge())
	w.must("link", "set", w.bridge(), "up")
	probe := w.tag + "x"
	if err := w.ip("netns", "add", probe); err != nil {
		t.Skipf("SKIPPED: no network namespaces can be made here: %v", err)
	}
	w.must("netns", "del", probe)
	return w
}

func (w *wire) bridge() string                { return w.tag + "br" }
func (w *wire) space(id uint64) string        { return fmt.Sprintf("%sn%d", w.tag, id) }
func (w *wire) cable(id uint64) string        { return fmt.Sprintf("%sc%d", w.tag, id) }
func (w *wire) address(id uint64) string      { return fmt.Sprintf("10.213.%d.%d", w.subnet, id) }
func (w *wire) at(id uint64, port int) string { return fmt.Sprintf("%s:%d", w.address(id), port) }
func (w *wire) in(id uint64, a ...string) error {
	return w.ip(append([]string{"-n", w.space(id)}, a...)...)
}

func (w *wire) ip(args ...string) error {
	out, err := exec.Command("ip", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

func (w *wire) must(args ...string) {
	w.t.Helper()
	require.NoError(w.t, w.ip(args...))
}

// stand gives a member its namespace, its cable and its addresses.
func (w *wire) stand(n *Node) {
	w.t.Helper()
	n.wire = w
	w.must("netns", "add", w.space(n.ID))
	w.t.Cleanup(func() { w.must("netns", "del", w.space(n.ID)) }) // the cable goes with it
	w.must("link", "add", w.cable(n.ID), "type", "veth", "peer", "name", "eth0", "netns", w.space(n.ID))
	w.must("link", "set", w.cable(n.ID), "master", w.bridge(), "up")
	require.NoError(w.t, errors.Join(
		w.in(n.ID, "addr", "add", w.address(n.ID)+"/24", "dev", "eth0"),
		w.in(n.ID, "link", "set", "lo", "up"), w.in(n.ID, "link", "set", "eth0", "up"),
	))
	n.Client, n.Peer, n.Admin = w.at(n.ID, wireClient), w.at(n.ID, wirePeer), w.at(n.ID, wireAdmin)
}

// command runs a program in a member's namespace. ip becomes that program: the process's id stays.
func (w *wire) command(n *Node, args []string) *exec.Cmd {
	return exec.Command("ip", append([]string{"netns", "exec", w.space(n.ID), n.Binary}, args...)...)
}

// Unplug pulls the member's cable.
func (n *Node) Unplug() {
	n.t.Helper()
	n.wire.must("link", "set", n.wire.cable(n.ID), "down")
}

// Plug puts it back.
func (n *Node) Plug() {
	n.t.Helper()
	n.wire.must("link", "set", n.wire.cable(n.ID), "up")
}

// Deaf has all that others send to the member get lost, clients included, while what it sends arrives. The undo lets it
// hear again.
func (n *Node) Deaf(others []*Node) (undo func()) {
	n.t.Helper()
	w := n.wire
	to := []string{w.address(n.ID), "lladdr", nowhere, "nud", "permanent", "dev"}
	w.must(append(append([]string{"neigh", "replace"}, to...), w.bridge())...)
	for _, o := range others {
		require.NoError(n.t, w.in(o.ID, append(append([]string{"neigh", "replace"}, to...), "eth0")...))
	}
	return func() {
		w.must("neigh", "del", w.address(n.ID), "dev", w.bridge())
		for _, o := range others {
			require.NoError(n.t, w.in(o.ID, "neigh", "del", w.address(n.ID), "dev", "eth0"))
		}
	}
}
