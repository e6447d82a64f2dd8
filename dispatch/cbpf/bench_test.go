// SPDX-License-Identifier: Apache-2.0

package cbpf

import (
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"instar/internal/testutil"
)

// quicPackets are what the program quicLike takes its ways for.
var quicPackets = []struct {
	name   string
	packet []byte
	want   uint32
}{
	{"long header", append([]byte{0xc0, 0, 0, 0, 1, 8, 1, 2, 3, 4, 5, 6, 7, 0x10, 0x42}, make([]byte, 1185)...), 0x1042},
	{"short header", append([]byte{0x40, 1, 2, 3, 4, 5, 6, 7, 0x10, 0x42}, make([]byte, 30)...), 0x42},
}

func TestQUICLike(t *testing.T) {
	needBPF(t)
	testutil.NetNS(t)
	program := quicLike(t)
	pair := newPairOfGroups(t)
	pair.attach(program)
	p := loadFilter(t, program)
	defer p.Close()
	for _, tc := range quicPackets {
		pair.translated.send(tc.packet)
		if got, other := pair.value(), testRun(t, p, tc.packet); got != tc.want || other != tc.want {
			t.Errorf("%s: reuseport %#x, socket filter %#x, want %#x", tc.name, got, other, tc.want)
		}
	}
	code := translate(t, program, Options{Context: ReusePort})
	n := steps(t, code)
	t.Logf("reuseport: %d instructions, %d on the way of a short header", len(code), n)
	if n > 15 {
		t.Errorf("%d instructions on the way of a short header, want at most 15 for 5 classic ones", n)
	}
}

// steps counts the instructions that the translation of quicLike executes for a
// short header that is in place: those up to the first return, as its ways
// are laid out.
func steps(t *testing.T, code asm.Instructions) int {
	t.Helper()
	for i, ins := range code {
		if ins.OpCode.JumpOp() == asm.Exit && ins.OpCode.Class() == asm.JumpClass {
			return i + 1
		}
	}
	t.Fatal("no return")
	return 0
}

// empty is the program that the others are compared with.
var empty = []bpf.RawInstruction{{Op: 0x06}}

// BenchmarkSocketFilter is what the program quicLike costs as a socket filter,
// net of an empty program.
func BenchmarkSocketFilter(b *testing.B) {
	needBPF(b)
	run := func(program []bpf.RawInstruction, packet []byte, n int) time.Duration {
		p := loadFilter(b, program)
		defer p.Close()
		_, perRun, err := p.Benchmark(ethernet(packet), n, nil)
		if err != nil {
			b.Fatal(err)
		}
		return perRun
	}
	for _, tc := range quicPackets {
		b.Run(tc.name, func(b *testing.B) {
			const n = 1 << 20
			for range b.N {
				base := run(empty, tc.packet, n)
				with := run(quicLike(b), tc.packet, n)
				b.ReportMetric(float64(with-base), "net-ns/packet")
				b.ReportMetric(float64(base), "empty-ns/packet")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkReusePort is the same for a reuseport program. The kernel has no test
// runs for those; a program that calls the translation many times for one
// datagram is timed by the kernel's own statistics.
func BenchmarkReusePort(b *testing.B) {
	needBPF(b)
	testutil.NetNS(b)
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		b.Fatal(err)
	}
	defer stats.Close()
	g := newGroup(b)
	const calls, datagrams = 256, 4000
	run := func(program []bpf.RawInstruction, packet []byte) float64 {
		code := translate(b, program, Options{Context: ReusePort})
		main := asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.Mov.Imm(asm.R7, 0),
			asm.Mov.Reg(asm.R1, asm.R6).WithSymbol("again"),
			asm.Call.Label(DefaultSymbol),
			asm.Add.Imm(asm.R7, 1),
			asm.JLT.Imm(asm.R7, calls, "again"),
			asm.Mov.Imm(asm.R0, 1),
			asm.Return(),
		}
		p := load(b, &ebpf.ProgramSpec{
			Type:         ebpf.SkReuseport,
			AttachType:   ebpf.AttachSkReuseportSelect,
			Instructions: append(function("main", main), code...),
			License:      "Dual BSD/GPL",
		}, program)
		defer p.Close()
		g.attach(p)
		for range datagrams {
			g.send(packet)
		}
		s, err := p.Stats()
		if err != nil {
			b.Fatal(err)
		}
		return float64(s.Runtime) / float64(s.RunCount) / calls
	}
	for _, tc := range quicPackets {
		b.Run(tc.name, func(b *testing.B) {
			for range b.N {
				base := run(empty, tc.packet)
				with := run(quicLike(b), tc.packet)
				b.ReportMetric(with-base, "net-ns/packet")
				b.ReportMetric(base, "empty-ns/packet")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}
