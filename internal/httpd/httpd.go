// Package httpd has what the HTTP listeners of this program share.
package httpd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/valyala/fasthttp"
)

// RefusalStatus is the HTTP status of what is not a request that a handler could be given, by fasthttp's error.
func RefusalStatus(err error) int {
	var timeout net.Error
	switch _, long := errors.AsType[*fasthttp.ErrSmallBuffer](err); {
	case long:
		return fasthttp.StatusRequestHeaderFieldsTooLarge
	case errors.Is(err, fasthttp.ErrBodyTooLarge):
		return fasthttp.StatusRequestEntityTooLarge
	case errors.As(err, &timeout) && timeout.Timeout():
		return fasthttp.StatusRequestTimeout
	}
	return fasthttp.StatusBadRequest
}

// Logger passes fasthttp's complaints about connections on, for who debugs.
type Logger struct{ Logger *slog.Logger }

// Printf implements fasthttp.Logger.
func (l Logger) Printf(format string, args ...any) {
	l.Logger.LogAttrs(context.Background(), slog.LevelDebug, "HTTP connection", slog.String("detail", fmt.Sprintf(format, args...)))
}

// Serve serves until ctx ends, and then what is being answered, for as long as patience lasts.
func Serve(ctx context.Context, l net.Listener, s *http.Server, patience time.Duration) error {
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	if err := s.Shutdown(last); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return s.Close()
}
