// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//go:build ignore

/*
 * A dissector: the game's datagrams begin with "tk" and the token that the server gave
 * the player, in network order. A player who has none yet sends zero octets there.
 */
#include <linux/bpf.h>
#include <linux/udp.h>
#include <bpf/bpf_helpers.h>

/* A packet of nobody: for the active generation. */
#define NOBODY (1ULL << 62)

SEC("sk_reuseport")
__u64 token(struct sk_reuseport_md *ctx)
{
	__u8 head[5];

	/* Behind the UDP header, wherever the kernel keeps it. */
	if (bpf_skb_load_bytes(ctx, sizeof(struct udphdr), head, sizeof(head)))
		return NOBODY;
	if (head[0] != 't' || head[1] != 'k' || !head[2])
		return NOBODY;
	return head[3] << 8 | head[4];
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
