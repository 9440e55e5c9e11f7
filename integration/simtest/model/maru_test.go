package model

import (
	"fmt"

	"larder/meta"
	"larder/protocol"
)

// maru draws what clients of Maru's do: register where they like, pin, delete, and return regions.
func (g *generator) maru() command {
	c := &meta.Maru{Op: meta.MaruOp(1 + g.IntN(8)), Strict: g.one(2)}
	if g.one(10) {
		c.DeadlineMS = g.p.now - 1
	}
	switch regions := g.p.m.Regions(); {
	case g.one(5):
		return g.maruOwner()
	case c.Op == meta.MaruRegister || c.Op == meta.MaruUndo:
		c.Again = g.one(2)
		for _, key := range g.keys() {
			e := meta.MaruEntry{
				Key: key, Region: meta.MaruInt{Abs: g.Uint64N(10)}, Offset: meta.MaruInt{Abs: g.Uint64N(2)}, Length: meta.MaruInt{Neg: g.one(4), Abs: 1},
			}
			if len(regions) > 0 && !g.one(4) {
				e.Region.Abs = uint64(pick(g, regions).ID)
			}
			if g.one(12) {
				e.Offset = meta.MaruInt{Raw: "\xc0"}
			}
			c.Entries = append(c.Entries, e)
		}
	case c.Op == meta.MaruReturn && len(regions) > 0:
		r := pick(g, regions)
		c.Region, c.Instance = r.ID, r.Instance
	default:
		c.Keys = g.keys()
	}
	return command{Command: c}
}

// maruOwner has an instance of Maru's open its session, or own one more region.
func (g *generator) maruOwner() command {
	instance := fmt.Sprint("maru", g.IntN(2))
	id, open := g.p.m.SessionOf(instance)
	if !open {
		return command{Command: &meta.OpenSession{Instance: instance, Secret: 1, Features: meta.FeatureMaru}}
	}
	plan := g.p.m.PlanAlloc(id, &protocol.AllocRequest{Size: page, PageSize: page}, guard{g.Rand}, false)
	if plan.Kind != meta.PlanCommand {
		return command{Command: &meta.Maru{Op: meta.MaruExists, Keys: g.keys()}}
	}
	return g.protected(id, &plan.Cmd)
}
