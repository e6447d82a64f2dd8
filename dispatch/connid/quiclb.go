// SPDX-License-Identifier: Apache-2.0

package connid

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/dchest/siphash"
)

// Limits of draft-ietf-quic-load-balancers.
const (
	maxRotation = 6  // 0b111 is reserved
	minServerID = 1  // octets
	minNonce    = 4  // octets
	maxBody     = 19 // octets of server ID and nonce
	lbKeyLen    = 16 // AES-128
)

var (
	// ErrLoadBalancer says what is wrong with a [LoadBalancer].
	ErrLoadBalancer = errors.New("check QUIC-LB configuration")

	// ErrNonceExhausted says that a codec has used each nonce of its QUIC-LB
	// configuration once. Go on with a configuration of another key, or without
	// one.
	ErrNonceExhausted = errors.New("take QUIC-LB nonce: all are used, distribute a configuration with a new key or a longer nonce")

	// ErrUnroutable says that a connection ID is not of the configuration that
	// it was decoded with.
	ErrUnroutable = errors.New("decode QUIC-LB server ID")
)

// LoadBalancer is a server's configuration of QUIC-LB, as
// draft-ietf-quic-load-balancers defines it. In this package the first octet,
// the server ID and the nonce together take 8 to 14 octets. The masked handle
// and the tag follow them as octets for the server's own use, which are within
// the length that the first octet announces; all servers of a configuration
// have to append the same number, six.
//
// # Nonces
//
// The draft forbids a server to use a nonce twice under one key, and in the
// clear form wants nonces that show no relation to each other. So a [Codec]
// counts: from a random number upwards, once through the whole space of
// NonceLen octets, then [ErrNonceExhausted]. In the encrypted form the QUIC-LB
// cipher hides the count. In the clear form the count goes through a
// pseudo-random permutation first: the draft's Feistel network over the nonce
// alone, under a key derived from [Keys], with the twelve passes at which the
// draft's authors hold the known attacks on its four to be blocked. Nonces that
// are merely random would keep the second rule and break the first: among
// 77,000 of four octets two are equal as likely as not, and where one worker
// makes both, its two connections have the same ID.
//
// The processes of a service share the server ID, though: each generation
// counts on its own, and this package stores nothing between them. Splitting the
// space between the slots of generations would not help over the life of a key,
// since slots are used again, and it would exhaust short nonces early. A random
// start is what remains, and it is better than random nonces, by its chance of
// any repetition at all: two processes that make j and k IDs overlap somewhere
// with probability (j+k) / 2^(8*NonceLen). R processes with k IDs each under one
// key do with about R^2 * k / 2^(8*NonceLen):
//
//	NonceLen   2 processes, a million IDs each   1,000 processes, a million IDs each
//	4          1 in 2,100                        certain
//	6          1 in 140 million                  1 in 280
//	8          1 in 9 * 10^12                    1 in 18 million
//
// Choose eight octets where the server ID leaves room for them, and configure
// another key and ConfigRotation before the right-hand number gets near one.
// What a repetition costs is in the package comment; IDs of two processes differ
// even then: by the handle, or by the tag where a slot was used again.
type LoadBalancer struct {
	// ConfigRotation names the configuration to the balancers, 0 to 6. It is
	// the top three bits of each ID.
	ConfigRotation uint8

	// ServerID is what the balancers know this host by: 1 octet or more, all
	// servers of a configuration the same number.
	ServerID []byte

	// NonceLen is the length of the nonce in octets, 4 or more.
	NonceLen int

	// Key encrypts server ID and nonce: 16 octets of AES-128. Nil sends them
	// in the clear, and everybody on the path can then see which host a
	// connection is on, also after the client's address changed.
	Key []byte
}

// check tests the limits of the draft; those of this package are narrower.
func (lb LoadBalancer) check() error {
	switch {
	case lb.ConfigRotation > maxRotation:
		return fmt.Errorf("%w: config rotation is %d, want 0 to %d", ErrLoadBalancer, lb.ConfigRotation, maxRotation)
	case len(lb.ServerID) < minServerID:
		return fmt.Errorf("%w: server ID is empty, want %d octet or more", ErrLoadBalancer, minServerID)
	case lb.NonceLen < minNonce:
		return fmt.Errorf("%w: nonce has %d octets, want %d or more", ErrLoadBalancer, lb.NonceLen, minNonce)
	case lb.NonceLen > maxBody || lb.bodyLen() > maxBody:
		return fmt.Errorf("%w: server ID of %d and nonce of %d octets exceed %d together",
			ErrLoadBalancer, len(lb.ServerID), lb.NonceLen, maxBody)
	case lb.Key != nil && len(lb.Key) != lbKeyLen:
		// An empty key is an error, too: it must not turn encryption off.
		return fmt.Errorf("%w: key has %d octets, want %d, or nil for no encryption", ErrLoadBalancer, len(lb.Key), lbKeyLen)
	}
	return nil
}

func (lb LoadBalancer) bodyLen() int   { return len(lb.ServerID) + lb.NonceLen }
func (lb LoadBalancer) prefixLen() int { return 1 + lb.bodyLen() }

// String shows the configuration without its key.
func (lb LoadBalancer) String() string {
	form := "clear"
	if lb.Key != nil {
		form = "encrypted"
	}
	return fmt.Sprintf("QUIC-LB rotation %d, server ID %x, nonce %d octets, %s", lb.ConfigRotation, lb.ServerID, lb.NonceLen, form)
}

// GoString hides the key from %#v.
func (lb LoadBalancer) GoString() string { return lb.String() }

// DecodeServerID does what a load balancer does with a destination connection
// ID: it returns the server ID in cid. Of lb.ServerID it uses the length only,
// so that one configuration decodes the IDs of all servers; whether the server
// ID that comes out is in use, the caller has to look up. Octets after the
// nonce are ignored, as are the length bits of the first octet. It takes all
// lengths of the draft, up to 19 octets of server ID and nonce.
//
// Errors are [ErrLoadBalancer], and [ErrUnroutable] for an ID that has another
// config rotation or is too short. It prepares the key on each call: good for
// tests and tools, not for a data path.
func (lb LoadBalancer) DecodeServerID(cid []byte) ([]byte, error) {
	if err := lb.check(); err != nil {
		return nil, err
	}
	if len(cid) < lb.prefixLen() {
		return nil, fmt.Errorf("%w: connection ID has %d octets, want %d or more", ErrUnroutable, len(cid), lb.prefixLen())
	}
	if r := cid[0] >> rotationShift; r != lb.ConfigRotation {
		return nil, fmt.Errorf("%w: config rotation is %d, want %d", ErrUnroutable, r, lb.ConfigRotation)
	}
	body := bytes.Clone(cid[1:lb.prefixLen()])
	if lb.Key != nil {
		c, err := newLBCipher(lb.Key, draftPasses)
		if err != nil {
			return nil, err
		}
		c.decrypt(body)
	}
	return body[:len(lb.ServerID)], nil
}

// balancedPrefix makes the octets after the first of a QUIC-LB connection ID.
type balancedPrefix struct {
	serverID []byte
	cipher   *lbCipher // over server ID and nonce; nil in the clear form
	nonces   nonces
}

func newBalancedPrefix(lb LoadBalancer, keys Keys) (*balancedPrefix, error) {
	if err := lb.check(); err != nil {
		return nil, err
	}
	if n := lb.prefixLen(); n < MinPrefixLen || n > MaxPrefixLen {
		return nil, fmt.Errorf("%w: server ID of %d and nonce of %d octets give a prefix of %d, want %d to %d",
			ErrLoadBalancer, len(lb.ServerID), lb.NonceLen, n, MinPrefixLen, MaxPrefixLen)
	}
	p := &balancedPrefix{serverID: bytes.Clone(lb.ServerID)}
	rand.Read(p.nonces.start[:])
	var err error
	if lb.Key != nil {
		p.cipher, err = newLBCipher(lb.Key, draftPasses)
	} else {
		p.nonces.permutation, err = newLBCipher(nonceKey(keys), permutationPasses)
	}
	if err != nil {
		return nil, err
	}
	return p, nil
}

// fill writes server ID and a fresh nonce, which takes the rest of body.
func (p *balancedPrefix) fill(body []byte) error {
	n := copy(body, p.serverID)
	if err := p.nonces.next(body[n:]); err != nil {
		return err
	}
	if p.cipher != nil {
		p.cipher.encrypt(body)
	}
	return nil
}

// counterLen is how many octets of a nonce count; octets in front of them keep
// their random start.
const counterLen = 8

// nonces counts from a random start through all nonces of one length. It is
// safe for concurrent use.
type nonces struct {
	start       [MaxPrefixLen]byte // a nonce takes the octets at the end
	taken       atomic.Uint64
	permutation *lbCipher // nil: the caller encrypts
}

// next writes a nonce that was not written before.
func (s *nonces) next(nonce []byte) error {
	i := s.taken.Add(1) - 1
	if n := len(nonce); n < counterLen && i>>(8*n) != 0 {
		return ErrNonceExhausted
	}
	var buf [MaxPrefixLen]byte
	copy(buf[:], s.start[:])
	counter := buf[len(buf)-counterLen:]
	binary.BigEndian.PutUint64(counter, binary.BigEndian.Uint64(counter)+i)
	copy(nonce, buf[len(buf)-len(nonce):])
	if s.permutation != nil {
		s.permutation.encrypt(nonce)
	}
	return nil
}

// permutationPasses is the number of passes that the draft names as certain to
// block the distinguishing attacks on its four.
const permutationPasses = 12

// nonceKey derives the key of the permutation that hides the count in the clear
// form. All processes of a group have the same one: counts that do not overlap
// stay apart under one permutation, but not under two. The labels are longer
// than any nonce that Codec.hash takes, so their hashes are independent of the
// masks.
func nonceKey(keys Keys) []byte {
	k0, k1 := sipKey(&keys.CID)
	key := make([]byte, 0, lbKeyLen)
	key = binary.LittleEndian.AppendUint64(key, siphash.Hash(k0, k1, []byte("QUIC-LB clear nonce, first half")))
	return binary.LittleEndian.AppendUint64(key, siphash.Hash(k0, k1, []byte("QUIC-LB clear nonce, second half")))
}
