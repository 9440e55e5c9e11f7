// Package httpd has what the HTTP listeners of this program share.
package httpd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"

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
