// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//go:build ignore

/*
 * Flow steering, for protocols that name no session: whoever sends from one address
 * and port stays with the process that got his first packet.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "maps.h"
#include "select.h"

/* As control says; see max_workers. */
const volatile __u64 flow_timeout_ns = 300ULL * 1000000000;
const volatile __u32 flow_learning = INSTAR_LEARNING_RECEIVED;

enum {
	/* How often a flow's time is refreshed, nanoseconds. */
	FLOW_REFRESH = 1000000000,
};

/* Sender -> who has the flow. Written by the packet path, and by owners who assure a
 * flow. Shared by all CPUs. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, struct instar_peer);
	__type(value, struct instar_tracked);
	__uint(max_entries, 64);
} flows SEC(".maps");

static __always_inline __u64 owner_of(int chosen)
{
	__u32 handle = chosen & 0xffff;

	return (__u64)handle << 32 | control.slots[handle >> 8].number;
}

/* The sender of the packet, which starts at its UDP header. */
static __always_inline bool load_peer(struct sk_reuseport_md *ctx, struct instar_peer *p)
{
	const struct udphdr *udp = (const struct udphdr *)(long)ctx->data;

	if ((const void *)(udp + 1) > (const void *)(long)ctx->data_end)
		return false;
	p->port = udp->source;
	if (ctx->eth_protocol == bpf_htons(ETH_P_IP)) {
		p->address[10] = 0xff;
		p->address[11] = 0xff;
		return bpf_skb_load_bytes_relative(ctx, offsetof(struct iphdr, saddr),
						   &p->address[12], 4, BPF_HDR_START_NET) == 0;
	}
	return bpf_skb_load_bytes_relative(ctx, offsetof(struct ipv6hdr, saddr), p->address, 16,
					   BPF_HDR_START_NET) == 0;
}

/*
 * Replaces an entry. Not in its place: the kernel may have given that to another key by
 * now, as entries of an LRU map are used again at once.
 */
static __always_inline void store(const struct instar_peer *peer, int chosen, __u64 now)
{
	struct instar_tracked flow = { .owner = owner_of(chosen), .seen = now };

	bpf_map_update_elem(&flows, peer, &flow, BPF_ANY);
}

/* A packet of nobody's flow; ended says that there is the entry of an earlier one. */
static __noinline int begin(struct sk_reuseport_md *ctx, struct instar_counters *c,
			    const struct instar_peer *peer, bool ended)
{
	int chosen = select_active(ctx, ctx->hash);
	struct instar_tracked flow, *known;

	if (chosen < 0 || flow_learning != INSTAR_LEARNING_RECEIVED)
		return finish(c, INSTAR_VERDICT_NEW, chosen);
	if (ended) {
		store(peer, chosen, coarse_now(c));
		return finish(c, INSTAR_VERDICT_NEW, chosen);
	}
	flow.owner = owner_of(chosen);
	flow.seen = coarse_now(c);
	if (bpf_map_update_elem(&flows, peer, &flow, BPF_NOEXIST) == 0) {
		c->added++;
		return finish(c, INSTAR_VERDICT_NEW, chosen);
	}

	/* Another CPU was faster with a packet of the same flow: its choice holds. */
	known = bpf_map_lookup_elem(&flows, peer);
	if (known) {
		__u64 owner = *(volatile __u64 *)&known->owner;

		if (select_socket(ctx, owner >> 40 & 0xff, owner >> 32 & 0xff))
			return passed(c, INSTAR_VERDICT_KNOWN, owner >> 40);
	}
	return finish(c, INSTAR_VERDICT_NEW, chosen);
}

SEC("sk_reuseport")
int flow(struct sk_reuseport_md *ctx)
{
	struct instar_counters *c = counters();
	struct instar_peer peer = {};
	struct instar_tracked *known;
	__u32 slot, worker;
	__u64 owner, now;
	int chosen;

	if (!c)
		return SK_DROP;
	if (!load_peer(ctx, &peer))
		return finish(c, INSTAR_VERDICT_INVALID, select_active(ctx, ctx->hash));

	known = bpf_map_lookup_elem(&flows, &peer);
	if (!known)
		return begin(ctx, c, &peer, false);

	owner = *(volatile __u64 *)&known->owner;
	slot = owner >> 40 & 0xff;
	worker = owner >> 32 & 0xff;
	now = coarse_now(c);
	if (control.slots[slot].number != (__u32)owner ||
	    (__s64)(now - known->seen) > (__s64)flow_timeout_ns)
		return begin(ctx, c, &peer, true);
	if (!select_socket(ctx, slot, worker)) {
		/* The generation may have a sibling that shares what it knows. */
		chosen = select_worker(ctx, slot, ctx->hash);
		if (chosen < 0)
			return begin(ctx, c, &peer, true);
		store(&peer, slot << 8 | (chosen & 0xff), now);
	} else if ((__s64)(now - known->seen) > FLOW_REFRESH) {
		known->seen = now;
	}
	return passed(c, INSTAR_VERDICT_KNOWN, slot);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
