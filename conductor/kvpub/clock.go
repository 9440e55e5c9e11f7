package kvpub

import "time"

// Batches are stamped with the system's clock for whoever reads them; nothing here goes by that. Its timers end batches.

// seconds is the time since 1970.
func seconds() float64 {
	return float64(time.Now().UnixNano()) / 1e9 //nolint:forbidigo // as above
}

// timer fires once, after d.
func timer(d time.Duration) *time.Timer {
	return time.NewTimer(d) //nolint:forbidigo // as above
}

// every fires again and again.
func every(d time.Duration) *time.Ticker {
	return time.NewTicker(d) //nolint:forbidigo // as above
}
