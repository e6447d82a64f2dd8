/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Flows that are known by a key, and stay where they began. */
#ifndef INSTAR_AFFINE_H
#define INSTAR_AFFINE_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "maps.h"
#include "select.h"

/* Keyed hash of what the sender made up -> who has the flow.
 * Written by the packet path. Shared by all CPUs. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__type(key, __u64);
	__type(value, struct instar_flow);
	__uint(max_entries, 64);
} flows SEC(".maps");

/*
 * A packet whose sender made up what names its flow: to whoever has the flow, or to the
 * active generation, which has it from then on. The key is a hash that no sender can aim.
 */
__noinline int affine(struct sk_reuseport_md *ctx, __u64 key)
{
	struct instar_flow *known, flow = {};
	struct instar_counters *c = counters();
	int chosen;

	if (!c)
		return SK_DROP;

	known = bpf_map_lookup_elem(&flows, &key);
	if (known) {
		__u32 slot = known->handle >> 8, worker = known->handle & 0xff;

		if (control.slots[slot & 0xff].number == known->generation &&
		    select_socket(ctx, slot, worker))
			return passed(c, INSTAR_VERDICT_KNOWN, slot);
	}

	chosen = select_active(ctx, key >> 32);
	if (chosen < 0)
		return finish(c, INSTAR_VERDICT_DROP, chosen);
	flow.handle = chosen;
	flow.generation = control.slots[flow.handle >> 8].number;
	if (known) {
		bpf_map_update_elem(&flows, &key, &flow, BPF_ANY);
		return finish(c, INSTAR_VERDICT_NEW, chosen);
	}
	if (bpf_map_update_elem(&flows, &key, &flow, BPF_NOEXIST) == 0)
		return finish(c, INSTAR_VERDICT_NEW, chosen);

	/* Another CPU was faster with a packet of the same flow: its choice holds. */
	known = bpf_map_lookup_elem(&flows, &key);
	if (known) {
		__u32 slot = known->handle >> 8, worker = known->handle & 0xff;

		if (select_socket(ctx, slot, worker))
			return passed(c, INSTAR_VERDICT_KNOWN, slot);
	}
	return finish(c, INSTAR_VERDICT_NEW, chosen);
}

#endif
