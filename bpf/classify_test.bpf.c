// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
//go:build ignore

/*
 * Test only: the pure functions of quic.h behind a program type that
 * BPF_PROG_TEST_RUN can run. The datagram follows 14 bytes of link header.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "maps.h"
#include "quic.h"

struct instar_class {
	__u64 affinity;
	__u32 kind;
	__u8 is_long;
	__u8 slot;
	__u8 worker;
	__u8 pad;
};

struct instar_class result SEC(".data.result");

/* Of the last packet that linear saw, from the UDP header. */
struct instar_extent {
	__u32 linear;
	__u32 total;
};

struct instar_extent extent SEC(".data.extent");

enum { LINK_HEADER = 14 };

SEC("tc")
int classify(struct __sk_buff *skb)
{
	struct quic_head head = {};
	struct quic_class class = {};
	__u32 len = skb->len - LINK_HEADER;

	head.len = len;
	if (len > QUIC_HEAD)
		len = QUIC_HEAD;
	if (head.len) {
		asm volatile("" : "+r"(len));
		len = ((len - 1) & (QUIC_HEAD - 1)) + 1;
		if (bpf_skb_load_bytes(skb, LINK_HEADER, head.w, len))
			return -1;
	}
	if (prefix == INSTAR_PREFIX_MIN)
		quic_classify(&head, INSTAR_PREFIX_MIN, &secrets, control.slots, max_workers,
			      &class);
	else
		quic_classify(&head, prefix, &secrets, control.slots, max_workers, &class);
	result.kind = class.kind;
	result.is_long = class.is_long;
	result.slot = class.kind == QUIC_OURS ? class.slot : 0;
	result.worker = class.kind == QUIC_OURS ? class.worker : 0;
	result.affinity = class.is_long && class.kind != QUIC_INVALID
				  ? quic_affinity(&head, &secrets)
				  : 0;
	return 0;
}

/* What a program costs that decides nothing: the bench's zero. */
SEC("sk_reuseport")
int empty(struct sk_reuseport_md *ctx)
{
	return SK_PASS;
}

/* How much of a packet a program can read without copying. */
SEC("sk_reuseport")
int linear(struct sk_reuseport_md *ctx)
{
	extent.linear = (long)ctx->data_end - (long)ctx->data;
	extent.total = ctx->len;
	return SK_PASS;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
