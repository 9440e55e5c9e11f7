package link

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// TestTwoProcessesConnect whichever calls first, once for all that call, and learn of each other's end.
func TestTwoProcessesConnect(t *testing.T) {
	a, heardA := node(t, Config{})
	b, heardB := node(t, Config{Rank: 1})
	require.False(t, a.Connected(1, 101))
	require.ErrorIs(t, a.Connect(within(t, 20*time.Millisecond), peerOf(b)), context.DeadlineExceeded, "the higher rank dials")
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() { errOf(t, a.Connect(t.Context(), peerOf(b))) })
		wg.Go(func() { errOf(t, b.Connect(t.Context(), peerOf(a))) })
	}
	wg.Wait()
	require.NoError(t, a.Connect(t.Context(), peerOf(b)))
	require.True(t, a.Connected(1, 101))
	require.True(t, a.Local(1, 101))
	require.True(t, b.Connected(0, 100))
	require.False(t, b.Connected(0, 1))
	require.NoError(t, b.Close())
	require.Eventually(t, func() bool { return len(heardA.all()) == 2 }, wait, time.Millisecond)
	require.Equal(t, []string{"up 1/101", "down 1/101"}, heardA.all())
	require.ErrorIs(t, heardA.lastErr(), ErrLeft)
	require.Equal(t, []string{"up 0/100"}, heardB.all(), "who closes hears no more")
	require.False(t, a.Connected(1, 101))
	require.ErrorIs(t, b.Connect(t.Context(), peerOf(a)), ErrClosed)
	require.NoError(t, b.Close())
}

func errOf(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// TestConnectWaitsForAListener that comes later, at an address that is known before.
func TestConnectWaitsForAListener(t *testing.T) {
	free, err := net.Listen("tcp", loopback)
	require.NoError(t, err)
	at := free.Addr().String()
	require.NoError(t, free.Close())
	b, _ := node(t, Config{Rank: 1})
	done := make(chan error, 1)
	to := Peer{Rank: 0, Incarnation: 100, Address: fmt.Appendf(nil, `{"tcp":[%q]}`, at)}
	go func() { done <- b.Connect(t.Context(), to) }()
	time.Sleep(20 * time.Millisecond)
	a, _ := node(t, Config{Listen: []string{at}})
	require.NoError(t, <-done)
	require.NoError(t, a.Connect(t.Context(), peerOf(b)))
	require.False(t, a.Local(1, 101), "they have met by TCP")
}

// TestWhoIsRefused is told why, in words that help, and does not try again; the other side logs the same.
func TestWhoIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		cfg  Config
		to   func(*Peer)
		code string
		text string
	}{
		"another job":         {Config{Rank: 1, Job: "other"}, nil, RefusedJob, "is an address used twice?"},
		"another token":       {Config{Rank: 1, Job: "j", Token: "x"}, nil, RefusedToken, "all processes of a job need the same"},
		"another rank":        {Config{Rank: 7, Job: "j"}, func(p *Peer) { p.Rank = 1 }, RefusedRank, "ask the store for its address again"},
		"another incarnation": {Config{Rank: 1, Job: "j"}, func(p *Peer) { p.Incarnation = 5 }, RefusedRank, "this is rank 0 (incarnation"},
	} {
		t.Run(name, func(t *testing.T) {
			a, heard := node(t, Config{Job: "j"})
			b, _ := node(t, c.cfg)
			to := peerOf(a)
			if c.to != nil {
				c.to(&to)
			}
			err := b.Connect(within(t, wait), to)
			var refused *RefusedError
			require.ErrorAs(t, err, &refused)
			require.Equal(t, c.code, refused.Code)
			require.ErrorContains(t, err, c.text)
			require.Empty(t, heard.all())
		})
	}
}

// TestHellosThatAreRefused which no node of this version sends.
func TestHellosThatAreRefused(t *testing.T) {
	a, _ := node(t, Config{Rank: 1})
	good := func() *hello {
		return &hello{
			Version: protocol, Job: t.Name(), From: identity{Rank: 2, Incarnation: 5}, To: 1, ToIncarnation: 101,
		}
	}
	for code, spoil := range map[string]func(*hello){
		RefusedVersion:         func(h *hello) { h.Version = 99 },
		RefusedRank:            func(h *hello) { h.From.Rank = 1 },
		RefusedRank + " low":   func(h *hello) { h.From.Rank = 0 },
		RefusedHello:           func(h *hello) { h.From.Incarnation = 0 },
		RefusedHello + " host": func(h *hello) { h.From.Host = strings.Repeat("x", maxName+1) },
		RefusedHello + " lane": func(h *hello) { h.Lane = &laneHello{Group: "g"} },
		RefusedStale:           func(h *hello) { h.Lane = &laneHello{Group: "g", Mine: 1, Yours: 1} },
	} {
		t.Run(code, func(t *testing.T) {
			h := good()
			spoil(h)
			conn, err := a.open(t.Context(), way{"unix", a.listener[0].Addr().String()})
			require.NoError(t, err)
			defer func() { require.NoError(t, conn.Close()) }()
			require.NoError(t, writeJSON(conn, frameHello, nil, h))
			_, _, err = readWelcome(newFrameReader(conn))
			var refused *RefusedError
			require.ErrorAs(t, err, &refused)
			require.Equal(t, strings.Fields(code)[0], refused.Code)
		})
	}
	conn, err := a.open(t.Context(), way{"unix", a.listener[0].Addr().String()})
	require.NoError(t, err)
	require.NoError(t, writeFrame(conn, frameHello, nil, []byte("no JSON")))
	_, _, err = readWelcome(newFrameReader(conn))
	require.ErrorContains(t, err, "no JSON object")
	require.NoError(t, conn.Close())
}

// TestAnIncarnationIsReplaced when Connect names another, not when somebody says that he is one; and never comes back.
func TestAnIncarnationIsReplaced(t *testing.T) {
	a, heard := node(t, Config{})
	first, heardFirst := node(t, Config{Rank: 1, Incarnation: 11})
	second, _ := node(t, Config{Rank: 1, Incarnation: 22})
	connect(t, a, first)
	err := second.Connect(within(t, 50*time.Millisecond), peerOf(a))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "try again when the store says so")
	require.True(t, a.Connected(1, 11))
	connect(t, a, second)
	require.False(t, a.Connected(1, 11))
	require.Eventually(t, func() bool { return len(heard.all()) == 3 }, wait, time.Millisecond)
	require.Equal(t, []string{"up 1/11", "down 1/11", "up 1/22"}, heard.all())
	require.Eventually(t, func() bool { return len(heardFirst.all()) == 2 }, wait, time.Millisecond)
	var refused *RefusedError
	require.ErrorAs(t, first.Connect(within(t, wait), peerOf(a)), &refused)
	require.Equal(t, RefusedStale, refused.Code)
	require.ErrorAs(t, a.Connect(within(t, wait), peerOf(first)), &refused)
	require.Equal(t, RefusedStale, refused.Code)
	require.True(t, a.Connected(1, 22))
}

// TestAReplacementNeedNotWait for the store to say so if the one before is gone.
func TestAReplacementNeedNotWait(t *testing.T) {
	a, heard := node(t, Config{})
	first, _ := node(t, Config{Rank: 1, Incarnation: 11})
	connect(t, a, first)
	require.NoError(t, first.Close())
	second, _ := node(t, Config{Rank: 1, Incarnation: 22})
	require.NoError(t, second.Connect(within(t, wait), peerOf(a)))
	require.NoError(t, a.Connect(within(t, wait), peerOf(second)))
	require.Equal(t, []string{"up 1/11", "down 1/11", "up 1/22"}, heard.all())
}

// TestTheSameProcessConnectsAgain after its connection has broken, even if the other side has not noticed.
func TestTheSameProcessConnectsAgain(t *testing.T) {
	a, heard := node(t, Config{})
	b, _ := node(t, Config{Rank: 1})
	connect(t, a, b)
	for i := range 3 {
		b.mu.Lock()
		b.peers[0].c.fail(errors.New("a test"))
		b.mu.Unlock()
		require.NoError(t, b.Connect(within(t, wait), peerOf(a)))
		require.Eventually(t, func() bool { return len(heard.all()) == 3+2*i && a.Connected(1, 101) }, wait, time.Millisecond)
	}
	require.Equal(t, []string{"up 1/101", "down 1/101", "up 1/101"}, heard.all()[:3])
}

// TestQuestionsAreAnswered by the process that is connected, or the asker learns why not.
func TestQuestionsAreAnswered(t *testing.T) {
	block := make(chan struct{})
	a, _ := node(t, Config{Job: "j"})
	b, err := New(Config{Job: "j", Rank: 1, Incarnation: 101, Answer: func(rank int, ask []byte) []byte {
		switch string(ask) {
		case "block":
			<-block
		case "too long":
			return make([]byte, MaxAsk+1)
		}
		return fmt.Appendf(ask, " from %d", rank)
	}})
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	_, err = a.Ask(t.Context(), 1, nil)
	require.ErrorIs(t, err, ErrNotConnected)
	connect(t, a, b)
	var wg sync.WaitGroup
	for i := range maxQuestions {
		wg.Go(func() {
			answer, err := a.Ask(t.Context(), 1, []byte{byte('a' + i)})
			errOf(t, err)
			if want := string(rune('a'+i)) + " from 0"; string(answer) != want {
				t.Errorf("%q, not %q", answer, want)
			}
		})
	}
	wg.Wait()
	big := bytes.Repeat([]byte("x"), MaxAsk-7)
	answer, err := a.Ask(t.Context(), 1, big)
	require.NoError(t, err)
	require.Len(t, answer, MaxAsk)
	_, err = a.Ask(t.Context(), 1, make([]byte, MaxAsk+1))
	require.ErrorContains(t, err, "the most is 65536")
	_, err = a.Ask(t.Context(), 1, []byte("too long"))
	require.ErrorIs(t, err, ErrBusy)
	_, err = b.Ask(t.Context(), 0, nil)
	require.ErrorIs(t, err, ErrBusy, "it answers nothing")

	_, err = a.Ask(within(t, 20*time.Millisecond), 1, []byte("block"))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	refused := make(chan error, 2*maxQuestions)
	for range cap(refused) {
		go func() {
			_, err := a.Ask(t.Context(), 1, nil)
			refused <- err
		}()
	}
	require.ErrorIs(t, <-refused, ErrBusy, "it is not waited for")
	close(block)
	for range cap(refused) - 1 {
		if err := <-refused; err != nil {
			require.ErrorIs(t, err, ErrBusy)
		}
	}
}

// TestAnAnswerThatNeverComes ends with the process.
func TestAnAnswerThatNeverComes(t *testing.T) {
	a, _ := node(t, Config{Job: "j"})
	asked, block := make(chan struct{}), make(chan struct{})
	b, err := New(Config{Job: "j", Rank: 1, Incarnation: 101, Answer: func(int, []byte) []byte {
		close(asked)
		<-block
		return nil
	}})
	require.NoError(t, err)
	connect(t, a, b)
	done := make(chan error, 1)
	go func() {
		_, err := a.Ask(t.Context(), 1, nil)
		done <- err
	}()
	<-asked
	closed := make(chan error, 1)
	go func() { closed <- b.Close() }()
	err = <-done
	var down *DownError
	require.ErrorAs(t, err, &down)
	require.ErrorIs(t, err, ErrLeft)
	require.Equal(t, 1, down.Rank)
	close(block)
	require.NoError(t, <-closed)
}

// TestStrangers cost nothing but their own connection: those that are silent, send nonsense, or are too many.
func TestStrangers(t *testing.T) {
	a, heard := node(t, Config{Listen: []string{loopback}})
	for _, at := range []way{{"unix", a.listener[0].Addr().String()}, {"tcp", a.listener[1].Addr().String()}} {
		for _, text := range []string{
			"GET / HTTP/1.1\r\n\r\n", "\x00\x00\x00\x00\x01\x00\x00\x00", "\xff\xff\xff\xff\x01\x00\x00\x00", "\x02\x00\x00\x00\x03\x00\x00\x00{}",
			"\x02\x00\x00\x00\x01\x02\x00\x00{}",
		} {
			conn, err := a.open(t.Context(), at)
			require.NoError(t, err)
			_, err = conn.Write([]byte(text))
			require.NoError(t, err)
			require.NoError(t, conn.SetReadDeadline(time.Now().Add(wait)))
			for err = nil; err == nil; _, err = conn.Read(make([]byte, 1<<10)) {
			}
			var late net.Error
			require.False(t, errors.As(err, &late) && late.Timeout(), "%q", text)
			require.NoError(t, conn.Close())
		}
	}
	var silent []net.Conn
	for range maxGreeting {
		conn, err := a.open(t.Context(), way{"unix", a.listener[0].Addr().String()})
		require.NoError(t, err)
		silent = append(silent, conn)
	}
	require.Eventually(t, func() bool { return len(a.greeting) == maxGreeting }, wait, time.Millisecond)
	b, _ := node(t, Config{Rank: 1})
	err := b.Connect(within(t, 200*time.Millisecond), peerOf(a))
	require.ErrorContains(t, err, "too many connections at once")
	for _, conn := range silent {
		require.NoError(t, conn.Close())
	}
	connect(t, a, b)
	require.Equal(t, []string{"up 1/101"}, heard.all())
}

// TestSilenceIsNotForEver: who does not say who he is loses the connection.
func TestSilenceIsNotForEver(t *testing.T) {
	t.Parallel()
	a, _ := node(t, Config{})
	conn, err := a.open(t.Context(), way{"unix", a.listener[0].Addr().String()})
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close()) }()
	begun := time.Now()
	_, err = conn.Read(make([]byte, 1))
	require.Error(t, err)
	require.Less(t, time.Since(begun), 2*greetTimeout)
}

// TestAPeerThatIsMad loses its connection when it sends what cannot be, and others do not.
func TestAPeerThatIsMad(t *testing.T) {
	for name, frames := range map[string][]byte{
		"a kind that there is not":  {0, 0, 0, 0, 77, 0, 0, 0},
		"a second hello":            {0, 0, 0, 0, frameHello, 0, 0, 0},
		"a question without number": {1, 0, 0, 0, frameAsk, 0, 0, 0, 1},
		"too long":                  {0, 0, 0, 1, frameAsk, 0, 0, 0},
		"files that have not come":  {0, 0, 0, 0, frameBye, 1, 0, 0},
		"an offer of nothing":       appendFrame(nil, frameOffer, 0, []byte(`{"group":"g","from":"1"}`)),
		"an offer that is no JSON":  appendFrame(nil, frameOffer, 0, []byte(`{`)),
		"a share of nothing":        appendFrame(nil, frameShare, 0, []byte(`{"group":"g","from":"1","to":"2"}`)),
		"a ring of no size":         appendFrame(nil, frameShare, 0, []byte(`{"group":"g","from":"1","to":"2","share":{"engine":{}}}`)),
		"done with nothing":         appendFrame(nil, frameDone, 0, []byte(`{"group":"g","from":"1"}`)),
	} {
		t.Run(name, func(t *testing.T) {
			a, heard := node(t, Config{})
			b, _ := node(t, Config{Rank: 1})
			c, _ := node(t, Config{Rank: 2})
			connect(t, a, b, c)
			b.mu.Lock()
			conn := b.peers[0].c.conn
			b.mu.Unlock()
			_, err := conn.Write(frames)
			require.NoError(t, err)
			require.Eventually(t, func() bool { return !a.Connected(1, 101) }, wait, time.Millisecond)
			require.Eventually(t, func() bool { return len(heard.all()) == 3 }, wait, time.Millisecond)
			require.ErrorIs(t, heard.lastErr(), ErrFrame)
			require.True(t, a.Connected(2, 102))
		})
	}
}

// TestConfigsThatCannotBe are told what to do.
func TestConfigsThatCannotBe(t *testing.T) {
	for text, cfg := range map[string]Config{
		"a job has a name":                         {Incarnation: 1},
		"draw a random one":                        {Job: "j"},
		"they begin with 0":                        {Job: "j", Incarnation: 1, Rank: -1},
		`"pigeon" is no transport: shm, unix`:      {Job: "j", Incarnation: 1, Transports: []string{"pigeon"}},
		"tcp is given twice":                       {Job: "j", Incarnation: 1, Transports: []string{"tcp", "tcp"}},
		"1 addresses to advertise for 0":           {Job: "j", Incarnation: 1, Advertise: []string{"a:1"}},
		"rings of 1 bytes":                         {Job: "j", Incarnation: 1, RingBytes: 1},
		"have at most 256 bytes":                   {Job: strings.Repeat("j", 257), Incarnation: 1},
		"address nowhere: missing port in address": {Job: "j", Incarnation: 1, Listen: []string{loopback}, Advertise: []string{"nowhere"}},
		"link: listen: ":                           {Job: "j", Incarnation: 1, Listen: []string{loopback, "256.0.0.1:0"}},
	} {
		_, err := New(cfg)
		require.ErrorContains(t, err, text)
	}
	a, _ := node(t, Config{})
	for text, to := range map[string]Peer{
		"read an address":                  {Rank: 1, Incarnation: 1, Address: []byte("?")},
		"missing port":                     {Rank: 1, Incarnation: 1, Address: []byte(`{"tcp":["x"]}`)},
		"the name of its Unix socket":      {Rank: 1, Incarnation: 1, Address: fmt.Appendf(nil, `{"unix":%q}`, strings.Repeat("x", 200))},
		"no other process has those":       {Rank: 0, Incarnation: 1, Address: []byte(`{}`)},
		"incarnation 0000000000000000: no": {Rank: 1, Address: []byte(`{}`)},
	} {
		require.ErrorContains(t, a.Connect(t.Context(), to), text)
	}
	b, _ := node(t, Config{Rank: 1})
	err := b.Connect(t.Context(), Peer{Rank: 0, Incarnation: 1, Address: []byte(`{}`)})
	require.ErrorIs(t, err, ErrNoTransport)
}

// TestWildcardsAreAdvertised as addresses that others can dial.
func TestWildcardsAreAdvertised(t *testing.T) {
	a, _ := node(t, Config{Listen: []string{":0"}})
	at, err := parseAddress(a.Address())
	require.NoError(t, err)
	require.NotEmpty(t, at.TCP)
	for _, one := range at.TCP {
		host, _, err := net.SplitHostPort(one)
		require.NoError(t, err)
		require.False(t, net.ParseIP(host).IsUnspecified())
	}
	named, _ := node(t, Config{Listen: []string{loopback}, Advertise: []string{"somewhere:99"}})
	at, err = parseAddress(named.Address())
	require.NoError(t, err)
	require.Equal(t, []string{"somewhere:99"}, at.TCP)
}
