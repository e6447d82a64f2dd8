// SPDX-License-Identifier: Apache-2.0

// Package connid makes and reads QUIC connection IDs that name a socket.
//
// A server that is several processes, or several sockets of one process, has
// to bring each packet to the socket that holds its connection. The connection
// ID is the only field of a QUIC packet that survives a change of the client's
// address, and the server chooses it. Here it carries a [Handle], the slot and
// the worker of the socket, masked so that nobody on the path can read it and
// authenticated so that a client cannot make one up:
//
//	prefix (8 to 14 octets) | masked handle (2) | tag (4)
//
// that is 14 octets by default and never more than the 20 that QUIC version 1
// allows. The first octet of the prefix is the one of QUIC-LB
// (draft-ietf-quic-load-balancers): three bits of config rotation, 0b111 where
// there is no load balancer, and five bits with the number of octets of the ID
// that follow. The other octets of the prefix are random or, with a
// [LoadBalancer], the rest of a QUIC-LB connection ID, so that a balancer in
// front of the host finds the host by the prefix and the host finds the socket
// by the whole. To QUIC-LB the masked handle and the tag are the additional
// octets that a server may append for its own use.
//
// The package is pure: it holds no descriptor, starts no goroutine and touches
// no kernel interface. A program in the kernel computes the same functions on
// each packet; the vectors in testdata hold the two together. A [Codec] is safe
// for concurrent use.
//
// # The computation
//
// All numbers are unsigned; sums and products are modulo 2^64, the tag modulo
// 2^32. One evaluation of SipHash-2-4 both masks and authenticates:
//
//	H      = SipHash-2-4(Keys.CID, prefix[1:])
//	masked = handle XOR low16(H)
//	F      = high32(MulHandle*(handle | firstOctet<<16) + MulGeneration*generation)
//	tag    = high32(H) + F
//
// The handle and the tag are written big-endian. The generation is the number
// of the process instance that made the ID; it is not in the ID, and whoever
// opens an ID knows which generation owns each slot.
//
// # Security
//
// This is a Wegman-Carter authenticator: F is a universal hash of the message
// (first octet, handle, generation), and a pad that is used once, high32(H),
// hides it. prefix[1:] is the nonce. The argument below takes SipHash-2-4 for a
// pseudo-random function with 64 bits of output, and the four fields of [Keys]
// for independent and uniformly random; the advantage of an attacker against
// SipHash adds to each bound. Write x for handle | firstOctet<<16, below 2^24,
// and g for the generation, below 2^32.
//
// Unlinkability (RFC 9000, section 5.1). As long as nonces differ, the values
// H of different IDs are independent and uniform. The mask and the pad are
// disjoint bits of H. So the six octets after the prefix are uniform and
// independent of the handle, of the generation, of the multipliers and of
// every other ID: no statistic over any number of IDs, of one connection or of
// many, tells which worker they belong to. Two things stay visible. The first
// octet is the same for a whole deployment, as QUIC-LB wants it. And a QUIC-LB
// prefix in its clear form shows the server ID, which is the choice of whoever
// configures the balancer without a key; then IDs are linkable to the host,
// though still not to the worker.
//
// Made-up IDs. Take an ID whose nonce was never issued: one that a client chose
// at random for its Initial packet, or one made to deceive. H of that nonce is
// uniform and independent of all that the attacker has seen, and so is the tag
// that would be right. One attempt succeeds with probability 2^-32, and only
// where the handle that comes out, itself uniform, has a live generation; q
// attempts succeed with probability at most q * 2^-32. A wrong length or a
// wrong first octet is refused before that.
//
// Adapted IDs. Take an issued ID of message (x, g), whose masked handle, first
// octet or tag the attacker changes, so that it stands for (x', g'), g' being
// the generation that now owns the slot. If the message stays the same, then
// only the tag that was issued is right. Otherwise the forgery passes when the
// change of the tag equals F(x', g') - F(x, g) modulo 2^32. Everything issued
// is independent of the multipliers, since each pad is used once, so they are
// still uniform for the attacker. Let
//
//	D = MulHandle*(x'-x) + MulGeneration*(g'-g)   modulo 2^64
//
// and let 2^t be the highest power of two that divides both differences; t is
// at most 31, since one of them is not zero and both are below 2^32. D is then
// uniform over the multiples of 2^t, and high32(D) uniform over all 2^32
// values. Taking the high half of the two sums loses a carry of one at most:
// F(x', g') - F(x, g) is high32(D) or high32(D)+1. Two values of D's upper half
// fit any change of the tag, so an attempt succeeds with probability at most
// 2 * 2^-32 = 2^-31, and q attempts with at most q * 2^-31. (This is the
// multilinear hash of Dietzfelbinger and of Lemire and Kaser without its
// additive constant. The pad stands in for the upper half of the constant; that
// the lower half is missing is the factor of two. Between two messages of one
// odd generation the factor is not there: MulGeneration*g is then uniform and
// independent of D, the carry depends on the low half of D only, and its two
// cases add up to 2^-32.)
//
// Old IDs. A slot is used again by a later generation g' with g' != g. The ID
// of the former one verifies only if F(x, g') = F(x, g), the case above with an
// unchanged tag: at most 2^-31, over the choice of the keys, for each handle
// and pair of generations. An ID of a process that is gone does not reach the
// process that got its slot.
//
// After a success. The bounds are for the first forgery. It tells one
// difference of F, which holds for all IDs of the same two messages, and by
// linearity nearly tells the differences of other handles: from then on, take
// it that the attacker can move IDs that he sees to any worker. At a million
// packets a second, with every answer observed, 2^31 attempts take 36 minutes.
//
// A repeated nonce. Seven random octets repeat by chance: N IDs under one key
// contain about N^2 / 2^57 repeating pairs, so that one is to be expected near
// N = 2^28.5, 380 million IDs (for the nonces of QUIC-LB see [LoadBalancer]).
// An attacker who happens to see both IDs of a pair learns the XOR of their
// handles, and with it whether they belong to the same socket, and one
// difference of F, as after a success: he could then send packets with an ID of
// his own, altered, to another worker. No other ID becomes readable by it.
//
// What depends on it. An ID is a routing hint and authenticates nobody: whoever
// saw one can send it again, and it verifies for as long as its generation owns
// the slot. What a forged ID buys is a packet at another socket of the same
// service, which does not know the ID and answers it like any unknown one. That
// is no oracle for stateless resets (RFC 9000, section 21.11), even where all
// sockets share the reset key: the token in the answer belongs to the altered
// ID, and an unaltered one goes where its connection is. The secrecy and
// integrity of a connection are QUIC's own packet protection and do not rest on
// this package.
//
// Comparing tags needs no constant time. They are compared as one 32-bit
// number, so there is no position of a first difference to measure, and whether
// an ID verified is no secret: the sender can see who answers.
package connid
