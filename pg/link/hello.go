package link

import (
	"cmp"
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"larder/pg/shm"
)

// protocol is the version of all that two nodes say to each other.
const protocol = 1

// greetTimeout is how long a peer may take to say who it is, and a connection to be made.
const greetTimeout = 3 * time.Second

// identity is what a process says of itself.
type identity struct {
	Rank        int      `json:"rank"`
	Incarnation uint64   `json:"incarnation,string"`
	Host        string   `json:"host"`
	Transports  []string `json:"transports"`
	Engine      bool     `json:"engine,omitempty"` // it has one
	NICs        bool     `json:"nics,omitempty"`   // and the engine has some
	TCP         bool     `json:"tcp,omitempty"`    // it listens for other hosts
}

func (i *identity) String() string {
	return fmt.Sprintf("rank %d (incarnation %016x)", i.Rank, i.Incarnation)
}

// hello is the first frame of a connection, from who has dialed. A control connection's brings the dialer's bell, if it is over
// a Unix socket.
type hello struct {
	Version int      `json:"version"`
	Job     string   `json:"job"`
	Token   string   `json:"token,omitempty"`
	From    identity `json:"from"`
	// To is who is looked for: an address may have passed on to another process.
	To            int    `json:"to"`
	ToIncarnation uint64 `json:"to_incarnation,string"`
	// Lane says which lane the connection is; nil if it is a control connection.
	Lane *laneHello `json:"lane,omitempty"`
}

// laneHello names a lane by what is being built at both ends.
type laneHello struct {
	Pair  bool   `json:"pair,omitempty"`
	Group string `json:"group"`
	Epoch uint64 `json:"epoch"`
	Mine  uint64 `json:"mine,string"`
	Yours uint64 `json:"yours,string"`
}

// welcome answers a hello. That of a control connection brings a bell, too.
type welcome struct {
	Refused *RefusedError `json:"refused,omitempty"`
	From    identity      `json:"from"`
	Shares  bool          `json:"shares,omitempty"` // it has mapped the dialer's bell
}

// begin ends the greetings of a control connection.
type begin struct {
	Shares bool `json:"shares,omitempty"` // both have mapped the other's bell
}

// check says why a hello is refused, whoever it is from.
func (n *Node) check(h *hello) *RefusedError {
	refuse := func(code, format string, args ...any) *RefusedError {
		return &RefusedError{Code: code, Text: fmt.Sprintf(format, args...)}
	}
	switch {
	case h.Version != protocol:
		return refuse(RefusedVersion, "version %d of the protocol, not %d: run the same build everywhere", h.Version, protocol)
	case h.Job != n.cfg.Job:
		return refuse(RefusedJob, "job %.40q, not %.40q: is an address used twice?", h.Job, n.cfg.Job)
	case subtle.ConstantTimeCompare([]byte(h.Token), []byte(n.cfg.Token)) != 1:
		return refuse(RefusedToken, "wrong token: all processes of a job need the same")
	case h.To != n.cfg.Rank || h.ToIncarnation != n.cfg.Incarnation:
		return refuse(RefusedRank,
			"this is rank %d (incarnation %016x), not rank %d (incarnation %016x): ask the store for its address again",
			n.cfg.Rank, n.cfg.Incarnation, h.To, h.ToIncarnation)
	case h.From.Rank == n.cfg.Rank:
		return refuse(RefusedRank, "two processes have rank %d: each needs its own", h.From.Rank)
	case h.From.Rank < n.cfg.Rank:
		return refuse(RefusedRank, "rank %d waits to be dialed by rank %d", h.From.Rank, n.cfg.Rank)
	}
	if err := h.From.check(); err != nil {
		return refuse(RefusedHello, "%v", err)
	}
	if h.Lane != nil && (len(h.Lane.Group) > maxName || h.Lane.Mine == 0 || h.Lane.Yours == 0) {
		return refuse(RefusedHello, "a lane has two numbers, and a group with a name of at most %d bytes", maxName)
	}
	return nil
}

// maxTransports bounds what a peer says that it has: more than there are, for later versions.
const maxTransports = 16

func (i *identity) check() error {
	switch {
	case i.Rank < 0 || i.Incarnation == 0:
		return errors.New("a process has a rank of 0 or more and an incarnation other than 0")
	case len(i.Host) > maxName || len(i.Transports) > maxTransports:
		return fmt.Errorf("a host has a name of at most %d bytes, a process at most %d transports", maxName, maxTransports)
	}
	return nil
}

func (n *Node) hello(to Peer, lane *laneHello) *hello {
	return &hello{
		Version: protocol, Job: n.cfg.Job, Token: n.cfg.Token, From: n.me, To: to.Rank, ToIncarnation: to.Incarnation, Lane: lane,
	}
}

// mayShare reports whether this process and another are to share memory if they can.
func (n *Node) mayShare(with *identity) bool {
	return with.Host == n.cfg.Host && slices.Contains(with.Transports, TransportShm) && slices.Contains(n.cfg.Transports, TransportShm)
}

// bellOf opens the bell that has come with a greeting. Memory that can be mapped is memory that can be shared.
func (n *Node) bellOf(f *frame, with *identity) *shm.Bell {
	defer f.drop()
	if len(f.files) != 1 || !n.mayShare(with) {
		return nil
	}
	bell, err := shm.OpenBell(f.files[0])
	if err != nil {
		return nil // then bytes go another way
	}
	return bell
}

// files are what goes along with a frame.
type files = []*os.File

// bellFiles is what a greeting brings: the bell, if it goes to a process that may be of this host.
func (n *Node) bellFiles(conn net.Conn) files {
	if _, local := conn.(*net.UnixConn); !local || !slices.Contains(n.cfg.Transports, TransportShm) {
		return nil
	}
	return files{n.bell.File()}
}

// greet says who is there on a connection that was dialed for control.
func (n *Node) greet(ctx context.Context, conn net.Conn, to Peer) (*control, error) {
	calm := n.hurry(ctx, conn)
	r := newFrameReader(conn)
	c, err := n.greeted(r, to)
	if over := calm(); err == nil {
		err = over
	}
	if err != nil {
		r.close()
		return nil, fmt.Errorf("link: greet rank %d: %w", to.Rank, err)
	}
	return c, nil
}

func (n *Node) greeted(r *frameReader, to Peer) (*control, error) {
	unsent := writeJSON(r.conn, frameHello, n.bellFiles(r.conn), n.hello(to, nil))
	f, w, err := readWelcome(r) // though it could not be sent: there may be a reason to read
	if err = cmp.Or(err, unsent); err != nil {
		return nil, err
	}
	defer f.drop()
	if w.From.Rank != to.Rank || w.From.Incarnation != to.Incarnation {
		return nil, fmt.Errorf("%w: %s answers for rank %d (incarnation %016x)", ErrFrame, &w.From, to.Rank, to.Incarnation)
	}
	c := n.newControl(r, w.From)
	c.dialed = true
	if bell := n.bellOf(&f, &w.From); w.Shares {
		c.bell = bell
	}
	return c, writeJSON(r.conn, frameBegin, nil, begin{Shares: c.bell != nil})
}

// readWelcome reads the answer to a hello. Files that come with it are the caller's.
func readWelcome(r *frameReader) (frame, *welcome, error) {
	f, err := r.next()
	if err != nil {
		return f, nil, err
	}
	var w welcome
	if f.kind != frameWelcome {
		err = fmt.Errorf("%w: kind %d for a welcome: is this a node of a process group?", ErrFrame, f.kind)
	} else {
		err = f.decode(&w)
	}
	if err == nil && w.Refused != nil {
		w.Refused.By = r.conn.RemoteAddr().String()
		err = w.Refused
	}
	if err == nil {
		err = w.From.check()
	}
	if err != nil {
		f.drop()
		return frame{}, nil, err
	}
	return f, &w, nil
}

// hurry bounds what a connection may take by greetTimeout, and by ctx, until it is called off, which says whether ctx has ended.
func (n *Node) hurry(ctx context.Context, conn net.Conn) (calm func() error) {
	_ = conn.SetDeadline(soon(greetTimeout)) // it fails for closed ones only
	end := func() { _ = conn.SetDeadline(past()) }
	stop := context.AfterFunc(ctx, end)
	stopClosed := context.AfterFunc(n.ctx, end) //nolint:contextcheck // either ends it
	return func() error {
		switch {
		case !stopClosed():
			return ErrClosed
		case !stop():
			return ctx.Err()
		}
		return conn.SetDeadline(time.Time{})
	}
}

// welcome answers the hello of a connection that was accepted. If that is for control it returns it; if it is a lane's, the lane
// has it then.
func (n *Node) welcome(conn net.Conn) (*control, error) {
	calm := n.hurry(n.ctx, conn)
	r := newFrameReader(conn)
	f, err := r.next()
	if err != nil {
		r.close()
		return nil, err
	}
	c, err := n.welcomed(r, &f, calm)
	f.drop()
	if err != nil {
		r.close()
	}
	return c, err
}

func (n *Node) welcomed(r *frameReader, f *frame, calm func() error) (*control, error) {
	var h hello
	if f.kind != frameHello {
		return nil, fmt.Errorf("%w: kind %d for a hello", ErrFrame, f.kind)
	}
	refused := &RefusedError{Code: RefusedHello, Text: "the hello is no JSON object"}
	if f.decode(&h) == nil {
		refused = n.check(&h)
	}
	if refused == nil && h.Lane == nil {
		refused = n.admits(&h.From)
	}
	if refused == nil && h.Lane != nil {
		if err := calm(); err != nil {
			return nil, err
		}
		if refused = n.acceptLane(r, &h); refused == nil {
			return nil, nil //nolint:nilnil // the lane has it
		}
	}
	if refused != nil {
		n.refuse(r.conn, refused)
		return nil, refused
	}
	c := n.newControl(r, h.From)
	c.bell = n.bellOf(f, &h.From)
	var bell files
	if c.bell != nil {
		bell = n.bellFiles(r.conn)
	}
	if err := writeJSON(r.conn, frameWelcome, bell, welcome{From: n.me, Shares: c.bell != nil}); err != nil {
		return nil, err
	}
	if err := c.readBegin(); err != nil {
		return nil, err
	}
	return c, calm()
}

// refuse tells a peer why it is not welcome.
func (n *Node) refuse(conn net.Conn, why *RefusedError) {
	why.By = "this process"
	_ = conn.SetWriteDeadline(soon(greetTimeout)) // it fails for closed ones only, as the next
	_ = writeJSON(conn, frameWelcome, nil, welcome{From: n.me, Refused: why})
}

// readBegin reads how a dialer ends the greetings.
func (c *control) readBegin() error {
	f, err := c.r.next()
	if err != nil {
		return err
	}
	defer f.drop()
	var b begin
	if f.kind != frameBegin {
		return fmt.Errorf("%w: kind %d where greetings end", ErrFrame, f.kind)
	}
	if err := f.decode(&b); err != nil {
		return err
	}
	if !b.Shares {
		c.bell = nil
	}
	return nil
}
