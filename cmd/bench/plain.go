package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"larder/transfer"
)

// Plain streams are what a network and two processes do without the engine: a connection that one side fills from its memory
// and the other empties into its own, with system calls of plainPiece. Whoever connects says first, in 16 bytes, what the
// listener is to do (transfer.Op as u8, seven bytes of nothing) and how much memory it is to use (u64, little-endian).
const (
	plainPiece   = 1 << 20
	plainHello   = 16
	plainMemory  = 1 << 30 // at most, of one stream
	plainStreams = 64      // at once
)

// ServePlain takes plain streams from a listener, until that is closed. On the listener's addresses anybody may use the
// network: it is for measuring.
func ServePlain(l net.Listener) {
	room := make(chan struct{}, plainStreams)
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of files, say: it passes
			time.Sleep(plainPatience)
			continue
		}
		select {
		case room <- struct{}{}:
			go func() {
				defer func() { <-room }()
				_ = servePlain(conn) // whoever connected sees it end
			}()
		default:
			_ = conn.Close() // nothing was said
		}
	}
}

// plainPatience is how long a plain stream waits that is in trouble.
const plainPatience = 100 * time.Millisecond

// helloTimeout is how long whoever connects has to say what for.
const helloTimeout = 5 * time.Second

func servePlain(conn net.Conn) (err error) {
	defer func() { err = errors.Join(err, conn.Close()) }()
	var hello [plainHello]byte
	if err := conn.SetReadDeadline(time.Now().Add(helloTimeout)); err != nil {
		return err
	}
	if _, err := io.ReadFull(conn, hello[:]); err != nil {
		return err
	}
	if err := conn.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	span := binary.LittleEndian.Uint64(hello[8:])
	if span < plainPiece || span > plainMemory {
		return fmt.Errorf("a plain stream through %d bytes of memory; from %d to %d", span, plainPiece, plainMemory)
	}
	unpace(conn)
	if memory := touched(int(span)); transfer.Op(hello[0]) == transfer.Read {
		_, err = send(conn, memory, time.Time{})
	} else {
		_, err = receive(conn, memory, time.Time{})
	}
	return err
}

// plainRate is what so many plain streams carry at once, in bytes per second, with so much memory in all at either end.
func plainRate(ctx context.Context, addr string, op transfer.Op, streams, span int, each time.Duration) (rate float64, err error) {
	rates, failures := make([]float64, streams), make([]error, streams)
	var wg sync.WaitGroup
	for i := range streams {
		wg.Go(func() { rates[i], failures[i] = plainStream(ctx, addr, op, max(span/streams, plainPiece), each) })
	}
	wg.Wait()
	for _, r := range rates {
		rate += r
	}
	return rate, errors.Join(failures...)
}

func plainStream(ctx context.Context, addr string, op transfer.Op, span int, each time.Duration) (rate float64, err error) {
	span = min(span, plainMemory)
	conn, err := (&net.Dialer{Timeout: helloTimeout}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return 0, fmt.Errorf("a plain stream to %s: %w", addr, err)
	}
	defer func() { _ = conn.Close() }() // what it carried is counted
	unpace(conn)
	var hello [plainHello]byte
	hello[0] = byte(op)
	binary.LittleEndian.PutUint64(hello[8:], uint64(span)) //nolint:gosec // positive
	memory := touched(span)
	if _, err := conn.Write(hello[:]); err != nil {
		return 0, err
	}
	if err := conn.SetDeadline(time.Now().Add(each + helloTimeout)); err != nil {
		return 0, err
	}
	var n int
	begun := time.Now()
	if op == transfer.Read {
		n, err = receive(conn, memory, begun.Add(each))
	} else {
		n, err = send(conn, memory, begun.Add(each))
	}
	return float64(n) / time.Since(begun).Seconds(), err
}

// send fills a connection from memory, until a time, or for ever if that is zero.
func send(conn net.Conn, memory []byte, end time.Time) (n int, err error) {
	for at := 0; err == nil && (end.IsZero() || time.Now().Before(end)); {
		var k int
		k, err = conn.Write(memory[at : at+plainPiece])
		n += k
		if at += plainPiece; at+plainPiece > len(memory) {
			at = 0
		}
	}
	return n, err
}

// receive empties a connection into memory, until a time, or for ever if that is zero.
func receive(conn net.Conn, memory []byte, end time.Time) (n int, err error) {
	for at := 0; err == nil && (end.IsZero() || time.Now().Before(end)); {
		var k int
		k, err = conn.Read(memory[at:min(at+plainPiece, len(memory))])
		n += k
		at = (at + k) % len(memory)
	}
	return n, err
}

// touched is memory with pages of its own: what nobody has written to is one page of zeros, and copied from the cache.
func touched(bytes int) []byte {
	b := make([]byte, bytes)
	for i := 0; i < bytes; i += 4096 {
		b[i] = 1
	}
	return b
}

// unpace has a connection within a host hold nothing back for a network's sake, as the engine's: bbr, where that is the
// default, costs plain streams a third.
func unpace(conn net.Conn) {
	here, ok := conn.LocalAddr().(*net.TCPAddr)
	there, too := conn.RemoteAddr().(*net.TCPAddr)
	if !ok || !too || !here.IP.Equal(there.IP) && !here.IP.IsLoopback() {
		return
	}
	raw, err := conn.(*net.TCPConn).SyscallConn() //nolint:forcetypeassert // its addresses are TCP's
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptString(int(fd), syscall.IPPROTO_TCP, unix.TCP_CONGESTION, "reno") // slower without
	})
}
