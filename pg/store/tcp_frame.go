package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/vmihailenco/msgpack/v5"
)

// The protocol between Dial and Serve. A frame is the length of its body, four bytes, little-endian, and the body: a request or a
// reply in msgpack, a map by name. A client begins with a hello. Replies come in the order of the requests, news of watches in
// between; each has the id of the request that it is about. Fields that are not known are passed over.

const (
	// wireVersion is what a hello says; another one is refused.
	wireVersion = 1
	// maxRequest bounds a request: a value, a key, and the names of the fields.
	maxRequest = MaxValueBytes + MaxKeyBytes + 1024
	// maxReply bounds a reply: a page.
	maxReply = 2 * pageBytes
	// pageBytes is about how much of entries is in one reply. A single one is always less.
	pageBytes = 1 << 20
)

// What a request may ask for.
const (
	opHello  = "hello"
	opBeat   = "beat"
	opBye    = "bye" // ends the lease; the server hangs up when it has
	opGet    = "get"
	opPut    = "put"
	opDelete = "delete"
	opList   = "list"
	opWatch  = "watch"  // answered as list is; what has changed since then comes by itself
	opMore   = "more"   // the next page for the list or watch of that id: a client asks, so that it can renew its lease in between
	opForget = "forget" // the list or watch of that id; there is no answer
)

type request struct {
	ID       uint64 `msgpack:"id"`
	Op       string `msgpack:"op"`
	Key      string `msgpack:"key,omitempty"` // or the prefix
	Value    []byte `msgpack:"value,omitempty"`
	Check    bool   `msgpack:"check,omitempty"`
	Revision uint64 `msgpack:"revision,omitempty"`
	Lease    bool   `msgpack:"lease,omitempty"`
	LeaseMS  uint64 `msgpack:"lease_ms,omitempty"` // of a hello
	Version  int    `msgpack:"version,omitempty"`  // of a hello
}

// Codes of replies, for errors that callers tell apart.
const (
	codeNotFound = "not_found"
	codeConflict = "conflict"
	codeLimit    = "limit"
	codeInvalid  = "invalid"
	codeOther    = "error"
)

var wireErrors = map[string]error{codeNotFound: ErrNotFound, codeConflict: ErrConflict, codeLimit: ErrLimit, codeInvalid: ErrInvalid}

type reply struct {
	ID       uint64  `msgpack:"id"`
	Code     string  `msgpack:"code,omitempty"`    // empty: success
	Text     string  `msgpack:"text,omitempty"`    // with a code: for people
	Entry    *Entry  `msgpack:"entry,omitempty"`   // of get and put, and of a conflict
	Entries  entries `msgpack:"entries,omitempty"` // of list and watch: a page
	More     bool    `msgpack:"more,omitempty"`    // there is another page
	Revision uint64  `msgpack:"revision,omitempty"`
	Changes  changes `msgpack:"changes,omitempty"` // of watch
}

// entries and changes are lists that are decoded one by one: the library would make room for as many as a frame says that it has.
type (
	entries []Entry
	changes []Change
)

// DecodeMsgpack implements [msgpack.CustomDecoder].
func (l *entries) DecodeMsgpack(d *msgpack.Decoder) (err error) {
	*l, err = decodeList[Entry](d)
	return err
}

// DecodeMsgpack implements [msgpack.CustomDecoder].
func (l *changes) DecodeMsgpack(d *msgpack.Decoder) (err error) {
	*l, err = decodeList[Change](d)
	return err
}

func decodeList[T any](d *msgpack.Decoder) (list []T, err error) {
	n, err := d.DecodeArrayLen()
	for ; n > 0 && err == nil; n-- {
		var x T
		if err = d.Decode(&x); err == nil {
			list = append(list, x)
		}
	}
	return list, err //nolint:wrapcheck // readFrame does
}

// err is the error that the reply tells of, nil if none.
func (r *reply) err() error {
	if r.Code == "" {
		return nil
	}
	if e := wireErrors[r.Code]; e != nil {
		return fmt.Errorf("%w: %s", e, r.Text)
	}
	return fmt.Errorf("the server says: %s (%s)", r.Text, r.Code)
}

// refuse has the reply tell of an error, if it is one.
func (r *reply) refuse(err error) {
	if err == nil {
		return
	}
	r.Code, r.Text = codeOther, strings.ToValidUTF8(err.Error(), "?")
	for code, e := range wireErrors {
		if errors.Is(err, e) {
			r.Code = code
			r.Text = strings.TrimPrefix(r.Text, e.Error()+": ")
		}
	}
}

// appendFrame appends a message.
func appendFrame(b []byte, message any) ([]byte, error) {
	body, err := msgpack.Marshal(message)
	if err != nil {
		return nil, err //nolint:wrapcheck // does not happen
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(len(body))) //nolint:gosec // bounded by those who make messages
	return append(b, body...), nil
}

// readFrame reads a message, whose body has at most limit bytes, by way of buf. Memory is taken as the body arrives.
func readFrame(r io.Reader, limit uint32, buf *bytes.Buffer, message any) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err //nolint:wrapcheck // the connection's
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n > limit {
		return fmt.Errorf("a frame of %d bytes, of at most %d: this is no store, or of another release", n, limit)
	}
	buf.Reset()
	if _, err := io.CopyN(buf, r, int64(n)); err != nil {
		return err //nolint:wrapcheck // the connection's
	}
	if err := msgpack.Unmarshal(buf.Bytes(), message); err != nil {
		return fmt.Errorf("a frame that cannot be read: %w", err)
	}
	return nil
}

// frameBytes is no less than what an entry takes in a frame.
func frameBytes(e *Entry) int { return len(e.Key) + len(e.Value) + 128 }

// page returns the first entries of list that fit a reply, and the rest.
func page(list []Entry) (first, rest []Entry) {
	size, n := 0, 0
	for n < len(list) && (n == 0 || size+frameBytes(&list[n]) <= pageBytes) {
		size += frameBytes(&list[n])
		n++
	}
	return list[:n], list[n:]
}
