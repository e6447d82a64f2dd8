// SPDX-License-Identifier: Apache-2.0

package connid

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"

	"pgregory.net/rapid"
)

func TestParseHeader(t *testing.T) {
	long := func(version uint32, dcidLen byte, rest ...byte) []byte {
		return append(append(binary.BigEndian.AppendUint32([]byte{0xc3}, version), dcidLen), rest...)
	}
	tests := []struct {
		name     string
		datagram []byte
		want     Header
		err      error
	}{
		{"nil", nil, Header{}, ErrTruncated},
		{"empty", []byte{}, Header{}, ErrTruncated},
		{"short header of one octet", []byte{0x40}, Header{}, nil},
		{"short header without the fixed bit", []byte{0x00, 1, 2, 3}, Header{}, nil},
		{"largest first octet of a short header", []byte{0x7f}, Header{}, nil},
		{"long header of one octet", []byte{0x80}, Header{}, ErrTruncated},
		{"long header without a DCID length", []byte{0xc0, 0, 0, 0, 1}, Header{}, ErrTruncated},
		{"empty DCID, nothing after it", long(1, 0), Header{Long: true, Version: 1, DCID: []byte{}}, nil},
		{"version 1", long(1, 2, 0xaa, 0xbb, 0, 0), Header{Long: true, Version: 1, DCID: []byte{0xaa, 0xbb}}, nil},
		{"version 2", long(0x6b3343cf, 1, 0xaa), Header{Long: true, Version: 0x6b3343cf, DCID: []byte{0xaa}}, nil},
		{"version negotiation", long(0, 1, 0xaa), Header{Long: true, DCID: []byte{0xaa}}, nil},
		{"unknown version, fixed bit clear", append([]byte{0x80}, long(0xdeadbeef, 1, 7)[1:]...),
			Header{Long: true, Version: 0xdeadbeef, DCID: []byte{7}}, nil},
		{"DCID one octet short", long(1, 3, 1, 2), Header{}, ErrTruncated},
		{"DCID missing", long(1, 20), Header{}, ErrTruncated},
		{"DCID of 21 octets", long(9, 21, bytes.Repeat([]byte{5}, 21)...),
			Header{Long: true, Version: 9, DCID: bytes.Repeat([]byte{5}, 21)}, nil},
		{"DCID of 255 octets", long(9, 255, bytes.Repeat([]byte{5}, 255)...),
			Header{Long: true, Version: 9, DCID: bytes.Repeat([]byte{5}, 255)}, nil},
		{"DCID of 255 octets, one short", long(9, 255, bytes.Repeat([]byte{5}, 254)...), Header{}, ErrTruncated},
		{"SCID beyond the datagram", long(1, 1, 7, 20), Header{Long: true, Version: 1, DCID: []byte{7}}, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ParseHeader(tt.datagram)
			if !errors.Is(err, tt.err) {
				t.Fatalf("error is %v, want %v", err, tt.err)
			}
			if got.Long != tt.want.Long || got.Version != tt.want.Version || !bytes.Equal(got.DCID, tt.want.DCID) {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
			if (got.DCID == nil) != (tt.want.DCID == nil) {
				t.Errorf("DCID is nil: %v, want %v", got.DCID == nil, tt.want.DCID == nil)
			}
			if cap(got.DCID) != len(got.DCID) {
				t.Error("appending to the DCID would write into the datagram")
			}
		})
	}
}

func TestShortDCID(t *testing.T) {
	c := mustNew(t, seededKeys(t, seeded("short")), nil)
	datagram := append([]byte{0x40}, bytes.Repeat([]byte{7}, 20)...)
	for i := range datagram {
		datagram[i] += byte(i)
	}
	if got, ok := c.ShortDCID(datagram); !ok || !bytes.Equal(got, datagram[1:15]) {
		t.Errorf("got %x, %v, want octets 1 to 14", got, ok)
	}
	if got, ok := c.ShortDCID(datagram[:15]); !ok || len(got) != 14 || cap(got) != 14 {
		t.Errorf("nothing after the ID: got %x, %v", got, ok)
	}
	if got, ok := c.ShortDCID(datagram[:14]); ok || got != nil {
		t.Errorf("one octet short: got %x, %v", got, ok)
	}
	if _, ok := c.ShortDCID(nil); ok {
		t.Error("empty datagram: true")
	}
	datagram[0] |= 0x80
	if _, ok := c.ShortDCID(datagram); ok {
		t.Error("long header: true")
	}
}

func TestClassify(t *testing.T) {
	keys := seededKeys(t, seeded("classify"))
	c := mustNew(t, keys, nil)
	const h, g = Handle(0x0203), 4
	ours, err := c.Append(nil, h, g)
	if err != nil {
		t.Fatal(err)
	}
	forged := bytes.Clone(ours)
	forged[len(forged)-1] ^= 1
	old, err := c.Append(nil, h, g-1)
	if err != nil {
		t.Fatal(err)
	}
	long := func(dcid []byte, rest ...byte) []byte {
		return append(append([]byte{0xc0, 0, 0, 0, 1, byte(len(dcid))}, dcid...), rest...)
	}
	short := func(dcid []byte, rest ...byte) []byte { return append(append([]byte{0x41}, dcid...), rest...) }
	foreignLong := func(dcid []byte) Class {
		return Class{Kind: KindForeignLong, Affinity: keys.AffinityHash(dcid), Long: true}
	}
	foreignShort := Class{Kind: KindForeignShort}
	client := []byte{1, 2, 3, 4, 5, 6, 7, 8}
	longer := append(bytes.Clone(ours), 0)

	tests := []struct {
		name     string
		datagram []byte
		want     Class
	}{
		{"empty", nil, Class{}},
		{"cut long header", long(ours)[:19], Class{}},
		{"long, ours", long(ours, 1, 2), Class{Kind: KindOurs, Handle: h, Affinity: keys.AffinityHash(ours), Long: true}},
		{"long, ours and nothing after it", long(ours), Class{Kind: KindOurs, Handle: h, Affinity: keys.AffinityHash(ours), Long: true}},
		{"long, forged", long(forged, 1, 2), foreignLong(forged)},
		{"long, of an old generation", long(old, 1, 2), foreignLong(old)},
		{"long, client's own", long(client, 0), foreignLong(client)},
		{"long, empty", long(nil, 0), foreignLong(nil)},
		{"long, ours with an octet more", long(longer), foreignLong(longer)},
		{"long, ours with an octet less", long(ours[:13], ours[13]), foreignLong(ours[:13])},
		{"short, ours", short(ours, 1, 2, 3), Class{Kind: KindOurs, Handle: h}},
		{"short, ours and nothing after it", short(ours), Class{Kind: KindOurs, Handle: h}},
		{"short, cut", short(ours)[:14], foreignShort},
		{"short, one octet", []byte{0}, foreignShort},
		{"short, forged", short(forged, 1), foreignShort},
		{"short, of an old generation", short(old, 1), foreignShort},
		{"short, another octet in front", short(append([]byte{0}, ours...)), foreignShort},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := c.Classify(tt.datagram, always(g)); got != tt.want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
}

func TestKindNames(t *testing.T) {
	for k, want := range map[Kind]string{
		KindInvalid: "invalid", KindOurs: "ours", KindForeignLong: "foreign long", KindForeignShort: "foreign short", 9: "unknown",
	} {
		if k.String() != want {
			t.Errorf("kind %d is %q, want %q", uint8(k), k, want)
		}
	}
}

// classifyModel says what Classify has to say, from the octets alone.
func classifyModel(c *Codec, keys Keys, d []byte, generation func(Handle) uint32) Class {
	n := c.Len()
	switch {
	case len(d) == 0:
		return Class{}
	case d[0] < 0x80:
		if len(d) > n {
			if h, ok := c.Open(d[1:n+1], generation); ok {
				return Class{Kind: KindOurs, Handle: h}
			}
		}
		return Class{Kind: KindForeignShort}
	case len(d) < 6 || len(d)-6 < int(d[5]):
		return Class{}
	}
	dcid := d[6 : 6+int(d[5])]
	class := Class{Kind: KindForeignLong, Long: true, Affinity: keys.AffinityHash(dcid)}
	if h, ok := c.Open(dcid, generation); ok {
		class.Kind, class.Handle = KindOurs, h
	}
	return class
}

// TestClassifyProperties builds datagrams of each shape with any content, and
// cuts them anywhere in the part that Classify reads.
func TestClassifyProperties(t *testing.T) {
	for _, isLong := range []bool{true, false} {
		for _, isOurs := range []bool{true, false} {
			for _, isCut := range []bool{true, false} {
				t.Run(fmt.Sprintf("long %t, ours %t, cut %t", isLong, isOurs, isCut), func(t *testing.T) {
					rapid.Check(t, func(t *rapid.T) { checkClassify(t, isLong, isOurs, isCut) })
				})
			}
		}
	}
}

func checkClassify(t *rapid.T, isLong, isOurs, isCut bool) {
	c, _ := drawCodec(t)
	h := Handle(rapid.Uint16().Draw(t, "handle"))
	dcid := rapid.SliceOfN(rapid.Byte(), 0, 30).Draw(t, "DCID")
	if isOurs {
		var err error
		if dcid, err = c.Append(nil, h, 2); err != nil {
			t.Fatal(err)
		}
	}
	d := []byte{rapid.Uint8Max(0x7f).Draw(t, "first")}
	if isLong {
		d[0] |= 0x80
		d = binary.BigEndian.AppendUint32(d, rapid.Uint32().Draw(t, "version"))
		d = append(d, byte(len(dcid)))
	}
	d = append(d, dcid...)
	if isCut {
		d = d[:rapid.IntRange(0, len(d)-1).Draw(t, "at")]
	} else {
		d = append(d, rapid.SliceOfN(rapid.Byte(), 0, 30).Draw(t, "rest")...)
	}

	got := c.Classify(d, always(2))
	if want := classifyModel(c, c.keys, d, always(2)); got != want {
		t.Fatalf("%x: got %+v, want %+v", d, got, want)
	}
	kind := KindForeignShort
	switch {
	case isCut && (isLong || len(d) == 0):
		kind = KindInvalid
	case isOurs && !isCut:
		kind = KindOurs
	case isLong:
		kind = KindForeignLong
	}
	if got.Kind != kind || got.Long != (isLong && kind != KindInvalid) || kind == KindOurs && got.Handle != h {
		t.Fatalf("%x: got %+v, want a packet of kind %q for %d", d, got, kind, h)
	}
}
