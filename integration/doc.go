// Package integration tests whole clusters: real larder processes, real pool files, real sockets, and faults. It has
// no code of its own beside tests; package cluster below it starts and loads the processes, and package chaos breaks
// what is around them.
//
// One binary of the server is built for a run. Clients live in the test process, and, where they must be killed or
// paused, in child processes, which are the test binary again. Every value that is stored is a function of its key and
// its version, so that whoever reads it can tell whether each byte is right, and which store it came from; a ledger
// holds what was acknowledged.
//
// The default run takes a few minutes on two cores. LARDER_CHAOS_TIME=30m lengthens the tests that kill and pause
// processes at random to about that long each, -short leaves them out, LARDER_RACE=1 builds the servers with the race
// detector, LARDER_BINARY=PATH tests another program (and PATH-failpoints
// where faults of files are injected), and LARDER_LOGS=DIR keeps the logs of all servers, which are
// otherwise shown only where a test fails.
package integration
