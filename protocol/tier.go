package protocol

import "slices"

// Tiers are the kinds of devices, the fastest first.
var Tiers = [...]string{"cxl", "dram", "ssd"}

// TierRank is a tier's place in Tiers, -1 for none of them.
func TierRank(tier string) int { return slices.Index(Tiers[:], tier) }
