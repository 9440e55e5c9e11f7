package server

import (
	"encoding/hex"

	"larder/protocol"
)

// NamesReply answers GET /names.
type NamesReply struct {
	Names []NameView `json:"names"`
	Next  string     `json:"next_hex"` // pass its bytes as after for the next page; "" = the end
}

// NameView shows one name.
type NameView struct {
	Key      string `json:"key"`       // for people, as in KeyView
	KeyHex   string `json:"key_hex"`   // for programs
	Value    string `json:"value"`     // for people
	ValueHex string `json:"value_hex"` // for programs
	Created  uint64 `json:"created"`   // the revision that made it
	Modified uint64 `json:"modified"`  // the one that changed it last
	Session  uint64 `json:"session"`   // that it ends with; 0 = none
	Instance string `json:"instance"`  // of that session
}

func (r *adminCall) names() (any, error) {
	q := r.QueryArgs()
	prefix, after := q.Peek("prefix"), q.Peek("after")
	if max(len(prefix), len(after)) > protocol.MaxNameKeyBytes {
		return nil, badRequest("prefix, after: longer than the key of a name can be (%d bytes)", protocol.MaxNameKeyBytes)
	}
	limit, err := r.number("limit", defaultPage, protocol.MaxNames)
	if err != nil {
		return nil, err
	}
	list, more := r.admin.server.Names(string(q.Peek("tenant")), prefix, after, int(limit)) //nolint:gosec // at most MaxNames
	reply := NamesReply{Names: make([]NameView, len(list))}
	for i := range list {
		n := &list[i]
		reply.Names[i] = NameView{
			Key: shown(string(n.Key)), KeyHex: hex.EncodeToString(n.Key), Value: shown(string(n.Value)),
			ValueHex: hex.EncodeToString(n.Value), Created: n.Created, Modified: n.Modified, Session: n.Session, Instance: n.Instance,
		}
	}
	if more {
		reply.Next = reply.Names[len(list)-1].KeyHex
	}
	return reply, nil
}
