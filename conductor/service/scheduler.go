package service

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"go.yaml.in/yaml/v3"

	"larder/conductor/sched"
)

// Limits of what is remembered for scheduling.
const (
	maxSchedulers = 1024    // models of tenants
	maxModels     = 256     // of these, of one tenant: what one does leaves room for others
	maxPending    = 1 << 17 // requests of one of them that have not ended
)

// schedulerConfig is the section "scheduler" of the configuration.
type schedulerConfig struct {
	sched.Config // by the papers' names, with times as in 30s

	costs sched.Costs
}

// parseScheduler reads the section. Beside what the library takes there are "preset", a system whose costs models begin with, and
// "costs", those of another one.
func parseScheduler(raw json.RawMessage) (c schedulerConfig, err error) {
	c.Presume = true // engines need not report
	own := struct {
		Preset string       `json:"preset"`
		Costs  *sched.Costs `json:"costs"`
	}{Preset: sched.DefaultPreset}
	fields := map[string]json.RawMessage{}
	if len(raw) > 0 {
		if err := errors.Join(json.Unmarshal(raw, &own), json.Unmarshal(raw, &fields)); err != nil {
			return c, fmt.Errorf("scheduler: %w", err)
		}
	}
	delete(fields, "preset")
	delete(fields, "costs")
	rest, err := json.Marshal(fields)
	if err != nil {
		return c, fmt.Errorf("scheduler: %w", err)
	}
	d := yaml.NewDecoder(bytes.NewReader(rest)) // JSON is YAML, which knows times
	d.KnownFields(true)
	if err := d.Decode(&c.Config); err != nil {
		return c, fmt.Errorf("scheduler: %w", err)
	}
	if c.costs, err = sched.Preset(own.Preset); err != nil {
		return c, fmt.Errorf("scheduler: preset: %w", err)
	}
	if own.Costs != nil {
		c.costs = *own.Costs
	}
	return c, c.Validate()
}

// schedulerKey is what has a scheduler of its own: a tenant's model. Engines that serve several tenants are registered for each.
type schedulerKey struct{ tenant, model string }

// schedulers are those of all tenants' models.
type schedulers struct {
	s     *Service
	cfg   schedulerConfig
	path  string           // of the file that keeps them; "" for none
	known map[string]saved // what was kept before the start, by key

	mu sync.RWMutex
	by map[schedulerKey]*scheduler
}

// saved is what is kept of a scheduler.
type saved struct {
	Model     json.RawMessage     `json:"model"` // what it has learned
	Instances map[string]Capacity `json:"instances"`
}

// scheduler is one tenant's model: the library's scheduler, which knows numbers, and the names that go with them.
type scheduler struct {
	key schedulerKey

	mu      sync.Mutex
	lib     *sched.Scheduler
	model   *sched.Model
	ids     map[string]sched.InstanceID
	names   map[sched.InstanceID]string
	caps    map[string]Capacity
	heard   map[string]time.Duration // when instances that no service is registered of have reported last
	pending map[string]*pending
	next    uint64
	gone    bool // it was dropped
}

// pending is a request that was scheduled and has not ended.
type pending struct {
	id        uint64
	at        time.Duration
	prefill   string
	predicted int // tokens that the index says the prefill instance has
}

func newSchedulers(s *Service) (*schedulers, error) {
	cfg, err := parseScheduler(s.cfg.File.Scheduler)
	if err != nil {
		return nil, err
	}
	all := &schedulers{s: s, cfg: cfg, by: map[schedulerKey]*scheduler{}, known: map[string]saved{}}
	if s.cfg.StateDir != "" {
		all.path = filepath.Join(s.cfg.StateDir, "schedulers.json")
		all.load()
	}
	return all, nil
}

// load reads what was kept. Without it models learn anew.
func (all *schedulers) load() {
	b, err := os.ReadFile(all.path)
	if err == nil {
		err = json.Unmarshal(b, &all.known)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		all.s.warn("what was learned of times cannot be read: learning anew", err)
	}
}

// save keeps what models have learned, and what is known of instances.
func (all *schedulers) save() {
	if all.path == "" {
		return
	}
	err := all.saveTo(all.path)
	if err != nil {
		all.s.warn("what was learned of times could not be kept", err)
	}
}

func (all *schedulers) saveTo(path string) error {
	kept := map[string]saved{}
	for _, sc := range all.list() {
		sc.mu.Lock()
		model, err := json.Marshal(sc.model)
		kept[sc.key.String()] = saved{Model: model, Instances: maps.Clone(sc.caps)}
		sc.mu.Unlock()
		if err != nil {
			return err
		}
	}
	b, err := json.Marshal(kept)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path) // losing it costs some reports; it is not worth a sync
}

// String is the key in files.
func (k schedulerKey) String() string { return strconv.Quote(k.tenant) + " " + strconv.Quote(k.model) }

// list is all schedulers there are.
func (all *schedulers) list() (list []*scheduler) {
	all.mu.RLock()
	defer all.mu.RUnlock()
	for _, sc := range all.by {
		list = append(list, sc)
	}
	return list
}

// find is a tenant's model's scheduler, nil if no engine of it is known.
func (all *schedulers) find(key schedulerKey) *scheduler {
	all.mu.RLock()
	defer all.mu.RUnlock()
	return all.by[key]
}

// make is the same, and makes one if there is none.
func (all *schedulers) make(key schedulerKey) (*scheduler, error) {
	all.mu.Lock()
	defer all.mu.Unlock()
	if sc := all.by[key]; sc != nil {
		return sc, nil
	}
	if err := all.room(key.tenant); err != nil {
		return nil, err
	}
	model, err := sched.NewModel(all.cfg.costs)
	if err != nil {
		return nil, err
	}
	if kept, ok := all.known[key.String()]; ok {
		if err := json.Unmarshal(kept.Model, model); err != nil {
			all.s.warn("what was learned of times cannot be used: learning anew", err)
			if model, err = sched.NewModel(all.cfg.costs); err != nil {
				return nil, err
			}
		}
	}
	lib, err := sched.New(all.cfg.Config, model)
	if err != nil {
		return nil, err
	}
	sc := &scheduler{
		key: key, lib: lib, model: model, ids: map[string]sched.InstanceID{}, names: map[sched.InstanceID]string{},
		caps: map[string]Capacity{}, heard: map[string]time.Duration{}, pending: map[string]*pending{},
	}
	all.by[key] = sc
	return sc, nil
}

// room is an error if a tenant can have no more models. mu is held.
func (all *schedulers) room(tenant string) error {
	own := 0
	for key := range all.by {
		if key.tenant == tenant {
			own++
		}
	}
	if own < maxModels && len(all.by) < maxSchedulers {
		return nil
	}
	return &apiError{
		status: 503, Reason: "full", Field: "model",
		Message: fmt.Sprintf("there are engines of %d models, at most %d, and of %d of this tenant, at most %d",
			len(all.by), maxSchedulers, own, maxModels),
	}
}

// add has a scheduler know an instance, or know it better.
func (all *schedulers) add(key schedulerKey, name string, c Capacity) error {
	if key.model == "" {
		return nil // a pool's master: its events name models
	}
	sc, err := all.make(key)
	if err != nil {
		return err
	}
	sc.mu.Lock()
	defer sc.mu.Unlock()
	if sc.gone {
		return errGone
	}
	return sc.add(name, c)
}

// errGone says that a scheduler was dropped for want of instances just when it got one.
var errGone = &apiError{status: 503, Reason: "busy", retryAfter: 1, Message: "the model was being forgotten: try again"}

// add is the same with mu held.
func (sc *scheduler) add(name string, c Capacity) error {
	id, there := sc.ids[name]
	if there && sc.caps[name] == c {
		return nil
	}
	if there { // what it is doing is reported anew
		sc.lib.Remove(now(), id)
		delete(sc.names, id)
	}
	id, err := sc.lib.Add(sched.Instance{
		Name: name, Role: roles[c.Role], Bandwidth: cmp.Or(c.Bandwidth, defaultBandwidth), KVCapacity: c.KVCapacity, MaxBatch: c.MaxBatch,
	})
	if err != nil {
		delete(sc.ids, name)
		return &apiError{status: 503, Reason: "full", Field: "instance_id", Message: err.Error()}
	}
	sc.ids[name], sc.names[id], sc.caps[name] = id, name, c
	return nil
}

// again has a scheduler know an instance as it was known before the start.
func (all *schedulers) again(key schedulerKey, name string) error {
	return all.add(key, name, all.known[key.String()].Instances[name])
}

// prune removes an instance that no service of the tenant is left of.
func (all *schedulers) prune(tenant, name string) {
	for _, v := range all.s.sources.Services() {
		if v.TenantID == tenant && v.InstanceID == name {
			return
		}
	}
	for _, sc := range all.list() {
		if sc.key.tenant == tenant {
			sc.mu.Lock()
			sc.remove(name)
			sc.mu.Unlock()
		}
	}
}

// remove forgets an instance. mu is held.
func (sc *scheduler) remove(name string) {
	if id, there := sc.ids[name]; there {
		sc.lib.Remove(now(), id)
		delete(sc.names, id)
		delete(sc.ids, name)
		delete(sc.caps, name)
		delete(sc.heard, name)
	}
}

// blockSize is that of all services of a tenant's model, 0 if they differ.
func (all *schedulers) blockSize(key schedulerKey) int {
	size := 0
	for _, v := range all.s.sources.Services() {
		if v.TenantID == key.tenant && v.ModelName == key.model {
			if size != 0 && size != v.BlockSize {
				return 0
			}
			size = v.BlockSize
		}
	}
	return size
}

// expire forgets the names of requests that the library has forgotten for want of reports, and instances that are known by their
// reports alone and send none any more.
func (all *schedulers) expire(at time.Duration) {
	ttl := all.cfg.RequestTTL
	if ttl <= 0 {
		ttl = defaultRequestTTL
	}
	for _, sc := range all.list() {
		sc.mu.Lock()
		for id, p := range sc.pending {
			if at-p.at > ttl {
				delete(sc.pending, id)
			}
		}
		for name, heard := range sc.heard {
			if at-heard > ttl {
				sc.remove(name)
			}
		}
		idle := len(sc.ids) == 0 && len(sc.pending) == 0
		sc.mu.Unlock()
		if idle {
			all.drop(sc)
		}
	}
}

// drop forgets a scheduler without instances.
func (all *schedulers) drop(sc *scheduler) {
	all.mu.Lock()
	defer all.mu.Unlock()
	sc.mu.Lock()
	defer sc.mu.Unlock()
	if len(sc.ids) == 0 {
		sc.gone = true
		delete(all.by, sc.key)
	}
}

// defaultRequestTTL is the library's own.
const defaultRequestTTL = 10 * time.Minute

// collect emits the metrics.
func (all *schedulers) collect(e emitter) {
	for _, sc := range all.list() {
		sc.mu.Lock()
		load, waiting := sc.lib.Load(now()), len(sc.pending)
		sc.mu.Unlock()
		labels := []string{"tenant", sc.key.tenant, "model", sc.key.model}
		e.gauge("pending_requests", "Requests that were scheduled and have not ended.", float64(waiting), labels...)
		for _, v := range []struct {
			name, help string
			value      float64
		}{
			{"prefill_load", "Predicted time to the first token over its limit, of prefill instances in the mean.", load.Prefill},
			{"prefill_load_max", "The same of the most loaded one.", load.PrefillMax},
			{"decode_load", "Predicted time between tokens over its limit, of decode instances in the mean.", load.Decode},
			{"decode_load_max", "The same of the most loaded one.", load.DecodeMax},
			{"queue_seconds", "Predicted time of what waits for prefill, in the mean.", load.Queue.Seconds()},
		} {
			e.gauge(v.name, v.help, v.value, labels...)
		}
	}
}
