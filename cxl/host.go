package cxl

import (
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

var bootID = sync.OnceValues(func() ([16]byte, error) { return readID("/proc/sys/kernel/random/boot_id") })

var hostID = sync.OnceValue(func() [16]byte {
	for _, path := range []string{"/etc/machine-id", "/var/lib/dbus/machine-id"} {
		if id, err := readID(path); err == nil {
			return id
		}
	}
	return [16]byte{}
})

// BootID identifies this boot of this host's kernel: it differs after every restart, and is the same in all of its
// containers.
func BootID() ([16]byte, error) { return bootID() }

// HostID identifies this machine across boots: its machine-id, or zero where it has none. Cloned machines must be
// given distinct ones, as systemd asks too.
func HostID() [16]byte { return hostID() }

// BootName is BootID in hexadecimal; empty if that cannot be told.
func BootName() string {
	id, err := BootID()
	if err != nil {
		return ""
	}
	return hex.EncodeToString(id[:])
}

// HostName is HostID in hexadecimal, as masters, nodes and clients name this machine; the host's name where it has none.
func HostName() string {
	if id := HostID(); id != [16]byte{} {
		return hex.EncodeToString(id[:])
	}
	name, err := os.Hostname()
	if err != nil {
		return "localhost"
	}
	return name
}

// readID reads a 128-bit id written in hexadecimal, with or without dashes.
func readID(path string) (id [16]byte, err error) {
	b, err := os.ReadFile(path) //nolint:gosec // a fixed path
	if err != nil {
		return id, fmt.Errorf("cxl: read id: %w", err)
	}
	raw, err := hex.DecodeString(strings.ReplaceAll(strings.TrimSpace(string(b)), "-", ""))
	if err != nil || len(raw) != len(id) {
		return id, fmt.Errorf("cxl: %s holds no 128-bit id", path)
	}
	copy(id[:], raw)
	return id, nil
}

// PIDNamespace is the inode of this process's pid namespace, or zero if /proc is not mounted. Process ids mean the
// same process only to those in the same namespace of the same boot.
func PIDNamespace() uint64 {
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &st); err != nil {
		return 0
	}
	return st.Ino
}

// ErrNoProcess says that no process has a given id.
var ErrNoProcess = errors.New("no such process")

// ProcessStart reads when a process started, in clock ticks since boot, and its state letter (proc(5): R, S, D, T, Z,
// X, ...). With the pid it names a process for ever within one boot. The error matches [ErrNoProcess] when there is
// none.
func ProcessStart(pid int) (start uint64, state byte, err error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return 0, 0, fmt.Errorf("cxl: pid %d: %w", pid, ErrNoProcess)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("cxl: pid %d: %w", pid, err)
	}
	return parseStat(string(b))
}

// parseStat takes the state and the start time from a line of /proc/PID/stat. The command name in its second field
// may hold spaces and parentheses, so fields are counted from the last closing one.
func parseStat(line string) (start uint64, state byte, err error) {
	const startField = 19 // field 22 of proc(5), counted from the state, which is field 3
	i := strings.LastIndexByte(line, ')')
	fields := strings.Fields(line[i+1:])
	if i < 0 || len(fields) <= startField || len(fields[0]) != 1 || !letter(fields[0][0]) {
		return 0, 0, fmt.Errorf("cxl: unreadable process state %.80q", line)
	}
	start, err = strconv.ParseUint(fields[startField], 10, 64)
	if err != nil {
		return 0, 0, fmt.Errorf("cxl: unreadable process start: %w", err)
	}
	return start, fields[0][0], nil
}

func letter(c byte) bool { return 'a' <= c|0x20 && c|0x20 <= 'z' }

// ProcessDead reports whether the process that had this pid and start time can no longer store to memory: no process
// has the pid, another has, or it is a zombie. It is false when in doubt. The pid must be of this process's own pid
// namespace, as [PIDNamespace] tells. A process's memory goes before it becomes a zombie, but the state shown is its
// main thread's: others may still run, which is why the thread list is asked too.
func ProcessDead(pid int, start uint64) bool {
	now, state, err := ProcessStart(pid)
	switch {
	case errors.Is(err, ErrNoProcess):
		return true
	case err != nil:
		return false
	case now != start:
		return true
	}
	return (state == 'Z' || state == 'X' || state == 'x') && lastThread(pid)
}

// lastThread reports whether a process has no thread but its main one.
func lastThread(pid int) bool {
	entries, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/task")
	if err != nil {
		return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH)
	}
	return len(entries) <= 1
}

// WatchProcess returns a channel that is closed once the process with this pid and start time has ended, all its
// threads with it: from then on it can store nothing more. A start of zero takes whoever has the pid now. stop ends
// the watch and waits for it; the channel is then closed only if the process had ended. The error matches
// [ErrNoProcess] if the process is gone already.
func WatchProcess(pid int, start uint64) (ended <-chan struct{}, stop func(), err error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil, nil, fmt.Errorf("cxl: watch pid %d: %w", pid, ErrNoProcess)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("cxl: watch pid %d: pidfd_open: %w", pid, err)
	}
	// The pid may have been reused before pidfd_open, not after: what it names now is what is watched.
	if start != 0 && ProcessDead(pid, start) {
		closeFD(fd)
		return nil, nil, fmt.Errorf("cxl: watch pid %d: %w", pid, ErrNoProcess)
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		closeFD(fd)
		return nil, nil, fmt.Errorf("cxl: watch pid %d: eventfd: %w", pid, err)
	}
	w := &watch{pidfd: fd, wake: wake, ended: make(chan struct{}), done: make(chan struct{})}
	go w.run()
	return w.ended, sync.OnceFunc(w.stop), nil
}

// watch waits for one process in a goroutine of its own.
type watch struct {
	pidfd, wake int
	ended       chan struct{} // closed when the process has ended
	done        chan struct{} // closed when the goroutine is about to end
}

// run waits until the process ends or stop is called.
func (w *watch) run() {
	defer close(w.done)
	defer closeFD(w.pidfd)
	for {
		fds := []unix.PollFd{
			{Fd: int32(w.pidfd), Events: unix.POLLIN}, //nolint:gosec // a descriptor fits
			{Fd: int32(w.wake), Events: unix.POLLIN},  //nolint:gosec // a descriptor fits
		}
		if _, err := unix.Poll(fds, -1); err != nil {
			continue // EINTR; poll on two valid descriptors has no other lasting error
		}
		if fds[0].Revents != 0 {
			close(w.ended)
			return
		}
		if fds[1].Revents != 0 {
			return
		}
	}
}

// stop wakes the goroutine, waits for it and frees the event descriptor.
func (w *watch) stop() {
	one := [8]byte{1}
	_, _ = unix.Write(w.wake, one[:]) // an eventfd takes the first write always
	<-w.done
	closeFD(w.wake)
}

// closeFD closes a descriptor that holds no unwritten data, so an error would say nothing.
func closeFD(fd int) { _ = unix.Close(fd) }
