// SPDX-License-Identifier: Apache-2.0

package cbpf

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"instar/internal/capset"
	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// long reports whether the long form of the tests was asked for.
func long() bool { return os.Getenv("INSTAR_TEST_LONG") != "" }

// amount is how many programs a test tries.
func amount(usual, many int) int {
	switch {
	case long():
		return many
	case testing.Short():
		return max(1, usual/20)
	}
	return usual
}

// random gives reproducible numbers and octets.
type random struct {
	*rand.Rand
	source *rand.ChaCha8
}

func seeded(name string) random {
	var seed [32]byte
	copy(seed[:], name)
	source := rand.NewChaCha8(seed)
	return random{rand.New(source), source}
}

func (r random) octets(n int) []byte {
	b := make([]byte, n)
	r.source.Read(b)
	return b
}

func (r random) chance(percent int) bool { return r.IntN(100) < percent }

func pick[T any](r random, from ...T) T { return from[r.IntN(len(from))] }

func op(code uint16, k uint32) bpf.RawInstruction { return bpf.RawInstruction{Op: code, K: k} }

func jmp(code uint16, k uint32, jt, jf uint8) bpf.RawInstruction {
	return bpf.RawInstruction{Op: code, Jt: jt, Jf: jf, K: k}
}

func assemble(t testing.TB, program ...bpf.Instruction) []bpf.RawInstruction {
	t.Helper()
	raw, err := bpf.Assemble(program)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// quicLike is a program of twelve instructions as they dissect QUIC: it tells
// the long headers of one version from the short ones, and has a connection ID
// name a worker.
func quicLike(t testing.TB) []bpf.RawInstruction {
	return assemble(t,
		bpf.LoadAbsolute{Off: 0, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: 0x80, SkipTrue: 3},
		bpf.LoadAbsolute{Off: 8, Size: 2}, // within the ID of a short header
		bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: 0xff},
		bpf.RetA{},
		bpf.LoadAbsolute{Off: 1, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: 1, SkipFalse: 4},
		bpf.LoadAbsolute{Off: 5, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: 8, SkipFalse: 2},
		bpf.LoadAbsolute{Off: 13, Size: 2},
		bpf.RetA{},
		bpf.RetConstant{Val: 0xffff},
	)
}

// machine is a classic machine in plain Go, written after the description of the
// language, not after the translation.
type machine struct {
	packet []byte
	// network and link are the packet from the headers that SKF_NET_OFF and
	// SKF_LL_OFF mean; nil where the header is not known.
	network, link []byte

	// beyondVM is set by a run that did what the machine of x/net/bpf does not
	// do, or not like the kernel.
	beyondVM bool
}

func (m *machine) load(offset, size uint32) (uint32, bool) {
	from := m.packet
	switch signed := int32(offset); {
	case signed >= 0:
	case signed >= -0x100000:
		from, offset, m.beyondVM = m.network, offset+0x100000, true
	case signed >= -0x200000:
		from, offset, m.beyondVM = m.link, offset+0x200000, true
	default:
		m.beyondVM = true
		return 0, false
	}
	if uint64(offset)+uint64(size) > uint64(len(from)) {
		return 0, false
	}
	var v uint32
	for _, b := range from[offset : offset+size] {
		v = v<<8 | uint32(b)
	}
	return v, true
}

// run returns what the program returns.
func (m *machine) run(program []bpf.RawInstruction) uint32 {
	var a, x uint32
	var scratch [16]uint32
	m.beyondVM = false
	for pc := 0; ; pc++ {
		ins := program[pc]
		k, ok := ins.K, true
		operand := k
		if ins.Op&0x08 != 0 {
			operand = x
		}
		switch ins.Op {
		case 0x00:
			a = k
		case 0x01:
			x = k
		case 0x20, 0x28, 0x30:
			switch k {
			case 0xfffff000 + 40:
				a ^= x
				m.beyondVM = true
			default:
				a, ok = m.load(k, []uint32{4, 2, 1}[(ins.Op-0x20)/8])
			}
		case 0x40, 0x48, 0x50:
			if uint64(x)+uint64(k) > 0xffffffff {
				m.beyondVM = true
			}
			a, ok = m.load(x+k, []uint32{4, 2, 1}[(ins.Op-0x40)/8])
		case 0x80:
			a = uint32(len(m.packet))
		case 0x81:
			x = uint32(len(m.packet))
			m.beyondVM = true
		case 0xb1:
			var b uint32
			b, ok = m.load(k, 1)
			x = b & 15 * 4
		case 0x60:
			a = scratch[k]
		case 0x61:
			x = scratch[k]
		case 0x02:
			scratch[k] = a
		case 0x03:
			scratch[k] = x
		case 0x04, 0x0c:
			a += operand
		case 0x14, 0x1c:
			a -= operand
		case 0x24, 0x2c:
			a *= operand
		case 0x34, 0x3c, 0x94, 0x9c:
			switch {
			case operand == 0:
				ok = false
			case ins.Op < 0x90:
				a /= operand
			default:
				a %= operand
			}
		case 0x44, 0x4c:
			a |= operand
		case 0x54, 0x5c:
			a &= operand
		case 0x64, 0x6c:
			m.beyondVM = m.beyondVM || operand > 31
			a <<= operand & 31
		case 0x74, 0x7c:
			m.beyondVM = m.beyondVM || operand > 31
			a >>= operand & 31
		case 0x84:
			a = -a
			m.beyondVM = true
		case 0xa4, 0xac:
			a ^= operand
		case 0x05:
			pc += int(k)
		case 0x15, 0x1d, 0x25, 0x2d, 0x35, 0x3d, 0x45, 0x4d:
			var met bool
			switch ins.Op & 0xf0 {
			case 0x10:
				met = a == operand
			case 0x20:
				met = a > operand
			case 0x30:
				met = a >= operand
			case 0x40:
				met = a&operand != 0
			}
			if met {
				pc += int(ins.Jt)
			} else {
				pc += int(ins.Jf)
			}
		case 0x06:
			return k
		case 0x16:
			return a
		case 0x07:
			x = a
		case 0x87:
			a = x
		default:
			panic(fmt.Sprintf("no instruction %#x", ins.Op))
		}
		if !ok {
			return 0
		}
	}
}

// generator makes random programs that Check accepts.
type generator struct {
	random
	length int // of a typical packet
	// modulo, unless it is 0, is what most results are below.
	modulo uint32
	// headers has loads relative to the headers made, too.
	headers bool
}

func (g generator) constant() uint32 {
	switch g.IntN(8) {
	case 0:
		return g.Uint32()
	case 1:
		return pick[uint32](g.random, 0, 1, 0x7fffffff, 0x80000000, 0xffffffff, 0xffff, 0x10000)
	case 2:
		return 1 << g.IntN(32)
	default:
		return g.Uint32N(256)
	}
}

func (g generator) offset() uint32 {
	switch p := g.IntN(100); {
	case p < 90:
		return g.Uint32N(uint32(max(g.length, 8)) / 2)
	case p < 94:
		return g.Uint32N(uint32(g.length) + 8)
	case p < 96 && g.headers:
		return pick[uint32](g.random, offNetwork, offLink) + g.Uint32N(uint32(g.length)+30)
	case p < 97 && g.headers:
		return pick[uint32](g.random, offNetwork, offLink, offAncillary) - 1 - g.Uint32N(4)
	default:
		return pick(g.random, 32767, 32755+g.Uint32N(12), 65535, 0x7fffffff, 0x80000000, g.Uint32()>>1)
	}
}

// program makes one of n instructions and a few more.
func (g generator) program(n int) []bpf.RawInstruction {
	const all = 1<<16 - 1
	var program []bpf.RawInstruction
	tail := []bpf.RawInstruction{op(0x16, 0)}
	if g.modulo != 0 {
		tail = []bpf.RawInstruction{op(0x94, g.modulo), op(0x16, 0)}
	}
	total := n + len(tail)
	stored := make([]uint16, total)
	for i := range stored {
		stored[i] = all
	}
	valid := uint16(0)
	for i := range n {
		valid &= stored[i]
		following := total - i - 1
		var ins bpf.RawInstruction
		for {
			ins = g.instruction(following)
			if mem := ins.Op == 0x60 || ins.Op == 0x61; !mem || valid&(1<<ins.K) != 0 {
				break
			}
		}
		switch {
		case ins.Op == 0x02 || ins.Op == 0x03:
			valid |= 1 << ins.K
		case ins.Op == 0x05:
			stored[i+1+int(ins.K)] &= valid
			valid = all
		case ins.Op&7 == 5:
			stored[i+1+int(ins.Jt)] &= valid
			stored[i+1+int(ins.Jf)] &= valid
			valid = all
		}
		program = append(program, ins)
	}
	return append(program, tail...)
}

func (g generator) instruction(following int) bpf.RawInstruction {
	near := func() uint32 {
		if g.chance(80) {
			return g.Uint32N(uint32(min(following, 6)))
		}
		return g.Uint32N(uint32(min(following, 255)))
	}
	switch p := g.IntN(100); {
	case p < 22:
		for {
			ins := op(pick[uint16](g.random, 0x20, 0x28, 0x30), g.offset())
			if ins.K < offAncillary {
				return ins
			}
		}
	case p < 32:
		return op(pick[uint16](g.random, 0x40, 0x48, 0x50), pick(g.random, 0, g.offset(), -g.Uint32N(8)))
	case p < 36:
		return op(0xb1, g.offset())
	case p < 38:
		return op(pick[uint16](g.random, 0x80, 0x81), 0)
	case p < 40:
		return op(0x20, 0xfffff000+40)
	case p < 44:
		return op(0x00, g.constant())
	case p < 50:
		return op(0x01, pick(g.random, g.Uint32N(32), g.constant()))
	case p < 56:
		return op(pick[uint16](g.random, 0x02, 0x03), g.Uint32N(16))
	case p < 62:
		return op(pick[uint16](g.random, 0x60, 0x61), g.Uint32N(16))
	case p < 68:
		return op(pick[uint16](g.random, 0x07, 0x87), 0)
	case p < 84:
		code := pick[uint16](g.random, 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0) | 4
		ins := op(code|pick[uint16](g.random, 0, 8), g.constant())
		switch ins.Op {
		case 0x34, 0x94:
			ins.K = max(ins.K, 1)
		case 0x64, 0x74:
			ins.K %= 32
		case 0x8c:
			ins.Op = 0x84
		}
		return ins
	case p < 97:
		code := pick[uint16](g.random, 0x15, 0x25, 0x35, 0x45) | pick[uint16](g.random, 0, 0, 8)
		return jmp(code, g.constant(), uint8(near()), uint8(near()))
	case p < 98:
		return op(0x05, near())
	default:
		ins := op(pick[uint16](g.random, 0x06, 0x16), g.constant())
		if g.modulo != 0 {
			return op(0x06, g.Uint32N(g.modulo))
		}
		return ins
	}
}

// text writes a program for a message.
func text(program []bpf.RawInstruction) string {
	var b strings.Builder
	for i, ins := range program {
		fmt.Fprintf(&b, "%4d  {%#04x, %d, %d, %#x}  %s\n", i, ins.Op, ins.Jt, ins.Jf, ins.K, describe(ins))
	}
	return b.String()
}

func translate(t testing.TB, program []bpf.RawInstruction, o Options) asm.Instructions {
	t.Helper()
	code, err := Translate(program, o)
	if err != nil {
		t.Fatalf("%v\n%s", err, text(program))
	}
	return code
}

// needBPF skips the test where it may not load programs.
func needBPF(t testing.TB) {
	t.Helper()
	testutil.Need(t, capset.BPF, capset.Perfmon, capset.NetAdmin)
	if err := rlimit.RemoveMemlock(); err != nil { // before Linux 5.11
		t.Fatal(err)
	}
}

// loadFilter loads a translation as a socket filter of its own.
func loadFilter(t testing.TB, program []bpf.RawInstruction) *ebpf.Program {
	t.Helper()
	return load(t, &ebpf.ProgramSpec{
		Type:         ebpf.SocketFilter,
		Instructions: translate(t, program, Options{}),
		License:      "Dual BSD/GPL",
	}, program)
}

// load loads a program; the caller closes it.
func load(t testing.TB, spec *ebpf.ProgramSpec, program []bpf.RawInstruction) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(spec)
	if err != nil {
		classic := ""
		if len(program) < 100 {
			classic = text(program)
		}
		t.Fatalf("%+v\n%s", err, classic)
	}
	return p
}

// chooser is a reuseport program that notes the value of a translation, and
// selects the socket of that index.
func chooser(code asm.Instructions, sockets, noted *ebpf.Map) *ebpf.ProgramSpec {
	main := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.Call.Label(DefaultSymbol),
		asm.StoreMem(asm.R10, -4, asm.R0, asm.Word),
		asm.StoreImm(asm.R10, -8, 0, asm.Word),
		asm.LoadMapPtr(asm.R1, noted.FD()),
		asm.Mov.Reg(asm.R2, asm.R10),
		asm.Add.Imm(asm.R2, -8),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "out"),
		asm.LoadMem(asm.R1, asm.R10, -4, asm.Word),
		asm.StoreMem(asm.R0, 0, asm.R1, asm.Word),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.LoadMapPtr(asm.R2, sockets.FD()),
		asm.Mov.Reg(asm.R3, asm.R10),
		asm.Add.Imm(asm.R3, -4),
		asm.Mov.Imm(asm.R4, 0),
		asm.FnSkSelectReuseport.Call(),
		asm.Mov.Imm(asm.R0, 1).WithSymbol("out"),
		asm.Return(),
	}
	return &ebpf.ProgramSpec{
		Type:         ebpf.SkReuseport,
		AttachType:   ebpf.AttachSkReuseportSelect,
		Instructions: append(function("main", main), code...),
		License:      "Dual BSD/GPL",
	}
}

// maps of a chooser, which live as long as the test.
func chooserMaps(t testing.TB, sockets int) (array, noted *ebpf.Map) {
	t.Helper()
	for m, spec := range map[**ebpf.Map]*ebpf.MapSpec{
		&array: {Type: ebpf.ReusePortSockArray, KeySize: 4, ValueSize: 8, MaxEntries: uint32(sockets)},
		&noted: {Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1},
	} {
		var err error
		if *m, err = ebpf.NewMap(spec); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := (*m).Close(); err != nil {
				t.Error(err)
			}
		})
	}
	return array, noted
}

// attachClassic attaches a classic program, and returns what the kernel says.
func attachClassic(fd, option int, program []bpf.RawInstruction) error {
	filter := make([]unix.SockFilter, len(program))
	for i, ins := range program {
		filter[i] = unix.SockFilter{Code: ins.Op, Jt: ins.Jt, Jf: ins.Jf, K: ins.K}
	}
	fprog := unix.SockFprog{Len: uint16(len(filter))}
	if len(filter) > 0 {
		fprog.Filter = &filter[0]
	}
	return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, option, &fprog)
}

// ethernet puts a header before a packet, as BPF_PROG_TEST_RUN wants one.
func ethernet(packet []byte) []byte {
	frame := make([]byte, 14, 14+len(packet))
	binary.BigEndian.PutUint16(frame[12:], 0x88b5) // of no protocol that the kernel looks into
	return append(frame, packet...)
}

// testRun is BPF_PROG_TEST_RUN of a socket filter.
func testRun(t testing.TB, p *ebpf.Program, packet []byte) uint32 {
	t.Helper()
	ret, err := p.Run(&ebpf.RunOptions{Data: ethernet(packet)})
	if err != nil {
		t.Fatal(err)
	}
	return ret
}
