package server

import (
	"time"

	"larder/meta"
)

// demandWindow is how far back a client's demand is looked at: long enough that one batch does not count as a trend,
// short enough that a burst which is over costs nobody a region.
const demandWindow = 10 * time.Second

// demand is what a client has lately asked room for. Old demand fades: after a demandWindow without any, none is left.
type demand struct {
	bytes float64
	at    int64
}

// add counts bytes that were asked for, and returns the demand of about the last demandWindow.
func (d *demand) add(bytes uint64, now int64) uint64 {
	left := 1 - float64(now-d.at)/float64(demandWindow)
	d.bytes, d.at = d.bytes*max(0, left)+float64(bytes), now
	return uint64(d.bytes)
}

// takeEarly asks another client for a region ahead of need, if Config.RevokeWatermark says so: the requester could be
// served, but evicts more than it holds, so that it would soon throw away what it has just stored while others keep
// what is colder. The caller holds state for reading, mu and the leases.
func (m *Master) takeEarly(g *group, r *request, data []byte, now int64) []byte {
	s := m.sessions[r.key.session]
	if m.cfg.RevokeWatermark == 0 || s == nil || now < m.leases.grace || r.alloc.Promote { // who would do without
		return data
	}
	cmd := &r.plan.Cmd
	lately := s.demand.add(max(cmd.Size, uint64(len(cmd.Victims))*cmd.PageSize), now)
	guard := guard{l: &m.leases, now: now, ready: m.deviceReady}
	at := m.machine.At(m.logTime(now))
	region := at.PlanEarly(s.id, cmd.PageSize, lately, uint64(m.cfg.RevokeWatermark), &guard) //nolint:gosec // a percentage
	if region == 0 {
		return data
	}
	m.n.EarlyRevokes.Add(1)
	return m.addOwn(g, data, region, &meta.Mark{Region: region, For: s.id})
}
