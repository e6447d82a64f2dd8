// SPDX-License-Identifier: Apache-2.0

package connid

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/dchest/siphash"
)

// KeysLen is the length of encoded [Keys] in octets.
const KeysLen = 48

// ErrKeys says that keys have the wrong length or were never set.
var ErrKeys = errors.New("use connection-ID keys")

// Keys are the secrets of the connection IDs of one group of sockets. All
// generations of the group share them. They have to be independent and
// uniformly random, for instance 48 octets of HKDF output; the zero value is
// refused.
type Keys struct {
	CID           [16]byte // SipHash-2-4 key of the mask and the pad
	MulHandle     uint64   // multiplier of the handle and the first octet
	MulGeneration uint64   // multiplier of the generation
	Affinity      [16]byte // SipHash-2-4 key of AffinityHash
}

// KeysFromBytes decodes [KeysLen] octets: CID (16), MulHandle (8,
// little-endian), MulGeneration (8, little-endian), Affinity (16).
func KeysFromBytes(b []byte) (Keys, error) {
	if len(b) != KeysLen {
		return Keys{}, fmt.Errorf("%w: got %d octets, want %d", ErrKeys, len(b), KeysLen)
	}
	k := Keys{
		CID:           [16]byte(b[:16]),
		MulHandle:     binary.LittleEndian.Uint64(b[16:]),
		MulGeneration: binary.LittleEndian.Uint64(b[24:]),
		Affinity:      [16]byte(b[32:]),
	}
	return k, k.check()
}

// check refuses a part that is zero. Random keys hit that once in 2^63; keys
// that nobody filled in always do.
func (k Keys) check() error {
	if k.CID == [16]byte{} || k.MulHandle == 0 || k.MulGeneration == 0 || k.Affinity == [16]byte{} {
		return fmt.Errorf("%w: a part is all zero, derive all of them from the group's secret", ErrKeys)
	}
	return nil
}

// String hides the keys from logs.
func (k Keys) String() string { return "connid.Keys(secret)" }

// GoString hides the keys from %#v.
func (k Keys) GoString() string { return k.String() }

// affinityOctets is how much of a DCID enters the affinity hash: the longest
// connection ID of QUIC version 1. Longer ones of later versions are told apart
// by their first octets and their length only.
const affinityOctets = 20

// AffinityHash is a keyed hash of a client's own destination connection ID. It
// brings all packets of a handshake to one socket while the server has not yet
// given the client an ID; without the key nobody can aim at a socket, or make
// two handshakes collide. It is SipHash-2-4 under Keys.Affinity of 23 octets:
// the first 20 of dcid, padded with zeros to 22, and its length, 255 at most.
func (k Keys) AffinityHash(dcid []byte) uint64 {
	var m [23]byte
	copy(m[:affinityOctets], dcid)
	m[22] = byte(min(len(dcid), 255))
	k0, k1 := sipKey(&k.Affinity)
	return siphash.Hash(k0, k1, m[:])
}

// sipKey gives the halves of a SipHash key, little-endian as in the paper.
func sipKey(k *[16]byte) (k0, k1 uint64) {
	return binary.LittleEndian.Uint64(k[:8]), binary.LittleEndian.Uint64(k[8:])
}
