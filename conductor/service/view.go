package service

import (
	"slices"
	"time"

	"larder/conductor/kvevent"
)

// globalContext is one scope in /global_view.
type globalContext struct {
	Tenant         string                     `json:"tenant_id"`
	Model          string                     `json:"model_name"`
	LoRA           string                     `json:"lora_name"`
	BlockSize      int                        `json:"block_size"`
	AdditionalSalt string                     `json:"additional_salt"`
	PrefixCount    int                        `json:"prefix_count"`
	ReplicaCount   int                        `json:"replica_count"`
	Orphans        int                        `json:"orphan_count"`
	Media          map[string]int             `json:"media"`
	DPRanks        []int                      `json:"dp_ranks"`
	Instances      map[string]*globalInstance `json:"instances"`
}

// globalInstance is one engine in a scope.
type globalInstance struct {
	Blocks     int            `json:"block_count"`
	Media      map[string]int `json:"media"`
	DPRanks    []int          `json:"dp_ranks"`
	Queries    uint64         `json:"hit_queries"`
	HitTokens  uint64         `json:"hit_tokens"`
	LastAccess *time.Time     `json:"last_access"`
}

// globalView tells what is known, by scope: of all, or of the tenant whose token came.
func (s *Service) globalView(r *call) (any, error) {
	views := s.x.View(r.tenant)
	contexts := make([]*globalContext, 0, len(views))
	for _, v := range views {
		c := &globalContext{
			Tenant: v.Tenant, Model: v.Model, LoRA: v.LoRA, BlockSize: v.BlockSize, AdditionalSalt: v.Salt,
			PrefixCount: v.Blocks, ReplicaCount: v.Replicas, Orphans: v.Orphans, Media: mediaOf(v.Media), DPRanks: []int{},
			Instances: map[string]*globalInstance{},
		}
		ranks := map[int]bool{}
		for _, i := range v.Instances {
			g := &globalInstance{
				Blocks: i.Blocks, Media: mediaOf(i.Media), DPRanks: append([]int{}, i.Ranks...), Queries: i.Queries, HitTokens: i.HitTokens,
			}
			if i.LastAccess != 0 {
				at := time.Unix(0, i.LastAccess).UTC()
				g.LastAccess = &at
			}
			for _, rank := range i.Ranks {
				ranks[rank] = true
			}
			c.Instances[i.Instance] = g
		}
		for rank := range ranks {
			c.DPRanks = append(c.DPRanks, rank)
		}
		slices.Sort(c.DPRanks)
		contexts = append(contexts, c)
	}
	return map[string]any{"context_count": len(contexts), "model_contexts": contexts}, nil
}

// mediaOf names the media that hold something.
func mediaOf(counts [kvevent.Media]int) map[string]int {
	m := map[string]int{}
	for medium, n := range counts {
		if n > 0 {
			m[kvevent.Medium(medium).String()] = n
		}
	}
	return m
}
