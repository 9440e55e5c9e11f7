package tidy

import (
	"bufio"
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// root is the top of the checkout as seen from this package.
const root = "../.."

// order is the import order: a folder imports only from rows below its own, and from itself.
var order = [][]string{
	{"cmd", "integration", "examples", "python"},
	{"server"},
	{"node"},
	{"conductor", "pg"},
	{"client"},
	{"tiering"},
	{"raft"},
	{"internal"},
	{"maru"},
	{"meta"},
	{"transfer"},
	{"cxl"},
	{"protocol", "zmtp"},
	{"sock"},
}

// forbidden imports beyond the order, by folder, with the reason. Tests are free.
var forbidden = []struct {
	folder  string
	imports []string
	why     string
}{
	{"client", []string{"larder/raft", "larder/meta"}, "a client knows the protocol, not what is behind it"},
	{"raft", []string{"larder/meta"}, "the log does not know what a command means"},
	{"server", []string{"larder/node"}, "a master knows nodes by their sessions: cmd puts one beside it"},
	{"node", []string{"larder/raft", "larder/meta"}, "a node knows the protocol, not what is behind it"},
	{"cxl", []string{"larder/protocol"}, "a device does not know who owns it"},
	{
		"meta",
		[]string{"time", "math/rand", "math/rand/v2", "crypto/rand", "net", "os", "io/fs", "log/slog", "sync", "context"},
		"the state machine has no clock, chance, goroutine or I/O",
	},
	{"protocol", []string{"net", "os", "time"}, "a codec does no I/O"},
}

// source is one parsed Go file.
type source struct {
	path   string // from the top of the checkout, with slashes
	folder string // first element of path
	test   bool
	ast    *ast.File
	text   []byte
}

// sources parses every Go file of the checkout.
func sources(t *testing.T) []source {
	t.Helper()
	paths := files(t, ".go")
	list := make([]source, 0, len(paths))
	for _, path := range paths {
		text, err := os.ReadFile(filepath.Join(root, path))
		require.NoError(t, err)
		parsed, err := parser.ParseFile(token.NewFileSet(), path, text, parser.ParseComments)
		require.NoError(t, err)
		folder, _, _ := strings.Cut(path, "/")
		list = append(list, source{path, folder, strings.HasSuffix(path, "_test.go"), parsed, text})
	}
	require.NotEmpty(t, list)
	return list
}

// files lists the files of the checkout with one of the suffixes, hidden folders and build outputs left out.
func files(t *testing.T, suffixes ...string) []string {
	t.Helper()
	var list []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		require.NoError(t, err)
		rel, err := filepath.Rel(root, path)
		require.NoError(t, err)
		if d.IsDir() {
			if rel != "." && strings.HasPrefix(d.Name(), ".") || rel == "bin" || rel == "data" {
				return fs.SkipDir
			}
			return nil
		}
		for _, suffix := range suffixes {
			if strings.HasSuffix(path, suffix) {
				list = append(list, filepath.ToSlash(rel))
			}
		}
		return nil
	})
	require.NoError(t, err)
	return list
}

// row gives a folder's place in the order.
func row(t *testing.T, folder string) int {
	t.Helper()
	i := slices.IndexFunc(order, func(names []string) bool { return slices.Contains(names, folder) })
	require.GreaterOrEqual(t, i, 0, "folder %s has no place in the import order: give it one in this file", folder)
	return i
}

func TestImportOrder(t *testing.T) {
	for _, src := range sources(t) {
		if src.test && src.folder == "internal" {
			continue
		}
		for _, spec := range src.ast.Imports {
			path := strings.Trim(spec.Path.Value, `"`)
			inside, ours := strings.CutPrefix(path, "larder/")
			if !ours {
				continue
			}
			folder, _, _ := strings.Cut(inside, "/")
			if folder == src.folder || src.test && (folder != "cmd" || src.folder == "integration") {
				continue // a test may use what is above it, to be driven by the real thing
			}
			if src.folder == "examples" && folder == "cmd" {
				continue // an example is a user's main, which calls ours
			}
			if row(t, folder) <= row(t, src.folder) {
				t.Errorf("%s imports %s, which is not below %s: see the order in this file", src.path, path, src.folder)
			}
		}
	}
}

func TestForbiddenImports(t *testing.T) {
	for _, src := range sources(t) {
		for _, rule := range forbidden {
			if src.test || src.folder != rule.folder {
				continue
			}
			for _, spec := range src.ast.Imports {
				path := strings.Trim(spec.Path.Value, `"`)
				if path == "net/netip" {
					continue // it reads addresses, and reaches none
				}
				if slices.ContainsFunc(rule.imports, func(p string) bool { return path == p || strings.HasPrefix(path, p+"/") }) {
					t.Errorf("%s imports %s: %s", src.path, path, rule.why)
				}
			}
		}
	}
}

func TestEveryPackageSaysWhatItIs(t *testing.T) {
	docs := make(map[string]string) // by folder
	for _, src := range sources(t) {
		dir := filepath.Dir(src.path)
		if src.test {
			continue
		}
		if src.ast.Doc == nil {
			docs[dir] += ""
			continue
		}
		if docs[dir] != "" {
			t.Errorf("%s: package %s has a second package comment", src.path, src.ast.Name.Name)
		}
		text := src.ast.Doc.Text()
		docs[dir] = text
		want := "Package " + src.ast.Name.Name + " "
		if src.ast.Name.Name == "main" {
			want = "Command "
		}
		if !strings.HasPrefix(text, want) {
			t.Errorf("%s: the package comment must start with %q", src.path, want)
		}
	}
	for dir, text := range docs {
		if text == "" {
			t.Errorf("%s: no file has a package comment", dir)
		}
	}
}

// startsGoroutine reports whether a file has a go statement, or a call of a method Go, as sync.WaitGroup has.
func startsGoroutine(file *ast.File) (found bool) {
	ast.Inspect(file, func(n ast.Node) bool {
		switch x := n.(type) {
		case *ast.GoStmt:
			found = true
		case *ast.CallExpr:
			if sel, ok := x.Fun.(*ast.SelectorExpr); ok && sel.Sel.Name == "Go" {
				found = true
			}
		}
		return !found
	})
	return found
}

// callsVerifyTestMain reports whether a file has goleak.VerifyTestMain look for goroutines that tests left.
func callsVerifyTestMain(file *ast.File) (found bool) {
	ast.Inspect(file, func(n ast.Node) bool {
		if sel, ok := n.(*ast.SelectorExpr); ok && sel.Sel.Name == "VerifyTestMain" {
			x, ok := sel.X.(*ast.Ident)
			found = found || ok && x.Name == "goleak"
		}
		return !found
	})
	return found
}

// TestGoroutinesAreWatched: a package that starts goroutines has goleak look for those that its tests leave. One without
// tests of its own is watched by those of a package that imports it.
func TestGoroutinesAreWatched(t *testing.T) {
	starts, tested, watched := map[string]string{}, map[string]bool{}, map[string]bool{}
	users := map[string][]string{} // by directory, those that import it
	for _, src := range sources(t) {
		dir := filepath.ToSlash(filepath.Dir(src.path))
		if src.test {
			tested[dir] = true
			watched[dir] = watched[dir] || callsVerifyTestMain(src.ast)
		} else if startsGoroutine(src.ast) {
			starts[dir] = src.path
		}
		for _, spec := range src.ast.Imports {
			if inside, ours := strings.CutPrefix(strings.Trim(spec.Path.Value, `"`), "larder/"); ours {
				users[inside] = append(users[inside], dir)
			}
		}
	}
	require.NotEmpty(t, starts)
	for dir, path := range starts {
		if tested[dir] {
			if !watched[dir] {
				t.Errorf("%s starts a goroutine: give package %s a TestMain with goleak.VerifyTestMain", path, dir)
			}
			continue
		}
		if !slices.ContainsFunc(users[dir], func(user string) bool { return watched[user] }) {
			t.Errorf("%s starts a goroutine, and no test that uses package %s looks for those that are left", path, dir)
		}
	}
}

// Limits of what a reader must take in at once.
const (
	maxFileLines = 850
	maxColumns   = 140
)

func TestFilesAndLinesAreShort(t *testing.T) {
	for _, src := range sources(t) {
		if ast.IsGenerated(src.ast) {
			continue
		}
		lines := 0
		for line := range strings.Lines(string(src.text)) {
			lines++
			line, _, _ = strings.Cut(line, " //nolint:") // its reason may follow where there is room
			columns := utf8.RuneCountInString(strings.ReplaceAll(strings.TrimRight(line, "\n"), "\t", "    "))
			if columns > maxColumns && !strings.Contains(line, "`") && !strings.Contains(line, "://") && !src.test {
				t.Errorf("%s:%d: %d columns, the most is %d", src.path, lines, columns, maxColumns)
			}
		}
		if lines > maxFileLines && !src.test {
			t.Errorf("%s: %d lines, the most is %d: split it by what it is about", src.path, lines, maxFileLines)
		}
	}
}

func TestNothingIsLeftForLater(t *testing.T) {
	marks := [][]byte{[]byte("TO" + "DO"), []byte("FIX" + "ME"), []byte("XX" + "X:"), []byte("HA" + "CK")}
	for _, path := range files(t, ".go", ".md", ".s", ".yml", "Makefile") {
		text, err := os.ReadFile(filepath.Join(root, path))
		require.NoError(t, err)
		scanner := bufio.NewScanner(bytes.NewReader(text))
		scanner.Buffer(nil, 1<<20)
		for n := 1; scanner.Scan(); n++ {
			for _, mark := range marks {
				if bytes.Contains(scanner.Bytes(), mark) {
					t.Errorf("%s:%d: %s: do it, or describe the limit in a document", path, n, mark)
				}
			}
		}
		require.NoError(t, scanner.Err())
	}
}

func TestTextNamesNoMachine(t *testing.T) {
	// Paths of somebody's machine mean nothing to a reader. Joined here so that this file passes its own rule.
	places := []string{"/ro" + "ot/", "/ho" + "me/", "/Us" + "ers/", "/wo" + "rk/"}
	for _, path := range files(t, ".go", ".md", ".s", ".yml", ".yaml", "Makefile", "run") {
		text, err := os.ReadFile(filepath.Join(root, path))
		require.NoError(t, err)
		for _, place := range places {
			if bytes.Contains(text, []byte(place)) {
				t.Errorf("%s names %s", path, place)
			}
		}
	}
}
