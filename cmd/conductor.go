package cmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"larder/client"
	"larder/conductor/service"
	"larder/server"
)

// conductorCmd is larder conductor.
type conductorCmd struct {
	Config        string        `short:"c" env:"CONDUCTOR_CONFIG_PATH" placeholder:"FILE" help:"JSON file with http_server_port, kvevent_instance and what else is configured (default ~/.mooncake/conductor_config.json, if it is there)."`
	Listen        string        `env:"CONDUCTOR_LISTEN" placeholder:"ADDR" help:"Address for routers, host:port (default http_server_port of 127.0.0.1, which is 13333 by default)."`
	Seed          string        `env:"CONDUCTOR_SEED" default:"0" help:"Seed of the blocks' names, for those who ask by hash: a number, or any text (default 0)."`
	Masters       []string      `env:"CONDUCTOR_MASTERS" placeholder:"ADDR" help:"Masters of a pool: what is known is kept there too, and hot prefixes are copied (default: none)."`
	PoolEvents    []string      `env:"CONDUCTOR_POOL_EVENTS" placeholder:"ENDPOINT" help:"Where its members publish events, kv_events_listen as tcp://HOST:PORT; any one of them is enough (default: pooled blocks are not followed)."`
	PoolHashes    string        `env:"CONDUCTOR_POOL_HASHES" default:"rfc1527" enum:"rfc1527,engine" help:"What pooled blocks are stored under: rfc1527, rolling hashes with --seed, or engine, hashes that engines tell as well (default rfc1527)."`
	Tenants       []string      `env:"CONDUCTOR_TENANTS" default:"default" placeholder:"TENANT" help:"Tenants of the pool whose blocks are followed and copied (default default)."`
	StateDir      string        `env:"CONDUCTOR_STATE_DIR" placeholder:"DIR" help:"Directory that keeps what is known for the next start; none: it does not (default ./data/conductor in a checkout, else $XDG_STATE_HOME/larder/conductor)."`
	MaxBlocks     int           `env:"CONDUCTOR_MAX_BLOCKS" default:"67108864" help:"Blocks in the index, 32 bytes and more each; beyond it the context that was used least lately goes (default 67108864)."`
	DisconnectTTL time.Duration `name:"disconnect-ttl" env:"CONDUCTOR_DISCONNECT_TTL" default:"60s" help:"How long what an engine holds counts after it was last reached (default 60s)."`
	SaveEvery     time.Duration `env:"CONDUCTOR_SAVE_EVERY" default:"30s" help:"How often what is known is kept (default 30s)."`
	LogLevel      string        `env:"CONDUCTOR_LOG_LEVEL" default:"INFO" enum:"DEBUG,INFO,WARN,ERROR,debug,info,warn,error" help:"Least severe log lines to write: DEBUG, INFO, WARN or ERROR (default INFO)."`
	LogFormat     string        `env:"CONDUCTOR_LOG_FORMAT" default:"text" enum:"text,json" help:"Form of log lines: text or json (default text)."`
}

// Help is what larder conductor --help says below its flags.
func (*conductorCmd) Help() string {
	return "The conductor follows the KV events of serving engines and tells routers which of them holds how much of a prompt " +
		"(POST /query), and which is to prefill and to decode it (POST /schedule). GET /openapi.json describes the requests."
}

// config builds the service's configuration, but for what a pool adds.
func (c *conductorCmd) config(logger *slog.Logger) (service.Config, error) {
	path, needed := c.Config, true
	if path == "" {
		path, needed = service.DefaultConfigPath(), false
	}
	file, err := service.LoadFile(expandHome(path), needed)
	if err != nil {
		return service.Config{}, err //nolint:wrapcheck // says which file
	}
	if c.MaxBlocks < 1 || c.DisconnectTTL <= 0 || c.SaveEvery <= 0 {
		return service.Config{}, errors.New("--max-blocks, --disconnect-ttl and --save-every are more than 0")
	}
	if len(c.Masters) == 0 {
		c.Masters = file.Masters
	}
	dir, err := c.stateDir(file.StateDir)
	return service.Config{
		Listen: c.Listen, File: file, Seed: seedOf(c.Seed), MaxBlocks: c.MaxBlocks, DisconnectTTL: c.DisconnectTTL, SaveEvery: c.SaveEvery,
		StateDir: dir, PoolEvents: c.PoolEvents, PoolEngineHashes: c.PoolHashes == "engine", Logger: logger,
	}, err
}

// stateDir is where what is known is kept, "" for nowhere. It is made if it is not there.
func (c *conductorCmd) stateDir(configured string) (string, error) {
	dir := cmp.Or(c.StateDir, configured)
	if dir == server.Off {
		return "", nil
	}
	if dir == "" {
		data, err := dataDir()
		if err != nil {
			return "", fmt.Errorf("no place for what is known: %w; name one with --state-dir, or none", err)
		}
		dir = filepath.Join(data, "conductor")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("the directory for what is known: %w; name another one with --state-dir, or none", err)
	}
	return dir, nil
}

// Run implements the command: serve until a signal comes.
func (c *conductorCmd) Run(e *env) (err error) {
	logger := newLogger(e.stderr, &server.Config{LogLevel: strings.ToLower(c.LogLevel), LogFormat: c.LogFormat})
	cfg, err := c.config(logger)
	if err != nil {
		return usageError(err)
	}
	if len(c.PoolEvents) > 0 && len(c.Masters) == 0 {
		return usageError(errors.New("--pool-events without --masters: what the pool holds is listed there at the start"))
	}
	cfg.Pool = map[string]*client.Client{}
	defer func() { err = errors.Join(err, closePools(cfg.Pool)) }()
	for _, tenant := range c.Tenants {
		if len(c.Masters) == 0 {
			break
		}
		if cfg.Pool[tenant], err = c.pool(e.ctx, tenant); err != nil {
			delete(cfg.Pool, tenant)
			return err
		}
	}
	s, err := service.Start(cfg)
	if err != nil {
		return err //nolint:wrapcheck // says what
	}
	logger.LogAttrs(e.ctx, slog.LevelInfo, "serving", slog.String("addr", s.Addr()))
	if err := notify("READY=1"); err != nil {
		logger.LogAttrs(e.ctx, slog.LevelWarn, "systemd was not told", slog.Any("error", err))
	}
	<-e.ctx.Done()
	logger.LogAttrs(e.ctx, slog.LevelInfo, "stopping")
	return s.Close() //nolint:wrapcheck // says what
}

// poolWithin is how long the masters may take to answer at the start.
const poolWithin = 10 * time.Second

// closePools ends the sessions.
func closePools(pools map[string]*client.Client) (err error) {
	ctx, cancel := background(nodeStop)
	defer cancel()
	for _, pool := range pools {
		err = errors.Join(err, pool.Close(ctx))
	}
	return err
}

// pool connects to the masters as a tenant.
func (c *conductorCmd) pool(ctx context.Context, tenant string) (*client.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, poolWithin)
	defer cancel()
	pool, err := client.Open(ctx, client.Config{Addrs: c.Masters, Tenant: tenant})
	if err != nil {
		return nil, fmt.Errorf("masters %s: %w", strings.Join(c.Masters, ", "), err)
	}
	return pool, nil
}

// expandHome puts the home directory in place of a leading ~/, which no shell does in environment files.
func expandHome(path string) string {
	if rest, ok := strings.CutPrefix(path, "~/"); ok {
		if home, err := os.UserHomeDir(); err == nil {
			return filepath.Join(home, rest)
		}
	}
	return path
}

// seedOf is a number as it is, and the hash of any other text.
func seedOf(text string) uint64 {
	if n, err := strconv.ParseUint(text, 0, 64); err == nil {
		return n
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(text)) // it does not fail
	return h.Sum64()
}
