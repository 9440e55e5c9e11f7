package service

import (
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
	return q.answer(s.x.Query(q.Scope, tokens, []byte(q.salt))), nil
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
	if q.salt != "" {
		return nil, bad("unsupported", "cache_salt",
			"hashes say nothing of a salt: fold it into the first one, or ask /query with token_ids")
	}
	name := "seq_hashes"
	if req.raw(name) == nil && req.raw("block_hash") != nil {
		name = "block_hash"
	}
	hashes, err := req.hashes(name)
	if err != nil {
		return nil, err
	}
	return q.answer(s.x.QueryHashes(q.Scope, hashes)), nil
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
