package maru

import (
	"larder/meta"
)

// Handle is how a client is told of a region.
type Handle struct{ Region, Offset, Length, Token uint64 }

func appendHandle(b []byte, h Handle) []byte {
	b = appendUint(appendStr(append(b, 0x84), "region_id"), h.Region)
	b = appendUint(appendStr(b, "offset"), h.Offset)
	b = appendUint(appendStr(b, "length"), h.Length)
	return appendUint(appendStr(b, "auth_token"), h.Token)
}

// appendAlloc appends the reply to REQUEST_ALLOC.
func appendAlloc(b []byte, h Handle, ok bool) []byte {
	b = appendBool(appendStr(append(b, 0x82), "success"), ok)
	if !ok {
		return appendStr(appendStr(b, "error"), "Allocation failed")
	}
	return appendHandle(appendStr(b, "handle"), h)
}

// appendFound appends what LOOKUP_KV says of one key: of those that are not found, or that lie in a region that is not
// there any more, nothing.
func appendFound(b []byte, f meta.MaruFound, handle func(meta.MaruFound) (Handle, bool)) []byte {
	h, ok := Handle{}, false
	if f.Region != 0 {
		h, ok = handle(f)
	}
	if !ok {
		return appendBool(appendStr(append(b, 0x81), "found"), false)
	}
	b = appendBool(appendStr(append(b, 0x84), "found"), true)
	b = appendHandle(appendStr(b, "handle"), h)
	b = appendNumber(appendStr(b, "kv_offset"), f.Offset)
	return appendNumber(appendStr(b, "kv_length"), f.Length)
}

// AppendLookup appends the reply's payload to LOOKUP_KV or its batch, of n keys that next says one after the other.
func AppendLookup(b []byte, t Type, n int, next func() meta.MaruFound, handle func(meta.MaruFound) (Handle, bool)) []byte {
	if t == BatchLookup {
		b = appendArray(appendStr(append(b, 0x81), "entries"), n)
	}
	for range n {
		b = appendFound(b, next(), handle)
	}
	return b
}

// AppendBools appends the reply's payload to any other request for keys, of n keys that next says one after the other.
func AppendBools(b []byte, t Type, n int, next func() bool) []byte {
	switch t {
	case Register:
		return appendBool(appendStr(appendBool(appendStr(append(b, 0x82), "success"), true), "is_new"), next())
	case Exists, Pin:
		return appendBool(appendStr(append(b, 0x81), "exists"), next())
	case Delete, Unpin, ReturnAlloc:
		return appendBool(appendStr(append(b, 0x81), "success"), next())
	case BatchRegister:
		b = appendBool(appendStr(append(b, 0x82), "success"), true)
	default:
		b = append(b, 0x81)
	}
	b = appendArray(appendStr(b, "results"), n)
	for range n {
		b = appendBool(b, next())
	}
	return b
}

// AppendHandles appends the reply's payload to LIST_ALLOCATIONS.
func AppendHandles(b []byte, handles []Handle) []byte {
	b = appendBool(appendStr(append(b, 0x82), "success"), true)
	b = appendArray(appendStr(b, "allocations"), len(handles))
	for _, h := range handles {
		b = appendHandle(b, h)
	}
	return b
}

// Usage is what an instance has.
type Usage struct {
	Instance  string
	Regions   uint64
	Allocated uint64
	Used      meta.MaruSum
}

// AppendUsage appends the reply's payload to GET_USAGE. It fails, as Maru does, if a sum is no integer of msgpack.
func AppendUsage(b []byte, rows []Usage, total, free uint64) ([]byte, bool) {
	b = appendArray(appendStr(append(b, 0x83), "instances"), len(rows))
	for i := range rows {
		u := &rows[i]
		used, ok := u.Used.Int()
		if !ok {
			return b, false
		}
		b = appendStr(appendStr(append(b, 0x84), "instance_id"), u.Instance)
		b = appendUint(appendStr(b, "regions"), u.Regions)
		b = appendUint(appendStr(b, "allocated"), u.Allocated)
		b = appendNumber(appendStr(b, "used"), used)
	}
	b = appendUint(appendStr(b, "pool_total"), total)
	return appendUint(appendStr(b, "pool_free"), free), true
}

// Totals are what GET_STATS says of the index.
type Totals struct {
	Keys      uint64
	Size      meta.MaruSum
	Regions   uint64
	Allocated uint64
	Active    uint64 // instances that own a region
}

// AppendTotals appends the reply's payload to GET_STATS. It fails as AppendUsage does.
func AppendTotals(b []byte, t *Totals, s *Stats) ([]byte, bool) {
	size, ok := t.Size.Int()
	if !ok {
		return b, false
	}
	b = append(appendStr(append(b, 0x83), "kv_manager"), 0x82)
	b = appendUint(appendStr(b, "total_entries"), t.Keys)
	b = appendNumber(appendStr(b, "total_size"), size)
	b = append(appendStr(b, "allocation_manager"), 0x83)
	b = appendUint(appendStr(b, "num_allocations"), t.Regions)
	b = appendUint(appendStr(b, "total_allocated"), t.Allocated)
	b = appendUint(appendStr(b, "active_clients"), t.Active)
	return s.append(appendStr(b, "stats_manager")), true
}
