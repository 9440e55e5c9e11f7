package protocol

import "fmt"

var typeNames = map[Type]string{
	TypeRequestAlloc:    "REQUEST_ALLOC",
	TypeReturnAlloc:     "RETURN_ALLOC",
	TypeListAllocations: "LIST_ALLOCATIONS",
	TypeRegister:        "REGISTER_KV",
	TypeLookup:          "LOOKUP_KV",
	TypeExists:          "EXISTS_KV",
	TypeDelete:          "DELETE_KV",
	TypePin:             "PIN_KV",
	TypeUnpin:           "UNPIN_KV",
	TypeBatchRegister:   "BATCH_REGISTER_KV",
	TypeBatchLookup:     "BATCH_LOOKUP_KV",
	TypeBatchExists:     "BATCH_EXISTS_KV",
	TypeBatchPin:        "BATCH_PIN_KV",
	TypeBatchUnpin:      "BATCH_UNPIN_KV",
	TypeRenew:           "RENEW",
	TypeRelease:         "RELEASE",
	TypeCancel:          "CANCEL",
	TypePrefixMatch:     "PREFIX_MATCH",
	TypeClear:           "CLEAR",
	TypeListKeys:        "LIST_KEYS",
	TypeBatchDelete:     "BATCH_DELETE_KV",
	TypeGoodbye:         "GOODBYE",
	TypeAttach:          "ATTACH",
	TypeTasks:           "TASKS",
	TypeTaskDone:        "TASK_DONE",
	TypeAccess:          "ACCESS",
	TypeGranted:         "GRANTED",
	TypeFenced:          "FENCED",
	TypeCopy:            "COPY",
	TypeTaskStatus:      "TASK_STATUS",
	TypeRevoke:          "REVOKE",
	TypeFreed:           "FREED",
	TypeRevokeDone:      "REVOKE_DONE",
	TypeFreedAck:        "FREED_ACK",
	TypeCleared:         "CLEARED",
	TypeGrant:           "GRANT",
	TypeFence:           "FENCE",
	TypeTasksPush:       "TASKS_PUSH",
	TypeCancelTask:      "CANCEL_TASK",
	TypePutName:         "PUT_NAME",
	TypeDeleteName:      "DELETE_NAME",
	TypeListNames:       "LIST_NAMES",
	TypeWatchNames:      "WATCH_NAMES",
	TypeListBlocks:      "LIST_BLOCKS",
	TypeGetStats:        "GET_STATS",
	TypeHeartbeat:       "HEARTBEAT",
	TypeReportStats:     "REPORT_STATS",
	TypeGetUsage:        "GET_USAGE",
	TypeHandshake:       "HANDSHAKE",
	TypeShutdown:        "SHUTDOWN",
}

// String returns the name of t as in the table of the package's documentation; a reply's is that of its request.
func (t Type) String() string {
	if s, ok := typeNames[t]; ok {
		return s
	}
	if s, ok := typeNames[t&^ReplyBit]; ok {
		return s
	}
	return fmt.Sprintf("TYPE_0x%02X", uint8(t))
}

// Known reports whether t is a request or push of this protocol. Replies are not known by this measure.
func (t Type) Known() bool {
	_, ok := typeNames[t]
	return ok
}

// Reply returns the type of the reply to a request of type t.
func (t Type) Reply() Type { return t | ReplyBit }

// Batch reports whether t, a request's or its reply's type, carries many items where its sibling carries one.
func (t Type) Batch() bool {
	t &^= ReplyBit
	return t >= TypeBatchRegister && t <= TypeBatchUnpin || t == TypeBatchDelete
}
