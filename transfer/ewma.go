package transfer

import "sync/atomic"

// atomicEWMA is an exponentially weighted moving average of positive numbers, of which the last counts an eighth. It is 0
// before the first. Of two that come at once one may be lost.
type atomicEWMA struct{ v atomic.Int64 }

func (a *atomicEWMA) load() int64 { return a.v.Load() }

func (a *atomicEWMA) add(n int64) {
	n = max(n, 1)
	old := a.v.Load()
	if old == 0 {
		a.v.Store(n)
		return
	}
	a.v.Store(max(old+(n-old)/8, 1))
}
