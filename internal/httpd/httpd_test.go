package httpd

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"testing"

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
