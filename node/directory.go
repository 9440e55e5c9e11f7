package node

import (
	"context"
	"log/slog"
	"time"

	"larder/client"
	"larder/transfer"
)

// directoryPause is how long to wait before the masters are tried again.
const directoryPause = time.Second

// addresses is a directory in which a node says where it is, and nothing of its buffers: they are other clients' regions, and
// masters say who may write to them.
type addresses struct{ *client.Directory }

// Publish implements [transfer.Directory].
func (d addresses) Publish(ctx context.Context, name string, s transfer.Descriptor) error {
	s.Buffers = nil
	return d.Directory.Publish(ctx, name, s) //nolint:wrapcheck // says what to do
}

// publish has the node found by name until ctx is over. It has a client of its own, since those of devices come and go with
// them.
func (n *Node) publish(ctx context.Context) {
	for ctx.Err() == nil {
		c, err := client.Open(ctx, client.Config{Addrs: n.cfg.Masters, Logger: n.cfg.Logger})
		if err == nil {
			n.directory.Bind(c)
			<-ctx.Done()
			_ = c.Close(context.WithoutCancel(ctx)) // the name ends with the session otherwise
			return
		}
		n.cfg.Logger.LogAttrs(ctx, slog.LevelDebug, "no masters to publish the node at yet", slog.Any("error", err))
		if sleep(ctx, n.cfg.clock, directoryPause) != nil {
			return
		}
	}
}
