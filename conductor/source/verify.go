package source

import (
	"fmt"
	"log/slog"

	"larder/conductor/enginehash"
	"larder/conductor/kvevent"
)

// maxChecked bounds the blocks of an event whose hashes are compared: a seed that differs shows in the first.
const maxChecked = 4

// checker compares the hashes that an engine sends with what they should be. It looks at blocks that begin a prompt: what came
// before others is known by 64 bits, and not by the digest that went into their hashes.
type checker struct {
	hash  *enginehash.Hasher
	named bool // it has been said that they differ
}

// newChecker makes the one that a service wants; nil if it wants none.
func newChecker(svc *Service) (*checker, error) {
	if svc.Hash == "" {
		return nil, nil //nolint:nilnil // as documented
	}
	h, err := enginehash.New(svc.Hash, svc.HashSeed)
	if err != nil {
		return nil, fmt.Errorf("source: %w", err)
	}
	return &checker{hash: h}, nil
}

// verify compares the hashes of an event, if that is wanted and can be done.
func (s *source) verify(e *kvevent.Event) {
	if s.check == nil || e.HasParent || len(e.Tokens) == 0 || e.Extras != nil {
		return // images' keys are hashed when they are read
	}
	n := min(len(e.Hashes), maxChecked)
	digests, err := s.check.hash.Blocks(e.Tokens[:n*e.BlockSize], e.BlockSize, enginehash.Text(string(e.LoRA), string(e.Salt), n))
	if err != nil {
		return // blocks that large are not hashed so
	}
	for i, d := range digests {
		if s.check.hash.Short(d) == e.Hashes[i] {
			s.counters.verified.Add(1)
			continue
		}
		s.counters.mismatched.Add(1)
		if !s.check.named {
			s.check.named = true
			s.m.cfg.Logger.Warn("an engine's hashes are not what its hash and hash_seed say: its PYTHONHASHSEED may differ",
				append(s.attrs(), slog.String("hash", s.Hash))...)
		}
	}
}
