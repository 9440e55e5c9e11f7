package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"larder/cxl"
	"larder/maru"
	"larder/maru/rm"
	"larder/meta"
	"larder/protocol"
	"larder/raft"
)

// readyTimeout is how long Start waits for a cluster of one to serve: it has to elect itself and format its devices.
const readyTimeout = 60 * time.Second

// Server is one running member: its Raft node, its index, its devices and its listeners. All methods are safe for
// concurrent use.
type Server struct {
	cfg       Config
	logger    *slog.Logger
	counters  *Counters
	clusterID uint64
	nodeID    uint64
	started   int64

	store    *raft.Store
	master   *Master
	node     *raft.Node
	net      *network
	watcher  *watcher
	devices  *devices
	kvEvents *kvEvents    // nil if none are published
	maruRM   *rm.Server   // nil if this member is none
	maru     *maru.Server // nil if Maru's clients are not served
	maruDoor *maruDoor    // its index
	restored func() error // to be called once a restored snapshot has its new incarnation; nil = none was

	ctx      context.Context
	cancel   context.CancelFunc
	wg       sync.WaitGroup
	wake     chan struct{} // 1: Pump
	lead     chan struct{} // 1: leadership has come or gone
	nodeUp   chan struct{} // closed when node is set, since its goroutines call back before that
	failed   chan error    // 1: why the member had to stop by itself
	stopOnce sync.Once
	stopErr  error

	limiting sync.Mutex // one change of a tenant's limits at a time: each is made of those before it

	mu      sync.Mutex
	ready   bool // the devices are in service
	members []raft.Member
}

// memberContext is what the cluster keeps of each member for clients.
type memberContext struct {
	Client string `json:"client"`
	Socket string `json:"socket,omitempty"`
	Admin  string `json:"admin,omitempty"`
	Maru   string `json:"maru,omitempty"`
}

// Start opens the data directory, forms or joins the cluster, and serves. A cluster of one serves when it returns;
// others elect a leader in their own time: see Ready.
func Start(cfg Config, logger *slog.Logger) (*Server, error) {
	if err := cfg.Complete(); err != nil {
		return nil, err
	}
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		cfg: cfg, logger: logger, counters: &Counters{}, started: cxl.Boottime(),
		wake: make(chan struct{}, 1), lead: make(chan struct{}, 1), nodeUp: make(chan struct{}), failed: make(chan error, 1),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	if err := s.start(); err != nil {
		s.cancel()
		return nil, errors.Join(err, s.teardown(context.Background()))
	}
	return s, nil
}

// start opens everything, from the disk up to the listeners.
func (s *Server) start() (err error) {
	if err := os.MkdirAll(s.cfg.DataDir, 0o700); err != nil {
		return fmt.Errorf("server: make the data directory: %w", err)
	}
	s.store, err = raft.OpenStore(filepath.Join(s.cfg.DataDir, "raft"), raft.StoreOptions{
		Logger: s.logger, CacheBytes: int64(s.cfg.CacheSize), MinFreeBytes: uint64(s.cfg.MinFreeDisk), //nolint:gosec // checked by Validate
	})
	if err != nil {
		return err
	}
	peers, err := s.listenPeers()
	if err != nil {
		return err
	}
	s.net = &network{cfg: s.cfg, counters: s.counters, logger: s.logger, conns: map[*conn]struct{}{}}
	s.net.ctx, s.net.cancel = context.WithCancel(context.Background())
	err = s.net.open()
	if err == nil && s.cfg.Maru != "" {
		err = s.openDoor()
	}
	if err := errors.Join(err, s.identify(peers)); err != nil {
		return errors.Join(err, closeListener(peers))
	}
	s.watcher = &watcher{logger: s.logger, files: map[meta.SessionID]*os.File{}}
	restored, done, err := s.store.TakeRestoredMarker()
	if err != nil {
		return errors.Join(err, closeListener(peers))
	}
	if restored {
		s.restored = done
	}
	if s.cfg.KVEventsListen != "" {
		if s.kvEvents, err = newKVEvents(s.ctx, &s.cfg, s.led, s.counters, s.logger); err != nil {
			return errors.Join(err, closeListener(peers))
		}
	}
	if s.master, err = NewMaster(s.masterConfig()); err != nil {
		return errors.Join(err, closeListener(peers))
	}
	s.watcher.died = s.master.ProcessDied
	s.devices = &devices{s: s, host: cxl.HostName(), open: map[string]*cxl.Device{}, errs: map[string]error{}}
	if id, err := cxl.BootID(); err == nil {
		s.devices.boot = hexID(id)
	}
	if err := s.startNode(peers); err != nil {
		return err
	}
	s.net.master, s.net.node = s.master, s.node
	s.run(s.pump)
	if s.kvEvents != nil {
		s.run(func() { s.kvEvents.run(s.ctx) })
	}
	s.run(func() { every(s.ctx, TickInterval, s.master.Tick) })
	s.run(s.manage)
	s.net.start()
	if err := s.awaitAlone(); err != nil {
		return err
	}
	return s.openMaruListeners()
}

// openMaruListeners begins to serve Maru's clients, which ask for regions at once: a cluster of one has devices by now.
func (s *Server) openMaruListeners() (err error) {
	if s.maru != nil {
		s.maru.Start()
	}
	if s.cfg.MaruRM != "" {
		if s.maruRM, err = rm.Listen(s.ctx, s.cfg.MaruRM, maruRegions{s}, s.logger); err != nil {
			return err
		}
	}
	return nil
}

// run starts a goroutine that ends when ctx does.
func (s *Server) run(fn func()) {
	s.wg.Go(fn)
}

func closeListener(l net.Listener) error {
	if l == nil {
		return nil
	}
	return l.Close()
}

// listenPeers listens for the other members.
func (s *Server) listenPeers() (net.Listener, error) {
	if s.cfg.PeerListen == Off || s.cfg.PeerListen == "" {
		return nil, nil //nolint:nilnil // no listener is wanted
	}
	var lc net.ListenConfig
	l, err := lc.Listen(s.ctx, "tcp", s.cfg.PeerListen)
	if err != nil {
		return nil, fmt.Errorf("server: listen for members: %w", err)
	}
	return l, nil
}

// actual puts the port that was given to a listener on port 0 into the address that is told to others.
func actual(advertised, listening string) string {
	host, port, err := net.SplitHostPort(advertised)
	if err != nil || port != "0" || listening == "" {
		return advertised
	}
	_, port, err = net.SplitHostPort(listening)
	if err != nil {
		return advertised
	}
	return net.JoinHostPort(host, port)
}

// identify finds out who this member is, and makes a new data directory somebody's.
func (s *Server) identify(peers net.Listener) error {
	if a := s.net.addr("tcp"); a != "" {
		s.cfg.Advertise = actual(s.cfg.Advertise, a)
	}
	if peers != nil {
		s.cfg.PeerAdvertise = actual(s.cfg.PeerAdvertise, peers.Addr().String())
	}
	s.clusterID = xxh3.HashString("larder cluster "+s.cfg.ClusterName) | 1
	cluster, member := s.store.Identity()
	s.nodeID = s.cfg.NodeID
	if member != 0 {
		if s.nodeID == 0 {
			s.nodeID = member
		}
		if cluster != s.clusterID || member != s.nodeID {
			return &raft.ForeignStoreError{
				WantCluster: s.clusterID, WantID: s.nodeID, HaveCluster: cluster, HaveID: member,
			}
		}
		return nil
	}
	switch {
	case s.cfg.Join:
		if s.nodeID == 0 {
			s.nodeID = raft.NewMemberID()
		}
		s.logger.Info("waiting to be added to the cluster", slog.Uint64("node_id", s.nodeID),
			slog.String("peer_address", s.cfg.PeerAdvertise))
		return s.store.Join(s.clusterID, s.nodeID)
	case len(s.cfg.Peers) > 0:
		return s.bootstrap()
	default:
		if s.nodeID == 0 {
			s.nodeID = 1
		}
		return s.store.Bootstrap(s.clusterID, s.nodeID, []raft.Member{s.self()})
	}
}

// bootstrap makes this member one of the first of a new cluster.
func (s *Server) bootstrap() error {
	members := make([]raft.Member, 0, len(s.cfg.Peers))
	for _, p := range s.cfg.Peers {
		// The same on all members, whatever each knows of itself beyond it: that is told when it first leads.
		members = append(members, raft.Member{
			ID: p.ID, Addr: p.Addr, Context: encodeContext(memberContext{Client: p.Client, Admin: p.Admin}),
		})
	}
	return s.store.Bootstrap(s.clusterID, s.nodeID, members)
}

// self describes this member to the others.
func (s *Server) self() raft.Member {
	c := memberContext{Client: s.cfg.Advertise, Socket: s.cfg.Socket, Admin: s.cfg.AdminListen}
	if s.cfg.Maru != "" {
		c.Maru = actual(Advertised(s.cfg.Maru), s.maru.Addr())
	}
	if c.Socket == Off {
		c.Socket = ""
	} else if abs, err := filepath.Abs(c.Socket); err == nil {
		c.Socket = abs
	}
	if c.Admin == Off {
		c.Admin = ""
	}
	return raft.Member{ID: s.nodeID, Addr: s.cfg.PeerAdvertise, Context: encodeContext(c)}
}

func encodeContext(c memberContext) []byte {
	b, err := json.Marshal(c)
	if err != nil {
		panic("server: strings do not encode: " + err.Error()) // they always do
	}
	return b
}

func decodeContext(b []byte) (c memberContext) {
	if err := json.Unmarshal(b, &c); err != nil {
		return memberContext{} // of a release that wrote something else: the member is then known by its peer address
	}
	return c
}

// random64 returns 64 bits that nobody can guess.
func random64() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails, by its documentation
	return binary.LittleEndian.Uint64(b[:])
}

func (s *Server) masterConfig() MasterConfig {
	cfg := MasterConfig{
		Clock: systemClock{}, Store: s.store.State(), Logger: s.logger, Counters: s.counters,
		Propose:  func(term uint64, data []byte) (uint64, uint64, error) { return s.node.ProposeIn(term, data) },
		Wake:     s.wakePump,
		Leader:   s.leaderAddr,
		Describe: s.describe,
		Host:     localHost(),
		Watch:    s.watcher.watch,
		Unwatch:  s.watcher.forget,
		Restored: s.restored != nil,
		Random:   random64, DeviceReady: func(d meta.DeviceID, node string, generation uint64) bool {
			return s.devices.isReady(d, node, generation)
		},
		MaxLease: s.cfg.ElectionTimeout, DefaultLease: s.cfg.DefaultLease, SessionTTL: s.cfg.SessionTTL,
		FlushInterval: s.cfg.FlushInterval, TouchInterval: s.cfg.TouchInterval, TouchBudget: s.cfg.TouchBudget,
		AllocTimeout: s.cfg.AllocTimeout, RevokeWatermark: s.cfg.RevokeWatermark,
		AwayTimeout: s.cfg.AwayTimeout,
	}
	if s.cfg.Maru != "" {
		cfg.MaruLease, cfg.OwnerGrace = s.cfg.MaruLease, s.cfg.MaruOwnerGrace
		cfg.OwnerAlive = func(instance, process string) bool { return s.maruDoor.alive(instance, process) }
	}
	if s.kvEvents != nil {
		cfg.Blocks = s.kvEvents.tell
	}
	return cfg
}

// startNode starts the Raft member.
func (s *Server) startNode(peers net.Listener) error {
	cfg := raft.NodeConfig{
		Core: raft.CoreConfig{
			ID: s.nodeID, ClusterID: s.clusterID, Machine: s.master, Logger: s.logger,
			ElectionTicks:  max(2, int(s.cfg.ElectionTimeout/s.cfg.Tick)),
			HeartbeatTicks: max(1, int(s.cfg.HeartbeatInterval/s.cfg.Tick)),
			OnLeadership:   s.onLeadership,
			OnMembers:      s.onMembers,
		},
		Store: s.store, Tick: s.cfg.Tick, FlushTicks: max(1, int(s.cfg.FlushInterval/s.cfg.Tick)),
		Ahead: s.master.PumpAhead, OnStop: s.onStop,
	}
	if peers != nil {
		cfg.Transport = raft.NewTCP(raft.TCPConfig{
			ClusterID: s.clusterID, ID: s.nodeID, Listener: peers, Addr: s.cfg.PeerAdvertise, Logger: s.logger,
		})
	}
	var err error
	s.node, err = raft.StartNode(cfg)
	if err != nil {
		return errors.Join(err, closeListener(peers))
	}
	close(s.nodeUp)
	s.onMembers(s.node.Status().Members)
	return nil
}

// onStop is told that the member had to stop by itself.
func (s *Server) onStop(err error) {
	s.logger.Error("the member has stopped", slog.Any("error", err))
	s.master.OnLeadership(false, 0)
	select {
	case s.failed <- err:
	default:
	}
}

// Failed delivers why the member had to stop by itself, if it had to: it was removed from the cluster, or its storage
// is damaged. The process should end then.
func (s *Server) Failed() <-chan error { return s.failed }

func (s *Server) wakePump() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// pump proposes what is queued.
func (s *Server) pump() {
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-s.wake:
			s.gather()
			s.master.Pump()
		}
	}
}

// Bounds of gather.
const (
	gatherMax  = 500 * time.Microsecond // half a sync of a slow disk
	gatherCalm = 50 * time.Microsecond  // nobody has come for so long: nobody will
	gatherLook = 8                      // rounds between two looks at the clock, which cost as much as they do
)

// gather waits for the clients that have just been answered, see Master.Crowd: until all of them are back, or nobody
// new has come for a moment.
func (s *Server) gather() {
	queued, expected, busy := s.master.Crowd()
	start := s.master.now()
	calm := start
	now := start
	for round := 1; queued < expected && now-start < int64(gatherMax); round++ {
		if round%gatherLook == 0 {
			now = s.master.now()
		}
		if busy {
			calm = now
		} else if now-calm > int64(gatherCalm) {
			return
		}
		runtime.Gosched()
		before := queued
		if queued, expected, busy = s.master.Crowd(); queued != before {
			calm = now
		}
	}
}

// onLeadership is called by the node.
func (s *Server) onLeadership(leads bool, term uint64) {
	s.master.OnLeadership(leads, term)
	select {
	case s.lead <- struct{}{}:
	default:
	}
}

func (s *Server) onMembers(members []raft.Member) {
	s.mu.Lock()
	s.members = members
	s.mu.Unlock()
}

// manage does what the leader of a cluster owes it: a new pool's settings, its own address, its devices. Devices are
// looked at again and again: what is wrong with one may be mended, or may happen later.
func (s *Server) manage() {
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-s.lead:
		}
		for begun := false; s.master.Term() != 0; {
			err := s.takeOver(begun)
			begun = begun || err == nil
			s.setReady(err == nil)
			refused, _ := errors.AsType[*protocol.Error](err)
			moved := refused != nil && refused.Code == protocol.CodeNotLeader // it is the next leader's task now
			if err != nil && !moved && s.master.Term() != 0 && s.ctx.Err() == nil {
				s.logger.Error("not everything is in service", slog.Any("error", err))
			}
			if !s.pauseLeading(deviceRetry) {
				break
			}
		}
		if s.master.Term() == 0 {
			s.setReady(false)
			s.devices.close()
		}
	}
}

// pauseLeading waits for d. It returns false when leadership has changed meanwhile, or the server stops.
func (s *Server) pauseLeading(d time.Duration) bool {
	ctx, cancel := context.WithTimeout(s.ctx, d)
	defer cancel()
	select {
	case <-s.lead:
		select { // for manage; if there is one again, that will do
		case s.lead <- struct{}{}:
		default:
		}
		return false
	case <-ctx.Done():
		return s.ctx.Err() == nil
	}
}

func (s *Server) setReady(ready bool) {
	s.mu.Lock()
	s.ready = ready
	s.mu.Unlock()
}

// takeOver brings the replicated state and the devices in line with the configuration; once that has been done, only
// the devices.
func (s *Server) takeOver(begun bool) error {
	ctx, cancel := context.WithTimeout(s.ctx, ctxDefault)
	defer cancel()
	if !begun {
		if err := s.seed(ctx); err != nil {
			return err
		}
		if err := s.introduce(ctx); err != nil {
			s.logger.Warn("could not tell the cluster this member's addresses", slog.Any("error", err))
		}
	}
	if s.cfg.MaruRM != "" || s.cfg.Maru != "" {
		if err := s.openMaru(ctx); err != nil {
			return err
		}
	}
	return s.devices.serve(ctx)
}

// seed gives a new pool its settings, with the newest version, and first incarnation, and a restored one its next.
func (s *Server) seed(ctx context.Context) error {
	now := s.master.incarnation()
	if now != 0 && s.restored == nil {
		return nil
	}
	if now == 0 {
		set := s.Settings()
		set.Version = meta.ClusterVersion
		set.Policy, set.TTLMS = s.cfg.EvictionPolicy, uint64(s.cfg.TTL/time.Millisecond) //nolint:gosec // checked by Validate
		set.PageSize, set.RegionSize = uint64(s.cfg.PageSize), uint64(s.cfg.RegionSize)
		set.MaxRegionsPerInstance = s.cfg.MaxRegionsPerInstance
		set.MinRegionAgeMS = uint64(s.cfg.MinRegionAge / time.Millisecond) //nolint:gosec // checked by Validate
		if err := s.cfg.TierLow.into(&set); err != nil {
			return fmt.Errorf("server: tier_low: %w", err) // Validate has refused that
		}
		set.PromoteAfter = s.cfg.PromoteAfter
		set.PromoteMost, set.PromoteRate = uint64(s.cfg.PromoteMost), uint64(s.cfg.PromoteRate)
		if _, err := s.do(ctx, &meta.SetSettings{Settings: set}); err != nil {
			return fmt.Errorf("server: seed the pool's settings: %w", err)
		}
	}
	// Larger than any before in whatever line of history: two restores of one snapshot must not agree.
	next := max(now+1, uint64(socketDeadline(0).UnixMilli()))
	if _, err := s.do(ctx, &meta.NewIncarnation{Incarnation: next}); err != nil {
		return fmt.Errorf("server: begin an incarnation: %w", err)
	}
	if s.restored != nil {
		if err := s.restored(); err != nil {
			return err
		}
		s.restored = nil
	}
	return nil
}

// introduce logs this member's addresses if they have changed.
func (s *Server) introduce(ctx context.Context) error {
	self := s.self()
	for _, m := range s.node.Status().Members {
		if m.ID == self.ID && (m.Addr != self.Addr || string(m.Context) != string(self.Context)) {
			self.Learner = m.Learner
			return s.node.UpdateMember(ctx, self)
		}
	}
	return nil
}

// awaitAlone waits until a cluster of one serves.
func (s *Server) awaitAlone() error {
	s.mu.Lock()
	alone := len(s.members) == 1 && s.members[0].ID == s.nodeID
	s.mu.Unlock()
	if !alone {
		return nil
	}
	ctx, cancel := context.WithTimeout(s.ctx, readyTimeout)
	defer cancel()
	for {
		if s.master.Serving() {
			if err := s.devices.problem(); err != nil {
				return err
			}
			if s.isReady() {
				return nil
			}
		}
		if err := s.node.Err(); err != nil {
			return err
		}
		if !pause(ctx, time.Millisecond) {
			return errors.New("server: the member does not come to serve: see the log")
		}
	}
}

func (s *Server) isReady() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ready
}

// led reports whether this member knows a leader, which may be itself.
func (s *Server) led() bool {
	if !s.up() {
		return false
	}
	id, _ := s.node.Leader()
	return id != 0
}

// leaderAddr returns the client address of the leader, and its id.
func (s *Server) leaderAddr() (string, uint64) {
	s.mu.Lock()
	members := s.members
	s.mu.Unlock()
	if !s.up() {
		return "", 0
	}
	id, self := s.node.Leader()
	if self && !s.master.Serving() {
		return "", id // elected, and not ready yet
	}
	for _, m := range members {
		if m.ID == id {
			return decodeContext(m.Context).Client, id
		}
	}
	return "", id
}

// up reports whether node is set.
func (s *Server) up() bool {
	select {
	case <-s.nodeUp:
		return true
	default:
		return false
	}
}

// describe fills in what a HANDSHAKE's reply says of the cluster.
func (s *Server) describe(r *protocol.HandshakeReply) {
	s.mu.Lock()
	members := s.members
	s.mu.Unlock()
	r.RMAddress = cmp.Or(s.cfg.MaruRMAdvertise, s.cfg.Advertise)
	r.ServerVersion = buildVersion()
	if s.up() {
		r.Leader, _ = s.node.Leader()
	}
	for _, m := range members {
		c := decodeContext(m.Context)
		r.Members = append(r.Members, protocol.Member{
			ID: m.ID, Addr: c.Client, Socket: c.Socket, Admin: c.Admin, Learner: m.Learner,
		})
	}
	r.Pool = s.pool()
}

// pool is the pool's id in hexadecimal, "" as long as it has no devices. It may be called with state held.
func (s *Server) pool() string {
	s.master.devMu.Lock()
	defer s.master.devMu.Unlock()
	if s.master.namesake == "" {
		return ""
	}
	return s.poolOf(s.master.namesake)
}

// poolOf is the pool id of a device's uuid, in hexadecimal, as headers have it: see poolID.
func (s *Server) poolOf(uuid string) string {
	var id [8]byte
	binary.LittleEndian.PutUint64(id[:], s.clusterID)
	return uuid[:16] + hex.EncodeToString(id[:])
}

// Stop hands leadership over, lets requests that are on their way finish, cuts the clients off and closes everything.
// It stops in any case; the error says what did not go well, as does ctx if it ended first.
func (s *Server) Stop(ctx context.Context) error {
	s.stopOnce.Do(func() { s.stopErr = s.teardown(ctx) })
	return s.stopErr
}

// teardown closes what start opened, in reverse. Listeners close first, so that nobody new comes; leadership goes
// before the connections, so that clients are told where to go; the store goes last, since everything uses it.
func (s *Server) teardown(ctx context.Context) error {
	var errs []error
	if s.net != nil {
		s.net.closeListeners()
	}
	if s.maruRM != nil {
		errs = append(errs, s.maruRM.Close())
	}
	if s.node != nil {
		errs = append(errs, s.node.Stop(ctx))
	}
	if s.master != nil {
		s.master.OnLeadership(false, 0)
	}
	s.cancel()
	if s.maru != nil {
		errs = append(errs, s.maru.Close())
	}
	if s.net != nil {
		s.net.stop()
	}
	s.wg.Wait()
	if s.kvEvents != nil {
		errs = append(errs, s.kvEvents.pub.Close())
	}
	if s.watcher != nil {
		s.watcher.stop()
	}
	if s.devices != nil {
		s.devices.close()
	}
	if s.store != nil {
		errs = append(errs, s.store.Close())
	}
	return errors.Join(errs...)
}
