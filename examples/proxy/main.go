// Command proxy is an OpenAI-compatible proxy in front of serving engines, which gives each request to the engine that has
// most of its prompt in its cache. It asks a conductor (larder conductor) what is cached where, or has it choose, and goes on
// without it when it must. README.md beside this file shows it at work.
//
// It serves POST /v1/completions and /v1/chat/completions, GET /v1/models, /health and /metrics. A request's prompt is
// tokenised by an engine (vLLM's /tokenize). In mode query the conductor tells how much of it each engine has, and the request
// goes where what is missing and the requests that are outstanding weigh least; in mode schedule the conductor chooses the
// instance that computes the prompt and the one that answers, or rejects the request: its reason goes to the client with
// status 429. Where the two differ the prompt is sent to the first with kv_transfer_params, whose answer tells the second where
// the KV cache is, as vLLM's NixlConnector has it.
//
// An engine that fails before the first byte of its answer costs a retry at another one. An answer that breaks off later
// breaks off for the client, too.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"larder/internal/httpd"
)

// flags are the command line.
type flags struct {
	Config          string     `arg:"" type:"existingfile" help:"YAML or JSON file; demo/proxy.yaml has all options."`
	Listen          string     `help:"Address to serve at, host:port, in place of the file's."`
	Mode            string     `enum:"query,schedule," default:"" help:"query or schedule, in place of the file's."`
	Conductor       string     `help:"URL of the conductor, in place of the file's."`
	ConductorToken  string     `env:"LARDER_PROXY_CONDUCTOR_TOKEN" help:"Bearer token for the conductor, in place of the file's."`
	EngineToken     string     `env:"LARDER_PROXY_ENGINE_TOKEN" help:"Bearer token for the engines, in place of clients' own."`
	ShutdownTimeout duration   `default:"30s" help:"How long answers may go on at SIGTERM."`
	LogLevel        slog.Level `default:"info" help:"Least severe log lines to write: debug, info, warn or error."`
	Check           bool       `help:"Check the file, and end."`
}

type duration = time.Duration

func main() {
	var f flags
	kong.Parse(&f, kong.Name("proxy"), kong.Description("An OpenAI-compatible proxy that gives requests to the engines that have most of "+
		"their prompts cached, as a conductor tells (mode query) or chooses (mode schedule). It serves /v1/completions, "+
		"/v1/chat/completions, /v1/models, /health and /metrics. Requests may tell the scheduler "+headerClass+", "+headerPriority+
		" and "+headerOutputLength+"."))
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: f.LogLevel}))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, f, log)
	stop()
	if err != nil {
		log.LogAttrs(context.Background(), slog.LevelError, "proxy ends", slog.Any("error", err))
		os.Exit(1)
	}
}

// run serves until the context ends.
func run(ctx context.Context, f flags, log *slog.Logger) error {
	cfg, err := load(f.Config)
	if err != nil {
		return err
	}
	for _, v := range []struct {
		field *string
		value string
	}{
		{&cfg.Listen, f.Listen},
		{&cfg.Mode, f.Mode},
		{&cfg.Conductor, f.Conductor},
		{&cfg.ConductorToken, f.ConductorToken},
		{&cfg.EngineToken, f.EngineToken},
	} {
		if v.value != "" {
			*v.field = v.value
		}
	}
	if err := cfg.complete(); err != nil {
		return fmt.Errorf("%s: %w", f.Config, err)
	}
	if f.Check {
		return nil
	}
	p := New(context.WithoutCancel(ctx), cfg, log)
	defer p.Close()
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", cfg.Listen)
	if err != nil {
		return err
	}
	log.LogAttrs(ctx, slog.LevelInfo, "serving", slog.String("url", "http://"+l.Addr().String()), slog.String("mode", cfg.Mode))
	return serve(ctx, l, p, f.ShutdownTimeout, log)
}

// serve serves until the context ends, and then what is being answered, within the time given.
func serve(ctx context.Context, l net.Listener, p *Proxy, patience time.Duration, log *slog.Logger) error {
	s := &http.Server{
		Handler:           p.Handler(),
		ReadHeaderTimeout: 10 * time.Second, // a client that has nothing to ask
		IdleTimeout:       2 * time.Minute,  // a chat's next turn mostly comes sooner
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	return httpd.Serve(ctx, l, s, patience)
}
