//go:build !failpoints

package raft

import "github.com/cockroachdb/pebble/v2/vfs"

// withFailpoints is fs: faults are injected only in programs built with the tag failpoints.
func withFailpoints(fs vfs.FS) vfs.FS { return fs }
