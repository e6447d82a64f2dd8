// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//go:build ignore

/*
 * Flows that are remembered when their server answers: what a worker's socket sends to a
 * peer assures his flow to that worker. The kernel asks for each datagram that a socket
 * of the control group sends to a named address (udp_sendmsg in net/ipv4/udp.c,
 * udpv6_sendmsg in net/ipv6/udp.c, which has IPv4-mapped addresses of IPv6 sockets go
 * to the former).
 */
#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

/* As control says; see flow.bpf.c. */
const volatile __u64 flow_timeout_ns = 300ULL * 1000000000;

enum {
	/* How often a flow's time is refreshed, nanoseconds. */
	ANSWER_REFRESH = 1000000000,
};

/* These three are the group's. */
struct instar_control control SEC(".data.control");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct instar_peer);
	__type(value, struct instar_tracked);
	__uint(max_entries, 64);
} flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct instar_counters);
	__uint(max_entries, 1);
} verdicts SEC(".maps");

/* Cookie of a socket -> handle << 32 | number of its generation. Of the process. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__type(key, __u64);
	__type(value, __u64);
	__uint(max_entries, INSTAR_WORKERS);
} workers SEC(".maps");

static __always_inline void answered(const struct instar_peer *peer, __u64 cookie)
{
	__u64 *worker = bpf_map_lookup_elem(&workers, &cookie);
	struct instar_tracked flow = {}, *known;
	struct instar_counters *c;
	struct instar_slot *slot;
	__u32 zero = 0;
	__u64 owner;

	if (!worker)
		return;
	flow.owner = *worker;
	flow.seen = bpf_ktime_get_ns();
	known = bpf_map_lookup_elem(&flows, peer);
	if (!known) {
		if (bpf_map_update_elem(&flows, peer, &flow, BPF_NOEXIST))
			return;
		c = bpf_map_lookup_elem(&verdicts, &zero);
		if (c)
			c->added++;
		return;
	}
	owner = *(volatile __u64 *)&known->owner;
	if (owner == flow.owner) {
		if ((__s64)(flow.seen - known->seen) > ANSWER_REFRESH)
			known->seen = flow.seen;
		return;
	}
	/* Nobody takes a flow from a living owner by speaking to the peer. Of a dead one the
	 * data plane has found out when the peer's packet came. */
	slot = &control.slots[owner >> 40 & 0xff];
	if (slot->number == (__u32)owner && !slot->exhausted &&
	    (__s64)(flow.seen - known->seen) <= (__s64)flow_timeout_ns)
		return;
	bpf_map_update_elem(&flows, peer, &flow, BPF_ANY);
}

SEC("cgroup/sendmsg4")
int answer4(struct bpf_sock_addr *ctx)
{
	struct instar_peer peer = {};
	__u32 address = ctx->user_ip4;

	peer.address[10] = 0xff;
	peer.address[11] = 0xff;
	__builtin_memcpy(&peer.address[12], &address, 4);
	peer.port = ctx->user_port;
	answered(&peer, bpf_get_socket_cookie(ctx));
	return 1;
}

SEC("cgroup/sendmsg6")
int answer6(struct bpf_sock_addr *ctx)
{
	struct instar_peer peer = {};
	__u32 address[4] = { ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2],
			     ctx->user_ip6[3] };

	__builtin_memcpy(peer.address, address, 16);
	peer.port = ctx->user_port;
	answered(&peer, bpf_get_socket_cookie(ctx));
	return 1;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
