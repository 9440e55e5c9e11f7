package bench

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"larder/zmtp"
)

// maruEcho answers each burst of requests with a payload, in an order of its own.
func maruEcho(t *testing.T, payload string) (address string) {
	t.Helper()
	s, err := zmtp.Listen(t.Context(), "tcp://127.0.0.1:0", zmtp.Config{Type: zmtp.ROUTER}, func(c *zmtp.Conn) {
		var burst [][]byte
		for {
			parts, err := c.Read()
			if err != nil {
				return
			}
			reply := slices.Clone(parts[len(parts)-1][:maruHeader])
			reply[3] |= maruReplyBit
			if burst = append(burst, append(reply, payload...)); c.Buffered() {
				continue
			}
			slices.Reverse(burst)
			for _, b := range burst {
				if c.Queue(nil, b) != nil {
					return
				}
			}
			if burst = nil; c.Flush() != nil {
				return
			}
		}
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s.Endpoint()[len("tcp://"):]
}

// A load counts each reply once, whatever their order, and leaves nothing in flight.
func TestMaruLoad(t *testing.T) {
	address := maruEcho(t, "\x81\xa7success\xc3")
	for _, mode := range maruModes {
		t.Run(mode.name, func(t *testing.T) {
			l, err := openMaru(t.Context(), address, mode.socket, 2, 1)
			require.NoError(t, err)
			defer l.close()
			for range 2 {
				o, err := l.run(t.Context(), maruOps[0].request, mode.depth, 20*time.Millisecond)
				require.NoError(t, err)
				require.Positive(t, o.requests)
				require.Len(t, o.latency, min(o.requests, 2*latencySamples))
				require.Positive(t, o.quantile(0.5))
			}
		})
	}
}

func TestMaruLoadOfAServerThatFails(t *testing.T) {
	l, err := openMaru(t.Context(), maruEcho(t, "\x81\xa5error\xb5internal server error"), zmtp.DEALER, 1, 1)
	require.NoError(t, err)
	defer l.close()
	_, err = l.run(t.Context(), maruOps[0].request, maruInFlight, time.Minute)
	require.ErrorContains(t, err, "internal server error")

	l, err = openMaru(t.Context(), maruEcho(t, ""), zmtp.REQ, 1, 1)
	require.NoError(t, err)
	defer l.close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = l.run(ctx, maruOps[0].request, 1, time.Minute)
	require.ErrorIs(t, err, zmtp.ErrClosed)
}

// Requests are Maru's: their headers tell their lengths, and their payloads are maps with the fields that they need.
func TestMaruRequests(t *testing.T) {
	c := &maruClient{number: 3, region: 7, rng: rand.New(rand.NewPCG(1, 1))}
	keys := map[string]bool{}
	for _, op := range maruOps {
		for range 20 {
			c.request(op.request, 5)
			require.Equal(t, []byte{0xcf, 0, 1}, c.body[:3])
			require.EqualValues(t, 5, binary.BigEndian.Uint32(c.body[8:]))
			payload := c.body[maruHeader:]
			require.EqualValues(t, len(payload), binary.BigEndian.Uint32(c.body[12:]))
			var m map[string]any
			require.NoError(t, msgpack.Unmarshal(payload, &m), op.name)
			entries, _ := m["entries"].([]any)
			switch c.body[3] {
			case maruBatchLookup, maruBatchExists, maruBatchPin, maruBatchUnpin:
				require.Len(t, m["keys"], maruBatch)
			case maruBatchRegister:
				require.Len(t, entries, maruBatch)
			case maruRegister:
				entries = []any{m}
			default:
				require.Len(t, m["key"], 40)
			}
			for _, e := range entries {
				entry := e.(map[string]any)
				require.EqualValues(t, 7, entry["region_id"])
				require.LessOrEqual(t, entry["kv_offset"], uint64(maruRegion-maruLength))
				require.False(t, keys[entry["key"].(string)], "a key is registered once")
				keys[entry["key"].(string)] = true
			}
		}
	}
}

func TestMaruRegionOf(t *testing.T) {
	for reply, want := range map[string]uint64{
		"\x84\xa9region_id\x05\xa6offset\x00": 5, "\xa9region_id\xcc\x93": 0x93, "\xa9region_id\xcd\x01\x00": 256,
		"\xa9region_id\xcf\x00\x00\x00\x01\x00\x00\x00\x00": 1 << 32,
	} {
		n, err := maruRegionOf([]byte(reply))
		require.NoError(t, err)
		require.Equal(t, want, n)
	}
	for _, reply := range []string{"", "\x82\xa7success\xc2", "\xa9region_id", "\xa9region_id\xcd\x01", "\xa9region_id\xa1x"} {
		_, err := maruRegionOf([]byte(reply))
		require.Error(t, err, "%q", reply)
	}
}

func TestMedianTurn(t *testing.T) {
	for _, c := range []struct {
		turns []float64
		want  float64
	}{{[]float64{7}, 7}, {[]float64{9, 3}, 3}, {[]float64{9, 1, 5}, 5}, {[]float64{2, 2, 8, 4}, 2}} {
		var turns []MaruSpeed
		for _, v := range c.turns {
			turns = append(turns, MaruSpeed{Requests: v})
		}
		require.InDelta(t, c.want, medianTurn(turns).Requests, 0, "%v", c.turns)
	}
}

// A child's time is not this process's, and one that is gone has none.
func TestProcessorTime(t *testing.T) {
	before := processorTime(self)
	child := exec.CommandContext(t.Context(), "sh", "-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo; read x")
	in, err := child.StdinPipe()
	require.NoError(t, err)
	out, err := child.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	_, err = out.Read(make([]byte, 1))
	require.NoError(t, err)
	require.Greater(t, processorTime(child.Process.Pid), time.Millisecond)
	require.NoError(t, in.Close())
	require.Error(t, child.Wait(), "it read the end of its input")
	require.Zero(t, processorTime(child.Process.Pid))
	require.Greater(t, processorTime(self), before)
}
