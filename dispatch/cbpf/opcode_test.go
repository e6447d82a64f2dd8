// SPDX-License-Identifier: Apache-2.0

package cbpf

import (
	"slices"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"instar/internal/testutil"
)

// classicValue is what the kernel's classic filter makes of a program that
// ends with ret a, bit by bit: a filter only tells lengths.
func (w *wire) classicValue(program []bpf.RawInstruction, packet []byte) uint32 {
	w.t.Helper()
	body := program[:len(program)-1]
	var value uint32
	for bit := 0; bit < 32; bit += 3 {
		tail := []bpf.RawInstruction{op(0x74, uint32(bit)), op(0x54, 7), op(0x04, 1), op(0x16, 0)}
		if err := attachClassic(w.to, unix.SO_ATTACH_FILTER, slices.Concat(body, tail)); err != nil {
			w.t.Fatalf("%v\n%s", err, text(program))
		}
		if n := w.pass(packet); n != dropped {
			value |= uint32(n-1) << bit
		}
	}
	return value
}

// TestOpcodes is the language, word by word: what the kernel's classic filter
// does, the two translations, and the machine that other tests rely on.
func TestOpcodes(t *testing.T) {
	needBPF(t)
	testutil.NetNS(t)
	packet := []byte{0x80, 0x91, 0xa2, 0xb3, 0xc4, 0xd5, 0xe6, 0xf7, 0x08, 0x19}
	raw := func(ins ...bpf.RawInstruction) []bpf.RawInstruction { return ins }
	set := func(a, x uint32, ins ...bpf.RawInstruction) []bpf.RawInstruction {
		return append(raw(op(0x00, a), op(0x01, x)), ins...)
	}
	const big = 0xfffffff6
	type test struct {
		name    string
		program []bpf.RawInstruction
		want    uint32
	}
	tests := []test{
		{"A is 0 first", nil, 0},
		{"X is 0 first", raw(op(0x87, 0)), 0},
		{"ld #", raw(op(0x00, 0xfedcba98)), 0xfedcba98},
		{"ldx #", raw(op(0x01, 0xfedcba98), op(0x87, 0)), 0xfedcba98},
		{"ld len", raw(op(0x80, 0)), 10},
		{"ldx len", raw(op(0x81, 0), op(0x87, 0)), 10},
		{"ldb", raw(op(0x30, 7)), 0xf7},
		{"ldb, last", raw(op(0x30, 9)), 0x19},
		{"ldb, past", raw(op(0x30, 10), op(0x00, 1)), 0},
		{"ldh", raw(op(0x28, 1)), 0x91a2},
		{"ldh, last", raw(op(0x28, 8)), 0x0819},
		{"ldh, past", raw(op(0x28, 9), op(0x00, 1)), 0},
		{"ld", raw(op(0x20, 1)), 0x91a2b3c4},
		{"ld, last", raw(op(0x20, 6)), 0xe6f70819},
		{"ld, past", raw(op(0x20, 7), op(0x00, 1)), 0},
		{"ld, far past", raw(op(0x20, 0x7fffffff), op(0x00, 1)), 0},
		{"ldb x", raw(op(0x01, 4), op(0x50, 3)), 0xf7},
		{"ldb x, past", raw(op(0x01, 4), op(0x50, 6), op(0x00, 1)), 0},
		{"ldb x, around", raw(op(0x01, 0xffffffff), op(0x50, 2)), 0x91},
		{"ldb x, k around", raw(op(0x01, 5), op(0x50, 0xfffffffe)), 0xb3},
		{"ldb x, far past", raw(op(0x01, 0x7ffffff0), op(0x50, 3), op(0x00, 1)), 0},
		{"ldb x, below all headers", raw(op(0x01, 0x80000000), op(0x50, 0), op(0x00, 1)), 0},
		{"ldh x", raw(op(0x01, 4), op(0x48, 4)), 0x0819},
		{"ldh x, past", raw(op(0x01, 4), op(0x48, 5), op(0x00, 1)), 0},
		{"ld x", raw(op(0x01, 6), op(0x40, 0)), 0xe6f70819},
		{"ld x, past", raw(op(0x01, 7), op(0x40, 0), op(0x00, 1)), 0},
		{"ldxb 4*([k]&0xf)", raw(op(0xb1, 7), op(0x87, 0)), 28},
		{"ldxb keeps A", raw(op(0x00, 9), op(0xb1, 3), op(0x0c, 0)), 21},
		{"ldxb, past", raw(op(0xb1, 10), op(0x00, 1)), 0},
		{"st, ld M", raw(op(0x00, 77), op(0x02, 0), op(0x00, 1), op(0x60, 0)), 77},
		{"stx, ldx M", raw(op(0x01, 78), op(0x03, 15), op(0x01, 1), op(0x61, 15), op(0x87, 0)), 78},
		{"two words", set(1, 2, op(0x02, 4), op(0x03, 5), op(0x60, 5), op(0x61, 4), op(0x64, 8), op(0x0c, 0)), 0x201},
		{"words of 32 bits", set(0xffffffff, 0, op(0x02, 4), op(0x00, 0), op(0x60, 4)), 0xffffffff},
		{"tax", raw(op(0x00, big), op(0x07, 0), op(0x00, 1), op(0x87, 0)), big},
		{"add", set(big, 0, op(0x04, 20)), 10},
		{"add x", set(big, 20, op(0x0c, 0)), 10},
		{"sub", set(5, 0, op(0x14, 6)), 0xffffffff},
		{"sub x", set(5, 6, op(0x1c, 0)), 0xffffffff},
		{"mul", set(0x10001, 0, op(0x24, 0xffff)), 0xffffffff},
		{"mul, around", set(big, 0, op(0x24, 0xffffffff)), 10},
		{"mul x", set(big, big, op(0x2c, 0)), 100},
		{"div", set(big, 0, op(0x34, 7)), big / 7},
		{"div by a large number", set(big, 0, op(0x34, 0x80000001)), 1},
		{"div x", set(big, 3, op(0x3c, 0)), big / 3},
		{"div x, large", set(1, 0xffffffff, op(0x3c, 0)), 0},
		{"div 0", set(9, 0, op(0x3c, 0), op(0x00, 1)), 0},
		{"mod", set(big, 0, op(0x94, 7)), big % 7},
		{"mod, large", set(big, 0, op(0x94, 0x80000001)), big - 0x80000001},
		{"mod x", set(big, 100, op(0x9c, 0)), big % 100},
		{"mod 0", set(9, 0, op(0x9c, 0), op(0x00, 1)), 0},
		{"and", set(big, 0, op(0x54, 0xf000000f)), 0xf0000006},
		{"and x", set(big, 0x8000000f, op(0x5c, 0)), 0x80000006},
		{"or", set(1, 0, op(0x44, 0x80000000)), 0x80000001},
		{"or x", set(1, 0x80000000, op(0x4c, 0)), 0x80000001},
		{"xor", set(0xff, 0, op(0xa4, 0xf000000f)), 0xf00000f0},
		{"xor x", set(0xff, 0xf000000f, op(0xac, 0)), 0xf00000f0},
		{"xor x, ancillary", set(0xff, 0xf000000f, op(0x30, offAncillary+adALUXorX)), 0xf00000f0},
		{"lsh", set(3, 0, op(0x64, 31)), 0x80000000},
		{"lsh x", set(3, 31, op(0x6c, 0)), 0x80000000},
		{"lsh x, masked", set(3, 33, op(0x6c, 0)), 6},
		{"lsh x, by 32", set(3, 32, op(0x6c, 0)), 3},
		{"rsh", set(big, 0, op(0x74, 31)), 1},
		{"rsh x", set(big, 4, op(0x7c, 0)), 0x0fffffff},
		{"rsh x, masked", set(big, 0xffffffe4, op(0x7c, 0)), 0x0fffffff},
		{"neg", set(5, 0, op(0x84, 0)), 0xfffffffb},
		{"neg 0", set(0, 0, op(0x84, 0)), 0},
		{"ja", raw(op(0x00, 1), op(0x05, 1), op(0x00, 2), op(0x04, 4)), 5},
		{"ja 0", raw(op(0x00, 1), op(0x05, 0), op(0x00, 2)), 2},
	}
	// The conditions, with k and X, and either way the next or another one.
	for _, c := range []struct {
		code       uint16
		a, operand uint32
		met        bool
	}{
		{0x15, 7, 7, true}, {0x15, 7, 8, false}, {0x15, 0xffffffff, 0xffffffff, true}, {0x15, 0x7fffffff, 0xffffffff, false},
		{0x25, 8, 7, true}, {0x25, 7, 7, false}, {0x25, 0x80000000, 7, true}, {0x25, 7, 0x80000000, false},
		{0x25, 0xffffffff, 0xfffffffe, true},
		{0x35, 7, 7, true}, {0x35, 6, 7, false}, {0x35, 0x80000000, 0x7fffffff, true}, {0x35, 7, 0xffffffff, false},
		{0x45, 6, 3, true}, {0x45, 4, 3, false}, {0x45, 0x80000000, 0x80000000, true}, {0x45, 1, 0xfffffffe, false},
	} {
		for _, withX := range []uint16{0, 8} {
			for _, to := range [][2]uint8{{0, 1}, {1, 0}, {2, 1}, {1, 2}, {0, 0}, {1, 1}, {2, 0}, {0, 2}} {
				ins := jmp(c.code|withX, c.operand, to[0], to[1])
				skipped := to[1]
				if c.met {
					skipped = to[0]
				}
				// Each of three instructions adds something else.
				program := set(c.a, c.operand, ins, op(0x04, 0x1000), op(0x04, 0x2000), op(0x04, 0x4000))
				want := c.a + []uint32{0x7000, 0x6000, 0x4000}[skipped]
				tests = append(tests, test{describe(ins), program, want})
			}
		}
	}

	w, pair := newWire(t), newPairOfGroups(t)
	for i, tc := range tests {
		if testing.Short() && i%7 != 0 {
			continue
		}
		program := append(slices.Clone(tc.program), op(0x16, 0))
		if err := Check(program); err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		if got := w.classicValue(program, packet); got != tc.want {
			t.Errorf("%s: the kernel has %#x, want %#x\n%s", tc.name, got, tc.want, text(program))
		}
		if got := (&machine{packet: packet}).run(program); got != tc.want {
			t.Errorf("%s: the machine in Go has %#x, want %#x\n%s", tc.name, got, tc.want, text(program))
		}
		p := loadFilter(t, program)
		if got := testRun(t, p, packet); got != tc.want {
			t.Errorf("%s: socket filter: %#x, want %#x\n%s", tc.name, got, tc.want, text(program))
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		pair.attach(program)
		pair.translated.send(packet)
		if got := pair.value(); got != tc.want {
			t.Errorf("%s: reuseport: %#x, want %#x\n%s", tc.name, got, tc.want, text(program))
		}
	}
	t.Logf("%d cases", len(tests))
}

// TestReturnConstant returns numbers of 32 bits, and all of them.
func TestReturnConstant(t *testing.T) {
	needBPF(t)
	for _, k := range []uint32{0, 1, 0x7fffffff, 0x80000000, 0xffffffff} {
		p := loadFilter(t, []bpf.RawInstruction{op(0x06, k)})
		if got := testRun(t, p, []byte{1}); got != k {
			t.Errorf("%#x, want %#x", got, k)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestFilterOnUDP compares what a filter reads about a packet, and relative to
// its headers, with the kernel's classic filter, on a UDP socket.
func TestFilterOnUDP(t *testing.T) {
	needBPF(t)
	testutil.NetNS(t)
	// Of this group one member gets everything. A filter on a UDP socket sees the
	// packet from its UDP header on.
	g := newGroup(t)
	if err := attachClassic(g.sockets[0], unix.SO_ATTACH_REUSEPORT_CBPF, []bpf.RawInstruction{op(0x06, 0)}); err != nil {
		t.Fatal(err)
	}
	if err := unix.SetsockoptInt(g.client, unix.SOL_SOCKET, unix.SO_MARK, 0x12345); err != nil {
		t.Fatal(err)
	}
	to := g.sockets[0]
	const xValue = 0xabcd
	datagram := seeded("UDP").octets(64)
	// keeps is how much of the datagram the filter keeps.
	keeps := func() int {
		t.Helper()
		if _, err := unix.Write(g.client, datagram); err != nil {
			t.Fatal(err)
		}
		n, err := unix.Read(to, g.buffer)
		if err != nil {
			return dropped
		}
		return n
	}
	loads := map[string]bpf.RawInstruction{
		"payload":             op(0x20, 8),
		"length of UDP":       op(0x28, 4),
		"length":              op(0x80, 0),
		"length of IP":        op(0x28, offNetwork+2),
		"source address":      op(0x20, offNetwork+12),
		"payload from IP":     op(0x20, offNetwork+28),
		"past the end":        op(0x20, offNetwork+28+61),
		"Ethernet type":       op(0x28, offLink+12),
		"IP from Ethernet":    op(0x30, offLink+14),
		"below all headers":   op(0x30, offLink-1),
		"indirect, to header": op(0x48, offNetwork-xValue+2),
	}
	for k, name := range ancillaryNames {
		if refuseAncillary(k, SocketFilter) == "" && k != adRandom && k != adCPU {
			loads[name] = op(0x20, offAncillary+k)
		}
	}
	for name, ins := range loads {
		for bit := 0; bit < 32; bit += 4 {
			// At least the UDP header is kept, and one byte.
			program := []bpf.RawInstruction{
				op(0x01, xValue), op(0x00, 0x1234), ins,
				op(0x74, uint32(bit)), op(0x54, 15), op(0x04, 9), op(0x16, 0),
			}
			if err := attachClassic(to, unix.SO_ATTACH_FILTER, program); err != nil {
				t.Fatal(err)
			}
			want := keeps()
			p := loadFilter(t, program)
			if err := unix.SetsockoptInt(to, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, p.FD()); err != nil {
				t.Fatal(err)
			}
			if got := keeps(); got != want {
				t.Errorf("%s, bit %d: %d, the kernel has %d", name, bit, got, want)
			}
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
			if mark := 0x12345 >> bit & 15; name == "SKF_AD_MARK" && want != 1+mark {
				t.Errorf("%s, bit %d: the kernel keeps %d, want %d", name, bit, want, 1+mark)
			}
		}
	}
}
