package source

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/conductor"
	"larder/conductor/enginehash"
)

func valid() Service {
	return Service{
		Endpoint: "tcp://10.0.0.1:5557", ReplayEndpoint: "tcp://10.0.0.1:5558", Type: VLLM, ModelName: "m", TenantID: "default",
		InstanceID: "a", BlockSize: 16,
	}
}

// TestValidate names the field that is wrong, and fills in what has a default.
func TestValidate(t *testing.T) {
	for field, change := range map[string]func(s *Service){
		"endpoint":        func(s *Service) { s.Endpoint = "" },
		"endpoint ":       func(s *Service) { s.Endpoint = "tcp://*:5557" },
		"endpoint  ":      func(s *Service) { s.Endpoint = "10.0.0.1:5557" },
		"replay_endpoint": func(s *Service) { s.ReplayEndpoint = "tcp://10.0.0.1" },
		"type":            func(s *Service) { s.Type = "" },
		"type ":           func(s *Service) { s.Type = "TGI" },
		"modelname":       func(s *Service) { s.ModelName = "" },
		"lora_name":       func(s *Service) { s.LoRAName = strings.Repeat("x", maxName+1) },
		"instance_id":     func(s *Service) { s.InstanceID = "" },
		"block_size":      func(s *Service) { s.BlockSize = 0 },
		"block_size ":     func(s *Service) { s.BlockSize = maxBlockSize + 1 },
		"dp_rank":         func(s *Service) { s.DPRank = -1 },
		"hash":            func(s *Service) { s.Hash = "md5" },
		"hash ":           func(s *Service) { s.Hash = enginehash.XXHash },
	} {
		s := valid()
		change(&s)
		var wrong *FieldError
		require.ErrorAs(t, s.Validate(), &wrong, field)
		require.Equal(t, strings.TrimSpace(field), wrong.Field)
		require.NotEmpty(t, wrong.Reason)
		require.ErrorContains(t, wrong, wrong.Field)
	}
	for typed, want := range map[string]string{"vllm": VLLM, "SGLANG": SGLang, "mooncake": Mooncake} {
		s := valid()
		s.Type, s.TenantID = typed, ""
		require.NoError(t, s.Validate())
		require.Equal(t, want, s.Type)
		require.Equal(t, "default", s.TenantID)
	}
	pool := valid()
	pool.Type, pool.ModelName = Mooncake, ""
	require.NoError(t, pool.Validate(), "its events name their models")
}

// TestFieldsOfJSON are those that routers know.
func TestFieldsOfJSON(t *testing.T) {
	const text = `{"endpoint":"tcp://10.0.0.1:5557","replay_endpoint":"tcp://10.0.0.1:5558","type":"vLLM","modelname":"m","lora_name":"sql",
		"tenant_id":"t","instance_id":"a","block_size":16,"dp_rank":3,"additionalsalt":"w8a8"}`
	var s Service
	require.NoError(t, json.Unmarshal([]byte(text), &s))
	want := valid()
	want.LoRAName, want.TenantID, want.DPRank, want.AdditionalSalt = "sql", "t", 3, "w8a8"
	require.Equal(t, want, s)
	b, err := json.Marshal(s)
	require.NoError(t, err)
	require.JSONEq(t, text, string(b))
}

// TestRegister: the same again is nothing new, something else under the same name is refused.
func TestRegister(t *testing.T) {
	w := newWorld(t, Config{MaxServices: 3})
	s := valid()
	for _, want := range []bool{true, false} {
		fresh, err := w.Register(s)
		require.NoError(t, err)
		require.Equal(t, want, fresh)
	}
	other := s
	other.BlockSize = 32
	_, err := w.Register(other)
	require.ErrorIs(t, err, ErrConflict)
	_, err = w.Register(Service{})
	require.Error(t, err)
	tenant, rank := s, s
	tenant.TenantID, rank.DPRank = "t2", 1
	for _, s := range []Service{tenant, rank} {
		fresh, err := w.Register(s)
		require.NoError(t, err)
		require.True(t, fresh)
	}
	other.InstanceID = "z"
	_, err = w.Register(other)
	require.ErrorIs(t, err, ErrFull)
	list := w.Services()
	require.Len(t, list, 3)
	for i, want := range []Service{s, rank, tenant} {
		require.Equal(t, want, list[i].Service, "in order")
		require.Contains(t, []State{Connecting, Disconnected}, list[i].State)
		require.EqualValues(t, -1, list[i].Sequence)
	}

	for _, f := range []Filter{
		{InstanceID: "b"},
		{InstanceID: "a", ModelName: "n"},
		{InstanceID: "a", BlockSize: 8},
		{InstanceID: "a", Type: SGLang},
		{InstanceID: "a", LoRAName: "x"},
	} {
		_, err := w.Unregister(f)
		require.ErrorIs(t, err, ErrUnknown)
	}
	var wrong *FieldError
	_, err = w.Unregister(Filter{})
	require.ErrorAs(t, err, &wrong)
	require.Equal(t, "instance_id", wrong.Field)
	removed, err := w.Unregister(Filter{InstanceID: "a", TenantID: "t2", Type: "vllm", BlockSize: 16})
	require.NoError(t, err)
	require.Equal(t, []string{"a|t2|0"}, removed)
	removed, err = w.Unregister(Filter{InstanceID: "a"})
	require.NoError(t, err)
	require.Equal(t, []string{"a|default|0", "a|default|1"}, removed)
	w.Close()
	_, err = w.Register(s)
	require.ErrorIs(t, err, ErrClosed)
}

// TestBounds: an engine that says too much costs itself.
func TestBounds(t *testing.T) {
	svc := valid()
	m := New(Config{Index: conductor.NewIndex(conductor.IndexConfig{}), SweepEvery: -1})
	defer m.Close()
	s := newSource(m, svc)
	for rank := range maxPlaces {
		require.NoError(t, s.hold(held{Instance: "a", Rank: rank}))
	}
	require.ErrorIs(t, s.hold(held{Instance: "a", Rank: maxPlaces}), errPlaces)
	require.NoError(t, s.hold(held{Instance: "a", Rank: 7}))
	for i := range maxAlso + 5 {
		s.remember(conductor.Scope{BlockSize: i})
		s.remember(conductor.Scope{BlockSize: i})
	}
	require.Len(t, s.own.Also, maxAlso)
	require.Len(t, s.alsoIn, maxAlso)
	require.Equal(t, 5, s.own.Also[0].BlockSize)
}

// TestPauses grow up to a bound, and differ.
func TestPauses(t *testing.T) {
	m := New(Config{Index: conductor.NewIndex(conductor.IndexConfig{}), SweepEvery: -1})
	defer m.Close()
	for failed := range 100 {
		want := min(firstBackoff<<min(failed, 20), m.cfg.MaxBackoff)
		d := m.backoff(failed)
		require.GreaterOrEqual(t, d, want/2)
		require.LessOrEqual(t, d, want)
	}
}
