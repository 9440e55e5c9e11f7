package protocol

// AttachRequest is ATTACH (0x38): a device session says what it serves, see docs/TIERS.md. It is sent again, with Ready and
// the handle, once the device shows the generation that the reply names.
type AttachRequest struct {
	Mutation
	UUID       string // "uuid" of the device, 32 hexadecimal digits
	Path       string // "path" where processes of the same host map it; "" = nobody maps it
	Node       string // "node": the host
	NUMA       uint64 // "numa": the NUMA node that it is close to, plus 1; 0 = not known
	Tier       string // "tier": cxl, dram or ssd
	Coherence  string // "coherence": hardware or none
	Size       uint64 // "size": bytes, header included
	DataOffset uint64 // "data_offset": bytes reserved for the header
	Align      uint64 // "align" of regions
	Volatile   bool   // "volatile": its bytes do not outlive the process, or the power
	BootID     string // "boot_id" of the host
	Generation uint64 // "generation" that the device shows; 0 = none: it is new, or its bytes are lost
	Ready      bool   // "ready": Generation is what was asked for, and Endpoint and the handle are valid
	// Expose says that the device is the masters' own: the session serves transfers of it and is not its home.
	Expose   bool     // "expose"
	Endpoint Endpoint // "endpoint"
}

// Endpoint is how a device's bytes are reached by transfer: {engine, host, rails, nics, buffer, buffer_generation, storage}.
type Endpoint struct {
	Engine           string   // "engine": id of the node's transfer engine, 32 hexadecimal digits; "" = there is none
	Host             string   // "host": boot id, for shared memory
	Rails            []string // "rails": addresses
	NICs             []string // "nics": names of the node's NICs, whose queue pairs are agreed on at the rails
	Buffer           uint64   // "buffer": id of the buffer that has the whole device, for reading
	BufferGeneration uint64   // "buffer_generation"
	Offset           uint64   // "offset" of the buffer in the device, bytes
	Storage          bool     // "storage": it is not memory, and cannot be mapped
}

// AttachReply answers it.
type AttachReply struct {
	Error
	Device     uint64 // "device": its id
	Generation uint64 // "generation" that it must show
	Fresh      bool   // "fresh": nothing of what lies there is known to the index: it may be dropped
}

// TasksRequest is TASKS (0x39): the home of a device asks what is to be done.
type TasksRequest struct {
	Device uint64 // "device"
	After  uint64 // "after": id of the last task that the home has already; 0 = all
	Limit  uint64 // "limit": tasks
	// Items are leased, so many of each task, from the first one that is left on, and the others left out: their bytes stay put
	// while they are copied. 0 = all are listed, and none is leased. ("items")
	Items uint64
}

// TaskItem is one entry of a task: {key, slot, version, lease?, + Location, copies?}.
type TaskItem struct {
	Key     []byte // "key"
	Slot    uint64 // "slot": with Version it names the entry to REGISTER, whatever its tenant
	Version uint64 // "version" of the entry
	Lease   uint64 // "lease" on all of its locations, as LookupResult's; 0 = none
	Location
	Copies []Location // "copies": where else its bytes lie
}

// Task is a piece of tiering work: {id, kind, tenant, move, move_from, items}.
type Task struct {
	ID       uint64     // "id"
	Kind     string     // "kind": demote, copy, move, drain or repair
	Done     uint64     // "done": items, from the first on, that are through already
	Total    uint64     // "total"
	MoveFrom uint64     // "move_from": device whose locations go when the copy is there; 0 = none, all but this with ^0
	Items    []TaskItem // "items" that are left; those that are gone, or about to be, have no key
}

// TasksReply answers it.
type TasksReply struct {
	Error
	Canceled []uint64 // "canceled": ids, at most those the home may have, that are not to be done any more
	Tasks    []Task   // "tasks"
	LeaseMS  uint64   // "lease_ms" of the items, counted from when the request was sent
}

// TaskDoneRequest is TASK_DONE (0x3A); the reply is a SuccessReply, whose Success is false if the task is canceled.
type TaskDoneRequest struct {
	Mutation
	Task    uint64 // "task"
	Done    uint64 // "done": items, from the first on, that are through
	Copied  uint64 // "copied": of those since the last TASK_DONE
	Skipped uint64 // "skipped": gone, changed, or there already
	Failed  uint64 // "failed": could not be read or written
	Bytes   uint64 // "bytes" copied
}

// AccessRequest is ACCESS (0x3B): the owner of a region asks for a handle to write to it by transfer.
type AccessRequest struct {
	RegionID uint64 // "region_id"
	Epoch    uint64 // "epoch"
}

// AccessReply answers it.
type AccessReply struct {
	Error
	Endpoint Endpoint // "endpoint": with the region's own buffer, whose Offset is that of the region
}

// GrantPush is Grant (0x45), sequence 0, to the home of a device: register the extent for writing, answer with GRANTED.
type GrantPush struct {
	ID       uint64 // "id" to answer with
	RegionID uint64 // "region_id"
	Epoch    uint64 // "epoch"
	Device   uint64 // "device"
	Offset   uint64 // "offset" in the device, bytes
	Length   uint64 // "length"
}

// GrantedRequest is GRANTED (0x3C); the reply is a SuccessReply.
type GrantedRequest struct {
	ID       uint64   // "id" of the Grant
	Endpoint Endpoint // "endpoint"; without an engine the grant was refused, Fault says why
	Fault    string   // "fault"
}

// FencePush is Fence (0x46), sequence 0: retire all handles of the region of that epoch and earlier ones, grant none of
// them any more, answer with FENCED when nothing can land any more. It is repeated until answered.
type FencePush struct {
	RegionID uint64 // "region_id"
	Epoch    uint64 // "epoch"
	Device   uint64 // "device"
}

// FencedRequest is FENCED (0x3D); the reply is a SuccessReply.
type FencedRequest struct {
	RegionID uint64 // "region_id"
	Epoch    uint64 // "epoch"
	Device   uint64 // "device"
}

// CopyRequest is COPY (0x3E): make tasks that copy or move entries of the session's tenant. One of Tier, Node, Device is set.
type CopyRequest struct {
	Mutation
	Keys   [][]byte // "keys": at most MaxBatch
	Tier   string   // "tier"
	Node   string   // "node"
	Device uint64   // "device"
	Move   bool     // "move": the other locations go
}

// CopyReply answers it.
type CopyReply struct {
	Error
	Tasks []uint64 // "tasks": ids
	Found []bool   // "found": per key
}

// TaskStatusRequest is TASK_STATUS (0x3F), and CANCEL_TASK (0x48), which also ends the tasks.
type TaskStatusRequest struct {
	Mutation
	Tasks []uint64 // "tasks": ids; none = all
}

// TaskStatus says how far a task has come: {id, kind, device, total, done, copied, skipped, failed, bytes, state}.
type TaskStatus struct {
	ID      uint64 // "id"
	Kind    string // "kind"
	Device  uint64 // "device"
	Total   uint64 // "total"
	Done    uint64 // "done"
	Copied  uint64 // "copied"
	Skipped uint64 // "skipped"
	Failed  uint64 // "failed"
	Bytes   uint64 // "bytes"
	State   string // "state": waiting, running, done, canceled, or unknown (it has been forgotten)
}

// TaskStatusReply answers both.
type TaskStatusReply struct {
	Error
	Tasks []TaskStatus // "tasks"
}

// TasksPush is Tasks (0x47), sequence 0: the home has something to ask TASKS for. News and no more.
type TasksPush struct {
	Device uint64 // "device"
}
