package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// fewest is how many bugs there have to be.
const fewest = 22

// TestBugsMatchTheCode: whoever changes code that a bug changes has to bring the bug in line.
func TestBugsMatchTheCode(t *testing.T) {
	t.Chdir("../..")
	bugs, err := readBugs("integration/planted/bugs")
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(bugs), fewest)
	for _, b := range bugs {
		t.Run(b.name, func(t *testing.T) {
			flags, err := b.flags(t.TempDir())
			require.NoError(t, err)
			require.NotEmpty(t, flags)
		})
	}
}

func TestParseBug(t *testing.T) {
	const sound = "title: a\nbreaks: b\nbreaks: c\nunit: 60s ./x -run Y\nfile: f.go\n<<<<\nold\n====\nnew\n>>>>\n<<<<\nthis\n====\n>>>>\n"
	b, err := parseBug("n", sound)
	require.NoError(t, err)
	require.Equal(t, &bug{
		name: "n", title: "a", breaks: "b c",
		layers: []layer{{name: "unit", budget: time.Minute, args: []string{"./x", "-run", "Y"}}},
		hunks:  []hunk{{"f.go", "old\n", "new\n"}, {"f.go", "this\n", ""}},
	}, b)
	for want, text := range map[string]string{
		"or a layer of":     "title: a\nbreaks: b\nwhat: 1s x\n",
		"is no budget":      "title: a\nbreaks: b\nunit: soon x\n",
		"budget and the":    "title: a\nbreaks: b\nunit: 1s\n",
		"without a file":    "title: a\nbreaks: b\nunit: 1s x\n<<<<\na\n====\nb\n>>>>\n",
		"has no ====":       "file: f\n<<<<\na\n>>>>\n",
		"has no >>>>":       "file: f\n<<<<\na\n====\nb\n",
		"changes nothing":   "title: a\nbreaks: b\nunit: 1s x\nfile: f\n<<<<\na\n====\na\n>>>>\n",
		"say which layers":  "title: a\nbreaks: b\nfile: f\n<<<<\na\n====\nb\n>>>>\n",
		"say its title":     "breaks: b\nunit: 1s x\n",
		"write KEY: VALUE,": "nonsense\n",
	} {
		_, err := parseBug("n", text)
		require.ErrorContains(t, err, want)
	}
}

func TestOldTextMustBeThereOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	require.NoError(t, os.WriteFile(path, []byte("a\nb\na\n"), 0o600))
	at := func(string) (string, error) { return path, nil }
	for old, ok := range map[string]bool{"a\n": false, "c\n": false, "b\n": true} {
		b := bug{hunks: []hunk{{"f", old, "x\n"}}}
		changed, err := b.apply(at)
		require.Equal(t, ok, err == nil, old)
		if ok {
			require.Equal(t, map[string]string{path: "a\nx\na\n"}, changed)
		}
	}
}

func FuzzParseBug(f *testing.F) {
	paths, err := filepath.Glob("bugs/*.bug")
	require.NoError(f, err)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		require.NoError(f, err)
		f.Add(string(text))
	}
	f.Fuzz(func(t *testing.T, text string) {
		if b, err := parseBug("n", text); err == nil {
			require.NoError(t, b.check())
		}
	})
}

// TestEvents: what go test says, and what is made of it.
func TestEvents(t *testing.T) {
	const start = `{"Time":"2026-01-01T00:00:01Z","Action":"run","Package":"larder/x","Test":"TestA"}` + "\n"
	fail := func(second, test string) string {
		return `{"Time":"2026-01-01T00:00:0` + second + `Z","Action":"fail","Package":"larder/x"` + test + "}\n"
	}
	for name, c := range map[string]struct {
		in     string
		want   outcome
		broken bool
	}{
		"passed":      {start + `{"Time":"2026-01-01T00:00:03Z","Action":"pass","Package":"larder/x"}`, outcome{took: 2 * time.Second}, false},
		"a subtest":   {start + fail("3", `,"Test":"TestA/b"`) + fail("4", `,"Test":"TestA"`) + fail("5", ""), outcome{failed: true, took: 2 * time.Second, test: "x TestA/b"}, false},
		"the package": {start + fail("2", ""), outcome{failed: true, took: time.Second, test: "x"}, false},
		"a crash": {
			start + `{"Action":"output","Package":"larder/x","Test":"TestA","Output":"panic: test timed out\n"}` + "\n" + fail("2", ""),
			outcome{failed: true, took: time.Second, test: "x TestA", output: "panic: test timed out\n"},
			false,
		},
		"not compiled": {`{"Action":"build-fail"}` + "\n" + fail("2", ""), outcome{}, true},
	} {
		t.Run(name, func(t *testing.T) {
			o, broken := readEvents(bytes.NewReader([]byte(c.in)))
			require.Equal(t, c.want, *o)
			require.Equal(t, c.broken, broken)
		})
	}
}
