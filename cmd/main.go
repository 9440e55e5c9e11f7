package cmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"unicode/utf8"

	"github.com/alecthomas/kong"
)

// Exit codes; see the package's documentation.
const (
	exitDone        = 0
	exitFailed      = 1
	exitUsage       = 2
	exitUnwell      = 3
	exitInterrupted = 130
)

// cli is the whole command line.
type cli struct {
	Serve     serveCmd     `cmd:"" help:"Run a server: one member of a cluster, or all of it."`
	Node      nodeCmd      `cmd:"" help:"Contribute memory and disks of this host to a pool."`
	Conductor conductorCmd `cmd:"" help:"Tell routers which engine holds how much of a prompt, and which is to serve it."`
	Replay    replayCmd    `cmd:"" help:"Replay a trace against a cluster, or against a server started for it, and check every byte."`
	Ctl       ctlCmd       `cmd:"" help:"Look at a cluster and change it."`
	Top       topCmd       `cmd:"" help:"Watch a cluster in the terminal."`
	Bench     benchCmd     `cmd:"" help:"Measure this machine and this program side by side."`
	Sim       simCmd       `cmd:"" help:"Simulate clusters that serve an LLM, with the real scheduler and index; see larder sim run --help."`
	Transfer  transferCmd  `cmd:"" help:"Measure and look at the transfer engine: the ways between two processes."`
	PG        pgCmd        `cmd:"" name:"pg" help:"Measure process groups: collectives that keep going when ranks die."`
	Maru      maruCmd      `cmd:"" help:"Compare what is served to Maru's clients with Maru's own server."`
	Config    configCmd    `cmd:"" help:"Check and print configurations."`
	Version   versionCmd   `cmd:"" help:"Print the version."`
}

// env is what commands get from outside of their flags.
type env struct {
	ctx    context.Context //nolint:containedctx // ends at a signal; kong calls Run methods with bound values only
	stdout io.Writer
	stderr io.Writer
}

// exitError is an error with an exit code of its own.
type exitError struct {
	code int
	err  error
}

// Error implements error.
func (e *exitError) Error() string { return e.err.Error() }

// Unwrap gives the cause.
func (e *exitError) Unwrap() error { return e.err }

// usageError makes an error that exits with exitUsage.
func usageError(err error) error { return &exitError{exitUsage, err} }

// Main runs the command line of the process and exits.
func Main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run runs one command line and returns its exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	exited := -1
	commands := cli{Serve: newServeCmd(), Config: newConfigCmd()}
	commands.Ctl.Snapshot.Restore.configFlags = newConfigFlags()
	parser, err := newParser(&commands, stdout, stderr, func(code int) { exited = code })
	if err != nil {
		return report(stderr, fmt.Errorf("command line: %w", err))
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	// The parser, and JSON after it, would put U+FFFD in place of what is not UTF-8, and so would mean something else.
	if i := slices.IndexFunc(args, func(arg string) bool { return !utf8.ValidString(arg) }); i >= 0 {
		return report(stderr, usageError(fmt.Errorf(
			"argument %q is not UTF-8 text: rename the file, or, if it is a key, give it as hexadecimal bytes with --hex", args[i])))
	}
	parsed, err := parser.Parse(args)
	if exited >= 0 {
		return exited // --help
	}
	if err != nil {
		return report(stderr, usageError(fmt.Errorf("%w; see larder --help", err)))
	}
	e := &env{ctx: ctx, stdout: stdout, stderr: stderr}
	c := &call{env: e, clusterFlags: &commands.Ctl.clusterFlags, admin: commands.Ctl.newAdmin(), ctx: ctx}
	if strings.HasPrefix(parsed.Command(), "ctl") {
		bounded, cancel := context.WithTimeout(ctx, commands.Ctl.timeout(parsed.Command()))
		defer cancel()
		c.ctx = bounded
	}
	return report(stderr, parsed.Run(e, c))
}

// newParser makes the parser of the command line, which calls exit after --help.
func newParser(commands *cli, stdout, stderr io.Writer, exit func(code int)) (*kong.Kong, error) {
	return kong.New(commands, //nolint:wrapcheck // run wraps
		kong.Name("larder"),
		kong.Description("A storage server for the KV cache of LLM serving engines."),
		kong.Writers(stdout, stderr),
		kong.Exit(exit),
		kong.Configuration(loadYAML),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, NoExpandSubcommands: true}),
	)
}

// report tells of an error and returns the exit code.
func report(stderr io.Writer, err error) int {
	if err == nil {
		return exitDone
	}
	code := exitFailed
	if e, ok := errors.AsType[*exitError](err); ok {
		code = e.code
	} else if errors.Is(err, context.Canceled) {
		code = exitInterrupted
	}
	fmt.Fprintln(stderr, "larder:", err)
	return code
}

// printJSON writes a value as indented JSON.
func printJSON(w io.Writer, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("write JSON: %w", err)
	}
	_, err = w.Write(append(b, '\n'))
	if err != nil {
		return fmt.Errorf("write JSON: %w", err)
	}
	return nil
}
