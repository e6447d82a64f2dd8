/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the data plane and the control plane share: every number once. The Go
 * side gets it through bpf2go; nothing here is repeated by hand.
 */
#ifndef INSTAR_ABI_H
#define INSTAR_ABI_H

#include <linux/types.h>

enum instar_abi {
	/* Version of everything in this file. A library that meets another one
	 * refuses and touches nothing. */
	INSTAR_LAYOUT = 1,
	/* Generations and workers that the identifier format can name. */
	INSTAR_SLOTS = 256,
	INSTAR_WORKERS = 256,
	/* Orders of last resort: the one that control.active names, and room for
	 * the next ones to be written aside. */
	INSTAR_ORDERS = 4,
	/* Bytes of a connection ID's trailer (masked handle and tag), and the
	 * range of the prefix in front of it. */
	INSTAR_CID_TRAILER = 6,
	INSTAR_PREFIX_MIN = 8,
	INSTAR_PREFIX_MAX = 14,
};

enum instar_steering {
	INSTAR_STEERING_UNSPEC,
	INSTAR_STEERING_QUIC,
	INSTAR_STEERING_STATELESS,
	INSTAR_STEERING_FLOW,
	INSTAR_STEERING_WIREGUARD,
	INSTAR_STEERING_CUSTOM,
	INSTAR_STEERING_TCP,
};

/*
 * What a dissector of custom steering returns. 1 to 0xffff: the cookie of a worker, as a
 * packet brings it back; it is the handle with all bits turned over, so that 0, which
 * says little, is nobody's. With the highest bit: a key of a flow, whose first packet
 * goes to the active generation and whose later ones follow it. Everything else: of
 * nobody, for the active generation.
 */
enum instar_dissected {
	INSTAR_DISSECTED_COOKIES = 1 << 16,
	INSTAR_DISSECTED_KEY_BIT = 63,
};

/* When a flow is remembered. */
enum instar_learning {
	/* With its first packet. */
	INSTAR_LEARNING_RECEIVED,
	/* When the server says so: forged senders take no room. */
	INSTAR_LEARNING_ASSURED,
	/* When the server sends something to the peer, or says so. */
	INSTAR_LEARNING_ANSWERED,
};

/* The one named outcome of a packet. */
enum instar_verdict {
	/* An identifier of ours named a live socket. */
	INSTAR_VERDICT_OWNER,
	/* A flow (with QUIC: a handshake under way) that was remembered; with TCP a
	 * connection that waited at a listener which closed. */
	INSTAR_VERDICT_KNOWN,
	/* A new flow, given to the active generation. */
	INSTAR_VERDICT_NEW,
	/* An identifier of ours whose socket is gone: to the active generation,
	 * which answers with a stateless reset. */
	INSTAR_VERDICT_ORPHAN,
	/* Nothing that we made and no start of a flow: to the active one. */
	INSTAR_VERDICT_UNKNOWN,
	/* Not a packet of the protocol: to the active one, which may speak
	 * another protocol on the same port. */
	INSTAR_VERDICT_INVALID,
	/* The active generation has no live socket (or there is none): given to
	 * the next in the order of last resort. */
	INSTAR_VERDICT_FALLBACK,
	/* No registered socket lives. */
	INSTAR_VERDICT_DROP,
	INSTAR_VERDICTS,
};

/* Stage of an entry of the table, for the control plane alone. */
enum instar_stage {
	INSTAR_STAGE_FREE,
	/* A process is binding and registering; after a crash: free. */
	INSTAR_STAGE_JOINING,
	INSTAR_STAGE_JOINED,
};

/* What the packet path reads of a generation; index is the slot. */
struct instar_slot {
	/* Number of the generation that has or last had the slot; 0: none yet.
	 * Kept after its end so that its identifiers are still told from
	 * strangers', until the slot is used again. */
	__u32 number;
	__u16 workers;
	/* Set by the data plane when no worker was left. */
	__u8 exhausted;
	__u8 pad;
};

/* The order of last resort: the active slot, the ones that were active before
 * it (latest first), then the staged ones (newest first). */
struct instar_order {
	__u16 activated;
	__u16 total;
	__u32 pad;
	__u8 slot[INSTAR_SLOTS];
};

/* What the control plane remembers of a generation; index is the slot. Times
 * are CLOCK_MONOTONIC nanoseconds, 0: never. */
struct instar_info {
	__u32 stage;
	__u32 number;
	__u32 pid;
	__u32 pid_namespace;
	__u64 pid_start;
	__u64 joined;
	__u64 activated;
	__u64 superseded;
	__u64 deadline;
	/* Packets of the slot's counter that belong to its earlier users. */
	__u64 packets_before;
	__u8 build[32];
};

/*
 * The group. Written by the control plane under the folder's lock, read by the
 * packet path without one.
 *
 * active is the whole truth about who is active: one 64-bit store changes it.
 *   bits  0..31  number of the active generation, 0: none
 *   bits 32..39  its slot
 *   bits 40..47  index into orders
 *   bits 48..63  its workers
 */
struct instar_control {
	__u32 layout;
	__u32 steering;
	__u32 max_generations;
	__u32 max_workers;
	__u32 flow_entries;
	__u32 prefix;
	__u32 next_number;
	/* Seconds after which a silent flow, or a WireGuard index, is forgotten, and
	 * enum instar_learning: of flow steering. */
	__u16 flow_timeout;
	__u8 flow_learning;
	__u8 pad;
	__u64 active;
	/* Counts changes; for those who wait for one. */
	__u64 changes;
	/* Entries of the table of flows that processes added and deleted. */
	__u64 flows_added;
	__u64 flows_deleted;
	__u8 service[64];
	__u8 network[8];
	__u8 address[64];
	__u8 device[16];
	__u8 program[64];
	struct instar_order orders[INSTAR_ORDERS];
	struct instar_slot slots[INSTAR_SLOTS];
	struct instar_info info[INSTAR_SLOTS];
};

/* Written once, with the group. The keys are derived from master. */
struct instar_secrets {
	__u8 master[32];
	__u64 cid[2];
	__u64 mul_handle;
	__u64 mul_generation;
	__u64 affinity[2];
};

/* Value of the flows map: who has the flow. Valid while the slot of the handle
 * still has that generation. */
struct instar_flow {
	__u32 generation;
	__u16 handle;
	__u16 pad;
};

/* Key of the flows map of flow steering: who sends. */
struct instar_peer {
	/* IPv6, or IPv4 mapped (RFC 4291 section 2.5.5.2). */
	__u8 address[16];
	/* In network order. */
	__u16 port;
	__u16 pad;
};

/* Value of it, and of that of WireGuard steering, whose key is the receiver index. */
struct instar_tracked {
	/* Bits 0..31 number of the generation, 32..47 handle; one store changes both. */
	__u64 owner;
	/* CLOCK_MONOTONIC nanoseconds: of a packet, refreshed once a second; with
	 * WireGuard, when the index was announced. */
	__u64 seen;
};

struct instar_traffic {
	__u64 packets;
	/* CLOCK_MONOTONIC nanoseconds of the last packet's tick. */
	__u64 last;
};

/* One for each CPU. */
struct instar_counters {
	__u64 verdicts[INSTAR_VERDICTS];
	/* CLOCK_MONOTONIC nanoseconds, refreshed once a tick: jiffies and the time. */
	__u64 tick;
	__u64 now;
	/* Entries that flow steering added to the table of flows. */
	__u64 added;
	struct instar_traffic slots[INSTAR_SLOTS];
};

enum instar_trace {
	/* Octets of a packet, from its UDP or TCP header on, that an event has. */
	INSTAR_TRACE_OCTETS = 72,
};

/* What became of a packet. */
struct instar_event {
	/* CLOCK_MONOTONIC nanoseconds. */
	__u64 time;
	struct instar_peer peer;
	/* Of the packet, from its UDP or TCP header on, and of what is in octets. */
	__u32 length;
	/* slot << 8 | worker, of no meaning with INSTAR_VERDICT_DROP. */
	__u16 handle;
	__u8 captured;
	__u8 verdict;
	__u8 octets[INSTAR_TRACE_OCTETS];
};

/* What a CPU knows of the packet at hand, and how many events found no room. */
struct instar_traced {
	struct instar_event event;
	__u64 lost;
};

#endif
