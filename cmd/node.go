package cmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/alecthomas/kong"
	"go.yaml.in/yaml/v3"

	"larder/node"
	"larder/server"
	"larder/tiering/ssd"
	"larder/transfer"
	"larder/transfer/verbs"
)

// nodeCmd is larder node.
type nodeCmd struct {
	Config kong.ConfigFlag `short:"c" env:"LARDER_NODE_CONFIG" help:"YAML file with the names of the flags, dashes written as underscores; environment variables and flags override it."`

	Masters   []string `env:"LARDER_NODE_MASTERS" default:"127.0.0.1:7400" placeholder:"ADDR" help:"Masters, host:port or unix:PATH; any one of them is enough (default 127.0.0.1:7400)."`
	Host      string   `env:"LARDER_NODE_HOST" help:"Name of this host, as placements name it (default: its machine id, or its name)."`
	Listen    []string `env:"LARDER_NODE_LISTEN" default:"127.0.0.1:7403" placeholder:"ADDR" help:"Addresses at which clients and nodes of other hosts reach the devices, one for each rail; none: only processes of this host use them (default 127.0.0.1:7403)."`
	Advertise []string `env:"LARDER_NODE_ADVERTISE" placeholder:"ADDR" help:"What others are told instead, one for each of --listen."`
	Token     string   `env:"LARDER_TRANSFER_TOKEN" help:"What all that reach the devices by transfer must know."`

	NICs         []string     `name:"nics" env:"LARDER_NODE_NICS" placeholder:"NAME" help:"NICs for RDMA, as mlx5_0 or mlx5_0/2; none for none (default: all)."`
	Topology     topologyFile `env:"LARDER_NODE_TOPOLOGY" placeholder:"FILE" help:"Topology of this host as JSON (default: as its sysfs tells; see larder transfer probe --json)."`
	Transports   []string     `env:"LARDER_NODE_TRANSPORTS" help:"Transports to use: local, shm, rdma, tcp (default: all)."`
	ZeroCopy     string       `env:"LARDER_NODE_ZERO_COPY" default:"auto" enum:"auto,on,off" help:"Whether long answers over TCP are sent from where they lie: on; off; auto, to other hosts where the kernel can (default auto)."`
	MaxEndpoints int          `env:"LARDER_NODE_MAX_ENDPOINTS" default:"4096" help:"Peers that are connected to a NIC at once (default 4096)."`
	Eviction     string       `env:"LARDER_NODE_EVICTION" default:"sieve" enum:"fifo,sieve" help:"Who makes room for a new peer of a NIC: fifo or sieve (default sieve)."`
	NumQPPerEP   int          `name:"num-qp-per-ep" env:"LARDER_NODE_NUM_QP_PER_EP" default:"2" help:"Queue pairs of each such peer, 1 to 64 (default 2)."`

	DRAM           server.Size `name:"dram" env:"LARDER_NODE_DRAM" help:"Memory of this process to contribute: what lies there goes with it (default 0: none)."`
	NUMA           *int        `name:"numa" env:"LARDER_NODE_NUMA" placeholder:"N" help:"NUMA node that this memory comes from, and where placements as HOST/N find it (default: the host's only one, or the one that this process is bound to)."`
	SSD            []string    `name:"ssd" env:"LARDER_NODE_SSD" placeholder:"DIR" help:"Directory of an SSD store to contribute: what lies there outlives the node; may be given several times."`
	SSDSize        server.Size `name:"ssd-size" env:"LARDER_NODE_SSD_SIZE" help:"Bytes that each SSD holds; the disk takes a quarter more. Needed to make a store; then it has its size."`
	SSDCompression string      `name:"ssd-compression" env:"LARDER_NODE_SSD_COMPRESSION" default:"auto" enum:"auto,on,off" help:"Whether SSDs store values as zstd: auto (where it pays), on or off (default auto)."`
	SSDCompactRate server.Size `name:"ssd-compact-rate" env:"LARDER_NODE_SSD_COMPACT_RATE" default:"256MiB" help:"Bytes per second that an SSD's compaction writes while no store waits for it (default 256MiB)."`
	CXL            []string    `name:"cxl" env:"LARDER_NODE_CXL" sep:"none" placeholder:"PATH" help:"CXL memory to contribute: PATH[,size=8GiB][,coherence=hardware][,force], as --pool of larder serve; may be given several times."`

	Bandwidth  server.Size `env:"LARDER_NODE_BANDWIDTH" default:"256MiB" help:"Bytes per second that copies between tiers may take, of all devices (default 256MiB)."`
	PageSize   server.Size `env:"LARDER_NODE_PAGE_SIZE" default:"64KiB" help:"Page size of the regions for copies: that of most entries (default 64KiB)."`
	RegionSize server.Size `env:"LARDER_NODE_REGION_SIZE" default:"64MiB" help:"Size of such a region (default 64MiB)."`
	Prefault   bool        `env:"LARDER_NODE_PREFAULT" help:"Have all memory now, not when it is first touched."`
	NoMap      bool        `name:"no-map" env:"LARDER_NODE_NO_MAP" help:"Let processes of this host not map the memory either: all access is by transfer."`

	AdminListen string `env:"LARDER_NODE_ADMIN_LISTEN" default:"127.0.0.1:7404" help:"Address of /healthz, /status and /metrics; none: no admin (default 127.0.0.1:7404)."`
	LogLevel    string `env:"LARDER_NODE_LOG_LEVEL" default:"info" enum:"debug,info,warn,error" help:"Least severe log lines to write: debug, info, warn or error (default info)."`
	LogFormat   string `env:"LARDER_NODE_LOG_FORMAT" default:"text" enum:"text,json" help:"Form of log lines: text or json (default text)."`
}

// Help is what larder node --help says below its flags.
func (*nodeCmd) Help() string {
	return "A node contributes devices to a pool: processes of this host map its memory, others reach it, and its disks, by transfer. " +
		"It ends at SIGTERM, and says so to the masters: its memory is given up, its SSDs are away until it is back."
}

// config builds the node's configuration.
func (c *nodeCmd) config(logger *slog.Logger) (node.Config, error) {
	cfg := node.Config{
		Masters: c.Masters, Host: c.Host, Listen: c.Listen, Advertise: c.Advertise, Token: c.Token, DRAM: uint64(c.DRAM), NUMA: c.NUMA,
		Bandwidth: uint64(c.Bandwidth), PageSize: uint64(c.PageSize), RegionSize: uint64(c.RegionSize), Prefault: c.Prefault,
		NoMap: c.NoMap, Logger: logger, Topology: c.Topology.Topology, Transports: c.Transports,
		ZeroCopy: c.ZeroCopy,
	}
	var err error
	if cfg.Endpoints, err = endpointConfig(c.MaxEndpoints, c.NumQPPerEP, c.Eviction); err != nil {
		return cfg, err
	}
	compression, err := ssd.ParseCompression(c.SSDCompression)
	if err != nil {
		return cfg, err //nolint:wrapcheck // says which
	}
	if slices.Equal(c.Listen, []string{server.Off}) {
		cfg.Listen = nil
	}
	for _, dir := range c.SSD {
		cfg.SSD = append(cfg.SSD, node.SSD{
			Dir: dir, Size: uint64(c.SSDSize), Compression: compression, CompactRate: int64(c.SSDCompactRate), //nolint:gosec // checked by the store
		})
	}
	for _, text := range c.CXL {
		d, err := server.ParseDevice(text)
		if err == nil && d.Tier != "" && d.Tier != "cxl" {
			err = fmt.Errorf("the tier is cxl, not %s", d.Tier)
		}
		if err != nil {
			return cfg, fmt.Errorf("--cxl %s: %w", text, err)
		}
		if d.Coherence == "" {
			d.Coherence = server.DefaultCoherence(d.Path)
		}
		cfg.CXL = append(cfg.CXL, node.CXL{Path: d.Path, Size: uint64(d.Size), Coherence: d.Coherence, Force: d.Force})
	}
	return cfg, nil
}

// endpointConfig says how a node's NICs keep their peers. 0 and "" are the defaults.
func endpointConfig(peers, qps int, eviction string) (c transfer.EndpointConfig, err error) {
	switch {
	case peers < 0 || peers > 1<<20:
		err = fmt.Errorf("%d endpoints of a NIC: from 1 to %d", peers, 1<<20)
	case qps < 0 || qps > 64:
		err = fmt.Errorf("%d queue pairs of an endpoint: from 1 to 64", qps)
	case eviction != "" && eviction != "fifo" && eviction != "sieve":
		err = fmt.Errorf("eviction %.20q of endpoints: fifo or sieve", eviction)
	}
	return transfer.EndpointConfig{MaxEndpoints: peers, QPsPerEndpoint: qps, Eviction: eviction}, err
}

// Run implements the command: contribute until a signal comes.
func (c *nodeCmd) Run(e *env) (err error) {
	logger := newLogger(e.stderr, &server.Config{LogLevel: c.LogLevel, LogFormat: c.LogFormat})
	cfg, err := c.config(logger)
	if err != nil {
		return usageError(err)
	}
	nics, closeNICs, err := verbs.OpenNICs(c.NICs)
	if err != nil {
		return usageError(err)
	}
	defer func() { err = errors.Join(err, closeNICs()) }()
	cfg.NICs = nics
	n, err := node.New(cfg)
	if err != nil {
		return usageError(err)
	}
	admin, err := startNodeAdmin(n, c.AdminListen, logger)
	if err != nil {
		return errors.Join(err, n.Close())
	}
	if err := notify("READY=1"); err != nil {
		logger.LogAttrs(e.ctx, slog.LevelWarn, "systemd was not told", slog.Any("error", err))
	}
	err = n.Run(e.ctx)
	logger.LogAttrs(e.ctx, slog.LevelInfo, "stopping")
	return errors.Join(err, n.Close(), admin.stop())
}

// loadYAML makes the values of a YAML file those of flags, by their names. It implements kong.ConfigurationLoader.
func loadYAML(r io.Reader) (kong.Resolver, error) {
	values := yamlFlags{}
	if err := yaml.NewDecoder(io.LimitReader(r, maxYAML)).Decode(&values); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("not YAML with keys and values: %w", err)
	}
	return values, nil
}

// maxYAML bounds a configuration file: the longest sensible one has some lines.
const maxYAML = 1 << 20

// yamlFlags are values by the names of flags, with underscores.
type yamlFlags map[string]any

// Validate implements kong.Resolver.
func (v yamlFlags) Validate(app *kong.Application) error {
	known := map[string]bool{}
	for _, command := range app.Children {
		if command.Name == "node" {
			for _, flag := range command.Flags {
				known[yamlName(flag)] = true
			}
		}
	}
	for name := range v {
		if !known[name] {
			return fmt.Errorf("configuration: unknown key %.64q: see larder node --help", name)
		}
	}
	return nil
}

// Resolve implements kong.Resolver.
func (v yamlFlags) Resolve(_ *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
	switch value := v[yamlName(flag)].(type) {
	case nil:
		return nil, nil //nolint:nilnil // as the interface says
	case []any:
		return value, nil
	default:
		return fmt.Sprint(value), nil
	}
}

func yamlName(flag *kong.Flag) string { return strings.ReplaceAll(flag.Name, "-", "_") }

// nodeStop is how long the listener of a node's admin may take to end.
const nodeStop = 2 * time.Second

// background is for the way out, when the command's own context has ended.
func background(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), d)
}
