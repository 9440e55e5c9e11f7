package zmtp

import (
	"bufio"
	"context"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// python runs a script that uses libzmq with some arguments, beside the test. said gives what it prints, line by line.
func python(t *testing.T, script string, args ...string) (said func() string) {
	t.Helper()
	program := ""
	for _, p := range []string{"python3", "/usr/bin/python3"} { // the second is Debian's, beside another one
		if exec.CommandContext(t.Context(), p, "-c", "import zmq").Run() == nil {
			program = p
			break
		}
	}
	if program == "" {
		t.Skip("no libzmq for Python here: apt-get install python3-zmq")
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	cmd := exec.CommandContext(ctx, program, append([]string{"-u", "-c", "import sys, zmq, time\nctx = zmq.Context()\n" + script}, args...)...)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	var failed strings.Builder
	cmd.Stderr = &failed
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // it was killed, or is through
		if t.Failed() {
			t.Log(failed.String())
		}
	})
	lines := bufio.NewScanner(out)
	return func() string {
		if !lines.Scan() {
			_ = cmd.Wait()
			t.Fatalf("the script has ended: %s", failed.String())
		}
		return lines.Text()
	}
}

// TestSubscribeToLibzmq: events of a PUB of libzmq, over TCP and a Unix socket, with heartbeats both ways.
func TestSubscribeToLibzmq(t *testing.T) {
	for _, endpoint := range []string{"tcp://127.0.0.1:*", "ipc://" + t.TempDir() + "/pub"} {
		said := python(t, `
s = ctx.socket(zmq.XPUB)
s.setsockopt(zmq.HEARTBEAT_IVL, 20)
s.bind(sys.argv[1])
print(s.getsockopt_string(zmq.LAST_ENDPOINT))
print(s.recv())
time.sleep(0.2)
for i in range(1000):
    s.send_multipart([b"kv@x", i.to_bytes(8, "big"), bytes(i)])
    s.send_multipart([b"other", b""])
time.sleep(60)
`, endpoint)
		c := dial(t, strings.TrimRight(said(), "\x00"), Config{Type: SUB, Heartbeat: 20 * time.Millisecond})
		require.NoError(t, c.Subscribe("kv"))
		require.Equal(t, `b'\x01kv'`, said())
		for i := range 1000 {
			m, err := c.Read()
			require.NoError(t, err)
			require.Len(t, m, 3)
			require.Equal(t, byte(i), m[1][7])
			require.Len(t, m[2], i)
		}
	}
}

// TestLibzmqSubscribes: a SUB of libzmq gets what it asks for.
func TestLibzmqSubscribes(t *testing.T) {
	p := publisher(t, Config{Heartbeat: 20 * time.Millisecond})
	said := python(t, `
s = ctx.socket(zmq.SUB)
s.connect(sys.argv[1])
s.setsockopt(zmq.SUBSCRIBE, b"a")
s.setsockopt(zmq.SUBSCRIBE, b"gone")
s.setsockopt(zmq.UNSUBSCRIBE, b"gone")
s.setsockopt(zmq.SUBSCRIBE, b"b")
while True:
    m = s.recv_multipart()
    print(m[0].decode(), len(m[1]))
`, p.Endpoint())
	subscribed(t, p, "b")
	for i := range 300 {
		p.Publish([]byte("gone"), nil)
		p.Publish([]byte("ab"), make([]byte, i))
	}
	for i := range 300 {
		require.Equal(t, fmt.Sprintf("ab %d", i), said())
	}
}

// TestAskLibzmq: DEALER and REQ of this side with a ROUTER of libzmq, as engines replay events.
func TestAskLibzmq(t *testing.T) {
	said := python(t, `
s = ctx.socket(zmq.ROUTER)
s.bind("tcp://127.0.0.1:*")
print(s.getsockopt_string(zmq.LAST_ENDPOINT))
while True:
    who, *m = s.recv_multipart()
    for i in range(3):
        s.send_multipart([who, *m, bytes([i])])
`)
	endpoint := strings.TrimRight(said(), "\x00")
	for _, kind := range []SocketType{DEALER, REQ} {
		c := dial(t, endpoint, Config{Type: kind, Identity: string(kind)})
		require.NoError(t, c.Write(nil, []byte("from 7")))
		for i := range 3 {
			m, err := c.Read()
			require.NoError(t, err)
			require.Len(t, m, 3)
			require.Equal(t, "from 7", string(m[1]))
			require.Equal(t, []byte{byte(i)}, m[2])
		}
	}
}

// TestLibzmqAsks: REQ and DEALER of libzmq with a ROUTER of this side.
func TestLibzmqAsks(t *testing.T) {
	s := listen(t, Config{Type: ROUTER}, echo)
	said := python(t, `
q = ctx.socket(zmq.REQ)
q.connect(sys.argv[1])
d = ctx.socket(zmq.DEALER)
d.setsockopt(zmq.IDENTITY, b"me")
d.connect(sys.argv[1])
for i in range(100):
    q.send(bytes(1000 * i))
    print(len(q.recv()))
    d.send_multipart([b"", b"x" * i])
    print(len(d.recv_multipart()[1]))
`, s.Endpoint())
	for i := range 100 {
		require.Equal(t, fmt.Sprint(1000*i), said())
		require.Equal(t, fmt.Sprint(i), said())
	}
}
