// Command planted proves that the tests would notice the bugs that they are there for. It breaks the source in one way
// after the other, and requires that the tests fail each time, within a budget.
//
//	go run ./integration/planted [--run REGEXP] [--all] [--json FILE] [--no-baseline]
//
// The source itself is never touched: go test gets the changed files by its flag -overlay. Every command must pass on
// the unchanged source before it is used, since a test that always fails catches nothing. A bug that nothing catches is
// a failure, and so is one that does not match the code any more.
//
// A bug is a file bugs/NAME.bug:
//
//	title: what is wrong, in one line
//	breaks: the invariant that does not hold any more
//	unit: 60s ./raft -run TestX
//	sim: 120s ./integration/simtest
//	file: raft/log.go
//	<<<<
//	the old text, whole lines
//	====
//	the new text
//	>>>>
//
// The lines unit, sim, process and chaos name layers: the budget of the run, without the time it takes to compile, and
// the arguments of go test. Layers are tried in the order of the file until one catches the bug; with --all, all of
// them. A file may have several hunks, of several files; MODULE:PATH is a file of a module.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		stop()
		os.Exit(1) //nolint:gocritic // stop has been called
	}
}

// run is main with what it needs of the outside.
func run(ctx context.Context, args []string, stdout io.Writer) error {
	flags := flag.NewFlagSet("planted", flag.ContinueOnError)
	names := flags.String("run", "", "only the bugs whose names match")
	out := flags.String("json", "", "write the report to this file too")
	all := flags.Bool("all", false, "run all layers of a bug, also after one has caught it")
	bare := flags.Bool("no-baseline", false, "do not run the commands on the unchanged source first")
	dir := flags.String("bugs", "integration/planted/bugs", "directory of the bugs")
	if err := flags.Parse(args); err != nil {
		return fmt.Errorf("planted: %w", err)
	}
	pattern, err := regexp.Compile(*names)
	if err != nil {
		return fmt.Errorf("planted: %w", err)
	}
	bugs, err := readBugs(*dir)
	if err != nil {
		return err
	}
	r := &runner{stdout: stdout, all: *all, bare: *bare, passed: map[string]error{}}
	var chosen []*bug
	for _, b := range bugs {
		if pattern.MatchString(b.name) {
			chosen = append(chosen, b)
		}
	}
	failure := r.plant(ctx, chosen)
	r.table()
	if *out != "" {
		failure = errors.Join(failure, r.write(*out))
	}
	return failure
}

// report is what became of one bug.
type report struct {
	Bug    string   `json:"bug"`
	Title  string   `json:"title"`
	Breaks string   `json:"breaks"`
	Caught bool     `json:"caught"`
	By     []caught `json:"by,omitempty"`    // the layers that caught it, in the order in which they ran
	Error  string   `json:"error,omitempty"` // why it could not be planted
}

// caught says which test noticed a bug.
type caught struct {
	Layer   string  `json:"layer"`
	Test    string  `json:"test"`
	Seconds float64 `json:"seconds"` // of running, without compiling
	Command string  `json:"command"`
}

// table prints the reports.
func (r *runner) table() {
	w := tabwriter.NewWriter(r.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "BUG\tCAUGHT BY\tAFTER\tTEST")
	for i := range r.reports {
		p := &r.reports[i]
		switch {
		case p.Error != "":
			line, _, _ := strings.Cut(p.Error, "\n")
			fmt.Fprintf(w, "%s\tNOT PLANTED\t\t%s\n", p.Bug, line)
		case !p.Caught:
			fmt.Fprintf(w, "%s\tNOBODY\t\t\n", p.Bug)
		}
		for _, c := range p.By {
			after := time.Duration(c.Seconds * float64(time.Second)).Round(10 * time.Millisecond)
			fmt.Fprintf(w, "%s\t%s\t%v\t%s\n", p.Bug, c.Layer, after, c.Test)
		}
	}
	_ = w.Flush() // to standard output, whose failure nobody could be told
}

// write writes the reports as JSON.
func (r *runner) write(path string) error {
	b, err := json.MarshalIndent(r.reports, "", "  ")
	if err != nil {
		return fmt.Errorf("planted: %w", err)
	}
	if err := os.WriteFile(path, append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("planted: %w", err)
	}
	return nil
}
