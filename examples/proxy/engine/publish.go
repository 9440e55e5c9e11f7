package engine

import (
	"larder/conductor/kvevent"
)

// publish tells subscribers of what has changed, in one batch, as vLLM does after each step.
func (e *Engine) publish(events ...kvevent.Event) {
	if err := e.events.Publish(events...); err == nil { // else it has been closed: nobody listens any more
		e.events.Flush()
	}
}

// stored says that the last blocks of a prompt are there now. names and tokens are those of all its blocks.
func stored(names []name, added int, tokens []uint32, size int, s scope) kvevent.Event {
	first := len(names) - added
	v := kvevent.Event{
		Kind: kvevent.Stored, Rank: kvevent.NoRank, LoRA: []byte(s.lora), BlockSize: size,
		Hashes: hashes(names[first:]), Tokens: tokens[first*size:],
	}
	if v.HasParent = first > 0; v.HasParent {
		v.Parent = uint64(names[first-1])
	} else {
		v.Salt = []byte(s.salt)
	}
	return v
}

// removed says that blocks are gone.
func removed(names []name) kvevent.Event {
	return kvevent.Event{Kind: kvevent.Removed, Rank: kvevent.NoRank, Hashes: hashes(names)}
}

// cleared says that all blocks are gone.
func cleared() kvevent.Event {
	return kvevent.Event{Kind: kvevent.Cleared, Rank: kvevent.NoRank, Medium: kvevent.Media}
}

func hashes(names []name) []uint64 {
	list := make([]uint64, len(names))
	for i, n := range names {
		list[i] = uint64(n)
	}
	return list
}
