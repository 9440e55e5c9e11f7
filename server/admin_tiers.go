package server

import "larder/protocol"

// DeviceDrainRequest is the body of POST /devices/drain: a device, or all of a node.
type DeviceDrainRequest struct {
	Device uint64 `json:"device,omitempty"`
	Node   string `json:"node,omitempty"`
	Cancel bool   `json:"cancel,omitempty"` // call it off
}

// CopyRequest is the body of POST /copy.
type CopyRequest struct {
	Place

	Tenant  string   `json:"tenant,omitempty"`   // whose keys; default the default tenant
	Keys    []string `json:"keys,omitempty"`     // as text
	KeysHex []string `json:"keys_hex,omitempty"` // as hexadecimal bytes
	Move    bool     `json:"move,omitempty"`     // the other locations go
}

// CopyReply answers it.
type CopyReply struct {
	Tasks []uint64 `json:"tasks"` // those that were made
	Found []bool   `json:"found"` // per key
}

// CancelRequest is the body of POST /tasks/cancel.
type CancelRequest struct {
	Tasks []uint64 `json:"tasks"`
}

func (r *adminCall) devices() (any, error) {
	return orEmpty(r.admin.server.DeviceStatuses()), nil
}

func (r *adminCall) drainDevice() (any, error) {
	var d DeviceDrainRequest
	if err := r.decode(&d); err != nil {
		return nil, err
	}
	if (d.Device == 0) == (d.Node == "") {
		return nil, badRequest("device, node: name one; GET /devices lists them")
	}
	return r.admin.server.SetDraining(r.ctx, Place{Node: d.Node, Device: d.Device}, !d.Cancel)
}

func (r *adminCall) tasks() (any, error) {
	return orEmpty(r.admin.server.Tasks()), nil
}

func (r *adminCall) cancelTasks() (any, error) {
	var c CancelRequest
	if err := r.decode(&c); err != nil {
		return nil, err
	}
	if len(c.Tasks) == 0 || len(c.Tasks) > protocol.MaxBatch {
		return nil, badRequest("tasks: name 1 to %d; GET /tasks lists them", protocol.MaxBatch)
	}
	return Done{true}, r.admin.server.CancelTasks(r.ctx, c.Tasks)
}

func (r *adminCall) copyKeys() (any, error) {
	var c CopyRequest
	if err := r.decode(&c); err != nil {
		return nil, err
	}
	keys, err := (&PinRequest{Tenant: c.Tenant, Keys: c.Keys, KeysHex: c.KeysHex}).keys()
	if err != nil {
		return nil, err
	}
	tasks, found, err := r.admin.server.Copy(r.ctx, c.Tenant, keys, c.Place, c.Move)
	return CopyReply{Tasks: orEmpty(tasks), Found: orEmpty(found)}, err
}
