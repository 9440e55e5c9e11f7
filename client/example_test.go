package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"slices"

	"larder/client"
	"larder/transfer"
)

// It is compiled and not run: it needs a server at this address.
func Example() {
	ctx := context.Background()
	c, err := client.Open(ctx, client.Config{Addrs: []string{"127.0.0.1:7400"}, Instance: "prefill-7"})
	if err != nil {
		log.Fatal(err)
	}

	// Blocks of KV cache are named by their rolling prefix hashes.
	prompt := make([]uint32, 1024)
	model := client.PrefixContext{Model: "llama-3-70b", BlockSize: 256}
	hashes := client.PrefixHashes(prompt, 0, model)
	keys := make([][]byte, len(hashes))
	for i, h := range hashes {
		keys[i] = fmt.Appendf(nil, "llama/%016x", h)
	}

	// Read the longest prefix that is held, in place. The bytes count only if Close says so.
	views, err := c.ViewBatch(ctx, keys, true)
	if err != nil {
		log.Fatal(err)
	}
	known := views.Len()
	for i := range known {
		load(views.Bytes(i))
	}
	if err := views.Close(); errors.Is(err, client.ErrLease) {
		known = 0 // too slow: compute it all
	}

	// Store the rest.
	var items []client.Item
	for i := known; i < len(keys); i++ {
		it := client.Item{Key: keys[i], Value: compute(i)}
		it.Attrs.Context, it.Attrs.HasPrefix = &model, true
		it.Attrs.Hash, it.Attrs.Index = hashes[i], uint64(i)
		if i > 0 {
			it.Attrs.Parent = hashes[i-1]
		}
		items = append(items, it)
	}
	if _, err := c.PutBatch(ctx, items); err != nil {
		log.Fatal(err)
	}
	if err := c.Close(ctx); err != nil {
		log.Fatal(err)
	}
}

// It is compiled and not run: it needs a server with this socket.
func ExampleClient_Alloc() {
	ctx := context.Background()
	c, err := client.Open(ctx, client.Config{Addrs: []string{"unix:/run/larder.sock"}})
	if err != nil {
		log.Fatal(err)
	}

	// Let the accelerator write straight into the pool. A region that is taken away meanwhile is no reason to fail.
	for {
		a, err := c.Alloc(ctx, []byte("block-1"), 1<<20)
		if err != nil {
			log.Fatal(err)
		}
		load(a.Bytes())
		if _, err = a.Store(ctx); err == nil {
			break
		}
		if !client.Retryable(err) {
			log.Fatal(err)
		}
	}
	if err := c.Close(ctx); err != nil {
		log.Fatal(err)
	}
}

// Two prompts that begin alike have the same hashes up to the first block in which they differ: those of the blocks
// behind it differ too, since a hash names a block and everything before it.
func ExamplePrefixHashes() {
	model := client.PrefixContext{Model: "llama-3-70b", BlockSize: 4}
	system := []uint32{128000, 128006, 9125, 128007, 271, 2675, 527, 264}
	question := append(slices.Clone(system), 3923, 374, 220, 17, 10) // the last token fills no block
	order := append(slices.Clone(system), 8144, 264, 33894, 13, 11)
	for _, prompt := range [][]uint32{question, order} {
		fmt.Printf("%016x\n", client.PrefixHashes(prompt, 0, model))
	}

	// The seed is part of the context.
	model.Seed = 1
	fmt.Printf("%016x\n", client.PrefixHashes(system, 0, model))

	// Output:
	// [25962627805d3dee 6ad60c88d350bd24 f0cc34a58405b401]
	// [25962627805d3dee 6ad60c88d350bd24 6eec2c4f5b4341ea]
	// [981201f4e43ece44 662944c974c49e64]
}

func load([]byte) {}

func compute(int) []byte { return make([]byte, 1<<20) }

// A prefill instance stores a prompt's cache layer by layer, while it computes the next one.
func ExampleClient_PutLayers() {
	ctx := context.Background()
	c, err := client.Open(ctx, client.Config{Addrs: []string{"127.0.0.1:7400"}})
	if err != nil {
		log.Fatal(err)
	}
	w, err := c.PutLayers(ctx, []byte("llama/prompt-7"), []int{1 << 20, 1 << 20, 1 << 20})
	if err != nil {
		log.Fatal(err)
	}
	for i := range 3 {
		if err := w.Launch(i, compute(i)); err != nil {
			w.Abort()
			log.Fatal(err)
		}
	}
	if _, err := w.Finish(ctx); err != nil { // nobody sees any of it before
		log.Fatal(err)
	}
}

// A decode instance receives a prompt's cache from a prefill instance. Both lines of the ticket's way are the engines' own.
func ExampleClient_Receive() {
	ctx := context.Background()
	engine, err := transfer.New(transfer.Config{Listen: []string{"10.0.0.7:0"}})
	if err != nil {
		log.Fatal(err)
	}
	decode, err := client.Open(ctx, client.Config{Addrs: []string{"127.0.0.1:7400"}, Transfer: engine})
	if err != nil {
		log.Fatal(err)
	}
	r, err := decode.Receive([]byte("llama/prompt-7"), []int{1 << 20, 1 << 20}, nil)
	if err != nil {
		log.Fatal(err)
	}
	tickets := make(chan client.Ticket, 1)
	tickets <- r.Ticket()

	go func() { // the prefill instance, in another process
		prefill, err := client.Open(ctx, client.Config{Addrs: []string{"127.0.0.1:7400"}})
		if err != nil {
			log.Fatal(err)
		}
		s, err := prefill.Send(<-tickets)
		if err != nil {
			log.Fatal(err)
		}
		for i := range 2 {
			if err := s.Launch(i, compute(i)); err != nil {
				s.Abort()
				return
			}
		}
		if err := s.Finish(); err != nil {
			log.Print(err)
		}
	}()

	for i := range 2 {
		if err := r.Wait(ctx, i); err != nil { // client.ErrAborted: compute it here
			log.Fatal(err)
		}
		load(r.Bytes(i))
	}
	if _, err := r.Store(ctx); err != nil { // others may read it too; or not
		log.Print(err)
	}
	if err := r.Close(ctx); err != nil {
		log.Fatal(err)
	}
}
