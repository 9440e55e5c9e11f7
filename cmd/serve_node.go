package cmd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"larder/cxl"
	"larder/node"
	"larder/server"
)

// servedNode is the node inside of a larder serve: it lets other hosts reach the server's own devices, and contributes
// memory and a disk if it is told to.
type servedNode struct {
	n      *node.Node
	cancel context.CancelFunc
	ended  chan struct{}
	err    error // of Run, after ended
}

// startServedNode starts the node of a server, unless nobody could use it; a nil servedNode can be stopped. A node that
// fails later takes nothing of the server with it, and says so in the log.
func startServedNode(ctx context.Context, s *server.Server, admin *server.Admin, logger *slog.Logger) (*servedNode, error) {
	cfg := s.Config()
	nc := node.Config{
		Masters: masterAddrs(s, &cfg), Token: string(cfg.TransferToken), DRAM: uint64(cfg.DRAM), PageSize: uint64(cfg.PageSize),
		RegionSize: uint64(cfg.RegionSize), Logger: logger,
	}
	if cfg.SSD != "" {
		nc.SSD = []node.SSD{{Dir: cfg.SSD, Size: uint64(cfg.SSDSize)}}
	}
	if cfg.TransferListen != server.Off {
		nc.Listen = []string{cfg.TransferListen}
		if told := server.Advertised(cfg.TransferListen); told != cfg.TransferListen {
			nc.Advertise = []string{told} // a wildcard is no address
		}
		for _, d := range cfg.Pool {
			if !strings.HasPrefix(d.Path, cxl.MemFDPrefix) {
				nc.Expose = append(nc.Expose, d.Path)
			}
		}
	}
	if nc.DRAM == 0 && len(nc.SSD) == 0 && len(nc.Expose) == 0 {
		return nil, nil //nolint:nilnil // described above
	}
	n, err := node.New(nc)
	if err != nil {
		return nil, fmt.Errorf("%w; change transfer_listen, dram or ssd", err)
	}
	admin.Collect(n.Collector())
	ctx, cancel := context.WithCancel(ctx)
	c := &servedNode{n: n, cancel: cancel, ended: make(chan struct{})}
	go func() {
		defer close(c.ended)
		if c.err = n.Run(ctx); c.err != nil {
			logger.LogAttrs(ctx, slog.LevelError, "the node inside of this server has failed", slog.Any("error", c.err))
		}
	}()
	return c, nil
}

// masterAddrs are where the node of a server finds the masters: here first.
func masterAddrs(s *server.Server, cfg *server.Config) (addrs []string) {
	if addr := s.Addr(); addr != "" && cfg.Listen != server.Off {
		addrs = append(addrs, addr)
	} else {
		addrs = append(addrs, "unix:"+cfg.Socket)
	}
	for _, p := range cfg.Peers {
		if p.Client != "" && p.Client != cfg.Advertise {
			addrs = append(addrs, p.Client)
		}
	}
	return addrs
}

// stop says goodbye to the masters, one of which is the server: it must be stopped afterwards.
func (c *servedNode) stop() error {
	if c == nil {
		return nil
	}
	c.cancel()
	<-c.ended
	if errors.Is(c.err, node.ErrMedium) {
		c.err = nil // it has been told, and the server went on
	}
	return errors.Join(c.err, c.n.Close())
}
