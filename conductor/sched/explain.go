package sched

import (
	"fmt"
	"time"
)

// Explain says in a sentence why a request was rejected, and what may help; it is empty for an accepted one.
func (d *Decision) Explain() string {
	switch d.Reason {
	case Accepted:
		return ""
	case ReasonTTFT:
		return fmt.Sprintf("the first token would come after %v (queue %v, transfer %v, prefill %v), the limit is %v: try again in %v",
			round(d.TTFT), round(d.Queue), round(d.Transfer), round(d.Execution), round(d.Limits.TTFTSLO), round(d.Wait()))
	case ReasonTBT:
		return fmt.Sprintf("tokens would come %v apart on every decode instance, the limit is %v: try again later",
			round(d.TBT), round(d.Limits.TBTSLO))
	case ReasonLoad:
		return fmt.Sprintf("when it is prefilled, in %v, tokens will come %v apart, the limit is %v: try again later",
			round(d.TTFT), round(d.TBT), round(d.Limits.TBTSLO))
	default:
		return d.Reason.Explain()
	}
}

// Explain says in a sentence what a reason means, for one without a decision, as AdmitDecode gives it.
func (r Reason) Explain() string {
	switch r {
	case Accepted:
		return ""
	case ReasonTTFT:
		return "the first token would come later than the limit: try again later"
	case ReasonTBT:
		return "tokens would come further apart than the limit: try again later"
	case ReasonLoad:
		return "by the time that it is prefilled, tokens would come further apart than the limit: try again later"
	case ReasonFull:
		return "no decode instance has room for it: try again later"
	case ReasonNoPrefill:
		return "no prefill instance is registered: register one, or try again later"
	case ReasonNoDecode:
		return "no decode instance is registered: register one, or try again later"
	case ReasonBusy:
		return "as many requests are being served as may be, max_requests: try again later"
	case ReasonTooLong:
		return "its prompt is longer than the KV memory of any decode instance: shorten it"
	case ReasonUnknown:
		return "the request is not known, or has not been heard of for request_ttl: schedule it again"
	case ReasonInvalid:
		return "a request has an input of 1 to 1073741824 tokens and no negative sizes: correct it"
	}
	return string(r)
}

// Wait is how long to wait before trying again may help: what the first token would have come too late by; a second for the
// other reasons, in which some sequences end.
func (d *Decision) Wait() time.Duration {
	if d.Reason == ReasonTTFT {
		return max(time.Second, d.TTFT-d.Limits.TTFTSLO)
	}
	return time.Second
}

// round is a time for people.
func round(t time.Duration) time.Duration { return t.Round(time.Millisecond) }
