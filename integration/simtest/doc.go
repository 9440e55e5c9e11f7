// Package simtest runs whole clusters in one goroutine: real raft, index and server dispatch on real Pebble, over a
// simulated disk, network, clock and pool memory. Everything that happens follows from one seed, so that a failure
// repeats exactly from the line that it prints.
//
// A run has two phases. In the first a nemesis breaks what a drawn mixture of fault classes allows, while clients, in
// some runs Maru's among them, store, read, delete and pin. In the second nothing breaks any more: everything must come
// to an end, replicas must agree, and every acknowledged entry must be there. Oracles watch all the time: see the files
// whose names begin so.
//
//	go test ./integration/simtest                                   a short swarm
//	go test ./integration/simtest -run '^TestSwarm$' -seeds=200 -ticks=10000 -report=out.json
//	go test ./integration/simtest -run '^TestSeed$' -seed=7 -ticks=3000 one run, as a failure prints it
package simtest
