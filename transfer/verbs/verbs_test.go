//go:build rdma && cgo && linux

package verbs

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestDeviceAndPort(t *testing.T) {
	x := openDevice(t)
	a := x.Attributes()
	require.Positive(t, a.MaxQP)
	require.Positive(t, a.Ports)
	p, err := x.Port(1)
	require.NoError(t, err)
	require.True(t, p.Active)
	require.NotEmpty(t, p.GIDs)
	g, ok := p.PickGID()
	require.True(t, ok)
	t.Logf("%s: %+v", x.Name(), a)
	t.Logf("port: %+v; picked %s %s at %d", p, g.Type, g.Address, g.Index)
	_, err = x.Port(99)
	require.ErrorIs(t, err, syscall.EINVAL)
	_, err = Open("no-such-device")
	require.ErrorContains(t, err, "no-such-device")
}

// scatter cuts size bytes into pieces that lie in the region in a random order, with gaps of at least a byte.
func scatter(rng *rand.Rand, r *Region, size, count int) []Piece {
	count = max(1, min(count, size))
	lengths := make([]int, count)
	for i, left := 0, size; i < count; i++ {
		lengths[i] = left
		if rest := count - i - 1; rest > 0 {
			lengths[i] = 1 + rng.IntN(max(1, (left-rest)/(rest+1)*2))
			lengths[i] = min(lengths[i], left-rest)
		}
		left -= lengths[i]
	}
	pieces, at := make([]Piece, count), 1+rng.IntN(64)
	for _, i := range rng.Perm(count) {
		pieces[i] = Piece{Region: r, Offset: at, Length: lengths[i]}
		at += lengths[i] + 1 + rng.IntN(64)
	}
	return pieces
}

// gather copies what pieces name.
func gather(pieces []Piece) (all []byte) {
	for _, p := range pieces {
		all = append(all, p.Region.Bytes()[p.Offset:p.Offset+p.Length]...)
	}
	return all
}

func TestBytesBetweenProcesses(t *testing.T) {
	e, c := connectChild(t, 8<<20, Options{})
	rng := rand.New(rand.NewPCG(1, 2))
	for _, size := range []int{0, 1, 7, 63, 1024, 4095, 4096, 4097, 65536, 1<<20 - 1, 1 << 20, 4<<20 + 3} {
		for _, count := range []int{1, 2, 5, 16} {
			fill(e.r.Bytes(), size+count)
			at := uint64(1 + rng.IntN(4096))
			pieces := scatter(rng, e.r, size, count)
			sent := gather(pieces)
			require.Equal(t, Success, e.one(t, Write, c.hello.Remote+at, c.hello.RKey, pieces...), "write %d in %d", size, count)
			got := c.ask(message{Do: "sum", From: int(at), Length: size})
			require.Equal(t, crc32.ChecksumIEEE(sent), got.Sum, "%d bytes in %d pieces", size, count)

			clear(e.r.Bytes())
			pieces = scatter(rng, e.r, size, count)
			require.Equal(t, Success, e.one(t, Read, c.hello.Remote+at, c.hello.RKey, pieces...), "read %d in %d", size, count)
			require.True(t, bytes.Equal(sent, gather(pieces)), "%d bytes in %d pieces", size, count)
			for _, p := range pieces {
				clear(e.r.Bytes()[p.Offset : p.Offset+p.Length])
			}
			require.True(t, bytes.Equal(e.r.Bytes(), make([]byte, 8<<20)), "a READ of %d bytes landed beside its pieces", size)
		}
	}
}

// A whole list goes by one call; of a hundred requests only the last has a completion.
func TestListIsOneCall(t *testing.T) {
	here, there := newPair(t, 1<<20, Options{})
	const n, size = 100, 4096
	fill(here.r.Bytes(), 3)
	for i := range n {
		flags := Flags(0)
		if i == n-1 {
			flags = Signaled
		}
		p := Piece{Region: here.r, Offset: i * size, Length: size}
		require.NoError(t, here.l.Add(Write, uint64(i), flags, there.r.Address()+uint64((n-1-i)*size), there.r.RKey(), p))
	}
	here.post(t)
	got := here.await(t, 1)
	require.Equal(t, Success, got[0].Status)
	require.EqualValues(t, n-1, got[0].ID)
	for i := range n {
		require.True(t, bytes.Equal(here.r.Bytes()[i*size:(i+1)*size], there.r.Bytes()[(n-1-i)*size:(n-i)*size]), "request %d", i)
	}
	k, err := here.cq.Poll(make([]Completion, 1))
	require.NoError(t, err)
	require.Zero(t, k)
}

func TestBadKeyIsRefused(t *testing.T) {
	for name, change := range map[string]func(remote *uint64, rkey *uint32){
		"key":    func(_ *uint64, rkey *uint32) { *rkey ^= 0x5a },
		"range":  func(remote *uint64, _ *uint32) { *remote += 4096 - 7 },
		"before": func(remote *uint64, _ *uint32) { *remote-- },
	} {
		for _, op := range []Op{Read, Write} {
			t.Run(fmt.Sprintf("%s %d", name, op), func(t *testing.T) {
				here, there := newPair(t, 4096, Options{})
				fill(here.r.Bytes(), 1)
				fill(there.r.Bytes(), 2)
				own, others := bytes.Clone(here.r.Bytes()), bytes.Clone(there.r.Bytes())
				remote, rkey := there.r.Address(), there.r.RKey()
				change(&remote, &rkey)
				status := here.one(t, op, remote, rkey, here.whole(8))
				require.Equal(t, RemoteAccess, status)
				require.EqualValues(t, 10, status)
				require.ErrorContains(t, status.Err(), "rkey is not valid")
				require.Equal(t, own, here.r.Bytes())
				require.Equal(t, others, there.r.Bytes())
				state, err := here.qp.State()
				require.NoError(t, err)
				require.Equal(t, Failed, state)
			})
		}
	}
}

func TestReadOnlyRegionRefusesWrites(t *testing.T) {
	here, there := newPair(t, 4096, Options{})
	r, err := there.d.Register(make([]byte, 4096), RemoteRead)
	require.NoError(t, err)
	defer func() { require.NoError(t, r.Close()) }()
	require.Equal(t, Success, here.one(t, Read, r.Address(), r.RKey(), here.whole(4096)))
	fill(here.r.Bytes(), 1)
	require.Equal(t, RemoteAccess, here.one(t, Write, r.Address(), r.RKey(), here.whole(4096)))
	require.Equal(t, make([]byte, 4096), r.Bytes())
}

// The peer is never connected, so that nothing that is posted can end by itself.
func TestFailFlushesWhatIsOutstanding(t *testing.T) {
	x := openDevice(t)
	here, there := newEnd(t, x, 1<<20, Options{}), newEnd(t, x, 1<<20, Options{})
	require.NoError(t, here.qp.Connect(there.qp.Address()))
	const n = 64
	for i := range uint64(n) {
		flags := Flags(0)
		if i%4 == 0 {
			flags = Signaled
		}
		require.NoError(t, here.l.Add([]Op{Write, Read}[i%2], i, flags, there.r.Address(), there.r.RKey(), here.whole(8192)))
	}
	here.post(t)
	k, err := here.cq.Poll(make([]Completion, 1))
	require.NoError(t, err)
	require.Zero(t, k, "nothing ends by itself")

	require.NoError(t, here.qp.Fail())
	require.NoError(t, here.l.AddMarker(n))
	here.post(t)
	got := here.await(t, n+1)
	for i, c := range got {
		require.Equal(t, Flushed, c.Status)
		require.EqualValues(t, i, c.ID, "in the order in which they were posted, without a flag, too")
	}
	state, err := here.qp.State()
	require.NoError(t, err)
	require.Equal(t, Failed, state)
	require.Equal(t, make([]byte, 1<<20), there.r.Bytes())
}

// Work that is under way ends or is flushed, one completion each, and nothing of it lands behind the marker's. With one CPU
// most of it has ended when the post returns: rounds go on until some has not.
func TestFailDrainsWhatIsUnderWay(t *testing.T) {
	const size, n = 8 << 20, 32
	here, there := newPair(t, size, Options{})
	flushed := -1
	for round := 0; round < 10 && flushed <= 0; round++ {
		if round > 0 {
			here.qp, there.qp = replace(t, here), replace(t, there)
			require.NoError(t, here.qp.Connect(there.qp.Address()))
			require.NoError(t, there.qp.Connect(here.qp.Address()))
		}
		for i := range uint64(n) {
			require.NoError(t, here.l.Add([]Op{Read, Write}[i%2], i, Signaled, there.r.Address(), there.r.RKey(), here.whole(size)))
		}
		here.post(t)
		require.NoError(t, here.qp.Fail())
		require.NoError(t, here.l.AddMarker(n))
		here.post(t)
		flushed = -1 // the marker
		for i, c := range here.await(t, n+1) {
			require.EqualValues(t, i, c.ID)
			require.Contains(t, []Status{Success, Flushed}, c.Status)
			if c.Status == Flushed {
				flushed++
			}
		}
		fill(here.r.Bytes(), round) // a READ that landed now would overwrite it
		want := crc32.ChecksumIEEE(here.r.Bytes())
		time.Sleep(5 * time.Millisecond)
		require.Equal(t, want, crc32.ChecksumIEEE(here.r.Bytes()), "a READ has landed behind the marker")
		t.Logf("round %d: %d of %d were flushed", round, flushed, n)
	}
}

// replace closes an end's queue pair and makes another.
func replace(t *testing.T, e *end) *QueuePair {
	t.Helper()
	require.NoError(t, e.qp.Close())
	qp, err := e.d.NewQueuePair(e.cq, Options{})
	require.NoError(t, err)
	return qp
}

func TestDeadPeerIsNoticed(t *testing.T) {
	e, c := connectChild(t, 4096, Options{Timeout: time.Millisecond, Retries: 2})
	require.Equal(t, Success, e.one(t, Write, c.hello.Remote, c.hello.RKey, e.whole(4096)))
	c.ask(message{Do: "fail"})
	status := e.one(t, Write, c.hello.Remote, c.hello.RKey, e.whole(4096))
	require.Equal(t, RetryExceeded, status)
}

func TestDeregisteredMemoryIsNotWritten(t *testing.T) {
	e, c := connectChild(t, 4096, Options{})
	fill(e.r.Bytes(), 1)
	require.Equal(t, Success, e.one(t, Write, c.hello.Remote, c.hello.RKey, e.whole(4096)))
	before := crc32.ChecksumIEEE(e.r.Bytes())
	c.ask(message{Do: "deregister"})
	fill(e.r.Bytes(), 2)
	require.Equal(t, RemoteAccess, e.one(t, Write, c.hello.Remote, c.hello.RKey, e.whole(4096)))
	require.Equal(t, before, c.ask(message{Do: "sum", Length: 4096}).Sum)
}

func TestDeregisteredPieceIsRefused(t *testing.T) {
	here, there := newPair(t, 4096, Options{})
	r, err := here.d.Register(make([]byte, 4096), LocalWrite)
	require.NoError(t, err)
	require.NoError(t, r.Close())
	require.NoError(t, r.Close())
	status := here.one(t, Read, there.r.Address(), there.r.RKey(), Piece{Region: r, Length: 4096})
	require.Equal(t, LocalProtection, status)
}

// bind binds a window to a part of its end's region, and gives the key.
func bind(t *testing.T, e *end, w *Window, p Piece, access Access) (rkey uint32) {
	t.Helper()
	e.id++
	rkey, err := e.l.AddBind(e.id, Signaled, w, p, access)
	require.NoError(t, err)
	require.Equal(t, Success, e.outcome(t))
	return rkey
}

func invalidate(t *testing.T, e *end, rkey uint32) {
	t.Helper()
	e.id++
	require.NoError(t, e.l.AddInvalidate(e.id, Signaled, rkey))
	require.Equal(t, Success, e.outcome(t))
}

func newWindow(t *testing.T, e *end) *Window {
	t.Helper()
	if !e.x.Attributes().Windows2 {
		t.Skip("the device has no memory windows of type 2")
	}
	w, err := e.d.NewWindow()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, w.Close()) })
	return w
}

func TestWindow(t *testing.T) {
	here, there := newPair(t, 64<<10, Options{})
	w := newWindow(t, there)
	part := Piece{Region: there.r, Offset: 8192, Length: 4096}
	remote := there.r.Address() + 8192
	var keys []uint32
	for i := range 10 {
		rkey := bind(t, there, w, part, RemoteRead|RemoteWrite)
		require.NotContains(t, keys, rkey)
		keys = append(keys, rkey)
		fill(here.r.Bytes(), i)
		require.Equal(t, Success, here.one(t, Write, remote, rkey, here.whole(4096)))
		require.True(t, bytes.Equal(here.r.Bytes()[:4096], there.r.Bytes()[8192:12288]))
		require.Equal(t, Success, here.one(t, Read, remote+96, rkey, here.whole(4000)))
		require.True(t, bytes.Equal(here.r.Bytes()[:4000], there.r.Bytes()[8192+96:12288]))
		invalidate(t, there, rkey)
	}
	rkey := bind(t, there, w, part, RemoteRead)
	require.Equal(t, Success, here.one(t, Read, remote, rkey, here.whole(4096)))
	fill(here.r.Bytes(), 99)
	before := bytes.Clone(there.r.Bytes())
	require.Equal(t, RemoteAccess, here.one(t, Write, remote, keys[0], here.whole(4096)), "the key of an earlier binding")
	require.Equal(t, before, there.r.Bytes())
}

func TestWindowRefuses(t *testing.T) {
	for name, try := range map[string]func(t *testing.T, here, there *end, w *Window, rkey uint32) Status{
		"beside it": func(t *testing.T, here, there *end, _ *Window, rkey uint32) Status {
			t.Helper()
			status := here.one(t, Write, there.r.Address()+8192+1, rkey, here.whole(4096))
			if status == Success && strings.HasPrefix(here.x.Name(), "rxe") {
				t.Skip("rxe checks the bounds of the region, not those of the window")
			}
			return status
		},
		"writing": func(t *testing.T, here, there *end, w *Window, rkey uint32) Status {
			t.Helper()
			invalidate(t, there, rkey)
			next := bind(t, there, w, Piece{Region: there.r, Offset: 8192, Length: 4096}, RemoteRead)
			return here.one(t, Write, there.r.Address()+8192, next, here.whole(4096))
		},
		"after it was invalidated": func(t *testing.T, here, there *end, _ *Window, rkey uint32) Status {
			t.Helper()
			invalidate(t, there, rkey)
			return here.one(t, Write, there.r.Address()+8192, rkey, here.whole(4096))
		},
		"after it was closed": func(t *testing.T, here, there *end, w *Window, rkey uint32) Status {
			t.Helper()
			require.NoError(t, w.Close())
			return here.one(t, Write, there.r.Address()+8192, rkey, here.whole(4096))
		},
		"by another queue pair": func(t *testing.T, _, there *end, _ *Window, rkey uint32) Status {
			t.Helper()
			a, b := newEnd(t, there.x, 8192, Options{}), newEnd(t, there.x, 4096, Options{})
			require.NoError(t, a.qp.Connect(b.qp.Address()))
			require.NoError(t, b.qp.Connect(a.qp.Address()))
			return a.one(t, Write, there.r.Address()+8192, rkey, a.whole(4096))
		},
	} {
		t.Run(name, func(t *testing.T) {
			here, there := newPair(t, 64<<10, Options{})
			w := newWindow(t, there)
			rkey := bind(t, there, w, Piece{Region: there.r, Offset: 8192, Length: 4096}, RemoteRead|RemoteWrite)
			fill(here.r.Bytes(), 1)
			require.Equal(t, RemoteAccess, try(t, here, there, w, rkey))
			require.True(t, bytes.Equal(make([]byte, 64<<10), there.r.Bytes()))
		})
	}
}

// bars are what ends the peer's work at this end.
var bars = []string{"deregistered", "failed", "closed", "window invalidated", "window closed"}

func bar(t *testing.T, name string, there *end, r *Region, w *Window, rkey uint32) {
	t.Helper()
	switch name {
	case "deregistered":
		require.NoError(t, r.Close())
	case "failed":
		require.NoError(t, there.qp.Fail())
	case "closed":
		require.NoError(t, there.qp.Close())
	case "window invalidated":
		there.id++
		require.NoError(t, there.l.AddInvalidate(there.id, Signaled, rkey))
		// The peer's next WRITE is refused, which fails the queue pair here: that bars, too.
		require.Contains(t, []Status{Success, Flushed}, there.outcome(t))
	case "window closed":
		require.NoError(t, w.Close())
	}
}

// WRITEs of many packets are under way when the other end bars them: what they have not written then, they do not write.
func TestNothingLandsBehindABar(t *testing.T) {
	for _, name := range bars {
		t.Run(name, func(t *testing.T) {
			cut, late, rounds := 0, 0, 0
			for ; rounds < 5 && cut < 2; rounds++ {
				wasCut, wasLate := barred(t, name, rounds)
				cut += wasCut
				late += wasLate
			}
			t.Logf("%d of %d times the bar came before the end", cut, rounds)
			names, err := Devices()
			require.NoError(t, err)
			if late > 0 && strings.HasPrefix(name, "window") && strings.HasPrefix(names[0], "rxe") {
				t.Skipf("%d of %d times bytes have landed behind the bar: rxe asks for the window with the first packet only", late, rounds)
			}
			require.Zero(t, late, "bytes have landed behind the bar")
		})
	}
}

// barred reports, as 0 or 1, whether WRITEs were cut short, and whether bytes of them have landed after that.
func barred(t *testing.T, name string, round int) (cut, late int) {
	t.Helper()
	const size, n = 8 << 20, 24
	t.Run(strconv.Itoa(round), func(t *testing.T) {
		here, there := newPair(t, size, Options{Timeout: time.Millisecond, Retries: 1})
		r, err := there.d.Register(mapped(t, size), LocalWrite|RemoteWrite|AllowWindows)
		require.NoError(t, err)
		defer func() { require.NoError(t, r.Close()) }()
		rkey, w := r.RKey(), (*Window)(nil)
		if strings.HasPrefix(name, "window") {
			w = newWindow(t, there)
			defer func() { require.NoError(t, w.Close()) }() // before the region
			rkey = bind(t, there, w, Piece{Region: r, Length: size}, RemoteWrite)
		}
		for i := range here.r.Bytes() {
			here.r.Bytes()[i] = 0xff
		}
		for i := range uint64(n) { // so many that the post returns before they have ended
			require.NoError(t, here.l.Add(Write, i, Signaled, r.Address(), rkey, here.whole(size)))
		}
		here.post(t)
		bar(t, name, there, r, w, rkey)
		clear(r.Bytes())
		for _, c := range here.await(t, n) {
			if c.Status != Success {
				cut = 1
			}
		}
		time.Sleep(5 * time.Millisecond)
		if !bytes.Equal(r.Bytes(), make([]byte, size)) {
			late = 1
		}
	})
	return cut, late
}

// A region is not deregistered while a window is bound to it: the error says so, and the region goes on.
func TestBoundRegionIsNotClosed(t *testing.T) {
	here, there := newPair(t, 4096, Options{})
	w := newWindow(t, there)
	r, err := there.d.Register(mapped(t, 4096), LocalWrite|RemoteWrite|AllowWindows)
	require.NoError(t, err)
	rkey := bind(t, there, w, Piece{Region: r, Length: 4096}, RemoteWrite)
	var e *Error
	require.ErrorAs(t, r.Close(), &e)
	require.Equal(t, "ibv_dereg_mr", e.Verb)
	t.Log(e)
	require.Equal(t, Success, here.one(t, Write, r.Address(), rkey, here.whole(4096)))
	invalidate(t, there, rkey)
	_, err = there.l.AddBind(1, Signaled, w, Piece{Region: r, Length: 1}, RemoteWrite)
	require.NoError(t, err)
	require.NoError(t, r.Close())
	_, err = there.qp.Post(there.l)
	require.ErrorIs(t, err, ErrClosed)
	there.l.Reset()
	_, err = there.l.AddBind(1, Signaled, w, Piece{Region: r, Length: 1}, RemoteWrite)
	require.ErrorIs(t, err, ErrClosed)
}

func TestWaitWakes(t *testing.T) {
	here, there := newPair(t, 4096, Options{})
	got := make(chan error)
	for range 20 {
		go func() {
			n, err := here.cq.Wait(t.Context(), make([]Completion, 4))
			if err == nil && n != 1 {
				err = fmt.Errorf("%d completions", n)
			}
			got <- err
		}()
		time.Sleep(2 * time.Millisecond) // it sleeps by now
		require.NoError(t, here.l.Add(Write, 1, Signaled, there.r.Address(), there.r.RKey(), here.whole(64)))
		here.post(t)
		select {
		case err := <-got:
			require.NoError(t, err)
		case <-time.After(timeout):
			require.Fail(t, "nobody woke")
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	for range 3 { // that one wait was ended does not end the next
		_, err := here.cq.Wait(ctx, make([]Completion, 1))
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	require.Equal(t, Success, here.one(t, Write, there.r.Address(), there.r.RKey(), here.whole(64)))
}

func TestCloseEndsWaits(t *testing.T) {
	names, err := Devices()
	require.NoError(t, err)
	if len(names) == 0 {
		openDevice(t)
	}
	x, err := Open(names[0])
	require.NoError(t, err)
	cq, err := x.NewCompletionQueue(16)
	require.NoError(t, err)
	ended := make(chan error, 2)
	go func() {
		_, err := cq.Wait(context.Background(), make([]Completion, 1))
		ended <- err
	}()
	go func() {
		_, err := x.NextEvent(context.Background())
		ended <- err
	}()
	time.Sleep(10 * time.Millisecond)
	require.ErrorIs(t, x.Close(), ErrInUse)
	require.NoError(t, cq.Close())
	require.NoError(t, x.Close())
	require.NoError(t, x.Close())
	require.ErrorIs(t, <-ended, ErrClosed)
	require.ErrorIs(t, <-ended, ErrClosed)
	_, err = cq.Poll(make([]Completion, 1))
	require.ErrorIs(t, err, ErrClosed)
	_, err = x.NewDomain()
	require.ErrorIs(t, err, ErrClosed)
}

// resources counts what the kernel has, as `rdma resource show` tells: "mr 3" for each kind.
func resources(t *testing.T) map[string]string {
	t.Helper()
	out, err := exec.Command("rdma", "resource", "show").CombinedOutput()
	if err != nil {
		t.Skipf("rdma resource show: %v: %s", err, out)
	}
	counts := make(map[string]string)
	for _, m := range regexp.MustCompile(`(pd|cq|qp|mr|cm_id|ctx|srq) (\d+)`).FindAllStringSubmatch(string(out), -1) {
		counts[m[1]] = m[2]
	}
	require.Contains(t, counts, "qp")
	return counts
}

func TestNothingIsLeft(t *testing.T) {
	x := openDevice(t)
	before := resources(t)
	t.Run("many", func(t *testing.T) {
		d, err := x.NewDomain()
		require.NoError(t, err)
		cq, err := x.NewCompletionQueue(1024)
		require.NoError(t, err)
		var qps []*QueuePair
		for range 300 {
			qp, err := d.NewQueuePair(cq, Options{Depth: 16, SGE: 2})
			require.NoError(t, err)
			qps = append(qps, qp)
		}
		for i := 0; i < len(qps); i += 2 {
			require.NoError(t, qps[i].Connect(qps[i+1].Address()))
			require.NoError(t, qps[i+1].Connect(qps[i].Address()))
		}
		during := resources(t)
		t.Log("before", before, "during", during)
		require.NotEqual(t, before["qp"], during["qp"])
		require.ErrorIs(t, d.Close(), ErrInUse)
		require.ErrorIs(t, cq.Close(), ErrInUse)
		for _, qp := range qps {
			require.NoError(t, qp.Close())
			_, err := qp.State()
			require.ErrorIs(t, err, ErrClosed)
		}
		require.NoError(t, cq.Close())
		require.NoError(t, d.Close())
	})
	// The kernel puts some of it away after the system call has returned.
	require.Eventually(t, func() bool { return fmt.Sprint(before) == fmt.Sprint(resources(t)) }, timeout, 10*time.Millisecond)
}

// link sets the state of the network device below an RDMA device; it skips the test where that is somebody's network.
func link(t *testing.T, x *Context, state string) {
	t.Helper()
	parent, err := os.ReadFile(filepath.Join("/sys/class/infiniband", x.Name(), "parent"))
	if err != nil || !strings.HasPrefix(string(parent), "dummy") {
		t.Skip("not a software device on a dummy interface: its link is left alone")
	}
	out, err := exec.Command("ip", "link", "set", strings.TrimSpace(string(parent)), state).CombinedOutput()
	require.NoError(t, err, string(out))
}

func TestEvents(t *testing.T) {
	x := openDevice(t)
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	until := func(want EventType) {
		for {
			e, err := x.NextEvent(ctx)
			require.NoError(t, err, "waiting for %s", want)
			t.Log(e)
			if e.Type == want {
				require.Equal(t, 1, e.Port)
				return
			}
		}
	}
	link(t, x, "down")
	defer link(t, x, "up")
	until(PortDown)
	p, err := x.Port(1)
	require.NoError(t, err)
	require.False(t, p.Active)
	link(t, x, "up")
	until(PortActive)
	p, err = x.Port(1)
	require.NoError(t, err)
	require.True(t, p.Active)
}

// A request that is refused is an event at the peer, whose queue pair fails, too.
func TestPeerHearsOfRefusal(t *testing.T) {
	here, there := newPair(t, 4096, Options{})
	require.Equal(t, RemoteAccess, here.one(t, Write, there.r.Address(), there.r.RKey()^1, here.whole(8)))
	ctx, cancel := context.WithTimeout(t.Context(), time.Second) // not every device tells: rxe of Linux 6.1 does not
	defer cancel()
	for {
		e, err := here.x.NextEvent(ctx)
		if errors.Is(err, context.DeadlineExceeded) {
			t.Skip("the device does not tell")
		}
		require.NoError(t, err)
		t.Log(e)
		if e.Type == QPAccessError {
			require.Equal(t, there.qp.QPN(), e.QPN)
			return
		}
	}
}

func TestPostAllocatesNothing(t *testing.T) {
	here, there := newPair(t, 1<<20, Options{})
	out := make([]Completion, 32)
	pieces := []Piece{here.whole(64), {Region: here.r, Offset: 4096, Length: 64}}
	allocs := testing.AllocsPerRun(100, func() {
		for i := range uint64(16) {
			if err := here.l.Add(Write, i, Signaled, there.r.Address(), there.r.RKey(), pieces...); err != nil {
				panic(err)
			}
		}
		if _, err := here.qp.Post(here.l); err != nil {
			panic(err)
		}
		here.l.Reset()
		for done := 0; done < 16; {
			n, err := here.cq.Poll(out)
			if err != nil {
				panic(err)
			}
			done += n
		}
	})
	require.Zero(t, allocs)
}

func TestBounds(t *testing.T) {
	here, there := newPair(t, 4096, Options{Depth: 16, SGE: 2})
	for _, p := range []Piece{{here.r, -1, 1}, {here.r, 0, 4097}, {here.r, 4096, 1}, {here.r, 1, -1}, {here.r, 1 << 62, 1 << 62}} {
		require.ErrorIs(t, here.l.Add(Write, 1, 0, 0, 0, p), ErrBounds)
	}
	require.Zero(t, here.l.Len())
	require.Error(t, here.l.Add(7, 1, 0, 0, 0))
	small, err := NewList(1, 1)
	require.NoError(t, err)
	defer small.Close()
	require.ErrorIs(t, small.Add(Read, 1, 0, 0, 0, here.whole(1), here.whole(1)), ErrFull)
	require.NoError(t, small.Add(Read, 1, 0, 0, 0, here.whole(1)))
	require.ErrorIs(t, small.Add(Read, 1, 0, 0, 0), ErrFull)
	_, err = NewList(0, 1)
	require.Error(t, err)
	_, err = here.d.Register(nil, LocalWrite)
	require.Error(t, err)
	_, err = here.d.NewQueuePair(here.cq, Options{Depth: 1 << 28})
	require.ErrorContains(t, err, "depth")
	for _, o := range []Options{{SGE: 1 << 20}, {Port: 99}, {Retries: 8}, {Timeout: -1}, {MTU: 1500}} {
		_, err = here.d.NewQueuePair(here.cq, o)
		require.Error(t, err)
	}
	_, err = here.d.NewQueuePair(here.cq, Options{GIDIndex: 3000})
	require.ErrorContains(t, err, "no such GID")
	_, err = here.x.NewCompletionQueue(1 << 40)
	require.ErrorContains(t, err, "completions")
	require.Error(t, here.qp.Connect(Address{}))
	var e *Error

	// Too many pieces for the queue pair, behind one that is not: the first goes.
	require.NoError(t, here.l.Add(Write, 1, Signaled, there.r.Address(), there.r.RKey(), here.whole(8)))
	require.NoError(t, here.l.Add(Write, 2, Signaled, there.r.Address(), there.r.RKey(), make40(here)...))
	n, err := here.qp.Post(here.l)
	require.ErrorAs(t, err, &e)
	require.Equal(t, "ibv_post_send", e.Verb)
	require.Equal(t, 1, n)
	require.Equal(t, Success, here.await(t, 1)[0].Status)
}

// make40 are more pieces than any request here may have.
func make40(e *end) (list []Piece) {
	for range 40 {
		list = append(list, e.whole(1))
	}
	return list
}

func TestQueueThatIsFullIsRefused(t *testing.T) {
	x := openDevice(t)
	here, there := newEnd(t, x, 4096, Options{Depth: 16}), newEnd(t, x, 4096, Options{Depth: 16})
	require.NoError(t, here.qp.Connect(there.qp.Address())) // there is not connected: nothing ends
	for i := range uint64(256) {
		require.NoError(t, here.l.Add(Write, i, Signaled, there.r.Address(), there.r.RKey(), here.whole(8)))
	}
	n, err := here.qp.Post(here.l)
	require.ErrorIs(t, err, syscall.ENOMEM)
	require.GreaterOrEqual(t, n, 16)
	require.Less(t, n, 256)
	require.NoError(t, here.qp.Fail())
	for i, c := range here.await(t, n) {
		require.EqualValues(t, i, c.ID)
		require.Equal(t, Flushed, c.Status)
	}
}

// Goroutines post on queue pairs, and one polls for all, while the queue pairs and a region are closed: each call does its
// work or says that it is too late.
func TestClosedWhileInUse(t *testing.T) {
	x := openDevice(t)
	here, there := newEnd(t, x, 64<<10, Options{}), newEnd(t, x, 64<<10, Options{})
	region, err := here.d.Register(make([]byte, 64<<10), LocalWrite)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var wg, poller sync.WaitGroup
	poller.Go(func() {
		out := make([]Completion, 16)
		for {
			if _, err := here.cq.Wait(ctx, out); err != nil {
				assert.ErrorIs(t, err, context.Canceled)
				return
			}
		}
	})
	for range 4 {
		a, err := here.d.NewQueuePair(here.cq, Options{})
		require.NoError(t, err)
		b, err := there.d.NewQueuePair(there.cq, Options{})
		require.NoError(t, err)
		require.NoError(t, a.Connect(b.Address()))
		require.NoError(t, b.Connect(a.Address()))
		for range 2 {
			wg.Go(func() { assert.ErrorIs(t, postUntilClosed(a, there.r, region), ErrClosed) })
		}
		wg.Go(func() {
			time.Sleep(20 * time.Millisecond)
			errs := []error{region.Close()}
			time.Sleep(5 * time.Millisecond)
			assert.NoError(t, errors.Join(append(errs, b.Close(), a.Close())...))
		})
	}
	wg.Wait()
	cancel()
	poller.Wait()
}

func postUntilClosed(qp *QueuePair, remote, local *Region) error {
	l, err := NewList(8, 8)
	if err != nil {
		return err
	}
	defer l.Close()
	for {
		for i := range uint64(8) {
			p := Piece{Region: local, Length: 4096}
			if err := l.Add([]Op{Read, Write}[i%2], i, Signaled, remote.Address(), remote.RKey(), p); err != nil {
				return err
			}
		}
		_, err := qp.Post(l)
		l.Reset()
		if err != nil && !errors.Is(err, syscall.ENOMEM) {
			return err
		}
	}
}

func TestHeapIsPinned(t *testing.T) {
	here, there := newPair(t, 1<<20, Options{})
	heap, err := here.d.Register(make([]byte, 1<<20), LocalWrite)
	require.NoError(t, err)
	defer func() { require.NoError(t, heap.Close()) }()
	fill(there.r.Bytes(), 9)
	require.Equal(t, Success, here.one(t, Read, there.r.Address(), there.r.RKey(), Piece{Region: heap, Length: 1 << 20}))
	require.True(t, bytes.Equal(there.r.Bytes(), heap.Bytes()))
}

func TestAddressIsJSON(t *testing.T) {
	a := Address{LID: 3, GID: netip.MustParseAddr("::ffff:10.9.9.1"), QPN: 17, PSN: 123456, MTU: 4096, Reads: 16}
	text, err := json.Marshal(a)
	require.NoError(t, err)
	require.JSONEq(t, `{"lid":3,"gid":"::ffff:10.9.9.1","qpn":17,"psn":123456,"mtu":4096,"reads":16}`, string(text))
	var b Address
	require.NoError(t, json.Unmarshal(text, &b))
	require.Equal(t, a, b)
}

func TestPickGID(t *testing.T) {
	gid := func(index int, kind GIDType, address string) GID {
		return GID{index, kind, netip.MustParseAddr(address)}
	}
	p := Port{GIDs: []GID{
		gid(0, RoCEv1, "fe80::1"), gid(1, RoCEv2, "fe80::1"), gid(2, RoCEv1, "::ffff:10.0.0.1"), gid(3, RoCEv2, "2001:db8::1"),
		gid(4, RoCEv2, "::ffff:10.0.0.1"), gid(5, RoCEv2, "::ffff:10.0.0.2"),
	}}
	for n, want := range map[int]int{6: 4, 4: 3, 3: 1, 1: 0} {
		q := Port{GIDs: p.GIDs[:n]}
		g, ok := q.PickGID()
		require.True(t, ok)
		require.Equal(t, want, g.Index, "of the first %d", n)
	}
	_, ok := (&Port{}).PickGID()
	require.False(t, ok)
}

func TestCodes(t *testing.T) {
	require.EqualValues(t, 14, timeoutCode(defaultTimeout))
	require.EqualValues(t, 1, timeoutCode(1))
	require.EqualValues(t, 31, timeoutCode(1<<62))
	for bytes, want := range map[int]uint32{256: 1, 1024: 3, 4096: 5} {
		code, err := mtuCode(bytes)
		require.NoError(t, err)
		require.Equal(t, want, code)
		require.Equal(t, bytes, mtuBytes(code))
	}
	_, err := mtuCode(1500)
	require.Error(t, err)
	require.Contains(t, failed("ibv_reg_mr", syscall.ENOMEM).Error(), "ulimit -l")
	require.ErrorIs(t, failed("ibv_alloc_pd", syscall.ENOMEM), syscall.ENOMEM)
	require.NoError(t, Success.Err())
	require.Contains(t, Status(200).String(), "200")
}

// BenchmarkTransfer has 16 requests outstanding, and posts and polls them in halves.
func BenchmarkTransfer(b *testing.B) {
	for _, op := range []Op{Read, Write} {
		for _, size := range []int{8, 4 << 10, 64 << 10, 1 << 20} {
			b.Run(fmt.Sprintf("%s/%d", map[Op]string{Read: "READ", Write: "WRITE"}[op], size), func(b *testing.B) {
				benchmark(b, op, size, 16)
			})
		}
	}
}

// BenchmarkLatency has one request outstanding.
func BenchmarkLatency(b *testing.B) {
	b.Run("READ/8", func(b *testing.B) { benchmark(b, Read, 8, 1) })
	b.Run("WRITE/8", func(b *testing.B) { benchmark(b, Write, 8, 1) })
	b.Run("WRITE/4096", func(b *testing.B) { benchmark(b, Write, 4096, 1) })
}

func benchmark(b *testing.B, op Op, size, depth int) {
	b.Helper()
	here, there := newPair(b, size*depth, Options{})
	out := make([]Completion, depth)
	step := max(1, depth/2)
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	posted, done := 0, 0
	for done < b.N {
		for posted < b.N && posted-done <= depth-step {
			for n := min(step, b.N-posted); n > 0; n-- {
				at := posted % depth * size
				p := Piece{Region: here.r, Offset: at, Length: size}
				if err := here.l.Add(op, uint64(posted), Signaled, there.r.Address()+uint64(at), there.r.RKey(), p); err != nil {
					b.Fatal(err)
				}
				posted++
			}
			if _, err := here.qp.Post(here.l); err != nil {
				b.Fatal(err)
			}
			here.l.Reset()
		}
		n, err := here.cq.Poll(out)
		if err != nil {
			b.Fatal(err)
		}
		for _, c := range out[:n] {
			if c.Status != Success {
				b.Fatal(c.Status)
			}
		}
		done += n
	}
}
