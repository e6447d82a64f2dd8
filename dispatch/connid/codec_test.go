// SPDX-License-Identifier: Apache-2.0

package connid

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

func TestKeysFromBytes(t *testing.T) {
	b := make([]byte, KeysLen)
	for i := range b {
		b[i] = byte(i)
	}
	keys, err := KeysFromBytes(b)
	if err != nil {
		t.Fatal(err)
	}
	want := Keys{
		CID:           [16]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
		MulHandle:     0x1716151413121110,
		MulGeneration: 0x1f1e1d1c1b1a1918,
		Affinity:      [16]byte{32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47},
	}
	if keys != want {
		t.Errorf("got %#x, want %#x", [2]uint64{keys.MulHandle, keys.MulGeneration}, [2]uint64{want.MulHandle, want.MulGeneration})
	}
	for _, n := range []int{0, 47, 49, 64} {
		if _, err := KeysFromBytes(bytes.Repeat([]byte{1}, n)); !errors.Is(err, ErrKeys) {
			t.Errorf("%d octets: error is %v, want ErrKeys", n, err)
		}
	}
	for _, zero := range [][2]int{{0, 16}, {16, 24}, {24, 32}, {32, 48}} {
		unset := bytes.Clone(b)
		clear(unset[zero[0]:zero[1]])
		if _, err := KeysFromBytes(unset); !errors.Is(err, ErrKeys) {
			t.Errorf("octets %v zero: error is %v, want ErrKeys", zero, err)
		}
	}
	if _, err := New(Keys{}, nil); !errors.Is(err, ErrKeys) {
		t.Errorf("codec without keys: error is %v, want ErrKeys", err)
	}
}

func TestSecretsStayOutOfLogs(t *testing.T) {
	keys := Keys{CID: [16]byte{0xab, 0xcd}, MulHandle: 0xabcd, MulGeneration: 0xabcd, Affinity: [16]byte{0xab, 0xcd}}
	lb := LoadBalancer{ServerID: []byte{1}, NonceLen: 8, Key: bytes.Repeat([]byte{0xab, 0xcd}, 8)}
	for _, format := range []string{"%v", "%+v", "%#v", "%s"} {
		for _, v := range []any{keys, &keys, lb, &lb} {
			s := fmt.Sprintf(format, v)
			if strings.Contains(s, "abcd") || strings.Contains(s, "171") || strings.Contains(s, "43981") {
				t.Errorf("%s of %T shows a key: %s", format, v, s)
			}
		}
	}
	if s := lb.String(); s != "QUIC-LB rotation 0, server ID 01, nonce 8 octets, encrypted" {
		t.Errorf("load balancer prints as %q", s)
	}
}

func TestHandle(t *testing.T) {
	h := MakeHandle(3, 17)
	if h != 0x0311 || h.Slot() != 3 || h.Worker() != 17 || h.String() != "3/17" {
		t.Errorf("handle %#x, slot %d, worker %d, %q", uint16(h), h.Slot(), h.Worker(), h)
	}
}

func TestLengths(t *testing.T) {
	keys := seededKeys(t, seeded("lengths"))
	c := mustNew(t, keys, nil)
	if c.Len() != 14 || c.PrefixLen() != 8 || c.FirstOctet() != 0xed || DefaultLen != 14 {
		t.Errorf("default: %d octets, prefix %d, first %#x", c.Len(), c.PrefixLen(), c.FirstOctet())
	}
	c = mustNew(t, keys, &LoadBalancer{ConfigRotation: 5, ServerID: []byte{1, 2, 3, 4, 5}, NonceLen: 8})
	if c.Len() != 20 || c.PrefixLen() != 14 || c.FirstOctet() != 5<<5|19 {
		t.Errorf("longest: %d octets, prefix %d, first %#x", c.Len(), c.PrefixLen(), c.FirstOctet())
	}
}

func TestAppend(t *testing.T) {
	c := mustNew(t, seededKeys(t, seeded("append")), nil)
	head := []byte("head")
	got, err := c.Append(head, 0x0102, 3)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.HasPrefix(got, head) || len(got) != len(head)+c.Len() {
		t.Fatalf("appended to %x", got)
	}
	cid := got[len(head):]
	if cid[0] != c.FirstOctet() {
		t.Errorf("first octet %#x, want %#x", cid[0], c.FirstOctet())
	}
	if h, ok := c.Open(cid, always(3)); !ok || h != 0x0102 {
		t.Errorf("opens as %v, %v", h, ok)
	}

	if got, err := c.Append(head, 1, 0); !errors.Is(err, ErrGeneration) || !bytes.Equal(got, head) {
		t.Errorf("generation 0: %q, %v, want what was given and ErrGeneration", got, err)
	}
}

func TestSealRefuses(t *testing.T) {
	c := mustNew(t, seededKeys(t, seeded("seal")), nil)
	fits := append([]byte{c.FirstOctet()}, make([]byte, 7)...)
	if _, err := c.Seal(fits, 1, 1); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name       string
		prefix     []byte
		generation uint32
		want       error
	}{
		{"generation 0", fits, 0, ErrGeneration},
		{"no prefix", nil, 1, ErrPrefix},
		{"short prefix", fits[:7], 1, ErrPrefix},
		{"long prefix", append(bytes.Clone(fits), 0), 1, ErrPrefix},
		{"length of the prefix alone", append([]byte{0xe7}, fits[1:]...), 1, ErrPrefix},
		{"length with the first octet", append([]byte{0xee}, fits[1:]...), 1, ErrPrefix},
	}
	for _, tt := range tests {
		if got, err := c.Seal(tt.prefix, 1, tt.generation); !errors.Is(err, tt.want) || got != nil {
			t.Errorf("%s: %x, %v, want %v", tt.name, got, err, tt.want)
		}
	}
	other := append([]byte{2<<5 | 13}, fits[1:]...)
	cid, err := c.Seal(other, 7, 1)
	if err != nil {
		t.Fatalf("other rotation: %v", err)
	}
	if h, ok := c.Open(cid, always(1)); !ok || h != 7 {
		t.Errorf("ID of another rotation opens as %v, %v", h, ok)
	}
}

// drawCodec draws a codec of any shape.
func drawCodec(t *rapid.T) (*Codec, *LoadBalancer) {
	keys, err := KeysFromBytes(rapid.SliceOfN(rapid.ByteRange(1, 255), KeysLen, KeysLen).Draw(t, "keys"))
	if err != nil {
		t.Fatal(err)
	}
	var lb *LoadBalancer
	if rapid.Bool().Draw(t, "balanced") {
		body := rapid.IntRange(MinPrefixLen-1, MaxPrefixLen-1).Draw(t, "body")
		nonce := rapid.IntRange(minNonce, body-1).Draw(t, "nonce")
		lb = &LoadBalancer{
			ConfigRotation: rapid.Uint8Max(maxRotation).Draw(t, "rotation"),
			ServerID:       rapid.SliceOfN(rapid.Byte(), body-nonce, body-nonce).Draw(t, "server ID"),
			NonceLen:       nonce,
		}
		if rapid.Bool().Draw(t, "encrypted") {
			lb.Key = rapid.SliceOfN(rapid.Byte(), lbKeyLen, lbKeyLen).Draw(t, "key")
		}
	}
	c, err := New(keys, lb)
	if err != nil {
		t.Fatal(err)
	}
	return c, lb
}

// TestCodecProperties: what is appended opens for its generation only, names
// its server to the load balancer, and no longer opens with any bit changed.
func TestCodecProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c, lb := drawCodec(t)
		h := Handle(rapid.Uint16().Draw(t, "handle"))
		g := rapid.Uint32Min(1).Draw(t, "generation")
		cid, err := c.Append(nil, h, g)
		if err != nil {
			t.Fatal(err)
		}
		if len(cid) != c.Len() || cid[0] != c.FirstOctet() || int(cid[0]&31) != len(cid)-1 {
			t.Fatalf("%x: wrong length or first octet", cid)
		}
		table := func(asked Handle) uint32 {
			if asked.Slot() == h.Slot() {
				return g
			}
			return 0
		}
		if got, ok := c.Open(cid, table); !ok || got != h {
			t.Fatalf("opens as %v, %v, want %v", got, ok, h)
		}
		if again, err := c.Seal(cid[:c.PrefixLen()], h, g); err != nil || !bytes.Equal(again, cid) {
			t.Fatalf("sealed again: %x, %v, want %x", again, err, cid)
		}
		if lb != nil {
			if id, err := lb.DecodeServerID(cid); err != nil || !bytes.Equal(id, lb.ServerID) {
				t.Fatalf("server ID %x, %v, want %x", id, err, lb.ServerID)
			}
		}

		other := rapid.Uint32().Filter(func(o uint32) bool { return o != g }).Draw(t, "other generation")
		if _, ok := c.Open(cid, always(other)); ok {
			t.Fatalf("opens for generation %d, made for %d", other, g)
		}
		for bit := range len(cid) * 8 {
			cid[bit/8] ^= 1 << (bit % 8)
			if got, ok := c.Open(cid, always(g)); ok {
				t.Fatalf("opens as %v with bit %d changed", got, bit)
			}
			cid[bit/8] ^= 1 << (bit % 8)
		}
	})
}

// TestAdaptedIDs moves an ID to a chosen other worker by its XOR mask, leaving
// the tag or changing it by a chosen difference.
func TestAdaptedIDs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c, _ := drawCodec(t)
		h := Handle(rapid.Uint16().Draw(t, "handle"))
		flip := rapid.Uint16Min(1).Draw(t, "flip")
		d := rapid.Uint32().Draw(t, "difference")
		cid, err := c.Append(nil, h, 5)
		if err != nil {
			t.Fatal(err)
		}
		masked, tag := cid[c.PrefixLen():][:2], cid[c.PrefixLen()+2:]
		binary.BigEndian.PutUint16(masked, binary.BigEndian.Uint16(masked)^flip)
		binary.BigEndian.PutUint32(tag, binary.BigEndian.Uint32(tag)+d)
		if got, ok := c.Open(cid, always(5)); ok {
			t.Fatalf("ID of %v passes as %v", h, got)
		}
	})
}

// TestRandomIDs: a client's own IDs do not pass as ours, even of the right
// length and first octet and with every slot alive.
func TestRandomIDs(t *testing.T) {
	r := seeded("random IDs")
	for _, prefixLen := range []int{MinPrefixLen, MaxPrefixLen} {
		c := codecOfPrefixLen(t, seededKeys(t, r), prefixLen)
		cid := make([]byte, c.Len())
		asked := 0
		table := func(Handle) uint32 { asked++; return 1 }
		for range 1_000_000 {
			r.Read(cid)
			cid[0] = cid[0]&^lengthMask | byte(c.Len()-1)
			if h, ok := c.Open(cid, table); ok {
				t.Fatalf("%x opens as %v", cid, h)
			}
		}
		if asked != 1_000_000 {
			t.Errorf("%d of a million got as far as the tag", asked)
		}
		// The same loop finds IDs that are ours.
		r.Read(cid)
		cid[0] = c.FirstOctet()
		ours, err := c.Seal(cid[:prefixLen], 0x1234, 1)
		if err != nil {
			t.Fatal(err)
		}
		if h, ok := c.Open(ours, table); !ok || h != 0x1234 {
			t.Errorf("an ID of ours opens as %v, %v", h, ok)
		}
	}
}

// TestOldGenerations: an ID never opens for another generation of its slot, of
// a hundred thousand pairs of nearby and far numbers.
func TestOldGenerations(t *testing.T) {
	r := seeded("generations")
	c := mustNew(t, seededKeys(t, r), nil)
	for i := range 100_000 {
		g := uint32(r.Uint64()>>(33+i%31)) + 1 // small and large ones
		cid, err := c.Append(nil, Handle(r.Uint64()), g)
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := c.Open(cid, always(g)); !ok {
			t.Fatalf("does not open for its generation %d", g)
		}
		for _, other := range []uint32{0, g - 1, g + 1, g + 256, g ^ 1<<31, uint32(r.Uint64())} {
			if other == g {
				continue
			}
			if _, ok := c.Open(cid, always(other)); ok {
				t.Fatalf("opens for generation %d, made for %d", other, g)
			}
		}
	}
}

// biasThreshold is in standard deviations. Chance passes it once in 5*10^8 bits.
const biasThreshold = 6.0

// onesPerBit counts how often each bit after the first octet is set in n IDs.
func onesPerBit(n, length int, next func(cid []byte)) []int {
	ones := make([]int, (length-1)*8)
	cid := make([]byte, length)
	for range n {
		next(cid)
		for i := range ones {
			ones[i] += int(cid[1+i/8]>>(i%8)) & 1
		}
	}
	return ones
}

// worstBias is the largest deviation of a bit, in standard deviations, from one
// half in each sample and from each other between samples.
func worstBias(n int, samples [][]int) float64 {
	worst, half := 0.0, float64(n)/2
	sigma := math.Sqrt(float64(n)) / 2
	for i, s := range samples {
		for bit, ones := range s {
			worst = max(worst, math.Abs(float64(ones)-half)/sigma)
			for _, other := range samples[:i] {
				worst = max(worst, math.Abs(float64(ones-other[bit]))/(sigma*math.Sqrt2))
			}
		}
	}
	return worst
}

// TestNoBitTellsTheWorker takes 100,000 IDs of each of several workers: no bit
// after the first octet is biased, and none differs between workers. With a
// clear QUIC-LB prefix that holds for the bits after the server ID.
func TestNoBitTellsTheWorker(t *testing.T) {
	keys := seededKeys(t, seeded("bias"))
	id, secret := []byte{0xff, 0, 0xff}, octets(seeded("bias key"), lbKeyLen)
	for _, tt := range []struct {
		name    string
		lb      *LoadBalancer
		plain   int // octets after the first that everybody may read
		workers []Handle
	}{
		{"default", nil, 0, []Handle{0x0000, 0x0001, 0x00ff, 0x0311, 0xffff}},
		{"QUIC-LB encrypted", &LoadBalancer{ServerID: id, NonceLen: 8, Key: secret}, 0, []Handle{0x0000, 0xffff}},
		{"QUIC-LB encrypted, shortest nonce", &LoadBalancer{ServerID: id, NonceLen: 4, Key: secret}, 0, []Handle{0x0000, 0xffff}},
		{"QUIC-LB clear, shortest nonce", &LoadBalancer{ServerID: id, NonceLen: 4}, len(id), []Handle{0x0000, 0xffff}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c := mustNew(t, keys, tt.lb)
			if bias := workerBias(t, c, tt.workers, tt.plain, nil); bias > biasThreshold {
				t.Errorf("a bit deviates by %.1f standard deviations", bias)
			}
		})
	}
}

// TestBiasIsMeasured: the same measurement finds the fault in IDs made without
// a mask, with a mask of one bit too few, and with a tag that has no pad.
func TestBiasIsMeasured(t *testing.T) {
	c := mustNew(t, seededKeys(t, seeded("bias")), nil)
	masked := func(cid []byte) []byte { return cid[c.PrefixLen():][:handleLen] }
	for name, spoil := range map[string]func(cid []byte, h Handle){
		"no mask": func(cid []byte, h Handle) { binary.BigEndian.PutUint16(masked(cid), uint16(h)) },
		"one bit not masked": func(cid []byte, h Handle) {
			masked(cid)[1] = masked(cid)[1]&^1 | byte(h)&1
		},
		"no pad": func(cid []byte, h Handle) {
			binary.BigEndian.PutUint32(cid[c.PrefixLen()+handleLen:], c.tag(0, cid[0], h, 1))
		},
	} {
		if bias := workerBias(t, c, []Handle{0x0000, 0x0001}, 0, spoil); bias <= biasThreshold {
			t.Errorf("%s: the measurement sees only %.1f standard deviations", name, bias)
		}
	}
}

// workerBias measures 100,000 IDs of each worker, without the first octet and
// the plain ones after it, and after spoil changed them.
func workerBias(t *testing.T, c *Codec, workers []Handle, plain int, spoil func(cid []byte, h Handle)) float64 {
	const n = 100_000
	var samples [][]int
	for _, h := range workers {
		ones := onesPerBit(n, c.Len(), func(cid []byte) {
			if _, err := c.Append(cid[:0], h, 1); err != nil {
				t.Fatal(err)
			}
			if spoil != nil {
				spoil(cid, h)
			}
		})
		samples = append(samples, ones[8*plain:])
	}
	return worstBias(n, samples)
}

func TestConcurrentUse(t *testing.T) {
	keys := seededKeys(t, seeded("concurrent"))
	for name, lb := range map[string]*LoadBalancer{
		"default":   nil,
		"clear":     {ServerID: []byte{1, 2, 3}, NonceLen: 4},
		"encrypted": {ServerID: []byte{1, 2, 3}, NonceLen: 4, Key: make([]byte, lbKeyLen)},
	} {
		t.Run(name, func(t *testing.T) {
			c := mustNew(t, keys, lb)
			const workers, each = 8, 2000
			made := make([][]string, workers)
			var wg sync.WaitGroup
			for w := range workers {
				wg.Go(func() {
					for range each {
						cid, err := c.Append(nil, MakeHandle(1, uint8(w)), 9)
						if err != nil {
							t.Error(err)
							return
						}
						if h, ok := c.Open(cid, always(9)); !ok || int(h.Worker()) != w {
							t.Errorf("worker %d: opens as %v, %v", w, h, ok)
							return
						}
						made[w] = append(made[w], string(cid[1:c.PrefixLen()]))
					}
				})
			}
			wg.Wait()
			seen := map[string]bool{}
			for _, ids := range made {
				for _, id := range ids {
					seen[id] = true
				}
			}
			if len(seen) != workers*each {
				t.Errorf("%d different prefixes in %d IDs", len(seen), workers*each)
			}
		})
	}
}

func TestAllocations(t *testing.T) {
	keys := seededKeys(t, seeded("allocations"))
	c := mustNew(t, keys, nil)
	buf := make([]byte, 0, MaxLen)
	cid, err := c.Append(nil, 1, 1)
	if err != nil {
		t.Fatal(err)
	}
	table := always(1)
	datagram := append([]byte{0x40}, cid...)
	for name, f := range map[string]func(){
		"Append":   func() { _, _ = c.Append(buf, 1, 1) },
		"Open":     func() { c.Open(cid, table) },
		"Classify": func() { c.Classify(datagram, table) },
	} {
		if n := testing.AllocsPerRun(100, f); n != 0 {
			t.Errorf("%s allocates %v times", name, n)
		}
	}
}

func BenchmarkAppend(b *testing.B) {
	keys := seededKeys(b, seeded("benchmark"))
	for _, bb := range []struct {
		name string
		lb   *LoadBalancer
	}{
		{"default", nil},
		{"QUIC-LB/clear", &LoadBalancer{ServerID: []byte{1, 2, 3}, NonceLen: 8}},
		{"QUIC-LB/encrypted", &LoadBalancer{ServerID: []byte{1, 2, 3}, NonceLen: 8, Key: make([]byte, lbKeyLen)}},
	} {
		b.Run(bb.name, func(b *testing.B) {
			c := mustNew(b, keys, bb.lb)
			buf := make([]byte, 0, MaxLen)
			b.ReportAllocs()
			for b.Loop() {
				_, _ = c.Append(buf, 0x0102, 3)
			}
		})
	}
}

func BenchmarkOpen(b *testing.B) {
	c := mustNew(b, seededKeys(b, seeded("benchmark")), nil)
	table := always(3)
	ours, err := c.Append(nil, 0x0102, 3)
	if err != nil {
		b.Fatal(err)
	}
	foreign := append(bytes.Clone(ours[:13]), ours[13]+1)
	for name, cid := range map[string][]byte{"ours": ours, "foreign": foreign} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				c.Open(cid, table)
			}
		})
	}
}
