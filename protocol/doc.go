// Package protocol is the wire format between Larder's clients and masters: frames, messages, error codes, limits.
// It speaks the messages of Maru (github.com/xcena-dev/maru, 4fd29ce), byte for byte, and adds optional fields and
// messages of its own. This page is all that the author of another client needs; the structs name every field.
//
// # Frame
//
// A connection, TCP or Unix, carries frames back to back in both directions. A frame is a header of 16 bytes, its
// integers big-endian, and a payload:
//
//	 0  u16  magic 0xCF00
//	 2  u8   version 1
//	 3  u8   type
//	 4  u8   flags: 2 = the payload is one zstd frame; 16 = passed on by another member, and not to be passed on
//	         again; others are echoed in the reply and mean nothing
//	 5  u8x3 reserved: sent as 0, ignored
//	 8  u32  sequence: chosen by who asks, echoed in the reply; 0 in pushes
//	12  u32  length of the payload, at most MaxPayload, also after decompression
//
// Many requests may be in flight; replies may come in another order and are matched by sequence. A reply's type is
// its request's with the bit 0x80, which the admin types have already: the direction, not the type, tells a request
// from a reply. Bytes that are no frame end the connection. Payloads over CompressAbove may be compressed for a peer
// that named FeatureCompression.
//
// # Payload
//
// One msgpack map from field names (str) to values. The order of fields is free, though that of the structs is read
// fastest. Unknown fields are skipped, nil means absent, of a field that comes twice the last counts. An optional
// field that is absent has its zero value, and is left out when it has. Ints are taken in every msgpack form, from 0
// to 2^64-1, and sent in the shortest. Keys are bytes: sent as str if they are ASCII, else as bin, and taken as
// either; a key that is an int or a float, which Maru allows, is refused. Other strings are str and valid UTF-8. A
// payload is exactly one value. Where no field is required, a value that is no map is taken for the empty one.
//
// # Messages
//
// Requests go from client to server and have one reply each; pushes go from server to client in sessions with
// FeaturePush. M marks messages that change state and carry seq and acked, see below.
//
//	type  name                    request                 reply
//	0x01  REQUEST_ALLOC       M   AllocRequest            AllocReply
//	0x03  RETURN_ALLOC        M   ReturnAllocRequest      SuccessReply
//	0x04  LIST_ALLOCATIONS        ListAllocationsRequest  ListAllocationsReply
//	0x10  REGISTER_KV         M   RegisterRequest         RegisterReply
//	0x11  LOOKUP_KV               LookupRequest           LookupReply
//	0x12  EXISTS_KV               KeysRequest             KeysReply
//	0x13  DELETE_KV           M   KeysRequest             KeysReply
//	0x14  PIN_KV              M   KeysRequest             KeysReply
//	0x15  UNPIN_KV            M   KeysRequest             KeysReply
//	0x20  BATCH_REGISTER_KV   M   RegisterRequest         RegisterReply
//	0x21  BATCH_LOOKUP_KV         LookupRequest           LookupReply
//	0x22  BATCH_EXISTS_KV         KeysRequest             KeysReply
//	0x23  BATCH_PIN_KV        M   KeysRequest             KeysReply
//	0x24  BATCH_UNPIN_KV      M   KeysRequest             KeysReply
//	0x30  RENEW                   LeasesRequest           LeasesReply
//	0x31  RELEASE                 LeasesRequest           LeasesReply
//	0x32  CANCEL              M   CancelRequest           CancelReply
//	0x33  PREFIX_MATCH            PrefixMatchRequest      PrefixMatchReply
//	0x34  CLEAR               M   ClearRequest            SuccessReply
//	0x35  LIST_KEYS               ListKeysRequest         ListKeysReply
//	0x36  BATCH_DELETE_KV     M   KeysRequest             KeysReply
//	0x37  GOODBYE             M   GoodbyeRequest          SuccessReply
//	0x38  ATTACH              M   AttachRequest           AttachReply
//	0x39  TASKS                   TasksRequest            TasksReply
//	0x3A  TASK_DONE           M   TaskDoneRequest         SuccessReply
//	0x3B  ACCESS                  AccessRequest           AccessReply
//	0x3C  GRANTED                 GrantedRequest          SuccessReply
//	0x3D  FENCED                  FencedRequest           SuccessReply
//	0x3E  COPY                M   CopyRequest             CopyReply
//	0x3F  TASK_STATUS             TaskStatusRequest       TaskStatusReply
//	0x40  REVOKE                  push: RevokePush        -
//	0x41  FREED                   push: FreedPush         -
//	0x42  REVOKE_DONE         M   RevokeDoneRequest       SuccessReply
//	0x43  FREED_ACK               FreedAckRequest         SuccessReply
//	0x44  CLEARED                 push: ClearedPush       -
//	0x45  GRANT                   push: GrantPush         -
//	0x46  FENCE                   push: FencePush         -
//	0x47  TASKS_PUSH              push: TasksPush         -
//	0x48  CANCEL_TASK         M   TaskStatusRequest       TaskStatusReply
//	0x49  PUT_NAME            M   PutNameRequest          NameReply
//	0x4A  DELETE_NAME         M   DeleteNameRequest       NameReply
//	0x4B  LIST_NAMES              ListNamesRequest        ListNamesReply
//	0x4C  WATCH_NAMES             WatchNamesRequest       WatchNamesReply
//	0x4D  LIST_BLOCKS             ListBlocksRequest       ListBlocksReply
//	0xF0  GET_STATS               {}                      GetStatsReply
//	0xF1  HEARTBEAT               {}                      HeartbeatReply
//	0xF2  REPORT_STATS            ReportStatsRequest      SuccessReply
//	0xF3  GET_USAGE               {}                      GetUsageReply
//	0xFE  HANDSHAKE               HandshakeRequest        HandshakeReply
//	0xFF  SHUTDOWN                {}                      an error, always
//
// A message for one key and its batch share a struct. The first has the item's fields beside the message's own
// ("key"), the second an array of items ("keys" or "entries").
//
// # Sessions
//
// A HANDSHAKE with instance_id and protocol opens a session, one without is Maru's and opens none. In a session each
// request marked M has a seq, counted from 1, and acked, the lowest seq that is not answered yet. After a timeout or
// on a new connection the client repeats the request under the same seq: it is done once, and the answer is the
// same. At most Window seqs may be open. CANCEL refuses seqs for ever that were not done.
//
// # Errors
//
// A reply that failed has, beside its own fields, error (for people), code (for programs: see Code), retryable, and
// perhaps leader and retry_after_ms. None of a reply's own fields is required then. Maru's clients, who know no
// codes, see error and success: false. A request that cannot be decoded costs only itself: its reply has
// CodeBadRequest, CodeKeyTooLong or CodeLimit, and names the field.
//
// # Packed lookups
//
// A BATCH_LOOKUP_KV with packed is answered by {packed: bin}, a record of PackedSize bytes per key, whose layout is
// that of PackedSize. It costs both ends a tenth of the maps. In a session with FeatureCopies there may be a second bin,
// copies, with what PackedSize says of it.
//
// # Limits
//
//	MaxPayload    8 MiB   payload of a frame, compressed or not
//	MaxBatch      4096    items of a request, and of what answers them one by one
//	MaxPlaces     16      names in near and avoid, addresses of an endpoint
//	MaxNICs       64      NICs of an endpoint
//	MaxCopies     3       copies of an entry
//	MaxTasks      256     tasks of a reply
//	MaxTaskItems  1024    entries of a task
//	MaxList       2^20    items of lists that grow with a pool
//	MaxKeyBytes   1024    key
//	MaxNames      1024    names of a reply, whose keys have 512 bytes at most, and values 64 KiB
//	MaxNameBytes  256     instance id, tenant, model and other names
//	MaxTextBytes  4096    path, address, text of an error
//	MaxDepth      16      nesting of a value that is skipped
//	Window        256     open seqs of a session
//
// # Use in Go
//
// Messages of one shape have Append and Decode, those of two AppendAs and DecodeAs, which take the request's type.
// Append adds the payload to a buffer; a frame is made by BeginFrame, Append and EndFrame on the same buffer, and
// read by Reader. Decode replaces the whole struct, but keeps the capacity of its slices and what its pointers point
// to, so that a struct that is used again costs no allocation; what it held before is overwritten. Decoded keys
// alias the input, which Reader overwrites: copy what is kept. After an error the struct's content is undefined.
// Nothing here is safe for concurrent use on the same struct, buffer or Reader.
package protocol
