package main

import (
	"bytes"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// config is what the file says. YAML is read, and JSON with it.
type config struct {
	Listen string `yaml:"listen"` // host:port; 127.0.0.1:8000
	Mode   string `yaml:"mode"`   // query or schedule; query

	Model     string   `yaml:"model"`      // that the engines serve, by the name that they are registered with at the conductor
	LoRAs     []string `yaml:"loras"`      // adapters of it, which requests may name instead
	BlockSize int      `yaml:"block_size"` // tokens, the engines' and the conductor's; 16
	TenantID  string   `yaml:"tenant_id"`  // default

	Conductor        string        `yaml:"conductor"` // URL; http://127.0.0.1:13333
	ConductorToken   string        `yaml:"conductor_token"`
	ConductorTimeout time.Duration `yaml:"conductor_timeout"` // for one answer; 500ms

	Engines     map[string]engineConfig `yaml:"engines"`      // by their instance_id at the conductor
	EngineToken string                  `yaml:"engine_token"` // in place of what clients send as theirs

	// OutstandingCost is how many tokens that are not cached an outstanding request of an engine counts as, in mode query; 512.
	OutstandingCost int `yaml:"outstanding_cost"`
	// RouteHeaders has answers say where they come from and how much was cached. It is for demos: it tells clients what others
	// have asked.
	RouteHeaders bool `yaml:"route_headers"`

	MaxBody        int64 `yaml:"max_body"`        // bytes of a request; 8 MiB: a million tokens as text, or as numbers
	MaxOutstanding int   `yaml:"max_outstanding"` // requests at once; 1024: with the bodies kept, 8 GiB at the very most

	FirstByteTimeout time.Duration `yaml:"first_byte_timeout"` // until an engine begins to answer, its queue included; 5m
	StallTimeout     time.Duration `yaml:"stall_timeout"`      // between two pieces of its answer; 1m
	ClientTimeout    time.Duration `yaml:"client_timeout"`     // for a client to send its request, and to take a piece; 30s
}

// engineConfig is an engine of the file.
type engineConfig struct {
	URL  string `yaml:"url"`  // without /v1
	Role string `yaml:"role"` // prefill, decode or both; both
}

// The modes.
const (
	modeQuery    = "query"    // ask what is cached where, and choose
	modeSchedule = "schedule" // have the conductor choose
)

// load reads a file.
func load(path string) (config, error) {
	var c config
	b, err := os.ReadFile(path) //nolint:gosec // the user's own file
	if err != nil {
		return c, err
	}
	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	if err := d.Decode(&c); err != nil {
		return c, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// complete fills in the defaults and says all that is wrong.
func (c *config) complete() error {
	for _, v := range []struct {
		field *string
		value string
	}{
		{&c.Listen, "127.0.0.1:8000"},
		{&c.Mode, modeQuery},
		{&c.TenantID, "default"},
		{&c.Conductor, "http://127.0.0.1:13333"},
	} {
		if *v.field == "" {
			*v.field = v.value
		}
	}
	positive(&c.BlockSize, 16)
	positive(&c.ConductorTimeout, 500*time.Millisecond)
	positive(&c.OutstandingCost, 512)
	positive(&c.MaxBody, 8<<20)
	positive(&c.MaxOutstanding, 1024)
	positive(&c.FirstByteTimeout, 5*time.Minute)
	positive(&c.StallTimeout, time.Minute)
	positive(&c.ClientTimeout, 30*time.Second)
	return errors.Join(c.check()...)
}

// positive puts a default where there is no sensible value.
func positive[T int | int64 | time.Duration](field *T, value T) {
	if *field <= 0 {
		*field = value
	}
}

func (c *config) check() (wrong []error) {
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Errorf(format, args...)) }
	if c.Mode != modeQuery && c.Mode != modeSchedule {
		say("mode: %q is neither %s nor %s", c.Mode, modeQuery, modeSchedule)
	}
	if c.Model == "" {
		say("model: give the name that the engines serve it by")
	}
	if slices.Contains(c.LoRAs, c.Model) {
		say("loras: %q is the model: give its adapters alone", c.Model)
	}
	if err := checkURL(&c.Conductor); err != nil {
		say("conductor: %w", err)
	}
	var all role
	for id, e := range c.Engines {
		r, ok := roles[e.Role]
		if !ok {
			say("engines: %s: role: %q is none of prefill, decode, both", id, e.Role)
		}
		if err := checkURL(&e.URL); err != nil {
			say("engines: %s: url: %w", id, err)
		}
		c.Engines[id] = e
		all |= r
	}
	if all != both {
		say("engines: somebody must prefill and somebody decode: give engines with role both, or some of each")
	}
	return wrong
}

// checkURL takes slashes from the end of a URL.
func checkURL(s *string) error {
	u, err := url.Parse(*s)
	if err != nil {
		return err
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return fmt.Errorf("%q is no URL as http://HOST:PORT", *s)
	}
	*s = strings.TrimRight(*s, "/")
	return nil
}
