package cmd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"larder/client"
)

// findFlags find an engine by its name, in a pool's directory.
type findFlags struct {
	Masters []string `placeholder:"ADDR" help:"Masters of a pool, host:port or unix:PATH, who know engines by their names."`
	Name    string   `help:"Find the engine by this name, with --masters: what larder transfer target was given, or node/HOST of a larder node."`
	Tenant  string   `help:"Tenant whose engine it is (default: the default tenant)."`
}

// findTime bounds the search.
const findTime = 10 * time.Second

// find returns the addresses of the engine that the flags name, or those that were given.
func (f *findFlags) find(ctx context.Context, given []string) ([]string, error) {
	switch {
	case f.Name == "":
		return given, nil
	case len(given) > 0:
		return nil, usageError(errors.New("give addresses or --name, not both"))
	case len(f.Masters) == 0:
		return nil, usageError(errors.New("--name: name the masters that know it with --masters"))
	}
	ctx, cancel := context.WithTimeout(ctx, findTime)
	defer cancel()
	c, err := client.Open(ctx, client.Config{Addrs: f.Masters, Tenant: f.Tenant})
	if err != nil {
		return nil, err //nolint:wrapcheck // says what to do
	}
	defer func() { _ = c.Close(ctx) }()
	d := client.NewDirectory()
	d.Bind(c)
	found, err := d.Lookup(ctx, f.Name)
	if err != nil {
		return nil, fmt.Errorf("%w: larder ctl names --prefix segment/ lists the names", err)
	}
	return found.Rails, nil
}

// publish has d find an engine at the masters until stop is called. It does nothing without masters.
func publish(ctx context.Context, d *client.Directory, masters []string, tenant string) (stop func(), err error) {
	if len(masters) == 0 {
		return func() {}, nil
	}
	c, err := client.Open(ctx, client.Config{Addrs: masters, Tenant: tenant})
	if err != nil {
		return nil, err //nolint:wrapcheck // says what to do
	}
	d.Bind(c)
	return func() { _ = c.Close(context.WithoutCancel(ctx)) }, nil // the name ends with the session otherwise
}
