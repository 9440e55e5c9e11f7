package zmtp

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"

	"larder/sock"
)

// parse splits an endpoint into what package net wants. In one to listen at, * stands for every address, or any free port.
func parse(endpoint string, listen bool) (network, address string, err error) {
	scheme, rest, _ := strings.Cut(endpoint, "://")
	switch {
	case scheme == "ipc" && rest != "":
		return "unix", rest, nil
	case scheme != "tcp":
		return "", "", fmt.Errorf("%w, not %.100q", ErrEndpoint, endpoint)
	}
	host, port, err := net.SplitHostPort(rest)
	if err != nil {
		return "", "", fmt.Errorf("%w, not %.100q: %w", ErrEndpoint, endpoint, err)
	}
	if !listen && (host == "*" || host == "") {
		return "", "", fmt.Errorf("%w: to connect to %.100q, name a host", ErrEndpoint, endpoint)
	}
	if host == "*" {
		host = ""
	}
	if port == "*" && listen {
		port = "0"
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 && !listen {
		return "", "", fmt.Errorf("%w: %.100q has no port", ErrEndpoint, endpoint)
	}
	return "tcp", net.JoinHostPort(host, port), nil
}

// CheckEndpoint reports whether an endpoint can be parsed.
func CheckEndpoint(endpoint string, listen bool) error {
	_, _, err := parse(endpoint, listen)
	return err
}

// endpointOf is the endpoint of an address.
func endpointOf(a net.Addr) string {
	if a.Network() == "unix" {
		return "ipc://" + a.String()
	}
	return "tcp://" + a.String()
}

// Dial connects to an endpoint as a SUB, DEALER or REQ. ctx ends the attempt only.
func Dial(ctx context.Context, endpoint string, cfg Config) (*Conn, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	network, address, err := parse(endpoint, false)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.HandshakeTimeout)
	defer cancel()
	nc, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("zmtp: connect to %s: %w", endpoint, err)
	}
	conn, err := sock.New(nc)
	if err != nil {
		_ = nc.Close() // it is broken already
		return nil, fmt.Errorf("zmtp: connect to %s: %w", endpoint, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() }) // the handshake fails then
	c, err := newConn(conn, cfg)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = conn.Close() // nothing has been said that matters
		return nil, fmt.Errorf("zmtp: connect to %s: %w", endpoint, err)
	}
	return c, nil
}
