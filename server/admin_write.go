package server

import (
	"bufio"
	"context"
	"encoding/hex"
	"io"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"

	"larder/meta"
	"larder/meta/policy"
	"larder/protocol"
)

// MemberRequest is the body of POST /members, and, with ID or To alone, of /members/promote, /members/remove and
// /transfer-leader.
type MemberRequest struct {
	ID     uint64 `json:"id,omitempty"`     // 0: a random one
	Addr   string `json:"addr,omitempty"`   // host:port for the other members
	Client string `json:"client,omitempty"` // host:port for clients
	Admin  string `json:"admin,omitempty"`  // host:port of the admin
	Voter  bool   `json:"voter,omitempty"`  // at once, instead of after catching up
	To     uint64 `json:"to,omitempty"`     // new leader; 0: the member that is furthest
}

// MemberReply answers POST /members.
type MemberReply struct {
	ID uint64 `json:"id"` // start the member with this node id
}

// Done answers requests that have nothing to tell.
type Done struct {
	OK bool `json:"ok"`
}

func (r *adminCall) addMember() (any, error) {
	var m MemberRequest
	if err := r.decode(&m); err != nil {
		return nil, err
	}
	if err := checkAddress(m.Addr); err != nil {
		return nil, badRequest("addr: %v", err)
	}
	p := PeerConfig{ID: m.ID, Addr: m.Addr, Client: m.Client, Admin: m.Admin}
	if err := p.complete(); err != nil {
		return nil, badRequest("%v", err)
	}
	id, err := r.admin.server.AddMember(r.ctx, NewMember{
		ID: m.ID, Addr: p.Addr, Client: p.Client, Admin: p.Admin, Voter: m.Voter,
	})
	if err != nil {
		return nil, err
	}
	return MemberReply{ID: id}, nil
}

func (r *adminCall) promoteMember() (any, error) {
	id, err := r.memberID()
	if err != nil {
		return nil, err
	}
	return Done{true}, r.admin.server.PromoteMember(r.ctx, id)
}

func (r *adminCall) removeMember() (any, error) {
	id, err := r.memberID()
	if err != nil {
		return nil, err
	}
	return Done{true}, r.admin.server.RemoveMember(r.ctx, id)
}

// memberID reads a body that names a member.
func (r *adminCall) memberID() (uint64, error) {
	var m MemberRequest
	if err := r.decode(&m); err != nil {
		return 0, err
	}
	if m.ID == 0 {
		return 0, badRequest("id: say which member")
	}
	return m.ID, nil
}

func (r *adminCall) transferLeader() (any, error) {
	var m MemberRequest
	if err := r.decode(&m); err != nil {
		return nil, err
	}
	return Done{true}, r.admin.server.TransferLeadership(r.ctx, m.To)
}

// PolicyRequest is the body of POST /policy. What is absent stays as it is.
type PolicyRequest struct {
	Policy                *string `json:"policy,omitempty"`
	TTLMS                 *uint64 `json:"ttl_ms,omitempty"`
	PageSize              *uint64 `json:"page_size,omitempty"`   // bytes
	RegionSize            *uint64 `json:"region_size,omitempty"` // bytes
	MaxRegionsPerInstance *uint64 `json:"max_regions_per_instance,omitempty"`
	MinRegionAgeMS        *uint64 `json:"min_region_age_ms,omitempty"`
	TierLow               *uint64 `json:"tier_low,omitempty"`      // percent
	TierLows              *string `json:"tier_lows,omitempty"`     // of tiers and devices: dram=60%,#3=50%
	PromoteAfter          *uint64 `json:"promote_after,omitempty"` // uses
	PromoteMost           *uint64 `json:"promote_most,omitempty"`  // bytes
	PromoteRate           *uint64 `json:"promote_rate,omitempty"`  // bytes per second
}

func (r *adminCall) setPolicy() (any, error) {
	var p PolicyRequest
	if err := r.decode(&p); err != nil {
		return nil, err
	}
	if p.Policy != nil && !policy.Known(*p.Policy) {
		return nil, badRequest("policy %q is unknown: choose one of %v", clip(*p.Policy), policy.Names())
	}
	if err := p.check(r.admin.server.Settings()); err != nil {
		return nil, err
	}
	if err := r.admin.server.knowsDevices(&p); err != nil {
		return nil, err
	}
	if err := r.admin.server.SetSettings(r.ctx, p.apply); err != nil {
		return nil, err
	}
	return settingsView(r.admin.server.Settings()), nil
}

// check validates the sizes that would be in force.
func (p *PolicyRequest) check(s meta.Settings) error {
	p.apply(&s)
	if s.PageSize < meta.MinPageSize || s.PageSize&(s.PageSize-1) != 0 {
		return badRequest("page_size: %d is not a power of two of at least %d", s.PageSize, meta.MinPageSize)
	}
	if s.RegionSize < s.PageSize || s.RegionSize%s.PageSize != 0 || s.RegionSize/s.PageSize > meta.MaxRegionPages {
		return badRequest("region_size: %d is not 1 to %d times page_size %d", s.RegionSize, meta.MaxRegionPages, s.PageSize)
	}
	if _, err := s.Watermarks(); err != nil {
		return badRequest("tier_low: %v", err)
	}
	if s.Version < meta.VersionPromotion && (p.PromoteMost != nil || p.PromoteRate != nil || s.TierLows != "") {
		return badRequest("promote_most, promote_rate, and tier_low of tiers and devices need cluster version %d: larder ctl upgrade",
			meta.VersionPromotion)
	}
	return nil
}

// knowsDevices refuses watermarks of devices that are not there: a typing error would be noticed late.
func (s *Server) knowsDevices(p *PolicyRequest) error {
	if p.TierLows == nil {
		return nil
	}
	w, err := meta.ParseWatermarks("100%," + *p.TierLows)
	if *p.TierLows == "" || err != nil {
		return nil // check has said so
	}
	s.master.state.RLock()
	defer s.master.state.RUnlock()
	for name := range w.Of {
		id, device := strings.CutPrefix(name, "#")
		n, _ := strconv.ParseUint(id, 10, 32)
		if _, ok := s.master.machine.Device(meta.DeviceID(n)); device && !ok {
			return badRequest("tier_low: there is no device %s: larder ctl devices lists them", name)
		}
	}
	return nil
}

// apply changes the settings that the request names.
func (p *PolicyRequest) apply(s *meta.Settings) {
	s.Policy, s.TierLows = given(p.Policy, s.Policy), given(p.TierLows, s.TierLows)
	for _, f := range []struct {
		from *uint64
		to   *uint64
	}{
		{p.TTLMS, &s.TTLMS},
		{p.PageSize, &s.PageSize},
		{p.RegionSize, &s.RegionSize},
		{p.MaxRegionsPerInstance, &s.MaxRegionsPerInstance},
		{p.MinRegionAgeMS, &s.MinRegionAgeMS},
		{p.TierLow, &s.TierLow},
		{p.PromoteAfter, &s.PromoteAfter},
		{p.PromoteMost, &s.PromoteMost},
		{p.PromoteRate, &s.PromoteRate},
	} {
		if f.from != nil {
			*f.to = *f.from
		}
	}
}

// TenantRequest is the body of POST /tenants. Limits that are absent stay as they are.
type TenantRequest struct {
	Name      string  `json:"name"`
	Guarantee *uint64 `json:"guarantee,omitempty"` // bytes; 0: none
	MaxPins   *uint64 `json:"max_pins,omitempty"`  // 0: no limit of its own
}

func (r *adminCall) setTenant() (any, error) {
	var t TenantRequest
	if err := r.decode(&t); err != nil {
		return nil, err
	}
	if len(t.Name) == 0 || len(t.Name) > protocol.MaxNameBytes {
		return nil, badRequest("name: a tenant's has 1 to %d bytes", protocol.MaxNameBytes)
	}
	if t.Guarantee == nil && t.MaxPins == nil {
		return nil, badRequest("guarantee, max_pins: say which is to change")
	}
	if t.MaxPins != nil && *t.MaxPins > meta.MaxDurablePins {
		return nil, badRequest("max_pins: at most %d", meta.MaxDurablePins)
	}
	stats, err := r.admin.server.SetTenant(r.ctx, t.Name, func(l *meta.TenantLimits) {
		l.Guarantee, l.MaxPins = given(t.Guarantee, l.Guarantee), given(t.MaxPins, l.MaxPins)
	})
	if err != nil {
		return nil, err
	}
	return tenantView(&stats), nil
}

// given is a value if there is one, or else what it was.
func given[T any](v *T, was T) T {
	if v == nil {
		return was
	}
	return *v
}

// VersionRequest is the body of POST /cluster-version.
type VersionRequest struct {
	Version uint32 `json:"version"` // 0: the newest that this member speaks
}

func (r *adminCall) setVersion() (any, error) {
	var v VersionRequest
	if err := r.decode(&v); err != nil {
		return nil, err
	}
	if v.Version == 0 {
		v.Version = meta.ClusterVersion
	}
	now := r.admin.server.Settings().Version
	if v.Version < now || v.Version > meta.ClusterVersion {
		return nil, badRequest(
			"version %d: this member can raise it from %d up to %d; to go further, run a newer larder on every member first",
			v.Version, now, meta.ClusterVersion)
	}
	if v.Version != now {
		if err := r.admin.server.SetSettings(r.ctx, func(s *meta.Settings) { s.Version = v.Version }); err != nil {
			return nil, err
		}
	}
	return settingsView(r.admin.server.Settings()), nil
}

// PinRequest is the body of POST /pin and /unpin.
type PinRequest struct {
	Tenant  string   `json:"tenant,omitempty"`   // whose keys; default the default tenant
	Keys    []string `json:"keys,omitempty"`     // as text
	KeysHex []string `json:"keys_hex,omitempty"` // as hexadecimal bytes
	Owner   string   `json:"owner,omitempty"`    // name under which the pin is listed and undone; default "operator"
	TTLMS   uint64   `json:"ttl_ms,omitempty"`   // 0: until undone
	Soft    bool     `json:"soft,omitempty"`     // evicted last instead of never
}

// PinReply answers them: for each key whether it existed, or had such a pin.
type PinReply struct {
	Results []bool `json:"results"`
}

// DefaultPinOwner is the owner of pins that name none.
const DefaultPinOwner = "operator"

// keys decodes and bounds the request's keys.
func (p *PinRequest) keys() ([][]byte, error) {
	if p.Owner == "" {
		p.Owner = DefaultPinOwner
	}
	if len(p.Tenant) > protocol.MaxNameBytes || len(p.Owner) > protocol.MaxNameBytes {
		return nil, badRequest("tenant, owner: at most %d bytes", protocol.MaxNameBytes)
	}
	n := len(p.Keys) + len(p.KeysHex)
	if n == 0 || n > protocol.MaxBatch {
		return nil, badRequest("keys: name 1 to %d", protocol.MaxBatch)
	}
	keys := make([][]byte, 0, n)
	for _, k := range p.Keys {
		keys = append(keys, []byte(k))
	}
	for _, k := range p.KeysHex {
		b, err := hex.DecodeString(k)
		if err != nil {
			return nil, badRequest("keys_hex: %q is not hexadecimal", clip(k))
		}
		keys = append(keys, b)
	}
	for _, k := range keys {
		if len(k) == 0 || len(k) > protocol.MaxKeyBytes {
			return nil, badRequest("keys: a key has 1 to %d bytes, not %d", protocol.MaxKeyBytes, len(k))
		}
	}
	return keys, nil
}

func (r *adminCall) pin() (any, error) {
	var p PinRequest
	if err := r.decode(&p); err != nil {
		return nil, err
	}
	keys, err := p.keys()
	if err != nil {
		return nil, err
	}
	if p.Soft && p.TTLMS == 0 {
		return nil, badRequest("ttl_ms: a soft pin ends some time; say when")
	}
	if p.TTLMS > maxPinMS {
		return nil, badRequest("ttl_ms: at most %d", uint64(maxPinMS))
	}
	results, err := r.admin.server.Pin(r.ctx, keys, PinSpec{
		Tenant: p.Tenant, Owner: p.Owner, TTL: time.Duration(p.TTLMS) * time.Millisecond, Soft: p.Soft,
	})
	return PinReply{results}, err
}

// maxPinMS is ten years; a longer pin is one without end.
const maxPinMS = 10 * 365 * 24 * 3600 * 1000

func (r *adminCall) unpin() (any, error) {
	var p PinRequest
	if err := r.decode(&p); err != nil {
		return nil, err
	}
	keys, err := p.keys()
	if err != nil {
		return nil, err
	}
	results, err := r.admin.server.Unpin(r.ctx, p.Tenant, keys, p.Owner)
	return PinReply{results}, err
}

// ClearRequest is the body of POST /clear. Exactly one of its scopes is given.
type ClearRequest struct {
	All       bool          `json:"all,omitempty"`
	Prefix    string        `json:"prefix,omitempty"`     // of keys, of all tenants
	PrefixHex string        `json:"prefix_hex,omitempty"` // the same as hexadecimal bytes
	Tenant    string        `json:"tenant,omitempty"`     // with a prefix: of this tenant's keys only
	Context   *ClearContext `json:"context,omitempty"`
}

// prefix decodes and bounds the prefix, and the tenant that goes with it.
func (c *ClearRequest) prefix() ([]byte, error) {
	prefix := []byte(c.Prefix)
	if c.PrefixHex != "" {
		b, err := hex.DecodeString(c.PrefixHex)
		if err != nil {
			return nil, badRequest("prefix_hex: %q is not hexadecimal", clip(c.PrefixHex))
		}
		prefix = b
	}
	if len(prefix) > protocol.MaxKeyBytes || len(c.Tenant) > protocol.MaxNameBytes {
		return nil, badRequest("prefix, tenant: at most %d and %d bytes", protocol.MaxKeyBytes, protocol.MaxNameBytes)
	}
	return prefix, nil
}

// ClearContext selects entries by what they were computed with; empty fields match everything.
type ClearContext struct {
	Tenant    string `json:"tenant,omitempty"`
	Model     string `json:"model,omitempty"`
	LoRA      string `json:"lora,omitempty"`
	Salt      string `json:"salt,omitempty"`
	BlockSize uint64 `json:"block_size,omitempty"`
	Seed      uint64 `json:"seed,omitempty"`
}

func (r *adminCall) clear() (any, error) {
	var c ClearRequest
	if err := r.decode(&c); err != nil {
		return nil, err
	}
	scopes := 0
	for _, given := range []bool{c.All, c.Prefix != "", c.PrefixHex != "", c.Context != nil} {
		if given {
			scopes++
		}
	}
	if scopes != 1 || c.Context != nil && *c.Context == (ClearContext{}) {
		return nil, badRequest("give exactly one of all, prefix, prefix_hex and a context with at least one field")
	}
	prefix, err := c.prefix()
	if err != nil {
		return nil, err
	}
	if c.Tenant != "" && len(prefix) == 0 {
		return nil, badRequest("tenant: it goes with a prefix; for all entries of a tenant give it in a context")
	}
	scope := ClearScope{All: c.All, Prefix: prefix, Tenant: c.Tenant}
	if x := c.Context; x != nil {
		for _, name := range []string{x.Tenant, x.Model, x.LoRA, x.Salt} {
			if len(name) > protocol.MaxNameBytes { // none is stored, and clients could not read what they are told of it
				return nil, badRequest("context: tenant, model, lora and salt have at most %d bytes", protocol.MaxNameBytes)
			}
		}
		scope.Context = &meta.Context{
			Tenant: x.Tenant, Model: x.Model, LoRA: x.LoRA, Salt: x.Salt, BlockSize: x.BlockSize, Seed: x.Seed,
		}
	}
	return Done{true}, r.admin.server.Clear(r.ctx, scope)
}

// DrainRequest is the body of POST /drain.
type DrainRequest struct {
	Instance string `json:"instance"`
}

// DrainReply answers it.
type DrainReply struct {
	Regions int          `json:"regions"` // how many the instance was asked to give up
	Kept    []KeptRegion `json:"kept"`    // those that it was not asked for
}

func (r *adminCall) drain() (any, error) {
	var d DrainRequest
	if err := r.decode(&d); err != nil {
		return nil, err
	}
	if d.Instance == "" {
		return nil, badRequest("instance: say which; GET /clients lists them")
	}
	report, err := r.admin.server.Drain(r.ctx, d.Instance)
	return DrainReply{Regions: report.Asked, Kept: orEmpty(report.Kept)}, err
}

// streamTimeout is how long the receiver of a snapshot may not take a byte.
const streamTimeout = 30 * time.Second

// snapshot streams a snapshot. A failure after the first byte can only be told by cutting the connection: the body
// then lacks its last chunk, and the stream its end record.
func (r *adminCall) snapshot() (any, error) {
	admin, conn := r.admin, r.Conn()
	r.SetContentType("application/octet-stream")
	r.SetBodyStreamWriter(func(w *bufio.Writer) {
		// The handler's own context has ended by now.
		ctx, cancel := context.WithTimeout(admin.base, adminLongTimeout)
		defer cancel()
		err := admin.server.SnapshotSave(ctx, &patientWriter{w, conn})
		if err == nil {
			return
		}
		admin.logger.LogAttrs(ctx, slog.LevelWarn, "snapshot was not sent", slog.Any("error", err))
		conn.Close() //nolint:errcheck,gosec // it is closed to tell the receiver; how it goes does not matter
	})
	return nil, nil //nolint:nilnil // the reply is the stream
}

// patientWriter moves the connection's write deadline on with every write, since a snapshot may take longer than the
// listener's timeout while its receiver reads all the time.
type patientWriter struct {
	w    io.Writer
	conn net.Conn
}

// Write implements io.Writer.
func (p *patientWriter) Write(b []byte) (int, error) {
	if err := p.conn.SetWriteDeadline(deadlineIn(streamTimeout)); err != nil {
		return 0, err //nolint:wrapcheck // the connection is gone
	}
	return p.w.Write(b) //nolint:wrapcheck // passed through
}
