package client

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/protocol"
)

// The news that an entry is gone may overtake the answer to its REGISTER. Whoever read it in between holds a lease all
// the same.
func TestAPageFreedBeforeItsRegisterWasAnsweredRests(t *testing.T) {
	now := int64(1e9)
	p := newPool(func() int64 { return now }, false)
	r := testRegion(1, 4)
	p.add(r)
	run, _ := p.takeRun(1)
	r.keys[run.page] = keyHash([]byte("k"))
	p.freed(&protocol.Page{Key: []byte("k"), RegionID: 1, KVLength: 4096, FreeAfterMS: 500})
	now += 100e6
	p.use(run)
	p.wakeResting()
	require.Equal(t, 3, p.nfree, "a reader holds a lease for another 400 ms")
	now += 500e6
	p.wakeResting()
	require.Equal(t, 4, p.nfree)
}

// A region whose grant comes late must not be taken into use if it was let go of meanwhile, however many other grants
// were read in between.
func TestALateGrantOfARegionThatWasRevokedIsNotUsed(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	c := f.open(t, nil)
	c.pool.asks() // a REQUEST_ALLOC that was given up: what became of it is being found out
	c.revoke(protocol.RevokePush{RegionID: 99, Epoch: 7})
	put(t, c, "k", 4096) // has a REQUEST_ALLOC of its own
	require.Equal(t, 1, c.Stats().Regions)
	late := protocol.AllocReply{Success: true, Region: protocol.Region{
		Handle: protocol.Handle{RegionID: 99, Offset: f.next, Length: 4 * 4096}, Device: 1, Generation: f.gen, Epoch: 7,
		PageSize: 4096,
	}}
	c.lateAlloc(c.sess.Load(), late.Append(nil))
	require.Equal(t, 1, c.Stats().Regions, "somebody else may own it")
	c.pool.told()
	require.Eventually(t, func() bool { // the REQUEST_ALLOC of the put ends after its store may
		c.pool.mu.Lock()
		defer c.pool.mu.Unlock()
		return len(c.pool.gone) == 0
	}, 10*time.Second, time.Millisecond)
}

// A region that comes back under a new epoch is not used before the stores of the old one have ended, also when these
// have learnt of it first.
func TestARegionThatComesBackWaitsForItsOldWriters(t *testing.T) {
	f := newFake(t, 64*4096, 1)
	c := f.open(t, nil)
	put(t, c, "k", 4096)
	r := c.pool.list[0]
	given := protocol.Region{
		Handle: protocol.Handle{RegionID: r.id, Offset: r.mappingOffset(f), Length: r.length}, Device: 1,
		Generation: f.gen, Epoch: r.epoch + 1, PageSize: r.pageSize,
	}
	require.True(t, c.pool.beginCopy(r))
	c.disown(r) // another store was told of the epoch
	added := make(chan error, 1)
	go func() { added <- c.addRegion(c.sess.Load(), &given) }()
	select {
	case err := <-added:
		t.Error("an old store still writes there", err)
		c.pool.endCopy(r)
		return
	case <-time.After(50 * time.Millisecond):
	}
	c.pool.endCopy(r)
	require.NoError(t, <-added)
	require.Equal(t, 1, c.Stats().Regions)
}

// mappingOffset is where a fake's only region lies.
func (r *region) mappingOffset(f *fake) uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.next - r.length
}

// An attempt that nobody answered may still land, whatever a later one is answered.
func TestAnAttemptThatWasNotAnsweredIsCanceledThoughALaterOneWasRefused(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, nil)
	put(t, c, "first", 4096)
	free := c.Stats().FreePages
	var attempts atomic.Int32
	f.do(func() {
		f.before = func(cn *fakeConn, h protocol.Header, _ []byte) *protocol.Error {
			switch {
			case h.Type == protocol.TypeCancel:
				return errSilent
			case h.Type != protocol.TypeBatchRegister:
				return nil
			case attempts.Add(1) == 1:
				_ = cn.nc.Close()
				return errSilent
			default:
				return &protocol.Error{Code: protocol.CodeBusy}
			}
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := c.Put(ctx, []byte("k"), value("k", 4096))
	require.Error(t, err)
	require.Greater(t, attempts.Load(), int32(1))
	require.EqualValues(t, 1, c.Stats().Unknown)
	require.Equal(t, free-1, c.Stats().FreePages, "the first attempt may still be carried out")
}

// What a master answers that need not lead does not prolong a session.
func TestAnswersThatAnyMasterGivesDoNotProlongTheSession(t *testing.T) {
	f := newFake(t, 16*4096, 1)
	c := f.open(t, nil)
	f.do(func() {
		f.before = func(_ *fakeConn, h protocol.Header, _ []byte) *protocol.Error {
			if h.Type == protocol.TypeHeartbeat {
				return errSilent
			}
			return nil
		}
	})
	until := c.sess.Load().fenceAt.Load()
	_, err := c.Exists(t.Context(), []byte("k"))
	require.NoError(t, err)
	require.Equal(t, until, c.sess.Load().fenceAt.Load())
	put(t, c, "k", 4096)
	require.Greater(t, c.sess.Load().fenceAt.Load(), until)
}
