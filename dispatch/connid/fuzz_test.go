// SPDX-License-Identifier: Apache-2.0

package connid

import (
	"bytes"
	"testing"
)

// fuzzSeeds are datagrams of each shape around an ID of ours.
func fuzzSeeds(f *testing.F, c *Codec) (cid []byte, datagrams [][]byte) {
	prefix := append([]byte{c.FirstOctet()}, octets(seeded("fuzz prefix"), c.PrefixLen()-1)...)
	cid, err := c.Seal(prefix, 0x0203, 1)
	if err != nil {
		f.Fatal(err)
	}
	long := append([]byte{0xc0, 0, 0, 0, 1, byte(len(cid))}, cid...)
	return cid, [][]byte{
		nil,
		{0x40},
		{0x80},
		append([]byte{0x40}, cid...),
		append([]byte{0x40}, cid[:13]...),
		long,
		append(long, 8, 1, 2, 3, 4, 5, 6, 7, 8),
		long[:10],
		{0xc0, 0, 0, 0, 0, 0},
		append([]byte{0xc0, 0xff, 0, 0, 0x1d, 8}, 1, 2, 3, 4, 5, 6, 7, 8),
	}
}

func FuzzParseHeader(f *testing.F) {
	_, seeds := fuzzSeeds(f, mustNew(f, seededKeys(f, seeded("fuzz")), nil))
	for _, s := range seeds {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, d []byte) {
		before := bytes.Clone(d)
		h, err := ParseHeader(d)
		if !bytes.Equal(d, before) {
			t.Fatal("the datagram was changed")
		}
		switch {
		case err != nil:
			if h.Long || h.Version != 0 || h.DCID != nil {
				t.Fatalf("error %v with %+v", err, h)
			}
			if len(d) > 0 && d[0] < 0x80 || len(d) >= 6+255 {
				t.Fatalf("error %v for a datagram that is long enough", err)
			}
		case h.Long != (d[0] >= 0x80):
			t.Fatalf("first octet %#x, long %v", d[0], h.Long)
		case !h.Long:
			if h.Version != 0 || h.DCID != nil {
				t.Fatalf("short header is %+v", h)
			}
		default:
			// What was parsed makes up the octets that it was parsed from.
			v := h.Version
			built := append([]byte{d[0], byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v), byte(len(h.DCID))}, h.DCID...)
			if !bytes.HasPrefix(d, built) {
				t.Fatalf("parsed %x out of %x", built, d)
			}
		}
	})
}

func FuzzClassify(f *testing.F) {
	keys := seededKeys(f, seeded("fuzz"))
	c := mustNew(f, keys, nil)
	_, seeds := fuzzSeeds(f, c)
	for _, s := range seeds {
		f.Add(s, uint32(1))
		f.Add(s, uint32(0))
	}
	f.Fuzz(func(t *testing.T, d []byte, generation uint32) {
		got := c.Classify(d, always(generation))
		if want := classifyModel(c, keys, d, always(generation)); got != want {
			t.Fatalf("got %+v, want %+v", got, want)
		}
		if got.Kind == KindOurs && generation == 0 {
			t.Fatal("verifies for generation 0")
		}
	})
}

func FuzzOpen(f *testing.F) {
	c := mustNew(f, seededKeys(f, seeded("fuzz")), nil)
	cid, _ := fuzzSeeds(f, c)
	f.Add(cid, uint32(1))
	f.Add(cid, uint32(2))
	f.Add(cid[:13], uint32(1))
	f.Add([]byte{}, uint32(1))
	f.Fuzz(func(t *testing.T, cid []byte, generation uint32) {
		asked := 0
		h, ok := c.Open(cid, func(Handle) uint32 { asked++; return generation })
		if wellFormed := len(cid) == c.Len() && cid[0]&31 == 13; (asked == 1) != wellFormed || asked > 1 {
			t.Fatalf("%x: asked for %d generations", cid, asked)
		}
		if !ok {
			if h != 0 {
				t.Fatalf("handle %v of an ID that does not open", h)
			}
			return
		}
		again, err := c.Seal(cid[:c.PrefixLen()], h, generation)
		if err != nil || !bytes.Equal(again, cid) {
			t.Fatalf("%x opens as %v of generation %d, whose ID is %x, %v", cid, h, generation, again, err)
		}
	})
}

func FuzzDecodeServerID(f *testing.F) {
	lb := LoadBalancer{ConfigRotation: 1, ServerID: make([]byte, 3), NonceLen: 4, Key: octets(seeded("fuzz"), lbKeyLen)}
	f.Add([]byte{1<<5 | 13, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13})
	f.Add([]byte{1 << 5, 1, 2, 3, 4, 5, 6})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, cid []byte) {
		before := bytes.Clone(cid)
		id, err := lb.DecodeServerID(cid)
		if !bytes.Equal(cid, before) {
			t.Fatal("the connection ID was changed")
		}
		if routable := len(cid) >= 8 && cid[0]>>5 == 1; routable != (err == nil) {
			t.Fatalf("%x: %v", cid, err)
		}
		if err == nil && len(id) != 3 {
			t.Fatalf("server ID of %d octets", len(id))
		}
	})
}
