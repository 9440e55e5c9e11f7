package server

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"larder/conductor/kvevent"
	"larder/maru"
	"larder/meta"
	"larder/meta/policy"
	"larder/protocol"
	"larder/zmtp"
)

// sessionElections is how many election timeouts a session must at least last: a leader may take two to appear, and
// a client needs a few heartbeats of grace after that (DESIGN.md, "Time").
const sessionElections = 5

// minElectionTicks is what Raft needs to spread candidates: each waits for one to two election timeouts.
const minElectionTicks = 5

// Validate checks a completed configuration as a whole and returns every error it finds, each saying what to do.
func (c *Config) Validate() error {
	var p problems
	c.checkAddresses(&p)
	c.checkMembers(&p)
	c.checkKVEvents(&p)
	c.checkMaru(&p)
	c.checkTimes(&p)
	c.checkPool(&p)
	c.checkLimits(&p)
	return errors.Join(p...)
}

// problems collects errors.
type problems []error

// check adds an error unless ok.
func (p *problems) check(ok bool, format string, args ...any) {
	if !ok {
		*p = append(*p, fmt.Errorf(format, args...))
	}
}

func (c *Config) checkAddresses(p *problems) {
	addresses := []struct{ name, addr string }{
		{"listen", c.Listen},
		{"advertise", c.Advertise},
		{"peer_listen", c.PeerListen},
		{"peer_advertise", c.PeerAdvertise},
		{"admin_listen", c.AdminListen},
	}
	for _, a := range addresses {
		if a.addr == Off && (a.name == "admin_listen" || len(c.Peers) == 0 && !c.Join) {
			continue // nobody else needs to reach it
		}
		if err := checkAddress(a.addr); err != nil {
			p.check(false, "%s: %w", a.name, err)
		}
	}
	if c.TransferListen != Off {
		if err := checkAddress(c.TransferListen); err != nil {
			p.check(false, "transfer_listen: %w", err)
		}
	}
	p.check(c.SSD == "" || c.TransferListen != Off, "transfer_listen: an SSD is reached by transfer alone; give it an address")
	p.check(c.Listen != Off || c.Socket != Off, "listen: clients need an address or a socket")
	p.check(c.Listen != c.PeerListen || portOf(c.Listen) == "0" || c.Listen == Off,
		"peer_listen: %s is also listen; give members a port of their own", c.PeerListen)
	p.check(c.AdminListen == Off || c.AdminListen != c.Listen && c.AdminListen != c.PeerListen || portOf(c.AdminListen) == "0",
		"admin_listen: %s is taken by listen or peer_listen; give the admin a port of its own", c.AdminListen)
	// sun_path has 108 bytes, the closing zero included.
	p.check(c.Socket == Off || len(c.Socket) < 108,
		"socket: the path is longer than the 107 bytes that a Unix socket may have; set a shorter one, or none")
	p.check(c.AdminListen == Off || c.AdminToken != "" || isLoopback(c.AdminListen),
		"admin_token: admin_listen %s can be reached from other hosts; set a token, or listen on 127.0.0.1", c.AdminListen)
}

func (c *Config) checkKVEvents(p *problems) {
	for _, e := range []struct{ name, endpoint string }{
		{"kv_events_listen", c.KVEventsListen},
		{"kv_events_replay_listen", c.KVEventsReplayListen},
	} {
		if e.endpoint != "" {
			err := zmtp.CheckEndpoint(e.endpoint, true)
			p.check(err == nil, "%s: %w", e.name, err)
		}
	}
	p.check(c.KVEventsReplayListen == "" || c.KVEventsListen != "",
		"kv_events_replay_listen: nothing is published to be sent again; set kv_events_listen, too")
	_, err := kvevent.ParseFormat(c.KVEventsFormat)
	p.check(err == nil, "kv_events_format: %w", err)
	n := len(c.KVEventsTopic)
	p.check(n <= protocol.MaxNameBytes, "kv_events_topic: %d bytes, at most %d", n, protocol.MaxNameBytes)
}

func (c *Config) checkMaru(p *problems) {
	for _, a := range []struct{ name, addr string }{{"maru", c.Maru}, {"maru_rm", c.MaruRM}, {"maru_rm_advertise", c.MaruRMAdvertise}} {
		if a.addr != "" {
			err := checkAddress(a.addr)
			p.check(err == nil, "%s: %w", a.name, err)
		}
	}
	p.check(c.Maru == "" || len(c.Peers) < 2 && !c.Join || c.MaruOwnerGrace >= maruReports*maru.KeepInterval,
		"maru_owner_grace: %v would take regions of clients of followers, which tell the leader of them every %v; choose at least %v",
		c.MaruOwnerGrace, maru.KeepInterval, maruReports*maru.KeepInterval)
}

// maruReports is how many reports of its client an instance of Maru's lives: one may be lost, and one late.
const maruReports = 3

// checkAddress reports what is wrong with a host:port.
func checkAddress(addr string) error {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("address %q: write host:port, as in 127.0.0.1:7400", clip(addr))
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n > 65535 {
		return fmt.Errorf("address %q: the port must be a number up to 65535", clip(addr))
	}
	return nil
}

// portOf is the port of an address, "" if it has none.
func portOf(addr string) string {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return ""
	}
	return port
}

// isLoopback reports whether an address can be reached from this host alone.
func isLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func (c *Config) checkMembers(p *problems) {
	p.check(c.ClusterName != "", "cluster_name: give the cluster a name")
	p.check(c.DataDir != "", "data_dir: name a directory")
	p.check(!c.Join || len(c.Peers) == 0,
		"join: a member that joins learns the others from the cluster; leave peers out")
	if len(c.Peers) == 0 {
		return
	}
	p.check(c.NodeID != 0, "node_id: say which of peers this member is")
	ids, addrs := map[uint64]bool{}, map[string]bool{}
	for _, peer := range c.Peers {
		p.check(peer.ID != 0, "peers: ids start at 1")
		p.check(!ids[peer.ID], "peers: id %d is given twice; ids are for life and for one member", peer.ID)
		p.check(!addrs[peer.Addr], "peers: address %s is given twice", clip(peer.Addr))
		ids[peer.ID], addrs[peer.Addr] = true, true
		for _, addr := range []string{peer.Addr, peer.Client, peer.Admin} {
			if err := checkAddress(addr); err != nil {
				p.check(false, "peers: member %d: %w", peer.ID, err)
			}
		}
	}
	p.check(c.NodeID == 0 || ids[c.NodeID], "node_id: %d is not among peers; add it there", c.NodeID)
}

func (c *Config) checkTimes(p *problems) {
	p.check(c.Tick >= time.Millisecond && c.Tick <= time.Second, "tick: choose 1ms to 1s")
	if c.Tick > 0 {
		p.check(c.HeartbeatInterval >= c.Tick && c.HeartbeatInterval%c.Tick == 0,
			"heartbeat_interval: %v is not a multiple of tick %v", c.HeartbeatInterval, c.Tick)
		p.check(c.ElectionTimeout%c.Tick == 0 && c.ElectionTimeout >= minElectionTicks*c.Tick,
			"election_timeout: %v is not a multiple of tick %v, at least %d of it", c.ElectionTimeout, c.Tick, minElectionTicks)
	}
	p.check(c.ElectionTimeout >= 3*c.HeartbeatInterval,
		"election_timeout: %v leaves no room for a lost heartbeat; choose at least 3 times heartbeat_interval (%v)",
		c.ElectionTimeout, c.HeartbeatInterval)
	p.check(c.ElectionTimeout <= time.Minute, "election_timeout: choose at most 1m")
	p.check(c.DefaultLease > 0 && c.DefaultLease <= c.ElectionTimeout,
		"default_lease: %v must be more than 0 and at most election_timeout (%v): a new leader waits only that long before it evicts",
		c.DefaultLease, c.ElectionTimeout)
	p.check(c.SessionTTL >= sessionElections*c.ElectionTimeout,
		"session_ttl: %v would end sessions during an election; choose at least %d times election_timeout: %v",
		c.SessionTTL, sessionElections, sessionElections*c.ElectionTimeout)
	p.check(c.SessionTTL <= time.Hour, "session_ttl: choose at most 1h, or dead clients keep their regions too long")
	positive := []struct {
		name string
		d    time.Duration
		most time.Duration
	}{
		{"flush_interval", c.FlushInterval, time.Minute},
		{"touch_interval", c.TouchInterval, time.Minute},
		{"alloc_timeout", c.AllocTimeout, time.Hour},
		{"away_timeout", c.AwayTimeout, 24 * time.Hour},
		{"maru_lease", c.MaruLease, time.Minute},
		{"maru_owner_grace", c.MaruOwnerGrace, 24 * time.Hour},
		{"handshake_timeout", c.HandshakeTimeout, time.Hour},
		{"write_timeout", c.WriteTimeout, time.Hour},
		{"shutdown_timeout", c.ShutdownTimeout, time.Hour},
	}
	for _, t := range positive {
		p.check(t.d >= time.Millisecond && t.d <= t.most, "%s: choose 1ms to %s, not %v", t.name, formatDuration(t.most), t.d)
	}
	p.check(c.IdleTimeout == 0 || c.IdleTimeout > c.SessionTTL,
		"idle_timeout: %v would cut off sessions that only send heartbeats; choose more than session_ttl (%v), or 0",
		c.IdleTimeout, c.SessionTTL)
}

func (c *Config) checkPool(p *problems) {
	p.check(policy.Known(c.EvictionPolicy), "eviction_policy: %q is unknown; choose one of %v", clip(c.EvictionPolicy), policy.Names())
	pages := c.PageSize >= meta.MinPageSize && c.PageSize&(c.PageSize-1) == 0
	p.check(pages, "page_size: %v is not a power of two of at least 4KiB", c.PageSize)
	if pages {
		p.check(c.RegionSize >= c.PageSize && c.RegionSize%c.PageSize == 0,
			"region_size: %v is not a multiple of page_size (%v)", c.RegionSize, c.PageSize)
		p.check(c.RegionSize/c.PageSize <= meta.MaxRegionPages,
			"region_size: %v has more than %d pages of %v; choose larger pages", c.RegionSize, meta.MaxRegionPages, c.PageSize)
	}
	p.check(c.TTL%time.Millisecond == 0 && c.MinRegionAge%time.Millisecond == 0,
		"ttl, min_region_age: whole milliseconds are expected")
	p.check(len(c.Pool) <= meta.MaxDevices, "pool: at most %d devices", meta.MaxDevices)
	paths := map[string]bool{}
	for _, d := range c.Pool {
		p.check(d.Path != "", "pool: a device has no path")
		p.check(!paths[d.Path], "pool: %s is given twice", clip(d.Path))
		paths[d.Path] = true
		p.check(protocol.TierRank(d.Tier) >= 0,
			"pool: %s: tier %q is none of cxl, dram, ssd", clip(d.Path), clip(d.Tier))
		p.check(slices.Contains([]string{"hardware", "none"}, d.Coherence),
			"pool: %s: coherence %q is none of hardware, none", clip(d.Path), clip(d.Coherence))
		p.check(d.Size == 0 || d.Size >= poolAlign+meta.MinPageSize,
			"pool: %s: %v is too small: the header alone takes 2MiB", clip(d.Path), d.Size)
		p.check(d.Size%poolUnit == 0, "pool: %s: size %v is not a multiple of %v", clip(d.Path), d.Size, Size(poolUnit))
	}
}

func (c *Config) checkLimits(p *problems) {
	_, err := c.NUMANode()
	p.check(err == nil, "dram_numa: %v", err)
	p.check(c.MaxConnections > 0, "max_connections: choose at least 1")
	err = c.TierLow.into(&meta.Settings{})
	p.check(err == nil, "tier_low: %v", err)
	p.check(c.TouchBudget > 0, "touch_budget: choose at least 1; without recorded uses every policy is fifo")
	p.check(c.RevokeWatermark >= 0 && c.RevokeWatermark <= 100, "revoke_watermark: %d is no percentage", c.RevokeWatermark)
	p.check(c.CacheSize >= 1<<20, "cache_size: %v is too small; choose at least 1MiB", c.CacheSize)
	_, err = ParseLevel(c.LogLevel)
	p.check(err == nil, "log_level: %q is none of debug, info, warn, error", clip(c.LogLevel))
	p.check(c.LogFormat == "text" || c.LogFormat == "json", "log_format: %q is neither text nor json", clip(c.LogFormat))
}

// ParseLevel reads the log_level option.
func ParseLevel(text string) (slog.Level, error) {
	levels := map[string]slog.Level{
		"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError,
	}
	level, ok := levels[text]
	if !ok {
		return 0, fmt.Errorf("log level %q: write debug, info, warn or error", clip(text))
	}
	return level, nil
}

// WriteYAML writes the configuration in force as a file that Load reads, with secrets hidden and each option's help
// above it.
func (c *Config) WriteYAML(w io.Writer) error {
	v := reflect.ValueOf(c).Elem()
	for i := range v.NumField() {
		field := v.Type().Field(i)
		if _, err := fmt.Fprintf(w, "# %s\n%s\n", optionHelp(field), yamlLine(field.Tag.Get("yaml"), v.Field(i))); err != nil {
			return fmt.Errorf("write configuration: %w", err)
		}
	}
	return nil
}

// WriteJSON writes the configuration in force by the names of the file, durations and sizes as they are written there,
// without secrets. JSON is YAML: Load reads it.
func (c *Config) WriteJSON(w io.Writer) error {
	values := make(map[string]any)
	v := reflect.ValueOf(c).Elem()
	for i := range v.NumField() {
		if _, secret := reflect.TypeAssert[Secret](v.Field(i)); !secret {
			values[v.Type().Field(i).Tag.Get("yaml")] = jsonValue(v.Field(i))
		}
	}
	b, err := json.MarshalIndent(values, "", "  ")
	if err == nil {
		_, err = w.Write(append(b, '\n'))
	}
	if err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	return nil
}

// jsonValue converts one option.
func jsonValue(field reflect.Value) any {
	switch v := field.Interface().(type) {
	case Size:
		return v.String()
	case time.Duration:
		return formatDuration(v)
	}
	switch field.Kind() {
	case reflect.Slice:
		list := make([]any, field.Len())
		for i := range list {
			list[i] = jsonValue(field.Index(i))
		}
		return list
	case reflect.Struct:
		item := make(map[string]any, field.NumField())
		for i := range field.NumField() {
			item[field.Type().Field(i).Tag.Get("yaml")] = jsonValue(field.Field(i))
		}
		return item
	default:
		return field.Interface()
	}
}

// yamlLine formats one option. A secret one and an empty list become comments, so that reading it back changes nothing.
func yamlLine(name string, field reflect.Value) string {
	_, secret := reflect.TypeAssert[Secret](field)
	if secret || field.Kind() == reflect.Slice && field.Len() == 0 {
		return "# " + name + ": " + formatValue(field)
	}
	if field.Kind() != reflect.Slice {
		return name + ": " + yamlScalar(field)
	}
	var s strings.Builder
	s.WriteString(name + ":")
	for i := range field.Len() {
		item := field.Index(i)
		parts := make([]string, item.NumField())
		for j := range parts {
			parts[j] = item.Type().Field(j).Tag.Get("yaml") + ": " + yamlScalar(item.Field(j))
		}
		s.WriteString("\n  - {" + strings.Join(parts, ", ") + "}")
	}
	return s.String()
}

// yamlScalar formats one value. Go's quoted strings are YAML's, since what was read from YAML is valid UTF-8.
func yamlScalar(field reflect.Value) string {
	if field.Kind() == reflect.String {
		return strconv.Quote(field.String())
	}
	return formatValue(field)
}
