// SPDX-License-Identifier: Apache-2.0

package connid

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/dchest/siphash"
)

// Lengths in octets.
const (
	MinPrefixLen = 8                         // first octet and 56 bits; the prefix without a load balancer
	MaxPrefixLen = MaxLen - trailerLen       // first octet, server ID and nonce of the longest QUIC-LB prefix
	MaxLen       = 20                        // longest connection ID of QUIC version 1 (RFC 9000, section 17.2)
	DefaultLen   = MinPrefixLen + trailerLen // an ID without a load balancer

	handleLen  = 2
	tagLen     = 4
	trailerLen = handleLen + tagLen
)

// The first octet (QUIC-LB, section "First CID octet").
const (
	rotationShift    = 5
	rotationUnrouted = 0b111                // reserved: no configuration, the balancer cannot route by the ID
	lengthMask       = 1<<rotationShift - 1 // octets of the ID after the first
)

var (
	// ErrGeneration says that an ID was asked for in generation 0, which no
	// process has and which never verifies.
	ErrGeneration = errors.New("seal connection ID: generation is 0, numbers start at 1")

	// ErrPrefix says that a prefix does not fit the codec.
	ErrPrefix = errors.New("seal connection ID")
)

// Codec makes and opens the connection IDs of one group of sockets. Make it
// with [New]. It is safe for concurrent use.
type Codec struct {
	keys      Keys
	cid0      uint64 // halves of keys.CID
	cid1      uint64
	prefixLen int
	first     byte
	balanced  *balancedPrefix // nil: the prefix is random
}

// New makes a codec. With lb nil there is no load balancer: IDs have
// [DefaultLen] octets and config rotation 0b111. With lb they start with a
// QUIC-LB connection ID of that configuration, which has to take
// [MinPrefixLen] to [MaxPrefixLen] octets; lb is copied.
//
// A process makes one codec for a group and shares it between its workers: the
// codec counts the nonces of QUIC-LB. Errors are [ErrKeys] and
// [ErrLoadBalancer].
func New(keys Keys, lb *LoadBalancer) (*Codec, error) {
	if err := keys.check(); err != nil {
		return nil, err
	}
	c := &Codec{keys: keys, prefixLen: MinPrefixLen}
	c.cid0, c.cid1 = sipKey(&keys.CID)
	rotation := byte(rotationUnrouted)
	if lb != nil {
		p, err := newBalancedPrefix(*lb, keys)
		if err != nil {
			return nil, err
		}
		c.balanced, c.prefixLen, rotation = p, lb.prefixLen(), lb.ConfigRotation
	}
	c.first = rotation<<rotationShift | byte(c.Len()-1)
	return c, nil
}

// Len is the length of every ID of this codec in octets.
func (c *Codec) Len() int { return c.prefixLen + trailerLen }

// PrefixLen is the length of the part before the masked handle in octets.
func (c *Codec) PrefixLen() int { return c.prefixLen }

// FirstOctet is the first octet of the IDs that Append makes: config rotation
// and Len()-1.
func (c *Codec) FirstOctet() byte { return c.first }

// Append appends a new ID of the socket h, in the given generation of its slot,
// to dst. It never gives the same ID twice, but by the chance that the package
// comment and [LoadBalancer] put into numbers. It does not allocate when dst
// has room for Len() octets and there is no load balancer; with one it makes
// small allocations for AES. Errors are [ErrGeneration] and
// [ErrNonceExhausted], and dst comes back as it was.
func (c *Codec) Append(dst []byte, h Handle, generation uint32) ([]byte, error) {
	if generation == 0 {
		return dst, ErrGeneration
	}
	start := len(dst)
	dst = slices.Grow(dst, c.Len())
	prefix := dst[start : start+c.prefixLen]
	prefix[0] = c.first
	if c.balanced == nil {
		rand.Read(prefix[1:]) // never fails: it ends the process instead
	} else if err := c.balanced.fill(prefix[1:]); err != nil {
		return dst, err
	}
	return c.seal(dst[:start+c.prefixLen], prefix, h, generation), nil
}

// Seal returns the ID of the socket h under a given prefix. It is
// deterministic, for tests and tools: the same octets after the first must not
// be sealed twice under one key, which is what Append sees to. The prefix has
// to have PrefixLen octets and the length bits of this codec, else the error is
// [ErrPrefix]; its rotation bits are free. For generation 0 it is
// [ErrGeneration].
func (c *Codec) Seal(prefix []byte, h Handle, generation uint32) ([]byte, error) {
	if generation == 0 {
		return nil, ErrGeneration
	}
	if len(prefix) != c.prefixLen {
		return nil, fmt.Errorf("%w: prefix has %d octets, want %d", ErrPrefix, len(prefix), c.prefixLen)
	}
	if !c.lengthFits(prefix[0]) {
		return nil, fmt.Errorf("%w: first octet %#02x announces %d octets after it, want %d",
			ErrPrefix, prefix[0], prefix[0]&lengthMask, c.Len()-1)
	}
	return c.seal(append(make([]byte, 0, c.Len()), prefix...), prefix, h, generation), nil
}

// Open returns the socket that cid names and whether cid is authentic: made
// with these keys for the generation that owns the slot now. generation gives
// the number of the generation that a handle belongs to, or 0 where there is
// none, which never verifies; it is called with any of the 65,536 handles,
// since that of a foreign ID is random.
//
// The length and the five length bits have to be right. The three bits of
// config rotation are taken as they are, because IDs of a former balancer
// configuration live on; they are under the tag.
func (c *Codec) Open(cid []byte, generation func(Handle) uint32) (Handle, bool) {
	if len(cid) != c.Len() || !c.lengthFits(cid[0]) {
		return 0, false
	}
	prefix, trailer := cid[:c.prefixLen], cid[c.prefixLen:]
	sum := c.hash(prefix)
	h := Handle(binary.BigEndian.Uint16(trailer) ^ uint16(sum))
	g := generation(h)
	if g == 0 || binary.BigEndian.Uint32(trailer[handleLen:]) != c.tag(sum, prefix[0], h, g) {
		return 0, false
	}
	return h, true
}

func (c *Codec) lengthFits(first byte) bool { return int(first&lengthMask) == c.Len()-1 }

// seal appends the masked handle and the tag that belong to prefix.
func (c *Codec) seal(dst, prefix []byte, h Handle, generation uint32) []byte {
	sum := c.hash(prefix)
	dst = binary.BigEndian.AppendUint16(dst, uint16(h)^uint16(sum))
	return binary.BigEndian.AppendUint32(dst, c.tag(sum, prefix[0], h, generation))
}

// hash is H: its low 16 bits mask the handle, its high 32 bits are the pad of
// the tag. The first octet stays out, so that the default prefix is a single
// block of SipHash; it is under the tag.
func (c *Codec) hash(prefix []byte) uint64 { return siphash.Hash(c.cid0, c.cid1, prefix[1:]) }

// tag is the pad of sum plus the universal hash F of what is authenticated.
func (c *Codec) tag(sum uint64, first byte, h Handle, generation uint32) uint32 {
	f := c.keys.MulHandle*(uint64(h)|uint64(first)<<16) + c.keys.MulGeneration*uint64(generation)
	return uint32(sum>>32) + uint32(f>>32)
}
