//go:build failpoints

package raft

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
)

// failpointsEnv names a file that says which operations on files fail, and how. It is read at each operation, so that a
// test can change its mind while the process runs: write another file and rename it. An empty or missing file is none.
//
// A line is an operation, an action and, if not all files are meant, a pattern of [filepath.Match] for their base
// names. Operations are the keys of failpointOps. Actions are eio, enospc, stall, which never returns, and
// slow=DURATION. The first line that fits counts. At the first use of a line it is appended to a file of the same name
// with .hits behind it.
//
//	sync slow=100ms *.log
const failpointsEnv = "LARDER_FAILPOINTS"

// failpointOps are the operations by their names in the file.
var failpointOps = map[string][]errorfs.OpKind{
	"write":    {errorfs.OpFileWrite, errorfs.OpFileWriteAt},
	"sync":     {errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpFileSyncTo},
	"read":     {errorfs.OpFileRead, errorfs.OpFileReadAt},
	"create":   {errorfs.OpCreate, errorfs.OpReuseForWrite},
	"remove":   {errorfs.OpRemove, errorfs.OpRemoveAll},
	"rename":   {errorfs.OpRename, errorfs.OpLink},
	"allocate": {errorfs.OpFilePreallocate},
}

// failpoints injects what its file says.
type failpoints struct {
	path string
	mu   sync.Mutex
	hit  map[string]bool
}

// withFailpoints wraps fs if there is a file of failpoints.
func withFailpoints(fs vfs.FS) vfs.FS {
	path := os.Getenv(failpointsEnv)
	if path == "" {
		return fs
	}
	f := &failpoints{path: path, hit: map[string]bool{}}
	return errorfs.Wrap(fs, errorfs.InjectorFunc(f.maybe))
}

// maybe carries out the first line that fits.
func (f *failpoints) maybe(op errorfs.Op) error {
	text, err := os.ReadFile(f.path)
	if err != nil {
		return nil //nolint:nilerr // no file, no faults
	}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) < 2 || !fits(words, op) {
			continue
		}
		f.note(strings.Join(words, " "))
		return act(words[1], op)
	}
	return nil
}

func fits(words []string, op errorfs.Op) bool {
	kinds, known := failpointOps[words[0]]
	if !known {
		panic("raft: " + failpointsEnv + ": unknown operation " + words[0])
	}
	if len(words) > 2 {
		if ok, err := filepath.Match(words[2], filepath.Base(op.Path)); err != nil || !ok {
			return false
		}
	}
	for _, k := range kinds {
		if k == op.Kind {
			return true
		}
	}
	return false
}

func act(action string, op errorfs.Op) error {
	switch action {
	case "eio":
		return &os.PathError{Op: fmt.Sprint(op.Kind), Path: op.Path, Err: syscall.EIO}
	case "enospc":
		return &os.PathError{Op: fmt.Sprint(op.Kind), Path: op.Path, Err: syscall.ENOSPC}
	case "stall":
		select {} // as a disk that is gone: nothing ends this but the process
	}
	text, slow := strings.CutPrefix(action, "slow=")
	d, err := time.ParseDuration(text)
	if !slow || err != nil {
		panic("raft: " + failpointsEnv + ": unknown action " + action)
	}
	time.Sleep(d) //nolint:forbidigo // a slow disk is slow by the wall clock
	return nil
}

// note says in the file of hits, once, that a line was carried out.
func (f *failpoints) note(line string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.hit[line] {
		return
	}
	f.hit[line] = true
	hits, err := os.OpenFile(f.path+".hits", os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		_, err = io.WriteString(hits, line+"\n")
	}
	if err != nil {
		panic(err) // a test that cannot know what it tested
	}
	hits.Close() //nolint:errcheck // written
}
