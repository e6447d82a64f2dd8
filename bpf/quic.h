/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * QUIC as far as steering needs it: the version-independent header (RFC 8999)
 * and the connection IDs that we make. Pure functions over the first bytes of a
 * datagram; the Go twin is dispatch/connid.
 */
#ifndef INSTAR_QUIC_H
#define INSTAR_QUIC_H

#include <linux/types.h>
#include <stdbool.h>
#include <bpf/bpf_endian.h>

#include "abi.h"
#include "siphash.h"

enum {
	/* Bytes of the datagram that are looked at: long header, version, length,
	 * and a connection ID of 20 bytes take 26. */
	QUIC_HEAD = 32,
	QUIC_LONG = 0x80,
	/* Offset of the Destination Connection ID, RFC 8999 sections 5.1, 5.2. */
	QUIC_SHORT_DCID = 1,
	QUIC_LONG_DCID = 6,
	/* Bytes of a connection ID that the affinity hash takes; versions 1 and 2
	 * allow no more (RFC 9000 section 17.2). */
	QUIC_AFFINITY_BYTES = 20,
};

/* The first bytes of a datagram, little endian, zeros behind its end. */
struct quic_head {
	__u64 w[QUIC_HEAD / 8];
	/* Length of the whole datagram. */
	__u32 len;
};

enum quic_kind {
	QUIC_INVALID,
	/* Made by this group. */
	QUIC_OURS,
	/* A long header with somebody else's DCID: a handshake. */
	QUIC_FOREIGN_LONG,
	/* A short header with somebody else's DCID. */
	QUIC_FOREIGN_SHORT,
};

struct quic_class {
	__u32 kind;
	bool is_long;
	__u8 slot;
	__u8 worker;
};

/* Eight bytes from offset; offset + 8 <= QUIC_HEAD. */
static __always_inline __u64 quic_bytes(const struct quic_head *h, __u32 offset)
{
	__u32 i = offset / 8, shift = offset % 8 * 8;

	if (!shift)
		return h->w[i & 3];
	return h->w[i & 3] >> shift | h->w[(i + 1) & 3] << (64 - shift);
}

/* The low n bytes of x; n <= 8. */
static __always_inline __u64 quic_low(__u64 x, __u32 n)
{
	return n >= 8 ? x : x & ((1ULL << n * 8) - 1);
}

/*
 * Opens the connection ID at offset: prefix octets, masked handle, tag. One
 * SipHash of the prefix behind its first octet gives the mask and the pad; the
 * handle, the first octet and the generation's number go through a multilinear
 * hash. The argument for its security is in dispatch/connid.
 *
 * True with the handle when the tag is that of the generation that has or last
 * had the handle's slot.
 */
static __always_inline bool quic_open(const struct quic_head *h, __u32 offset, __u32 octets,
				      const struct instar_secrets *key,
				      const struct instar_slot *slots, __u32 workers,
				      struct quic_class *out)
{
	__u32 first = quic_bytes(h, offset) & 0xff;
	struct siphash s;
	__u64 trailer, hash, sum;
	__u32 handle, number;

	if ((first & 0x1f) != octets + INSTAR_CID_TRAILER - 1)
		return false;

	siphash_start(&s, key->cid[0], key->cid[1]);
	if (octets == INSTAR_PREFIX_MIN) {
		hash = siphash_end(&s, quic_low(quic_bytes(h, offset + 1), 7) | 7ULL << 56);
	} else {
		siphash_block(&s, quic_bytes(h, offset + 1));
		hash = siphash_end(&s, quic_low(quic_bytes(h, offset + 9), octets - 9) |
					       (__u64)(octets - 1) << 56);
	}

	trailer = quic_bytes(h, offset + octets);
	handle = (bpf_ntohs((__u16)trailer) ^ hash) & 0xffff;
	out->slot = handle >> 8;
	out->worker = handle & 0xff;
	number = slots[out->slot].number;
	sum = key->mul_handle * (handle | first << 16) + key->mul_generation * number;
	return bpf_ntohl((__u32)(trailer >> 16)) == (__u32)(hash >> 32) + (__u32)(sum >> 32) &&
	       number != 0 && out->worker < workers;
}

/* Tells what the datagram is to us. octets: length of our prefixes. */
static __always_inline void quic_classify(const struct quic_head *h, __u32 octets,
					  const struct instar_secrets *key,
					  const struct instar_slot *slots, __u32 workers,
					  struct quic_class *out)
{
	__u32 dcid_len;

	if (!(h->w[0] & QUIC_LONG)) {
		out->is_long = false;
		out->kind = QUIC_FOREIGN_SHORT;
		if (h->len < 1) {
			out->kind = QUIC_INVALID;
			return;
		}
		if (h->len < QUIC_SHORT_DCID + octets + INSTAR_CID_TRAILER)
			return;
		if (quic_open(h, QUIC_SHORT_DCID, octets, key, slots, workers, out))
			out->kind = QUIC_OURS;
		return;
	}

	out->is_long = true;
	out->kind = QUIC_FOREIGN_LONG;
	dcid_len = h->w[0] >> 40 & 0xff;
	if (h->len < QUIC_LONG_DCID || h->len < QUIC_LONG_DCID + dcid_len) {
		out->kind = QUIC_INVALID;
		return;
	}
	if (dcid_len == octets + INSTAR_CID_TRAILER &&
	    quic_open(h, QUIC_LONG_DCID, octets, key, slots, workers, out))
		out->kind = QUIC_OURS;
}

/*
 * Keyed hash of a long header's DCID: SipHash-2-4 of 23 bytes, the first 20 of
 * the DCID padded with zeros to 22, then its length.
 */
static __always_inline __u64 quic_affinity(const struct quic_head *h,
					   const struct instar_secrets *key)
{
	__u32 len = h->w[0] >> 40 & 0xff;
	__u32 n = len < QUIC_AFFINITY_BYTES ? len : QUIC_AFFINITY_BYTES;
	struct siphash s;

	siphash_start(&s, key->affinity[0], key->affinity[1]);
	siphash_block(&s, quic_low(quic_bytes(h, QUIC_LONG_DCID), n));
	siphash_block(&s, quic_low(quic_bytes(h, QUIC_LONG_DCID + 8), n > 8 ? n - 8 : 0));
	return siphash_end(&s, quic_low(quic_bytes(h, QUIC_LONG_DCID + 16), n > 16 ? n - 16 : 0) |
				       (__u64)len << 48 | 23ULL << 56);
}

#endif
