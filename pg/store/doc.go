// Package store is where the processes of a job find and agree with each other: a small map with revisions, compare-and-set,
// leases and watches. See [Store] for what it promises. There are three kinds, which [Open] tells apart by their URLs:
//
//	masters://host:port,host:port   Larder's own masters keep it, as safely as entries: see [Masters]
//	file:///dir                     files in a directory that all processes see: see [Directory]
//	tcp://host:port                 one process keeps it in its memory: see [Serve] and [Dial]
//
// What happens when something fails
//
//	a process ends         its leased entries go; within a few milliseconds on the host of the masters' leader, in a directory on the
//	                       same host, and over TCP if its host still runs; else after the lease
//	a process is stopped   its leased entries go after the lease; when it goes on it is told that its lease was lost
//	a master ends          nothing is lost; calls and watches go on when there is a leader again, with the leases' full time
//	most masters end       calls fail after their time; no lease ends before there is a leader again
//	the TCP server ends    all is lost, leases at once; calls fail, until another one serves at its address. Watches go on with that
//	the directory's host   as the file system has it: nothing is synced to its disk, since the processes of that host are gone, too
//	a network is cut       who reaches no majority of the masters, or not the TCP server, or not the file system, finds that Confirmed
//	                       grows beyond Lease: the others may have given it up by then
package store
