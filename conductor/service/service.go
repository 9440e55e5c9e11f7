package service

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/valyala/fasthttp"

	"larder/client"
	"larder/conductor"
	"larder/conductor/poolfeed"
	"larder/conductor/source"
)

// Config says what a Service does. The zero value of each field stands for its default.
type Config struct {
	Listen string // host:port; the file's, or DefaultPort of this host alone
	File   File   // the static configuration
	Seed   uint64 // of the names of blocks, for those who ask by hash

	MaxBlocks     int           // in the index; see conductor.IndexConfig
	DisconnectTTL time.Duration // see source.Config
	// SaveEvery is how often what is known is kept in Stores; 30 s. What an engine has told since is had again by replay.
	SaveEvery time.Duration
	// StateDir keeps what is known from one process to the next; "" for none.
	StateDir string
	// Pool is clients of a pool by their tenants, if there is one: what is known is kept there, too, so that another conductor can go
	// on from it, and hot prefixes are copied to where the scheduler wants them. Their owner closes them afterwards.
	Pool map[string]*client.Client
	// PoolEvents are where the pool's members publish events: with these, the tenants' pooled blocks are known, too.
	PoolEvents []string
	// PoolEngineHashes says that pooled blocks are stored under engines' own hashes, and not RFC 1527's; see poolfeed.Config.
	PoolEngineHashes bool

	Logger *slog.Logger
}

// Service is a running conductor.
type Service struct {
	cfg        Config
	x          *conductor.Index
	sources    *source.Manager
	schedulers *schedulers
	copies     *copies
	drift      *drift
	lasting    lasting
	metrics    *metrics
	tokens     map[[sha256.Size]byte]string // tenants by their token's hash
	http       *listener
	feed       *poolfeed.Feed // nil if no pool is followed
	stores     []source.Store
	since      time.Duration
	run        string // tells this process's own request ids from those of others

	ctx    context.Context //nolint:containedctx // ends with the service
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// readyWithin is how long a service waits for its static sources before it says that it is ready: one that is down is no reason
// to keep routers waiting for the others.
const readyWithin = 5 * time.Second

// Start begins to serve.
func Start(cfg Config) (*Service, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.SaveEvery <= 0 {
		cfg.SaveEvery = 30 * time.Second
	}
	if cfg.Listen == "" {
		cfg.Listen = cfg.File.Address()
	}
	if cfg.Listen == "" {
		cfg.Listen = fmt.Sprintf("127.0.0.1:%d", DefaultPort)
	}
	s := &Service{cfg: cfg, tokens: map[[sha256.Size]byte]string{}, since: now(), run: strconv.FormatUint(rand.Uint64(), 36)} //nolint:gosec // names
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.x = conductor.NewIndex(conductor.IndexConfig{Seed: cfg.Seed, MaxBlocks: cfg.MaxBlocks})
	s.sources = source.New(source.Config{Index: s.x, DisconnectTTL: cfg.DisconnectTTL, MaxServices: maxServices, Logger: cfg.Logger})
	s.drift = newDrift(cfg.Logger, s.sources.Resync)
	s.copies = newCopies(&s.cfg)
	s.metrics = newMetrics(s)
	var err error
	if s.schedulers, err = newSchedulers(s); err == nil {
		err = s.begin()
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// begin takes over what was known, follows the static instances and listens.
func (s *Service) begin() (err error) {
	for tenant, token := range s.cfg.File.Tokens {
		s.tokens[sha256.Sum256([]byte(token))] = tenant
	}
	if token := s.cfg.File.OperatorToken; token != "" {
		s.tokens[sha256.Sum256([]byte(token))] = operator
	}
	if pool := s.cfg.firstPool(); pool != nil {
		s.stores = append(s.stores, &source.Pool{Client: pool, Name: "state"})
	}
	if s.cfg.StateDir != "" {
		s.stores = append(s.stores, source.Dir(s.cfg.StateDir))
	}
	s.load()
	for i := range s.cfg.File.registrations {
		if err := s.addStatic(&s.cfg.File.registrations[i]); err != nil {
			return fmt.Errorf("conductor: kvevent_instance %q: %w", s.cfg.File.registrations[i].InstanceID, err)
		}
	}
	if len(s.cfg.PoolEvents) > 0 {
		s.feed, err = poolfeed.Start(poolfeed.Config{
			Index: s.x, Members: s.cfg.PoolEvents, Tenants: s.cfg.Pool, Instance: PoolInstance, EngineHashes: s.cfg.PoolEngineHashes,
			Logger: s.cfg.Logger,
		})
		if err != nil {
			return err
		}
	}
	if s.http, err = s.listen(s.cfg.Listen); err != nil {
		return err
	}
	if host, _, err := net.SplitHostPort(s.Addr()); err == nil && !net.ParseIP(host).IsLoopback() && len(s.tokens) == 0 {
		s.cfg.Logger.LogAttrs(s.ctx, slog.LevelWarn, "others can reach this and learn of all tenants' prompts: configure tokens")
	}
	s.wg.Go(s.housekeep)
	s.wg.Go(func() { s.copies.run(s.ctx) })
	return nil
}

// addStatic follows an instance of the configuration, which counts for more than what was registered before the start.
func (s *Service) addStatic(reg *registration) error {
	err := s.add(reg)
	if e, ok := errors.AsType[*apiError](err); ok && e.Reason == reasonConflict {
		old := source.Filter{TenantID: reg.TenantID, InstanceID: reg.InstanceID, DPRank: &reg.DPRank}
		if _, err := s.sources.Unregister(old); err != nil {
			return err
		}
		return s.add(reg)
	}
	return err
}

// Addr is where the service listens.
func (s *Service) Addr() string { return s.http.l.Addr().String() }

// Close keeps what is known and ends the service.
func (s *Service) Close() error {
	s.cancel()
	var err error
	if s.http != nil {
		err = s.http.close()
	}
	s.wg.Wait()
	if s.http != nil { // it began, and so knows something
		s.save(context.Background())
	}
	if s.feed != nil {
		s.feed.Close()
	}
	s.sources.Close()
	return err
}

// warn tells of what went wrong and does not end the service.
func (s *Service) warn(what string, err error) {
	s.cfg.Logger.LogAttrs(s.ctx, slog.LevelWarn, what, slog.Any("error", err)) //nolint:sloglint // callers write it out
}

// firstPool is the client whose tenant keeps what is known: the default one's, or the first by name; nil without a pool.
func (c *Config) firstPool() *client.Client {
	if pool, there := c.Pool[DefaultTenant]; there || len(c.Pool) == 0 {
		return pool
	}
	return c.Pool[slices.Min(slices.Collect(maps.Keys(c.Pool)))]
}

// saveWithin bounds one save: beyond it the pool is not there.
const saveWithin = 20 * time.Second

// load takes over what was saved: the first store that has something.
func (s *Service) load() {
	for _, st := range s.stores {
		ctx, cancel := context.WithTimeout(s.ctx, saveWithin)
		err := s.sources.Load(ctx, st)
		cancel()
		switch {
		case err == nil:
			for _, v := range s.sources.Services() {
				if err := s.schedulers.again(schedulerKey{v.TenantID, v.ModelName}, v.InstanceID); err != nil {
					s.warn("engine "+v.InstanceID+" cannot be scheduled", err)
				}
			}
			c := s.x.Counts()
			s.cfg.Logger.LogAttrs(s.ctx, slog.LevelInfo, "going on from what was known", slog.Int("blocks", c.Blocks))
			return
		case !errors.Is(err, source.ErrNoState):
			s.warn("what was known cannot be read: asking engines for all of it", err)
		}
	}
}

// save keeps what is known in all stores.
func (s *Service) save(ctx context.Context) {
	for _, st := range s.stores {
		bounded, cancel := context.WithTimeout(ctx, saveWithin)
		if err := s.sources.Save(bounded, st); err != nil && s.ctx.Err() == nil {
			s.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "what is known could not be kept; a restart would ask engines for all of it",
				slog.Any("error", err))
		}
		cancel()
	}
	s.schedulers.save()
}

// housekeep saves now and then, forgets requests that nobody has reported about, and sees how fast engines evict.
func (s *Service) housekeep() {
	saves, looks, turns := every(s.cfg.SaveEvery), every(time.Second), every(lastingEvery)
	defer saves.Stop()
	defer looks.Stop()
	defer turns.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-saves.C:
			s.save(s.ctx)
		case <-looks.C:
			s.schedulers.expire(now())
		case <-turns.C:
			s.lasting.look(now(), s.x.View(""))
		}
	}
}

// healthz answers while the process runs.
func (s *Service) healthz(*call) (any, error) { return map[string]string{"status": "ok"}, nil }

// readyz answers whether every source has been reached, or has had its time.
func (s *Service) readyz(*call) (any, error) {
	if now()-s.since < readyWithin {
		for _, v := range s.sources.Services() {
			if v.State == source.Connecting || v.State == source.Replaying {
				return nil, &apiError{
					status: fasthttp.StatusServiceUnavailable, Reason: "not_ready", retryAfter: 1,
					Message: fmt.Sprintf("source %s of %s is %s", v.Endpoint, v.InstanceID, v.State),
				}
			}
		}
	}
	return map[string]string{"status": "ok"}, nil
}

//go:embed openapi.json
var openapi []byte

// openAPI describes the requests.
func (s *Service) openAPI(r *call) (any, error) {
	r.SetContentType("application/json")
	r.SetBody(openapi)
	return nil, nil //nolint:nilnil // it is answered
}
