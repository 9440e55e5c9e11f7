package pg

import (
	"larder/pg/collective"
	"larder/pg/link"
	"larder/pg/member"
)

// plane is a view and its channels: where collectives from its start on run. The ranks of a group that has not joined others have
// one without channels, which they are alone in.
type plane struct {
	view  member.View
	mesh  *link.Mesh // nil if this rank is alone
	comm  *collective.Comm
	ranks []int  // by member index
	base  uint64 // what numbers of collectives begin with in these channels: how many have measured them
	// broken is why nothing begins here any more: collectives wait for a newer view. It belongs to who has the turn.
	broken error
}

func newPlane(v member.View, mesh *link.Mesh, comm *collective.Comm) *plane {
	p := &plane{view: v, mesh: mesh, comm: comm}
	for _, m := range v.Members {
		p.ranks = append(p.ranks, m.Rank)
	}
	return p
}

// lacks are the ranks that another plane has as members, in the same life of theirs, and this one has not.
func (p *plane) lacks(o *plane) member.Mask {
	var m member.Mask
	for _, peer := range o.view.Members {
		if !p.view.Has(peer.Rank, peer.Incarnation) {
			m.Set(peer.Rank)
		}
	}
	return m
}

// adopt is called once when the view is in force: by then it has a start and a table.
func (p *plane) adopt(v member.View) {
	p.view = v
	p.comm.Table = parseTable(v.Table)
}

// locals is how many of its ranks this host has.
func (p *plane) locals() int32 {
	return int32(max(1, len(p.comm.Local))) //nolint:gosec // a view has at most member.MaxCap
}

func (p *plane) close() {
	if p.mesh != nil {
		_ = p.mesh.Close() // its end of memory and sockets: nobody uses them any more
	}
}

// args are a call's for the algorithms, which count members and not ranks.
func (p *plane) args(w *Work) (collective.Args, error) {
	c := &w.call
	a := collective.Args{Kind: c.Kind, DType: c.DType, Op: c.Op, Seq: p.base + w.seq}
	if c.rooted() {
		if a.Root = p.view.Index(c.Root); a.Root < 0 {
			return a, &PeerError{w.g.cfg.ID, c.String(), w.seq, []int{c.Root}, errRootGone}
		}
	}
	var err error
	if a.Src, err = p.parts(&w.one[0], &w.src, c.Src, c.SrcParts); err != nil {
		return a, err
	}
	a.Dst, err = p.parts(&w.one[1], &w.dst, c.Dst, c.DstParts)
	return a, err
}

// parts are one buffer, or those of the members out of those of all ranks.
func (p *plane) parts(one *[1][]byte, list *[][]byte, whole []byte, byRank [][]byte) ([][]byte, error) {
	if byRank == nil {
		one[0] = whole
		return one[:], nil
	}
	*list = (*list)[:0]
	for _, r := range p.ranks {
		if r >= len(byRank) {
			return nil, wrong("%d parts, and rank %d is active by now: ask for the group's size again", len(byRank), r)
		}
		*list = append(*list, byRank[r])
	}
	return *list, nil
}
