/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * WireGuard as far as steering needs it: the four messages of its protocol (section 5.4
 * of the white paper; drivers/net/wireguard/messages.h). Pure functions over the first
 * bytes of a datagram.
 */
#ifndef INSTAR_WIREGUARD_H
#define INSTAR_WIREGUARD_H

#include <linux/types.h>

enum {
	/* Bytes of the datagram that are looked at. */
	WIREGUARD_HEAD = 12,

	WIREGUARD_INITIATION = 1,
	WIREGUARD_RESPONSE = 2,
	WIREGUARD_COOKIE = 3,
	WIREGUARD_DATA = 4,

	WIREGUARD_INITIATION_LEN = 148,
	WIREGUARD_RESPONSE_LEN = 92,
	WIREGUARD_COOKIE_LEN = 64,
	/* Header, counter and the tag of an empty packet. */
	WIREGUARD_DATA_MIN = 32,
};

enum wireguard_kind {
	/* Not WireGuard. */
	WIREGUARD_OTHER,
	/* Begins a handshake: for whoever is active. */
	WIREGUARD_INITIATES,
	/* Names its receiver's index. */
	WIREGUARD_NAMES,
};

/* The first bytes, as on the wire. */
struct wireguard_head {
	__u32 w[WIREGUARD_HEAD / 4];
	/* Length of the whole datagram. */
	__u32 len;
};

/* index is as on the wire, little endian. */
static __always_inline enum wireguard_kind wireguard_classify(const struct wireguard_head *h,
							      __u32 *index)
{
	/* One octet of type and three that are zero, little endian as this object is. */
	switch (h->w[0]) {
	case WIREGUARD_INITIATION:
		return h->len == WIREGUARD_INITIATION_LEN ? WIREGUARD_INITIATES : WIREGUARD_OTHER;
	case WIREGUARD_RESPONSE:
		*index = h->w[2]; /* behind the sender's */
		return h->len == WIREGUARD_RESPONSE_LEN ? WIREGUARD_NAMES : WIREGUARD_OTHER;
	case WIREGUARD_COOKIE:
		*index = h->w[1];
		return h->len == WIREGUARD_COOKIE_LEN ? WIREGUARD_NAMES : WIREGUARD_OTHER;
	case WIREGUARD_DATA:
		*index = h->w[1];
		return h->len >= WIREGUARD_DATA_MIN ? WIREGUARD_NAMES : WIREGUARD_OTHER;
	}
	return WIREGUARD_OTHER;
}

#endif
