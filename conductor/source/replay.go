package source

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"time"

	"larder/zmtp"
)

const (
	replayTries = 3                     // of one gap: an engine that drops messages of a replay drops others next time
	replayPause = 20 * time.Millisecond // between them
	lastReply   = math.MaxUint64        // the number in a reply that says that it was the last one
)

// What replays end with.
var (
	// errBegun says that what is known is of an engine before it was restarted.
	errBegun = errors.New("source: the engine has been restarted")
	// errReply says that a reply is none.
	errReply = errors.New("source: a reply to a replay has a number of 8 bytes and a payload as its last two parts")
)

// holeError says that batches are missing in a replay.
type holeError struct{ due, seq uint64 }

// Error implements error.
func (e *holeError) Error() string {
	return fmt.Sprintf("source: the engine has batch %d no more, where %d comes next", e.due, e.seq)
}

// catchUp asks for what came after what is known, or for all that the engine still has if nothing is. If it has lost some of that
// what is known is dropped, and begins with what it has. If it does not answer nothing changes: what is missed will be seen.
func (s *source) catchUp(ctx context.Context) {
	if s.ReplayEndpoint == "" || now().Before(s.noReplay) {
		return
	}
	s.set(Replaying)
	defer s.set(Live)
	err := s.replays(ctx)
	if err == nil || ctx.Err() != nil {
		return
	}
	s.trouble(err)
	s.noReplay = now().Add(s.m.cfg.MaxBackoff)
	if hole := (*holeError)(nil); errors.As(err, &hole) {
		s.lose(hole.seq - hole.due)
		_ = s.replay(ctx, hole.seq) // as far as it goes: where it ends early there is a gap, which will be seen
	}
}

// replays replays until nothing is missing.
func (s *source) replays(ctx context.Context) (err error) {
	for try := range replayTries {
		if try > 0 && pause(ctx, replayPause) != nil {
			return err
		}
		if err = s.replay(ctx, 0); err == nil {
			return nil
		}
		if errors.Is(err, errBegun) {
			s.begun()
		}
	}
	return err
}

// replay asks once for what came after what is known, or for all from a number on if nothing is, and applies it, in order and
// without gaps.
func (s *source) replay(ctx context.Context, from uint64) error {
	ctx, cancel := context.WithTimeout(ctx, s.m.cfg.ReplayTimeout)
	defer cancel()
	s.counters.replays.Add(1)
	c, err := zmtp.Dial(ctx, s.ReplayEndpoint, zmtp.Config{Type: zmtp.DEALER})
	if err != nil {
		return fmt.Errorf("source: replay: %w", err)
	}
	defer func() { _ = c.Close() }() // it returns nil
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	if s.pos.known && s.pos.next > 0 {
		from = s.pos.next - 1 // known already: if it is another one there, it is another engine
	}
	if err := c.Write(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		return fmt.Errorf("source: replay: %w", err)
	}
	s.move(func(p *position) { p.replayed = min(p.replayed, from) })
	for n := 0; ; n++ {
		m, err := c.Read()
		if err == nil {
			var last bool
			if last, err = s.reply(m, n == 0); last || err != nil {
				return err
			}
			continue
		}
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return fmt.Errorf("source: replay: %w", err)
	}
}

// reply applies one reply. It reports whether that was the last one.
func (s *source) reply(m [][]byte, first bool) (last bool, err error) {
	if len(m) < 2 || len(m) > 4 || len(m[len(m)-2]) != 8 {
		return false, errReply
	}
	seq, payload := binary.BigEndian.Uint64(m[len(m)-2]), m[len(m)-1]
	p := &s.pos
	if seq == lastReply && len(payload) == 0 {
		if first && p.known && p.next > 0 {
			return true, errBegun // the last batch that is known would be there
		}
		return true, nil
	}
	sum := sumOf(payload)
	switch {
	case !p.known || seq == p.next:
	case seq == p.next-1 && first && sum != p.sum:
		return false, errBegun
	case seq < p.next:
		return false, nil
	case s.covers(payload):
		s.forget(false)
	default:
		return false, &holeError{p.next, seq}
	}
	s.apply(seq, sum, payload, true)
	return false, nil
}

// lose drops what is known: batches were missed for good.
func (s *source) lose(batches uint64) {
	s.m.cfg.Logger.Warn("batches of events are lost: what was known of their source is dropped",
		append(s.attrs(), slog.Uint64("batches", batches))...)
	s.counters.stale.Add(1)
	s.counters.dropped.Add(batches)
	s.forget(true)
}

// begun begins a new epoch: the engine has been restarted, and has nothing of what it had.
func (s *source) begun() {
	s.m.cfg.Logger.Info("an engine has begun anew", s.attrs()...)
	s.counters.restarts.Add(1)
	s.forget(false)
	s.move((*position).begin)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.epoch++
}

// attrs say which source a line of the log is about.
func (s *source) attrs() []any {
	return []any{
		slog.String("instance_id", s.InstanceID), slog.String("tenant_id", s.TenantID), slog.Int("dp_rank", s.DPRank),
		slog.Int64("sequence", s.pos.sequence()),
	}
}
