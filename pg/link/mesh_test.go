package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/pg/shm"
)

// TestHostsAreDividedAlike whatever the reason why some do not share memory, for each tells all what it can.
func TestHostsAreDividedAlike(t *testing.T) {
	for name, c := range map[string]struct {
		rows []string // 1: shares with that member
		want [][]int
	}{
		"one host":                  {[]string{"111", "111", "111"}, [][]int{{0, 1, 2}}},
		"each by itself":            {[]string{"100", "010", "001"}, [][]int{{0}, {1}, {2}}},
		"two hosts, mixed":          {[]string{"1010", "0101", "1010", "0101"}, [][]int{{0, 2}, {1, 3}}},
		"one pair cannot":           {[]string{"110", "111", "011"}, [][]int{{0, 1}, {2}}},
		"one says so, one does not": {[]string{"11", "01"}, [][]int{{0}, {1}}},
		"a row that is too short":   {[]string{"11", ""}, [][]int{{0}, {1}}},
	} {
		t.Run(name, func(t *testing.T) {
			rows := make([][]byte, len(c.rows))
			for i, text := range c.rows {
				rows[i] = make([]byte, (len(text)+7)/8)
				for k, bit := range text {
					if bit == '1' {
						setBit(rows[i], k)
					}
				}
			}
			require.Equal(t, c.want, hosts(rows))
		})
	}
}

// TestAMeshOfTwoHosts has a room on each, lanes everywhere, and the same hosts at all members.
func TestAMeshOfTwoHosts(t *testing.T) {
	var nodes []*Node
	for rank := range 5 {
		n, _ := node(t, Config{Rank: rank, Host: string("ABABC"[rank]), Listen: []string{loopback}, Transports: []string{"shm", "tcp"}})
		nodes = append(nodes, n)
	}
	connect(t, nodes...)
	ms := make([]*Mesh, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() {
			layout := shm.Layout{Tracks: 1 + i%2, Slots: 4, SlotBytes: 4 << 10} // each host has its own
			var err error
			ms[i], err = n.Mesh(within(t, wait), MeshConfig{Group: "g", Me: i, Members: members(nodes...), Layout: layout})
			errOf(t, err)
		})
	}
	wg.Wait()
	for i, m := range ms {
		require.Equal(t, [][]int{{0, 2}, {1, 3}, {4}}, m.Hosts())
		room, local := m.Room()
		for k := range ms {
			switch {
			case k == i:
			case k%2 == i%2 && k < 4 && i < 4:
				require.Equal(t, TransportShm, m.Transport(k))
			default:
				require.Equal(t, TransportTCP, m.Transport(k))
			}
		}
		if i == 4 {
			require.Nil(t, room)
			require.Nil(t, local)
			continue
		}
		require.Equal(t, []int{i % 2, i%2 + 2}, local)
		require.Equal(t, i/2, room.Me())
		b := room.TryReserve(0)
		room.Publish(0, shm.Header{Seq: uint64(i)}, copy(b, "from "+string(rune('0'+i))))
	}
	for i, m := range ms[:4] {
		room, _ := m.Room()
		mate := 1 - i/2
		require.True(t, nodes[i].Bell().Wait(func() bool { _, _, ok := room.TryRead(0, mate); return ok }, 0, wait))
		h, p, _ := room.TryRead(0, mate)
		require.Equal(t, uint64((i+2)%4), h.Seq)
		require.Equal(t, fmt.Sprint("from ", (i+2)%4), string(p))
	}
	closeAll(t, ms...)
}

// TestTransportsAreChosen by the member with the higher rank, among those that both have and that lead there.
func TestTransportsAreChosen(t *testing.T) {
	for name, c := range map[string]struct {
		low, high Config
		want      string
		text      string
	}{
		"memory":                       {Config{}, Config{}, "shm", ""},
		"the higher's order":           {Config{Transports: []string{"shm", "unix"}}, Config{Transports: []string{"unix", "shm"}}, "unix", ""},
		"other hosts":                  {Config{Host: "a"}, Config{Host: "b"}, "unix", ""},
		"the lower does not share":     {Config{Transports: []string{"unix", "tcp"}}, Config{}, "unix", ""},
		"the lower listens":            {Config{Host: "a", Transports: []string{"tcp"}, Listen: []string{loopback}}, Config{}, "tcp", ""},
		"tcp though the memory is one": {Config{Listen: []string{loopback}}, Config{Transports: []string{"tcp"}}, "tcp", ""},
		"nothing in common":            {Config{Transports: []string{"shm"}}, Config{Transports: []string{"unix"}}, "", "no transport leads there"},
		"tcp, and nobody listens":      {Config{}, Config{Transports: []string{"tcp"}, Listen: []string{loopback}}, "", "no transport leads there"},
		"an engine that is not there":  {Config{}, Config{Transports: []string{"rdma", "engine"}}, "", "no transport leads there"},
	} {
		t.Run(name, func(t *testing.T) {
			c.high.Rank = 1
			a, _ := node(t, c.low)
			b, _ := node(t, c.high)
			connect(t, a, b)
			ms, errs := meshes(t.Context(), "g", 1, a, b)
			for i := range ms {
				if c.text != "" {
					require.ErrorIs(t, errs[i], ErrNoTransport)
					require.ErrorContains(t, errs[i], c.text)
					continue
				}
				require.NoError(t, errs[i])
				require.Equal(t, c.want, ms[i].Transport(1-i))
			}
		})
	}
}

// TestMembersMayComeLate and in any order, and several meshes be built at once.
func TestMembersMayComeLate(t *testing.T) {
	overAll(t, func(t *testing.T, kind transportKind) {
		t.Helper()
		nodes := nodesOver(t, kind, 4)
		type result struct {
			m   *Mesh
			err error
		}
		results := make(chan result, 12)
		for i, k := range []int{2, 0, 3, 1} {
			for epoch := range uint64(3) {
				go func() {
					time.Sleep(time.Duration(i) * 15 * time.Millisecond)
					m, err := nodes[k].Mesh(t.Context(), MeshConfig{
						Group: "g", Epoch: (epoch + uint64(k)) % 3, Me: k, Members: members(nodes...), Layout: small,
					})
					results <- result{m, err}
				}()
			}
		}
		for range cap(results) {
			r := <-results
			require.NoError(t, r.err)
			require.NoError(t, r.m.Close())
		}
		for _, n := range nodes {
			n.mu.Lock()
			for _, p := range n.peers {
				require.Empty(t, p.c.early)
			}
			n.mu.Unlock()
		}
	})
}

// TestWhoIsMissing is named when time is over, and the mesh can be built later, with the same epoch.
func TestWhoIsMissing(t *testing.T) {
	nodes := nodesOver(t, transportKinds[0], 3)
	cfg := MeshConfig{Group: "g", Epoch: 4, Me: 0, Members: members(nodes...), Layout: small}
	for range 3 {
		_, err := nodes[0].Mesh(within(t, 20*time.Millisecond), cfg)
		var missing *MissingError
		require.ErrorAs(t, err, &missing)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Len(t, missing.Missing, 2)
		require.ErrorContains(t, err, `the mesh of group "g", epoch 4, lacks rank 1 (incarnation 0000000000000065): its call for the mesh; rank 2`)
	}
	two := make(chan error, 1) // one that waits all along, while another comes and goes
	go func() {
		m, err := nodes[1].Mesh(t.Context(), MeshConfig{Group: "g", Epoch: 4, Me: 1, Members: members(nodes...), Layout: small})
		if err == nil {
			err = m.Close()
		}
		two <- err
	}()
	for range 3 {
		_, err := nodes[0].Mesh(within(t, 20*time.Millisecond), cfg)
		var missing *MissingError
		require.ErrorAs(t, err, &missing)
		require.Equal(t, []Missing{{Member{2, 102}, "its call for the mesh"}}, missing.Missing)
	}
	last := make(chan error, 1)
	go func() {
		m, err := nodes[2].Mesh(t.Context(), MeshConfig{Group: "g", Epoch: 4, Me: 2, Members: members(nodes...), Layout: small})
		if err == nil {
			err = m.Close()
		}
		last <- err
	}()
	m, err := nodes[0].Mesh(within(t, wait), cfg)
	require.NoError(t, err)
	require.NoError(t, <-two)
	require.NoError(t, <-last)
	require.NoError(t, m.Close())
}

// TestMembersThatDisagree are told about what.
func TestMembersThatDisagree(t *testing.T) {
	another := "it means another thing by the mesh of group \"g\", epoch 0"
	for name, c := range map[string]struct {
		spoil func(*MeshConfig)
		text  string
	}{
		"the members": {func(c *MeshConfig) { c.Members = c.Members[:2] }, another},
		"the order":   {func(c *MeshConfig) { c.Members[0], c.Members[1], c.Me = c.Members[1], c.Members[0], 0 }, another},
		"the layout": {
			func(c *MeshConfig) { c.Layout.Slots = 8 },
			"it means another room by the mesh of group \"g\", epoch 0: of layout {Tracks:2 Slots:",
		},
	} {
		t.Run(name, func(t *testing.T) {
			nodes := nodesOver(t, transportKinds[0], 3)
			done := make(chan error, 2)
			for _, i := range []int{0, 2} {
				go func() {
					_, err := nodes[i].Mesh(within(t, wait), MeshConfig{Group: "g", Me: i, Members: members(nodes...), Layout: small})
					done <- err
				}()
				require.Eventually(t, func() bool {
					nodes[i].mu.Lock()
					defer nodes[i].mu.Unlock()
					return len(nodes[i].parties) == 1
				}, wait, time.Millisecond)
			}
			cfg := MeshConfig{Group: "g", Me: 1, Members: members(nodes...), Layout: small}
			c.spoil(&cfg)
			_, err := nodes[1].Mesh(within(t, wait), cfg)
			for _, err := range []error{err, <-done, <-done} {
				var refused *RefusedError
				require.ErrorAs(t, err, &refused)
				require.Equal(t, RefusedMismatch, refused.Code)
				require.ErrorContains(t, err, c.text)
			}
		})
	}
}

// TestAMemberThatHasFailed says so when it leaves: whose fault that is, if it is another one's, and else its own.
func TestAMemberThatHasFailed(t *testing.T) {
	p := &party{members: []Member{{Rank: 4}, {Rank: 7}, {Rank: 9}}, seats: []*seat{nil, {theirs: 5}, {}}, number: 3, begun: true}
	for _, c := range []struct {
		why    RefusedError
		blames []int
	}{
		{RefusedError{Code: RefusedFailed, Text: "no memory"}, []int{7}},
		{RefusedError{Code: RefusedFailed, Text: "no lane", Blames: []int{9}}, []int{9}},
		{RefusedError{Code: RefusedMismatch, Text: "another order"}, nil},
	} {
		refused, is := errors.AsType[*RefusedError](p.hearLeave(1, &partyMessage{From: 5, To: 3, Why: &c.why}))
		require.True(t, is)
		require.Equal(t, RefusedError{Code: c.why.Code, Text: c.why.Text, Blames: c.blames, By: "rank 7"}, *refused)
	}
}

// TestAMemberThatOneHasLost is blamed by those who only hear of it, and not who tells them.
func TestAMemberThatOneHasLost(t *testing.T) {
	nodes := nodesOver(t, transportKinds[0], 3)
	all := members(nodes...)
	done := map[int]chan error{0: make(chan error, 1), 2: make(chan error, 1)}
	for i, done := range done {
		go func() {
			_, err := nodes[i].Mesh(within(t, wait), MeshConfig{Group: "g", Me: i, Members: all, Layout: small})
			done <- err
		}()
	}
	require.Eventually(t, func() bool { // both wait for rank 1
		nodes[1].mu.Lock()
		defer nodes[1].mu.Unlock()
		return len(nodes[1].connection(0, 100).early) == 1 && len(nodes[1].connection(2, 102).early) == 1
	}, wait, time.Millisecond)
	nodes[0].mu.Lock()
	c := nodes[0].connection(1, 101)
	nodes[0].mu.Unlock()
	c.fail(ErrLost)
	down, is := errors.AsType[*DownError](<-done[0])
	require.True(t, is)
	require.Equal(t, 1, down.Rank)
	refused, is := errors.AsType[*RefusedError](<-done[2])
	require.True(t, is)
	require.Equal(t, []int{1}, refused.Blames, "%v", refused)
}

// TestWhyThereIsNoLane: a connection that cannot be opened is the peer's fault, unless it is for want of something here.
func TestWhyThereIsNoLane(t *testing.T) {
	who := identity{Rank: 3}
	for name, c := range map[string]struct {
		err    error
		lane   bool  // a LaneError
		blames []int // of a RefusedError
	}{
		"nobody listens":           {syscall.ECONNREFUSED, true, nil},
		"no way there":             {syscall.EHOSTUNREACH, true, nil},
		"no time":                  {context.DeadlineExceeded, true, nil},
		"the peer hung up":         {io.EOF, false, []int{3}},
		"the peer reset it":        {syscall.ECONNRESET, false, []int{3}},
		"the peer knows nothing":   {&RefusedError{Code: RefusedUnknown}, false, []int{}},
		"too many files here":      {syscall.EMFILE, false, nil},
		"no memory here":           {&net.OpError{Op: "dial", Err: syscall.ENOBUFS}, false, nil},
		"no port left, and no way": {errors.Join(syscall.EHOSTUNREACH, syscall.EADDRNOTAVAIL), false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			err := noLane(who, TransportTCP, c.err)
			lane, isLane := errors.AsType[*LaneError](err)
			require.Equal(t, c.lane, isLane, "%v", err)
			if isLane {
				require.Equal(t, 3, lane.Rank)
			}
			refused, isRefused := errors.AsType[*RefusedError](err)
			require.Equal(t, c.blames != nil, isRefused, "%v", err)
			if isRefused {
				require.ElementsMatch(t, c.blames, refused.Blames)
				require.Equal(t, RefusedClosed, refused.Code)
			}
		})
	}
}

// TestMeshesThatCannotBe are refused at once.
func TestMeshesThatCannotBe(t *testing.T) {
	nodes := nodesOver(t, transportKinds[0], 2)
	all := members(nodes...)
	for text, cfg := range map[string]MeshConfig{
		"a mesh has 1 to 1024 members, not 0":                       {},
		"member 2 of a mesh of 2":                                   {Me: 2, Members: all},
		"and this is rank 0":                                        {Me: 1, Members: all},
		"rank 0 is two members":                                     {Members: []Member{all[0], all[1], all[0]}},
		"at most 256 bytes":                                         {Group: strings.Repeat("x", 257), Members: all},
		"lacks rank 1 (incarnation 0000000000000007): a connection": {Members: []Member{all[0], {1, 7}}},
	} {
		_, err := nodes[0].Mesh(t.Context(), cfg)
		require.ErrorContains(t, err, text)
	}
	alone, err := nodes[0].Mesh(t.Context(), MeshConfig{Members: all[:1]})
	require.NoError(t, err)
	require.Equal(t, [][]int{{0}}, alone.Hosts())
	require.NoError(t, alone.Close())
	done := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_, err := nodes[0].Mesh(ctx, MeshConfig{Group: "g", Members: all})
		done <- err
	}()
	require.Eventually(t, func() bool {
		nodes[0].mu.Lock()
		defer nodes[0].mu.Unlock()
		return len(nodes[0].parties) == 1
	}, wait, time.Millisecond)
	_, err = nodes[0].Mesh(t.Context(), MeshConfig{Group: "g", Members: all})
	require.ErrorContains(t, err, "is being built already")
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	require.NoError(t, nodes[0].Close())
	_, err = nodes[0].Mesh(t.Context(), MeshConfig{Members: all})
	require.ErrorIs(t, err, ErrClosed)
}

// TestAMemberThatGoesMeanwhile ends the building at all others.
func TestAMemberThatGoesMeanwhile(t *testing.T) {
	nodes := nodesOver(t, transportKinds[0], 3)
	done := make(chan error, 2)
	for i := range 2 {
		go func() {
			_, err := nodes[i].Mesh(within(t, wait), MeshConfig{Group: "g", Me: i, Members: members(nodes...), Layout: small})
			done <- err
		}()
	}
	time.Sleep(10 * time.Millisecond)
	require.NoError(t, nodes[2].Close())
	for range 2 {
		err := <-done
		var down *DownError
		var refused *RefusedError
		require.True(t, errors.As(err, &down) && down.Rank == 2 || errors.As(err, &refused), "%v", err)
	}
	require.NoError(t, nodes[0].Close())
	require.Eventually(t, func() bool { return !nodes[1].Connected(0, 100) }, wait, time.Millisecond)
	_, err := nodes[1].Mesh(within(t, wait), MeshConfig{Group: "g", Me: 1, Members: members(nodes...), Layout: small})
	var missing *MissingError
	require.ErrorAs(t, err, &missing)
	require.ErrorIs(t, err, ErrNotConnected)
}

// TestOffersThatNobodyAsksFor are bounded for each peer, and withdrawn when it gives up.
func TestOffersThatNobodyAsksFor(t *testing.T) {
	nodes := nodesOver(t, transportKinds[0], 2)
	early := func() int {
		nodes[1].mu.Lock()
		defer nodes[1].mu.Unlock()
		return len(nodes[1].peers[0].c.early)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, maxEarly)
	for i := range maxEarly {
		go func() {
			_, err := nodes[0].Mesh(ctx, MeshConfig{Group: "g", Epoch: uint64(i), Members: members(nodes...)})
			done <- err
		}()
	}
	require.Eventually(t, func() bool { return early() == maxEarly }, wait, time.Millisecond)
	_, err := nodes[0].Mesh(ctx, MeshConfig{Group: "too many", Members: members(nodes...)})
	var refused *RefusedError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, RefusedBusy, refused.Code)
	cancel()
	for range maxEarly {
		require.ErrorIs(t, <-done, context.Canceled)
	}
	require.Eventually(t, func() bool { return early() == 0 }, wait, time.Millisecond)
}

// held is what a process has of the kernel: open files, and mappings.
func held(t *testing.T) (open, mapped int) {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	text, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	return len(all), strings.Count(string(text), "larder-ring") + strings.Count(string(text), "larder-outbox")
}

// TestNothingIsLeftOfMeshes that were built and closed, or not built at all, and of pairs.
func TestNothingIsLeftOfMeshes(t *testing.T) {
	for _, kind := range transportKinds { // not beside each other: they are counted
		t.Run(kind.name, func(t *testing.T) {
			nodes := nodesOver(t, kind, 2)
			rounds := 200
			if kind.name == TransportEngine {
				rounds = 20 // each opens connections
			}
			files, mappings, goroutines := 0, 0, 0
			for round := range rounds {
				ms := meshOf(t, "g", uint64(round), nodes...)
				p, _ := ms[0].Lane(1)
				p.Commit(copy(p.Free(), "something"))
				closeAll(t, ms...)
				if round%10 == 9 {
					_, err := nodes[0].Mesh(within(t, time.Millisecond), MeshConfig{Group: "alone", Members: members(nodes...)})
					require.Error(t, err)
					_, _, err = nodes[1].Pair(within(t, wait), "g", 0, 100)
					require.NoError(t, err)
					nodes[1].Unpair("g", -1)
				}
				if round == 10 {
					require.Eventually(t, func() bool { return quiet(nodes) }, wait, time.Millisecond)
					files, mappings = held(t)
					goroutines = runtime.NumGoroutine()
				}
			}
			require.Eventually(t, func() bool {
				f, m := held(t)
				return quiet(nodes) && f <= files+2 && m <= mappings && runtime.NumGoroutine() <= goroutines+2
			}, wait, 5*time.Millisecond, "files %d, mappings %d, goroutines %d", files, mappings, goroutines)
		})
	}
}

// quiet reports whether nodes have no meshes, parties and pairs, and no goroutine of lanes.
func quiet(nodes []*Node) bool {
	for _, n := range nodes {
		n.mu.Lock()
		left := len(n.meshes) + len(n.parties) + len(n.pairs)
		n.mu.Unlock()
		if left > 0 {
			return false
		}
	}
	buf := make([]byte, 1<<20)
	text := string(buf[:runtime.Stack(buf, true)])
	return !strings.Contains(text, "link.(*stream)") && !strings.Contains(text, "link.(*engineLane)")
}
