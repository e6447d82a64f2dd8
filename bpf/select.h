/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Choosing a socket, and counting what was chosen. */
#ifndef INSTAR_SELECT_H
#define INSTAR_SELECT_H

#include <linux/bpf.h>
#include <stdbool.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "maps.h"
#include "trace.h"

/* A choice: slot << 8 | worker, and whether it was the last resort. */
enum {
	CHOSEN_FALLBACK = 1 << 16,
	CHOSEN_NONE = -1,
	/* Workers that are tried at random before all of them in turn. */
	SELECT_TRIES = 16,
};

/* Gives the packet to a socket. False when the socket is gone. */
static __always_inline bool select_socket(struct sk_reuseport_md *ctx, __u32 slot, __u32 worker)
{
	__u32 index = slot * max_workers + worker;

	if (tracing)
		trace_packet(ctx, slot, worker);
	return bpf_sk_select_reuseport(ctx, &sockets, &index, 0) == 0;
}

/* A worker's share: hash * workers >> 32. */
static __always_inline __u32 share(__u32 hash, __u32 workers)
{
	return (__u64)hash * workers >> 32;
}

/*
 * Any worker of the generation in a slot, CHOSEN_NONE when all are gone. The
 * first tries are random, so that the share of dead workers is spread evenly
 * over their siblings; a scan alone would give all of it to the next one. A
 * generation without a worker is marked: workers never come back, and the next
 * packet need not look.
 *
 * Global, so that the verifier walks it once and not for each caller.
 */
__noinline int select_worker(struct sk_reuseport_md *ctx, __u32 slot, __u32 hash)
{
	struct instar_slot *s = &control.slots[slot & (INSTAR_SLOTS - 1)];
	__u32 number = *(volatile __u32 *)&s->number;
	__u32 workers = s->workers, first = 0;

	if (s->exhausted)
		return CHOSEN_NONE;
	for (__u32 i = 0; i < SELECT_TRIES; i++) {
		hash = hash * 0x9e3779b1u + 1;
		first = share(hash, workers);
		if (select_socket(ctx, slot, first))
			return first & 0xff;
	}
	for (__u32 i = 0; i < INSTAR_WORKERS && i < workers; i++) {
		__u32 worker = (first + i) % workers;

		if (select_socket(ctx, slot, worker))
			return worker & 0xff;
	}
	/* Unless the slot has another user by now, who is not. */
	if (*(volatile __u32 *)&s->number == number)
		s->exhausted = 1;
	return CHOSEN_NONE;
}

/* The order of last resort. */
__noinline int select_any(struct sk_reuseport_md *ctx, __u32 hash)
{
	const struct instar_order *order =
		&control.orders[control.active >> 40 & (INSTAR_ORDERS - 1)];

	for (__u32 i = 0; i < INSTAR_SLOTS && i < order->total; i++) {
		__u32 slot = order->slot[i];
		int worker = select_worker(ctx, slot, hash);

		if (worker < 0)
			continue;
		/* The first place is the active one's, when there is one. */
		if (i || !order->activated)
			slot |= CHOSEN_FALLBACK >> 8;
		return slot << 8 | (worker & 0xff);
	}
	return CHOSEN_NONE;
}

/* A worker of the active generation, or the last resort. */
static __always_inline int select_active(struct sk_reuseport_md *ctx, __u32 hash)
{
	__u64 active = *(volatile __u64 *)&control.active;
	__u32 slot = active >> 32 & 0xff;
	__u32 worker = share(hash, active >> 48);

	if ((__u32)active && select_socket(ctx, slot, worker))
		return slot << 8 | worker;
	return select_any(ctx, hash);
}

/*
 * The counters of this CPU. Programs look them up before they choose a socket:
 * what the kernel's return from there makes the CPU forget would be waited for.
 */
static __always_inline struct instar_counters *counters(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&verdicts, &zero);
}

/* The time of this tick. */
static __always_inline __u64 coarse_now(struct instar_counters *c)
{
	__u64 tick = bpf_jiffies64();

	if (c->tick != tick) {
		c->tick = tick;
		c->now = bpf_ktime_get_ns();
	}
	return c->now;
}

/* Counts a packet that a socket of the slot got, and ends it. */
static __always_inline int passed(struct instar_counters *c, int verdict, __u32 slot)
{
	struct instar_traffic *t = &c->slots[slot & (INSTAR_SLOTS - 1)];

	if (tracing)
		trace_verdict(verdict);
	c->verdicts[verdict]++;
	t->packets++;
	t->last = coarse_now(c);
	return SK_PASS;
}

/* Counts the packet and ends it. */
static __always_inline int finish(struct instar_counters *c, int verdict, int chosen)
{
	if (chosen < 0) {
		if (tracing)
			trace_verdict(INSTAR_VERDICT_DROP);
		c->verdicts[INSTAR_VERDICT_DROP]++;
		return SK_DROP;
	}
	if (chosen & CHOSEN_FALLBACK)
		verdict = INSTAR_VERDICT_FALLBACK;
	return passed(c, verdict, chosen >> 8);
}

#endif
