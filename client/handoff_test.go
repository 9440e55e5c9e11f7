package client

import (
	"context"
	"encoding/json"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/transfer"
)

// decoder is a client that can receive, over one transport if that is named.
func decoder(t *testing.T, f *fake, transports ...string) *Client {
	t.Helper()
	e, err := transfer.New(transfer.Config{Listen: []string{"127.0.0.1:0"}, Transports: transports})
	require.NoError(t, err)
	t.Cleanup(func() { _ = e.Close() })
	return f.open(t, func(cfg *Config) { cfg.Transfer, cfg.Instance = e, "decode" })
}

// hand passes a ticket on, as an engine's own channel would.
func hand(t *testing.T, r *Receiver) (ticket Ticket) {
	t.Helper()
	b, err := json.Marshal(r.Ticket())
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(b, &ticket))
	return ticket
}

func TestLayersLandWithTheDecodeInstanceAsTheyAreComputed(t *testing.T) {
	for name, transports := range map[string][]string{"shm": nil, "tcp": {transfer.TransportTCP}} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t, 64*4096, 1)
			decode, prefill := decoder(t, f, transports...), f.open(t, func(cfg *Config) { cfg.RegionSize = 32 * 4096 })
			r, err := decode.Receive([]byte("k"), layerSizes, nil)
			require.NoError(t, err)
			s, err := prefill.Send(hand(t, r))
			require.NoError(t, err)
			parts := layersOf(value("k", layerTotal), layerSizes)
			for i, part := range parts {
				require.NoError(t, s.Launch(i, part))
				require.NoError(t, r.Wait(t.Context(), i))
				require.Equal(t, part, r.Bytes(i), "it is used while the next one is computed")
			}
			require.NoError(t, s.Wait(t.Context(), 4))
			require.NoError(t, s.Finish())
			require.EqualValues(t, len(parts), prefill.Stats().LayersSent)

			_, err = prefill.Get(t.Context(), []byte("k"), nil)
			require.ErrorIs(t, err, ErrNotFound, "it is pooled only if the receiver wants that")
			require.NoError(t, r.Close(t.Context()))
			require.NoError(t, r.Close(t.Context()))
		})
	}
}

func TestAReceivedValueIsPooledByOneRegister(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	decode, prefill := decoder(t, f), f.open(t, nil)
	mem := make([]byte, layerTotal) // the decode instance's own
	r, err := decode.Receive([]byte("k"), layerSizes, mem)
	require.NoError(t, err)
	_, err = r.Store(t.Context())
	require.ErrorContains(t, err, "5 layers are missing")
	s, err := prefill.Send(hand(t, r))
	require.NoError(t, err)
	for i, part := range layersOf(value("k", layerTotal), layerSizes) {
		require.NoError(t, s.Launch(i, part))
	}
	for i := range layerSizes {
		require.NoError(t, r.Wait(t.Context(), i))
	}
	require.NoError(t, s.Finish())
	res, err := r.Store(t.Context())
	require.NoError(t, err)
	require.True(t, res.Stored)
	require.NoError(t, r.Close(t.Context()))
	require.Equal(t, value("k", layerTotal), mem)
	requireValue(t, prefill, "k", layerTotal)
}

func TestAnAbortFreesBothEnds(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	decode, prefill := decoder(t, f), f.open(t, nil)
	r, err := decode.Receive([]byte("k"), []int{100, 100}, nil)
	require.NoError(t, err)
	s, err := prefill.Send(hand(t, r))
	require.NoError(t, err)
	require.NoError(t, s.Launch(0, make([]byte, 100)))
	require.NoError(t, r.Wait(t.Context(), 0))
	s.Abort()
	s.Abort()
	require.ErrorIs(t, r.Wait(t.Context(), 1), ErrAborted)
	require.NoError(t, r.Wait(t.Context(), 0), "what is there stays")
	require.NoError(t, r.Close(t.Context()))
	require.ErrorIs(t, s.Launch(1, make([]byte, 100)), ErrConfig)
	require.Empty(t, decode.cfg.Transfer.Describe().Buffers)
}

// A sender whose value is not all there says so.
func TestAFailedSenderTellsTheReceiver(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	decode, prefill := decoder(t, f), f.open(t, nil)
	r, err := decode.Receive([]byte("k"), []int{100, 100}, nil)
	require.NoError(t, err)
	s, err := prefill.Send(hand(t, r))
	require.NoError(t, err)
	require.NoError(t, s.Launch(0, make([]byte, 100)))
	require.ErrorContains(t, s.Finish(), "layer 1 was not launched")
	require.ErrorIs(t, r.Wait(t.Context(), 1), ErrAborted)
	require.NoError(t, r.Close(t.Context()))
}

// What is sent after the receiver was closed lands nowhere.
func TestNothingLandsInAClosedReceiver(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	decode, prefill := decoder(t, f), f.open(t, nil)
	mem := make([]byte, 100)
	r, err := decode.Receive([]byte("k"), []int{100}, mem)
	require.NoError(t, err)
	s, err := prefill.Send(hand(t, r))
	require.NoError(t, err)
	require.NoError(t, r.Close(t.Context()))
	require.ErrorIs(t, r.Wait(t.Context(), 0), ErrAborted)
	require.NoError(t, s.Launch(0, value("k", 100)))
	require.ErrorIs(t, s.Wait(t.Context(), 0), transfer.ErrStale)
	require.Error(t, s.Finish())
	require.Equal(t, make([]byte, 100), mem)
}

func TestReceiversOfOneEngineAreToldApart(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	decode, prefill := decoder(t, f), f.open(t, nil)
	var all []*Receiver
	for _, k := range []string{"a", "b", "c"} {
		r, err := decode.Receive([]byte(k), []int{50, 50}, nil)
		require.NoError(t, err)
		all = append(all, r)
	}
	var senders sync.WaitGroup
	for _, r := range all {
		senders.Go(func() {
			s, err := prefill.Send(r.Ticket())
			if err == nil {
				v := value(string(r.ticket.Key), 100)
				_, _ = s.Launch(1, v[50:]), s.Launch(0, v[:50])
				err = s.Finish()
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	for _, r := range all {
		require.NoError(t, r.Wait(t.Context(), 0))
		require.NoError(t, r.Wait(t.Context(), 1))
		require.Equal(t, value(string(r.ticket.Key), 100)[:50], r.Bytes(0))
	}
	senders.Wait()
	for _, r := range all {
		require.NoError(t, r.Close(t.Context()))
	}
}

func TestReceiveNeedsAnEngineThatListens(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, nil)
	_, err := c.Receive([]byte("k"), []int{1}, nil)
	require.ErrorIs(t, err, ErrConfig)
	d := decoder(t, f)
	_, err = d.Receive([]byte("k"), []int{1}, make([]byte, 2))
	require.ErrorIs(t, err, ErrConfig)
	r, err := d.Receive([]byte("k"), []int{1}, nil)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	require.ErrorIs(t, r.Wait(ctx, 0), context.DeadlineExceeded)
	require.ErrorIs(t, r.Wait(t.Context(), 1), ErrConfig)
	require.NoError(t, d.cfg.Transfer.Close())
	require.ErrorIs(t, r.Wait(t.Context(), 0), ErrAborted)
	require.NoError(t, r.Close(t.Context()))
}

// A receiver that hangs costs its sender what one that answers may take.
func TestASenderDoesNotWaitForAReceiverThatHangs(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	const call = time.Second
	decode := decoder(t, f, transfer.TransportTCP)
	prefill := f.open(t, func(cfg *Config) { cfg.CallTimeout = call })
	p := (&fakeNode{f: f, engine: decode.cfg.Transfer}).behindProxy(t)
	defer p.close()
	defer p.thaw()
	sizes := make([]int, 40)
	for i := range sizes {
		sizes[i] = 1000
	}
	r, err := decode.Receive([]byte("k"), sizes, nil)
	require.NoError(t, err)
	ticket := hand(t, r)
	ticket.Descriptor.Rails = []string{p.ln.Addr().String()}
	p.freeze()
	for name, end := range map[string]func(s *Sender){
		"abort":  func(s *Sender) { s.Abort() },
		"finish": func(s *Sender) { require.Error(t, s.Finish()) },
	} {
		s, err := prefill.Send(ticket)
		require.NoError(t, err)
		for i := range sizes {
			require.NoError(t, s.Launch(i, make([]byte, 1000)))
		}
		began := time.Now()
		end(s)
		require.Less(t, time.Since(began), 8*call, name)
	}
	p.thaw()
	require.NoError(t, r.Close(t.Context()))
}
