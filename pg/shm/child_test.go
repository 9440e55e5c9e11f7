package shm

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A child is the test binary once more, with another job: see children.
const childEnv = "SHM_TEST_CHILD"

// children are what a child process can do. Its files are those that the parent has passed, from number 3 on.
var children = map[string]func(args []string, file func(i int) *os.File) error{
	"echo":  echoChild,
	"flood": floodChild,
	"room":  roomChild,
	"sum":   sumChild,
}

// runChild does a child's job.
func runChild(job string) int {
	args := strings.Fields(job)
	err := children[args[0]](args[1:], func(i int) *os.File { return os.NewFile(uintptr(3+i), "passed") })
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, job, err)
		return 1
	}
	return 0
}

// startChild starts a child that is killed with the test at the latest.
func startChild(tb testing.TB, job string, files ...*os.File) *exec.Cmd {
	tb.Helper()
	cmd := childCommand(tb, job, files...)
	require.NoError(tb, cmd.Start())
	return cmd
}

func childCommand(tb testing.TB, job string, files ...*os.File) *exec.Cmd {
	tb.Helper()
	exe, err := os.Executable()
	require.NoError(tb, err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childEnv+"="+job)
	cmd.Stderr, cmd.ExtraFiles = os.Stderr, files
	tb.Cleanup(func() {
		if cmd.Process != nil && cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	return cmd
}

// echoChild sends back what it gets, until the ring ends: files are its bell, the parent's, the ring to it; and the ring back comes
// from the parent, too, which has created both: the child is the consumer of one and takes over the producer of the other.
func echoChild(args []string, file func(i int) *os.File) error {
	spin, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	own, err := mapBell(file(0))
	if err != nil {
		return err
	}
	parent, err := OpenBell(file(1))
	if err != nil {
		return err
	}
	in, err := OpenRing(file(2), parent)
	if err != nil {
		return err
	}
	r, err := mapRing(file(3), in.Size())
	if err != nil {
		return err
	}
	out := &Producer{end: end{r: r, peer: parent}}
	for {
		own.Wait(func() bool { return len(in.Ready()) > 0 || in.Err() != nil }, time.Duration(spin)*time.Microsecond, time.Second)
		if errors.Is(in.Err(), ErrEnded) {
			return nil
		}
		for p := in.Ready(); len(p) > 0; p = in.Ready() {
			n := copy(out.Free(), p)
			out.Commit(n)
			in.Consume(n)
		}
	}
}

// echo starts a process that sends back what it gets.
func echo(tb testing.TB, ringBytes int, spin time.Duration) (own *Bell, p *Producer, c *Consumer) {
	tb.Helper()
	own, err := NewBell()
	require.NoError(tb, err)
	theirs, err := NewBell()
	require.NoError(tb, err)
	p, there, err := CreateRing(ringBytes, theirs)
	require.NoError(tb, err)
	back, bf, err := CreateRing(ringBytes, own)
	require.NoError(tb, err)
	c, err = OpenRing(bf, theirs)
	require.NoError(tb, err)
	cmd := startChild(tb, "echo "+strconv.Itoa(int(spin.Microseconds())), theirs.File(), own.File(), there, bf)
	tb.Cleanup(func() {
		require.NoError(tb, p.Close())
		require.NoError(tb, cmd.Wait())
		require.NoError(tb, c.Close())
		require.NoError(tb, back.r.release())
		for _, x := range []io.Closer{own, theirs, there, bf} {
			require.NoError(tb, x.Close())
		}
	})
	return own, p, c
}

// floodChild writes the stream of numbered bytes into the ring that is file 0, forever, in pieces of all sizes.
func floodChild(_ []string, file func(i int) *os.File) error {
	r, err := mapRing(file(0), floodRing)
	if err != nil {
		return err
	}
	p := &Producer{end: end{r: r, peer: &counter{}}}
	for at := 0; p.Err() == nil; {
		free := p.Free()
		n := min(len(free), at%977+1)
		for i := range n {
			free[i] = numbered(at + i)
		}
		p.Commit(n)
		at += n
	}
	return nil
}

const floodRing = 1 << 16

// numbered is the byte at a place in the stream.
func numbered(at int) byte { return byte(at ^ at>>8 ^ at>>16) }

// address tells other processes of a test where a member's files are.
type address struct{ Pid, Outbox, Bell int }

func (a address) open(fd int) (*os.File, error) {
	return os.OpenFile(fmt.Sprintf("/proc/%d/fd/%d", a.Pid, fd), os.O_RDWR, 0)
}

var childLayout = Layout{Tracks: 2, Slots: 4, SlotBytes: 8192}

// seat is a member of a room of several processes.
type seat struct {
	room *Room
	bell *Bell
	sent int
	got  []int // chunks of each member
}

// join makes a member: tell passes its address on, and all is what comes back, everybody's.
func join(l Layout, me, n int, tell func(address) ([]address, error)) (*seat, error) {
	box, err := NewOutbox(l, n)
	if err != nil {
		return nil, err
	}
	bell, err := NewBell()
	if err != nil {
		return nil, err
	}
	all, err := tell(address{os.Getpid(), int(box.File().Fd()), int(bell.File().Fd())})
	if err != nil {
		return nil, err
	}
	files, bells := make([]*os.File, n), make([]*Bell, n)
	for k, a := range all {
		if k == me {
			continue
		}
		if files[k], err = a.open(a.Outbox); err != nil {
			return nil, err
		}
		f, err := a.open(a.Bell)
		if err != nil {
			return nil, err
		}
		if bells[k], err = OpenBell(f); err != nil {
			return nil, err
		}
		_ = f.Close()
	}
	r, err := NewRoom(me, box, files, bells)
	for _, f := range files {
		_ = f.Close()
	}
	return &seat{room: r, bell: bell, got: make([]int, n)}, err
}

// chunk is what member k publishes as its i-th.
func chunk(k, i int) (h Header, n int, fill byte) {
	return Header{Seq: uint64(i), Sig: uint64(k), Step: uint32(k ^ i)}, (i * 7919) % (childLayout.SlotBytes + 1), numbered(i + k)
}

// step publishes a chunk if there is room, and reads and checks what there is of each member.
func (s *seat) step() (moved bool, err error) {
	if p := s.room.TryReserve(0); p != nil {
		h, n, fill := chunk(s.room.Me(), s.sent)
		for i := range n {
			p[i] = fill
		}
		s.room.Publish(0, h, n)
		s.sent++
		moved = true
	}
	for k := range s.got {
		if k == s.room.Me() {
			continue
		}
		if err := s.room.Err(k); err != nil {
			return moved, err
		}
		h, p, ok := s.room.TryRead(0, k)
		if !ok {
			continue
		}
		want, n, fill := chunk(k, s.got[k])
		want.Len = uint32(n)
		if h != want || bytes.Count(p, []byte{fill}) != n {
			return moved, fmt.Errorf("chunk %d of member %d: %+v, want %+v", s.got[k], k, h, want)
		}
		s.room.Release(0, k)
		s.got[k]++
		moved = true
	}
	return moved, nil
}

// joinParent joins the room of which the parent is member 0, which tells the others' addresses by the standard input.
func joinParent(l Layout, me, n int) (*seat, *bufio.Reader, error) {
	in := bufio.NewReader(os.Stdin)
	s, err := join(l, me, n, func(a address) (all []address, err error) {
		if err := json.NewEncoder(os.Stdout).Encode(a); err != nil {
			return nil, err
		}
		line, err := in.ReadBytes('\n')
		if err != nil {
			return nil, err
		}
		return all, json.Unmarshal(line, &all)
	})
	return s, in, err
}

// roomChild is member args[0] of args[1], until its input ends or names members that are down.
func roomChild(args []string, _ func(i int) *os.File) error {
	me, _ := strconv.Atoi(args[0])
	n, _ := strconv.Atoi(args[1])
	s, in, err := joinParent(childLayout, me, n)
	if err != nil {
		return err
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		for {
			var k int
			if _, err := fmt.Fscanln(in, &k); err != nil {
				return
			}
			s.room.Down(k)
		}
	}()
	for {
		select {
		case <-over:
			return nil
		default:
		}
		var failed error
		s.bell.Wait(func() bool {
			moved, err := s.step()
			failed = err
			return moved || err != nil
		}, 5*time.Microsecond, 20*time.Millisecond)
		if failed != nil {
			return failed
		}
	}
}

// seats starts children 1 to n-1 of a room whose member 0 is this process. Their job is a format for their number, and n.
func seats(tb testing.TB, l Layout, n int, job string) (*seat, []*exec.Cmd, []io.WriteCloser) {
	tb.Helper()
	cmds, ins, all := make([]*exec.Cmd, n), make([]io.WriteCloser, n), make([]address, n)
	for k := 1; k < n; k++ {
		cmds[k] = childCommand(tb, fmt.Sprintf(job, k, n))
		in, err := cmds[k].StdinPipe()
		require.NoError(tb, err)
		out, err := cmds[k].StdoutPipe()
		require.NoError(tb, err)
		require.NoError(tb, cmds[k].Start())
		require.NoError(tb, json.NewDecoder(out).Decode(&all[k]))
		ins[k] = in
	}
	s, err := join(l, 0, n, func(a address) ([]address, error) {
		all[0] = a
		for k := 1; k < n; k++ {
			if err := json.NewEncoder(ins[k]).Encode(all); err != nil {
				return nil, err
			}
		}
		return all, nil
	})
	require.NoError(tb, err)
	tb.Cleanup(func() {
		for k := range s.room.members {
			if m := &s.room.members[k]; m.bell != nil {
				require.NoError(tb, m.bell.Close())
			}
		}
		require.NoError(tb, s.room.Close())
		require.NoError(tb, s.bell.Close())
	})
	return s, cmds, ins
}
