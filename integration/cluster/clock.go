package cluster

import "time"

// Tests of real processes run on the wall clock, since the processes do. It is read and waited for here only.

func now() time.Time { return time.Now() }

func since(t time.Time) time.Duration { return time.Since(t) }

func until(t time.Time) time.Duration { return time.Until(t) }

func sleep(d time.Duration) { time.Sleep(d) }

func after(d time.Duration) <-chan time.Time { return time.After(d) }
