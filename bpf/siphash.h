/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* SipHash-2-4 (Aumasson and Bernstein, 2012), by the block. Pure. */
#ifndef INSTAR_SIPHASH_H
#define INSTAR_SIPHASH_H

#include <linux/types.h>

struct siphash {
	__u64 v0, v1, v2, v3;
};

static __always_inline __u64 rotl64(__u64 x, int bits)
{
	return x << bits | x >> (64 - bits);
}

static __always_inline void siphash_round(struct siphash *s)
{
	s->v0 += s->v1;
	s->v2 += s->v3;
	s->v1 = rotl64(s->v1, 13) ^ s->v0;
	s->v3 = rotl64(s->v3, 16) ^ s->v2;
	s->v0 = rotl64(s->v0, 32);
	s->v2 += s->v1;
	s->v0 += s->v3;
	s->v1 = rotl64(s->v1, 17) ^ s->v2;
	s->v3 = rotl64(s->v3, 21) ^ s->v0;
	s->v2 = rotl64(s->v2, 32);
}

static __always_inline void siphash_start(struct siphash *s, __u64 k0, __u64 k1)
{
	s->v0 = k0 ^ 0x736f6d6570736575ULL;
	s->v1 = k1 ^ 0x646f72616e646f6dULL;
	s->v2 = k0 ^ 0x6c7967656e657261ULL;
	s->v3 = k1 ^ 0x7465646279746573ULL;
}

static __always_inline void siphash_block(struct siphash *s, __u64 block)
{
	s->v3 ^= block;
	siphash_round(s);
	siphash_round(s);
	s->v0 ^= block;
}

/* last: the message's last bytes (fewer than eight) and its length above them. */
static __always_inline __u64 siphash_end(struct siphash *s, __u64 last)
{
	siphash_block(s, last);
	s->v2 ^= 0xff;
	siphash_round(s);
	siphash_round(s);
	siphash_round(s);
	siphash_round(s);
	return s->v0 ^ s->v1 ^ s->v2 ^ s->v3;
}

#endif
