package sched

import (
	"math"
	"time"
)

// arrivals is how many requests are accepted a second, and the tokens of their prompts, as averages that fade.
type arrivals struct {
	n, tokens float64 // of about the last t_d
	ttft      float64 // the sum of theirs, in seconds
	at        time.Duration
}

func (a *arrivals) add(now, window time.Duration, tokens int, ttft time.Duration) {
	fade := math.Exp(-(now - a.at).Seconds() / window.Seconds())
	a.n, a.tokens, a.ttft, a.at = a.n*fade+1, a.tokens*fade+float64(tokens), a.ttft*fade+ttft.Seconds(), now
}

// overtaking is what is expected to be accepted from now on and prefilled by a time all the same: while a long prompt is
// computed, short ones come and are done before it.
func (a *arrivals) overtaking(now, by, window time.Duration) (n, tokens float64) {
	if a.n == 0 {
		return 0, 0
	}
	span := min(window.Seconds(), (by-now).Seconds()-a.ttft/a.n)
	if span <= 0 {
		return 0, 0
	}
	part := math.Exp(-(now-a.at).Seconds()/window.Seconds()) * span / window.Seconds()
	return a.n * part, a.tokens * part
}
