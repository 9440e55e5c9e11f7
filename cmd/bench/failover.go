package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"larder/client"
	"larder/internal/freeport"
	"larder/server"
)

// Sizes of the figures of failover.
const (
	failoverKills   = 20
	failoverKeys    = 100_000
	failoverPool    = "1GiB"
	failoverBatch   = 256
	failoverValue   = 128 // bytes: what is lost or found is the key
	failoverWriters = 4
	failoverLive    = 256         // keys that each writer of the load keeps
	failoverWait    = time.Minute // for what is waited for here: far longer than a change of the leader takes
	logTail         = 2 << 10     // bytes of a member's log that an error shows
)

// failover kills the leader of three processes time and again under a load of stores.
func (b *bench) failover() error { return b.failoverWith(failoverKills, failoverKeys) }

// failoverWith stores keys, kills the leader so many times while others are stored, and looks for the keys.
func (b *bench) failoverWith(kills, keys int) (err error) {
	members, err := b.processes()
	defer func() { err = errors.Join(err, endAll(members)) }()
	if err != nil {
		return err
	}
	if _, err := leaderOf(b.ctx, members); err != nil {
		return err
	}
	addrs := make([]string, 0, len(members))
	for _, m := range members {
		addrs = append(addrs, m.client)
	}
	open := func(instance string) (*client.Client, error) {
		return client.Open(b.ctx, client.Config{
			Addrs: addrs, Instance: instance, PageSize: page, RegionSize: 16 << 20, Timeout: failoverWait,
		})
	}
	keeper, err := open("keeper")
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	defer func() { err = errors.Join(err, keeper.Close(context.WithoutCancel(b.ctx))) }()
	if err := storeKept(b.ctx, keeper, keys); err != nil {
		return err
	}
	writer, err := open("writer")
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	defer func() { err = errors.Join(err, writer.Close(context.WithoutCancel(b.ctx))) }()
	took, err := b.killLeaders(members, writer, kills)
	if err != nil {
		return err
	}
	found, err := findKept(b.ctx, keeper, keys)
	if err != nil {
		return err
	}
	b.failoverRows(took, found, keys)
	return nil
}

// failoverRows reports how long stores were not acknowledged, and what was found afterwards.
func (b *bench) failoverRows(took []time.Duration, found, keys int) {
	slices.Sort(took)
	timeout := server.Default().ElectionTimeout
	at := func(q float64) time.Duration { return took[max(int(math.Ceil(q*float64(len(took))))-1, 0)] }
	row := func(which string, q float64) Row {
		return Row{
			Name: "leader killed, to the next acknowledged store, " + which, Value: at(q).Seconds(), Unit: "s",
			Bound: timeout.Seconds(), Of: "the election timeout", Note: fmt.Sprintf("%d kills", len(took)),
		}
	}
	b.add(row("median", 0.5))
	b.aim(row("19 of 20", 0.95), "ratio <= 2", at(0.95) <= 2*timeout)
	b.aim(row("longest", 1), "ratio <= 4", at(1) <= 4*timeout)
	b.aim(Row{
		Name: strconv.Itoa(keys) + " keys afterwards", Value: float64(found), Unit: "found", Bound: float64(keys), Of: "stored before",
	}, "all", found == keys)
}

// killLeaders kills the leader, measures how long it takes until a store that is begun later is acknowledged, and
// starts it again, so many times.
func (b *bench) killLeaders(members []*process, writer *client.Client, kills int) (took []time.Duration, err error) {
	ctx, stop := context.WithCancel(b.ctx)
	l := &storeLoad{c: writer, failed: make(chan error, failoverWriters), stored: make(chan time.Time)}
	var wg sync.WaitGroup
	for i := range failoverWriters {
		wg.Go(func() { l.run(ctx, i) })
	}
	defer func() {
		stop()
		wg.Wait()
	}()
	for range kills {
		if err := l.next(ctx, time.Now()); err != nil { // it stores now
			return nil, err
		}
		leader, err := leaderOf(ctx, members)
		if err != nil {
			return nil, err
		}
		begin := time.Now()
		if err := leader.kill(); err != nil {
			return nil, err
		}
		if err := l.next(ctx, time.Now()); err != nil { // begun when the old leader was gone for certain
			return nil, fmt.Errorf("after the leader was killed: %w", err)
		}
		took = append(took, time.Since(begin))
		if err := leader.start(b.ctx); err != nil {
			return nil, err
		}
		if err := caughtUp(ctx, leader, members); err != nil {
			return nil, err
		}
	}
	return took, nil
}

// storeLoad stores keys, and deletes those that it stored a while ago.
type storeLoad struct {
	c      *client.Client
	stored chan time.Time // when an acknowledged store was begun, for whoever listens
	failed chan error
}

func (l *storeLoad) run(ctx context.Context, writer int) {
	value := bytes.Repeat([]byte("larder!\n"), failoverValue/8)
	key := func(n int) []byte { return fmt.Appendf(nil, "load/%d/%d", writer, n) }
	for n := 0; ctx.Err() == nil; n++ {
		begin := time.Now()
		_, err := l.c.Put(ctx, key(n), value)
		if err == nil && n >= failoverLive {
			_, err = l.c.Delete(ctx, key(n-failoverLive))
		}
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			l.failed <- fmt.Errorf("store under way: %w", err)
			return
		}
		select {
		case l.stored <- begin:
		default:
		}
	}
}

// next waits for the acknowledgement of a store that was begun after a time.
func (l *storeLoad) next(ctx context.Context, after time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, failoverWait)
	defer cancel()
	for {
		select {
		case begin := <-l.stored:
			if begin.After(after) {
				return nil
			}
		case err := <-l.failed:
			return err
		case <-ctx.Done():
			return fmt.Errorf("no store was acknowledged: %w", ctx.Err())
		}
	}
}

// storeKept stores the keys that are looked for in the end.
func storeKept(ctx context.Context, c *client.Client, keys int) error {
	items := make([]client.Item, 0, failoverBatch)
	for n := 0; n < keys; {
		for items = items[:0]; len(items) < failoverBatch && n < keys; n++ {
			items = append(items, client.Item{Key: keptKey(n), Value: keptValue(n)})
		}
		if _, err := c.PutBatch(ctx, items); err != nil {
			return fmt.Errorf("store %d keys: %w", keys, err)
		}
	}
	return nil
}

// findKept counts how many of them are there with their values.
func findKept(ctx context.Context, c *client.Client, keys int) (found int, err error) {
	var values [][]byte
	for from := 0; from < keys; from += failoverBatch {
		batch := make([][]byte, 0, failoverBatch)
		for n := from; n < min(from+failoverBatch, keys); n++ {
			batch = append(batch, keptKey(n))
		}
		if values, err = c.GetBatch(ctx, batch, values); err != nil {
			return found, fmt.Errorf("look for %d keys: %w", keys, err)
		}
		for i, v := range values {
			if bytes.Equal(v, keptValue(from+i)) {
				found++
			}
		}
	}
	return found, nil
}

func keptKey(n int) []byte { return fmt.Appendf(nil, "kept/%d", n) }

func keptValue(n int) []byte { return fmt.Appendf(nil, "%0*d", failoverValue, n) }

// errEnded ends every wait for a member.
var errEnded = errors.New("a member has ended by itself")

// process is a member of a cluster in a process of its own.
type process struct {
	client, admin string // addresses
	args          []string
	log           string // file

	cmd    *exec.Cmd
	exited chan struct{}
}

// processes starts three members that run this very program. Those that were started are returned with an error too.
func (b *bench) processes() (members []*process, err error) {
	const count = 3
	var peers []string
	for id := 1; id <= count; id++ {
		var addrs [3]string
		for i := range addrs {
			if addrs[i], err = freeport.Addr(); err != nil {
				return nil, err
			}
		}
		name := filepath.Join(b.Dir, "process"+strconv.Itoa(id))
		members = append(members, &process{client: addrs[0], admin: addrs[2], log: name + ".log", args: []string{
			"serve", "--cluster-name=bench", "--node-id=" + strconv.Itoa(id), "--data-dir=" + name,
			"--listen=" + addrs[0], "--peer-listen=" + addrs[1], "--admin-listen=" + addrs[2], "--socket=none",
			"--pool=" + filepath.Join(b.Dir, "processes.pool") + ",size=" + failoverPool, "--log-level=warn",
		}})
		peers = append(peers, fmt.Sprintf("--peers=%d=%s/%s/%s", id, addrs[1], addrs[0], addrs[2]))
	}
	for i, m := range members {
		m.args = append(m.args, peers...)
		if err := m.start(b.ctx); err != nil {
			return members[:i], err
		}
	}
	return members, nil
}

// start starts the process, which dies with this one.
func (p *process) start(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err //nolint:wrapcheck // names the file
	}
	defer log.Close()                                //nolint:errcheck // the process has it
	cmd := exec.CommandContext(ctx, self, p.args...) //nolint:gosec // this very program
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Env = slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, "LARDER_") })
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start a member: %w", err) // p is still the one that has ended, and can be ended again
	}
	exited := make(chan struct{})
	p.cmd, p.exited = cmd, exited
	go func() {
		cmd.Wait() //nolint:errcheck,gosec // it is killed
		close(exited)
	}()
	return nil
}

// kill ends the process as a power failure of it would, and waits until it is gone.
func (p *process) kill() error {
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill a member: %w", err)
	}
	<-p.exited
	return nil
}

// endAll ends processes. Their files go with the run's directory.
func endAll(members []*process) error {
	var err error
	for _, p := range members {
		err = errors.Join(err, p.kill())
	}
	return err
}

// status asks the member how it is.
func (p *process) status(ctx context.Context) (s server.StatusReply, err error) {
	select {
	case <-p.exited:
		b, _ := os.ReadFile(p.log) // then without it
		return s, fmt.Errorf("%w:\n%s", errEnded, b[max(len(b)-logTail, 0):])
	default:
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.admin+"/status", nil)
	if err != nil {
		return s, fmt.Errorf("status: %w", err)
	}
	r.Close = true // the next one may be another process
	reply, err := http.DefaultClient.Do(r)
	if err != nil {
		return s, fmt.Errorf("status: %w", err)
	}
	defer reply.Body.Close() //nolint:errcheck // opened for reading
	body, err := io.ReadAll(reply.Body)
	if err == nil {
		err = json.Unmarshal(body, &s)
	}
	if err != nil {
		return s, fmt.Errorf("status: %w", err)
	}
	return s, nil
}

// until repeats a look until it is content.
func until(ctx context.Context, look func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, failoverWait)
	defer cancel()
	for {
		err := look(ctx)
		if err == nil || errors.Is(err, errEnded) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-time.After(readyPoll):
		}
	}
}

// leaderOf waits for the member that leads and serves.
func leaderOf(ctx context.Context, members []*process) (leader *process, err error) {
	err = until(ctx, func(ctx context.Context) error {
		var errs []error
		for _, p := range members {
			s, err := p.status(ctx)
			if err == nil && s.Serving {
				leader = p
				return nil
			}
			errs = append(errs, err)
		}
		return fmt.Errorf("no member leads: %w", errors.Join(errs...))
	})
	return leader, err
}

// caughtUp waits until a member has applied what the leader had committed when it was first asked.
func caughtUp(ctx context.Context, p *process, members []*process) error {
	leader, err := leaderOf(ctx, members)
	if err != nil {
		return err
	}
	at, err := leader.status(ctx)
	if err != nil {
		return err
	}
	return until(ctx, func(ctx context.Context) error {
		s, err := p.status(ctx)
		if err == nil && s.Applied < at.Commit {
			err = fmt.Errorf("a member that was started again has applied %d of %d", s.Applied, at.Commit)
		}
		return err
	})
}
