// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//go:build ignore

/*
 * WireGuard steering. A handshake's first message goes to the active generation; every
 * other message names the index that its receiver made up for the session, and whoever
 * announced that index gets it.
 */
#include <linux/bpf.h>
#include <linux/udp.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "maps.h"
#include "select.h"
#include "wireguard.h"

/* As control says; see max_workers. */
const volatile __u64 flow_timeout_ns = 300ULL * 1000000000;

/* Receiver index as on the wire -> who announced it. Written by the owners. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, __u32);
	__type(value, struct instar_tracked);
	__uint(max_entries, 64);
} flows SEC(".maps");

/* The first bytes of the payload. The packet starts at its UDP header. */
static __always_inline bool load_head(struct sk_reuseport_md *ctx, struct wireguard_head *h)
{
	const __u8 *payload = (const __u8 *)(long)ctx->data + sizeof(struct udphdr);
	__u32 len = ctx->len;

	h->len = len < sizeof(struct udphdr) ? 0 : len - sizeof(struct udphdr);
	if (h->len < WIREGUARD_HEAD)
		return false;
	if (payload + WIREGUARD_HEAD <= (const __u8 *)(long)ctx->data_end) {
		h->w[0] = *(const __u32 *)payload;
		h->w[1] = *(const __u32 *)(payload + 4);
		h->w[2] = *(const __u32 *)(payload + 8);
		return true;
	}
	return bpf_skb_load_bytes(ctx, sizeof(struct udphdr), h->w, WIREGUARD_HEAD) == 0;
}

SEC("sk_reuseport")
int wireguard(struct sk_reuseport_md *ctx)
{
	struct instar_counters *c = counters();
	struct instar_tracked *known;
	struct wireguard_head head;
	int verdict = INSTAR_VERDICT_UNKNOWN;
	__u32 slot, index;
	__u64 owner;

	if (!c)
		return SK_DROP;
	if (!load_head(ctx, &head))
		return finish(c, INSTAR_VERDICT_INVALID, select_active(ctx, ctx->hash));

	switch (wireguard_classify(&head, &index)) {
	case WIREGUARD_INITIATES:
		return finish(c, INSTAR_VERDICT_NEW, select_active(ctx, ctx->hash));
	case WIREGUARD_NAMES:
		break;
	default:
		return finish(c, INSTAR_VERDICT_INVALID, select_active(ctx, ctx->hash));
	}

	known = bpf_map_lookup_elem(&flows, &index);
	if (known) {
		owner = *(volatile __u64 *)&known->owner;
		slot = owner >> 40 & 0xff;
		if (control.slots[slot].number == (__u32)owner &&
		    (__s64)(coarse_now(c) - known->seen) <= (__s64)flow_timeout_ns) {
			if (select_socket(ctx, slot, owner >> 32 & 0xff))
				return passed(c, INSTAR_VERDICT_KNOWN, slot);
			/* A worker is a socket; the session is the process's. */
			int sibling = select_worker(ctx, slot, ctx->hash);

			if (sibling >= 0)
				return passed(c, INSTAR_VERDICT_KNOWN, slot);
		}
		verdict = INSTAR_VERDICT_ORPHAN;
	}
	return finish(c, verdict, select_active(ctx, ctx->hash));
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
