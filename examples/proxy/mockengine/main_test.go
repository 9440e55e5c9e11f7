package main

import (
	"bufio"
	"context"
	"io"
	"log/slog"
	"net/http"
	"regexp"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestRun serves until it is told to end.
func TestRun(t *testing.T) {
	var f flags
	parser, err := kong.New(&f)
	require.NoError(t, err)
	_, err = parser.Parse([]string{"--listen", "127.0.0.1:0", "--events", "tcp://127.0.0.1:*", "--replay", "tcp://127.0.0.1:*"})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	r, w := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, f, slog.New(slog.NewTextHandler(w, nil))) }()
	line, err := bufio.NewReader(r).ReadString('\n')
	require.NoError(t, err)
	url := regexp.MustCompile(`url=(\S+)`).FindStringSubmatch(line)
	require.Len(t, url, 2, line)
	answer, err := http.Get(url[1] + "/health")
	require.NoError(t, err)
	require.NoError(t, answer.Body.Close())
	require.Equal(t, http.StatusOK, answer.StatusCode)
	http.DefaultClient.CloseIdleConnections()
	stop()
	require.NoError(t, <-ended)
}
