/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The maps of a group. Each group has its own; sizes are set when it is made. */
#ifndef INSTAR_MAPS_H
#define INSTAR_MAPS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

/* Never change while a program runs: the verifier sees them as constants. They
 * repeat what control says. */
const volatile __u32 max_workers = 64;
const volatile __u32 prefix = INSTAR_PREFIX_MIN;

/* Whether each packet is told of in events. What it makes a program do is not there
 * otherwise: the verifier takes it out. */
const volatile __u32 tracing;

/* Keeps the enums in the object's type information, from where Go takes them. */
struct instar_enums {
	enum instar_abi abi;
	enum instar_steering steering;
	enum instar_verdict verdict;
	enum instar_stage stage;
	enum instar_learning learning;
	enum instar_dissected dissected;
};
const volatile struct instar_enums enums;

/* Who is there and who is active. Written by the control plane, except for
 * slots[].exhausted. Mapped into the processes of the group. */
struct instar_control control SEC(".data.control");

/* Written once by the control plane when the group is made. */
struct instar_secrets secrets SEC(".data.secrets");

/* slot * max_workers + worker -> socket. Written by the control plane; the
 * kernel empties an entry when its socket closes. */
struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__type(key, __u32);
	__type(value, __u64);
	__uint(max_entries, 1);
} sockets SEC(".maps");

/* Key 0. Written by the packet path. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct instar_counters);
	__uint(max_entries, 1);
} verdicts SEC(".maps");

/* Both are of a trace, and made with it. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} events SEC(".maps");

/* Key 0. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__type(key, __u32);
	__type(value, struct instar_traced);
	__uint(max_entries, 1);
} traced SEC(".maps");

#endif
