//go:build rdma && cgo && linux

package verbs

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// childVariable has the test binary be the other process.
const childVariable = "LARDER_VERBS_CHILD"

func TestMain(m *testing.M) {
	if addresses := os.Getenv(childVariable); addresses != "" {
		serve := serve
		if addresses == engineChild {
			serve = serveEngine
		}
		if err := serve(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// timeout is for what takes milliseconds, on machines that are busy with something else.
const timeout = 30 * time.Second

// openDevice opens the first device, or skips the test.
func openDevice(tb testing.TB) *Context {
	tb.Helper()
	names, err := Devices()
	require.NoError(tb, err)
	if len(names) == 0 {
		tb.Skip("no RDMA device here: run the test by go test -exec integration/emul/uml-exec.sh")
	}
	x, err := Open(names[0])
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, x.Close()) })
	return x
}

// end is one end of a connection, with memory.
type end struct {
	x  *Context
	d  *Domain
	cq *CompletionQueue
	qp *QueuePair
	r  *Region
	l  *List
	id uint64
}

// newEnd makes an end with size bytes of mapped memory.
func newEnd(tb testing.TB, x *Context, size int, o Options) *end {
	tb.Helper()
	e := &end{x: x}
	var err error
	e.d, err = x.NewDomain()
	require.NoError(tb, err)
	e.cq, err = x.NewCompletionQueue(1024)
	require.NoError(tb, err)
	e.qp, err = e.d.NewQueuePair(e.cq, o)
	require.NoError(tb, err)
	e.r, err = e.d.Register(mapped(tb, size), LocalWrite|RemoteRead|RemoteWrite|AllowWindows)
	require.NoError(tb, err)
	e.l, err = NewList(256, 4096)
	require.NoError(tb, err)
	tb.Cleanup(func() {
		e.l.Close()
		require.NoError(tb, e.qp.Close())
		require.NoError(tb, e.r.Close())
		require.NoError(tb, e.cq.Close())
		require.NoError(tb, e.d.Close())
	})
	return e
}

func mapped(tb testing.TB, size int) []byte {
	tb.Helper()
	memory, err := syscall.Mmap(-1, 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, syscall.Munmap(memory)) })
	return memory
}

// newPair makes two ends in this process, connected.
func newPair(tb testing.TB, size int, o Options) (here, there *end) {
	tb.Helper()
	x := openDevice(tb)
	here, there = newEnd(tb, x, size, o), newEnd(tb, x, size, o)
	require.NoError(tb, here.qp.Connect(there.qp.Address()))
	require.NoError(tb, there.qp.Connect(here.qp.Address()))
	return here, there
}

// whole is a piece that is the beginning of the end's region.
func (e *end) whole(length int) Piece { return Piece{Region: e.r, Length: length} }

// post posts the list, and empties it.
func (e *end) post(tb testing.TB) {
	tb.Helper()
	n, err := e.qp.Post(e.l)
	require.NoError(tb, err)
	require.Equal(tb, e.l.Len(), n)
	e.l.Reset()
}

// one carries out one request, and gives its outcome.
func (e *end) one(tb testing.TB, op Op, remote uint64, rkey uint32, local ...Piece) Status {
	tb.Helper()
	e.id++
	require.NoError(tb, e.l.Add(op, e.id, Signaled, remote, rkey, local...))
	return e.outcome(tb)
}

// outcome posts the list, of which the last request has the id of e, and waits for that.
func (e *end) outcome(tb testing.TB) Status {
	tb.Helper()
	e.post(tb)
	got := e.await(tb, 1)
	require.Equal(tb, e.id, got[0].ID)
	require.Equal(tb, e.qp.QPN(), got[0].QPN)
	return got[0].Status
}

// await waits for n completions.
func (e *end) await(tb testing.TB, n int) []Completion {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	list := make([]Completion, n)
	for done := 0; done < n; {
		k, err := e.cq.Wait(ctx, list[done:])
		require.NoError(tb, err, "%d of %d completions", done, n)
		done += k
	}
	return list
}

// fill makes bytes that differ by seed and by place.
func fill(p []byte, seed int) {
	x := uint32(seed)*2654435761 + 1
	for i := range p {
		x = x*1664525 + 1013904223
		p[i] = byte(x >> 24)
	}
}

// message is what the two processes say to each other, a line of JSON each.
type message struct {
	Do      string   `json:"do,omitempty"`
	Address *Address `json:"address,omitempty"`
	Remote  uint64   `json:"remote,omitempty"`
	RKey    uint32   `json:"rkey,omitempty"`
	From    int      `json:"from,omitempty"`
	Length  int      `json:"length,omitempty"`
	Sum     uint32   `json:"sum,omitempty"`
	Error   string   `json:"error,omitempty"`
}

// child is the other process.
type child struct {
	tb    testing.TB
	in    io.WriteCloser
	out   *bufio.Reader
	hello message
}

// childSize is the memory that the child registers.
const childSize = 8 << 20

func startChild(tb testing.TB) *child {
	tb.Helper()
	cmd := exec.Command(os.Args[0]) // it ends when its input does
	cmd.Env = append(os.Environ(), childVariable+"=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	require.NoError(tb, err)
	out, err := cmd.StdoutPipe()
	require.NoError(tb, err)
	require.NoError(tb, cmd.Start())
	tb.Cleanup(func() {
		require.NoError(tb, in.Close())
		require.NoError(tb, cmd.Wait())
	})
	c := &child{tb: tb, in: in, out: bufio.NewReader(out)}
	c.hello = c.receive()
	return c
}

func (c *child) receive() (m message) {
	c.tb.Helper()
	line, err := c.out.ReadBytes('\n')
	require.NoError(c.tb, err)
	require.NoError(c.tb, json.Unmarshal(line, &m))
	require.Empty(c.tb, m.Error)
	return m
}

// ask has the child do something.
func (c *child) ask(m message) message {
	c.tb.Helper()
	require.NoError(c.tb, json.NewEncoder(c.in).Encode(m))
	return c.receive()
}

// connectChild makes an end that is connected with one in another process.
func connectChild(tb testing.TB, size int, o Options) (*end, *child) {
	tb.Helper()
	e := newEnd(tb, openDevice(tb), size, o)
	c := startChild(tb)
	require.NoError(tb, e.qp.Connect(*c.hello.Address))
	own := e.qp.Address()
	c.ask(message{Do: "connect", Address: &own})
	return e, c
}

// served is the state of the child.
type served struct {
	qp *QueuePair
	r  *Region
}

// serve is the child's main.
func serve(in io.Reader, out io.Writer) error {
	names, err := Devices()
	if err != nil || len(names) == 0 {
		return fmt.Errorf("no device: %w", err)
	}
	x, err := Open(names[0])
	if err != nil {
		return err
	}
	d, err := x.NewDomain()
	if err != nil {
		return err
	}
	cq, err := x.NewCompletionQueue(16)
	if err != nil {
		return err
	}
	s := &served{}
	if s.qp, err = d.NewQueuePair(cq, Options{}); err != nil {
		return err
	}
	if s.r, err = d.Register(make([]byte, childSize), LocalWrite|RemoteRead|RemoteWrite); err != nil {
		return err
	}
	encoder, decoder := json.NewEncoder(out), json.NewDecoder(in)
	address := s.qp.Address()
	if err := encoder.Encode(message{Address: &address, Remote: s.r.Address(), RKey: s.r.RKey()}); err != nil {
		return err
	}
	for {
		var m message
		if err := decoder.Decode(&m); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		answer, err := s.do(m)
		if err != nil {
			answer.Error = err.Error()
		}
		if err := encoder.Encode(answer); err != nil {
			return err
		}
	}
}

func (s *served) do(m message) (answer message, err error) {
	switch m.Do {
	case "connect":
		return answer, s.qp.Connect(*m.Address)
	case "sum":
		return message{Sum: crc32.ChecksumIEEE(s.r.Bytes()[m.From : m.From+m.Length])}, nil
	case "deregister":
		return answer, s.r.Close()
	case "fail":
		return answer, s.qp.Fail()
	}
	return answer, fmt.Errorf("%q is nothing to do", m.Do)
}
