// Package sched decides which instances serve a request, and which requests are not served: the scheduler of Mooncake's
// conductor, after the arXiv report (2407.00079, sections 4.2.5 and 4.2.6) and FAST'25. It is a library without a clock,
// goroutines or I/O: callers pass the time, chance is seeded, and the same calls get the same decisions.
//
// # Prefill
//
// The predicted time to the first token is
//
//	TTFT = T_queue + T_transfer + T_prefill
//
// where T_queue is the sum of the predicted times of what waits at an instance, less what has run of the first; T_transfer
// that of a prefix to be fetched, with what is under way on both ends' NICs; and T_prefill comes from a regression over the
// lengths n of the prompt and p of the prefix: a constant, n-p, and n^2-p^2. Config.LayerWise counts only the longer of
// loading and computing. The regressions start from known costs and learn from what is measured; see [Model].
//
// Config.Policy is one of those that the papers compare: random, load-balance, cache-aware and kvcache-centric, Algorithm 1.
// With this an instance whose own prefix is much shorter than the longest of all, by kvcache_balancing_threshold, fetches
// that one, so that the load is spread and hot prefixes come to be on many instances. An instance that has no prefix counts
// as much shorter. The papers give the algorithm in two forms, Config.Variant:
//
//   - fast25, the default: the prefix is fetched if best/own > threshold, and what is migrated is what was fetched. It is the
//     later form, and the one for which the results are published that are worth comparing with. Where it says to consider
//     the remote prefix, we do: computing the prefix is chosen if that is quicker than a transfer that has to wait for others,
//     which cannot make TTFT longer.
//   - arxiv: to the letter. The prefix is fetched unless best/own < threshold, so also at equality; the last step migrates
//     whenever the longest prefix exceeds the threshold, though the one is a length and the other a ratio
//     (Config.MigrateTokens puts a length in its place); and after section 4.2.5.2 an instance that computes the
//     prefix sooner than it would arrive does so, while the copy is made beside it.
//
// A prefix in the shared pool can be loaded by any instance, and competes with a peer's and with computing. A prefix that is
// expected to be evicted before it could be used is not counted on; see [Match].
//
// # Decoding
//
// A step of a decode instance takes a constant, for reading the weights, and something for each sequence and for each token of
// KV, all learned. The decode instance is the one with the least predicted TBT that has room. What a class's tbt_slo bounds
// is Config.TBTLimit: the mean of the longest 10% of the gaps, which is FAST'25's, or the arXiv report's 90th percentile; both
// are predicted from the step by ratios that are learned from reports, and [MeasureTBT] measures both. The limits of those
// that are being decoded already are kept, too.
//
// # Overload
//
// A request whose predicted TTFT breaks its limit is rejected. When decoding is looked at is Config.Overload: after prefill
// only (none, the baseline of the arXiv report), before prefill too (early), or as it is expected for when prefill will be
// through (predictive, the default, which avoids the swings of early rejection: that sees nothing of what is being prefilled).
// In all modes [Scheduler.AdmitDecode] looks again.
//
// The prediction is the report's system-level one: the mean TBT of all decode instances, with what will have been prefilled
// and without what will have been decoded for t_d. To it we add what is not here yet: while a long prompt is computed, short
// ones come and overtake it, as many as are accepted on average; without them long prompts are let in whose place is gone
// when they are prefilled. Where a request says how long its answer is, or its class's answers have
// been learned, that stands in for t_d, and the same is foreseen for single instances, sequence by sequence: the decode
// instance is then the one with the least load at that time, not now.
//
// A request has a priority, its own or its class's. Each priority leaves Config.Headroom of every limit to those above it
// that have asked lately: as load grows the lowest is rejected first, and as soon as the higher ones are silent it has
// everything. Requests that have been accepted are never displaced: to cancel them at an engine is not ours, and throws
// prefills away.
package sched
