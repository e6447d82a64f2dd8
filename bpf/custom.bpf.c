// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//go:build ignore

/*
 * Custom steering: a function of the group's owner says what names a packet's flow. It
 * takes the place of dissect below when the group is made.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "affine.h"
#include "maps.h"
#include "select.h"
#include "siphash.h"

/*
 * The packet starts at its UDP header. For what it returns see enum instar_dissected.
 * Weak, so that the compiler draws no conclusions from what stands here.
 */
__weak __u64 dissect(struct sk_reuseport_md *ctx)
{
	return 1ULL << 62 | ctx->len;
}

SEC("sk_reuseport")
int custom(struct sk_reuseport_md *ctx)
{
	struct instar_counters *c = counters();
	__u64 names = dissect(ctx);
	struct siphash s;

	if (!c)
		return SK_DROP;
	if (names >> INSTAR_DISSECTED_KEY_BIT) {
		siphash_start(&s, secrets.affinity[0], secrets.affinity[1]);
		siphash_block(&s, names);
		return affine(ctx, siphash_end(&s, 8ULL << 56));
	}
	if (names && names < INSTAR_DISSECTED_COOKIES) {
		__u32 handle = names ^ (INSTAR_DISSECTED_COOKIES - 1);

		/* Not every verifier sees the bounds of an XOR: they are told again. */
		barrier_var(handle);
		handle &= INSTAR_DISSECTED_COOKIES - 1;
		__u32 slot = handle >> 8, worker = handle & 0xff;

		if (worker < max_workers && select_socket(ctx, slot, worker))
			return passed(c, INSTAR_VERDICT_OWNER, slot);
		return finish(c, INSTAR_VERDICT_ORPHAN, select_active(ctx, ctx->hash));
	}
	return finish(c, INSTAR_VERDICT_NEW, select_active(ctx, ctx->hash));
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
