package kvpub

import (
	"encoding/binary"
	"fmt"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/conductor/kvevent"
	"larder/zmtp"
)

// publisher publishes at a free port until the test ends, with replay.
func publisher(tb testing.TB, cfg Config) *Publisher {
	tb.Helper()
	cfg.Listen, cfg.Replay = "tcp://127.0.0.1:*", "tcp://127.0.0.1:*"
	p, err := New(tb.Context(), cfg)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, p.Close()) })
	return p
}

// dial connects until the test ends.
func dial(tb testing.TB, endpoint string, kind zmtp.SocketType) *zmtp.Conn {
	tb.Helper()
	c, err := zmtp.Dial(tb.Context(), endpoint, zmtp.Config{Type: kind})
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, c.Close()) })
	return c
}

// subscriber reads what a publisher publishes, of all topics.
type subscriber struct {
	tb testing.TB
	c  *zmtp.Conn
	b  kvevent.Batch
}

// subscribe returns once the publisher has taken note, and all that it has published to find that out was read.
func subscribe(tb testing.TB, p *Publisher) *subscriber {
	tb.Helper()
	s := &subscriber{tb: tb, c: dial(tb, p.Endpoint(), zmtp.SUB)}
	require.NoError(tb, s.c.Subscribe(""))
	heard := make(chan uint64)
	go func() {
		for {
			m, err := s.c.Read()
			if err != nil {
				return
			}
			sequence := binary.BigEndian.Uint64(m[1])
			heard <- sequence
			if sequence+1 == p.Stats().Sequence {
				close(heard)
				return
			}
		}
	}()
	for there := false; ; {
		select {
		case _, more := <-heard:
			if there = true; !more {
				return s
			}
		case <-time.After(5 * time.Millisecond):
			if !there {
				p.Skip()
			}
		}
	}
}

// next is the next batch, which is of a topic, with its sequence.
func (s *subscriber) next(topic string) (sequence uint64, b *kvevent.Batch) {
	s.tb.Helper()
	m, err := s.c.Read()
	require.NoError(s.tb, err)
	require.Len(s.tb, m, 3)
	require.Equal(s.tb, topic, string(m[0]))
	require.NoError(s.tb, s.b.Decode(m[2]))
	require.NoError(s.tb, s.b.Reason)
	return binary.BigEndian.Uint64(m[1]), &s.b
}

// removed is an event that one block is gone.
func removed(hash uint64) kvevent.Event {
	return kvevent.Event{Kind: kvevent.Removed, Rank: kvevent.NoRank, Hashes: []uint64{hash}, BaseBlock: -1}
}

// TestEventsShareBatches: events go out together after the interval, or when they are enough or many bytes.
func TestEventsShareBatches(t *testing.T) {
	for _, c := range []struct {
		name    string
		cfg     Config
		publish int
		batches []int
	}{
		{"interval", Config{Interval: 20 * time.Millisecond}, 5, []int{5}},
		{"events", Config{BatchEvents: 2, Interval: time.Hour}, 6, []int{2, 2, 2}},
		{"bytes", Config{BatchBytes: 30, Interval: time.Hour}, 4, []int{1, 1, 1, 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.cfg.Topic, c.cfg.Rank = "kv@a@m", 3
			p := publisher(t, c.cfg)
			s := subscribe(t, p)
			first, hash := p.Stats().Sequence, uint64(0)
			for i := range c.publish {
				require.NoError(t, p.Publish(removed(uint64(i))))
			}
			for i, n := range c.batches {
				sequence, b := s.next("kv@a@m")
				require.Equal(t, first+uint64(i), sequence)
				require.Equal(t, 3, b.Rank)
				require.InDelta(t, seconds(), b.Timestamp, 60)
				require.Len(t, b.Events, n)
				for k := range b.Events {
					require.Equal(t, []uint64{hash}, b.Events[k].Hashes)
					hash++
				}
			}
		})
	}
}

// TestBadEventsCostThemselves: one that cannot be encoded is left out, and named.
func TestBadEventsCostThemselves(t *testing.T) {
	p := publisher(t, Config{})
	s := subscribe(t, p)
	bad := removed(2)
	bad.Medium = kvevent.Media
	require.ErrorIs(t, p.Publish(removed(1), bad, removed(3)), kvevent.ErrEvent)
	_, b := s.next("")
	require.Len(t, b.Events, 2)
	require.EqualValues(t, 1, p.Stats().Refused)
}

// TestSkipShows: what is missing for good is a hole in the sequence that is seen at once.
func TestSkipShows(t *testing.T) {
	p := publisher(t, Config{Interval: time.Hour})
	s := subscribe(t, p)
	first := p.Stats().Sequence
	require.NoError(t, p.Publish(removed(1)))
	p.Skip()
	sequence, b := s.next("")
	require.Equal(t, first, sequence)
	require.Len(t, b.Events, 1)
	sequence, b = s.next("")
	require.Equal(t, first+2, sequence)
	require.Empty(t, b.Events)
}

// TestBeat: without events there are batches that say that the publisher is there, and they have sequences, too.
func TestBeat(t *testing.T) {
	p := publisher(t, Config{Beat: 5 * time.Millisecond})
	s := subscribe(t, p)
	last, _ := s.next("")
	for range 3 {
		sequence, b := s.next("")
		require.Equal(t, last+1, sequence)
		require.Empty(t, b.Events)
		last = sequence
	}
}

// TestNoBeat: whoever cannot vouch for what it tells is silent.
func TestNoBeat(t *testing.T) {
	var sound atomic.Bool
	p := publisher(t, Config{Beat: time.Millisecond, Beating: sound.Load})
	s := subscribe(t, p)
	first := p.Stats().Sequence
	time.Sleep(20 * time.Millisecond)
	require.Equal(t, first, p.Stats().Sequence)
	sound.Store(true)
	sequence, _ := s.next("")
	require.Equal(t, first, sequence)
}

// replayed asks for past batches and returns their sequences, and the number of parts of the messages.
func replayed(t *testing.T, p *Publisher, kind zmtp.SocketType, from uint64) (sequences []uint64, parts int) {
	t.Helper()
	c := dial(t, p.ReplayEndpoint(), kind)
	ask := [][]byte{{}, binary.BigEndian.AppendUint64(nil, from)}
	require.NoError(t, c.Write(ask...))
	for {
		m, err := c.Read()
		require.NoError(t, err)
		parts = len(m)
		sequence := binary.BigEndian.Uint64(m[len(m)-2])
		if sequence == math.MaxUint64 {
			require.Empty(t, m[len(m)-1])
			return sequences, parts
		}
		sequences = append(sequences, sequence)
	}
}

// TestReplay: who has missed batches gets those that are still there, in both forms of an answer.
func TestReplay(t *testing.T) {
	for _, topic := range []bool{false, true} {
		p := publisher(t, Config{BatchEvents: 1, RingBatches: 100, TopicInReplay: topic, Topic: "t"})
		for i := range 250 {
			require.NoError(t, p.Publish(removed(uint64(i))))
		}
		for _, c := range []struct {
			from, first uint64
			n           int
		}{{0, 150, 100}, {149, 150, 100}, {200, 200, 50}, {249, 249, 1}, {250, 0, 0}, {math.MaxUint64, 0, 0}} {
			sequences, parts := replayed(t, p, zmtp.DEALER, c.from)
			require.Len(t, sequences, c.n, "from %d", c.from)
			for i, sequence := range sequences {
				require.Equal(t, c.first+uint64(i), sequence)
			}
			require.Equal(t, map[bool]int{false: 3, true: 4}[topic], parts)
		}
	}
}

// TestReplayOfNonsense costs the one who asks its connection, and nobody else anything.
func TestReplayOfNonsense(t *testing.T) {
	p := publisher(t, Config{BatchEvents: 1})
	require.NoError(t, p.Publish(removed(1)))
	for _, ask := range [][][]byte{{{}}, {{}, {1}}, {{1}, make([]byte, 8)}, {{}, make([]byte, 8), {}}, {make([]byte, maxRequest+1)}} {
		c := dial(t, p.ReplayEndpoint(), zmtp.DEALER)
		require.NoError(t, c.Write(ask...))
		_, err := c.Read()
		require.Error(t, err)
	}
	sequences, _ := replayed(t, p, zmtp.DEALER, 0)
	require.Len(t, sequences, 1)
}

// TestRingIsBounded in batches and in bytes.
func TestRingIsBounded(t *testing.T) {
	r := ring{most: 300, mostBytes: 10_000}
	for i := range uint64(2000) {
		size := 10
		if i > 1000 {
			size = 100
		}
		if i == 1500 {
			size = 20_000
		}
		r.push(batch{i, make([]byte, size)})
		require.Equal(t, i, r.at(r.n-1).sequence)
		require.LessOrEqual(t, len(r.list), 300)
		switch i {
		case 999:
			require.Equal(t, 300, r.n)
		case 1500:
			require.Equal(t, 1, r.n, "it has all of it")
		}
		if i != 1500 {
			require.LessOrEqual(t, r.bytes, 10_000)
		}
	}
	require.Equal(t, 100, r.n)
	list := r.since(nil, 1950, 1960, 7)
	require.Len(t, list, 7)
	require.EqualValues(t, 1950, list[0].sequence)
}

// TestAllAtOnce: several publish while others subscribe and ask for the past: nothing is lost, and nothing out of order.
func TestAllAtOnce(t *testing.T) {
	const writers, each = 4, 500
	p := publisher(t, Config{BatchEvents: 7, Interval: time.Millisecond})
	s := subscribe(t, p)
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				_ = p.Publish(removed(uint64(w)<<32 | uint64(i))) // it is a good one
			}
		})
	}
	wg.Go(func() { replayed(t, p, zmtp.REQ, 0) })
	var seen [writers]uint64
	last := p.Stats().Sequence
	for n := 0; n < writers*each; {
		sequence, b := s.next("")
		require.LessOrEqual(t, sequence, last+writers*each)
		for i := range b.Events {
			h := b.Events[i].Hashes[0]
			require.Equal(t, seen[h>>32], h&(1<<32-1))
			seen[h>>32]++
			n++
		}
	}
	wg.Wait()
}

func TestWrongConfig(t *testing.T) {
	for _, cfg := range []Config{
		{Listen: "x"},
		{Listen: "tcp://127.0.0.1:*", Replay: "udp://x"},
		{Listen: "tcp://127.0.0.1:*", Format: 9},
		{Listen: "tcp://127.0.0.1:*", RingBatches: -1},
	} {
		_, err := New(t.Context(), cfg)
		require.ErrorContains(t, err, "kvpub")
	}
	p := publisher(t, Config{})
	require.NoError(t, p.Close())
	require.ErrorIs(t, p.Publish(removed(1)), zmtp.ErrClosed)
	p.Skip()
}

// BenchmarkPublish publishes events of one block each, to one subscriber that reads them.
func BenchmarkPublish(b *testing.B) {
	for _, f := range []kvevent.Format{kvevent.Positional, kvevent.RFC1527} {
		b.Run(f.String(), func(b *testing.B) {
			p := publisher(b, Config{Format: f})
			s := subscribe(b, p)
			go func() {
				for {
					if _, err := s.c.Read(); err != nil {
						return
					}
				}
			}()
			e := removed(1 << 60)
			e.Model, e.Tenant = []byte("llama"), []byte(strings.Repeat("t", 8))
			b.ReportAllocs()
			for b.Loop() {
				if err := p.Publish(e); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
		})
	}
}

// ExamplePublisher is an engine that has computed the first two blocks of a prompt.
func ExamplePublisher() {
	ctx, none := testContext()
	defer none()
	p, err := New(ctx, Config{Listen: "tcp://127.0.0.1:*", Replay: "tcp://127.0.0.1:*", Topic: "kv@10.0.0.1:8000@llama", Rank: kvevent.NoRank})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = p.Publish(kvevent.Event{
		Kind: kvevent.Stored, Rank: kvevent.NoRank, BaseBlock: -1,
		Hashes: []uint64{71, 72}, Tokens: []uint32{1, 2, 3, 4, 5, 6, 7, 8}, BlockSize: 4,
	})
	fmt.Println(err, p.Close())
	// Output: <nil> <nil>
}
