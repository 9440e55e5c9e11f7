//go:build cgo

package main

// #include "larder.h"
import "C"

import (
	"context"
	"encoding/json"
	"errors"
	"time"
	"unsafe"

	"larder/pg"
	"larder/pg/collective"
	"larder/pg/member"
	"larder/pg/reduce"
	"larder/pg/store"
	"larder/transfer"
)

// world is a process's part in a job, and its store.
type world struct {
	*pg.World
	store store.Store
}

var (
	servers = table[*store.Server]{kind: "store server"}
	worlds  = table[*world]{kind: "world"}
	groups  = table[*pg.Group]{kind: "process group"}
	works   = table[*pg.Work]{kind: "operation"}
	texts   = table[[]byte]{kind: "text"}
)

// pgReasons are errors of process groups that have a code.
var pgReasons = []struct {
	err  error
	code code
}{
	{pg.ErrClosed, codeClosed},
	{pg.ErrInactive, codeInactive},
	{pg.ErrJoining, codeInactive},
	{pg.ErrIsolated, codeIsolated},
	{pg.ErrConfig, codeInvalid},
	{member.ErrClosed, codeClosed},
	{member.ErrIsolated, codeIsolated},
	{member.ErrActive, codeInvalid},
	{member.ErrPolicy, codeInvalid},
	{store.ErrClosed, codeClosed},
}

// pgCode finds the code of an error of process groups; codeFailed if it is none.
func pgCode(err error) code {
	var (
		peer        *pg.PeerError
		mismatch    *pg.MismatchError
		timeout     *pg.TimeoutError
		unsupported *reduce.UnsupportedError
		config      *member.ConfigError
		rank        *member.RankError
		spec        *member.SpecError
		url         *store.URLError
	)
	switch {
	case errors.As(err, &peer):
		return codePeer
	case errors.As(err, &mismatch):
		return codeMismatch
	case errors.As(err, &timeout):
		return codeTimeout
	case errors.As(err, &unsupported), errors.As(err, &config), errors.As(err, &rank), errors.As(err, &spec), errors.As(err, &url):
		return codeInvalid
	}
	for _, r := range pgReasons {
		if errors.Is(err, r.err) {
			return r.code
		}
	}
	return codeFailed
}

// larder_text gives what a job has made as text. When it has been copied its handle is closed.
//
//export larder_text
func larder_text(handle C.uint64_t, out *C.char, capacity C.int64_t, length *C.int64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		text, err := texts.of(uint64(handle))
		if err != nil {
			return err
		}
		output(out, capacity, length, text)
		if *length <= capacity {
			texts.drop(uint64(handle))
		}
		return nil
	})
}

// larder_store_serve has this process keep a job's store for as long as it lives, as a job.
//
//export larder_store_serve
func larder_store_serve(address *C.char, n C.int64_t, started *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		at, err := input(address, n)
		if err != nil {
			return err
		}
		h, err := begin(0, closeServer, func(context.Context) (uint64, error) {
			s, err := store.Serve(string(at)) //nolint:contextcheck // it goes on when the job has ended
			if err != nil {
				return 0, err
			}
			h, err := servers.add(s)
			if err != nil {
				return 0, errors.Join(err, s.Close())
			}
			return h, nil
		})
		*started = C.uint64_t(h)
		return err
	})
}

// closeServer closes a server that nobody has got to know.
func closeServer(h uint64) {
	if s, err := servers.take(h); err == nil {
		_ = s.Close() // nobody uses it
	}
}

// larder_store_address is where a store is served.
//
//export larder_store_address
func larder_store_address(handle C.uint64_t, out *C.char, capacity C.int64_t, length *C.int64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		s, err := servers.of(uint64(handle))
		if err != nil {
			return err
		}
		output(out, capacity, length, []byte(s.Addr()))
		return nil
	})
}

// worldConfig is what larder_world_open takes, as JSON. Times are in seconds.
type worldConfig struct {
	Job        string   `json:"job"`
	Rank       int      `json:"rank"`
	Store      string   `json:"store"` // as store.Open has it
	Lease      float64  `json:"lease"` // of the store; 3 s if it is 0
	Token      string   `json:"token"`
	Host       string   `json:"host"`
	Listen     []string `json:"listen"`
	Advertise  []string `json:"advertise"`
	Transports []string `json:"transports"`
	Deadline   float64  `json:"deadline"`
	Timeout    float64  `json:"timeout"` // for an earlier life of this rank to end; 0 waits for ever
}

// defaultLease is how long the store counts on a process that it does not hear from.
const defaultLease = 3 * time.Second

// openWorld joins a job.
func openWorld(ctx context.Context, c *worldConfig, e *transfer.Engine) (*world, error) {
	lease := seconds(c.Lease)
	if lease == 0 {
		lease = defaultLease
	}
	st, err := store.Open(ctx, c.Store, lease)
	if err != nil {
		return nil, err
	}
	w, err := pg.New(ctx, pg.Config{
		Job: c.Job, Rank: c.Rank, Store: st, Token: c.Token, Host: c.Host, Listen: c.Listen, Advertise: c.Advertise,
		Transports: c.Transports, Engine: e, Deadline: seconds(c.Deadline),
	})
	if err != nil {
		return nil, errors.Join(err, st.Close())
	}
	return &world{w, st}, nil
}

// close leaves the job.
func (w *world) close() error { return errors.Join(w.Close(), w.store.Close()) }

// larder_world_open begins to join a job, as a job of its own. engine is that of larder_engine_open to use, 0 for none; it must
// not be closed before the world.
//
//export larder_world_open
func larder_world_open(config *C.char, n C.int64_t, engineHandle C.uint64_t, started *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		text, err := input(config, n)
		if err != nil {
			return err
		}
		var c worldConfig
		if err := json.Unmarshal(text, &c); err != nil {
			return invalid("the job's configuration: %v", err)
		}
		var through *transfer.Engine
		if engineHandle != 0 {
			found, err := engines.of(uint64(engineHandle))
			if err != nil {
				return err
			}
			through = found.Engine
		}
		h, err := begin(seconds(c.Timeout), closeWorld, func(ctx context.Context) (uint64, error) {
			w, err := openWorld(ctx, &c, through)
			if err != nil {
				return 0, err
			}
			h, err := worlds.add(w)
			if err != nil {
				return 0, errors.Join(err, w.close()) //nolint:contextcheck // it ends orderly, whatever the job does
			}
			return h, nil
		})
		*started = C.uint64_t(h)
		return err
	})
}

// closeWorld closes a world that nobody has got to know.
func closeWorld(h uint64) {
	if w, err := worlds.take(h); err == nil {
		_ = w.close() // nobody is there to hear of it
	}
}

// larder_world_close begins to leave a job, as a job of its own.
//
//export larder_world_close
func larder_world_close(handle C.uint64_t, started *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		w, err := worlds.take(uint64(handle))
		if err != nil {
			return err
		}
		h, err := begin(0, nil, func(context.Context) (uint64, error) { return 0, w.close() }) //nolint:contextcheck // it ends orderly, whatever the job does
		*started = C.uint64_t(h)
		return err
	})
}

// groupConfig is what larder_group_open takes, as JSON: pg.GroupConfig.
type groupConfig struct {
	ID        string  `json:"id"`
	Ranks     []int   `json:"ranks"`
	Capacity  int     `json:"capacity"`
	Extension bool    `json:"extension"`
	Failures  string  `json:"failures"` // automatic, deferred or manual
	Retry     bool    `json:"retry"`
	Timeout   float64 `json:"timeout"` // in seconds: of a call, and for the founders to come
}

// policies are the names of pg's.
var policies = map[string]pg.Policy{"": pg.Automatic, "automatic": pg.Automatic, "deferred": pg.Deferred, "manual": pg.Manual}

// larder_group_open begins to make a group, as a job.
//
//export larder_group_open
func larder_group_open(handle C.uint64_t, config *C.char, n C.int64_t, started *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		w, err := worlds.of(uint64(handle))
		if err != nil {
			return err
		}
		text, err := input(config, n)
		if err != nil {
			return err
		}
		var c groupConfig
		if err := json.Unmarshal(text, &c); err != nil {
			return invalid("the group's configuration: %v", err)
		}
		failures, known := policies[c.Failures]
		if !known {
			return invalid("failures are %q: automatic, deferred or manual", c.Failures)
		}
		h, err := begin(seconds(c.Timeout), closeGroup, func(ctx context.Context) (uint64, error) {
			g, err := w.Group(ctx, pg.GroupConfig{
				ID: c.ID, Ranks: c.Ranks, Capacity: c.Capacity, Extension: c.Extension, Failures: failures, Retry: c.Retry,
				Timeout: seconds(c.Timeout),
			})
			if err != nil {
				return 0, err
			}
			h, err := groups.add(g)
			if err != nil {
				return 0, errors.Join(err, g.Close()) //nolint:contextcheck // it ends orderly, whatever the job does
			}
			return h, nil
		})
		*started = C.uint64_t(h)
		return err
	})
}

// closeGroup closes a group that nobody has got to know.
func closeGroup(h uint64) {
	if g, err := groups.take(h); err == nil {
		_ = g.Close() // nobody is there to hear of it
	}
}

// larder_group_close begins to leave a group, as a job. Operations that are under way fail.
//
//export larder_group_close
func larder_group_close(handle C.uint64_t, started *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		g, err := groups.take(uint64(handle))
		if err != nil {
			return err
		}
		h, err := begin(0, nil, func(context.Context) (uint64, error) { return 0, g.Close() }) //nolint:contextcheck // it ends orderly, whatever the job does
		*started = C.uint64_t(h)
		return err
	})
}

// larder_group_numbers gives the group's rank, size, capacity and epoch.
//
//export larder_group_numbers
func larder_group_numbers(handle C.uint64_t, numbers *C.int64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		g, err := groups.of(uint64(handle))
		if err != nil {
			return err
		}
		to := unsafe.Slice(numbers, 4)
		to[0], to[1], to[2], to[3] = C.int64_t(g.Rank()), C.int64_t(g.Size()), C.int64_t(g.Capacity()), C.int64_t(g.Epoch())
		return nil
	})
}

// setMask writes a set of ranks for a caller, whose array has room for member.MaxCap of them.
func setMask(to *[C.LARDER_MASK_WORDS]C.uint64_t, m member.Mask) {
	clear(to[:])
	for i, word := range m {
		to[i] = C.uint64_t(word)
	}
}

// larder_group_active gives the set of active ranks.
//
//export larder_group_active
func larder_group_active(handle C.uint64_t, mask *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		g, err := groups.of(uint64(handle))
		if err != nil {
			return err
		}
		setMask((*[C.LARDER_MASK_WORDS]C.uint64_t)(unsafe.Pointer(mask)), g.Active())
		return nil
	})
}

// larder_group_peers tells of ranks whether they may be activated, or are active and well.
//
//export larder_group_peers
func larder_group_peers(handle C.uint64_t, ranks *C.int32_t, n C.int64_t, states *C.uint8_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		g, err := groups.of(uint64(handle))
		if err != nil {
			return err
		}
		if n < 0 || n > member.MaxCap {
			return invalid("%d ranks: a group has at most %d", int64(n), member.MaxCap)
		}
		asked := make([]int, n)
		for i, r := range unsafe.Slice(ranks, n) {
			asked[i] = int(r)
		}
		well, err := g.PeerState(asked...)
		if err != nil {
			return err
		}
		for i, to := 0, unsafe.Slice(states, n); i < len(to); i++ {
			to[i] = 0
			if well[i] {
				to[i] = 1
			}
		}
		return nil
	})
}

// changeConfig is what larder_group_change takes, as JSON.
type changeConfig struct {
	What  string `json:"what"` // activate, deactivate or sync
	Ranks []int  `json:"ranks"`
}

// changeAnswer is what comes of it: member.Response.
type changeAnswer struct {
	Status  member.Status `json:"status"`
	Epoch   uint64        `json:"epoch"`
	Dropped []int         `json:"dropped"`
	Reason  string        `json:"reason"`
}

// change has a group agree on other active ranks.
func change(ctx context.Context, g *pg.Group, c *changeConfig) (member.Response, error) {
	switch c.What {
	case "activate":
		return g.Activate(ctx, c.Ranks...)
	case "deactivate":
		return g.Deactivate(ctx, c.Ranks...)
	case "sync":
		return g.Sync(ctx)
	}
	return member.Response{}, invalid("%q: activate, deactivate or sync", c.What)
}

// larder_group_change begins to change which ranks are active, as a job that makes a text: changeAnswer as JSON.
//
//export larder_group_change
func larder_group_change(
	handle C.uint64_t, config *C.char, n, timeout C.int64_t, started *C.uint64_t, e *C.larder_error,
) C.int32_t {
	return guard(e, func() error {
		g, err := groups.of(uint64(handle))
		if err != nil {
			return err
		}
		text, err := input(config, n)
		if err != nil {
			return err
		}
		var c changeConfig
		if err := json.Unmarshal(text, &c); err != nil {
			return invalid("a change of a group: %v", err)
		}
		h, err := begin(time.Duration(timeout), texts.drop, func(ctx context.Context) (uint64, error) {
			r, err := change(ctx, g, &c)
			if err != nil {
				return 0, err
			}
			answer, err := json.Marshal(changeAnswer(r))
			if err != nil {
				return 0, err
			}
			return texts.add(answer)
		})
		*started = C.uint64_t(h)
		return err
	})
}

// larder_group_join begins to have this process take part, as a job: it ends when an active rank has activated it.
//
//export larder_group_join
func larder_group_join(handle C.uint64_t, timeout C.int64_t, started *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		g, err := groups.of(uint64(handle))
		if err != nil {
			return err
		}
		h, err := begin(time.Duration(timeout), nil, func(ctx context.Context) (uint64, error) { return 0, g.Join(ctx) })
		*started = C.uint64_t(h)
		return err
	})
}

// larder_group_extend begins to give a group room for more ranks, as a job.
//
//export larder_group_extend
func larder_group_extend(handle C.uint64_t, capacity, timeout C.int64_t, started *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		g, err := groups.of(uint64(handle))
		if err != nil {
			return err
		}
		h, err := begin(time.Duration(timeout), nil, func(ctx context.Context) (uint64, error) { return 0, g.Extend(ctx, int(capacity)) })
		*started = C.uint64_t(h)
		return err
	})
}

// Kinds of larder_call that are no collectives.
const (
	kindSend = 10
	kindRecv = 11
)

// bytesAt is memory of a caller's.
func bytesAt(r C.larder_region) []byte { return unsafe.Slice((*byte)(r.address), r.bytes) }

// partsAt is memory of a caller's for each rank: a list of n, or, without one, whole in n equal parts.
func partsAt(list *C.larder_region, n C.int64_t, whole C.larder_region) ([][]byte, error) {
	if n < 0 || n > member.MaxCap {
		return nil, invalid("%d parts: a group has at most %d ranks", int64(n), member.MaxCap)
	}
	if n == 0 {
		return nil, nil // of a rank that has none
	}
	parts := make([][]byte, n)
	if list == nil {
		all, each := bytesAt(whole), int(whole.bytes)/int(n)
		for i := range parts {
			parts[i] = all[i*each:][:each:each]
		}
		return parts, nil
	}
	for i, r := range unsafe.Slice(list, n) {
		parts[i] = bytesAt(r)
	}
	return parts, nil
}

// callOf is a caller's call.
func callOf(c *C.larder_call) (pg.Call, error) {
	src, err := partsAt(c.src_parts, c.src_count, c.src)
	if err != nil {
		return pg.Call{}, err
	}
	dst, err := partsAt(c.dst_parts, c.dst_count, c.dst)
	if err != nil {
		return pg.Call{}, err
	}
	root, dt, op := int(c.root), pg.DType(c.dtype), pg.Op(c.op)
	one, to := bytesAt(c.src), bytesAt(c.dst)
	switch pg.Kind(c.kind) {
	case collective.AllReduce:
		return pg.AllReduce(to, one, dt, op), nil
	case collective.Broadcast:
		if c.src.bytes > 0 {
			to = one
		}
		return pg.Broadcast(to, dt, root), nil
	case collective.Reduce:
		return pg.Reduce(to, one, dt, op, root), nil
	case collective.AllGather:
		return pg.AllGather(dst, one, dt), nil
	case collective.ReduceScatter:
		return pg.ReduceScatter(to, src, dt, op), nil
	case collective.AllToAll:
		return pg.AllToAll(dst, src, dt), nil
	case collective.Gather:
		return pg.Gather(dst, one, dt, root), nil
	case collective.Scatter:
		return pg.Scatter(to, src, dt, root), nil
	case collective.Barrier:
		return pg.Barrier(), nil
	case kindSend:
		return pg.Send(one, root, uint64(c.tag)), nil
	case kindRecv:
		return pg.Recv(to, root, uint64(c.tag)), nil
	}
	return pg.Call{}, invalid("a call of kind %d", int32(c.kind))
}

// larder_call_start begins a call of a group, and leaves it to the library's own thread until somebody waits. The memory that it names
// is used until larder_call_wait says that it has ended.
//
//export larder_call_start
func larder_call_start(handle C.uint64_t, call *C.larder_call, started *C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		h, w, err := queueCall(handle, call)
		if err != nil {
			return err
		}
		w.Leave()
		works.set(h, w)
		*started = C.uint64_t(h)
		return nil
	})
}

// larder_call_do is larder_call_start and larder_call_wait in one, for a caller that has nothing else to do meanwhile. If the call
// has not ended then, started names it, and nobody carries it on until its caller waits for it, or leaves it; otherwise started is 0.
//
//export larder_call_do
func larder_call_do(
	handle C.uint64_t, call *C.larder_call, limit C.int64_t, started *C.uint64_t, result *C.larder_result, e *C.larder_error,
) C.int32_t {
	*started = 0
	return guard(e, func() error {
		h, w, err := queueCall(handle, call)
		if err != nil {
			return err
		}
		if err = waitCall(w, limit, result); errors.Is(err, errAgain) {
			works.set(h, w)
			*started = C.uint64_t(h)
			return err
		}
		works.drop(h)
		return err
	})
}

// queueCall begins a call, with a handle for it that is not set yet: what has begun must be able to have one.
func queueCall(group C.uint64_t, call *C.larder_call) (uint64, *pg.Work, error) {
	g, err := groups.of(uint64(group))
	if err != nil {
		return 0, nil, err
	}
	c, err := callOf(call)
	if err != nil {
		return 0, nil, err
	}
	h, err := works.add(nil)
	if err != nil {
		return 0, nil, err
	}
	return h, g.Queue(c), nil
}

// larder_call_wait waits for a call to end, and helps it along in the caller's thread. Anything but LARDER_AGAIN says that it
// has ended, and its handle is closed.
//
//export larder_call_wait
func larder_call_wait(handle C.uint64_t, limit C.int64_t, result *C.larder_result, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		w, err := works.of(uint64(handle))
		if err != nil {
			return err
		}
		if err = waitCall(w, limit, result); !errors.Is(err, errAgain) {
			works.drop(uint64(handle))
		}
		return err
	})
}

// waitCall waits for a call, for a slice of limit, and writes how it has ended.
func waitCall(w *pg.Work, limit C.int64_t, result *C.larder_result) error {
	if !w.WaitFor(min(time.Duration(limit), sliceMost)) {
		return errAgain
	}
	r, err := w.Wait(context.Background())
	failed := r.Failed
	if lost := (*pg.PeerError)(nil); errors.As(err, &lost) {
		failed = member.MaskOf(lost.Ranks...)
	}
	setMask(&result.failed, failed)
	result.lost = C.int32_t(failed.Len())
	result.source, result.tag, result.bytes = C.int32_t(r.From), C.uint64_t(r.Tag), C.uint64_t(r.Bytes)
	return err //nolint:wrapcheck // its code is looked up
}

// larder_call_leave leaves a call of larder_call_do to the library's own thread.
//
//export larder_call_leave
func larder_call_leave(handle C.uint64_t, e *C.larder_error) C.int32_t {
	return guard(e, func() error {
		w, err := works.of(uint64(handle))
		if err == nil {
			w.Leave()
		}
		return err
	})
}
