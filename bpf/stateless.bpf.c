// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//go:build ignore

/* Stateless steering (DNS, NTP): every packet starts a flow of its own. */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "maps.h"
#include "select.h"

SEC("sk_reuseport")
int stateless(struct sk_reuseport_md *ctx)
{
	struct instar_counters *c = counters();

	if (!c)
		return SK_DROP;
	return finish(c, INSTAR_VERDICT_NEW, select_active(ctx, ctx->hash));
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
