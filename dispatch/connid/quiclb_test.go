// SPDX-License-Identifier: Apache-2.0

package connid

import (
	"bytes"
	"encoding/binary"
	"errors"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

func TestLoadBalancerLimits(t *testing.T) {
	keys := seededKeys(t, seeded("limits"))
	key := make([]byte, lbKeyLen)
	id := func(n int) []byte { return make([]byte, n) }
	tests := []struct {
		name   string
		lb     LoadBalancer
		codec  bool // this package can make IDs of it
		decode bool // the draft allows it
	}{
		{"shortest", LoadBalancer{ServerID: id(3), NonceLen: 4}, true, true},
		{"shortest server ID", LoadBalancer{ServerID: id(1), NonceLen: 6}, true, true},
		{"longest", LoadBalancer{ConfigRotation: 6, ServerID: id(9), NonceLen: 4, Key: key}, true, true},
		{"too short for 56 bits", LoadBalancer{ServerID: id(2), NonceLen: 4}, false, true},
		{"no room for handle and tag", LoadBalancer{ServerID: id(10), NonceLen: 4}, false, true},
		{"longest of the draft", LoadBalancer{ServerID: id(1), NonceLen: 18}, false, true},
		{"too long", LoadBalancer{ServerID: id(2), NonceLen: 18}, false, false},
		{"far too long", LoadBalancer{ServerID: id(1), NonceLen: int(^uint(0) >> 1)}, false, false},
		{"reserved rotation", LoadBalancer{ConfigRotation: 7, ServerID: id(3), NonceLen: 8}, false, false},
		{"rotation of four bits", LoadBalancer{ConfigRotation: 8, ServerID: id(3), NonceLen: 8}, false, false},
		{"no server ID", LoadBalancer{NonceLen: 8}, false, false},
		{"short nonce", LoadBalancer{ServerID: id(6), NonceLen: 3}, false, false},
		{"negative nonce", LoadBalancer{ServerID: id(9), NonceLen: -1}, false, false},
		{"empty key", LoadBalancer{ServerID: id(3), NonceLen: 8, Key: []byte{}}, false, false},
		{"short key", LoadBalancer{ServerID: id(3), NonceLen: 8, Key: key[:15]}, false, false},
		{"AES-256 key", LoadBalancer{ServerID: id(3), NonceLen: 8, Key: id(32)}, false, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, err := New(keys, &tt.lb)
			if tt.codec != (err == nil) || err != nil && !errors.Is(err, ErrLoadBalancer) {
				t.Errorf("New: %v", err)
			}
			if (c == nil) != (err != nil) {
				t.Errorf("New: codec %v with error %v", c, err)
			}
			cid := make([]byte, MaxLen)
			cid[0] = tt.lb.ConfigRotation << rotationShift
			_, err = tt.lb.DecodeServerID(cid)
			if tt.decode != (err == nil) || err != nil && !errors.Is(err, ErrLoadBalancer) {
				t.Errorf("DecodeServerID: %v", err)
			}
		})
	}
}

func TestNewCopiesTheConfiguration(t *testing.T) {
	lb := LoadBalancer{ServerID: []byte{1, 2, 3}, NonceLen: 8, Key: bytes.Repeat([]byte{7}, lbKeyLen)}
	before := LoadBalancer{ServerID: bytes.Clone(lb.ServerID), NonceLen: 8, Key: bytes.Clone(lb.Key)}
	c := mustNew(t, seededKeys(t, seeded("copy")), &lb)
	clear(lb.ServerID)
	clear(lb.Key)
	cid, err := c.Append(nil, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	if id, err := before.DecodeServerID(cid); err != nil || !bytes.Equal(id, before.ServerID) {
		t.Errorf("server ID %x, %v, want %x", id, err, before.ServerID)
	}
}

func TestDecodeServerIDUnroutable(t *testing.T) {
	lb := LoadBalancer{ConfigRotation: 2, ServerID: []byte{9, 9, 9}, NonceLen: 4}
	routable := []byte{2 << 5, 1, 2, 3, 4, 5, 6, 7}
	if id, err := lb.DecodeServerID(routable); err != nil || !bytes.Equal(id, []byte{1, 2, 3}) {
		t.Errorf("server ID %x, %v, want 010203", id, err)
	}
	for name, cid := range map[string][]byte{
		"empty":          nil,
		"too short":      routable[:7],
		"other rotation": append([]byte{3 << 5}, routable[1:]...),
		"no rotation":    append([]byte{7 << 5}, routable[1:]...),
	} {
		if id, err := lb.DecodeServerID(cid); !errors.Is(err, ErrUnroutable) || id != nil {
			t.Errorf("%s: %x, %v, want ErrUnroutable", name, id, err)
		}
	}

	lb.Key = make([]byte, lbKeyLen)
	cid := bytes.Clone(routable)
	if _, err := lb.DecodeServerID(cid); err != nil || !bytes.Equal(cid, routable) {
		t.Errorf("decoding changed its argument to %x, or failed: %v", cid, err)
	}
}

// TestCipherProperties: for each length of the draft the cipher is a
// permutation that depends on each of its bits.
func TestCipherProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		length := rapid.IntRange(minNonce, maxBody).Draw(t, "length")
		plain := rapid.SliceOfN(rapid.Byte(), length, length).Draw(t, "plain")
		passes := rapid.SampledFrom([]int{draftPasses, permutationPasses}).Draw(t, "passes")
		c, err := newLBCipher(rapid.SliceOfN(rapid.Byte(), lbKeyLen, lbKeyLen).Draw(t, "key"), passes)
		if err != nil {
			t.Fatal(err)
		}
		text := bytes.Clone(plain)
		c.encrypt(text)
		other := bytes.Clone(plain)
		bit := rapid.IntRange(0, length*8-1).Draw(t, "bit")
		other[bit/8] ^= 1 << (bit % 8)
		c.encrypt(other)
		if bytes.Equal(text, other) {
			t.Fatalf("two texts have one ciphertext")
		}
		c.decrypt(text)
		if !bytes.Equal(text, plain) {
			t.Fatalf("decrypts to %x, want %x", text, plain)
		}
	})
}

// TestCipherIsAPermutation tries every text of two octets, and all of three
// octets that start with zero. (QUIC-LB has four or more; the network is the
// same.)
func TestCipherIsAPermutation(t *testing.T) {
	for _, length := range []int{2, 3} {
		c, err := newLBCipher(octets(seeded("permutation"), lbKeyLen), draftPasses)
		if err != nil {
			t.Fatal(err)
		}
		seen := make(map[string]bool)
		for i := range 1 << 16 {
			text := make([]byte, length)
			binary.BigEndian.PutUint16(text[length-2:], uint16(i))
			c.encrypt(text)
			seen[string(text)] = true
		}
		if len(seen) != 1<<16 {
			t.Errorf("length %d: %d ciphertexts of %d texts", length, len(seen), 1<<16)
		}
	}
}

// TestNoncesDoNotRepeat: 300,000 IDs with the shortest nonce have as many
// prefixes. Random ones of this length would repeat ten times.
func TestNoncesDoNotRepeat(t *testing.T) {
	keys := seededKeys(t, seeded("nonces"))
	for name, key := range map[string][]byte{"clear": nil, "encrypted": make([]byte, lbKeyLen)} {
		t.Run(name, func(t *testing.T) {
			c := mustNew(t, keys, &LoadBalancer{ServerID: []byte{1, 2, 3}, NonceLen: 4, Key: key})
			const n = 300_000
			seen := make(map[[MinPrefixLen]byte]struct{}, n)
			buf := make([]byte, 0, MaxLen)
			for range n {
				cid, err := c.Append(buf, 1, 1)
				if err != nil {
					t.Fatal(err)
				}
				seen[[MinPrefixLen]byte(cid)] = struct{}{}
			}
			if len(seen) != n {
				t.Errorf("%d different prefixes in %d", len(seen), n)
			}
		})
	}
}

// TestNonceSpace: the count uses all nonces of its length once, whatever the
// start, and then stops for good.
func TestNonceSpace(t *testing.T) {
	var s nonces
	for i := range s.start {
		s.start[i] = 0xff // wraps at once
	}
	s.taken.Store(1<<32 - 2)
	next := func(n int) ([]byte, error) {
		b := make([]byte, n)
		err := s.next(b)
		return b, err
	}
	for _, want := range []uint32{0xfffffffd, 0xfffffffe} {
		if got, err := next(4); err != nil || binary.BigEndian.Uint32(got) != want {
			t.Errorf("nonce %x, %v, want %x", got, err, want)
		}
	}
	for range 3 {
		if _, err := next(4); !errors.Is(err, ErrNonceExhausted) {
			t.Errorf("error is %v, want ErrNonceExhausted", err)
		}
	}

	s.taken.Store(1<<56 - 1)
	if got, err := next(7); err != nil || !bytes.Equal(got, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe}) {
		t.Errorf("last nonce of seven octets is %x, %v", got, err)
	}
	if _, err := next(7); !errors.Is(err, ErrNonceExhausted) {
		t.Errorf("seven octets: error is %v, want ErrNonceExhausted", err)
	}

	s.taken.Store(1 << 60)
	got, err := next(12)
	want := append(bytes.Repeat([]byte{0xff}, 4), 0x0f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("nonce of twelve octets is %x, %v, want %x", got, err, want)
	}
}

// TestConcurrentNonces: goroutines that count at the same time get all numbers
// from the start on, each once.
func TestConcurrentNonces(t *testing.T) {
	const takers, each = 4, 100_000
	var s nonces
	got := make([][]uint32, takers)
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i := range takers {
		wg.Go(func() {
			var b [4]byte
			<-start
			for range each {
				if err := s.next(b[:]); err != nil {
					t.Error(err)
					return
				}
				got[i] = append(got[i], binary.BigEndian.Uint32(b[:]))
			}
		})
	}
	close(start)
	wg.Wait()
	seen := make([]bool, takers*each)
	for _, numbers := range got {
		for _, n := range numbers {
			if n >= takers*each || seen[n] {
				t.Fatalf("%d was taken twice, or is too large", n)
			}
			seen[n] = true
		}
	}
}

// TestNonceExhaustionLeavesTheBuffer: Append gives back what it was given.
func TestNonceExhaustionLeavesTheBuffer(t *testing.T) {
	c := mustNew(t, seededKeys(t, seeded("exhaustion")), &LoadBalancer{ServerID: []byte{1, 2, 3}, NonceLen: 4})
	c.balanced.nonces.taken.Store(1 << 32)
	if got, err := c.Append([]byte("head"), 1, 1); !errors.Is(err, ErrNonceExhausted) || string(got) != "head" {
		t.Errorf("%q, %v, want the head and ErrNonceExhausted", got, err)
	}
}

// TestClearNoncesShowNoOrder: nonces that follow each other differ in half of
// their bits, as random ones do; the count itself would differ in two.
func TestClearNoncesShowNoOrder(t *testing.T) {
	const n = 50_000
	for nonceLen := minNonce; nonceLen <= MaxPrefixLen-1-minServerID; nonceLen++ {
		serverID := make([]byte, max(1, MinPrefixLen-1-nonceLen))
		c := mustNew(t, seededKeys(t, seeded("order")), &LoadBalancer{ServerID: serverID, NonceLen: nonceLen})
		nonce := func() [16]byte {
			cid, err := c.Append(nil, 1, 1)
			if err != nil {
				t.Fatal(err)
			}
			var b [16]byte
			copy(b[:], cid[1+len(serverID):c.PrefixLen()])
			return b
		}
		flips := make([]int, nonceLen*8)
		last := nonce()
		for range n {
			next := nonce()
			for bit := range flips {
				flips[bit] += int((last[bit/8]^next[bit/8])>>(bit%8)) & 1
			}
			last = next
		}
		if bias := worstBias(n, [][]int{flips}); bias > biasThreshold {
			t.Errorf("nonce of %d octets: a bit flips %.1f standard deviations from half of the time", nonceLen, bias)
		}
	}
}

// TestProcessesStartApart: two codecs of one configuration, as two processes
// have them, do not begin with the same nonce, and one permutation hides both
// counts.
func TestProcessesStartApart(t *testing.T) {
	keys := seededKeys(t, seeded("apart"))
	lb := &LoadBalancer{ServerID: []byte{1}, NonceLen: 12}
	a, b := mustNew(t, keys, lb), mustNew(t, keys, lb)
	if a.balanced.nonces.start == b.balanced.nonces.start {
		t.Error("both start with the same nonce")
	}
	b.balanced.nonces.start = a.balanced.nonces.start
	first, err := a.Append(nil, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	same, err := b.Append(nil, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first, same) {
		t.Errorf("one count gives %x and %x: the processes have different permutations", first, same)
	}
}
