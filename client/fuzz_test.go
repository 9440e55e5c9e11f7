package client

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/cxl"
	"larder/protocol"
	"larder/transfer"
)

// lie is a reply or push that a master sends in the place of its own.
type lie struct {
	typ     protocol.Type
	payload []byte
}

// tell runs a call of the client that makes a master tell the lie.
func (l *lie) tell(ctx context.Context, c *Client, f *fake) {
	key := [][]byte{[]byte("there")}
	switch l.typ {
	case protocol.TypeLookup:
		if v, err := c.View(ctx, key[0]); err == nil {
			_ = v.Close() // whether it counts is not the question
		}
		_, _ = c.Get(ctx, key[0], nil)
	case protocol.TypeBatchLookup:
		_, _ = c.GetBatch(ctx, key, nil)
	case protocol.TypeBatchExists:
		_, _ = c.ExistsBatch(ctx, key)
	case protocol.TypePrefixMatch:
		_, _, _ = c.PrefixMatch(ctx, PrefixContext{Model: "m"}, []uint64{1, 2}, 1, true)
	case protocol.TypeListKeys:
		_, _, _ = c.ListKeys(ctx, nil, 0, 10)
	case protocol.TypeListBlocks:
		_, _, _, _ = c.ListBlocks(ctx, 0, 10)
	case protocol.TypePutName:
		_, _ = c.PutName(ctx, "n", nil, Leased())
	case protocol.TypeListNames:
		_, _, _ = c.ListNames(ctx, "n")
	case protocol.TypeWatchNames:
		w := &nameWatch{c: c, known: map[string]knownName{"n": {1, 1}}, listed: true}
		_, _ = w.step(ctx)
	case protocol.TypeRevoke, protocol.TypeFreed:
		f.do(func() {
			for _, s := range f.sessions {
				s.push(l.typ, l.payload)
			}
		})
		_, _ = c.Get(ctx, key[0], nil)
	case protocol.TypeHandshake:
		c.link.Load().close(ErrClosed)
		_, _ = c.Get(ctx, key[0], nil)
	default:
		_, _ = c.Put(ctx, []byte("new"), value("new", 17*4096))
	}
}

// FuzzReply lets a master answer and push any bytes. The client returns an error or what the bytes say, it neither
// panics nor touches memory that is not mapped, and it can be closed.
func FuzzReply(f *testing.F) {
	types := []protocol.Type{
		protocol.TypeLookup, protocol.TypeBatchLookup, protocol.TypeRequestAlloc, protocol.TypeRegister,
		protocol.TypeBatchRegister, protocol.TypeBatchExists, protocol.TypePrefixMatch, protocol.TypeListKeys,
		protocol.TypeRevoke, protocol.TypeFreed, protocol.TypeHandshake, protocol.TypeCancel,
		protocol.TypePutName, protocol.TypeListNames, protocol.TypeWatchNames, protocol.TypeListBlocks,
	}
	at := func(t protocol.Type) (i uint8) {
		for int(i) < len(types) && types[i] != t {
			i++
		}
		return i
	}
	loc := protocol.Location{KVLength: 4096}
	loc.Device, loc.Generation, loc.RegionID, loc.Offset, loc.Length = 1, 77, 1, 1<<62, 1<<62
	look := protocol.LookupReply{Results: []protocol.LookupResult{{Found: true, Lease: 1, LeaseMS: 1 << 60, Location: loc}}}
	f.Add(at(protocol.TypeLookup), look.AppendAs(nil, protocol.TypeLookup))
	look.Results[0].Offset, look.Results[0].Length, look.Results[0].KVOffset = 2<<20, 4096, ^uint64(0)
	f.Add(at(protocol.TypeBatchLookup), look.AppendAs(nil, protocol.TypeBatchLookup))
	region := protocol.Region{Device: 1, Generation: 77, PageSize: 1, Epoch: 3}
	region.RegionID, region.Offset, region.Length = 9, 2<<20, 16*4096
	alloc := protocol.AllocReply{Success: true, Region: region}
	f.Add(at(protocol.TypeRequestAlloc), alloc.Append(nil))
	alloc.Region.PageSize, alloc.Region.Length = 4096, 1<<60
	alloc.Evicted = []protocol.Page{{Key: []byte("k"), RegionID: 9, KVOffset: 1 << 60, KVLength: 1 << 60, FreeAfterMS: 1 << 63}}
	f.Add(at(protocol.TypeRequestAlloc), alloc.Append(nil))
	freed := protocol.FreedPush{ID: 1, Pages: alloc.Evicted}
	f.Add(at(protocol.TypeFreed), freed.Append(nil))
	revoke := protocol.RevokePush{RegionID: 1, Epoch: 1 << 63}
	f.Add(at(protocol.TypeRevoke), revoke.Append(nil))
	f.Add(at(protocol.TypeHandshake), (&protocol.HandshakeReply{
		Success: true, Session: 1, Resumed: true, TTLMS: 1 << 62, Regions: []protocol.OwnedRegion{{Region: alloc.Region, Occupied: []uint64{1, ^uint64(0)}}},
		Devices: []protocol.Device{{ID: 1, Path: "/dev/null", Size: 1}},
	}).Append(nil))
	names := []protocol.NameInfo{{Key: []byte("n"), Created: 1, Modified: 1}}
	f.Add(at(protocol.TypeListNames), (&protocol.ListNamesReply{Names: names, More: true}).Append(nil))
	f.Add(at(protocol.TypeWatchNames), (&protocol.WatchNamesReply{Changes: names}).Append(nil))
	for i := range types {
		f.Add(uint8(i), []byte{0x80})
	}
	fk := newFake(f, 64*16*4096, 1)
	var told atomic.Pointer[lie]
	fk.before = func(cn *fakeConn, h protocol.Header, _ []byte) *protocol.Error {
		l := told.Load()
		if l == nil || h.Type != l.typ {
			return nil
		}
		cn.write(h.Type.Reply(), h.Sequence, l.payload)
		return errSilent
	}
	n := 0
	f.Fuzz(func(t *testing.T, which uint8, payload []byte) {
		told.Store(nil)
		fk.do(func() {
			fk.t, fk.next = t, cxl.HeaderSpan
			clear(fk.regions) // of clients before, which said goodbye
		})
		n++
		c, err := Open(t.Context(), Config{
			Addrs: fk.addrs(), Instance: fmt.Sprint("fuzz-", n), PageSize: 4096, RegionSize: 16 * 4096,
			CallTimeout: 20 * time.Millisecond, Timeout: 10 * time.Second, // the calls below have less
		})
		require.NoError(t, err)
		l := &lie{types[int(which)%len(types)], payload}
		told.Store(l)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		l.tell(ctx, c, fk)
		cancel()
		told.Store(nil)
		ctx, cancel = context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_ = c.Close(ctx) // it may report what could not be given back
		require.NoError(t, ctx.Err(), "it ends")
	})
}

// FuzzDescriptor reads any value as the descriptor of a segment that somebody has published.
func FuzzDescriptor(f *testing.F) {
	d := transfer.Descriptor{Engine: "e", Name: "n", Rails: []string{"h:1"}, Buffers: []transfer.BufferInfo{{Name: "b", Bytes: 7}}}
	for range 2 {
		value, err := packDescriptor(d)
		require.NoError(f, err)
		f.Add(value)
		for range 2000 {
			d.Buffers = append(d.Buffers, d.Buffers[0])
		}
	}
	f.Fuzz(func(t *testing.T, value []byte) {
		d, err := unpackDescriptor(value)
		if err != nil {
			return
		}
		again, err := packDescriptor(d)
		if err != nil {
			return // more than a name holds
		}
		same, err := unpackDescriptor(again)
		require.NoError(t, err)
		require.Equal(t, d, same)
	})
}
