// SPDX-License-Identifier: Apache-2.0

package connid

import (
	"encoding/hex"
	"math/rand/v2"
	"testing"
)

// seeded gives reproducible random octets, so that a statistical test is the
// same in each run.
func seeded(name string) *rand.ChaCha8 {
	var seed [32]byte
	copy(seed[:], name)
	return rand.NewChaCha8(seed)
}

func octets(r *rand.ChaCha8, n int) []byte {
	b := make([]byte, n)
	r.Read(b)
	return b
}

func seededKeys(t testing.TB, r *rand.ChaCha8) Keys {
	t.Helper()
	keys, err := KeysFromBytes(octets(r, KeysLen))
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func mustNew(t testing.TB, keys Keys, lb *LoadBalancer) *Codec {
	t.Helper()
	c, err := New(keys, lb)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// codecOfPrefixLen makes a codec with a prefix of n octets.
func codecOfPrefixLen(t testing.TB, keys Keys, n int) *Codec {
	t.Helper()
	c := mustNew(t, keys, &LoadBalancer{ServerID: make([]byte, n-1-minNonce), NonceLen: minNonce, Key: make([]byte, lbKeyLen)})
	if c.PrefixLen() != n {
		t.Fatalf("prefix of %d octets, want %d", c.PrefixLen(), n)
	}
	return c
}

// always is a table in which one generation owns every slot.
func always(generation uint32) func(Handle) uint32 {
	return func(Handle) uint32 { return generation }
}
