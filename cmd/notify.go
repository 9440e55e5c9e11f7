package cmd

import (
	"fmt"
	"net"
	"os"
)

// notify tells systemd about the state of a service of Type=notify (sd_notify(3)): READY=1, STOPPING=1. It does
// nothing where there is no systemd.
func notify(state string) error {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return nil
	}
	if path[0] == '@' { // an abstract socket, whose name starts with a zero byte
		path = "\x00" + path[1:]
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	defer conn.Close() //nolint:errcheck // nothing is buffered in a datagram socket
	if _, err := conn.Write([]byte(state)); err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	return nil
}
