package source

import (
	"bufio"
	"context"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// publisherInPython is what vLLM's ZmqEventPublisher does: a PUB, and a ROUTER that sends again what is in a ring. The second
// batch is only in the ring.
const publisherInPython = `
import sys, time, zmq
ctx = zmq.Context()
pub, router = ctx.socket(zmq.XPUB), ctx.socket(zmq.ROUTER)
for s in (pub, router):
    s.bind("tcp://127.0.0.1:*")
    print(s.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"), flush=True)
assert pub.recv() == b"\x01"
END = (-1).to_bytes(8, "big", signed=True)
def tokens(i):
    return bytes(range(4 * i, 4 * i + 4))
def batch(i):
    parent = b"\xc0" if i == 0 else bytes([i])
    return b"\x92\x01\x91\x97\xabBlockStored\x91" + bytes([i + 1]) + parent + b"\x94" + tokens(i) + b"\x04\xc0\xa3GPU"
ring = []
for i in range(4):
    ring.append((i, batch(i)))
    if i != 1:
        pub.send_multipart([b"", i.to_bytes(8, "big"), ring[-1][1]])
while True:
    who, empty, start = router.recv_multipart()
    for seq, payload in ring:
        if seq >= int.from_bytes(start, "big"):
            router.send_multipart([who, b"", seq.to_bytes(8, "big"), payload])
    router.send_multipart([who, b"", END, b""])
`

// TestLibzmq: an engine that publishes and replays as vLLM does, by libzmq.
func TestLibzmq(t *testing.T) {
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
	cmd := exec.CommandContext(ctx, program, "-u", "-c", publisherInPython)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	var failed strings.Builder
	cmd.Stderr = &failed
	require.NoError(t, cmd.Start())
	defer func() {
		cancel()
		_ = cmd.Wait() // it was killed
		if t.Failed() {
			t.Log(failed.String())
		}
	}()
	lines := bufio.NewScanner(out)
	s := Service{Type: VLLM, ModelName: "m", InstanceID: "a", BlockSize: 4}
	for _, endpoint := range []*string{&s.Endpoint, &s.ReplayEndpoint} {
		require.True(t, lines.Scan(), failed.String())
		*endpoint = lines.Text()
	}
	w := newWorld(t, Config{Heartbeat: 20 * time.Millisecond})
	_, err = w.Register(s)
	require.NoError(t, err)
	eventually(t, func() bool { return w.longest(seq(0, 16))["a"] == 16 })
	st := w.of("a")
	require.EqualValues(t, 3, st.Sequence)
	require.Zero(t, st.Bad+st.Stale+st.Restarts)
	require.EqualValues(t, 4, st.Batches)
	time.Sleep(100 * time.Millisecond)
	require.EqualValues(t, 1, w.of("a").Connects, "libzmq answers heartbeats")
}
