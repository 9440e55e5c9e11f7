// Package poolfeed has an index follow what a pool of Larder holds, so that whoever asks the conductor for a prompt hears what
// need not be computed anywhere, since the pool has it.
//
// Members publish what they apply, see kv_events_listen of package server, and masters list what they hold. A [Feed]
// subscribes to one member, lists when it has been heard, and again when its events have a gap, it is restarted, or another
// member is followed instead. In between, and while no member is heard for a while, the index keeps what it knew.
//
// Listing and events need no common clock. A page of a listing shows at least what the events say that came before it was
// asked for, since any member answers from what a majority has; and events say what is there, however often they do. So what
// came before is applied before the page, and what comes after behind it; in the end all is as the member applied it.
package poolfeed
