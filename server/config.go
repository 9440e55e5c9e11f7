package server

import (
	"fmt"
	"log/slog"
	"reflect"
	"strconv"
	"strings"
	"time"

	"larder/conductor/kvevent"
	"larder/meta"
	"larder/meta/policy"
)

// Config is everything that a server can be told. [Default] gives the defaults, [Load] layers a YAML file, the
// environment and flags over them, [Config.Complete] fills in what follows from the rest, and [Config.Validate]
// checks the whole. A Config is a plain value: copy it freely, but do not change one that a server runs on.
//
// Each field's yaml tag is its key in the file; the flag is the same with dashes, and the environment variable the
// same in capitals after LARDER_. Durations are written like "500ms" or "2s", sizes like "64KiB" or "1.5GiB".
type Config struct {
	NodeID      uint64 `yaml:"node_id" help:"Id of this member, for life; 0: 1 in a new single-node cluster, a random one when joining, what the data directory says afterwards."`
	ClusterName string `yaml:"cluster_name" help:"Name of the cluster; members and data directories of another one are refused."`
	DataDir     string `yaml:"data_dir" help:"Directory of the log and the index. Empty: ./data in a checkout or where it exists, else $XDG_STATE_HOME/larder."`

	Listen        string `yaml:"listen" help:"Address for clients, host:port; none: the socket alone."`
	Socket        string `yaml:"socket" help:"Path of the Unix socket for clients of this host. Empty: larder.sock in the data directory; none: no socket."`
	Advertise     string `yaml:"advertise" help:"Address that clients are told. Empty: listen, with the host's name for a wildcard."`
	PeerListen    string `yaml:"peer_listen" help:"Address for the other members; none: no others can join."`
	PeerAdvertise string `yaml:"peer_advertise" help:"Address that the other members are told. Empty: as for advertise."`
	AdminListen   string `yaml:"admin_listen" help:"Address of the HTTP admin and metrics; none: no admin."`
	AdminToken    Secret `yaml:"admin_token" help:"Bearer token that the admin's changing requests must carry; needed unless admin_listen is a loopback address."`

	KVEventsListen       string `yaml:"kv_events_listen" help:"Endpoint at which this member publishes KV events of what it applies, a ZeroMQ PUB as in tcp://0.0.0.0:5557. Empty: it does not."`
	KVEventsReplayListen string `yaml:"kv_events_replay_listen" help:"Endpoint that sends past KV events again, a ZeroMQ ROUTER. Empty: none."`
	KVEventsFormat       string `yaml:"kv_events_format" help:"How KV events are encoded: vllm, as vLLM did until 2026, vllm_map, as it does since, or rfc1527, which alone names tenant, model, adapter and salt."`
	KVEventsTopic        string `yaml:"kv_events_topic" help:"Topic of KV events. Empty: kv@ADVERTISE@CLUSTER_NAME."`

	Maru            string `yaml:"maru" help:"Address at which this member is a metadata server for Maru's clients, host:port as in 0.0.0.0:5555; set it on all members. Empty: none."`
	MaruRM          string `yaml:"maru_rm" help:"Address at which this member is a resource manager for Maru's clients, host:port as in 127.0.0.1:9850; set it on all members. Empty: none."`
	MaruRMAdvertise string `yaml:"maru_rm_advertise" help:"Address of the resource manager that Maru's clients are told. Empty: maru_rm, with the host's name for a wildcard."`

	Peers []PeerConfig `yaml:"peers" help:"Members of a new cluster, this one included, the same on all: ID=PEER[/CLIENT[/ADMIN]], as in 1=10.0.0.1:7401/:7400/:7402. Used only while the data directory is empty. Empty: a cluster of one."`
	Join  bool         `yaml:"join" help:"With an empty data directory, wait to be added to a running cluster (larder ctl members add) instead of starting a new one."`

	Pool []DeviceConfig `yaml:"pool" help:"Devices of the pool: PATH[,size=640MiB][,tier=cxl][,coherence=hardware][,force], or a size alone for a file in /dev/shm. Empty: such a file, of half the free space and at most 1GiB. coherence: hardware, or none where hosts that map the device must write back and invalidate caches themselves; default none for a device such as /dev/dax0.0, where it is not known, else hardware. force: take the device though it holds a header or data that is not this pool's, which is overwritten."`

	TransferListen string `yaml:"transfer_listen" help:"Address at which other hosts read and write this host's devices, host:port; none: they do not. Empty: port 7403 of listen's host, or none if that is a loopback address and there is no dram or ssd."`
	TransferToken  Secret `yaml:"transfer_token" help:"What all that reach the devices by transfer must know, nodes and clients."`

	TransferNICs         string `yaml:"transfer_nics" help:"NICs for RDMA, as mlx5_0 or mlx5_0/2, with commas in between; none for none. Empty: all."`
	TransferTopology     string `yaml:"transfer_topology" help:"File with the topology of this host as JSON; see larder transfer probe --json. Empty: as its sysfs tells."`
	TransferTransports   string `yaml:"transfer_transports" help:"Transports to use, of local, shm, rdma and tcp, with commas in between. Empty: all."`
	TransferZeroCopy     string `yaml:"transfer_zero_copy" help:"Whether long answers over TCP are sent from where they lie: on; off; auto, to other hosts where the kernel can."`
	TransferMaxEndpoints int    `yaml:"transfer_max_endpoints" help:"Peers that are connected to a NIC at once."`
	TransferEviction     string `yaml:"transfer_eviction" help:"Who makes room for a new peer of a NIC: fifo or sieve."`
	TransferNumQPPerEP   int    `yaml:"transfer_num_qp_per_ep" help:"Queue pairs of each such peer, 1 to 64."`

	DRAM           Size   `yaml:"dram" help:"Memory of this process to contribute to the pool, as larder node does; what lies there goes with it. 0: none."`
	DRAMNUMA       string `yaml:"dram_numa" help:"NUMA node that this memory comes from, and where placements as HOST/N find it. Empty: the host's only one, or the one that this process is bound to."`
	SSD            string `yaml:"ssd" help:"Directory of an SSD store to contribute. Empty: none."`
	SSDCompression string `yaml:"ssd_compression" help:"Whether the SSD stores values as zstd: auto (where it pays), on or off."`
	SSDCompactRate Size   `yaml:"ssd_compact_rate" help:"Bytes per second that the SSD's compaction writes while no store waits for it."`
	SSDSize        Size   `yaml:"ssd_size" help:"Bytes that the SSD store holds; the disk takes a quarter more. Needed to make it; then it has its size."`

	Tick              time.Duration `yaml:"tick" help:"Step of the Raft clock."`
	HeartbeatInterval time.Duration `yaml:"heartbeat_interval" help:"How often the leader shows that it is there; a multiple of tick."`
	ElectionTimeout   time.Duration `yaml:"election_timeout" help:"Silence after which members elect a new leader; a multiple of tick. Also the longest read lease."`
	DefaultLease      time.Duration `yaml:"default_lease" help:"Read lease for lookups that name none; at most election_timeout."`
	SessionTTL        time.Duration `yaml:"session_ttl" help:"Life of a client's session without a heartbeat, and the most that a client may ask for; at least 5 election timeouts."`
	FlushInterval     time.Duration `yaml:"flush_interval" help:"How often changed records of the index go to Pebble; a longer one means more log to replay at a start."`
	TouchInterval     time.Duration `yaml:"touch_interval" help:"How long uses of entries are collected before they go into the log."`
	TouchBudget       int           `yaml:"touch_budget" help:"Uses per second that go into the log; more are dropped and counted."`
	AllocTimeout      time.Duration `yaml:"alloc_timeout" help:"How long an allocation that names no time waits for a victim before it is answered with a retryable PENDING."`

	MaruLease      time.Duration `yaml:"maru_lease" help:"For how long what a client of Maru's has looked up stays where it is: it has to map and copy it by then. The same on all members."`
	MaruOwnerGrace time.Duration `yaml:"maru_owner_grace" help:"How long an instance of Maru's may have no connection before its regions may be evicted, if the pool is full."`

	AwayTimeout time.Duration `yaml:"away_timeout" help:"How long what lies on an SSD device is kept while its node is gone; memory of a node is lost with it at once."`

	RevokeWatermark int `yaml:"revoke_watermark" help:"Percent of the pool in regions from which on a client that evicts more than it holds gets a region of another client before its stores wait for one; 0: never."`

	EvictionPolicy        string        `yaml:"eviction_policy" help:"Eviction policy of a new pool; afterwards: larder ctl policy set. One of:"`
	TTL                   time.Duration `yaml:"ttl" help:"Life of entries under the ttl policy that name none, in a new pool; 0: they do not expire."`
	PageSize              Size          `yaml:"page_size" help:"Page size of a new pool, for clients that name none."`
	RegionSize            Size          `yaml:"region_size" help:"Region size of a new pool, for clients that name none."`
	MaxRegionsPerInstance uint64        `yaml:"max_regions_per_instance" help:"Regions that one client may own, in a new pool; 0: no limit."`
	MinRegionAge          time.Duration `yaml:"min_region_age" help:"Age before which a live client's region is not taken from it, in a new pool, unless a store would fail."`

	TierLow      Watermarks `yaml:"tier_low" help:"Percent of a device in use from which on its cold end is copied to a slower tier, in a new pool, and those of tiers and devices that differ, as in 70%,dram=60%,#3=50%; 100%: never."`
	PromoteAfter uint64     `yaml:"promote_after" help:"Uses of an entry in the slowest tier after which readers put a copy in a faster one, in a new pool; 0: never."`
	PromoteMost  Size       `yaml:"promote_most" help:"Bytes of the largest entry of which readers do that, in a new pool; 0: no limit."`
	PromoteRate  Size       `yaml:"promote_rate" help:"Bytes per second that each client is asked to copy so, in a new pool; 0: no limit."`

	MaxConnections   int           `yaml:"max_connections" help:"Client connections; more are refused."`
	HandshakeTimeout time.Duration `yaml:"handshake_timeout" help:"How long a new connection may stay silent."`
	IdleTimeout      time.Duration `yaml:"idle_timeout" help:"How long a connection with no request may stay open; 0: for ever."`
	WriteTimeout     time.Duration `yaml:"write_timeout" help:"How long a client may take to read its replies before it is cut off."`
	ShutdownTimeout  time.Duration `yaml:"shutdown_timeout" help:"How long a graceful stop may take, handing over leadership included."`

	CacheSize   Size `yaml:"cache_size" help:"Pebble's block cache; it counts toward GOMEMLIMIT."`
	MinFreeDisk Size `yaml:"min_free_disk" help:"Free space on the data directory's disk below which changes are refused."`

	LogLevel  string `yaml:"log_level" help:"Least severe log lines to write: debug, info, warn or error."`
	LogFormat string `yaml:"log_format" help:"Form of log lines: text or json."`
}

// PeerConfig is one member of a new cluster.
type PeerConfig struct { //nolint:recvcheck // String must work on values, as they stand in lists
	ID     uint64 `yaml:"id"`     // for life, not 0
	Addr   string `yaml:"addr"`   // host:port for the other members
	Client string `yaml:"client"` // host:port for clients; default: Addr's host, port 7400
	Admin  string `yaml:"admin"`  // host:port of the admin; default: Addr's host, port 7402
}

// DeviceConfig is one device of the pool.
type DeviceConfig struct {
	Path      string `yaml:"path"`      // file or character device
	Size      Size   `yaml:"size"`      // bytes, header included; 0 = all of an existing device or file
	Tier      string `yaml:"tier"`      // cxl, dram or ssd; default cxl
	Coherence string `yaml:"coherence"` // hardware or none; default: none for a device node, hardware for a file
	Force     bool   `yaml:"force"`     // overwrite a header or data that is not this pool's
}

// Watermarks are percentages of use, of all devices and of some tiers and devices: see [meta.ParseWatermarks].
type Watermarks string

// UnmarshalText reads the text form.
func (w *Watermarks) UnmarshalText(b []byte) error {
	v, err := meta.ParseWatermarks(string(b))
	if err == nil {
		*w = Watermarks(v.String())
	}
	return err //nolint:wrapcheck // it says all
}

// NUMANode is the number in DRAMNUMA, nil if there is none.
func (c *Config) NUMANode() (*int, error) {
	if c.DRAMNUMA == "" {
		return nil, nil //nolint:nilnil // described above
	}
	n, err := strconv.ParseUint(c.DRAMNUMA, 10, 10)
	node := int(n) // it has 10 bits
	if err != nil {
		return nil, fmt.Errorf("%q: write the number of a NUMA node", clip(c.DRAMNUMA))
	}
	return &node, nil
}

// Split returns what the settings of a pool call tier_low and tier_lows.
func (w Watermarks) Split() (low *uint64, lows *string) {
	var s meta.Settings
	if w.into(&s) != nil {
		return nil, nil
	}
	return &s.TierLow, &s.TierLows
}

// into writes them to settings.
func (w Watermarks) into(s *meta.Settings) error {
	v, err := meta.ParseWatermarks(string(w))
	if err == nil {
		s.TierLow, s.TierLows = v.All, v.Named()
	}
	return err //nolint:wrapcheck // it says all
}

// Secret is a text that no log, status or printed configuration shows.
type Secret string

// redacted is shown in place of a Secret.
const redacted = "(set)"

// String returns a placeholder, or nothing for an empty secret.
func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return redacted
}

// LogValue keeps the secret out of logs.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// MarshalText keeps the secret out of JSON.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Off is the value of Socket and AdminListen that turns them off.
const Off = "none"

// Ports of the defaults.
const (
	DefaultClientPort = "7400"
	DefaultPeerPort   = "7401"
	DefaultAdminPort  = "7402"
	DefaultNodePort   = "7403" // of transfers
)

// Default returns the configuration of a single-node server on this host, before [Config.Complete].
func Default() Config {
	return Config{
		ClusterName:       "larder",
		Listen:            "127.0.0.1:" + DefaultClientPort,
		PeerListen:        "127.0.0.1:" + DefaultPeerPort,
		AdminListen:       "127.0.0.1:" + DefaultAdminPort,
		KVEventsFormat:    kvevent.RFC1527.String(),
		Tick:              50 * time.Millisecond, // 20 steps in an election timeout spread candidates well
		HeartbeatInterval: 100 * time.Millisecond,
		ElectionTimeout:   time.Second, // far above a slow fsync, and short for those who wait for a new leader
		DefaultLease:      500 * time.Millisecond,
		SessionTTL:        10 * time.Second,
		FlushInterval:     time.Second,
		TouchInterval:     200 * time.Millisecond,
		TouchBudget:       50_000,
		AllocTimeout:      5 * time.Second,
		AwayTimeout:       10 * time.Minute,
		MaruLease:         5 * time.Second,
		MaruOwnerGrace:    time.Minute,
		EvictionPolicy:    "lru",
		PageSize:          64 << 10,
		RegionSize:        64 << 20,
		MinRegionAge:      5 * time.Second,
		TierLow:           "70%",
		PromoteAfter:      2,
		PromoteMost:       64 << 20,
		PromoteRate:       256 << 20,
		MaxConnections:    16384,
		HandshakeTimeout:  10 * time.Second,
		WriteTimeout:      10 * time.Second,
		ShutdownTimeout:   10 * time.Second,
		CacheSize:         64 << 20,
		MinFreeDisk:       256 << 20,

		TransferMaxEndpoints: 4096,
		TransferZeroCopy:     "auto",
		TransferEviction:     "sieve",
		TransferNumQPPerEP:   2,
		SSDCompression:       "auto",
		SSDCompactRate:       256 << 20,
		LogLevel:             "info",
		LogFormat:            "text",
	}
}

// Option describes one field of Config for command lines and documents.
type Option struct {
	Name    string // key in the YAML file
	Flag    string // name of the flag, without dashes
	Env     string // environment variable
	Help    string // what it does, with its unit
	Default string // the default, in the form that it is written in; "" = empty
	Bool    bool   // a flag without a value means true
	List    bool   // may be given several times
}

// EnvPrefix begins the name of every environment variable that Load reads.
const EnvPrefix = "LARDER_"

// Options lists the fields of Config in their order.
func Options() []Option {
	def := Default()
	v := reflect.ValueOf(&def).Elem()
	options := make([]Option, 0, v.NumField())
	for i := range v.NumField() {
		tag := v.Type().Field(i).Tag
		name := tag.Get("yaml")
		options = append(options, Option{
			Name:    name,
			Flag:    strings.ReplaceAll(name, "_", "-"),
			Env:     EnvPrefix + strings.ToUpper(name),
			Help:    optionHelp(v.Type().Field(i)),
			Default: formatValue(v.Field(i)),
			Bool:    v.Field(i).Kind() == reflect.Bool,
			List:    v.Field(i).Kind() == reflect.Slice,
		})
	}
	return options
}

// optionHelp says what a field does. The eviction policies are those that this binary has, its own included.
func optionHelp(field reflect.StructField) string {
	help := field.Tag.Get("help")
	if field.Name == "EvictionPolicy" {
		help += " " + strings.Join(policy.Names(), ", ") + "."
	}
	return help
}

// Set gives one field a value in text form, by the field's name in the YAML file. Several values are for lists.
func (c *Config) Set(name string, values ...string) error {
	field, ok := c.field(name)
	if !ok {
		return unknownName(name, optionNames())
	}
	if err := setValues(field, values); err != nil {
		return &valueError{name, err}
	}
	return nil
}

// field finds a field by its yaml tag.
func (c *Config) field(name string) (reflect.Value, bool) {
	return fieldByTag(reflect.ValueOf(c).Elem(), name)
}

// fieldByTag finds a struct's field by its yaml tag.
func fieldByTag(v reflect.Value, name string) (reflect.Value, bool) {
	for i := range v.NumField() {
		if v.Type().Field(i).Tag.Get("yaml") == name {
			return v.Field(i), true
		}
	}
	return reflect.Value{}, false
}

// optionNames lists the yaml tags of Config.
func optionNames() []string { return tagNames(reflect.TypeFor[Config]()) }

// tagNames lists the yaml tags of a struct type.
func tagNames(t reflect.Type) []string {
	names := make([]string, t.NumField())
	for i := range names {
		names[i] = t.Field(i).Tag.Get("yaml")
	}
	return names
}

// Changed lists the fields that differ from the defaults, as pairs of name and text form, secrets hidden.
func (c *Config) Changed() [][2]string {
	def := Default()
	v, d := reflect.ValueOf(c).Elem(), reflect.ValueOf(&def).Elem()
	var changed [][2]string
	for i := range v.NumField() {
		if !reflect.DeepEqual(v.Field(i).Interface(), d.Field(i).Interface()) {
			changed = append(changed, [2]string{v.Type().Field(i).Tag.Get("yaml"), formatValue(v.Field(i))})
		}
	}
	return changed
}
