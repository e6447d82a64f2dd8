// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"instar/dispatch/connid"
	"instar/internal/testutil"
)

// linkHeader is what BPF_PROG_TEST_RUN wants in front of a datagram.
const linkHeader = 14

// classifier is the C of quic.h behind BPF_PROG_TEST_RUN.
type classifier struct {
	t          testing.TB
	coll       *ebpf.Collection
	program    *ebpf.Program
	control    *Control
	secrets    *Secrets
	result     *classifyInstarClass
	maxWorkers int
	buf        []byte
}

func newClassifier(t testing.TB, prefix, maxWorkers int) *classifier {
	t.Helper()
	needBPF(t)
	spec, err := loadClassify()
	if err != nil {
		t.Fatal(err)
	}
	if err := configure(spec, Config{MaxGenerations: 1, MaxWorkers: maxWorkers, FlowEntries: 1, Prefix: prefix}); err != nil {
		t.Fatal(err)
	}
	coll := load(t, spec, ebpf.CollectionOptions{})
	return &classifier{
		t:          t,
		coll:       coll,
		program:    coll.Programs[classifyProgClassify],
		control:    mapped[Control](t, coll.Maps[MapControl]),
		secrets:    mapped[Secrets](t, coll.Maps[MapSecrets]),
		result:     mapped[classifyInstarClass](t, coll.Maps[".data.result"]),
		maxWorkers: maxWorkers,
		buf:        make([]byte, linkHeader, 4096),
	}
}

// generation is the table of the program as the codec asks for it.
func (c *classifier) generation(h connid.Handle) uint32 {
	if int(h.Worker()) >= c.maxWorkers {
		return 0
	}
	return c.control.Slots[h.Slot()].Number
}

// classify is what the program makes of a datagram.
func (c *classifier) classify(datagram []byte) connid.Class {
	c.t.Helper()
	*c.result = classifyInstarClass{Affinity: 0x5555, Kind: 0x55, IsLong: 0x55, Slot: 0x55, Worker: 0x55}
	ret, err := c.program.Run(&ebpf.RunOptions{Data: append(c.buf, datagram...)})
	if err != nil || ret != 0 {
		c.t.Fatalf("run with %x: %d, %v", datagram, int32(ret), err)
	}
	if c.result.IsLong > 1 {
		c.t.Fatalf("is_long is %d", c.result.IsLong)
	}
	return connid.Class{
		Kind:     connid.Kind(c.result.Kind), // the same numbers in both, as TestPackets shows
		Handle:   connid.MakeHandle(c.result.Slot, c.result.Worker),
		Affinity: c.result.Affinity,
		Long:     c.result.IsLong == 1,
	}
}

// compare fails the test when program and codec do not agree on a datagram.
func (c *classifier) compare(codec *connid.Codec, datagram []byte) connid.Class {
	c.t.Helper()
	got, want := c.classify(datagram), codec.Classify(datagram, c.generation)
	if got.Kind == connid.KindInvalid {
		got.Long = false // a truncated long header is just invalid to the codec
	}
	if got != want {
		c.t.Fatalf("%x, prefix %d: got %+v, codec %+v", datagram, codec.PrefixLen(), got, want)
	}
	return got
}

func readJSON(t testing.TB, path string, into any) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

func keysOf(t testing.TB, s string) connid.Keys {
	t.Helper()
	keys, err := connid.KeysFromBytes(unhex(t, s))
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

func TestPackets(t *testing.T) {
	var file struct {
		About       string            `json:"about"`
		Keys        string            `json:"keys"`
		Generations map[string]uint32 `json:"generations"`
		Packets     []struct {
			Name     string         `json:"name"`
			Prefix   int            `json:"prefix"`
			Datagram string         `json:"datagram"`
			Kind     string         `json:"kind"`
			Handle   *connid.Handle `json:"handle"`
			DCID     *string        `json:"dcid"`
		} `json:"packets"`
	}
	readJSON(t, "testdata/packets.json", &file)
	if len(file.Packets) < 45 {
		t.Fatalf("%d packets: some are missing", len(file.Packets))
	}
	keys := keysOf(t, file.Keys)
	classifiers := make(map[int]*classifier)
	kinds := map[string]connid.Kind{}
	for k := connid.KindInvalid; k <= connid.KindForeignShort; k++ {
		kinds[k.String()] = k
	}
	for _, p := range file.Packets {
		c := classifiers[p.Prefix]
		if c == nil {
			c = newClassifier(t, p.Prefix, MaxWorkers)
			*c.secrets = secretsOf(keys)
			for slot, number := range file.Generations {
				i, err := strconv.Atoi(slot)
				if err != nil {
					t.Fatal(err)
				}
				c.control.Slots[i].Number = number
			}
			classifiers[p.Prefix] = c
		}
		t.Run(p.Name, func(t *testing.T) {
			want := connid.Class{Kind: kinds[p.Kind], Long: p.DCID != nil}
			if p.Handle != nil {
				want.Handle = *p.Handle
			}
			if p.DCID != nil {
				want.Affinity = keys.AffinityHash(unhex(t, *p.DCID))
			}
			if (p.Handle != nil) != (want.Kind == connid.KindOurs) {
				t.Fatal("the packet has to have a handle if it is ours, and only then")
			}
			got := c.compare(codecOf(t, keys, p.Prefix), unhex(t, p.Datagram))
			if got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
		})
	}
}

// TestCodecVectors checks the C with the vectors of the codec.
func TestCodecVectors(t *testing.T) {
	var file struct {
		About string `json:"about"`
		Seal  []struct {
			Name         string          `json:"name"`
			Keys         string          `json:"keys"`
			Prefix       string          `json:"prefix"`
			Handle       connid.Handle   `json:"handle"`
			Generation   uint32          `json:"generation"`
			CID          string          `json:"cid"`
			LoadBalancer json.RawMessage `json:"load_balancer"`
		} `json:"seal"`
		Reject []struct {
			Name       string `json:"name"`
			Keys       string `json:"keys"`
			PrefixLen  int    `json:"prefix_len"`
			Generation uint32 `json:"generation"`
			CID        string `json:"cid"`
		} `json:"reject"`
		Affinity []struct {
			Keys string `json:"keys"`
			DCID string `json:"dcid"`
			Hash string `json:"hash"`
		} `json:"affinity"`
	}
	readJSON(t, "../dispatch/connid/testdata/codec.json", &file)
	if len(file.Seal) < 30 || len(file.Reject) < 150 || len(file.Affinity) < 15 {
		t.Fatalf("%d, %d and %d vectors: some are missing", len(file.Seal), len(file.Reject), len(file.Affinity))
	}
	classifiers := make(map[int]*classifier)
	prepare := func(prefix int, keys string, generation uint32, slots ...uint8) *classifier {
		c := classifiers[prefix]
		if c == nil {
			c = newClassifier(t, prefix, MaxWorkers)
			classifiers[prefix] = c
		}
		*c.secrets = secretsOf(keysOf(t, keys))
		c.control.Slots = [MaxSlots]Slot{}
		for _, slot := range slots {
			c.control.Slots[slot].Number = generation
		}
		return c
	}
	everySlot := make([]uint8, MaxSlots)
	for i := range everySlot {
		everySlot[i] = uint8(i)
	}

	for _, v := range file.Seal {
		cid := unhex(t, v.CID)
		c := prepare(len(v.Prefix)/2, v.Keys, v.Generation, v.Handle.Slot())
		if got, want := c.classify(shortHeader(cid)), (connid.Class{Kind: connid.KindOurs, Handle: v.Handle}); got != want {
			t.Errorf("%s: short header: got %+v, want %+v", v.Name, got, want)
		}
		want := connid.Class{Kind: connid.KindOurs, Handle: v.Handle, Long: true, Affinity: keysOf(t, v.Keys).AffinityHash(cid)}
		if got := c.classify(longHeader(version1, cid)); got != want {
			t.Errorf("%s: long header: got %+v, want %+v", v.Name, got, want)
		}
	}
	for _, v := range file.Reject {
		cid := unhex(t, v.CID)
		c := prepare(v.PrefixLen, v.Keys, v.Generation, everySlot...)
		if got := c.classify(longHeader(version1, cid)); got.Kind != connid.KindForeignLong {
			t.Errorf("%s: long header: got %+v", v.Name, got)
		}
		// A short header does not tell the length: only the octets that are
		// looked at count.
		if len(cid) == v.PrefixLen+6 {
			if got, want := c.classify(shortHeader(cid)), (connid.Class{Kind: connid.KindForeignShort}); got != want {
				t.Errorf("%s: short header: got %+v, want %+v", v.Name, got, want)
			}
		}
	}
	affinities := 0
	for _, v := range file.Affinity {
		want, err := strconv.ParseUint(v.Hash, 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		if len(v.DCID)/2 > 255 {
			continue // no header can hold it
		}
		affinities++
		for _, prefix := range []int{PrefixMin, PrefixMax} {
			c := prepare(prefix, v.Keys, 0)
			if got := c.classify(longHeader(version1, unhex(t, v.DCID))); got.Affinity != want {
				t.Errorf("affinity of %q is %016x, want %016x", v.DCID, got.Affinity, want)
			}
		}
	}
	if affinities < 12 {
		t.Errorf("%d affinities: some are missing", affinities)
	}
}

// prefixLengths are all that the format allows.
func prefixLengths(f func(prefix int)) {
	for prefix := PrefixMin; prefix <= PrefixMax; prefix++ {
		f(prefix)
	}
}

// TestTruncated cuts packets of ours at every length.
func TestTruncated(t *testing.T) {
	needBPF(t)
	prefixLengths(func(prefix int) {
		t.Run(fmt.Sprintf("prefix %d", prefix), func(t *testing.T) {
			r := seeded(t.Name())
			c := newClassifier(t, prefix, MaxWorkers)
			keys := seededKeys(t, r)
			*c.secrets = secretsOf(keys)
			c.control.Slots[9].Number = 4
			codec := codecOf(t, keys, prefix)
			h := connid.MakeHandle(9, 200)
			cid := seal(t, codec, r, h, 4)

			long := longHeader(version1, cid, r.octets(30)...)
			for n := range len(long) {
				want := connid.KindOurs
				if n < 6+len(cid) {
					want = connid.KindInvalid
				}
				if got := c.compare(codec, long[:n]); got.Kind != want {
					t.Errorf("%d octets of a long header are %v, want %v", n, got.Kind, want)
				}
			}
			short := shortHeader(cid, r.octets(30)...)
			for n := range len(short) {
				want := connid.KindOurs
				switch {
				case n == 0:
					want = connid.KindInvalid
				case n < 1+len(cid):
					want = connid.KindForeignShort
				}
				if got := c.compare(codec, short[:n]); got.Kind != want {
					t.Errorf("%d octets of a short header are %v, want %v", n, got.Kind, want)
				}
			}
		})
	})
}

// TestDCIDLengths has a DCID of each length that the octet can hold, in a
// datagram that just holds it, that lacks an octet, and in a large one.
func TestDCIDLengths(t *testing.T) {
	needBPF(t)
	prefixLengths(func(prefix int) {
		t.Run(fmt.Sprintf("prefix %d", prefix), func(t *testing.T) {
			r := seeded(t.Name())
			c := newClassifier(t, prefix, MaxWorkers)
			keys := seededKeys(t, r)
			*c.secrets = secretsOf(keys)
			c.control.Slots[0].Number = 1
			codec := codecOf(t, keys, prefix)
			ours := seal(t, codec, r, 0, 1)
			affinities := map[uint64]int{}
			for n := range 256 {
				dcid := append(bytes.Clone(ours), make([]byte, 256)...)[:n]
				for _, version := range []uint32{versionNegotiation, version1, version2, versionGrease} {
					datagram := longHeader(version, dcid)
					want := connid.KindForeignLong
					if n == len(ours) {
						want = connid.KindOurs
					}
					exact := c.compare(codec, datagram)
					if exact.Kind != want {
						t.Errorf("DCID of %d octets, version %#x: %v, want %v", n, version, exact.Kind, want)
					}
					if got := c.compare(codec, datagram[:len(datagram)-1]); got.Kind != connid.KindInvalid {
						t.Errorf("DCID of %d octets without the last: %v", n, got.Kind)
					}
					if got := c.compare(codec, append(datagram, r.octets(1200)...)); got != exact {
						t.Errorf("DCID of %d octets in a large datagram: %+v, alone %+v", n, got, exact)
					}
					affinities[exact.Affinity] = n
				}
			}
			// Neither the version nor what follows takes part; the length does.
			if len(affinities) != 256 {
				t.Errorf("256 connection IDs have %d affinities", len(affinities))
			}
		})
	})
}

// TestGenerations opens one ID under different tables.
func TestGenerations(t *testing.T) {
	prefixLengths(func(prefix int) {
		r := seeded(fmt.Sprint("generations ", prefix))
		c := newClassifier(t, prefix, 16)
		keys := seededKeys(t, r)
		*c.secrets = secretsOf(keys)
		codec := codecOf(t, keys, prefix)
		for _, tc := range []struct {
			name    string
			handle  connid.Handle
			made    uint32
			table   uint32
			foreign bool
		}{
			{"its generation has the slot", connid.MakeHandle(7, 3), 41, 41, false},
			{"first generation", connid.MakeHandle(0, 0), 1, 1, false},
			{"last slot and worker, largest number", connid.MakeHandle(255, 15), 1<<32 - 1, 1<<32 - 1, false},
			{"a later generation has the slot", connid.MakeHandle(7, 3), 41, 42, true},
			{"an earlier generation has the slot", connid.MakeHandle(7, 3), 41, 40, true},
			{"numbers that differ in the top bit", connid.MakeHandle(7, 3), 41, 41 | 1<<31, true},
			{"nobody ever had the slot", connid.MakeHandle(7, 3), 41, 0, true},
			{"worker beyond the map", connid.MakeHandle(7, 16), 41, 41, true},
		} {
			cid := seal(t, codec, r, tc.handle, tc.made)
			c.control.Slots = [MaxSlots]Slot{}
			c.control.Slots[tc.handle.Slot()].Number = tc.table
			want := connid.Class{Kind: connid.KindOurs, Handle: tc.handle}
			if tc.foreign {
				want = connid.Class{Kind: connid.KindForeignShort}
			}
			if got := c.compare(codec, shortHeader(cid, 0)); got != want {
				t.Errorf("prefix %d: %s: %+v, want %+v", prefix, tc.name, got, want)
			}
			if got := c.compare(codec, longHeader(version1, cid)); (got.Kind == connid.KindOurs) == tc.foreign {
				t.Errorf("prefix %d: %s: long header: %+v", prefix, tc.name, got)
			}
		}
	})
}

// TestEveryBitCounts flips each bit of an ID: none of the altered ones is ours.
func TestEveryBitCounts(t *testing.T) {
	prefixLengths(func(prefix int) {
		r := seeded(fmt.Sprint("bits ", prefix))
		c := newClassifier(t, prefix, MaxWorkers)
		keys := seededKeys(t, r)
		*c.secrets = secretsOf(keys)
		for i := range c.control.Slots {
			c.control.Slots[i].Number = 3
		}
		codec := codecOf(t, keys, prefix)
		cid := seal(t, codec, r, connid.MakeHandle(1, 2), 3)
		for bit := range 8 * len(cid) {
			altered := bytes.Clone(cid)
			altered[bit/8] ^= 1 << (bit % 8)
			for _, datagram := range [][]byte{shortHeader(altered), longHeader(version1, altered)} {
				if got := c.compare(codec, datagram); got.Kind == connid.KindOurs {
					t.Errorf("prefix %d: %s opens with bit %d flipped", prefix, hex.EncodeToString(cid), bit)
				}
			}
		}
	})
}

// mutator makes datagrams that are hard to tell: IDs of ours, nearly of ours,
// in headers that are nearly right.
type mutator struct {
	random
	t       testing.TB
	codec   *connid.Codec
	numbers [MaxSlots]uint32 // the table
	handle  func() connid.Handle
}

func newMutator(t testing.TB, r random, codec *connid.Codec) *mutator {
	m := &mutator{random: r, t: t, codec: codec}
	m.handle = func() connid.Handle { return connid.Handle(r.Uint32()) }
	for i := range m.numbers {
		if r.IntN(4) > 0 {
			m.numbers[i] = uint32(r.IntN(5)) // few, so that IDs of others' generations are common
		}
	}
	return m
}

// noise is a datagram without an ID of ours. Some of it looks like one.
func (m *mutator) noise() []byte {
	switch m.IntN(4) {
	case 0:
		return m.octets(m.IntN(40))
	case 1:
		return longHeader(m.version(), m.octets(m.IntN(256)))
	}
	cid := m.octets(m.codec.Len())
	cid[0] = cid[0]&0xe0 | m.codec.FirstOctet()&0x1f
	if m.IntN(2) == 0 {
		return longHeader(m.version(), cid)
	}
	return shortHeader(cid)
}

func (m *mutator) datagram() []byte {
	var d []byte
	switch m.IntN(8) {
	case 0, 1, 2:
		d = m.noise()
	case 3, 4:
		d = longHeader(m.version(), m.cid())
	default:
		d = shortHeader(m.cid())
	}
	if m.IntN(2) == 0 {
		d = append(d, m.octets(m.IntN(64))...)
	}
	for range m.IntN(3) {
		if len(d) == 0 {
			break
		}
		switch i := m.IntN(len(d)); m.IntN(6) {
		case 0:
			d[i] ^= 1 << m.IntN(8)
		case 1:
			d[i] = byte(m.Uint32())
		case 2:
			d = d[:i]
		case 3: // the length of the DCID, or close to it
			if len(d) > 5 {
				d[5] += byte(m.IntN(5)) - 2
			}
		case 4:
			d[0] = byte(m.Uint32())
		case 5: // an octet inserted
			d = append(d[:i:i], append([]byte{byte(m.Uint32())}, d[i:]...)...)
		}
	}
	return d
}

func (m *mutator) version() uint32 {
	versions := []uint32{versionNegotiation, version1, version2, versionGrease, m.Uint32()}
	return versions[m.IntN(len(versions))]
}

func (m *mutator) cid() []byte {
	h := m.handle()
	number := m.numbers[h.Slot()]
	if number == 0 || m.IntN(8) == 0 {
		number = 1 + uint32(m.IntN(5))
	}
	return seal(m.t, m.codec, m.random, h, number)
}

// TestDifferential compares the C with its Go twin on random datagrams.
func TestDifferential(t *testing.T) {
	needBPF(t)
	datagrams, enough := testutil.UnlessShort(210_000, 7000), testutil.UnlessShort(1000, 33)
	prefixes := []int{PrefixMin, 11, PrefixMax}
	for _, prefix := range prefixes {
		t.Run(fmt.Sprintf("prefix %d", prefix), func(t *testing.T) {
			r := seeded(t.Name())
			keys := seededKeys(t, r)
			c := newClassifier(t, prefix, 200)
			*c.secrets = secretsOf(keys)
			codec := codecOf(t, keys, prefix)
			m := newMutator(t, r, codec)
			for i, n := range m.numbers {
				c.control.Slots[i].Number = n
			}
			seen := map[string]int{}
			for range datagrams / len(prefixes) {
				class := c.compare(codec, m.datagram())
				seen[strings.TrimSpace(fmt.Sprintf("%v %v", class.Kind, class.Long))]++
			}
			t.Log(seen)
			for _, kind := range []string{"invalid false", "ours true", "ours false", "foreign long true", "foreign short false"} {
				if seen[kind] < enough {
					t.Errorf("only %d datagrams are %s: the comparison is lopsided", seen[kind], kind)
				}
			}
		})
	}
}

// FuzzClassify looks for a datagram on which the C and its Go twin disagree.
func FuzzClassify(f *testing.F) {
	r := seeded("fuzz")
	keys := seededKeys(f, r)
	classifiers := make([]*classifier, PrefixMax+1)
	codecs := make([]*connid.Codec, PrefixMax+1)
	prefixLengths(func(prefix int) {
		classifiers[prefix] = newClassifier(f, prefix, MaxWorkers)
		*classifiers[prefix].secrets = secretsOf(keys)
		codecs[prefix] = codecOf(f, keys, prefix)
		cid := seal(f, codecs[prefix], r, connid.MakeHandle(3, 4), 5)
		for _, number := range []uint32{5, 6, 0} {
			f.Add(shortHeader(cid, 0), uint8(prefix), number)
			f.Add(longHeader(version1, cid, 0), uint8(prefix), number)
		}
	})
	f.Add([]byte{}, uint8(8), uint32(1))
	f.Add([]byte{0xff}, uint8(8), uint32(1))
	f.Fuzz(func(t *testing.T, datagram []byte, prefix uint8, number uint32) {
		if len(datagram) > 2000 {
			t.Skip("more than BPF_PROG_TEST_RUN takes")
		}
		n := PrefixMin + int(prefix)%(PrefixMax-PrefixMin+1)
		c := classifiers[n]
		c.t = t
		for i := range c.control.Slots {
			c.control.Slots[i].Number = number
		}
		c.compare(codecs[n], datagram)
	})
}
