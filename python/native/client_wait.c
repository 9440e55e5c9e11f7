// Waiting for calls of a client, in C: a thread that waits in the kernel is not tied to a goroutine, which Go would have to hand over
// from thread to thread, and a signal ends the wait.

#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "_cgo_export.h"

// larder_client_wait waits until a call has ended or wants memory, for limit nanoseconds. LARDER_AGAIN says that neither is so.
int32_t larder_client_wait(larder_progress *progress, int64_t limit, larder_error *e) {
	(void)e; // all calls have one
	if (__atomic_load_n(&progress->state, __ATOMIC_ACQUIRE) != 0) {
		return 0;
	}
	if (limit > 0) {
		struct timespec left = {limit / 1000000000, limit % 1000000000};
		syscall(SYS_futex, &progress->state, FUTEX_WAIT_PRIVATE, 0, &left, NULL, 0);
	}
	return __atomic_load_n(&progress->state, __ATOMIC_ACQUIRE) != 0 ? 0 : LARDER_AGAIN;
}

// larder_client_run is larder_client_try and larder_client_wait; a caller without a limit is patient.
int32_t larder_client_run(uint64_t handle, int32_t kind, int32_t count, char *keys, int64_t keys_length, larder_region *regions,
                          int64_t region_count, int64_t *results, int64_t result_count, char *options, int64_t options_length,
                          int64_t timeout, int64_t limit, larder_progress *progress, larder_error *e) {
	int32_t code = larder_client_try(handle, kind, count, keys, keys_length, regions, region_count, results, result_count, options,
	                                 options_length, timeout, limit < 0, progress, e);
	return code != 0 ? code : larder_client_wait(progress, limit, e);
}
