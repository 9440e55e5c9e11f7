package cmd

import (
	"errors"
	"strconv"

	"larder/server"
)

// ctlTenants is larder ctl tenants.
type ctlTenants struct {
	List ctlTenantsList `cmd:"" default:"1" help:"List tenants: what they hold, and what they may."`
	Set  ctlTenantsSet  `cmd:"" help:"Change a tenant's limits, for the whole cluster."`
}

// ctlTenantsList is larder ctl tenants list.
type ctlTenantsList struct{}

// Run implements the command.
func (*ctlTenantsList) Run(c *call) error {
	var tenants []server.TenantView
	if err := c.admin.getLeader(c.ctx, "/tenants", nil, &tenants); err != nil {
		return err
	}
	if c.JSON {
		return printJSON(c.stdout, tenants)
	}
	return tenantsTable(tenants).print(c.stdout)
}

// tenantsTable shows tenants.
func tenantsTable(tenants []server.TenantView) *table {
	t := newTable("TENANT", "-ENTRIES", "-BYTES", "-SPACE", "-GUARANTEE", "-PINS", "-SESSION-PINS", "-MAX-PINS")
	for i := range tenants {
		x := &tenants[i]
		guarantee, most := "-", "-"
		if x.Guarantee > 0 {
			guarantee = bytesText(x.Guarantee)
		}
		if x.MaxPins > 0 {
			most = strconv.FormatUint(x.MaxPins, 10)
		}
		t.row(printable(x.Name), x.Entries, bytesText(x.Bytes), bytesText(x.Space), guarantee, x.Pins, x.SessionPins, most)
	}
	return t
}

// ctlTenantsSet is larder ctl tenants set.
type ctlTenantsSet struct {
	Name      string       `arg:"" help:"The tenant; one that has not been heard of yet is made."`
	Guarantee *server.Size `help:"Space in the pool that other tenants' evictions leave it, in whole regions; 0: none. No space is kept free for it."`
	MaxPins   *uint64      `help:"Pins that it may have, those of its clients' sessions included; 0: no limit of its own."`
}

// Run implements the command.
func (s *ctlTenantsSet) Run(c *call) error {
	if s.Guarantee == nil && s.MaxPins == nil {
		return usageError(errors.New("tenants set: say what: --guarantee, --max-pins, or both"))
	}
	if s.Name == "" { // perhaps a variable of a script's that was not set
		return usageError(errors.New("tenants set: name the tenant; that of clients which name none is default"))
	}
	in := server.TenantRequest{Name: s.Name, Guarantee: (*uint64)(s.Guarantee), MaxPins: s.MaxPins}
	var reply server.TenantView
	if err := c.admin.post(c.ctx, "/tenants", in, &reply); err != nil {
		return err
	}
	if c.JSON {
		return printJSON(c.stdout, reply)
	}
	return tenantsTable([]server.TenantView{reply}).print(c.stdout)
}
