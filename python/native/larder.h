/*
 * The C ABI of liblarder.so, for languages that call the Go packages of the project: python/larder is built on it.
 *
 * - Every call returns a code of errors.go, 0 for success, and writes what a person should read into its larder_error.
 * - Objects are named by handles, which are never used again. 0 names nothing. A call with a handle that was closed, or is
 *   one of another kind, fails; it does not crash.
 * - Calls that wait take a limit in nanoseconds, wait for at most a second of it, and return LARDER_AGAIN when it is over: the
 *   caller looks for signals and calls again. What cannot be taken up again is a job: it is begun, waited for in slices, and
 *   can be given up.
 * - Memory of the caller's is used during the call only. The exceptions say until when: larder_buffer_register,
 *   larder_batch_submit, larder_call_start, larder_call_do, larder_client_start, larder_client_room, larder_layer_launch.
 * - Calls may be made concurrently, from any thread, but not in a process that was forked after the library was loaded.
 */
#ifndef LARDER_H
#define LARDER_H

#include <stdint.h>

#define LARDER_AGAIN 1

/* larder_error is what a failed call says: text of length bytes, cut off if need be, in UTF-8. */
typedef struct {
	int32_t length;
	char text[1020];
} larder_error;

/* larder_handle names a buffer to other processes. */
typedef struct {
	uint64_t id;
	uint64_t generation;
} larder_handle;

/* larder_request is one request of a batch: a range of a remote buffer, and as much memory here. */
typedef struct {
	uint64_t id;
	uint64_t generation;
	uint64_t offset;
	void *address;
	uint64_t length;
} larder_request;

/* larder_notification has the lengths of the parts of a notification, which lie one after the other. */
typedef struct {
	uint32_t engine;
	uint32_t name;
	uint32_t body;
} larder_notification;

/* LARDER_MASK_WORDS is how many words a set of ranks has: rank r is bit r%64 of word r/64. */
#define LARDER_MASK_WORDS 16

/* larder_region is memory of the caller's. */
typedef struct {
	void *address;
	uint64_t bytes;
} larder_region;

/*
 * larder_call is an operation of a process group. kind: 1 all_reduce, 2 broadcast, 3 reduce, 4 all_gather, 5 reduce_scatter,
 * 6 all_to_all, 7 gather, 8 scatter, 9 barrier, 10 send, 11 recv. dtype and op are numbered as in pg/reduce. root is the other
 * rank of a send or recv; -1 receives from any. Parts are by rank; a kind that has parts on one side uses the region on the other.
 * A count without a list cuts the region into so many equal parts.
 */
typedef struct {
	int32_t kind;
	int32_t dtype;
	int32_t op;
	int32_t root;
	uint64_t tag;
	larder_region src;
	larder_region dst;
	larder_region *src_parts;
	int64_t src_count;
	larder_region *dst_parts;
	int64_t dst_count;
} larder_call;

/* larder_result is how a call ended: ranks that were lost while it ran, how many they are, and the source, tag and length of what was received. */
typedef struct {
	uint64_t failed[LARDER_MASK_WORDS];
	uint64_t tag;
	uint64_t bytes;
	int32_t source;
	int32_t lost;
} larder_result;

/*
 * larder_progress is how far a call of a client has come. state is 0 while it is under way, 1 when it wants memory for count of its
 * values, from the given one on, whose lengths stand in its results, and 2 when it has ended, with code and error. handle names it
 * until then. The library writes to it until it has ended.
 */
typedef struct {
	uint32_t state;
	int32_t code;
	uint64_t handle;
	int64_t from;
	int64_t count;
	larder_error error;
} larder_progress;

#endif
