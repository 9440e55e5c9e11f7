package client_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/client"
	"larder/protocol"
	"larder/transfer"
)

func TestNamesAreSetOnceByWhoComesFirst(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 4})
	a, b := open(t, s, client.Config{}), open(t, s, client.Config{})
	won, lost := client.Name{}, 0
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i, c := range []*client.Client{a, b, a, b, a, b} {
		wg.Go(func() {
			n, err := c.PutName(t.Context(), "leader", fmt.Append(nil, i), client.IfAbsent(), client.Leased())
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				won = n
				return
			}
			require.ErrorIs(t, err, client.ErrConflict)
			require.NotZero(t, n.Modified, "it is told of who was first")
			lost++
		})
	}
	wg.Wait()
	require.Equal(t, 5, lost)
	got, err := b.GetName(t.Context(), "leader")
	require.NoError(t, err)
	require.Equal(t, won, got)

	next, err := a.PutName(t.Context(), "leader", []byte("next"), client.IfRevision(got.Modified))
	require.NoError(t, err)
	require.Equal(t, got.Created, next.Created)
	require.Zero(t, next.Session)
	require.ErrorIs(t, b.DeleteName(t.Context(), "leader", client.IfRevision(got.Modified)), client.ErrConflict)
	require.NoError(t, b.DeleteName(t.Context(), "leader", client.IfRevision(next.Modified)))
	require.ErrorIs(t, b.DeleteName(t.Context(), "leader"), client.ErrNotFound)
	_, err = a.GetName(t.Context(), "leader")
	require.ErrorIs(t, err, client.ErrNotFound)
	_, err = a.PutName(t.Context(), "", nil)
	require.ErrorIs(t, err, client.ErrConfig)
	_, err = a.PutName(t.Context(), "k", make([]byte, protocol.MaxNameValueBytes+1))
	require.ErrorIs(t, err, client.ErrConfig)
}

func TestNamesAreListedWhole(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 4})
	c := open(t, s, client.Config{})
	big := make([]byte, 60<<10)
	for i := range 100 { // more than a page holds
		_, err := c.PutName(t.Context(), fmt.Sprintf("big/%02d", i), big)
		require.NoError(t, err)
	}
	list, revision, err := c.ListNames(t.Context(), "big/")
	require.NoError(t, err)
	require.Len(t, list, 100)
	require.EqualValues(t, 100, revision)
	require.Equal(t, "big/42", list[42].Key)
	list, _, err = c.ListNames(t.Context(), "other")
	require.NoError(t, err)
	require.Empty(t, list)
}

func TestTheStatusOfASession(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 4})
	c := open(t, s, client.Config{TTL: time.Second})
	for end := time.Now().Add(1500 * time.Millisecond); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		st := c.SessionStatus()
		require.Equal(t, c.Session(), st.ID)
		require.Equal(t, time.Second, st.TTL)
		require.Less(t, st.Confirmed, st.TTL, "heartbeats are answered in time")
	}
	stopped, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	require.NoError(t, s.Stop(stopped))
	require.Eventually(t, func() bool { return c.SessionStatus().Confirmed > time.Second }, 10*time.Second, time.Millisecond)
}

// watched collects what a watch tells, as text.
type watched struct {
	news chan string
	done chan error
}

func watch(t *testing.T, c *client.Client, prefix string) *watched {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	w := &watched{news: make(chan string, 1000), done: make(chan error, 1)}
	go func() {
		w.done <- c.WatchNames(ctx, prefix, func(changes []client.NameChange) error {
			var text []string
			for _, x := range changes {
				if x.Deleted {
					text = append(text, "-"+x.Key)
				} else {
					text = append(text, x.Key+"="+string(x.Value))
				}
			}
			w.news <- strings.Join(text, " ")
			return nil
		})
	}()
	t.Cleanup(func() {
		cancel()
		require.Error(t, <-w.done)
	})
	return w
}

func (w *watched) next(t *testing.T) string {
	t.Helper()
	select {
	case text := <-w.news:
		return text
	case <-time.After(30 * time.Second):
		require.Fail(t, "nothing is told")
		return ""
	}
}

func TestWatchersAreToldOfNames(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 4})
	a, b := open(t, s, client.Config{}), open(t, s, client.Config{})
	_, err := a.PutName(t.Context(), "x/1", []byte("v"), client.Leased())
	require.NoError(t, err)
	w, none := watch(t, b, "x/"), watch(t, b, "y/")
	require.Equal(t, "x/1=v", w.next(t))
	require.Empty(t, none.next(t))
	for i := range 20 {
		_, err = a.PutName(t.Context(), "x/2", fmt.Append(nil, i), client.Leased())
		require.NoError(t, err)
	}
	var seen []string
	for len(seen) < 20 {
		seen = append(seen, strings.Fields(w.next(t))...)
	}
	want := make([]string, 20)
	for i := range want {
		want[i] = fmt.Sprint("x/2=", i)
	}
	require.Equal(t, want, seen, "nothing is left out")
	require.NoError(t, a.Close(t.Context()))
	require.Equal(t, "-x/1 -x/2", w.next(t), "the names of a client that is closed go")
	require.Empty(t, none.news)

	enough := errors.New("enough")
	require.Equal(t, enough, b.WatchNames(t.Context(), "", func([]client.NameChange) error { return enough }))
}

// Watches above what a session may have waiting are slower, and as right.
func TestManyWatchesOfAClient(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 4})
	c := open(t, s, client.Config{})
	var all []*watched
	for range 20 {
		all = append(all, watch(t, c, "k"))
	}
	for _, w := range all {
		require.Empty(t, w.next(t))
	}
	_, err := c.PutName(t.Context(), "k", []byte("v"))
	require.NoError(t, err)
	for _, w := range all {
		require.Equal(t, "k=v", w.next(t))
	}
}

// engine is a transfer engine that listens, in a directory.
func engine(t *testing.T, name string, d *client.Directory) *transfer.Engine {
	t.Helper()
	cfg := transfer.Config{Name: name, PublishEvery: 50 * time.Millisecond}
	if name != "" {
		cfg.Listen = []string{"127.0.0.1:0"}
	}
	if d != nil {
		cfg.Directory = d
	}
	e, err := transfer.New(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	return e
}

func TestEnginesFindEachOtherOnTheMasters(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 4})
	there, here := client.NewDirectory(), client.NewDirectory()
	target, e := engine(t, "decode-7", there), engine(t, "", here)
	c := open(t, s, client.Config{})
	here.Bind(c)
	_, err := e.OpenName(t.Context(), "decode-7")
	require.ErrorIs(t, err, transfer.ErrUnknown)

	buffer, mem, err := target.Allocate(4096, transfer.BufferOptions{Name: "kv"})
	require.NoError(t, err)
	owner := open(t, s, client.Config{Transfer: target})
	there.Bind(owner)
	var seg *transfer.Segment
	require.Eventually(t, func() bool {
		seg, err = e.OpenName(t.Context(), "decode-7")
		return err == nil && len(seg.Descriptor().Buffers) == 1
	}, 30*time.Second, 10*time.Millisecond)
	batch, err := e.Submit([]transfer.Request{{
		Op: transfer.Write, Segment: seg, Buffer: buffer.Info().Handle, Local: []byte("hello"),
	}}, 5*time.Second)
	require.NoError(t, err)
	require.NoError(t, batch.Wait(t.Context()))
	require.Equal(t, "hello", string(mem[:5]))

	n, err := c.GetName(t.Context(), "segment/decode-7")
	require.NoError(t, err)
	time.Sleep(200 * time.Millisecond)
	again, err := c.GetName(t.Context(), "segment/decode-7")
	require.NoError(t, err)
	require.Equal(t, n.Modified, again.Modified, "what has not changed is not written again")
	for range 1500 { // a descriptor that does not fit as it is
		_, _, err = target.Allocate(64, transfer.BufferOptions{Name: "of many"})
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		d, err := here.Lookup(t.Context(), "decode-7")
		return err == nil && len(d.Buffers) == 1501
	}, 30*time.Second, 20*time.Millisecond)
	require.NoError(t, owner.Close(t.Context()))
	_, err = e.OpenName(t.Context(), "decode-7")
	require.ErrorIs(t, err, transfer.ErrUnknown, "it is gone with its client")
}

func TestValuesAreSentToAnInstanceByName(t *testing.T) {
	s := startServer(t, map[string]int{"cxl": 4})
	decode := open(t, s, client.Config{Instance: "decode/1", Transfer: engine(t, "d", nil)})
	prefill, other := open(t, s, client.Config{}), open(t, s, client.Config{Tenant: "other"})
	key := []byte(strings.Repeat("k", protocol.MaxKeyBytes))
	found := make(chan *client.Sender)
	go func() {
		sender, err := prefill.SendTo(t.Context(), "decode/1", key) // before there is anything to find
		if err != nil {
			t.Error(err)
		}
		found <- sender
	}()
	r, err := decode.Receive(key, []int{100, 200}, nil)
	require.NoError(t, err)
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = prefill.SendTo(short, "decode/1", key)
	require.ErrorIs(t, err, client.ErrTimeout, "who has not published is not found")
	require.NoError(t, r.Publish(t.Context()))
	require.NoError(t, r.Publish(t.Context()))
	sender := <-found
	require.NotNil(t, sender)
	short, cancel = context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = other.SendTo(short, "decode/1", key)
	require.ErrorIs(t, err, client.ErrTimeout, "another tenant does not find it")
	for i, n := range []int{100, 200} {
		require.NoError(t, sender.Launch(i, make([]byte, n)))
		require.NoError(t, r.Wait(t.Context(), i))
	}
	require.NoError(t, sender.Finish())
	gone := func() bool {
		list, _, err := prefill.ListNames(t.Context(), "")
		return err == nil && len(list) == 0
	}
	require.Eventually(t, gone, 30*time.Second, 5*time.Millisecond, "nobody is to find what is complete")
	require.NoError(t, r.Close(t.Context()))
	require.Error(t, r.Publish(t.Context()))

	// The name goes with the Receiver, and when the sender gives up.
	for _, abort := range []bool{false, true} {
		r, err = decode.Receive([]byte("k"), []int{100}, nil)
		require.NoError(t, err)
		require.NoError(t, r.Publish(t.Context()))
		sender, err = prefill.SendTo(t.Context(), "decode/1", []byte("k"))
		require.NoError(t, err)
		if abort {
			sender.Abort()
			require.ErrorIs(t, r.Wait(t.Context(), 0), client.ErrAborted)
			require.Eventually(t, gone, 30*time.Second, 5*time.Millisecond)
		}
		require.NoError(t, r.Close(t.Context()))
		require.Eventually(t, gone, 30*time.Second, 5*time.Millisecond)
		sender.Abort()
	}
}
