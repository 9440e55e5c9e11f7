package raft

import (
	"errors"
	"strings"
	"syscall"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// logAhead is how far zeros go ahead of what has been written to a write-ahead log. A sync of a file that has become
// longer also writes the file's length: half as long again on ext4 without a journal, more with one. Logs that Pebble
// uses again have a length; the first ones of a store, and those that grow beyond it, get one some forty syncs of 3 KiB
// ahead. More at a time would delay the sync behind it.
const logAhead = 128 << 10

// zeros is what a log gets.
var zeros [logAhead]byte

// aheadFS is a file system in which write-ahead logs are longer than what has been written to them. Pebble reads zeros
// as the end of a log, as it must with logs that it uses again.
type aheadFS struct{ vfs.FS }

// Create implements vfs.FS.
func (fs aheadFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	return aheadOf(name, 0)(fs.FS.Create(name, category))
}

// ReuseForWrite implements vfs.FS.
func (fs aheadFS) ReuseForWrite(old, name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.ReuseForWrite(old, name, category)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return aheadOf(name, info.Size())(f, nil)
}

// Unwrap implements vfs.FS.
func (fs aheadFS) Unwrap() vfs.FS { return fs.FS }

// aheadOf wraps a file of a size if its name is a log's.
func aheadOf(name string, size int64) func(vfs.File, error) (vfs.File, error) {
	return func(f vfs.File, err error) (vfs.File, error) {
		if err != nil || !strings.HasSuffix(name, ".log") {
			return f, err
		}
		return &aheadFile{File: f, size: size}, nil
	}
}

// aheadFile is a write-ahead log, which one goroutine writes.
type aheadFile struct {
	vfs.File
	end  int64 // of what has been written
	size int64
}

// Write implements vfs.File.
func (f *aheadFile) Write(p []byte) (int, error) {
	n, err := f.File.Write(p)
	f.end += int64(n)
	if err != nil || f.end <= f.size {
		return n, err
	}
	const page = 4 << 10 // of the disk's cache: whole ones, but for the one that is being written
	f.size = f.end
	fill, err := f.WriteAt(zeros[:logAhead-f.end%page], f.end)
	if errors.Is(err, syscall.ENOSPC) {
		return n, nil // what was to be written is; the next write tries again
	}
	f.size += int64(fill)
	return n, err
}
