package kvevent

// Kind is what an event says.
type Kind uint8

// The kinds of events.
const (
	Stored  Kind = 1 + iota // blocks are there now
	Removed                 // blocks are gone
	Cleared                 // all blocks are gone, of a medium if one is named
)

// String implements fmt.Stringer.
func (k Kind) String() string { return [...]string{"unknown", "stored", "removed", "cleared"}[k] }

// Medium is what a block lies on, as seen from the engine.
type Medium uint8

// The media, from the fastest to the slowest. What an engine does not name is its GPU.
const (
	GPU Medium = iota
	CPU
	Disk
	External // a pool, or what nobody knows
	Media    // how many there are
)

// String is the medium's name in answers.
func (m Medium) String() string { return [...]string{"GPU", "CPU", "DISK", "EXTERNAL", "ANY"}[m] }

// MaxGroups bounds the groups of a hybrid model's KV caches: more than any model has kinds of layers.
const MaxGroups = 64

// NoRank stands for an event that names no rank.
const NoRank = -1

// Event is one event. Its lists and texts lie in the batch or in the payload: they are valid until the next Decode.
type Event struct {
	Kind   Kind
	Medium Medium // Media for a Cleared that names none: all of them
	Rank   int    // of data parallelism, NoRank if the event names none: then its batch may

	// Hashes are the engine's names of the blocks, in the order of the prompt. Standard says that they are RFC 1527's rolling
	// hashes, and not an engine's own.
	Hashes    []uint64
	Parent    uint64 // the block before the first
	HasParent bool
	Standard  bool

	Tokens    []uint32 // of all blocks together; none if the engine does not tell
	BlockSize int      // tokens of a block; 0 if it is not told
	Group     int      // of a hybrid model's KV caches
	Window    int      // tokens of the group's sliding window, 0 for full attention

	LoRA   []byte   // the adapter's name; empty for none
	Salt   []byte   // that the request's user gave to keep to itself; it stands in the first block of a prompt alone
	Extras []uint64 // for each block what beside its tokens tells it from others, images say; 0 for nothing, nil if none has any

	// Of RFC 1527, empty elsewhere.
	Model, Tenant, Backend []byte
	ID                     uint64
	BaseBlock              int // of the first block in its prompt, -1 if it is not told
}

// Batch is what one message carries.
type Batch struct {
	Timestamp float64 // seconds since 1970, the publisher's
	Rank      int     // of data parallelism, NoRank if it is not told
	Events    []Event

	Bad     int   // events that could not be read, and were left out
	Unknown int   // events of a type that is not known, and were left out
	Reason  error // of the first bad one

	hashes []uint64
	extras []uint64
	tokens []uint32
}

// RankOf is the rank that an event is of.
func (b *Batch) RankOf(e *Event) int {
	if e.Rank != NoRank {
		return e.Rank
	}
	return b.Rank
}

func (b *Batch) reset() {
	b.Timestamp, b.Rank, b.Bad, b.Unknown, b.Reason = 0, NoRank, 0, 0, nil
	b.Events, b.hashes, b.extras, b.tokens = b.Events[:0], b.hashes[:0], b.extras[:0], b.tokens[:0]
}

func (b *Batch) bad(err error) {
	if b.Bad++; b.Reason == nil {
		b.Reason = err
	}
}
