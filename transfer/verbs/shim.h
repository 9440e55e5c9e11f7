// What cgo cannot call: verbs that are inline functions or macros, and loops that would cost a call for each turn.
#ifndef LARDER_VERBS_SHIM_H
#define LARDER_VERBS_SHIM_H

#include <errno.h>
#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// A completion without the fields that one-sided work has no use for. The same layout as the Go type Completion.
struct larder_completion {
	uint64_t id;
	uint32_t qpn;
	uint32_t length;
	uint32_t status;
	uint32_t opcode;
	uint32_t vendor;
	uint32_t pad;
};

// How many completions are taken out of the queue at once: they are copied on the stack.
enum { LARDER_POLL = 32 };

// Gives how many there were, at most n, or -errno.
static int larder_poll(struct ibv_cq *cq, int n, struct larder_completion *out) {
	struct ibv_wc wc[LARDER_POLL];
	int done = 0;
	while (done < n) {
		int want = n - done < LARDER_POLL ? n - done : LARDER_POLL;
		int got = ibv_poll_cq(cq, want, wc);
		if (got < 0) return done > 0 ? done : (got == -1 ? -EIO : got);
		for (int i = 0; i < got; i++, done++) {
			out[done] = (struct larder_completion){
				.id = wc[i].wr_id, .qpn = wc[i].qp_num, .length = wc[i].byte_len,
				.status = wc[i].status, .opcode = wc[i].opcode, .vendor = wc[i].vendor_err};
		}
		if (got < want) break;
	}
	return done;
}

static int larder_arm(struct ibv_cq *cq) { return ibv_req_notify_cq(cq, 0); }

// Takes one event out of a completion channel, and confirms it. Gives 0 or an errno; EAGAIN if there is none.
static int larder_take_event(struct ibv_comp_channel *channel) {
	struct ibv_cq *cq;
	void *context;
	if (ibv_get_cq_event(channel, &cq, &context) != 0) return errno;
	ibv_ack_cq_events(cq, 1);
	return 0;
}

// Work requests live in memory of C. Gives 0 or an errno, and which of them was the first that was refused.
static int larder_post(struct ibv_qp *qp, struct ibv_send_wr *first, int64_t *refused) {
	struct ibv_send_wr *bad = NULL;
	int err = ibv_post_send(qp, first, &bad);
	*refused = err != 0 && bad != NULL ? bad - first : 0;
	return err;
}

// cgo does not see the members of a union. RDMA work writes them from Go, to save the call; what is rare is set here.
static void larder_set_bind(struct ibv_send_wr *wr, struct ibv_mw *mw, uint32_t rkey, struct ibv_mr *mr, uint64_t addr, uint64_t length,
			    unsigned int access) {
	wr->bind_mw.mw = mw;
	wr->bind_mw.rkey = rkey;
	wr->bind_mw.bind_info.mr = mr;
	wr->bind_mw.bind_info.addr = addr;
	wr->bind_mw.bind_info.length = length;
	wr->bind_mw.bind_info.mw_access_flags = access;
}

static void larder_set_invalidate(struct ibv_send_wr *wr, uint32_t rkey) { wr->invalidate_rkey = rkey; }

static int larder_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr) {
	return ibv_query_port(context, port, attr);
}

static ssize_t larder_query_gids(struct ibv_context *context, struct ibv_gid_entry *entries, size_t most) {
	return ibv_query_gid_table(context, entries, most, 0);
}

// The macro is for access flags that a program may know and the device not.
static struct ibv_mr *larder_reg_mr(struct ibv_pd *pd, void *addr, size_t length, unsigned int access) {
	return ibv_reg_mr(pd, addr, length, access);
}

static struct ibv_mw *larder_alloc_mw2(struct ibv_pd *pd) { return ibv_alloc_mw(pd, IBV_MW_TYPE_2); }
static int larder_dealloc_mw(struct ibv_mw *mw) { return ibv_dealloc_mw(mw); }

struct larder_event {
	uint32_t type;
	uint32_t port;
	uint32_t qpn;
	uint32_t cq; // nonzero: it is about a completion queue
};

// Takes one asynchronous event, and confirms it. Gives 0 or an errno; EAGAIN if there is none.
static int larder_take_async(struct ibv_context *context, struct larder_event *out) {
	struct ibv_async_event event;
	if (ibv_get_async_event(context, &event) != 0) return errno;
	*out = (struct larder_event){.type = event.event_type};
	switch (event.event_type) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		out->qpn = event.element.qp->qp_num;
		break;
	case IBV_EVENT_CQ_ERR:
		out->cq = 1;
		break;
	case IBV_EVENT_PORT_ACTIVE:
	case IBV_EVENT_PORT_ERR:
	case IBV_EVENT_LID_CHANGE:
	case IBV_EVENT_PKEY_CHANGE:
	case IBV_EVENT_SM_CHANGE:
	case IBV_EVENT_CLIENT_REREGISTER:
	case IBV_EVENT_GID_CHANGE:
		out->port = event.element.port_num;
		break;
	default:
		break;
	}
	ibv_ack_async_event(&event); // until then the queue pair, or the completion queue, cannot be destroyed
	return 0;
}

#endif
