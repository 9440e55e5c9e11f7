package source

import (
	"testing"

	"github.com/stretchr/testify/require"

	"larder/conductor"
	"larder/conductor/kvevent"
	"larder/conductor/kvpub"
)

// TestFollowPool: a pool's own events are followed, in each format that it publishes, those from before included.
func TestFollowPool(t *testing.T) {
	for _, format := range []kvevent.Format{kvevent.Positional, kvevent.Tagged, kvevent.RFC1527} {
		t.Run(format.String(), func(t *testing.T) {
			p, err := kvpub.New(t.Context(), kvpub.Config{
				Listen: "tcp://127.0.0.1:*", Replay: "tcp://127.0.0.1:*", Format: format, TopicInReplay: format == kvevent.Tagged,
			})
			require.NoError(t, err)
			defer func() { require.NoError(t, p.Close()) }()
			names := conductor.Names(nil, 0, seq(0, 16), 4, nil)
			event := func(kind kvevent.Kind, names []uint64, tokens []uint32, backend string) kvevent.Event {
				return kvevent.Event{
					Kind: kind, Hashes: names, Standard: true, Tokens: tokens, BlockSize: 4, Medium: kvevent.CPU, Rank: kvevent.NoRank, BaseBlock: -1,
					Model: []byte("m"), Tenant: []byte(DefaultTenant), Backend: []byte(backend),
				}
			}
			require.NoError(t, p.Publish(event(kvevent.Stored, names[:2], seq(0, 8), "pool")))
			p.Flush()

			w := newWorld(t, Config{})
			s := Service{
				Endpoint: p.Endpoint(), ReplayEndpoint: p.ReplayEndpoint(), Type: VLLM, ModelName: "m", InstanceID: "pool", BlockSize: 4,
			}
			if format == kvevent.RFC1527 {
				s.Type, s.ModelName = Mooncake, ""
			}
			_, err = w.Register(s)
			require.NoError(t, err)
			eventually(t, func() bool { return w.longest(seq(0, 16))["pool"] == 8 })
			eventually(t, func() bool {
				_ = p.Publish(event(kvevent.Stored, names[3:], seq(12, 16), "pool")) // until it is subscribed to
				p.Flush()
				return w.of("pool").Batches > w.of("pool").Replayed
			}, "it comes live")
			more := event(kvevent.Stored, names[2:3], seq(8, 12), "other")
			more.Parent, more.HasParent = names[1], true
			require.NoError(t, p.Publish(more, event(kvevent.Removed, names[1:2], nil, "pool")))
			p.Flush()
			eventually(t, func() bool { return w.longest(seq(0, 16))["pool"] == 4 })
			require.Zero(t, w.of("pool").Bad+w.of("pool").Stale)
			instances := w.index.QueryNames(testScope, names)
			require.Equal(t, format == kvevent.RFC1527, len(instances) == 2, "only the envelope names instances")
		})
	}
}
