// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//go:build ignore

/*
 * QUIC steering. A connection ID that we made names its socket; a handshake
 * that still uses the client's own ID stays with the process that got its first
 * packet; everything else goes to the active generation.
 */
#include <linux/bpf.h>
#include <linux/udp.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "affine.h"
#include "maps.h"
#include "quic.h"
#include "select.h"

/* The first bytes of the payload. The packet starts at its UDP header. */
static __always_inline bool load_head(struct sk_reuseport_md *ctx, struct quic_head *h)
{
	const __u8 *payload = (const __u8 *)(long)ctx->data + sizeof(struct udphdr);
	__u32 len = ctx->len;

	h->len = len < sizeof(struct udphdr) ? 0 : len - sizeof(struct udphdr);
	if (payload + QUIC_HEAD <= (const __u8 *)(long)ctx->data_end) {
		h->w[0] = *(const __u64 *)payload;
		h->w[1] = *(const __u64 *)(payload + 8);
		h->w[2] = *(const __u64 *)(payload + 16);
		h->w[3] = *(const __u64 *)(payload + 24);
		return true;
	}
	/* Short, or not linear. */
	h->w[0] = h->w[1] = h->w[2] = h->w[3] = 0;
	if (h->len == 0)
		return true;
	len = h->len < QUIC_HEAD ? h->len : QUIC_HEAD;
	/* 1 to 32 already; in a form that the verifier follows. */
	asm volatile("" : "+r"(len));
	len = ((len - 1) & (QUIC_HEAD - 1)) + 1;
	return bpf_skb_load_bytes(ctx, sizeof(struct udphdr), h->w, len) == 0;
}

SEC("sk_reuseport")
int quic(struct sk_reuseport_md *ctx)
{
	struct quic_head head;
	struct quic_class class;
	struct instar_counters *c = counters();
	int verdict;

	if (!c)
		return SK_DROP;

	if (!load_head(ctx, &head))
		return finish(c, INSTAR_VERDICT_INVALID, select_active(ctx, ctx->hash));

	/* The usual prefix on a path of its own, where its length is a constant;
	 * the verifier removes the other one. */
	if (prefix == INSTAR_PREFIX_MIN)
		quic_classify(&head, INSTAR_PREFIX_MIN, &secrets, control.slots, max_workers,
			      &class);
	else
		quic_classify(&head, prefix, &secrets, control.slots, max_workers, &class);

	switch (class.kind) {
	case QUIC_OURS:
		if (select_socket(ctx, class.slot, class.worker))
			return passed(c, INSTAR_VERDICT_OWNER, class.slot);
		if (class.is_long)
			return affine(ctx, quic_affinity(&head, &secrets));
		verdict = INSTAR_VERDICT_ORPHAN;
		break;
	case QUIC_FOREIGN_LONG:
		return affine(ctx, quic_affinity(&head, &secrets));
	case QUIC_FOREIGN_SHORT:
		verdict = INSTAR_VERDICT_UNKNOWN;
		break;
	default:
		verdict = INSTAR_VERDICT_INVALID;
	}
	return finish(c, verdict, select_active(ctx, ctx->hash));
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
