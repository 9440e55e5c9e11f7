package shm

import (
	"errors"
	"os"
	"runtime"
	"sync/atomic"
	"time"
)

// Offsets in a bell's page.
const (
	bellTurn     = 0     // uint32, the futex: another number since somebody rang
	bellSleepers = apart // uint32: how many sleep, or are about to
)

// longestSleep bounds how long a sleeper relies on being woken: a peer that has gone mad, or was killed between making
// something visible and ringing, costs so much time and no more.
const longestSleep = 100 * time.Millisecond

// Ringer is what an end of a ring tells its peer by that there is something new: a [Bell], or whatever wakes a goroutine.
// Ring must not block.
type Ringer interface{ Ring() }

// Bell is what the goroutines of one process sleep on, and what other processes wake them by. A process has one, whatever
// it waits for: those that wake look whether it was for them.
//
// No wake-up is lost. A sleeper counts itself first and then looks once more at what it waits for; who rings has made
// that visible first and then looks at the count. Atomic operations of all processes have one order, so one of the two sees the
// other (Dekker's argument). All methods may be called concurrently, Close too.
type Bell struct {
	page atomic.Pointer[bellPage] // nil when closed
	f    *os.File
	vain atomic.Int32 // how often spinning was in vain of late: see spin
	wait atomic.Uint32

	longest time.Duration // longestSleep
}

// bellPage is a bell's memory. It is unmapped when nobody has it any more, which the garbage collector finds out: a
// peer's bell is closed while others may be ringing it.
type bellPage struct{ b []byte }

// NewBell makes a bell for this process to wait on.
func NewBell() (*Bell, error) {
	f, err := create("larder-bell", os.Getpagesize())
	if err != nil {
		return nil, err
	}
	b, err := mapBell(f)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	b.f = f
	return b, nil
}

// OpenBell opens another process's bell, to ring it. The file may be closed afterwards.
func OpenBell(f *os.File) (*Bell, error) {
	if err := expect(f, os.Getpagesize(), "bell"); err != nil {
		return nil, err
	}
	return mapBell(f)
}

func mapBell(f *os.File) (*Bell, error) {
	mem, err := mapFile(f, os.Getpagesize(), true)
	if err != nil {
		return nil, err
	}
	b, page := &Bell{longest: longestSleep}, &bellPage{mem}
	runtime.AddCleanup(page, func(mem []byte) { _ = unmap(mem) }, mem) // it is mapped
	b.page.Store(page)
	return b, nil
}

// File is what another process opens, nil of a bell that was opened itself. It stays the bell's.
func (b *Bell) File() *os.File { return b.f }

// Ring wakes those that sleep. If nobody does it costs a load; a system call otherwise.
func (b *Bell) Ring() {
	page := b.page.Load()
	if page == nil {
		return
	}
	if word32(page.b, bellSleepers).Load() != 0 {
		word32(page.b, bellTurn).Add(1)
		futexWake(page.b, bellTurn)
	}
	runtime.KeepAlive(page)
}

// Wait returns true once ready does, or false when limit is over. It calls ready without sleeping for as long as spin at
// most, less where that was in vain before, then whenever the bell has rung, and at least every
// 100 ms. What makes ready true must be visible, by an atomic store, before the bell is rung. On a bell that is closed it
// returns what ready says.
func (b *Bell) Wait(ready func() bool, spin, limit time.Duration) bool {
	if ready() {
		return true
	}
	start := moment()
	if spin > 0 && b.spin(ready, start, min(spin, limit)) {
		return true
	}
	for {
		left := limit - since(start)
		page := b.page.Load()
		if left <= 0 || page == nil {
			return ready()
		}
		if page.sleep(ready, min(left, b.longest)) {
			return true
		}
	}
}

// Spinning helps if the peer runs on another core meanwhile: between idle cores a round trip takes 0.4 us by it, and 80 us by
// sleeping, most of which a halted core needs to wake up. If the peer waits for this very core, spinning only keeps it from
// running: 105 us instead of 4 by sleeping at once. Which of the two it is the last waits tell: each that spins in vain halves the
// time of the next ones, each that does not doubles it again, and every 64th tries all of it.
const (
	mostHalvings = 8 // of 50 us: 0.2 us are left
	tryEvery     = 64
	looks        = 64 // between readings of the clock, which cost as much as several

	// Who is to make it ready may be a goroutine of this process. But the scheduler wakes a thread for it, microseconds that a spin
	// which is short of late should not cost.
	yieldAfter = 2 * time.Microsecond
)

// spin calls ready until it says yes or the time is over.
func (b *Bell) spin(ready func() bool, start time.Time, d time.Duration) bool {
	vain := b.vain.Load()
	if b.wait.Add(1)%tryEvery != 0 {
		d >>= vain
	}
	for spent := time.Duration(0); spent < d; spent = since(start) {
		if spent > yieldAfter {
			runtime.Gosched()
		}
		for range looks {
			if ready() {
				b.vain.Store(max(vain-1, 0))
				return true
			}
		}
	}
	b.vain.Store(min(vain+1, mostHalvings))
	return false
}

// sleep sleeps until the bell rings, or d is over, unless ready says yes before.
func (p *bellPage) sleep(ready func() bool, d time.Duration) bool {
	defer runtime.KeepAlive(p)
	sleepers := word32(p.b, bellSleepers)
	sleepers.Add(1)
	defer sleepers.Add(^uint32(0))
	turn := word32(p.b, bellTurn).Load()
	if ready() {
		return true
	}
	futexWait(p.b, bellTurn, turn, d)
	return ready()
}

// Close wakes those that sleep and lets go of the memory.
func (b *Bell) Close() error {
	b.Ring()
	if b.page.Swap(nil) == nil || b.f == nil {
		return nil
	}
	return b.f.Close()
}
