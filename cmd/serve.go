package cmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"reflect"
	"strconv"

	"github.com/alecthomas/kong"

	"larder/server"
)

// configFlags are the flags of a server's options, made from [server.Options] so that the command line, the file and
// the environment cannot differ.
type configFlags struct {
	File    string       `name:"config" short:"c" type:"existingfile" env:"LARDER_CONFIG" help:"YAML file; environment variables and flags override it."`
	Options kong.Plugins `embed:"" group:"Options, with their defaults; each can also be set in the file and in the environment:"`
}

// newConfigFlags builds one flag for each option.
func newConfigFlags() configFlags {
	options := server.Options()
	fields := make([]reflect.StructField, len(options))
	for i, option := range options {
		help := option.Help
		if option.Default != "" {
			help += " (default " + option.Default + ")"
		}
		kind := reflect.TypeFor[*string]()
		switch {
		case option.Bool:
			kind = reflect.TypeFor[*bool]()
		case option.List:
			kind = reflect.TypeFor[[]string]()
		}
		fields[i] = reflect.StructField{
			Name: "Option" + strconv.Itoa(i),
			Type: kind,
			Tag:  reflect.StructTag(fmt.Sprintf("name:%q help:%q sep:\"none\" placeholder:\"VALUE\"", option.Flag, help)),
		}
	}
	return configFlags{Options: kong.Plugins{reflect.New(reflect.StructOf(fields)).Interface()}}
}

// given returns the options that were given as flags.
func (f *configFlags) given() map[string][]string {
	given := make(map[string][]string)
	values := reflect.ValueOf(f.Options[0]).Elem()
	for i, option := range server.Options() {
		switch v := values.Field(i).Interface().(type) {
		case *string:
			if v != nil {
				given[option.Name] = []string{*v}
			}
		case *bool:
			if v != nil {
				given[option.Name] = []string{strconv.FormatBool(*v)}
			}
		case []string:
			if len(v) > 0 {
				given[option.Name] = v
			}
		}
	}
	return given
}

// load builds the configuration.
func (f *configFlags) load() (server.Config, error) {
	cfg, err := server.Load(f.File, os.Environ(), f.given())
	if err != nil {
		return cfg, usageError(err)
	}
	return cfg, nil
}

// serveCmd is larder serve.
type serveCmd struct {
	configFlags `embed:""`

	DryRun bool `help:"Check the configuration, print it and stop."`
}

func newServeCmd() serveCmd { return serveCmd{configFlags: newConfigFlags()} }

// Run implements the command: start, say so, wait for a signal, stop in reverse.
func (c *serveCmd) Run(e *env) error {
	cfg, err := c.load()
	if err != nil {
		return err
	}
	if c.DryRun {
		return cfg.WriteYAML(e.stdout)
	}
	logger := newLogger(e.stderr, &cfg)
	logger.LogAttrs(e.ctx, slog.LevelInfo, "starting", slog.String("version", version()),
		slog.Uint64("node_id", cfg.NodeID), slog.String("data_dir", cfg.DataDir), slog.Any("config", configLog{&cfg}))
	s, err := server.Start(cfg, logger)
	if err != nil {
		return fmt.Errorf("start: %w", err)
	}
	admin, err := server.StartAdmin(s, logger)
	if err != nil {
		return errors.Join(err, stopServer(s, nil, &cfg))
	}
	contributed, err := startServedNode(e.ctx, s, admin, logger)
	if err != nil {
		return errors.Join(usageError(err), stopServer(s, admin, &cfg))
	}
	logger.LogAttrs(e.ctx, slog.LevelInfo, "serving", slog.String("addr", s.Addr()), slog.String("admin", admin.Addr()))
	if err := notify("READY=1"); err != nil {
		logger.LogAttrs(e.ctx, slog.LevelWarn, "systemd was not told", slog.Any("error", err))
	}
	var failure error
	select {
	case <-e.ctx.Done():
	case failure = <-s.Failed():
		failure = fmt.Errorf("the server had to stop: %w", failure)
	}
	logger.LogAttrs(e.ctx, slog.LevelInfo, "stopping")
	if err := notify("STOPPING=1"); err != nil {
		logger.LogAttrs(e.ctx, slog.LevelWarn, "systemd was not told", slog.Any("error", err))
	}
	if err := errors.Join(failure, contributed.stop(), stopServer(s, admin, &cfg)); err != nil {
		return err
	}
	logger.LogAttrs(e.ctx, slog.LevelInfo, "stopped")
	return nil
}

// stopServer ends a server within shutdown_timeout. The admin stays up until the last, so that it can be watched.
func stopServer(s *server.Server, admin *server.Admin, cfg *server.Config) error {
	// The command's own context has ended: this one is for the way out.
	ctx, cancel := context.WithTimeout(context.Background(), cfg.ShutdownTimeout)
	defer cancel()
	err := s.Stop(ctx)
	if err != nil {
		err = fmt.Errorf("stop: %w", err)
	}
	return errors.Join(err, admin.Stop(ctx))
}

// configLog shows a configuration in a log line: the options that differ from their defaults.
type configLog struct{ cfg *server.Config }

// LogValue implements slog.LogValuer.
func (l configLog) LogValue() slog.Value {
	changed := l.cfg.Changed()
	attrs := make([]slog.Attr, 0, len(changed))
	for _, kv := range changed {
		attrs = append(attrs, slog.String(kv[0], kv[1]))
	}
	return slog.GroupValue(attrs...)
}

// newLogger makes the logger that a configuration asks for.
func newLogger(w io.Writer, cfg *server.Config) *slog.Logger {
	level, err := server.ParseLevel(cfg.LogLevel)
	if err != nil {
		level = slog.LevelInfo // Validate has refused it already
	}
	options := &slog.HandlerOptions{Level: level}
	if cfg.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, options))
	}
	return slog.New(slog.NewTextHandler(w, options))
}

// configCmd is larder config.
type configCmd struct {
	Check configCheckCmd `cmd:"" help:"Check a configuration file as larder serve would."`
	Print configPrintCmd `cmd:"" help:"Print the configuration that larder serve would run on, secrets hidden."`
}

func newConfigCmd() configCmd {
	return configCmd{Print: configPrintCmd{configFlags: newConfigFlags()}}
}

// configCheckCmd is larder config check.
type configCheckCmd struct {
	JSON bool   `help:"Print JSON."`
	File string `arg:"" type:"existingfile" help:"YAML file."`
}

// configReport is what config check --json prints.
type configReport struct {
	File     string   `json:"file"`
	OK       bool     `json:"ok"`
	Problems []string `json:"problems"`
}

// Run implements the command.
func (c *configCheckCmd) Run(e *env) error {
	_, err := server.Load(c.File, nil, nil)
	if c.JSON {
		if err := printJSON(e.stdout, configReport{c.File, err == nil, server.Problems(err)}); err != nil {
			return err
		}
	}
	if err != nil {
		return usageError(err)
	}
	if !c.JSON {
		fmt.Fprintf(e.stdout, "%s: ok\n", c.File)
	}
	return nil
}

// configPrintCmd is larder config print.
type configPrintCmd struct {
	configFlags `embed:""`

	JSON bool `help:"Print JSON, without secrets."`
}

// Run implements the command.
func (c *configPrintCmd) Run(e *env) error {
	cfg, err := c.load()
	if err != nil {
		return err
	}
	if c.JSON {
		return cfg.WriteJSON(e.stdout)
	}
	return cfg.WriteYAML(e.stdout)
}
