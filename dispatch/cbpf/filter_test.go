// SPDX-License-Identifier: Apache-2.0

package cbpf

import (
	"errors"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"instar/internal/testutil"
)

// wire is a pair of datagram sockets, at whose end a filter can be attached.
type wire struct {
	t        testing.TB
	from, to int
	buffer   []byte
}

func newWire(t testing.TB) *wire {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(unix.Close(fds[0]), unix.Close(fds[1])); err != nil {
			t.Error(err)
		}
	})
	return &wire{t, fds[0], fds[1], make([]byte, 1<<16)}
}

// dropped is what pass returns for a packet that the filter does not let
// through.
const dropped = -1

// pass sends a packet through, and returns how much of it arrives.
func (w *wire) pass(packet []byte) int {
	w.t.Helper()
	if _, err := unix.Write(w.from, packet); err != nil {
		w.t.Fatal(err)
	}
	n, err := unix.Read(w.to, w.buffer)
	switch {
	case errors.Is(err, unix.EAGAIN):
		return dropped
	case err != nil:
		w.t.Fatal(err)
	}
	return n
}

func (w *wire) attach(p *ebpf.Program) {
	w.t.Helper()
	if err := unix.SetsockoptInt(w.to, unix.SOL_SOCKET, unix.SO_ATTACH_BPF, p.FD()); err != nil {
		w.t.Fatal(err)
	}
}

// kept is how much of a packet arrives after a filter returned a value.
func kept(value uint32, packet []byte) int {
	if value == 0 {
		return dropped
	}
	return int(min(uint64(value), uint64(len(packet))))
}

// vm returns what the machine of x/net/bpf makes of a program.
func vm(t testing.TB, program []bpf.RawInstruction, packet []byte) (uint32, bool) {
	t.Helper()
	instructions, _ := bpf.Disassemble(program)
	machine, err := bpf.NewVM(instructions)
	if err != nil {
		return 0, false // it does not know an instruction
	}
	n, err := machine.Run(packet)
	if err != nil {
		return 0, false
	}
	return uint32(n), true
}

// TestFilterDifferential compares, over random programs and packets, the
// kernel's own classic filter, the translation on a socket and in a test run,
// and two machines in Go.
func TestFilterDifferential(t *testing.T) {
	needBPF(t)
	testutil.NetNS(t)
	const packets = 20
	classic, translated := newWire(t), newWire(t)
	r := seeded("filter")
	var pairs, vms, ended, zero int
	for n := range amount(1000, 5000) {
		length := pick(r, 1, 20, 60, 300) + r.IntN(40)
		g := generator{random: r, length: length, headers: true}
		if r.chance(60) {
			g.modulo = uint32(length) + 2
		}
		program := g.program(1 + r.IntN(pick(r, 8, 30, 120)))
		if err := attachClassic(classic.to, unix.SO_ATTACH_FILTER, program); err != nil {
			t.Fatalf("program %d: %v\n%s", n, err, text(program))
		}
		p := loadFilter(t, program)
		translated.attach(p)
		for range packets {
			packet := r.octets(max(1, length-pick(r, 0, 0, r.IntN(length))))
			want := classic.pass(packet)
			if got := translated.pass(packet); got != want {
				t.Fatalf("program %d keeps %d of %x, the kernel's %d\n%s", n, got, packet, want, text(program))
			}
			m := machine{packet: packet, network: packet, link: ethernet(packet)}
			value := m.run(program)
			if got := testRun(t, p, packet); got != value {
				t.Fatalf("program %d returns %#x for %x, want %#x\n%s", n, got, packet, value, text(program))
			}
			if !m.beyondVM {
				if kept(value, packet) != want {
					t.Fatalf("program %d: %#x for %x, and the kernel keeps %d\n%s", n, value, packet, want, text(program))
				}
				if other, ok := vm(t, program, packet); ok {
					vms++
					if other != value {
						t.Fatalf("program %d: %#x for %x, x/net/bpf has %#x\n%s", n, value, packet, other, text(program))
					}
				}
			}
			pairs++
			if value == 0 {
				zero++
			} else if want < len(packet) {
				ended++
			}
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d pairs, no difference; %d with x/net/bpf, too; %d dropped, %d cut", pairs, vms, zero, ended)
}

// TestRefusedLikeKernel damages programs, and compares what is refused.
func TestRefusedLikeKernel(t *testing.T) {
	w := newWire(t)
	r := seeded("refuse")
	refused, accepted := 0, 0
	for n := range amount(20_000, 400_000) {
		program := generator{random: r, length: 60, headers: true}.program(r.IntN(30))
		for range r.IntN(3) {
			damage(r, program)
		}
		err := attachClassic(w.to, unix.SO_ATTACH_FILTER, program)
		if err != nil && !errors.Is(err, unix.EINVAL) {
			t.Fatal(err)
		}
		mine := Check(program)
		if (err == nil) != (mine == nil) {
			t.Fatalf("program %d: %v, the kernel says %v\n%s", n, mine, err, text(program))
		}
		if mine == nil {
			accepted++
			continue
		}
		refused++
		var at *InstructionError
		if !errors.As(mine, &at) || at.Instruction != program[at.Index] || at.Reason == "" {
			t.Fatalf("program %d: %v", n, mine)
		}
	}
	t.Logf("%d accepted, %d refused, no difference", accepted, refused)
}

func damage(r random, program []bpf.RawInstruction) {
	ins := &program[r.IntN(len(program))]
	switch r.IntN(6) {
	case 0:
		ins.Op = uint16(r.Uint32N(256))
	case 1:
		ins.Op ^= 1 << r.IntN(16)
	case 2:
		ins.K = pick(r, 0, 15, 16, 31, 32, r.Uint32(), offAncillary+r.Uint32N(70), uint32(len(program)))
	case 3:
		ins.Jt = uint8(r.Uint32N(256))
	case 4:
		ins.Jf = uint8(r.IntN(len(program) + 2))
	case 5:
		*ins = program[r.IntN(len(program))]
	}
}
