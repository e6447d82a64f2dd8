// SPDX-License-Identifier: Apache-2.0

package cbpf

import (
	"errors"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/net/bpf"

	"instar/internal/kernel"
	"instar/internal/testutil"
)

// hardLength is how long hard programs are.
func hardLength() int {
	if testing.Short() {
		return 256
	}
	return amount(1024, MaxInstructions)
}

// fill repeats instructions up to the length of a hard program, which ends with
// others.
func fill(repeat []bpf.RawInstruction, end ...bpf.RawInstruction) []bpf.RawInstruction {
	var program []bpf.RawInstruction
	for len(program)+len(repeat)+len(end) <= hardLength() {
		program = append(program, repeat...)
	}
	return append(program, end...)
}

// hardPrograms are long ones, and ones whose ways part and meet again with
// other values.
func hardPrograms() map[string][]bpf.RawInstruction {
	length, retA := hardLength(), op(0x16, 0)
	programs := map[string][]bpf.RawInstruction{
		"byte":                       fill([]bpf.RawInstruction{op(0x30, 3)}, retA),
		"word, far":                  fill([]bpf.RawInstruction{op(0x20, 40000)}, retA),
		"indirect":                   fill([]bpf.RawInstruction{op(0x40, 3)}, retA),
		"indirect, byte, from loads": fill([]bpf.RawInstruction{op(0x50, 0), op(0x07, 0)}, retA),
		"MSH":                        fill([]bpf.RawInstruction{op(0xb1, 3)}, op(0x87, 0), retA),
		"MSH with A":                 fill([]bpf.RawInstruction{op(0xb1, 3), op(0x0c, 0)}, retA),
		"from header":                fill([]bpf.RawInstruction{op(0x30, offNetwork)}, retA),
		"division":                   fill([]bpf.RawInstruction{op(0x81, 0), op(0x3c, 0)}, retA),
		"scratch":                    fill([]bpf.RawInstruction{op(0x02, 0), op(0x03, 15), op(0x60, 0), op(0x61, 15)}, retA),
		"compare":                    fill([]bpf.RawInstruction{jmp(0x15, 5, 0, 1), op(0x04, 1)}, retA),
		"sum of choices": fill([]bpf.RawInstruction{
			jmp(0x45, 4, 0, 1), op(0x04, 12345),
		}, jmp(0x25, 0x40000000, 0, 1), op(0x06, 1), retA),
		// X is another constant on every way, and then points into the packet.
		"index of choices": fill([]bpf.RawInstruction{
			op(0x30, 0), jmp(0x15, 7, 0, 3), op(0x87, 0), op(0x04, 1), op(0x07, 0), op(0x50, 2),
		}, retA),
		"constants of choices": fill([]bpf.RawInstruction{
			op(0x30, 0), jmp(0x45, 1, 0, 1), op(0x01, 77),
			op(0x30, 1), jmp(0x45, 2, 0, 1), op(0x01, 88), op(0x50, 1),
		}, retA),
		"scratch of choices": nil, // below
		"unknown ranges": fill([]bpf.RawInstruction{
			jmp(0x45, 1, 0, 1), op(0x30, 900), op(0x30, 1), jmp(0x45, 2, 1, 0), op(0x28, 800),
		}, retA),
		"rising ranges": nil,
		"jump over all": append(append([]bpf.RawInstruction{op(0x05, uint32(length-3))},
			slices.Repeat([]bpf.RawInstruction{op(0x40, 3)}, length-3)...), op(0x06, 7), retA)[:length],
		"far jump, taken or not": nil,
		"everything joins":       nil,
		"jump of 32 bits": slices.Concat(
			[]bpf.RawInstruction{op(0x30, 0), jmp(0x15, 1, 1, 0), op(0x05, MaxInstructions-4)},
			slices.Repeat([]bpf.RawInstruction{op(0xb1, 3)}, MaxInstructions-4), []bpf.RawInstruction{retA}),
		"indirect, half of them": append(slices.Repeat([]bpf.RawInstruction{op(0x48, 3), op(0x07, 0)}, amount(1000, 1000)), retA),
		"returns": fill([]bpf.RawInstruction{
			op(0x30, 0), jmp(0x25, 100, 0, 1), retA, op(0x28, 2), jmp(0x35, 9, 1, 0), op(0x06, 3),
		}, retA),
	}
	var stores, zeroes []bpf.RawInstruction
	for k := range uint32(16) {
		zeroes = append(zeroes, op(0x00, 5), op(0x02, k))
		stores = append(stores, op(0x30, k), jmp(0x45, 1, 0, 2), op(0x00, 0), op(0x02, k))
	}
	program := slices.Concat(zeroes, fill(stores)[:length/2/64*64], []bpf.RawInstruction{op(0x00, 0)})
	for k := range uint32(16) {
		program = append(program, op(0x61, k), op(0x0c, 0))
	}
	programs["scratch of choices"] = append(program, jmp(0x15, 3, 0, 1), op(0x06, 1), retA)

	program = nil
	for k := range uint32(length/3 - 1) {
		program = append(program, jmp(0x45, 1<<(k%8), 0, 1), op(0x30, k), op(0x04, k))
	}
	programs["rising ranges"] = append(program, retA)
	program = slices.Clone(program)
	slices.Reverse(program) // loads before jumps, and falling
	for i, ins := range program {
		if ins.Op == 0x45 {
			program[i].Jf = 2
		}
	}
	programs["falling ranges"] = append(program, op(0x04, 1), op(0x04, 1), retA)

	// A jump over nearly all, of which the most is reachable.
	program = []bpf.RawInstruction{op(0x30, 0), jmp(0x15, 1, 1, 0), op(0x05, uint32(length-6))}
	for len(program) < length-1 {
		program = append(program, op(0x40, 3))
	}
	programs["far jump, taken or not"] = append(program, retA)

	// Every instruction is reached in two ways, with A and X alive.
	program = []bpf.RawInstruction{op(0x30, 0), op(0x07, 0)}
	for len(program) < length-4 {
		program = append(program, jmp(0x1d, 0, 1, 0), op(0x0c, 0))
	}
	programs["everything joins"] = append(program, op(0x0c, 0), op(0x50, 0), retA)
	return programs
}

// needLongJump skips the test where the kernel has no jumps of 32 bits.
func needLongJump(t *testing.T) {
	t.Helper()
	running, err := kernel.Current()
	if err != nil {
		t.Fatal(err)
	}
	if since := (kernel.Version{Major: 6, Minor: 6}); !running.AtLeast(since) {
		t.Skipf("kernel %v is older than %v", running, since)
	}
}

// TestVerifierAccepts loads hard programs in both contexts, by themselves and as
// functions that a program calls.
func TestVerifierAccepts(t *testing.T) {
	needBPF(t)
	array, noted := chooserMaps(t, members)
	for name, program := range hardPrograms() {
		t.Run(name, func(t *testing.T) {
			if err := Check(program); err != nil {
				t.Fatal(err)
			}
			for _, context := range []Context{SocketFilter, ReusePort} {
				if name == "jump of 32 bits" {
					needLongJump(t)
					if testing.Short() {
						continue
					}
					if context == SocketFilter && !long() {
						continue // the kernel takes seconds
					}
				}
				spec := &ebpf.ProgramSpec{Type: ebpf.SocketFilter, License: "Dual BSD/GPL"}
				code := translate(t, program, Options{Context: context})
				if context == ReusePort {
					spec = chooser(code, array, noted)
				} else {
					spec.Instructions = code
				}
				p, err := ebpf.NewProgramWithOptions(spec, ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats})
				if err != nil {
					var ve *ebpf.VerifierError
					if errors.As(err, &ve) {
						ve.Log = ve.Log[max(0, len(ve.Log)-20):]
					}
					t.Errorf("%v, %d instructions: %+v", context, len(code), err)
					continue
				}
				info, err := p.Info()
				if err != nil {
					t.Fatal(err)
				}
				verified, ok := info.VerifiedInstructions() // since Linux 5.16
				t.Logf("%v: %d instructions, %d verified (known: %v)", context, len(code), verified, ok)
				if verified > 250_000 {
					t.Errorf("%v: the verifier went through %d instructions; its limit is a million", context, verified)
				}
				if err := p.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestCalledFilter calls a translation from a socket filter, which is not as
// plain as it looks: the loads of a filter end the function that they are in.
func TestCalledFilter(t *testing.T) {
	needBPF(t)
	program := []bpf.RawInstruction{op(0x28, 2), op(0x07, 0), op(0x50, 0), op(0x16, 0)}
	main := asm.Instructions{
		asm.Call.Label("inner"),
		asm.Add.Imm(asm.R0, 100),
		asm.Return(),
	}
	code := translate(t, program, Options{Symbol: "inner"})
	p := load(t, &ebpf.ProgramSpec{
		Type:         ebpf.SocketFilter,
		Instructions: append(function("main", main), code...),
		License:      "Dual BSD/GPL",
	}, program)
	defer p.Close()
	for packet, want := range map[string]uint32{"\x00\x00\x00\x04\x11": 117, "\x00\x00\x00\x05\x11": 100, "\x00\x00": 100} {
		if got := testRun(t, p, []byte(packet)); got != want {
			t.Errorf("%d for %q, want %d", got, packet, want)
		}
	}
}

// TestLongRandomPrograms loads long programs in both contexts, and runs them.
func TestLongRandomPrograms(t *testing.T) {
	needBPF(t)
	testutil.NetNS(t)
	r := seeded("long")
	pair := newPairOfGroups(t)
	for n := range amount(10, 200) {
		program := generator{random: r, length: 300, modulo: members}.program(500 + r.IntN(MaxInstructions-502))
		p := loadFilter(t, program)
		code := translate(t, program, Options{Context: ReusePort})
		choose := load(t, chooser(code, pair.array, pair.noted), nil)
		pair.translated.attach(choose)
		for range 10 {
			packet := r.octets(1 + r.IntN(600))
			m := machine{packet: packet, network: packet, link: ethernet(packet)}
			if got, want := testRun(t, p, packet), m.run(program); got != want {
				t.Fatalf("program %d returns %#x for %x, want %#x\n%s", n, got, packet, want, text(program))
			}
			m.network = pair.translated.headersOf(packet)
			pair.translated.send(packet)
			if got, want := pair.value(), m.run(program); got != want {
				t.Fatalf("program %d returns %#x for %x, want %#x\n%s", n, got, packet, want, text(program))
			}
		}
		for _, p := range []*ebpf.Program{p, choose} {
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// branchy makes a program of the full length whose ways part and meet at every
// turn, up to reach instructions further on.
func branchy(r random, reach uint32) []bpf.RawInstruction {
	var program []bpf.RawInstruction
	for k := range uint32(16) {
		program = append(program, op(0x02, k))
	}
	const tail = 16
	for len(program) < MaxInstructions-tail {
		following := uint32(MaxInstructions - len(program) - 1)
		near := func() uint8 { return uint8(r.Uint32N(min(following, reach))) }
		var ins bpf.RawInstruction
		switch p := r.IntN(100); {
		case p < 40:
			ins = jmp(pick[uint16](r, 0x15, 0x25, 0x35, 0x45)|pick[uint16](r, 0, 8), r.Uint32N(16), near(), near())
		case p < 50:
			ins = op(pick[uint16](r, 0x00, 0x01), r.Uint32N(100))
		case p < 60:
			ins = op(pick[uint16](r, 0x02, 0x03, 0x60, 0x61), r.Uint32N(16))
		case p < 68:
			ins = op(pick[uint16](r, 0x07, 0x87), 0)
		case p < 80:
			ins = op(pick[uint16](r, 0x04, 0x14, 0x24, 0x54)|pick[uint16](r, 0, 8), r.Uint32N(100))
		case p < 90:
			ins = op(pick[uint16](r, 0x50, 0x48, 0x40), r.Uint32N(100))
		case p < 98:
			ins = op(pick[uint16](r, 0x30, 0x28, 0x20, 0xb1), r.Uint32N(200))
		default:
			ins = op(0x16, 0)
		}
		program = append(program, ins)
	}
	return append(program, slices.Repeat([]bpf.RawInstruction{op(0x16, 0)}, tail)...)
}

// TestVerifierAcceptsBranchy loads long random programs that are hard on the
// verifier.
func TestVerifierAcceptsBranchy(t *testing.T) {
	needBPF(t)
	array, noted := chooserMaps(t, members)
	r := seeded("branchy")
	for _, reach := range []uint32{3, 10, 100, 255} {
		if testing.Short() && reach != 100 {
			continue
		}
		for range amount(1, 12) {
			program := branchy(r, reach)
			p := loadFilter(t, program)
			code := translate(t, program, Options{Context: ReusePort})
			choose := load(t, chooser(code, array, noted), program)
			for range 10 {
				packet := r.octets(1 + r.IntN(300))
				m := machine{packet: packet}
				if got, want := testRun(t, p, packet), m.run(program); got != want {
					t.Fatalf("%#x for %x, want %#x", got, packet, want)
				}
			}
			for _, p := range []*ebpf.Program{p, choose} {
				if err := p.Close(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}
