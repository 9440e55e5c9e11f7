//go:build !linux

package shm

import (
	"errors"
	"fmt"
	"os"
	"time"
)

// errLinux says why there is nothing here: sealed anonymous files and futexes between processes are Linux's.
var errLinux = fmt.Errorf("shm: processes share memory on Linux only: %w", errors.ErrUnsupported)

func create(string, int) (*os.File, error)                 { return nil, errLinux }
func sealWrites(*os.File)                                  {}
func admit(*os.File) (int, error)                          { return 0, errLinux }
func mapFile(*os.File, int, bool) ([]byte, error)          { return nil, errLinux }
func mapTwice(*os.File, int, int) ([]byte, error)          { return nil, errLinux }
func unmap([]byte) error                                   { return errLinux }
func futexWait(_ []byte, _ int, _ uint32, _ time.Duration) {}
func futexWake([]byte, int)                                {}
