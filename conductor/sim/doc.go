// Package sim simulates clusters that serve an LLM, on virtual time: the scheduler and the prefix index that it drives are
// the real ones, what engines and networks do is worked out from a cost model.
package sim
