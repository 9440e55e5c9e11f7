package service

import (
	"errors"
	"fmt"

	"github.com/valyala/fasthttp"

	"larder/conductor/source"
)

// registration is what /register takes, and an instance of the configuration: a publisher of events, and what the scheduler is
// to know of the engine behind it.
type registration struct {
	source.Service
	Capacity
}

// serviceFields are the fields of a publisher.
var serviceFields = []string{
	"endpoint", "replay_endpoint", "type", "modelname", "lora_name", "tenant_id", "instance_id", "block_size", "dp_rank",
	"additionalsalt", "hash", "hash_seed",
}

// registerFields are all fields of a registration.
var registerFields = append(append([]string{}, serviceFields...), capacityFields...)

// readService reads a publisher's fields.
func readService(req *request, tenant string) (v source.Service, err error) {
	v.TenantID = tenant
	err = req.texts(map[string]*string{
		"endpoint": &v.Endpoint, "replay_endpoint": &v.ReplayEndpoint, "type": &v.Type, "modelname": &v.ModelName,
		"lora_name": &v.LoRAName, "instance_id": &v.InstanceID, "additionalsalt": &v.AdditionalSalt, "hash": &v.Hash,
		"hash_seed": &v.HashSeed,
	})
	if err != nil {
		return v, err
	}
	if v.BlockSize, err = req.number("block_size", 1, maxBlockSize, 0); err != nil {
		return v, err
	}
	v.DPRank, err = req.number("dp_rank", 0, 1<<16-1, 0)
	return v, err
}

// register begins to follow a publisher.
func (s *Service) register(r *call) (any, error) {
	needed := []string{"endpoint", "type", "modelname", "instance_id", "block_size", "dp_rank"}
	req, tenant, err := r.begin(needed, registerFields...)
	if err != nil {
		return nil, err
	}
	v, err := readService(req, tenant)
	if err != nil {
		return nil, err
	}
	reg := registration{Service: v}
	if reg.Capacity, err = readCapacity(req, Capacity{}); err != nil {
		return nil, err
	}
	if err := s.add(&reg); err != nil {
		return nil, err
	}
	return map[string]string{"status": "registered successfully", "instance_id": reg.InstanceID}, nil
}

// reasonConflict is why another publisher under the same name is refused.
const reasonConflict = "conflict"

// add follows a publisher and has the scheduler know its engine.
func (s *Service) add(reg *registration) error {
	if reg.InstanceID == PoolInstance {
		return bad("invalid_value", "instance_id", "instance_id %q is what the pool is called: choose another one", PoolInstance)
	}
	if own := s.servicesOf(reg.TenantID); own >= maxTenantServices {
		return &apiError{
			status: fasthttp.StatusServiceUnavailable, Reason: "full",
			Message: fmt.Sprintf("the tenant has %d publishers, at most %d: unregister those that are gone", own, maxTenantServices),
		}
	}
	_, err := s.sources.Register(reg.Service)
	if wrong, ok := errors.AsType[*source.FieldError](err); ok {
		return bad("invalid_value", wrong.Field, "%s: %s", wrong.Field, wrong.Reason)
	}
	switch {
	case errors.Is(err, source.ErrConflict):
		return bad(reasonConflict, "instance_id", "%v", err)
	case errors.Is(err, source.ErrFull):
		return &apiError{status: fasthttp.StatusServiceUnavailable, Reason: "full", Message: err.Error()}
	case err != nil:
		return err
	}
	return s.schedulers.add(schedulerKey{reg.TenantID, reg.ModelName}, reg.InstanceID, reg.Capacity)
}

// Limits of publishers: what one tenant does leaves room for others.
const (
	maxServices       = 8192
	maxTenantServices = 4096
)

// servicesOf counts a tenant's publishers.
func (s *Service) servicesOf(tenant string) (n int) {
	for _, v := range s.sources.Services() {
		if v.TenantID == tenant {
			n++
		}
	}
	return n
}

// unregister stops following publishers, and drops what is known of their engines.
func (s *Service) unregister(r *call) (any, error) {
	req, tenant, err := r.begin([]string{"instance_id"},
		"type", "modelname", "lora_name", "tenant_id", "instance_id", "block_size", "dp_rank")
	if err != nil {
		return nil, err
	}
	v, err := readService(req, tenant)
	if err != nil {
		return nil, err
	}
	f := source.Filter{
		Type: v.Type, ModelName: v.ModelName, LoRAName: v.LoRAName, TenantID: tenant, InstanceID: v.InstanceID, BlockSize: v.BlockSize,
	}
	if req.raw("dp_rank") != nil {
		f.DPRank = &v.DPRank
	}
	removed, err := s.sources.Unregister(f)
	if errors.Is(err, source.ErrUnknown) {
		return nil, &apiError{
			status: fasthttp.StatusNotFound, Reason: "not_found", Field: "instance_id",
			Message: "no service like that is registered: GET /services lists them",
		}
	}
	if err != nil {
		return nil, err
	}
	s.schedulers.prune(tenant, v.InstanceID)
	return map[string]any{"status": "unregistered successfully", "removed_instances": removed}, nil
}

// serviceView is a publisher and how it is.
type serviceView struct {
	source.Status

	Idle float64 `json:"idle"` // seconds since something came from it
}

// services lists the publishers that are followed, and how each is: all, or those of the tenant whose token came.
func (s *Service) services(r *call) (any, error) {
	list := []serviceView{}
	for _, v := range s.sources.Services() {
		if r.tenant == "" || v.TenantID == r.tenant {
			list = append(list, serviceView{Status: v, Idle: seconds(v.Idle)})
		}
	}
	return map[string]any{"count": len(list), "services": list}, nil
}

// resync drops what is known of an instance and has its engines tell all that they remember.
func (s *Service) resync(r *call) (any, error) {
	req, err := r.cut("instance_id")
	if err != nil {
		return nil, err
	}
	if err := req.need("instance_id"); err != nil {
		return nil, err
	}
	id, err := req.text("instance_id")
	if err != nil {
		return nil, err
	}
	n := s.sources.Resync(id)
	if n == 0 {
		return nil, &apiError{
			status: fasthttp.StatusNotFound, Reason: "not_found", Field: "instance_id",
			Message: "no such instance is registered: GET /services lists them",
		}
	}
	return map[string]any{"status": "resynchronising", "sources": n}, nil
}
