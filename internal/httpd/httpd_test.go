package httpd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valyala/fasthttp"
)

// TestRefusalStatus: each way of not being a request has its status, also wrapped.
func TestRefusalStatus(t *testing.T) {
	for want, err := range map[int]error{
		400: errors.New("not HTTP"),
		408: os.ErrDeadlineExceeded,
		413: fmt.Errorf("read: %w", fasthttp.ErrBodyTooLarge),
		431: fmt.Errorf("read: %w", &fasthttp.ErrSmallBuffer{}),
	} {
		require.Equal(t, want, RefusalStatus(err), err)
	}
}

// TestLogger: what fasthttp has to say is there for who debugs, and for nobody else.
func TestLogger(t *testing.T) {
	var b bytes.Buffer
	Logger{slog.New(slog.NewTextHandler(&b, nil))}.Printf("%d bytes", 3)
	require.Empty(t, b.String())
	Logger{slog.New(slog.NewTextHandler(&b, &slog.HandlerOptions{Level: slog.LevelDebug}))}.Printf("%d bytes", 3)
	require.Contains(t, b.String(), `detail="3 bytes"`)
}

// TestServe: what is being answered when the context ends still is, unless it takes longer than patience lasts.
func TestServe(t *testing.T) {
	for _, c := range []struct {
		patience time.Duration
		answered bool
	}{{time.Minute, true}, {time.Millisecond, false}} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		ctx, stop := context.WithCancel(context.Background())
		ended, served := make(chan error, 1), make(chan struct{})
		s := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			stop()
			if c.answered { // else only the end of the connection ends it
				<-served
			} else {
				<-r.Context().Done()
			}
		})}
		go func() { ended <- Serve(ctx, l, s, c.patience) }()
		answers := make(chan error, 1)
		go func() {
			r, err := http.NewRequestWithContext(context.Background(), http.MethodGet, "http://"+l.Addr().String(), http.NoBody)
			if err == nil {
				var response *http.Response
				c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
				if response, err = c.Do(r); err == nil {
					err = response.Body.Close()
				}
			}
			answers <- err
		}()
		<-ctx.Done()
		close(served)
		require.NoError(t, <-ended)
		require.Equal(t, c.answered, <-answers == nil)
	}
}
