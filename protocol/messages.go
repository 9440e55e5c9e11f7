package protocol

// Type is a message type. A reply carries the request's type with ReplyBit set; the admin types (0xF0 and
// above) have that bit already, so their replies carry the same type. Type alone therefore never tells a
// request from a reply: the direction of the connection does. The server's pushes use types without the bit.
type Type uint8

// ReplyBit is or'ed into a request's type to make its reply's type.
const ReplyBit Type = 0x80

// Message types. Those up to 0x24 and from 0xF0 are Maru's; the others are Larder's own.
const (
	TypeRequestAlloc    Type = 0x01
	TypeReturnAlloc     Type = 0x03
	TypeListAllocations Type = 0x04
	TypeRegister        Type = 0x10
	TypeLookup          Type = 0x11
	TypeExists          Type = 0x12
	TypeDelete          Type = 0x13
	TypePin             Type = 0x14
	TypeUnpin           Type = 0x15
	TypeBatchRegister   Type = 0x20
	TypeBatchLookup     Type = 0x21
	TypeBatchExists     Type = 0x22
	TypeBatchPin        Type = 0x23
	TypeBatchUnpin      Type = 0x24

	TypeRenew       Type = 0x30 // extend read leases
	TypeRelease     Type = 0x31 // end read leases early
	TypeCancel      Type = 0x32 // refuse sequence numbers for ever
	TypePrefixMatch Type = 0x33 // longest run of a list of prefix hashes
	TypeClear       Type = 0x34 // drop everything of a context, of a key prefix, or all
	TypeListKeys    Type = 0x35 // one page of keys
	TypeBatchDelete Type = 0x36
	TypeGoodbye     Type = 0x37 // end the session: its regions are returned
	TypeAttach      Type = 0x38 // a device session says what it serves
	TypeTasks       Type = 0x39 // a device's home asks for tiering work
	TypeTaskDone    Type = 0x3A // how far a task has come
	TypeAccess      Type = 0x3B // a region's owner asks for a handle to write by transfer
	TypeGranted     Type = 0x3C // answers Grant
	TypeFenced      Type = 0x3D // answers Fence
	TypeCopy        Type = 0x3E // copy or move entries to a tier, node or device
	TypeTaskStatus  Type = 0x3F // how far tasks have come
	TypeRevoke      Type = 0x40 // push: give this region up
	TypeFreed       Type = 0x41 // push: these pages of yours were freed by somebody else
	TypeRevokeDone  Type = 0x42 // acknowledges Revoke: nothing of the session writes there any more
	TypeFreedAck    Type = 0x43 // acknowledges Freed
	TypeCleared     Type = 0x44 // push: a CLEAR has dropped entries of your tenant
	TypeGrant       Type = 0x45 // push: let a region's owner write to it by transfer
	TypeFence       Type = 0x46 // push: let nobody write to a region any more
	TypeTasksPush   Type = 0x47 // push: there is tiering work
	TypeCancelTask  Type = 0x48 // end tasks
	TypePutName     Type = 0x49 // set a name
	TypeDeleteName  Type = 0x4A // remove a name
	TypeListNames   Type = 0x4B // one page of names
	TypeWatchNames  Type = 0x4C // wait for changes of names
	TypeListBlocks  Type = 0x4D // one page of prefix blocks

	TypeGetStats    Type = 0xF0
	TypeHeartbeat   Type = 0xF1
	TypeReportStats Type = 0xF2
	TypeGetUsage    Type = 0xF3
	TypeHandshake   Type = 0xFE
	TypeShutdown    Type = 0xFF
)

// Version is the version of the native protocol that HANDSHAKE announces; the frame header's own version
// stays 1, as Maru's clients expect.
const Version = 1

// Feature bits of HANDSHAKE. A session has the features that both ends named.
const (
	FeaturePush        uint64 = 1 << iota // the client reads Revoke, Freed and Cleared
	FeaturePacked                         // the client reads packed batch lookups
	FeatureChecksums                      // the client registers and verifies checksums
	FeatureCompression                    // the peer reads frames with FlagCompressed
	FeatureCopies                         // the client reads copies in lookups, and writes regions by transfer
	FeatureNode                           // the session is a device's home
)

// Limits of the protocol: every one bounds what a single peer can make the other hold.
const (
	// MaxPayload bounds a frame: a full batch of entries with the longest keys fits (4096 x ~1.2 KiB).
	MaxPayload = 8 << 20
	// MaxBatch bounds the items of a batch, so that no command holds the state machine for longer than a few ms.
	MaxBatch = 4096
	// MaxKeyBytes bounds a key: hashes with a readable context fit many times over.
	MaxKeyBytes = 1024
	// MaxNameBytes bounds instance ids, tenants, model names and other strings that the index interns.
	MaxNameBytes = 256
	// MaxTextBytes bounds paths, addresses and the texts of errors: Linux's PATH_MAX.
	MaxTextBytes = 4096
	// MaxList bounds the lists of replies, which grow with a pool and not with a request.
	MaxList = 1 << 20
	// MaxPlaces bounds the names in near and avoid of a REQUEST_ALLOC: a host has fewer devices and neighbours worth naming.
	MaxPlaces = 16
	// MaxNICs bounds the NICs of an Endpoint: the largest machines have a dozen or two.
	MaxNICs = 64
	// MaxCopies bounds the locations of an entry beside its primary: a copy below and replicas on two more nodes.
	MaxCopies = 3
	// MaxTaskItems bounds the entries of a task, so that the command that makes it, and the reply that tells of it, stay small.
	MaxTaskItems = 1024
	// MaxTasks bounds the tasks that exist, and those of a reply.
	MaxTasks = 256
	// MaxNameKeyBytes bounds the key of a name: a path of a few parts.
	MaxNameKeyBytes = 512
	// MaxNameValueBytes bounds its value: how a process with hundreds of buffers is reached.
	MaxNameValueBytes = 64 << 10
	// MaxNames bounds the names, or changes of names, of a reply.
	MaxNames = 1024
	// MaxReport bounds the entries of REPORT_STATS, of which Maru uses at most 10,000.
	MaxReport = 10_000
	// MaxDepth bounds nesting of msgpack values that are skipped, so that a hostile frame cannot exhaust the stack.
	MaxDepth = 16
	// CompressAbove is the size in bytes from which a payload is worth compressing.
	CompressAbove = 64 << 10
	// Window is how far a session's seq may run ahead of its acked, and so how many replies are remembered for it.
	Window = 256
)

// Mutation is carried by every request that changes state in a native session.
type Mutation struct {
	Seq   uint64 // "seq": 1, 2, ... per session; 0 = none, the request is not protected against repetition
	Acked uint64 // "acked": the lowest seq that the client has no answer for; everything below may be forgotten
}

// Handle names a region, as Maru does: {region_id, offset, length, auth_token}.
type Handle struct {
	RegionID  uint64 // "region_id": never reused
	Offset    uint64 // "offset": bytes from the start of the device's file
	Length    uint64 // "length": bytes
	AuthToken uint64 // "auth_token": opaque
}

// Region is a Handle with the native additions.
type Region struct {
	Handle
	Device     uint64 // "device": device id
	Generation uint64 // "generation" of the device
	Epoch      uint64 // "epoch" of the region
	PageSize   uint64 // "page_size": bytes
}

// Location is where an entry's bytes lie. On the wire it is flattened into the map that carries it:
// {handle: {...}, kv_offset, kv_length, device, generation, epoch, checksum}.
type Location struct {
	Region          // "handle" and "device", "generation", "epoch", "page_size" beside it
	KVOffset uint64 // "kv_offset": bytes from the start of the region
	KVLength uint64 // "kv_length": bytes
	Checksum uint64 // "checksum": XXH3-64 of the bytes; 0 = none
}

// Error is the part of a reply that says what went wrong. A reply with Code 0 and no Message has none of these
// fields; one with Code 0 and a Message has "error" alone, as Maru's replies do, and is decoded as CodeInternal.
type Error struct {
	Code         Code   // "code"
	Message      string // "error": says what to do next
	Leader       string // "leader": address to try, when the code is CodeNotLeader
	RetryAfterMS uint64 // "retry_after_ms"; whether to retry at all is Code.Retryable, sent as "retryable"
}

// Device describes one device of the pool to a client: {id, path, tier, size, generation, coherence, uuid}.
type Device struct {
	ID         uint64    // "id"
	Path       string    // "path" on the server's host; other hosts find the device by UUID
	UUID       string    // "uuid": what the device's header holds, hexadecimal
	Tier       string    // "tier": cxl, dram or ssd
	Coherence  string    // "coherence": hardware or none
	Size       uint64    // "size": bytes of the whole device, header included
	Generation uint64    // "generation"
	Node       string    // "node": the host it is attached to
	NUMA       uint64    // "numa": the NUMA node that it is close to, plus 1; 0 = not known
	Endpoint   *Endpoint // "endpoint": how it is reached by transfer; nil = it is not, or this master does not know yet
}

// Member describes one master: {id, addr, socket, admin, learner}.
type Member struct {
	ID      uint64 // "id": for life
	Addr    string // "addr": host:port for clients
	Socket  string // "socket": path of the Unix socket, if any
	Admin   string // "admin": host:port of the HTTP admin
	Learner bool   // "learner"
}

// Page is a run of pages in a region that holds an entry: {key?, region_id, kv_offset, kv_length, free_after_ms?}.
type Page struct {
	Key         []byte // "key"
	RegionID    uint64 // "region_id"
	KVOffset    uint64 // "kv_offset"
	KVLength    uint64 // "kv_length"
	FreeAfterMS uint64 // "free_after_ms": the owner keeps the page in quarantine until then
}

// HandshakeRequest opens or resumes a session (0xFE). A request without instance_id is Maru's and opens none.
type HandshakeRequest struct {
	ClientVersion uint64 // "client_version"
	InstanceID    string // "instance_id"
	Protocol      uint64 // "protocol": Version; 0 = not native
	Tenant        string // "tenant": default "default"
	TTLMS         uint64 // "ttl_ms": wanted session TTL; the server clamps it
	Features      uint64 // "features"
	Session       uint64 // "session": to resume; 0 = a new one
	// "secret": with session, proves the right to resume it. Without, a random number that the new session will have: a
	// HANDSHAKE that is repeated because its reply was lost gets the same session, and nobody else does. 0 = the server's.
	Secret         uint64
	Replaces       uint64 // "replaces": a session of this instance that has suspended itself and will never write again
	ReplacesSecret uint64 // "replaces_secret": its secret
	BootID         string // "boot_id" of the client's host, for fencing by process
	PIDNamespace   uint64 // "pid_ns": inode of /proc/self/ns/pid
	PID            uint64 // "pid"
	PIDStart       uint64 // "pid_start": start time of the process in clock ticks
	DevicesOnly    bool   // "devices_only": with session, nothing is to be told but what devices there are
}

// GoodbyeRequest is GOODBYE (0x37), which ends the session; the reply is a SuccessReply.
type GoodbyeRequest struct {
	Mutation
}

// OwnedRegion is a region that a resumed session still owns, with what lies there.
type OwnedRegion struct {
	Region            // flattened: handle, device, generation, epoch, page_size
	Revoking bool     // "revoking": a Revoke is waiting for RevokeDone
	Occupied []uint64 // "occupied": offset, length, offset, length ... of live entries, ascending
}

// HandshakeReply answers it. Success and RMAddress are Maru's fields.
type HandshakeReply struct {
	Error
	Success        bool          // "success"
	RMAddress      string        // "rm_address"
	ServerVersion  string        // "server_version"
	Protocol       uint64        // "protocol"
	Features       uint64        // "features": those in force
	Session        uint64        // "session"
	Secret         uint64        // "secret"
	Resumed        bool          // "resumed"
	TTLMS          uint64        // "ttl_ms" in force
	DefaultLeaseMS uint64        // "default_lease_ms"
	MaxLeaseMS     uint64        // "max_lease_ms"
	QuarantineMS   uint64        // "quarantine_ms": for pages that turn out free in Occupied
	Pool           string        // "pool": pool id, hexadecimal
	Incarnation    uint64        // "incarnation"
	Leader         uint64        // "leader_id": 0 = unknown (the address is in Error.Leader when redirected)
	Members        []Member      // "members"
	Devices        []Device      // "devices"
	Regions        []OwnedRegion // "regions" of a resumed session
}

// AllocRequest is REQUEST_ALLOC (0x01).
type AllocRequest struct {
	Mutation
	InstanceID string   // "instance_id"
	Size       uint64   // "size": bytes wanted for a region; with need_pages an upper bound
	PageSize   uint64   // "page_size": bytes; 0 = the server's default
	NeedPages  uint64   // "need_pages": how many pages the client is short of; 0 = a whole region or nothing
	RunPages   uint64   // "run_pages": pages of the longest entry, which must lie in one run; 0 = 1
	Tier       string   // "tier" preferred; "" = any
	Evict      bool     // "evict": victims may be taken; Maru's clients, who cannot act on them, do not set it
	Whole      bool     // "whole": evicted pages did not give a run that is long enough; empty one region whole
	Keys       [][]byte // "keys": what the client is about to store, in order; see AllocReply.Found
	FreePages  uint64   // "free_pages": pages that the client has free; with keys, the server computes the shortage
	TimeoutMS  uint64   // "timeout_ms": how long the server may wait for a victim; 0 = its default
	Near       []string // "near": hosts, NUMA nodes (host/0) or devices (#3) preferred, the first most; at most MaxPlaces
	Avoid      []string // "avoid": those to be used only if nothing else will do
	Device     uint64   // "device": the only one that will do; 0 = any
	Promote    bool     // "promote": for a copy in a faster tier, without Evict; see docs/TIERS.md
}

// AllocReply answers it. Exactly one of these happened: a region was given (Region.Length > 0), pages were
// evicted, or neither was needed (with Keys, the free pages suffice).
type AllocReply struct {
	Error
	Success  bool    // "success"
	Region   Region  // "handle" + "device", "generation", "epoch", "page_size"; absent if no region was given
	Device   *Device // "device_info": the device of Region, if it is given
	Evicted  []Page  // "evicted": the pages that the client may reuse; each with its own free_after_ms
	Found    []bool  // "found": per key of the request, whether it exists (and has been counted as used)
	Phase    uint64  // "phase": 0 free space, 1 own entries, 2 a departed owner's region, 3 another client's
	Occupied uint64  // "occupied": occupied pages of the instance
}

// ReturnAllocRequest is RETURN_ALLOC (0x03); the reply is a SuccessReply.
type ReturnAllocRequest struct {
	Mutation
	InstanceID string // "instance_id"
	RegionID   uint64 // "region_id"
	Epoch      uint64 // "epoch": of the region that is meant; 0 = whatever it is by now
}

// SuccessReply answers RETURN_ALLOC, DELETE, UNPIN, CLEAR, CANCEL, RENEW, RELEASE and others.
type SuccessReply struct {
	Error
	Success     bool   // "success"
	FreeAfterMS uint64 // "free_after_ms": for DELETE, when the owner may reuse the page
	Count       uint64 // "count": how many keys, leases or seqs it concerned, where that says something
}

// ListAllocationsRequest is LIST_ALLOCATIONS (0x04).
type ListAllocationsRequest struct {
	ExcludeInstanceID string // "exclude_instance_id"
}

// ListAllocationsReply answers it.
type ListAllocationsReply struct {
	Error
	Success     bool     // "success"
	Allocations []Region // "allocations": maps of Handle's fields, with the native ones beside them
}

// Context scopes prefix hashes: {model, lora, block_size, seed, salt}. The tenant is the session's.
type Context struct {
	Model     string // "model"
	LoRA      string // "lora"
	Salt      string // "salt"
	BlockSize uint64 // "block_size": tokens
	Seed      uint64 // "seed" of the hash
}

// RegisterEntry is one entry to register. On the wire: {key, region_id, kv_offset, kv_length} and the native
// fields beside them.
type RegisterEntry struct {
	Key       []byte // "key"
	RegionID  uint64 // "region_id"
	KVOffset  uint64 // "kv_offset"
	KVLength  uint64 // "kv_length"
	Epoch     uint64 // "epoch" of the region; 0 = not checked (Maru)
	Checksum  uint64 // "checksum"
	TTLMS     uint64 // "ttl_ms": for the ttl policy; 0 = the pool's default
	HasPrefix bool   // set when "hash" is present
	Hash      uint64 // "hash": rolling prefix hash
	Parent    uint64 // "parent": hash of the parent block; 0 with index 0
	Index     uint64 // "index": block index in its request
	Group     uint64 // "group": member << 16 | members, for tensor-parallel shards; 0 = none
	Touch     bool   // "touch": the key is known to exist: count a use, register nothing
	Copy      bool   // "copy": add a location to the entry of this key, see docs/TIERS.md
	Of        uint64 // "of": version of that entry; 0 = the one that the same request has just registered
	Slot      uint64 // "slot" of that entry, as a task's item names it: a device's home copies entries of every tenant
	MoveFrom  uint64 // "move_from": with copy, the device whose locations of the entry go; ^0 = all others; 0 = none
	Replicas  uint64 // "replicas": on how many nodes the entry is to lie, those of its copies included; 0 = on one
}

// RegisterRequest is REGISTER_KV (0x10, Entries has one element, flattened into the map) and
// BATCH_REGISTER_KV (0x20, "entries").
type RegisterRequest struct {
	Mutation
	Context *Context // "context" of the prefix hashes
	Entries []RegisterEntry
}

// RegisterResult is the outcome for one entry.
type RegisterResult struct {
	IsNew       bool     // "is_new" (single); in a batch the "results" array of bool
	Code        Code     // "code", in a single reply "entry_code": why the entry was refused; 0 = it was not
	Existing    Location // where the existing entry lies, when IsNew is false
	ExistingKey []byte   // "existing_key": when the same prefix hash is held under another key
}

// RegisterReply answers both. In a batch reply, "results" is the array of bool that Maru knows; "existing" is an
// array of maps {index, code?, key?, + Location} for the entries that are not new, for native sessions.
type RegisterReply struct {
	Error
	Success bool // "success"
	Results []RegisterResult
}

// LookupRequest is LOOKUP_KV (0x11, one key as "key") and BATCH_LOOKUP_KV (0x21, "keys").
type LookupRequest struct {
	Keys       [][]byte
	LeaseMS    uint64   // "lease_ms" wanted; 0 = the default
	StopAtMiss bool     // "stop_at_miss": end at the first key that is not found (the reply is then shorter)
	Packed     bool     // "packed": answer with fixed records, see LookupReply
	Release    []uint64 // "release": leases to end, see LookupResult.Lease
}

// LookupResult is the outcome for one key.
type LookupResult struct {
	Found    bool   // "found"
	Location        // flattened
	Lease    uint64 // "lease": names the lease, for RELEASE and RENEW; 0 = none
	LeaseMS  uint64 // "lease_ms": counted from when the request was sent
	Version  uint64 // "version" of the entry; only with copies or promote
	Promote  bool   // "promote": a copy in a faster tier is wanted
	// Copies are other locations of the same bytes, the fastest first ("copies"), for sessions with FeatureCopies.
	Copies []Location
}

// LookupReply answers both. With Packed in the request, the reply's map has "packed", a bin of PackedSize-byte
// little-endian records in place of "entries": see AppendPacked.
type LookupReply struct {
	Error
	Results []LookupResult
}

// KeysRequest is EXISTS (0x12), DELETE (0x13), PIN (0x14), UNPIN (0x15), each with one key as "key", and
// their batches 0x22, 0x36, 0x23, 0x24 with "keys".
type KeysRequest struct {
	Mutation
	Keys [][]byte
	Pin  PinSpec // for PIN and UNPIN
	// RegionID ("region_id") and KVOffset ("kv_offset"), for DELETE: the bytes there turned out not to be what was stored, and
	// the key loses that location alone, as long as it has another. 0: it goes.
	RegionID, KVOffset uint64
}

// PinSpec says what kind of pin; its fields lie beside the keys.
type PinSpec struct {
	Kind  string // "kind": "" or "session" = ends with the session; "durable" = named, until undone; "soft" = evicted last
	Owner string // "owner": the name of a durable pin
	TTLMS uint64 // "ttl_ms": for soft and durable ones; 0 = no end (durable only)
}

// KeysReply answers them. For one key: "exists" (EXISTS, PIN) or "success" (DELETE, UNPIN); for batches "results".
type KeysReply struct {
	Error
	Results     []bool
	FreeAfterMS uint64 // "free_after_ms": DELETE of one key
	Freed       []Page // "freed": DELETE in a native session: what may be reused, when
}

// LeasesRequest is RENEW (0x30) and RELEASE (0x31).
type LeasesRequest struct {
	Leases  []uint64 // "leases"
	LeaseMS uint64   // "lease_ms" for RENEW
}

// LeasesReply answers them.
type LeasesReply struct {
	Error
	Success bool
	Results []bool // "results": for RENEW, whether each was still held and now lasts lease_ms from the sending
}

// CancelRequest is CANCEL (0x32): the seqs are refused from now on if they were not applied before.
type CancelRequest struct {
	Mutation
	Seqs []uint64 // "seqs"
}

// CancelReply says for each seq whether it had been applied before: its page is then in use.
type CancelReply struct {
	Error
	Success bool
	Applied []bool // "applied"
}

// PrefixMatchRequest is PREFIX_MATCH (0x33).
type PrefixMatchRequest struct {
	Context  Context  // "context"
	Hashes   []uint64 // "hashes", in order
	Members  uint64   // "members": a block counts only if all members of its group are there; 0 = any one
	WantKeys bool     // "want_keys"
}

// PrefixMatchReply answers it.
type PrefixMatchReply struct {
	Error
	Matched uint64   // "matched": length of the longest run from the start
	Keys    [][]byte // "keys" of the matched blocks
}

// ClearRequest is CLEAR (0x34). Exactly one of its scopes is set. It needs a session, and drops entries of the session's
// tenant only.
type ClearRequest struct {
	Mutation
	All     bool     // "all"
	Prefix  []byte   // "prefix" of keys
	Context *Context // "context": empty fields match everything
	Tenant  string   // "tenant": everything of it; it must be the session's own
}

// ListKeysRequest is LIST_KEYS (0x35).
type ListKeysRequest struct {
	Prefix []byte // "prefix"
	Cursor uint64 // "cursor": 0 to start, else the last reply's
	Limit  uint64 // "limit": at most MaxBatch
}

// KeyInfo is one row of LIST_KEYS: {key, + Location, pins?, class?}.
type KeyInfo struct {
	Key []byte
	Location
	Pins  uint64 // "pins"
	Class string // "class": "", soft or hard
}

// ListKeysReply answers it. A page may be empty and yet not the last: a page looks at a bounded number of entries.
type ListKeysReply struct {
	Error
	Keys   []KeyInfo // "keys"
	Cursor uint64    // "cursor": 0 = the end
}

// ListBlocksRequest is LIST_BLOCKS (0x4D).
type ListBlocksRequest struct {
	Cursor uint64 // "cursor": 0 to start, else the last reply's
	Limit  uint64 // "limit": at most MaxBatch
}

// BlockInfo is a prefix block that is held: see PackedBlockSize. What is on a device that is away is held, though it is not
// served until that is back.
type BlockInfo struct {
	Context   uint16 // its place in Contexts
	InMemory  bool   // on any tier but the slowest
	OnDisk    bool
	HasParent bool   // Parent is known
	Group     uint32 // as REGISTER has it
	Hash      uint64
	Parent    uint64 // hash of the block before it
	Index     uint64 // in its prompt
}

// ListBlocksReply answers it. A block may come twice. A page may be empty and yet not the last.
type ListBlocksReply struct {
	Error
	Contexts []Context   // "contexts" of the blocks
	Blocks   []BlockInfo // "blocks": a bin of records
	Cursor   uint64      // "cursor": 0 = the end
}

// RevokePush is Revoke (0x40), sequence 0. The client stops writing to the region and answers with RevokeDone.
type RevokePush struct {
	RegionID uint64 // "region_id"
	Epoch    uint64 // "epoch"
}

// FreedPush is Freed (0x41), sequence 0.
type FreedPush struct {
	ID    uint64 // "id" to acknowledge
	Pages []Page // "pages"
}

// RevokeDoneRequest is RevokeDone (0x42).
type RevokeDoneRequest struct {
	Mutation
	RegionID uint64 // "region_id"
	Epoch    uint64 // "epoch"
}

// FreedAckRequest is FreedAck (0x43).
type FreedAckRequest struct {
	ID uint64 // "id"
}

// ClearedPush is Cleared (0x44), sequence 0: entries of the session's tenant were dropped by a CLEAR, its own or another's.
// It needs no answer and is not repeated: what of it is lost costs nothing but the news, since nothing of what was cleared
// is served in any case. It may come twice. One of its scopes is set; one that sets none that the client knows is to be
// taken for all.
type ClearedPush struct {
	Index   uint64   // "index": of the log entry that did it; of two CLEARs the later one has the higher index, or the same
	All     bool     // "all": everything of the tenant
	Prefix  []byte   // "prefix" of keys
	Context *Context // "context": empty fields match everything
}
