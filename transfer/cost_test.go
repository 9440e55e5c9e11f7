package transfer

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestTheCheaperTransport is taken for each class of slices, if it is clearly cheaper and works.
func TestTheCheaperTransport(t *testing.T) {
	here, there := engine(t, Config{}), engine(t, Config{Listen: []string{anyPort}})
	seg := open(t, here, there.Addresses()...)
	shm, tcp := seg.lanes[0], seg.lanes[1]
	require.Equal(t, TransportShm, shm.transport)
	const small, large = 4 << 10, 64 << 10
	choice := func(length uint64) string { return seg.choose(false, length).transport }
	require.Equal(t, TransportShm, choice(large), "nothing is known")
	shm.cost.add(large, 30_000, large)
	require.Equal(t, TransportShm, choice(large), "nothing is known of the other")
	tcp.cost.add(large, 20_000, large)
	tcp.rails[0].carries.Store(true)
	require.Equal(t, TransportShm, choice(large), "it is not clearly cheaper")
	tcp.cost[1].v.Store(10_000)
	require.Equal(t, TransportTCP, choice(large))
	require.Equal(t, TransportShm, choice(small), "the other class")
	tcp.rails[0].carries.Store(false)
	require.Equal(t, TransportShm, choice(large), "it does not work")
	tcp.rails[0].carries.Store(true)
	b, _, err := there.Allocate(1<<20, BufferOptions{})
	require.NoError(t, err)
	r := Request{Op: Read, Segment: seg, Buffer: b.Info().Handle, Local: make([]byte, 1<<20)}
	require.NoError(t, carry(t, here, r))
	require.Equal(t, []uint64{0, 16}, []uint64{shm.carried(), tcp.carried()})
	require.NoError(t, there.target.stop())
	tcp.rails[0].carries.Store(true) // as it may still seem
	tcp.mu.Lock()
	all := tcp.connections()
	tcp.mu.Unlock()
	for _, c := range all {
		c.kill(errStalled)
	}
	require.NoError(t, carry(t, here, r), "what was preferred first still leads there")
	require.Positive(t, shm.carried())
}

// TestLanesAreCompared reads from time to time over a lane that carries nothing, and only while others carry something.
func TestLanesAreCompared(t *testing.T) {
	here, there := engine(t, Config{}), engine(t, Config{Listen: []string{anyPort}})
	seg := open(t, here, there.Addresses()...)
	shm, tcp := seg.lanes[0], seg.lanes[1]
	b, _, err := there.Allocate(1<<20, BufferOptions{})
	require.NoError(t, err)
	r := Request{Op: Read, Segment: seg, Buffer: b.Info().Handle, Local: make([]byte, 100_000)}
	require.NoError(t, carry(t, here, r))
	require.Zero(t, tcp.carried())
	here.mu.Lock() // the test is the keeper
	delete(here.segments, seg)
	here.mu.Unlock()
	defer func() { require.NoError(t, seg.Close()) }()
	seg.compare(here.now() + probeEvery)
	require.Eventually(t, func() bool { return tcp.carried() == 1 }, 20*time.Second, time.Millisecond)
	require.Positive(t, tcp.cost[1].load())
	require.EqualValues(t, 2, shm.carried())
	seg.compare(here.now() + 3*probeEvery)
	require.EqualValues(t, 1, tcp.carried(), "nobody has asked for anything since")
	require.InDelta(t, 1, scrape(t, here, nil)["larder_transfer_batches_total"], 0, "probes are not counted")
}
