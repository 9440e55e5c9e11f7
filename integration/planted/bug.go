package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Layers, from the cheapest to the dearest.
var layerNames = []string{"unit", "sim", "process", "chaos"}

// bug is a mutation of the source, and who should notice it.
type bug struct {
	name   string
	title  string
	breaks string // the invariant that does not hold any more
	layers []layer
	hunks  []hunk
}

// layer is one command that may catch a bug.
type layer struct {
	name   string
	budget time.Duration
	args   []string // of go test
}

// command is how the layer is shown, and told from others.
func (l *layer) command() string { return "go test " + strings.Join(l.args, " ") }

// hunk replaces the only occurrence of a text in a file.
type hunk struct {
	file     string // from the top of the checkout; or MODULE:PATH for a file of a module
	old, new string
}

// Marks of a hunk, each on a line of its own.
const (
	hunkBegin = "<<<<"
	hunkThen  = "===="
	hunkEnd   = ">>>>"
)

// readBugs reads all bugs of a directory, by name.
func readBugs(dir string) ([]*bug, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.bug"))
	if err != nil {
		return nil, fmt.Errorf("planted: %w", err)
	}
	if len(paths) == 0 {
		return nil, fmt.Errorf("planted: no bugs in %s; run it at the top of the checkout", dir)
	}
	slices.Sort(paths)
	bugs := make([]*bug, 0, len(paths))
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("planted: %w", err)
		}
		b, err := parseBug(strings.TrimSuffix(filepath.Base(path), ".bug"), string(text))
		if err != nil {
			return nil, fmt.Errorf("planted: %s: %w", path, err)
		}
		bugs = append(bugs, b)
	}
	return bugs, nil
}

// parseBug reads one bug. See the package comment for the form.
func parseBug(name, text string) (*bug, error) {
	b := &bug{name: name}
	file := ""
	for rest := text; rest != ""; {
		var line string
		line, rest, _ = strings.Cut(rest, "\n")
		if line == hunkBegin {
			h, left, err := parseHunk(file, rest)
			if err != nil {
				return nil, err
			}
			b.hunks, rest = append(b.hunks, h), left
			continue
		}
		key, value, ok := strings.Cut(line, ": ")
		switch value = strings.TrimSpace(value); {
		case strings.TrimSpace(line) == "" || strings.HasPrefix(line, "#"):
		case !ok:
			return nil, fmt.Errorf("line %q: write KEY: VALUE, or a hunk", line)
		case key == "title":
			b.title = value
		case key == "breaks":
			b.breaks = strings.TrimSpace(b.breaks + " " + value)
		case key == "file":
			file = value
		default:
			l, err := parseLayer(key, value)
			if err != nil {
				return nil, err
			}
			b.layers = append(b.layers, l)
		}
	}
	return b, b.check()
}

// parseLayer reads "unit: 60s ./raft -run X".
func parseLayer(name, value string) (layer, error) {
	if !slices.Contains(layerNames, name) {
		return layer{}, fmt.Errorf("key %q: it is title, breaks, file or a layer of %v", name, layerNames)
	}
	fields := strings.Fields(value)
	if len(fields) < 2 {
		return layer{}, fmt.Errorf("layer %s: write its budget and the arguments of go test", name)
	}
	budget, err := time.ParseDuration(fields[0])
	if err != nil || budget <= 0 {
		return layer{}, fmt.Errorf("layer %s: %q is no budget, as in 60s", name, fields[0])
	}
	return layer{name: name, budget: budget, args: fields[1:]}, nil
}

func parseHunk(file, text string) (h hunk, rest string, err error) {
	if file == "" {
		return h, "", errors.New("a hunk without a file before it")
	}
	old, text, ok := strings.Cut(text, hunkThen+"\n")
	if !ok {
		return h, "", fmt.Errorf("a hunk of %s has no %s", file, hunkThen)
	}
	replacement, rest, ok := strings.Cut(text, hunkEnd)
	if !ok {
		return h, "", fmt.Errorf("a hunk of %s has no %s", file, hunkEnd)
	}
	return hunk{file, old, replacement}, strings.TrimPrefix(rest, "\n"), nil
}

func (b *bug) check() error {
	switch {
	case b.title == "" || b.breaks == "":
		return errors.New("say its title, and what it breaks")
	case len(b.layers) == 0:
		return errors.New("say which layers are to catch it")
	case len(b.hunks) == 0:
		return errors.New("it changes nothing")
	}
	for _, h := range b.hunks {
		if h.old == "" || h.old == h.new {
			return fmt.Errorf("a hunk of %s changes nothing", h.file)
		}
	}
	return nil
}

// apply returns the changed files by the path of the original. locate finds a hunk's file.
func (b *bug) apply(locate func(file string) (string, error)) (map[string]string, error) {
	changed := map[string]string{}
	for _, h := range b.hunks {
		path, err := locate(h.file)
		if err != nil {
			return nil, err
		}
		text, ok := changed[path]
		if !ok {
			raw, err := os.ReadFile(path)
			if err != nil {
				return nil, fmt.Errorf("planted: %w", err)
			}
			text = string(raw)
		}
		if n := strings.Count(text, h.old); n != 1 {
			return nil, fmt.Errorf("its old text is %d times in %s, not once: bring the bug in line with the code:\n%s", n, h.file, h.old)
		}
		changed[path] = strings.Replace(text, h.old, h.new, 1)
	}
	return changed, nil
}
