package cluster

import (
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// Links are the directed links between the members of a cluster, and between these and clients.
type Links struct {
	mu      sync.Mutex
	links   map[[2]uint64]*Link
	proxies []*proxy
}

// Of returns the link from one end to another: members by their ids, or [Clients].
func (l *Links) Of(from, to uint64) *Link {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.links[[2]uint64{from, to}]
	if k == nil {
		k = newLink()
		l.links[[2]uint64{from, to}] = k
	}
	return k
}

// Set changes the rules of the link from each of some ends to each of others.
func (l *Links) Set(r Rules, from, to []uint64) {
	for _, a := range from {
		for _, b := range to {
			if a != b {
				l.Of(a, b).Set(r)
			}
		}
	}
}

// Both changes the rules of the links between each of some ends and each of others, in both directions.
func (l *Links) Both(r Rules, some, others []uint64) {
	l.Set(r, some, others)
	l.Set(r, others, some)
}

// Heal lets everything through everywhere.
func (l *Links) Heal() {
	l.mu.Lock()
	links := make([]*Link, 0, len(l.links))
	for _, k := range l.links {
		links = append(links, k)
	}
	l.mu.Unlock()
	for _, k := range links {
		k.Set(Rules{})
	}
}

// Lost is how many bytes have been swallowed and dropped so far.
func (l *Links) Lost() (bytes uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, k := range l.links {
		bytes += k.lost.Load()
	}
	return bytes
}

// stand puts proxies before a member: from now on its addresses are theirs.
func (l *Links) stand(t *testing.T, n *Node) {
	t.Helper()
	for _, to := range []struct {
		listen, target string
		member         bool
	}{{n.Peer, n.listenPeer, true}, {n.Client, n.listenClient, false}} {
		p, err := startProxy(to.listen, to.target, to.member, func(from uint64, up bool) *Link {
			if up {
				return l.Of(from, n.ID)
			}
			return l.Of(n.ID, from)
		})
		require.NoError(t, err)
		l.mu.Lock()
		l.proxies = append(l.proxies, p)
		l.mu.Unlock()
	}
}

func (l *Links) close() {
	l.Heal()
	for _, p := range l.proxies {
		p.close()
	}
}
