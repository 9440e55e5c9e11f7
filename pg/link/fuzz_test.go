package link

import (
	"encoding/binary"
	"encoding/json"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"larder/transfer"
)

// FuzzFrames: whatever comes is read as frames within bounds, or is an error, and nothing that was not there comes out.
func FuzzFrames(f *testing.F) {
	f.Add(appendFrame(appendFrame(nil, frameBye, 0), frameAsk, 0, []byte("12345678"), []byte("text")))
	f.Add([]byte{255, 255, 255, 255, 1, 0, 0, 0})
	f.Add([]byte{1, 0, 0, 0, 99, 0, 0, 0, 1})
	f.Add([]byte{0, 0, 0, 0, frameShare, 3, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		here, there := net.Pipe()
		go func() {
			_, _ = there.Write(b)
			_ = there.Close()
		}()
		defer func() { require.NoError(t, here.Close()) }()
		r := newFrameReader(here)
		var again []byte
		for {
			fr, err := r.next()
			if err != nil {
				break
			}
			require.LessOrEqual(t, len(fr.body), maxHello)
			require.Empty(t, fr.files, "they come over Unix sockets only")
			again = appendFrame(again, fr.kind, 0, fr.body)
		}
		require.LessOrEqual(t, len(again), len(b))
		require.Equal(t, string(b[:len(again)]), string(again))
	})
}

// FuzzHello: a hello is refused, or is of a process that this one can be connected with.
func FuzzHello(f *testing.F) {
	n := &Node{cfg: Config{Job: "j", Rank: 3, Incarnation: 9, Token: "t"}}
	good := hello{Version: protocol, Job: "j", Token: "t", From: identity{Rank: 4, Incarnation: 1}, To: 3, ToIncarnation: 9}
	lane := good
	lane.Lane = &laneHello{Group: "g", Mine: 1, Yours: 2}
	for _, h := range []hello{good, lane, {}} {
		b, err := json.Marshal(h)
		require.NoError(f, err)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var h hello
		fr := frame{kind: frameHello, body: b}
		if err := fr.decode(&h); err != nil {
			require.ErrorIs(t, err, ErrFrame)
			return
		}
		if n.check(&h) != nil {
			return
		}
		require.Greater(t, h.From.Rank, 3)
		require.NotZero(t, h.From.Incarnation)
		require.LessOrEqual(t, len(h.From.Host), maxName)
		require.True(t, h.Lane == nil || h.Lane.Yours != 0 && len(h.Lane.Group) <= maxName)
	})
}

// FuzzPartyMessage: what is let through has what its kind must say, and finds its scope.
func FuzzPartyMessage(f *testing.F) {
	f.Add(byte(frameOffer), marshal(partyMessage{Group: "g", From: 1, Offer: &offer{Terms: make([]byte, 32), Shares: []byte{3}}}))
	f.Add(byte(frameShare), marshal(partyMessage{Pair: true, From: 1, To: 2, Share: &share{Ring: true, Engine: &engineShare{Bytes: minRing}}}))
	f.Add(byte(frameDone), marshal(partyMessage{Group: "g", Epoch: 7, From: 1, To: 2}))
	f.Add(byte(frameLeave), marshal(partyMessage{From: 1, Why: &RefusedError{Code: RefusedClosed, Text: "x"}}))
	f.Fuzz(func(t *testing.T, kind byte, b []byte) {
		var m partyMessage
		fr := frame{kind: kind, body: b}
		if fr.decode(&m) != nil || m.check(kind) != nil {
			return
		}
		require.NotZero(t, m.From)
		switch kind {
		case frameOffer:
			hosts([][]byte{m.Offer.Shares, m.Offer.Shares})
		case frameShare:
			require.NotZero(t, m.To)
			require.True(t, m.Share.Engine == nil || m.Share.Engine.Bytes <= maxRing)
		}
		require.NotEmpty(t, m.of(1).String())
	})
}

// FuzzAddress: an address is refused or can be dialed.
func FuzzAddress(f *testing.F) {
	f.Add([]byte(`{"unix":"larder-pg-x","tcp":["127.0.0.1:1","[::1]:2"]}`))
	f.Add([]byte(`{"tcp":["x"]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := parseAddress(b)
		if err != nil {
			return
		}
		require.LessOrEqual(t, len((&Node{}).ways(a, true)), maxAddresses+1)
	})
}

// FuzzProgress: whatever a peer notifies of, the ring has no more in it than it holds, and the lane knows when it is nonsense.
func FuzzProgress(f *testing.F) {
	say := func(head, taken uint64, over byte) []byte {
		return append(binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, head), taken), over)
	}
	f.Add(say(100, 0, 0), say(200, 0, 1))
	f.Add(say(1<<63, 0, 0), say(0, 1, 0))
	f.Add([]byte("short"), []byte{})
	e, err := transfer.New(transfer.Config{Topology: &transfer.Topology{}})
	require.NoError(f, err)
	f.Cleanup(func() { require.NoError(f, e.Close()) })
	n, _ := node(f, Config{Engine: e, RingBytes: minRing})
	f.Fuzz(func(t *testing.T, one, two []byte) {
		l, err := n.newEngineLane(1, TransportEngine)
		require.NoError(t, err)
		defer func() {
			l.lane.cut(ErrClosed)
			l.lane.close()
			n.pumps.Wait()
		}()
		for _, body := range [][]byte{one, two} {
			if err := l.hear(body); err != nil {
				require.ErrorIs(t, err, ErrFrame)
				return
			}
			require.Equal(t, min(l.head, uint64(minRing)), uint64(len(l.lane.c.Ready())))
			if body[16] != 0 {
				require.ErrorIs(t, l.lane.c.Ended(), ErrEnded)
				return
			}
		}
	})
}
