package protocol

// PutNameRequest is PUT_NAME (0x49): set a name of the session's tenant.
type PutNameRequest struct {
	Mutation
	Key      []byte // "key": at most MaxNameKeyBytes
	Value    []byte // "value": at most MaxNameValueBytes
	Check    bool   // "check": only if the name's revision is Revision, 0 for one that is not there; else CONFLICT
	Revision uint64 // "revision"
	Lease    bool   // "lease": it ends with the session; otherwise it is nobody's, whoever held it before
}

// DeleteNameRequest is DELETE_NAME (0x4A): remove a name. Check is as in PutNameRequest.
type DeleteNameRequest struct {
	Mutation
	Key      []byte // "key"
	Check    bool   // "check"
	Revision uint64 // "revision"
}

// NameReply answers both. With CONFLICT the revisions are those of the name as it is, 0 if there is none.
type NameReply struct {
	Error
	Success  bool   // "success"
	Created  uint64 // "created": the revision that made the name
	Modified uint64 // "modified": the one that changed it last, or removed it
}

// ListNamesRequest is LIST_NAMES (0x4B): one page of names, in the order of their keys.
type ListNamesRequest struct {
	Key    []byte // "key": this name alone
	Prefix []byte // "prefix" of keys
	After  []byte // "after": the last key of the page before
	Limit  uint64 // "limit": names; 0 = MaxNames, which is the most
}

// NameInfo is a name, or a change of one: {key, value, created, modified, session, deleted}.
type NameInfo struct {
	Key      []byte // "key"
	Value    []byte // "value"
	Created  uint64 // "created"
	Modified uint64 // "modified"
	Session  uint64 // "session" that it ends with; 0 = none
	Deleted  bool   // "deleted", of changes: Modified is the revision that did it
}

// ListNamesReply answers it.
type ListNamesReply struct {
	Error
	Names    []NameInfo // "names"
	Revision uint64     // "revision" of the last change of any name when this was read, to watch from
	More     bool       // "more" names follow
}

// WatchNamesRequest is WATCH_NAMES (0x4C): wait for changes of names whose keys have a prefix.
type WatchNamesRequest struct {
	Prefix    []byte // "prefix"
	After     uint64 // "after": the revision from which on changes are told
	TimeoutMS uint64 // "timeout_ms" after which nothing has changed; 0 = not to wait
}

// WatchNamesReply answers it: as soon as there are changes, or the time is over.
type WatchNamesReply struct {
	Error
	Changes  []NameInfo // "changes", the oldest first; there may be more
	Revision uint64     // "revision" up to which these are all: the next request's After
	// Compacted says that changes after After are forgotten: list the names again. ("compacted")
	Compacted bool
}
