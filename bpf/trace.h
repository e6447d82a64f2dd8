/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Telling of each packet, while somebody looks on. */
#ifndef INSTAR_TRACE_H
#define INSTAR_TRACE_H

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <stddef.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "maps.h"

/*
 * The packet for which a socket is being chosen. Static, as the verifier walks other
 * functions also when nobody calls them.
 */
static __noinline int trace_packet(struct sk_reuseport_md *ctx, __u32 slot, __u32 worker)
{
	__u32 zero = 0, length = ctx->len;
	struct instar_traced *t = bpf_map_lookup_elem(&traced, &zero);
	struct instar_event *e;

	if (!t)
		return 0;
	e = &t->event;
	__builtin_memset(e, 0, sizeof(*e));
	e->handle = slot << 8 | worker;
	e->length = length;
	if (ctx->eth_protocol == bpf_htons(ETH_P_IP)) {
		e->peer.address[10] = 0xff;
		e->peer.address[11] = 0xff;
		bpf_skb_load_bytes_relative(ctx, offsetof(struct iphdr, saddr),
					    &e->peer.address[12], 4, BPF_HDR_START_NET);
	} else {
		bpf_skb_load_bytes_relative(ctx, offsetof(struct ipv6hdr, saddr), e->peer.address,
					    16, BPF_HDR_START_NET);
	}
	/* The source port is the first of a UDP or TCP header. A connection that moves has
	 * no packet. */
	if (bpf_skb_load_bytes(ctx, 0, &e->peer.port, 2))
		return 0;
	if (length > sizeof(e->octets))
		length = sizeof(e->octets);
	if (length && bpf_skb_load_bytes(ctx, 0, e->octets, length) == 0)
		e->captured = length;
	return 0;
}

/* Tells what became of it. */
static __noinline int trace_verdict(__u32 verdict)
{
	__u32 zero = 0;
	struct instar_traced *t = bpf_map_lookup_elem(&traced, &zero);

	if (!t)
		return 0;
	t->event.time = bpf_ktime_get_ns();
	t->event.verdict = verdict;
	if (bpf_ringbuf_output(&events, &t->event, sizeof(t->event), 0))
		t->lost++;
	return 0;
}

#endif
