package kvpub

import (
	"bufio"
	"context"
	"fmt"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func testContext() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), time.Minute)
}

// follower is a subscriber as vLLM's example has it, which also asks for what it has missed.
const follower = `
import sys, zmq
ctx = zmq.Context()
replay = ctx.socket(zmq.DEALER)
replay.connect(sys.argv[2])
replay.send_multipart([b"", (0).to_bytes(8, "big")])
while True:
    empty, *topic, seq, payload = replay.recv_multipart()
    seq = int.from_bytes(seq, "big", signed=True)
    print("old", seq, topic, len(payload))
    if seq == -1:
        break
sub = ctx.socket(zmq.SUB)
sub.connect(sys.argv[1])
sub.setsockopt_string(zmq.SUBSCRIBE, "kv@")
while True:
    topic, seq, payload = sub.recv_multipart()
    print(topic.decode(), int.from_bytes(seq, "big"), len(payload))
`

// TestLibzmqFollows: libzmq gets past batches and those that are published.
func TestLibzmqFollows(t *testing.T) {
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
	p := publisher(t, Config{Topic: "kv@10.0.0.1@m", BatchEvents: 1, TopicInReplay: true})
	for i := range 3 {
		require.NoError(t, p.Publish(removed(uint64(i))))
	}
	ctx, cancel := testContext()
	cmd := exec.CommandContext(ctx, program, "-u", "-c", follower, p.Endpoint(), p.ReplayEndpoint())
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	defer func() {
		cancel()
		_ = cmd.Wait() // it was killed
	}()
	lines := bufio.NewScanner(out)
	said := func() string {
		require.True(t, lines.Scan(), "the script has ended")
		return lines.Text()
	}
	size := len(p.ring.at(0).payload)
	for i := range 3 {
		require.Equal(t, fmt.Sprintf("old %d [b'kv@10.0.0.1@m'] %d", i, size), said())
	}
	require.Equal(t, "old -1 [b''] 0", said())
	require.Eventually(t, func() bool { return p.Stats().Subscribers == 1 }, 10*time.Second, time.Millisecond)
	heard := make(chan string, 1)
	go func() { heard <- said() }()
	for { // until its subscription is there
		require.NoError(t, p.Publish(removed(9)))
		select {
		case line := <-heard:
			var sequence, n int
			_, err := fmt.Sscanf(line, "kv@10.0.0.1@m %d %d", &sequence, &n)
			require.NoError(t, err, line)
			require.Equal(t, size, n)
			require.GreaterOrEqual(t, sequence, 3)
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}
