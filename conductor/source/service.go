package source

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"larder/zmtp"
)

// The types of services.
const (
	VLLM     = "vLLM"
	SGLang   = "SGLang"
	Mooncake = "Mooncake" // a pool's master: each of its events names what engine and prompts it is of
)

// Service is a publisher of events as it is registered.
type Service struct {
	Endpoint       string `json:"endpoint"`                  // where its PUB listens: tcp://HOST:PORT
	ReplayEndpoint string `json:"replay_endpoint,omitempty"` // its ROUTER; empty if lost batches cannot be had again
	Type           string `json:"type"`
	ModelName      string `json:"modelname"`
	LoRAName       string `json:"lora_name,omitempty"`
	TenantID       string `json:"tenant_id"` // DefaultTenant if it is empty
	InstanceID     string `json:"instance_id"`
	BlockSize      int    `json:"block_size"` // tokens, of events that name none
	DPRank         int    `json:"dp_rank"`    // of data parallelism, of events that name none
	AdditionalSalt string `json:"additionalsalt,omitempty"`

	// Hash and HashSeed, if they are given, are how the engine names blocks, see larder/conductor/enginehash: what it sends is
	// compared with that then, and differences are counted. They mean that its seed is not what the others have.
	Hash     string `json:"hash,omitempty"`
	HashSeed string `json:"hash_seed,omitempty"`
}

// DefaultTenant is the tenant of who names none.
const DefaultTenant = "default"

const (
	maxName      = 512     // bytes of a model, tenant, instance, adapter or salt
	maxBlockSize = 1 << 20 // tokens: more than any engine's
	maxRank      = 1 << 16
)

// FieldError says what is wrong with a field of a service.
type FieldError struct {
	Field  string // its name in JSON
	Reason string
}

// Error implements error.
func (e *FieldError) Error() string { return "source: " + e.Field + ": " + e.Reason }

// Validate fills in what has a default, and says with a *FieldError what cannot be.
func (s *Service) Validate() error {
	s.TenantID = cmp.Or(s.TenantID, DefaultTenant)
	for _, t := range []string{VLLM, SGLang, Mooncake} {
		if strings.EqualFold(s.Type, t) {
			s.Type = t
		}
	}
	switch s.Type {
	case VLLM, SGLang, Mooncake:
	case "":
		return &FieldError{"type", "is missing: vLLM, SGLang or Mooncake"}
	default:
		return &FieldError{"type", fmt.Sprintf("%.40q is none of vLLM, SGLang, Mooncake", s.Type)}
	}
	if err := s.checkEndpoints(); err != nil {
		return err
	}
	if err := s.checkNames(); err != nil {
		return err
	}
	switch {
	case s.BlockSize < 1 || s.BlockSize > maxBlockSize:
		return &FieldError{"block_size", fmt.Sprintf("%d tokens: 1 to %d", s.BlockSize, maxBlockSize)}
	case s.DPRank < 0 || s.DPRank >= maxRank:
		return &FieldError{"dp_rank", fmt.Sprintf("%d: 0 to %d", s.DPRank, maxRank-1)}
	}
	if _, err := newChecker(s); err != nil {
		return &FieldError{"hash", err.Error()}
	}
	return nil
}

func (s *Service) checkEndpoints() error {
	if s.Endpoint == "" {
		return &FieldError{"endpoint", "is missing: tcp://HOST:PORT, where the engine publishes"}
	}
	if err := zmtp.CheckEndpoint(s.Endpoint, false); err != nil {
		return &FieldError{"endpoint", err.Error()}
	}
	if s.ReplayEndpoint == "" {
		return nil
	}
	if err := zmtp.CheckEndpoint(s.ReplayEndpoint, false); err != nil {
		return &FieldError{"replay_endpoint", err.Error()}
	}
	return nil
}

func (s *Service) checkNames() error {
	for _, f := range []struct {
		name, value string
		needed      bool
	}{
		{"instance_id", s.InstanceID, true},
		{"modelname", s.ModelName, s.Type != Mooncake},
		{"lora_name", s.LoRAName, false},
		{"tenant_id", s.TenantID, true},
		{"additionalsalt", s.AdditionalSalt, false},
		{"hash_seed", s.HashSeed, false},
	} {
		switch {
		case f.needed && f.value == "":
			return &FieldError{f.name, "is missing"}
		case len(f.value) > maxName:
			return &FieldError{f.name, fmt.Sprintf("has %d bytes, at most %d", len(f.value), maxName)}
		}
	}
	return nil
}

// key is what a service is known by.
type key struct {
	instance, tenant string
	rank             int
}

func (s *Service) key() key { return key{s.InstanceID, s.TenantID, s.DPRank} }

// String is the key as Unregister returns it.
func (k key) String() string { return k.instance + "|" + k.tenant + "|" + strconv.Itoa(k.rank) }

func (k key) compare(o key) int {
	return cmp.Or(cmp.Compare(k.instance, o.instance), cmp.Compare(k.tenant, o.tenant), cmp.Compare(k.rank, o.rank))
}

// Filter says which services are meant: those that have all of what is given. What is empty does not matter, but an instance has
// to be given.
type Filter struct {
	Type       string `json:"type"`
	ModelName  string `json:"modelname"`
	LoRAName   string `json:"lora_name"`
	TenantID   string `json:"tenant_id"`
	InstanceID string `json:"instance_id"`
	BlockSize  int    `json:"block_size"`
	DPRank     *int   `json:"dp_rank"` // nil for all
}

// matches reports whether a service is meant.
func (f *Filter) matches(s *Service) bool {
	is := func(want, have string) bool { return want == "" || want == have }
	return (f.Type == "" || strings.EqualFold(f.Type, s.Type)) &&
		is(f.ModelName, s.ModelName) && is(f.LoRAName, s.LoRAName) && is(f.TenantID, s.TenantID) && is(f.InstanceID, s.InstanceID) &&
		(f.BlockSize == 0 || f.BlockSize == s.BlockSize) && (f.DPRank == nil || *f.DPRank == s.DPRank)
}

// What a Manager refuses.
var (
	// ErrConflict says that another service is registered under the same instance, tenant and rank.
	ErrConflict = errors.New("source: another service has this instance_id, tenant_id and dp_rank: unregister it first")
	// ErrUnknown says that no service is meant.
	ErrUnknown = errors.New("source: no such service is registered")
	// ErrFull says that there are as many services as there may be.
	ErrFull = errors.New("source: there are too many services")
	// ErrClosed says that the manager is closed.
	ErrClosed = errors.New("source: closed")
)
