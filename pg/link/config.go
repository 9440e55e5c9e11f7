package link

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"

	"larder/cxl"
	"larder/transfer"
)

// Names of transports, by which lanes carry bytes between two processes.
const (
	TransportShm    = "shm"    // memory that both have mapped
	TransportUnix   = "unix"   // rings of each, pumped over a Unix socket
	TransportRDMA   = "rdma"   // rings of each, written by the transfer engines' NICs
	TransportTCP    = "tcp"    // rings of each, pumped over a TCP connection
	TransportEngine = "engine" // as rdma, by whatever transports the engines have
)

// Transports are those that are used by default, in the order in which they are preferred.
var Transports = []string{TransportShm, TransportUnix, TransportRDMA, TransportTCP}

// Bounds of a node.
const (
	// MaxMembers bounds the members of a mesh: each has a lane to each other.
	MaxMembers = 1024
	// MaxAsk is how many bytes a question may have, or an answer.
	MaxAsk = 64 << 10
	// maxName bounds names of jobs, groups and hosts, and tokens, in bytes.
	maxName = 256
	// maxAddresses bounds the addresses that a process is reached at: a host has a few networks.
	maxAddresses = 16
	// defaultRing is Config.RingBytes if that is 0: enough for what is under way at 100 Gbit/s in 50 us, and a fraction of a
	// core's cache.
	defaultRing = 1 << 20
)

// Config is what a node is made of.
type Config struct {
	// Job is what the processes that work together have in common. Others are refused.
	Job string
	// Rank is this process's number in its job, and Incarnation a random number, not 0, of this process's life.
	Rank        int
	Incarnation uint64
	// Token must be the same in all processes of a job.
	Token string
	// Host says which processes share memory: those that give the same. Empty takes the kernel's boot id and the network
	// namespace, which tell that Unix sockets reach from one to the other.
	Host string
	// Listen are the TCP addresses, host:port, for processes of other hosts; none means that there are none. A port of 0 takes a
	// free one. Advertise are what others are told instead of the addresses that were bound, one for each; a wildcard that is
	// not replaced so is told as the addresses of this host's interfaces.
	Listen, Advertise []string
	// Transports are those that may be used, the preferred ones first; none means [Transports]. Of two processes the one with
	// the higher rank decides, among those that both have.
	Transports []string
	// Engine is for the transports rdma and engine. It remains the caller's, who closes it after the node; several nodes may
	// share one. nil if there is none.
	Engine *transfer.Engine
	// RingBytes is how much a lane holds in each direction; 1 MiB if it is 0.
	RingBytes int
	// Logger gets what an operator may want to know; nil for nothing.
	Logger *slog.Logger
	// Up and Down are called when a process is connected and when it is not any more, in turns for each incarnation. They must not
	// wait: nothing more is heard of the process until they return. May be nil.
	Up   func(rank int, incarnation uint64)
	Down func(rank int, incarnation uint64, err error)
	// Answer answers a process's [Node.Ask], one at a time for each process. nil refuses.
	Answer func(rank int, ask []byte) []byte
}

func (c *Config) withDefaults() error {
	c.RingBytes = cmp.Or(c.RingBytes, defaultRing)
	if len(c.Transports) == 0 {
		c.Transports = Transports
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Host == "" {
		c.Host = hostName()
	}
	for i, name := range c.Transports {
		if name != TransportEngine && !slices.Contains(Transports, name) {
			return fmt.Errorf("link: %.20q is no transport: %s, %s", name, strings.Join(Transports, ", "), TransportEngine)
		}
		if slices.Contains(c.Transports[:i], name) {
			return fmt.Errorf("link: the transport %s is given twice", name)
		}
	}
	switch {
	case c.Job == "":
		return errors.New("link: a job has a name")
	case max(len(c.Job), len(c.Token), len(c.Host)) > maxName:
		return fmt.Errorf("link: names of jobs and hosts, and tokens, have at most %d bytes", maxName)
	case c.Rank < 0:
		return fmt.Errorf("link: a rank of %d: they begin with 0", c.Rank)
	case c.Incarnation == 0:
		return errors.New("link: an incarnation of 0: draw a random one")
	case len(c.Listen) > maxAddresses:
		return fmt.Errorf("link: %d addresses to listen at: at most %d", len(c.Listen), maxAddresses)
	case len(c.Advertise) > 0 && len(c.Advertise) != len(c.Listen):
		return fmt.Errorf("link: %d addresses to advertise for %d to listen at: one for each", len(c.Advertise), len(c.Listen))
	case c.RingBytes < minRing || c.RingBytes > maxRing:
		return fmt.Errorf("link: rings of %d bytes: %d to %d", c.RingBytes, minRing, maxRing)
	}
	return nil
}

// Bounds of Config.RingBytes.
const (
	minRing = 4 << 10
	maxRing = 64 << 20
)

// hostName is what tells that processes can share memory: one kernel, and one name space of abstract Unix sockets, by which
// the memory is passed.
func hostName() string {
	space, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		space = "net:?" // where there is no /proc nobody else can be told apart
	}
	return cxl.HostName() + "/" + cxl.BootName() + "/" + space
}

// address is how a process is reached, as it tells others through the store.
type address struct {
	Unix string   `json:"unix,omitempty"` // an abstract socket, without its @
	TCP  []string `json:"tcp,omitempty"`  // host:port
}

func parseAddress(b []byte) (a address, err error) {
	if err := json.Unmarshal(b, &a); err != nil {
		return a, fmt.Errorf("link: read an address: %w", err)
	}
	if len(a.Unix) > maxSocketName || strings.ContainsRune(a.Unix, 0) {
		return a, errors.New("link: read an address: the name of its Unix socket cannot be")
	}
	if len(a.TCP) > maxAddresses {
		return a, fmt.Errorf("link: read an address: %d TCP addresses, at most %d", len(a.TCP), maxAddresses)
	}
	for _, at := range a.TCP {
		if _, _, err := net.SplitHostPort(at); err != nil {
			return a, fmt.Errorf("link: read an address: %w", err)
		}
	}
	return a, nil
}

// maxSocketName is what fits into sun_path behind its leading 0.
const maxSocketName = 107
