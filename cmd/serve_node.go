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
	"larder/tiering/ssd"
	"larder/transfer/verbs"
)

// servedNode is the node inside of a larder serve: it lets other hosts reach the server's own devices, and contributes
// memory and a disk if it is told to.
type servedNode struct {
	n      *node.Node
	cancel context.CancelFunc
	ended  chan struct{}
	err    error        // of Run, after ended
	nics   func() error // closes them
}

// startServedNode starts the node of a server, unless nobody could use it; a nil servedNode can be stopped. A node that
// fails later takes nothing of the server with it, and says so in the log.
func startServedNode(ctx context.Context, s *server.Server, admin *server.Admin, logger *slog.Logger) (*servedNode, error) {
	cfg := s.Config()
	nc := node.Config{
		Masters: masterAddrs(s, &cfg), Token: string(cfg.TransferToken), DRAM: uint64(cfg.DRAM), PageSize: uint64(cfg.PageSize),
		RegionSize: uint64(cfg.RegionSize), Logger: logger,
	}
	var err error
	if nc.NUMA, err = cfg.NUMANode(); err != nil {
		return nil, fmt.Errorf("dram_numa: %w", err)
	}
	if cfg.SSD != "" {
		compression, err := ssd.ParseCompression(cfg.SSDCompression)
		if err != nil {
			return nil, fmt.Errorf("ssd_compression: %w", err)
		}
		nc.SSD = []node.SSD{{
			Dir: cfg.SSD, Size: uint64(cfg.SSDSize), Compression: compression, CompactRate: int64(cfg.SSDCompactRate), //nolint:gosec // checked by the store
		}}
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
	closeNICs, err := servedTransfer(&nc, &cfg)
	if err != nil {
		return nil, err
	}
	n, err := node.New(nc)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%w; change transfer_listen, dram, dram_numa or ssd", err), closeNICs())
	}
	admin.Collect(n.Collector())
	ctx, cancel := context.WithCancel(ctx)
	c := &servedNode{n: n, cancel: cancel, ended: make(chan struct{}), nics: closeNICs}
	go func() {
		defer close(c.ended)
		if c.err = n.Run(ctx); c.err != nil {
			logger.LogAttrs(ctx, slog.LevelError, "the node inside of this server has failed", slog.Any("error", c.err))
		}
	}()
	return c, nil
}

// servedTransfer tells the node of a server which ways its transfers take. closeNICs closes the NICs that it opens, after the
// node.
func servedTransfer(nc *node.Config, cfg *server.Config) (closeNICs func() error, err error) {
	list := func(text string) []string {
		return strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' })
	}
	nc.Transports, nc.ZeroCopy = list(cfg.TransferTransports), cfg.TransferZeroCopy
	if nc.Endpoints, err = endpointConfig(cfg.TransferMaxEndpoints, cfg.TransferNumQPPerEP, cfg.TransferEviction); err != nil {
		return nil, fmt.Errorf("transfer_max_endpoints, transfer_num_qp_per_ep, transfer_eviction: %w", err)
	}
	if cfg.TransferTopology != "" {
		var t topologyFile
		if err := t.UnmarshalText([]byte(cfg.TransferTopology)); err != nil {
			return nil, fmt.Errorf("transfer_topology: %w", err)
		}
		nc.Topology = t.Topology
	}
	nc.NICs, closeNICs, err = verbs.OpenNICs(list(cfg.TransferNICs))
	if err != nil {
		return nil, fmt.Errorf("transfer_nics: %w", err)
	}
	return closeNICs, nil
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
	return errors.Join(c.err, c.n.Close(), c.nics())
}
