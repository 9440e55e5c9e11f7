package integration

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"

	"larder/integration/cluster"
	"larder/internal/freeport"
	"larder/maru"
	"larder/zmtp"
)

// maruWriter is a client of Maru's of one member: it gives up after 2 s, and connects again.
type maruWriter struct {
	ctx      context.Context
	addr     string
	identity string
	c        *zmtp.Conn
	seq      uint32
}

var errMaru = errors.New("the server has failed")

// call sends a request and waits for its reply, for as long as Maru's clients do.
func (c *maruWriter) call(t maru.Type, fields map[string]any) (reply map[string]any, err error) {
	ctx, cancel := context.WithTimeout(c.ctx, 2*time.Second)
	defer cancel()
	defer func() {
		if err != nil && c.c != nil && !errors.Is(err, errMaru) {
			_ = c.c.Close()
			c.c = nil
		}
	}()
	if c.c == nil {
		if c.c, err = zmtp.Dial(ctx, "tcp://"+c.addr, zmtp.Config{Type: zmtp.DEALER, Identity: c.identity}); err != nil {
			return nil, err
		}
	}
	conn := c.c
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	payload, err := msgpack.Marshal(fields)
	if err != nil {
		return nil, err
	}
	c.seq++
	b := binary.BigEndian.AppendUint32([]byte{0xcf, 0, 1, byte(t), 0, 0, 0, 0}, c.seq)
	b = binary.BigEndian.AppendUint32(b, uint32(len(payload)))
	if err := conn.Write(nil, append(b, payload...)); err != nil {
		return nil, err
	}
	parts, err := conn.Read()
	if err != nil {
		return nil, err
	}
	if err := msgpack.Unmarshal(parts[1][16:], &reply); err != nil {
		return nil, err
	}
	if text, bad := reply["error"]; bad {
		return reply, fmt.Errorf("%w: %v", errMaru, text)
	}
	return reply, nil
}

// TestMaruSurvivesLeaders kills the leader, twice, and then all members, while clients of Maru's register keys at all of
// them: what was acknowledged is found through any member, where it was registered.
func TestMaruSurvivesLeaders(t *testing.T) {
	cluster.SkipShort(t)
	c := cluster.New(t, cluster.Options{Members: 3})
	addrs := make([]string, 0, len(c.Nodes))
	for _, n := range c.Nodes {
		addrs = append(addrs, freeport.For(t))
		n.Flags = append(n.Flags, "--maru="+addrs[len(addrs)-1], "--maru-rm="+freeport.For(t))
	}
	for _, n := range c.Nodes {
		n.Start()
	}
	c.Leader().Ready()

	const writers = 6
	var wg sync.WaitGroup
	acked := make([][]int, writers)
	regions := make([]any, writers)
	until := time.Now().Add(9 * time.Second)
	for w := range writers {
		x := &maruWriter{ctx: t.Context(), addr: addrs[w%len(addrs)], identity: fmt.Sprintf("writer%02d", w)}
		cluster.Within(t, "a region", func() error {
			r, err := x.call(maru.RequestAlloc, map[string]any{"instance_id": fmt.Sprint("i", w), "size": 1})
			if err != nil {
				return err
			}
			h, ok := r["handle"].(map[string]any)
			if !ok {
				return fmt.Errorf("no region: %v", r)
			}
			regions[w] = h["region_id"]
			return nil
		})
		wg.Go(func() {
			for i := 0; time.Now().Before(until); i++ {
				r, err := x.call(maru.Register, map[string]any{
					"key": fmt.Sprintf("w%d/%d", w, i), "region_id": regions[w], "kv_offset": i, "kv_length": 1,
				})
				if err == nil && r["is_new"] == true {
					acked[w] = append(acked[w], i)
				}
			}
			if x.c != nil {
				_ = x.c.Close()
			}
		})
	}
	for range 2 {
		time.Sleep(2 * time.Second)
		leader := c.Leader()
		leader.Kill()
		leader.Restart()
		leader.Ready()
	}
	wg.Wait()
	for _, n := range c.Nodes {
		n.Kill()
	}
	for _, n := range c.Nodes {
		n.Start()
	}
	c.Leader().Ready()
	total := 0
	for w := range writers {
		reader := &maruWriter{ctx: t.Context(), addr: addrs[(w+1)%len(addrs)], identity: "reader.."}
		require.NotEmpty(t, acked[w], "writer %d got nothing through", w)
		total += len(acked[w])
		for _, i := range acked[w] {
			key := fmt.Sprintf("w%d/%d", w, i)
			var r map[string]any
			cluster.Within(t, "a reply", func() (err error) {
				r, err = reader.call(maru.Lookup, map[string]any{"key": key})
				return err
			})
			require.Equal(t, true, r["found"], key)
			require.Equal(t, fmt.Sprint(i), fmt.Sprint(r["kv_offset"]), key)
		}
		_ = reader.c.Close()
	}
	t.Logf("%d keys were acknowledged, and found", total)
	c.Settled()
}
