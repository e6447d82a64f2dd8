// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//go:build ignore

/*
 * TCP steering. The kernel asks for each connection request, and once more for each
 * connection that waits at a listener which closes: in its accept queue, or half open.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "maps.h"
#include "select.h"

SEC("sk_reuseport/migrate")
int tcp(struct sk_reuseport_md *ctx)
{
	struct instar_counters *c = counters();

	if (!c)
		return SK_DROP;
	return finish(c, ctx->migrating_sk ? INSTAR_VERDICT_KNOWN : INSTAR_VERDICT_NEW,
		      select_active(ctx, ctx->hash));
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
