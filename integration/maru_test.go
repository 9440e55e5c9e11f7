package integration

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vmihailenco/msgpack/v5"
	"golang.org/x/sys/unix"

	"larder/integration/cluster"
	"larder/internal/freeport"
	"larder/maru/rm"
	"larder/zmtp"
)

// Maru's messages that the clients here send.
const (
	maruAlloc     = 0x01
	maruReturn    = 0x03
	maruList      = 0x04
	maruRegister  = 0x10
	maruLookup    = 0x11
	maruExists    = 0x12
	maruDelete    = 0x13
	maruPin       = 0x14
	maruUnpin     = 0x15
	maruUsage     = 0xf3
	maruHandshake = 0xfe
)

const (
	maruPage    = 64 << 10
	maruRegion  = 4 << 20
	maruTimeout = 2 * time.Second // as Maru's clients have it
)

// startMaru starts masters whose doors for Maru's clients are open, and returns the addresses of these.
func startMaru(t *testing.T, members int) (c *cluster.Cluster, doors []string) {
	t.Helper()
	c = cluster.New(t, cluster.Options{Members: members})
	for _, n := range c.Nodes {
		door := freeport.For(t)
		doors = append(doors, door)
		n.Flags = append(n.Flags, "--maru="+door, "--maru-rm="+freeport.For(t))
		n.Start()
	}
	c.Leader()
	for _, n := range c.Nodes {
		n.Ready()
	}
	return c, doors
}

// maruClient does what Maru's sync client does, message by message: one REQ, given up and made again when an answer does
// not come in time.
type maruClient struct {
	t        *testing.T
	door     string
	instance string
	conn     *zmtp.Conn
	sequence uint32
	manager  *rm.Client
	mapped   map[uint64][]byte
}

// fields are those of a message.
type fields = map[string]any

func openMaru(t *testing.T, door, instance string) *maruClient {
	t.Helper()
	c := &maruClient{t: t, door: door, instance: instance, mapped: map[uint64][]byte{}}
	hello := c.call(maruHandshake, fields{})
	require.Equal(t, true, hello["success"])
	address, _ := hello["rm_address"].(string)
	var err error
	c.manager, err = rm.Dial(t.Context(), address, "test-host:"+instance)
	require.NoError(t, err)
	t.Cleanup(c.close)
	return c
}

func (c *maruClient) close() {
	c.drop()
	_ = c.manager.Close() // nothing is lost
	for _, b := range c.mapped {
		require.NoError(c.t, unix.Munmap(b))
	}
	c.mapped = nil
}

func (c *maruClient) drop() {
	if c.conn != nil {
		_ = c.conn.Close() // it returns nil
		c.conn = nil
	}
}

// try sends a message and returns what it is answered.
func (c *maruClient) try(kind byte, message fields) (reply fields, err error) {
	defer func() {
		if err != nil {
			c.drop()
		}
	}()
	ctx, cancel := context.WithTimeout(c.t.Context(), maruTimeout)
	defer cancel()
	if c.conn == nil {
		if c.conn, err = zmtp.Dial(ctx, "tcp://"+c.door, zmtp.Config{Type: zmtp.REQ}); err != nil {
			return nil, err
		}
	}
	defer context.AfterFunc(ctx, func() { _ = c.conn.Close() })()
	payload, err := msgpack.Marshal(message)
	if err != nil {
		return nil, err
	}
	c.sequence++
	body := binary.BigEndian.AppendUint32(nil, 0xcf000100|uint32(kind))
	body = binary.BigEndian.AppendUint32(body, 0)
	body = binary.BigEndian.AppendUint32(body, c.sequence)
	body = append(binary.BigEndian.AppendUint32(body, uint32(len(payload))), payload...)
	if err := c.conn.Write(nil, body); err != nil {
		return nil, err
	}
	parts, err := c.conn.Read()
	if err != nil {
		return nil, err
	}
	if len(parts) != 2 || len(parts[0]) != 0 || len(parts[1]) < 16 || binary.BigEndian.Uint32(parts[1][8:]) != c.sequence {
		return nil, fmt.Errorf("a reply of %d parts: %x", len(parts), parts)
	}
	err = msgpack.Unmarshal(parts[1][16:], &reply)
	if message, failed := reply["error"]; err == nil && failed {
		err = fmt.Errorf("refused: %v", message)
	}
	return reply, err
}

// call is try for what must succeed.
func (c *maruClient) call(kind byte, message fields) fields {
	c.t.Helper()
	reply, err := c.try(kind, message)
	require.NoError(c.t, err)
	return reply
}

// number reads an unsigned number of a message, which has the smallest form that it fits.
func number(v any) uint64 {
	var n uint64
	_, _ = fmt.Sscan(fmt.Sprint(v), &n) // 0 will not be what is expected
	return n
}

// bytes maps the region that a handle names, as the resource manager says.
func (c *maruClient) bytes(handle any) []byte {
	c.t.Helper()
	m, _ := handle.(fields)
	h := rm.Handle{
		Region: number(m["region_id"]), Offset: number(m["offset"]), Length: number(m["length"]), Token: number(m["auth_token"]),
	}
	if b := c.mapped[h.Region]; b != nil {
		return b
	}
	r, err := c.manager.Access(c.t.Context(), h)
	require.NoError(c.t, err)
	f, err := os.OpenFile(r.Path, os.O_RDWR, 0)
	require.NoError(c.t, err)
	defer f.Close() //nolint:errcheck // its mapping lasts
	b, err := unix.Mmap(int(f.Fd()), int64(h.Offset), int(h.Length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(c.t, err)
	c.mapped[h.Region] = b
	return b
}

func maruKey(i int) string { return fmt.Sprintf("model@world@%d", i) }

func maruValue(i int) []byte { return cluster.MakeValue(nil, maruKey(i), 1, maruPage) }

// store has a client take a region and store keys from one number up to another.
func (c *maruClient) store(from, to int) (handle any) {
	c.t.Helper()
	reply := c.call(maruAlloc, fields{"instance_id": c.instance, "size": maruRegion})
	require.Equal(c.t, true, reply["success"])
	handle = reply["handle"]
	memory, region := c.bytes(handle), handle.(fields)["region_id"]
	for i := from; i < to; i++ {
		at := (i - from) * maruPage
		copy(memory[at:], maruValue(i))
		require.Equal(c.t, false, c.call(maruExists, fields{"key": maruKey(i)})["exists"])
		stored := c.call(maruRegister, fields{"key": maruKey(i), "region_id": region, "kv_offset": at, "kv_length": maruPage})
		require.Equal(c.t, true, stored["is_new"])
	}
	return handle
}

// found checks that keys are there with their bytes.
func (c *maruClient) found(from, to int) {
	c.t.Helper()
	for i := from; i < to; i++ {
		entry := c.call(maruLookup, fields{"key": maruKey(i)})
		require.Equal(c.t, true, entry["found"], "key %d", i)
		at, length := number(entry["kv_offset"]), number(entry["kv_length"])
		require.True(c.t, bytes.Equal(maruValue(i), c.bytes(entry["handle"])[at:at+length]), "key %d", i)
	}
}

// again calls try until it succeeds: while nobody leads, clients time out.
func (c *maruClient) again(what string, kind byte, message fields) (reply fields) {
	c.t.Helper()
	cluster.Within(c.t, what, func() (err error) {
		reply, err = c.try(kind, message)
		return err
	})
	return reply
}

// What Maru's clients have stored is there when the server has been killed and comes back, pins and owners included, though
// nobody has said a word meanwhile.
func TestMaruClientsAcrossARestart(t *testing.T) {
	c, doors := startMaru(t, 1)
	const keys = 16
	writer, reader := openMaru(t, doors[0], "writer"), openMaru(t, doors[0], "reader")
	handle := writer.store(0, keys)
	reader.found(0, keys)
	require.Equal(t, true, reader.call(maruPin, fields{"key": maruKey(0)})["exists"])

	c.Nodes[0].Kill()
	c.Nodes[0].Restart()

	writer.again("an answer after the restart", maruUsage, fields{})
	for _, name := range []string{"late", "reader"} {
		openMaru(t, doors[0], name).found(0, keys)
	}
	reader.drop()
	listed := reader.call(maruList, fields{"exclude_instance_id": "reader"})
	require.Equal(t, []any{handle}, listed["allocations"], "it is still the writer's")
	require.Equal(t, false, writer.call(maruDelete, fields{"key": maruKey(0)})["success"], "the pin holds")
	require.Equal(t, true, reader.call(maruUnpin, fields{"key": maruKey(0)})["success"])
	require.Equal(t, true, writer.call(maruDelete, fields{"key": maruKey(0)})["success"])
	writer.store(keys, keys+4)
	reader.found(1, keys+4)

	region := handle.(fields)["region_id"]
	require.Equal(t, false, reader.call(maruReturn, fields{"instance_id": "reader", "region_id": region})["success"])
	require.Equal(t, true, writer.call(maruReturn, fields{"instance_id": "writer", "region_id": region})["success"])
	reader.found(1, keys)
	for i := 1; i < keys; i++ {
		require.Equal(t, true, reader.call(maruDelete, fields{"key": maruKey(i)})["success"])
	}
	require.Equal(t, false, writer.call(maruReturn, fields{"instance_id": "writer", "region_id": region})["success"],
		"with its last key it has been freed")
	c.Check()
}

// Clients of a follower store and find through a leader's death, and those of other members see the same.
func TestMaruClientsAcrossALeadersDeath(t *testing.T) {
	cluster.SkipShort(t)
	c, doors := startMaru(t, 3)
	leader := c.Leader()
	var clients []*maruClient
	for i, n := range c.Nodes {
		if n != leader {
			clients = append(clients, openMaru(t, doors[i], fmt.Sprintf("client-%d", i)))
		}
	}
	const keys = 16
	clients[0].store(0, keys)
	clients[1].store(keys, 2*keys)
	for _, x := range clients {
		x.found(0, 2*keys)
	}
	leader.Kill()
	for _, x := range clients {
		x.again("a new leader's answer", maruExists, fields{"key": maruKey(0)})
		x.found(0, 2*keys)
	}
	clients[0].store(2*keys, 3*keys)
	clients[1].found(2*keys, 3*keys)
	leader.Restart()
	for i, n := range c.Nodes {
		if n == leader {
			openMaru(t, doors[i], "late").found(0, 3*keys)
		}
	}
	c.Settled()
	c.Check()
}

// maruCheckout is a checkout of Maru and an interpreter that runs it; without them the test is skipped.
func maruCheckout(t *testing.T) (checkout, python string) {
	t.Helper()
	checkout, python = os.Getenv("LARDER_MARU"), os.Getenv("LARDER_MARU_PYTHON")
	if checkout == "" {
		t.Skip("LARDER_MARU names no checkout of Maru to test with")
	}
	if python == "" {
		python = "python3"
	}
	return checkout, python
}

// An unmodified handler of Maru's, in two processes, keeps what it has stored through a kill of the server, and goes on.
func TestMaruHandlerAcrossARestart(t *testing.T) {
	checkout, python := maruCheckout(t)
	c, doors := startMaru(t, 1)
	start := func(role string) (say io.Writer, hear func(line string)) {
		// The test's own context ends before the process is asked to.
		ctx, cancel := context.WithTimeout(context.Background(), cluster.Hang)
		cmd := exec.CommandContext(ctx, python, filepath.Join("maru", "flow.py"), role, doors[0])
		cmd.Env = append(os.Environ(), "PYTHONPATH="+checkout, "PYTHONDONTWRITEBYTECODE=1")
		var errs bytes.Buffer
		cmd.Stderr = &errs
		in, err := cmd.StdinPipe()
		require.NoError(t, err)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		lines := bufio.NewScanner(out)
		t.Cleanup(func() {
			defer cancel()
			_ = in.Close() // it ends with that
			if err := cmd.Wait(); err != nil {
				t.Errorf("%s: %v\n%s", role, err, errs.String())
			}
		})
		return in, func(line string) {
			t.Helper()
			require.True(t, lines.Scan(), "%s ended\n%s", role, errs.String())
			require.Equal(t, line, lines.Text())
		}
	}
	say, writer := start("writer")
	writer("stored")
	_, reader := start("reader")
	reader("found")
	c.Nodes[0].Kill()
	c.Nodes[0].Restart()
	_, late := start("reader")
	late("found")
	_, err := say.Write([]byte("go on\n"))
	require.NoError(t, err)
	writer("stored more")
}

// Maru's own tests pass against larder, without exception.
func TestMarusOwnTests(t *testing.T) {
	checkout, python := maruCheckout(t)
	cmd := exec.CommandContext(t.Context(), filepath.Join("maru", "run"), checkout, "-q")
	cmd.Env = append(os.Environ(), "PYTHON="+python, "LARDER="+cluster.Binary(t))
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Regexp(t, `\n1[0-9]{2} passed`, string(out))
}
