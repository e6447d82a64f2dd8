// SPDX-License-Identifier: Apache-2.0

package cbpf

import (
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"instar/internal/testutil"
)

// members is how many sockets a group has.
const members = 8

// group is a reuseport group of UDP sockets on an address of its own.
type group struct {
	t       testing.TB
	sockets []int
	address *unix.SockaddrInet4
	client  int
	buffer  []byte
}

func newGroup(t testing.TB) *group {
	t.Helper()
	g := &group{t: t, address: &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}, buffer: make([]byte, 1<<16)}
	open := func() int {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Close(fd); err != nil {
				t.Error(err)
			}
		})
		return fd
	}
	for range members {
		fd := open()
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
			t.Fatal(err)
		}
		if err := unix.Bind(fd, g.address); err != nil {
			t.Fatal(err)
		}
		name, err := unix.Getsockname(fd)
		if err != nil {
			t.Fatal(err)
		}
		g.address = name.(*unix.SockaddrInet4)
		g.sockets = append(g.sockets, fd)
	}
	g.client = open()
	if err := unix.Connect(g.client, g.address); err != nil {
		t.Fatal(err)
	}
	return g
}

// send sends a datagram and returns the index of the member that gets it.
func (g *group) send(datagram []byte) int {
	g.t.Helper()
	if _, err := unix.Write(g.client, datagram); err != nil {
		g.t.Fatal(err)
	}
	return g.receive()
}

func (g *group) receive() int {
	g.t.Helper()
	for i, fd := range g.sockets {
		_, err := unix.Read(fd, g.buffer)
		if err == nil {
			return i
		}
		if !errors.Is(err, unix.EAGAIN) {
			g.t.Fatal(err)
		}
	}
	g.t.Fatal("no member got the datagram")
	return 0
}

func (g *group) attach(p *ebpf.Program) {
	g.t.Helper()
	if err := unix.SetsockoptInt(g.sockets[0], unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_EBPF, p.FD()); err != nil {
		g.t.Fatal(err)
	}
}

// pairOfGroups is one group for classic programs, and one for translations.
type pairOfGroups struct {
	t                   testing.TB
	classic, translated *group
	array, noted        *ebpf.Map
}

func newPairOfGroups(t testing.TB) *pairOfGroups {
	t.Helper()
	pair := &pairOfGroups{t: t, classic: newGroup(t), translated: newGroup(t)}
	pair.array, pair.noted = chooserMaps(t, members)
	for i, fd := range pair.translated.sockets {
		if err := pair.array.Put(uint32(i), uint64(fd)); err != nil {
			t.Fatal(err)
		}
	}
	return pair
}

// attach gives a program to both groups.
func (pair *pairOfGroups) attach(program []bpf.RawInstruction) {
	pair.t.Helper()
	if err := attachClassic(pair.classic.sockets[0], unix.SO_ATTACH_REUSEPORT_CBPF, program); err != nil {
		pair.t.Fatalf("%v\n%s", err, text(program))
	}
	code := translate(pair.t, program, Options{Context: ReusePort})
	p := load(pair.t, chooser(code, pair.array, pair.noted), program)
	pair.translated.attach(p) // the group keeps it
	if err := p.Close(); err != nil {
		pair.t.Fatal(err)
	}
}

// value is what the translation returned last.
func (pair *pairOfGroups) value() uint32 {
	pair.t.Helper()
	var value uint32
	if err := pair.noted.Lookup(uint32(0), &value); err != nil {
		pair.t.Fatal(err)
	}
	return value
}

// headersOf are the headers before a datagram to the group, as far as programs
// of these tests look: what the kernel makes up is left zero.
func (g *group) headersOf(datagram []byte) (ip []byte) {
	ip = make([]byte, 20+8, 20+8+len(datagram))
	return append(ip, datagram...)
}

// TestReusePortDifferential compares, on real groups, where classic programs and
// their translations send datagrams, and what the translation returns with what
// the machine in Go does.
func TestReusePortDifferential(t *testing.T) {
	needBPF(t)
	testutil.NetNS(t)
	pair := newPairOfGroups(t)
	r := seeded("reuseport")
	var pairs, chosen, paged int
	for n := range amount(150, 2500) {
		length := pick(r, 1, 20, 60, 300) + r.IntN(40)
		g := generator{random: r, length: length, modulo: members}
		program := g.program(1 + r.IntN(pick(r, 8, 30, 120)))
		pair.attach(program)
		for i := range 10 {
			datagram := r.octets(length - pick(r, 0, 0, r.IntN(length+1)))
			if i == 0 && r.chance(30) {
				datagram = append(datagram, r.octets(40000)...) // most of it not in place
				paged++
			}
			index := pair.classic.send(datagram)
			other := pair.translated.send(datagram)
			m := machine{packet: datagram, network: pair.translated.headersOf(datagram)}
			want := m.run(program)
			if got := pair.value(); got != want {
				t.Fatalf("program %d returns %#x for %d octets %.100x, want %#x\n%s", n, got, len(datagram), datagram, want, text(program))
			}
			pairs++
			if want >= members {
				continue // the kernel falls back to a hash
			}
			if other != index || uint32(index) != want {
				t.Fatalf("program %d sends to %d, want %d; the kernel's to %d\n%s", n, other, want, index, text(program))
			}
			if index != 0 {
				chosen++
			}
		}
	}
	t.Logf("%d pairs, no difference; %d not to the first member; %d not linear", pairs, chosen, paged)
}

// TestReusePortHeaders loads from the headers before the payload.
func TestReusePortHeaders(t *testing.T) {
	needBPF(t)
	testutil.NetNS(t)
	pair := newPairOfGroups(t)
	datagram := []byte{0xa1, 0xa2, 0xa3, 0xa4, 0xa5}
	port := func(g *group) uint32 { return uint32(g.address.Port) }
	for _, tc := range []struct {
		name    string
		program []bpf.RawInstruction
		want    uint32
	}{
		{"version and header length", []bpf.RawInstruction{op(0x30, offNetwork)}, 0x45},
		{"length of the IP packet", []bpf.RawInstruction{op(0x28, offNetwork+2)}, 20 + 8 + 5},
		{"source address", []bpf.RawInstruction{op(0x20, offNetwork+12)}, 0x7f000001},
		{"destination port", []bpf.RawInstruction{op(0x28, offNetwork+22)}, port(pair.translated)},
		{"payload", []bpf.RawInstruction{op(0x20, offNetwork+28)}, 0xa1a2a3a4},
		{"end of the payload", []bpf.RawInstruction{op(0x30, offNetwork+32)}, 0xa5},
		{"past the payload", []bpf.RawInstruction{op(0x28, offNetwork+32)}, 0},
		{"far past the payload", []bpf.RawInstruction{op(0x30, offAncillary-1)}, 0},
		{"Ethernet type", []bpf.RawInstruction{op(0x28, offLink+12)}, 0x0800},
		{"IP behind Ethernet", []bpf.RawInstruction{op(0x30, offLink+14)}, 0x45},
		{"below the link layer", []bpf.RawInstruction{op(0x30, offLink-1)}, 0},
		{"lowest", []bpf.RawInstruction{op(0x30, 0x80000000)}, 0},
		{"indirect", []bpf.RawInstruction{op(0x01, offNetwork), op(0x48, 2)}, 33},
		{"indirect, of the sum", []bpf.RawInstruction{op(0x01, 28), op(0x50, offNetwork)}, 0xa1},
		{"indirect, around", []bpf.RawInstruction{op(0x01, 0xffffffff), op(0x50, 2)}, 0xa2},
		{"indirect, link", []bpf.RawInstruction{op(0x01, 12), op(0x48, offLink)}, 0x0800},
		{"indirect, ancillary", []bpf.RawInstruction{op(0x01, 0xfffff000), op(0x50, 0)}, 0},
		{"MSH", []bpf.RawInstruction{op(0xb1, offNetwork), op(0x87, 0)}, 20},
		{"MSH keeps A", []bpf.RawInstruction{op(0x00, 7), op(0xb1, offNetwork), op(0x0c, 0)}, 27},
		{"in place after", []bpf.RawInstruction{op(0x30, offNetwork), op(0x07, 0), op(0x30, 1), op(0x0c, 0)}, 0xa2 + 0x45},
		{"protocol", []bpf.RawInstruction{op(0x20, offAncillary+adProtocol)}, 0x0800},
		{"length", []bpf.RawInstruction{op(0x80, 0)}, 5},
		{"length to X", []bpf.RawInstruction{op(0x81, 0), op(0x87, 0)}, 5},
	} {
		// The classic program says by its choice, bit by bit, what it has.
		for bit := 0; bit < 32; bit += 3 {
			if testing.Short() && bit%2 != 0 {
				continue
			}
			if bit > 0 && tc.name == "destination port" {
				break // each group has its own
			}
			program := slices.Concat(tc.program, []bpf.RawInstruction{op(0x74, uint32(bit)), op(0x54, 7), op(0x16, 0)})
			pair.attach(program)
			index, other := pair.classic.send(datagram), pair.translated.send(datagram)
			want := tc.want >> bit & 7
			if got := pair.value(); got != want || other != int(want) {
				t.Errorf("%s: %d and member %d for the bits from %d on, want %d", tc.name, got, other, bit, want)
			}
			if index != int(want) && tc.name != "destination port" {
				t.Errorf("%s: the kernel chooses %d for the bits from %d on, want %d", tc.name, index, bit, want)
			}
		}
	}
}

// TestReusePortProcessor compares the number of the processor, and tries the
// random number.
func TestReusePortProcessor(t *testing.T) {
	needBPF(t)
	testutil.NetNS(t)
	pair := newPairOfGroups(t)
	pair.attach([]bpf.RawInstruction{op(0x20, offAncillary+adCPU), op(0x54, 7), op(0x16, 0)})
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			t.Error(err)
		}
	}()
	for cpu := range 8 {
		if !set.IsSet(cpu) {
			continue
		}
		var one unix.CPUSet
		one.Set(cpu)
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			t.Fatal(err)
		}
		if index, other := pair.classic.send(nil), pair.translated.send(nil); index != cpu || other != cpu {
			t.Errorf("processor %d: %d, the kernel has %d", cpu, other, index)
		}
	}
	pair.attach([]bpf.RawInstruction{op(0x20, offAncillary+adRandom), op(0x16, 0)})
	seen := map[uint32]bool{}
	for range 16 {
		pair.translated.send(nil)
		seen[pair.value()] = true
	}
	if len(seen) < 15 {
		t.Errorf("%d different ones of 16 random numbers", len(seen))
	}
}

// TestReusePortFragments reads datagrams that were put together from fragments,
// whose payload is in place up to a cut.
func TestReusePortFragments(t *testing.T) {
	needBPF(t)
	testutil.NetNS(t)
	pair := newPairOfGroups(t)
	raw, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Close(raw); err != nil {
			t.Error(err)
		}
	}()
	r := seeded("fragments")
	id := uint16(0)
	send := func(g *group, datagram []byte, cut int) int {
		t.Helper()
		udp := make([]byte, 8, 8+len(datagram))
		binary.BigEndian.PutUint16(udp, 4444)
		binary.BigEndian.PutUint16(udp[2:], uint16(g.address.Port))
		binary.BigEndian.PutUint16(udp[4:], uint16(8+len(datagram)))
		udp = append(udp, datagram...)
		id++
		for from, to := 0, cut; from < len(udp); from, to = to, len(udp) {
			ip := make([]byte, 20, 20+to-from)
			ip[0], ip[8], ip[9] = 0x45, 64, unix.IPPROTO_UDP
			binary.BigEndian.PutUint16(ip[4:], id) // the kernel fills in lengths and checksum
			offset := uint16(from / 8)
			if to < len(udp) {
				offset |= 1 << 13 // more fragments
			}
			binary.BigEndian.PutUint16(ip[6:], offset)
			copy(ip[12:], g.address.Addr[:])
			copy(ip[16:], g.address.Addr[:])
			if err := unix.Sendto(raw, append(ip, udp[from:to]...), 0, &unix.SockaddrInet4{Addr: g.address.Addr}); err != nil {
				t.Fatal(err)
			}
		}
		return g.receive()
	}
	for n := range amount(60, 500) {
		program := generator{random: r, length: 40, modulo: members}.program(1 + r.IntN(30))
		pair.attach(program)
		for range 5 {
			datagram, cut := r.octets(33+r.IntN(20)), 8*(1+r.IntN(5))
			index, other := send(pair.classic, datagram, cut), send(pair.translated, datagram, cut)
			m := machine{packet: datagram, network: pair.classic.headersOf(datagram)}
			want := m.run(program)
			if got := pair.value(); got != want {
				t.Fatalf("program %d returns %#x for %x cut at %d, want %#x\n%s", n, got, datagram, cut, want, text(program))
			}
			if want < members && (other != index || uint32(index) != want) {
				t.Fatalf("program %d sends to %d, want %d; the kernel's to %d\n%s", n, other, want, index, text(program))
			}
		}
	}
}
