// SPDX-License-Identifier: Apache-2.0

package connid

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/subtle"
)

// draftPasses is the number of passes of QUIC-LB's general case.
const draftPasses = 4

// lbCipher is the length-preserving cipher of QUIC-LB (section "Server ID
// Encoding in Connection IDs"): AES-128 alone over exactly 16 octets, and over
// any other length a Feistel network with AES-128 as its round function. It
// takes 4 to 19 octets. It is safe for concurrent use.
type lbCipher struct {
	block  cipher.Block
	passes int // of the network; draftPasses on the wire
}

func newLBCipher(key []byte, passes int) (*lbCipher, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return &lbCipher{block: block, passes: passes}, nil
}

func (c *lbCipher) encrypt(b []byte) {
	if len(b) == aes.BlockSize {
		c.block.Encrypt(b, b)
		return
	}
	n := c.split(b)
	for pass := 1; pass <= c.passes; pass++ {
		n.run(pass)
	}
	n.join(b)
}

func (c *lbCipher) decrypt(b []byte) {
	if len(b) == aes.BlockSize {
		c.block.Decrypt(b, b)
		return
	}
	n := c.split(b)
	for pass := c.passes; pass >= 1; pass-- { // each pass is its own inverse
		n.run(pass)
	}
	n.join(b)
}

// network is the state between two passes: the halves of the text, of half
// octets each. Halves of an odd number of octets share the middle one: left has
// its upper four bits, right its lower four.
type network struct {
	block       cipher.Block
	length      int
	half        int
	left, right [aes.BlockSize]byte
	scratch     [aes.BlockSize]byte
}

func (c *lbCipher) split(b []byte) *network {
	n := &network{block: c.block, length: len(b), half: (len(b) + 1) / 2}
	copy(n.left[:n.half], b)
	copy(n.right[:n.half], b[len(b)-n.half:])
	n.clearShared()
	return n
}

func (n *network) join(b []byte) {
	copy(b, n.left[:n.half])
	shared := b[n.half-1]
	copy(b[n.length-n.half:], n.right[:n.half])
	if n.length%2 != 0 {
		b[n.half-1] |= shared
	}
}

// clearShared clears the four bits of each half that belong to the other one.
func (n *network) clearShared() {
	if n.length%2 != 0 {
		n.left[n.half-1] &= 0xf0
		n.right[0] &= 0x0f
	}
}

// run does one pass: odd ones change the right half by the left, even ones the
// left by the right.
func (n *network) run(pass int) {
	from, to := &n.left, &n.right
	if pass%2 == 0 {
		from, to = to, from
	}
	// expand() of the draft: a half, zeros, the length, the pass.
	n.scratch = [aes.BlockSize]byte{14: byte(n.length), 15: byte(pass)}
	copy(n.scratch[:14], from[:n.half])
	n.block.Encrypt(n.scratch[:], n.scratch[:])
	subtle.XORBytes(to[:n.half], to[:n.half], n.scratch[:n.half])
	n.clearShared()
}
