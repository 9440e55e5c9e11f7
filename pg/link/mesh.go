package link

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"larder/pg/shm"
)

// Member is a process that takes part in a mesh.
type Member struct {
	Rank        int // global
	Incarnation uint64
}

// MeshConfig says what a mesh is made for. All members must give the same, apart from Me, and those of a host the same Layout.
type MeshConfig struct {
	Group   string
	Epoch   uint64
	Me      int // which of the members this process is
	Members []Member
	Layout  shm.Layout // of the room
}

func (n *Node) checkMesh(cfg *MeshConfig) error {
	switch {
	case len(cfg.Group) > maxName:
		return fmt.Errorf("link: a group's name has at most %d bytes, not %d", maxName, len(cfg.Group))
	case len(cfg.Members) == 0 || len(cfg.Members) > MaxMembers:
		return fmt.Errorf("link: a mesh has 1 to %d members, not %d", MaxMembers, len(cfg.Members))
	case cfg.Me < 0 || cfg.Me >= len(cfg.Members):
		return fmt.Errorf("link: member %d of a mesh of %d", cfg.Me, len(cfg.Members))
	case cfg.Members[cfg.Me] != Member{n.cfg.Rank, n.cfg.Incarnation}:
		return fmt.Errorf("link: member %d is rank %d (incarnation %016x), and this is rank %d (incarnation %016x)", cfg.Me,
			cfg.Members[cfg.Me].Rank, cfg.Members[cfg.Me].Incarnation, n.cfg.Rank, n.cfg.Incarnation)
	}
	ranks := map[int]bool{}
	for _, m := range cfg.Members {
		if ranks[m.Rank] {
			return fmt.Errorf("link: rank %d is two members of a mesh", m.Rank)
		}
		ranks[m.Rank] = true
	}
	return nil
}

// Mesh is the channels among the members of one view of a group. Its lanes and its room are each for one goroutine at a time; the
// mesh's own methods may be called concurrently.
type Mesh struct {
	n     *Node
	seats []*control // by member; nil for me
	lanes []*lane    // likewise
	room  *shm.Room  // nil if no other member shares memory
	local []int
	hosts [][]int

	mu     sync.Mutex
	closed bool
}

// Mesh builds the channels between this process and all other members, who must be connected. All of them have to call it with
// the same group, epoch and members, in any order; it returns when all channels are there at both ends. If ctx ends before, the error is
// a *[MissingError], which says who is missing; a member that means another mesh is a *[RefusedError], one that has gone a *[DownError].
// Nothing is left of a mesh that was not built. It can be tried again, with the same epoch or another.
func (n *Node) Mesh(ctx context.Context, cfg MeshConfig) (*Mesh, error) {
	if err := n.checkMesh(&cfg); err != nil {
		return nil, err
	}
	cfg.Members, cfg.Layout = slices.Clone(cfg.Members), layoutOf(cfg.Layout)
	for blamed, pause := 0, anewPause; ; pause = min(2*pause, anewMost) {
		m, err := n.mesh(ctx, &cfg)
		var refused *RefusedError
		if !errors.As(err, &refused) || refused.Code != RefusedClosed {
			return m, err
		}
		if blamed++; len(refused.Blames) == 0 {
			blamed, pause = 0, anewPause
		}
		if blamed == laneTries {
			return nil, err
		}
		select { // one had given up when others had begun: it may come again
		case <-after(pause):
		case <-ctx.Done():
			return nil, errors.Join(err, ctx.Err())
		}
	}
}

const (
	// anewPause is how long a mesh waits before it is built anew since a member has given up, at first; anewMost at last.
	anewPause = 5 * time.Millisecond
	anewMost  = 100 * time.Millisecond
	// laneTries is how often in a row that may be since a lane was cut off while it was made, as by a process that has given up, which
	// says so in the end. Two thirds of a second: then something between the two lets nothing pass.
	laneTries = 10
)

// mesh is one attempt.
func (n *Node) mesh(ctx context.Context, cfg *MeshConfig) (*Mesh, error) {
	n.mu.Lock()
	p, err := n.gather(scope{group: cfg.Group, epoch: cfg.Epoch}, cfg)
	n.mu.Unlock()
	if err != nil {
		return nil, err
	}
	m := &Mesh{n: n, seats: make([]*control, len(p.seats)), lanes: make([]*lane, len(p.seats))}
	err = p.build(ctx, func() {
		for i, s := range p.seats {
			if s != nil {
				m.seats[i], m.lanes[i] = s.c, s.lane
			}
		}
		m.room, m.local, m.hosts = p.room, p.mates, p.hosts
		n.meshes[m] = struct{}{}
	})
	if err != nil {
		return nil, err
	}
	return m, nil
}

// Lane is the pair of rings to a member, nil for this process itself. What they hold is nobody's but theirs who use the lane: the two
// ends of one member's lane to another are two byte streams.
func (m *Mesh) Lane(i int) (*shm.Producer, *shm.Consumer) {
	if m.lanes[i] == nil {
		return nil, nil
	}
	return m.lanes[i].p, m.lanes[i].c
}

// Transport is what the lane to a member goes by, empty for this process itself.
func (m *Mesh) Transport(i int) string {
	if m.lanes[i] == nil {
		return ""
	}
	return m.lanes[i].via
}

// Room is the memory that this process shares with the members of its host, and which members they are, in the room's order. It is
// nil if there are no others.
func (m *Mesh) Room() (*shm.Room, []int) {
	if m.room == nil {
		return nil, nil
	}
	return m.room, slices.Clone(m.local)
}

// Hosts are the members by who shares memory with whom: all members see the same.
func (m *Mesh) Hosts() [][]int {
	out := make([][]int, len(m.hosts))
	for i, set := range m.hosts {
		out[i] = slices.Clone(set)
	}
	return out
}

// Fail gives a member up: its lane fails with err once what has come by it has been read, and nobody in the room waits for it.
func (m *Mesh) Fail(i int, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed || m.lanes[i] == nil {
		return
	}
	m.lanes[i].cut(err)
	m.leaveRoom(i)
	m.n.bell.Ring()
}

// leaveRoom has nobody in the room wait for a member. The lock is held.
func (m *Mesh) leaveRoom(i int) {
	if k := slices.Index(m.local, i); k >= 0 && m.room != nil {
		m.room.Down(k)
	}
}

// lose fails what leads to a process that is down. The node's lock is held.
func (m *Mesh) lose(c *control, err error) {
	i := slices.Index(m.seats, c)
	m.mu.Lock()
	defer m.mu.Unlock()
	if i < 0 || m.closed {
		return
	}
	m.lanes[i].lose(err)
	m.leaveRoom(i)
}

// Close ends the mesh and lets go of its memory: nobody may use its lanes and room any more. What was written into lanes before
// reaches members that read it, for as long as lingerTime, though Close does not wait for that. Members learn that the lanes have ended.
func (m *Mesh) Close() error {
	m.n.mu.Lock()
	delete(m.n.meshes, m)
	m.n.mu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil
	}
	m.closed = true
	for _, l := range m.lanes {
		if l != nil {
			l.close()
		}
	}
	if m.room == nil {
		return nil
	}
	return m.room.Close()
}
