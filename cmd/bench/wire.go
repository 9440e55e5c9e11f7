package bench

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"larder/protocol"
)

// The load that most figures are taken under.
const (
	connections = 4
	inFlight    = 64
	// latencySamples bounds the latencies kept per connection: enough for a p99.9, and little memory.
	latencySamples = 1 << 17
)

// builder appends the next request to buf, with the given sequence; false ends the load.
type builder func(buf []byte, seq uint32) ([]byte, bool)

// checker looks at a reply. Its payload is valid during the call.
type checker func(h protocol.Header, payload []byte) error

// outcome is what a load did.
type outcome struct {
	requests int
	elapsed  time.Duration
	latency  []time.Duration // sorted
}

// rate is requests per second.
func (o *outcome) rate() float64 { return float64(o.requests) / o.elapsed.Seconds() }

// quantile is the latency that a share of the requests stayed below.
func (o *outcome) quantile(q float64) time.Duration {
	if len(o.latency) == 0 {
		return 0
	}
	return o.latency[min(int(q*float64(len(o.latency))), len(o.latency)-1)]
}

// dialMany opens connections.
func dialMany(ctx context.Context, network, address string, n int) ([]net.Conn, error) {
	conns := make([]net.Conn, 0, n)
	for range n {
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err != nil {
			closeAll(conns)
			return nil, fmt.Errorf("dial %s: %w", address, err)
		}
		conns = append(conns, conn)
	}
	return conns, nil
}

// closeAll closes connections.
func closeAll(conns []net.Conn) {
	for _, c := range conns {
		c.Close() //nolint:errcheck,gosec // nothing is lost
	}
}

// driveAll keeps depth requests in flight on each connection for a time, or until the builders end, and waits for
// their replies.
func driveAll(
	conns []net.Conn, depth int, each time.Duration, build func(conn int) builder, check func(conn int) checker,
) (*outcome, error) {
	return together(len(conns), each, func(i int, end time.Time) (*outcome, error) {
		var c checker
		if check != nil {
			c = check(i)
		}
		return drive(conns[i], depth, end, build(i), c)
	})
}

// together runs n clients at once, each until end or a little later, and sums up what they did. Of errors it tells the first, and
// how many clients failed: most have the same.
func together(n int, each time.Duration, client func(i int, end time.Time) (*outcome, error)) (*outcome, error) {
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		total outcome
		first error
		wrong int
	)
	begin := time.Now()
	for i := range n {
		wg.Go(func() {
			o, err := client(i, begin.Add(each))
			mu.Lock()
			defer mu.Unlock()
			total.requests += o.requests
			total.latency = append(total.latency, o.latency...)
			if err != nil {
				wrong++
				first = cmp.Or(first, err)
			}
		})
	}
	wg.Wait()
	total.elapsed = time.Since(begin)
	slices.Sort(total.latency)
	if first != nil && n > 1 {
		first = fmt.Errorf("%d of %d clients: %w", wrong, n, first)
	}
	return &total, first
}

// drive is a client in one goroutine: it writes as many requests as replies that a read brought, so that bursts stay
// bursts and a client costs as little as one can.
func drive(conn net.Conn, depth int, end time.Time, build builder, check checker) (*outcome, error) {
	d := &driver{
		reader: protocol.NewReader(conn), end: end, build: build, check: check, sent: make([]time.Time, depth), more: true,
	}
	now := time.Now()
	for range depth {
		d.next(now)
	}
	for d.outstanding > 0 {
		if len(d.buf) > 0 {
			if _, err := conn.Write(d.buf); err != nil {
				return &d.outcome, fmt.Errorf("write: %w", err)
			}
			d.buf = d.buf[:0]
		}
		if err := d.readBurst(); err != nil {
			return &d.outcome, err
		}
	}
	return &d.outcome, nil
}

// driver is the state of drive.
type driver struct {
	outcome

	reader      *protocol.Reader
	end         time.Time
	build       builder
	check       checker
	sent        []time.Time // by frame sequence modulo the depth
	buf         []byte
	seq         uint32
	outstanding int
	more        bool
}

// next appends a request to what is to be written, unless the load is over.
func (d *driver) next(now time.Time) {
	if !d.more || now.After(d.end) {
		d.more = false
		return
	}
	d.seq++
	if d.buf, d.more = d.build(d.buf, d.seq); d.more {
		d.sent[int(d.seq)%len(d.sent)] = now
		d.outstanding++
	}
}

// readBurst takes the replies that one read of the connection brings, at least one.
func (d *driver) readBurst() error {
	for {
		h, payload, err := d.reader.Next()
		if err != nil {
			return fmt.Errorf("read: %w", err)
		}
		if h.Sequence == 0 {
			continue // a push
		}
		if d.check != nil {
			if err := d.check(h, payload); err != nil {
				return err
			}
		}
		now := time.Now()
		if len(d.latency) < latencySamples {
			d.latency = append(d.latency, now.Sub(d.sent[int(h.Sequence)%len(d.sent)]))
		}
		d.requests++
		d.outstanding--
		d.next(now)
		if !d.reader.Buffered() {
			return nil
		}
	}
}

// encoder and decoder are messages.
type (
	encoder interface{ Append(b []byte) []byte }
	decoder interface{ Decode(b []byte) error }
)

// exchange sends one request and reads its reply.
func exchange(conn net.Conn, t protocol.Type, req encoder, reply decoder) error {
	buf, mark := protocol.BeginFrame(nil, t, 1)
	if _, err := conn.Write(protocol.EndFrame(req.Append(buf), mark)); err != nil {
		return fmt.Errorf("%v: %w", t, err)
	}
	r := protocol.NewReader(conn)
	for {
		h, payload, err := r.Next()
		if err != nil {
			return fmt.Errorf("%v: %w", t, err)
		}
		if h.Sequence == 0 {
			continue
		}
		if err := reply.Decode(payload); err != nil {
			return fmt.Errorf("%v: reply: %w", t, err)
		}
		return nil
	}
}

// session is a wire-level client that owns a region and knows the rules of seq and acked.
type session struct {
	conn     net.Conn
	instance string
	region   protocol.Region
	seq      uint64
	answered map[uint64]bool // above acked
	acked    uint64          // lowest unanswered
	pages    uint64          // used of the region
	base     uint64          // seq of the frame sequence 0 of the load that runs
}

// openSession handshakes, and asks for a region of size bytes unless that is 0.
func openSession(ctx context.Context, network, address, instance string, pageSize, size uint64) (*session, error) {
	conns, err := dialMany(ctx, network, address, 1)
	if err != nil {
		return nil, err
	}
	s := &session{
		conn: conns[0], instance: instance, acked: 1, answered: make(map[uint64]bool),
	}
	var hello protocol.HandshakeReply
	err = exchange(s.conn, protocol.TypeHandshake, &protocol.HandshakeRequest{
		ClientVersion: 1, InstanceID: instance, Protocol: protocol.Version, TTLMS: uint64(time.Hour / time.Millisecond),
	}, &hello)
	if err == nil {
		err = hello.Err()
	}
	if err == nil && size > 0 {
		err = s.alloc(pageSize, size)
	}
	if err != nil {
		s.conn.Close() //nolint:errcheck,gosec // it has failed
		return nil, fmt.Errorf("session %s: %w", instance, err)
	}
	return s, nil
}

// alloc asks for a region.
func (s *session) alloc(pageSize, size uint64) error {
	reply, err := s.request(&protocol.AllocRequest{InstanceID: s.instance, Size: size, PageSize: pageSize})
	if err != nil {
		return err
	}
	if reply.Region.Length < size {
		return fmt.Errorf("asked for a region of %d bytes, got %d", size, reply.Region.Length)
	}
	s.region, s.pages = reply.Region, 0
	return nil
}

// request sends REQUEST_ALLOC until it is decided.
func (s *session) request(req *protocol.AllocRequest) (*protocol.AllocReply, error) {
	s.seq++
	req.Seq, req.Acked = s.seq, s.acked
	for {
		var reply protocol.AllocReply
		if err := exchange(s.conn, protocol.TypeRequestAlloc, req, &reply); err != nil {
			return nil, err
		}
		if reply.Code.Retryable() {
			continue
		}
		s.settle(req.Seq)
		return &reply, reply.Err()
	}
}

// mutation numbers a request that goes out under a frame sequence.
func (s *session) mutation(wire uint32) protocol.Mutation {
	if wire == 1 {
		s.base = s.seq
	}
	s.seq = s.base + uint64(wire)
	return protocol.Mutation{Seq: s.seq, Acked: s.acked}
}

// answer takes note that the request with a frame sequence has been answered.
func (s *session) answer(wire uint32) {
	s.settle(s.base + uint64(wire))
}

// settle moves acked on.
func (s *session) settle(seq uint64) {
	s.answered[seq] = true
	for s.answered[s.acked] {
		delete(s.answered, s.acked)
		s.acked++
	}
}

// place gives the next free page of the region; false when there is none.
func (s *session) place(e *protocol.RegisterEntry) bool {
	offset := s.pages * s.region.PageSize
	if offset+s.region.PageSize > s.region.Length {
		return false
	}
	s.pages++
	e.RegionID, e.Epoch = s.region.RegionID, s.region.Epoch
	e.KVOffset, e.KVLength = offset, s.region.PageSize
	return true
}

// splitAddress gives network and address of what servers call an address.
func splitAddress(addr string) (network, address string) {
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		return "unix", path
	}
	return "tcp", addr
}
