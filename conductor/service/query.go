package service

import (
	"cmp"
	"slices"
	"strconv"

	"larder/conductor"
	"larder/conductor/kvevent"
)

// maxBlockSize bounds a block's tokens: no engine has larger ones.
const maxBlockSize = 1 << 20

// hit is how much of a prompt one engine holds, in tokens.
type hit struct {
	Longest  int            `json:"longest_matched"`
	GPU      int            `json:"GPU"`
	DP       map[string]int `json:"DP"`
	CPU      int            `json:"CPU"`
	Disk     int            `json:"DISK"`
	External int            `json:"EXTERNAL,omitempty"`
}

// answer is hits by tenant and instance.
type answer map[string]map[string]hit

// scoped is a query's scope.
type scoped struct {
	conductor.Scope

	salt     string // the request's own
	instance string // "" for all
}

// scopeOf reads what a query is about.
func (r *call) scopeOf(req *request) (q scoped, err error) {
	if err = req.need("model"); err != nil {
		return q, err
	}
	if q.Tenant, err = r.tenantOf(req); err != nil {
		return q, err
	}
	err = req.texts(map[string]*string{
		"model": &q.Model, "lora_name": &q.LoRA, "cache_salt": &q.salt, "additionalsalt": &q.Salt, "instance_id": &q.instance,
	})
	if err != nil {
		return q, err
	}
	if q.Model == "" {
		return q, bad("invalid_value", "model", "model is empty")
	}
	q.BlockSize, err = req.number("block_size", 1, maxBlockSize, 0)
	return q, err
}

// query tells how much of a prompt each engine holds.
func (s *Service) query(r *call) (any, error) {
	req, err := r.cut("model", "token_ids", "block_size", "lora_name", "lora_id", "tenant_id", "instance_id", "cache_salt",
		"additionalsalt")
	if err != nil {
		return nil, err
	}
	if err := req.need("model", "token_ids", "block_size"); err != nil {
		return nil, err
	}
	q, err := r.scopeOf(req)
	if err != nil {
		return nil, err
	}
	tokens, err := req.tokens()
	if err != nil {
		return nil, err
	}
	return q.answer(s.match(&q, tokens)), nil
}

// queryByHash is query for a prompt whose blocks' hashes are known: RFC 1527's with the conductor's seed, or an engine's own.
func (s *Service) queryByHash(r *call) (any, error) {
	req, err := r.cut("model", "seq_hashes", "block_hash", "block_size", "lora_name", "lora_id", "tenant_id", "instance_id",
		"cache_salt", "additionalsalt", "medium")
	if err != nil {
		return nil, err
	}
	if err := req.need("model", "block_size"); err != nil {
		return nil, err
	}
	q, err := r.scopeOf(req)
	if err != nil {
		return nil, err
	}
	name := "seq_hashes"
	if req.raw(name) == nil && req.raw("block_hash") != nil {
		name = "block_hash"
	}
	hashes, err := req.hashes(name)
	if err != nil {
		return nil, err
	}
	return q.answer(s.matchHashes(&q, hashes)), nil
}

// match looks a prompt up. A request's salt is part of the first block's name where an engine tells it with the block, as vLLM
// does, and of the scope where it stands for all of an engine, or where a pool's master tells it: both count.
func (s *Service) match(q *scoped, tokens []uint32) []conductor.Match {
	matches := s.x.Query(q.Scope, tokens, []byte(q.salt))
	if q.salt == "" || q.Salt != "" {
		return matches
	}
	whole := q.Scope
	whole.Salt = q.salt
	return longer(matches, s.x.Query(whole, tokens, nil))
}

// longer has each instance once, with what it holds more of.
func longer(a, b []conductor.Match) []conductor.Match {
	for i := range b {
		at := slices.IndexFunc(a, func(m conductor.Match) bool { return m.Instance == b[i].Instance })
		switch {
		case at < 0:
			a = append(a, b[i])
		case b[i].Longest > a[at].Longest:
			a[at] = b[i]
		}
	}
	return a
}

// matchHashes looks blocks up by their hashes. These tell nothing of a salt but an engine's own: with one, blocks count that lie
// within its scope.
func (s *Service) matchHashes(q *scoped, hashes []uint64) []conductor.Match {
	scope := q.Scope
	scope.Salt = cmp.Or(scope.Salt, q.salt)
	return s.x.QueryHashes(scope, hashes)
}

// answer is what matches say.
func (q *scoped) answer(matches []conductor.Match) answer {
	hits := map[string]hit{}
	for i := range matches {
		m := &matches[i]
		if q.instance != "" && m.Instance != q.instance {
			continue
		}
		h := hit{
			Longest: m.Longest, GPU: m.Media[kvevent.GPU], CPU: m.Media[kvevent.CPU], Disk: m.Media[kvevent.Disk],
			External: m.Media[kvevent.External], DP: map[string]int{},
		}
		for _, rank := range m.Ranks {
			h.DP[strconv.Itoa(rank.Rank)] = rank.Tokens
		}
		hits[m.Instance] = h
	}
	return answer{q.Tenant: hits}
}
