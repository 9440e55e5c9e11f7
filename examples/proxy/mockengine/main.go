// Command mockengine is a serving engine as vLLM is one, but without a model; see package larder/examples/proxy/engine.
package main

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"larder/examples/proxy/engine"
	"larder/internal/httpd"
)

// flags are the command line.
type flags struct {
	Listen          string        `default:"127.0.0.1:8100" help:"Address to serve HTTP at, host:port."`
	ID              string        `name:"id" default:"engine" help:"What other engines know this one by."`
	Model           string        `default:"mock" help:"Name of the model that requests give."`
	LoRA            []string      `name:"lora" help:"Names of adapters that requests may give instead."`
	BlockSize       int           `default:"16" help:"Tokens of a block."`
	Blocks          int           `default:"4096" help:"Blocks that the prefix cache holds."`
	MaxModelLen     int           `default:"32768" help:"Tokens of a prompt and its answer together."`
	HashSeed        string        `help:"Seed of the blocks' hashes, as PYTHONHASHSEED is vLLM's."`
	Events          string        `default:"tcp://127.0.0.1:5557" help:"ZeroMQ endpoint to publish KV events at; port * for a free one."`
	Replay          string        `default:"tcp://127.0.0.1:5558" help:"ZeroMQ endpoint to be asked for missed events at."`
	PrefillPerToken time.Duration `default:"200us" help:"What a token of a prompt takes that is not cached."`
	DecodePerToken  time.Duration `default:"20ms" help:"What a token of an answer takes."`
	MaxRequests     int           `default:"256" help:"Requests that are served or wait at once; more are answered with 503."`
}

func main() {
	var f flags
	kong.Parse(&f, kong.Name("mockengine"), kong.Description("A serving engine without a model: tokenises, caches prefixes, "+
		"publishes KV events, streams made-up answers. For trying routers and conductors."))
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, f, log)
	stop()
	if err != nil {
		log.LogAttrs(context.Background(), slog.LevelError, "mockengine ends", slog.Any("error", err))
		os.Exit(1)
	}
}

// stopTimeout bounds how long what is being answered may go on at the end.
const stopTimeout = 5 * time.Second

func run(ctx context.Context, f flags, log *slog.Logger) error {
	e, err := engine.New(ctx, engine.Config{
		ID: f.ID, Model: f.Model, LoRAs: f.LoRA, BlockSize: f.BlockSize, Blocks: f.Blocks, MaxModelLen: f.MaxModelLen,
		HashSeed: f.HashSeed, Events: f.Events, Replay: f.Replay, PrefillPerToken: f.PrefillPerToken, DecodePerToken: f.DecodePerToken,
		MaxRequests: f.MaxRequests,
	})
	if err != nil {
		return err
	}
	defer func() { _ = e.Close() }() // subscribers see it end
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", f.Listen)
	if err != nil {
		return err
	}
	log.LogAttrs(ctx, slog.LevelInfo, "serving", slog.String("id", f.ID), slog.String("url", "http://"+l.Addr().String()),
		slog.String("events", e.EventsEndpoint()), slog.String("replay", e.ReplayEndpoint()))
	s := &http.Server{Handler: e.Handler(), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10}
	return httpd.Serve(ctx, l, s, stopTimeout)
}
