package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// compileTime is what a command may take beyond its budget: all of the source is compiled again when a package at the
// bottom changes, on a slow machine.
const compileTime = 5 * time.Minute

// outputKept bounds what is kept of a command's output, for a message about a failure that was not expected.
const outputKept = 8 << 10

// runner runs the layers.
type runner struct {
	stdout  io.Writer
	all     bool             // run all layers of a bug
	bare    bool             // do not run commands on the unchanged source
	passed  map[string]error // what they came to there
	reports []report
}

// sound requires that a command passes on the unchanged source. It is run once.
func (r *runner) sound(ctx context.Context, l *layer) error {
	if r.bare {
		return nil
	}
	if err, done := r.passed[l.command()]; done {
		return err
	}
	fmt.Fprintf(r.stdout, "unchanged: %s: ", l.command())
	o, err := runLayer(ctx, l, nil)
	switch {
	case err != nil:
	case o.failed:
		err = fmt.Errorf("%s fails on the unchanged source, in %s:\n%s", l.command(), o.test, o.output)
	default:
		fmt.Fprintf(r.stdout, "passed in %v\n", o.took.Round(10*time.Millisecond))
	}
	if err != nil {
		fmt.Fprintln(r.stdout, "FAILED")
	}
	r.passed[l.command()] = err
	return err
}

// plant plants one bug after the other.
func (r *runner) plant(ctx context.Context, bugs []*bug) error {
	dir, err := os.MkdirTemp("", "larder-planted-")
	if err != nil {
		return fmt.Errorf("planted: %w", err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a leftover in the temporary directory harms nobody
	var errs []error
	for _, b := range bugs {
		if ctx.Err() != nil {
			return errors.Join(append(errs, ctx.Err())...)
		}
		p := report{Bug: b.name, Title: b.title, Breaks: b.breaks}
		if err := r.plantOne(ctx, b, filepath.Join(dir, b.name), &p); err != nil {
			p.Error = err.Error()
			errs = append(errs, fmt.Errorf("planted: %s: %w", b.name, err))
		} else if p.Caught = len(p.By) > 0; !p.Caught {
			errs = append(errs, fmt.Errorf("planted: nothing catches %s (%s): it needs a test", b.name, b.title))
		}
		r.reports = append(r.reports, p)
	}
	return errors.Join(errs...)
}

// plantOne runs a bug's layers with it planted.
func (r *runner) plantOne(ctx context.Context, b *bug, dir string, p *report) error {
	flags, err := b.flags(dir)
	if err != nil {
		return err
	}
	for i := range b.layers {
		l := &b.layers[i]
		if err := r.sound(ctx, l); err != nil {
			return err
		}
		fmt.Fprintf(r.stdout, "%s: %s: ", b.name, l.command())
		o, err := runLayer(ctx, l, flags)
		if err != nil {
			fmt.Fprintln(r.stdout, "FAILED")
			return err
		}
		if !o.failed {
			fmt.Fprintf(r.stdout, "not caught in %v\n", o.took.Round(10*time.Millisecond))
			continue
		}
		fmt.Fprintf(r.stdout, "caught by %s in %v\n", o.test, o.took.Round(10*time.Millisecond))
		p.By = append(p.By, caught{Layer: l.name, Test: o.test, Seconds: o.took.Seconds(), Command: l.command()})
		if !r.all {
			break
		}
	}
	return nil
}

// flags writes the changed files, and returns the flags that make go build them instead of the originals.
func (b *bug) flags(dir string) ([]string, error) {
	modules, err := b.copyModules(filepath.Join(dir, "modules"))
	if err != nil {
		return nil, err
	}
	changed, err := b.apply(func(file string) (string, error) { return locate(file, modules) })
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("planted: %w", err)
	}
	replace := map[string]string{}
	for path, text := range changed {
		to := path
		if !strings.HasPrefix(path, dir) {
			to = filepath.Join(dir, fmt.Sprintf("%d-%s", len(replace), filepath.Base(path)))
			replace[path] = to
		}
		if err := os.WriteFile(to, []byte(text), 0o600); err != nil {
			return nil, fmt.Errorf("planted: %w", err)
		}
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return nil, fmt.Errorf("planted: %w", err)
	}
	path := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(path, overlay, 0o600); err != nil {
		return nil, fmt.Errorf("planted: %w", err)
	}
	flags := []string{"-overlay=" + path}
	if len(modules) > 0 {
		modfile, err := writeModfile(dir, modules)
		if err != nil {
			return nil, err
		}
		flags = append(flags, "-modfile="+modfile)
	}
	return flags, nil
}

// copyModules copies the modules that the bug changes, since go takes no overlay for its module cache, and returns the
// directories of the copies.
func (b *bug) copyModules(dir string) (map[string]string, error) {
	copies := map[string]string{}
	for _, h := range b.hunks {
		module, _, ok := strings.Cut(h.file, ":")
		if !ok || copies[module] != "" {
			continue
		}
		out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).Output()
		if err != nil {
			return nil, fmt.Errorf("planted: where is module %s: %w", module, err)
		}
		to := filepath.Join(dir, strconv.Itoa(len(copies)))
		if err := os.CopyFS(to, os.DirFS(strings.TrimSpace(string(out)))); err != nil {
			return nil, fmt.Errorf("planted: copy module %s: %w", module, err)
		}
		for _, h := range b.hunks { // the cache is read-only, and so are the copies
			if path, ok := strings.CutPrefix(h.file, module+":"); ok {
				if err := os.Chmod(filepath.Join(to, path), 0o600); err != nil {
					return nil, fmt.Errorf("planted: %w", err)
				}
			}
		}
		copies[module] = to
	}
	return copies, nil
}

// writeModfile writes a go.mod that takes the copies of modules instead of the originals, and its go.sum.
func writeModfile(dir string, modules map[string]string) (string, error) {
	mod, err := os.ReadFile("go.mod")
	if err != nil {
		return "", fmt.Errorf("planted: %w", err)
	}
	sum, err := os.ReadFile("go.sum")
	if err != nil {
		return "", fmt.Errorf("planted: %w", err)
	}
	for module, to := range modules {
		mod = fmt.Appendf(mod, "\nreplace %s => %s\n", module, to)
	}
	path := filepath.Join(dir, "go.mod")
	if err := errors.Join(os.WriteFile(path, mod, 0o600), os.WriteFile(filepath.Join(dir, "go.sum"), sum, 0o600)); err != nil {
		return "", fmt.Errorf("planted: %w", err)
	}
	return path, nil
}

// locate finds a file of the checkout, whose top is the working directory, or of the copy of a module.
func locate(file string, modules map[string]string) (string, error) {
	if module, path, ok := strings.Cut(file, ":"); ok {
		return filepath.Join(modules[module], path), nil
	}
	abs, err := filepath.Abs(file)
	if err != nil {
		return "", fmt.Errorf("planted: %w", err)
	}
	return abs, nil
}

// outcome is what a command of a layer came to.
type outcome struct {
	failed bool
	test   string        // that failed first
	took   time.Duration // from the first test's start to then, or to the end
	output string        // the last of it
}

// event is a line of go test -json.
type event struct {
	Time    time.Time
	Action  string
	Package string
	Test    string
	Output  string
}

// runLayer runs a layer's command, with the source changed by flags. The error says that it could not be
// run: the source does not compile, or it took longer than a command may.
func runLayer(ctx context.Context, l *layer, flags []string) (*outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, l.budget+compileTime)
	defer cancel()
	// Race detection would make bugs in the order of events show sooner, and everything else far later.
	args := append([]string{"test", "-json", "-count=1", "-failfast", "-timeout=" + l.budget.String()}, flags...)
	cmd := exec.CommandContext(ctx, "go", append(args, l.args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	var stderr strings.Builder
	cmd.Stderr = &stderr
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("planted: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("planted: %w", err)
	}
	o, broken := readEvents(pipe)
	err = cmd.Wait()
	switch {
	case ctx.Err() != nil:
		return nil, fmt.Errorf("planted: %s was stopped: %w", l.command(), ctx.Err())
	case broken:
		return nil, fmt.Errorf("planted: it does not compile:\n%s%s", o.output, stderr.String())
	case err != nil && !o.failed:
		return nil, fmt.Errorf("planted: %s: %w\n%s%s", l.command(), err, o.output, stderr.String())
	case o.took == 0:
		return nil, fmt.Errorf("planted: %s ran no test", l.command())
	}
	return o, nil
}

// readEvents follows a run until its end. broken says that a package could not be compiled.
func readEvents(in io.Reader) (o *outcome, broken bool) {
	o = &outcome{}
	var began time.Time
	crashed := "" // the test during which the process ended; no event says that it failed
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 4<<20)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			continue
		}
		switch e.Action {
		case "run":
			if began.IsZero() {
				began = e.Time
			}
		case "build-fail":
			broken = true
		case "fail":
			if !o.failed && (e.Test != "" || !began.IsZero()) {
				o.failed, o.took = true, max(e.Time.Sub(began), time.Nanosecond)
				o.test = e.Package + " " + cmp.Or(e.Test, crashed)
			}
		case "pass":
			if !o.failed && !began.IsZero() {
				o.took = max(e.Time.Sub(began), time.Nanosecond)
			}
		case "build-output", "output":
			if crashed == "" && (strings.HasPrefix(e.Output, "panic:") || strings.HasPrefix(e.Output, "fatal error:")) {
				crashed = e.Test
			}
			o.output += e.Output
			if len(o.output) > 2*outputKept {
				o.output = o.output[len(o.output)-outputKept:]
			}
		}
	}
	o.test = strings.TrimSpace(strings.TrimPrefix(o.test, "larder/"))
	return o, broken
}
