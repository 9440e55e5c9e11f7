package pg

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"larder/pg/collective"
	"larder/pg/member"
)

// The sizes at which algorithms change are measured by all founders together, when they have made the first view's channels, and
// travel with the views: members that chose for themselves would choose differently.

// measure measures a plane that is not in use yet. The collectives that do so are its first ones.
func (g *Group) measure(ctx context.Context, p *plane) ([]byte, error) {
	r, next, err := p.comm.Measure(0, func(op collective.Op) (err error) {
		var done bool
		ready := func() bool {
			done, err = op.Poll()
			return done || err != nil || ctx.Err() != nil
		}
		stop := context.AfterFunc(ctx, g.bell.Ring)
		defer stop()
		for !g.bell.Wait(ready, g.spin(), time.Hour) { // it ends with the peers, or ctx
		}
		if !done && err == nil {
			err = ctx.Err()
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("pg: measure the channels: %w", err)
	}
	p.base = next
	return json.Marshal(r) //nolint:wrapcheck // it is a few numbers
}

// tableOf makes a view's table: of what was measured for it, which is the same of all members, or the one in use.
func (g *Group) tableOf(v member.View, reports [][]byte) []byte {
	for _, b := range reports {
		var r collective.Rates
		if len(b) > 0 && json.Unmarshal(b, &r) == nil {
			table, _ := json.Marshal(r.Table(len(v.Members))) //nolint:errchkjson // it is a few numbers
			return table
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.view.Table
}

// parseTable reads a view's table. One that says nothing is the default.
func parseTable(b []byte) (t collective.Table) {
	if len(b) == 0 || json.Unmarshal(b, &t) != nil {
		return collective.Table{}
	}
	return t
}
