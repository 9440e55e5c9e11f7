package protocol

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"
)

// codec is one shape of one message.
type codec struct {
	name   string
	typ    Type
	make   func() any
	append func(m any, b []byte) []byte
	decode func(m any, b []byte) error
}

func oneShape[M any, P interface {
	*M
	Append(b []byte) []byte
	Decode(b []byte) error
}](t Type) codec {
	return codec{
		name:   strings.TrimPrefix(fmt.Sprintf("%T", *new(M)), "protocol."),
		typ:    t,
		make:   func() any { return P(new(M)) },
		append: func(m any, b []byte) []byte { return m.(P).Append(b) },
		decode: func(m any, b []byte) error { return m.(P).Decode(b) },
	}
}

func twoShapes[M any, P interface {
	*M
	AppendAs(b []byte, t Type) []byte
	DecodeAs(b []byte, t Type) error
}](types ...Type) []codec {
	all := make([]codec, 0, len(types))
	for _, t := range types {
		all = append(all, codec{
			name:   strings.TrimPrefix(fmt.Sprintf("%T", *new(M)), "protocol.") + "/" + t.String(),
			typ:    t,
			make:   func() any { return P(new(M)) },
			append: func(m any, b []byte) []byte { return m.(P).AppendAs(b, t) },
			decode: func(m any, b []byte) error { return m.(P).DecodeAs(b, t) },
		})
	}
	return all
}

// codecs are all shapes of all messages.
func codecs() []codec {
	all := []codec{
		oneShape[HandshakeRequest](TypeHandshake),
		oneShape[HandshakeReply](TypeHandshake),
		oneShape[GoodbyeRequest](TypeGoodbye),
		oneShape[AllocRequest](TypeRequestAlloc),
		oneShape[AllocReply](TypeRequestAlloc),
		oneShape[ReturnAllocRequest](TypeReturnAlloc),
		oneShape[SuccessReply](TypeReturnAlloc),
		oneShape[ListAllocationsRequest](TypeListAllocations),
		oneShape[ListAllocationsReply](TypeListAllocations),
		oneShape[LeasesRequest](TypeRenew),
		oneShape[LeasesReply](TypeRenew),
		oneShape[CancelRequest](TypeCancel),
		oneShape[CancelReply](TypeCancel),
		oneShape[PrefixMatchRequest](TypePrefixMatch),
		oneShape[PrefixMatchReply](TypePrefixMatch),
		oneShape[ClearRequest](TypeClear),
		oneShape[ListKeysRequest](TypeListKeys),
		oneShape[ListKeysReply](TypeListKeys),
		oneShape[RevokePush](TypeRevoke),
		oneShape[FreedPush](TypeFreed),
		oneShape[RevokeDoneRequest](TypeRevokeDone),
		oneShape[FreedAckRequest](TypeFreedAck),
		oneShape[ClearedPush](TypeCleared),
		oneShape[AttachRequest](TypeAttach),
		oneShape[AttachReply](TypeAttach),
		oneShape[TasksRequest](TypeTasks),
		oneShape[TasksReply](TypeTasks),
		oneShape[TaskDoneRequest](TypeTaskDone),
		oneShape[AccessRequest](TypeAccess),
		oneShape[AccessReply](TypeAccess),
		oneShape[GrantPush](TypeGrant),
		oneShape[GrantedRequest](TypeGranted),
		oneShape[FencePush](TypeFence),
		oneShape[FencedRequest](TypeFenced),
		oneShape[CopyRequest](TypeCopy),
		oneShape[CopyReply](TypeCopy),
		oneShape[TaskStatusRequest](TypeTaskStatus),
		oneShape[TaskStatusReply](TypeCancelTask),
		oneShape[TasksPush](TypeTasksPush),
		oneShape[PutNameRequest](TypePutName),
		oneShape[DeleteNameRequest](TypeDeleteName),
		oneShape[NameReply](TypePutName),
		oneShape[ListNamesRequest](TypeListNames),
		oneShape[ListNamesReply](TypeListNames),
		oneShape[WatchNamesRequest](TypeWatchNames),
		oneShape[WatchNamesReply](TypeWatchNames),
		oneShape[ListBlocksRequest](TypeListBlocks),
		oneShape[ListBlocksReply](TypeListBlocks),
		oneShape[HeartbeatReply](TypeHeartbeat),
		oneShape[ReportStatsRequest](TypeReportStats),
		oneShape[GetStatsReply](TypeGetStats),
		oneShape[GetUsageReply](TypeGetUsage),
	}
	all = append(all, twoShapes[RegisterRequest](TypeRegister, TypeBatchRegister)...)
	all = append(all, twoShapes[RegisterReply](TypeRegister, TypeBatchRegister)...)
	all = append(all, twoShapes[LookupRequest](TypeLookup, TypeBatchLookup)...)
	all = append(all, twoShapes[LookupReply](TypeLookup, TypeBatchLookup)...)
	keys := []Type{
		TypeExists, TypeDelete, TypePin, TypeUnpin,
		TypeBatchExists, TypeBatchDelete, TypeBatchPin, TypeBatchUnpin,
	}
	all = append(all, twoShapes[KeysRequest](keys...)...)
	return append(all, twoShapes[KeysReply](keys...)...)
}

// shortLists has the limits of those lists that are shorter than what fill makes.
var shortLists = map[string]int{"Near": MaxPlaces, "Avoid": MaxPlaces, "Rails": MaxPlaces, "NICs": MaxNICs, "Copies": MaxCopies}

// fill sets every field of v to a random value that is not its zero value.
func fill(rnd *rand.Rand, v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for name, field := range v.Fields() {
			fill(rnd, field)
			if limit := shortLists[name.Name]; limit > 0 {
				field.SetLen(min(field.Len(), limit))
			}
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(rnd, v.Elem())
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			v.SetBytes(randomKey(rnd))
			return
		}
		n := 1 + rnd.IntN(40)
		v.Set(reflect.MakeSlice(v.Type(), n, n))
		for i := range n {
			fill(rnd, v.Index(i))
		}
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint64:
		v.SetUint(rnd.Uint64()>>rnd.IntN(64) | 1)
	case reflect.Uint32:
		v.SetUint(1 + rnd.Uint64N(1<<32-1))
	case reflect.Uint16:
		v.SetUint(1 + rnd.Uint64N(1<<16-1))
	case reflect.Float64:
		v.SetFloat(rnd.ExpFloat64())
	case reflect.String:
		v.SetString(strings.Repeat("aé漢", 1+rnd.IntN(10)))
	default:
		panic("no random value for " + v.Type().String())
	}
}

func randomKey(rnd *rand.Rand) []byte {
	k := make([]byte, 1+rnd.IntN(300))
	mask := byte(0xff)
	if rnd.IntN(2) == 0 {
		mask = 0x7f
	}
	for i := range k {
		k[i] = byte(rnd.Uint32()) & mask
	}
	return k
}

// normalise makes of a random message one that its shape can carry.
func normalise(m any, t Type) {
	batch := t.Batch()
	switch m := m.(type) {
	case *RegisterRequest:
		if !batch {
			m.Entries = m.Entries[:1]
		}
	case *RegisterReply:
		if !batch {
			m.Results = m.Results[:1]
		}
		for i := range m.Results {
			if i%2 == 1 {
				m.Results[i] = RegisterResult{IsNew: true}
			} else {
				m.Results[i].IsNew = false
			}
		}
	case *LookupRequest:
		if !batch {
			m.Keys = m.Keys[:1]
		}
	case *LookupReply:
		if !batch {
			m.Results = m.Results[:1]
		}
		for i := range m.Results {
			if i%2 == 1 {
				m.Results[i] = LookupResult{}
			}
		}
	case *KeysRequest:
		if !batch {
			m.Keys = m.Keys[:1]
		}
	case *KeysReply:
		if !batch {
			m.Results = m.Results[:1]
		}
	case *ClearRequest:
		m.All, m.Prefix, m.Tenant = false, nil, ""
	case *GetStatsReply: // names are the keys of maps
		for i := range m.Clients {
			m.Clients[i].Client = fmt.Sprintf("client-%d", i)
			for k := range m.Clients[i].Operations {
				m.Clients[i].Operations[k].Operation = fmt.Sprintf("operation-%d", k)
			}
		}
	case *ListKeysRequest:
		m.Limit = m.Limit%MaxBatch + 1
	case *ListBlocksRequest:
		m.Limit = m.Limit%MaxBatch + 1
	case *ListBlocksReply:
		for i := range m.Blocks {
			m.Blocks[i].Context %= uint16(len(m.Contexts))
		}
	}
}

func TestRoundTrip(t *testing.T) {
	for _, c := range codecs() {
		t.Run(c.name, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(1, 2))
			pooled := c.make()
			for range 15 {
				m := c.make()
				fill(rnd, reflect.ValueOf(m).Elem())
				normalise(m, c.typ)
				prefix := []byte("before")
				b := c.append(m, prefix)
				require.Equal(t, "before", string(b[:len(prefix)]), "what was there before is kept")
				b = b[len(prefix):]

				fresh := c.make()
				require.NoError(t, c.decode(fresh, b))
				require.Equal(t, m, fresh, "all fields arrive")
				require.NoError(t, c.decode(pooled, b))
				require.Equal(t, m, pooled, "nothing of an earlier message is left in a struct that is used again")
				requireSameAsMsgpack(t, b)
			}
			require.NoError(t, resetTest(c, pooled))
		})
	}
}

// resetTest decodes the smallest message into a struct full of an earlier one, and says what was left of that.
func resetTest(c codec, used any) error {
	_ = c.decode(used, []byte{0x80}) // whether that is an error is for other tests
	v := reflect.ValueOf(used).Elem()
	for i := range v.NumField() {
		f, name := v.Field(i), v.Type().Field(i).Name
		single := name == "Entries" || name == "Results"
		if f.Kind() == reflect.Slice && (f.Len() == 0 || single) || f.IsZero() {
			continue
		}
		return fmt.Errorf("%s.%s = %v", c.name, name, f)
	}
	return nil
}

// requireSameAsMsgpack has another implementation read b and write what it read.
func requireSameAsMsgpack(t *testing.T, b []byte) {
	t.Helper()
	var m map[string]any
	require.NoError(t, msgpack.Unmarshal(b, &m))
	require.NotEmpty(t, m)
	var again bytes.Buffer
	enc := msgpack.NewEncoder(&again)
	enc.UseCompactInts(true)
	require.NoError(t, enc.Encode(m))
	require.Equal(t, again.Len(), len(b), "ints and lengths have their smallest form") //nolint:testifylint // b is long
}

func TestUnknownFieldsAndOrder(t *testing.T) {
	for _, c := range codecs() {
		t.Run(c.name, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(3, 4))
			m := c.make()
			fill(rnd, reflect.ValueOf(m).Elem())
			normalise(m, c.typ)
			for range 20 {
				b := shuffled(t, rnd, c.append(m, nil))
				got := c.make()
				require.NoError(t, c.decode(got, b))
				require.Equal(t, m, got)
			}
		})
	}
}

// shuffled returns the map b with its fields in another order and with fields that nobody knows, as a peer of another
// version or language may send it.
func shuffled(t *testing.T, rnd *rand.Rand, b []byte) []byte {
	t.Helper()
	d := dec{b: b}
	n := d.mapHead()
	fields := make([][]byte, 0, n+7)
	for range n {
		start := d.p
		d.name()
		d.skip()
		fields = append(fields, b[start:d.p])
	}
	require.NoError(t, d.end())
	for i, v := range []any{nil, -1, 1.5, "x", []byte{1}, map[string]any{"a": []any{1, map[int]int{1: 2}}}, []int{1}} {
		f, err := msgpack.Marshal(fmt.Sprintf("unknown_%d", i))
		require.NoError(t, err)
		val, err := msgpack.Marshal(v)
		require.NoError(t, err)
		fields = append(fields, append(f, val...))
	}
	rnd.Shuffle(len(fields), func(i, j int) { fields[i], fields[j] = fields[j], fields[i] })
	out := appendMapHead(nil, len(fields))
	for _, f := range fields {
		out = append(out, f...)
	}
	return out
}
