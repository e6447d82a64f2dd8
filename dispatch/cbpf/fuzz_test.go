// SPDX-License-Identifier: Apache-2.0

package cbpf

import (
	"encoding/binary"
	"errors"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

func FuzzParse(f *testing.F) {
	f.Add("4\n48 0 0 9\n21 0 1 17\n6 0 0 4294967295\n6 0 0 0\n")
	f.Add("4,48 0 0 9,21 0 1 17,6 0 0 4294967295,6 0 0 0,")
	f.Add("1\r\n6 0 0 0")
	f.Add("4097\n")
	f.Add("0")
	f.Add(",,,")
	f.Add("1,6 0 0 0\n6 0 0 0")
	f.Fuzz(func(t *testing.T, s string) {
		program, err := Parse(s)
		if err != nil {
			if program != nil {
				t.Fatalf("%v, and %v", program, err)
			}
			return
		}
		again, err := Parse(Format(program))
		if err != nil || !slices.Equal(again, program) {
			t.Fatalf("%v is written %q, and read as %v, %v", program, Format(program), again, err)
		}
	})
}

// encode and decode are programs as the kernel has them in memory.

func encode(program []bpf.RawInstruction) []byte {
	var b []byte
	for _, ins := range program {
		b = binary.LittleEndian.AppendUint16(b, ins.Op)
		b = append(b, ins.Jt, ins.Jf)
		b = binary.LittleEndian.AppendUint32(b, ins.K)
	}
	return b
}

func decode(b []byte) []bpf.RawInstruction {
	var program []bpf.RawInstruction
	for ; len(b) >= 8; b = b[8:] {
		program = append(program, bpf.RawInstruction{
			Op: binary.LittleEndian.Uint16(b), Jt: b[2], Jf: b[3], K: binary.LittleEndian.Uint32(b[4:]),
		})
	}
	return program
}

// FuzzTranslate takes octets for a program and a packet. What the kernel refuses
// to attach is refused, and nothing else; the verifier accepts all that is
// translated; and a filter returns what the machine in Go does.
func FuzzTranslate(f *testing.F) {
	needBPF(f)
	r := seeded("fuzz")
	packet := r.octets(60)
	for n := range 20 {
		f.Add(encode(generator{random: r, length: 60, headers: true}.program(1+n)), packet)
	}
	f.Add(encode(quicLike(f)), packet)
	f.Add(encode([]bpf.RawInstruction{op(0x20, offAncillary+adHatype), op(0x16, 0)}), packet)
	f.Add(encode([]bpf.RawInstruction{op(0x20, offAncillary+adIfIndex), op(0x20, offAncillary+adRandom), op(0x06, 1)}), packet)
	f.Add([]byte{6}, packet)
	f.Fuzz(func(t *testing.T, octets, packet []byte) {
		program := decode(octets)
		w := newWire(t)
		kernel := attachClassic(w.to, unix.SO_ATTACH_FILTER, program)
		err := Check(program)
		// Memory bounds programs, too; and in the kernel's translation a jump can
		// be too long, but not in a short program.
		same := (kernel == nil) == (err == nil) || errors.Is(kernel, unix.ENOMEM) || len(program) > 2000 && err == nil
		if !same {
			t.Fatalf("%v, the kernel says %v\n%s", err, kernel, text(program))
		}
		for _, context := range []Context{SocketFilter, ReusePort} {
			code, refused := Translate(program, Options{Context: context})
			var at *InstructionError
			switch {
			case err != nil && refused == nil:
				t.Fatalf("translated in spite of %v\n%s", err, text(program))
			case err != nil:
				continue
			case errors.As(refused, &at) && isAncillary(at.Instruction):
				continue
			case refused != nil:
				t.Fatalf("%v\n%s", refused, text(program))
			}
			spec := &ebpf.ProgramSpec{Type: ebpf.SocketFilter, License: "Dual BSD/GPL", Instructions: code}
			if context == ReusePort {
				main := function("main", asm.Instructions{asm.Call.Label(DefaultSymbol), asm.Mov.Imm(asm.R0, 1), asm.Return()})
				spec.Type, spec.AttachType = ebpf.SkReuseport, ebpf.AttachSkReuseportSelect
				spec.Instructions = slices.Concat(main, code)
			}
			p := load(t, spec, program)
			if context == SocketFilter && len(packet) > 0 && len(packet) < 1500 && !slices.ContainsFunc(program, isAncillary) {
				m := machine{packet: packet, network: packet, link: ethernet(packet)}
				if got, want := testRun(t, p, packet), m.run(program); got != want {
					t.Errorf("%#x for %x, want %#x\n%s", got, packet, want, text(program))
				}
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		}
	})
}
