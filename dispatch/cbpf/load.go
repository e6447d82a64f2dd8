// SPDX-License-Identifier: Apache-2.0

package cbpf

import (
	"fmt"

	"github.com/cilium/ebpf/asm"
	"golang.org/x/net/bpf"
)

// loadAbsolute loads from a fixed offset to A or, for MSH, to X, of which A is
// kept.
func (t *translation) loadAbsolute(i int, ins bpf.RawInstruction, to asm.Register) {
	if t.direct && direct(ins) {
		t.cover(i)
		t.emit(asm.LoadMem(to, regData, int16(ins.K+udpHeader), width(sizeOf(ins))))
		t.emit(hostOrder(to, sizeOf(ins))...)
		return
	}
	keepA := to != regA && t.liveA[i]
	if keepA {
		t.emit(asm.StoreMem(asm.R10, savedA, regA, asm.DWord))
	}
	if t.o.Context == SocketFilter {
		t.emit(asm.LoadAbs(int32(ins.K), width(sizeOf(ins))))
	} else {
		t.callLoader(sizeOf(ins), asm.Mov.Imm32(asm.R2, int32(ins.K)))
	}
	if to != regA {
		t.emit(asm.Mov.Reg32(to, regA))
	}
	if keepA {
		t.emit(asm.LoadMem(regA, asm.R10, savedA, asm.DWord))
	}
}

// direct reports whether a load reads from a fixed place that a packet can have
// in place.
func direct(ins bpf.RawInstruction) bool {
	if !loadsPacket(ins) || ins.Op&modeMask == modeInd {
		return false
	}
	return uint64(ins.K)+udpHeader+uint64(sizeOf(ins)) <= directEnd
}

// cover makes sure that what an instruction loads is in place, and in the same
// go what those load that certainly follow.
func (t *translation) cover(i int) {
	if t.program[i].K+sizeOf(t.program[i]) <= t.covered[i] {
		return
	}
	need := t.covered[i]
	for j := i; ; j++ {
		if ins := t.program[j]; direct(ins) {
			need = max(need, ins.K+sizeOf(ins))
		}
		if class := t.program[j].Op & classMask; class == classJmp || class == classRet || t.sources[j+1] > 1 {
			break
		}
	}
	t.covered[i] = need
	t.emit(asm.Mov.Reg(asm.R1, regData), asm.Add.Imm(asm.R1, int32(udpHeader+need)))
	t.jumpTo(asm.JGT.Reg(asm.R1, regEnd, ""), false, i)
}

// loadIndirect loads from the offset X+k to A.
func (t *translation) loadIndirect(i int, ins bpf.RawInstruction) {
	size := sizeOf(ins)
	if t.o.Context == SocketFilter {
		t.emit(asm.LoadInd(regA, regX, int32(ins.K), width(size)))
		return
	}
	if !t.direct {
		t.callLoader(size, sum(asm.R2, ins.K)...)
		return
	}
	t.emit(sum(asm.R1, ins.K)...)
	t.jumpTo(asm.JGT.Imm32(asm.R1, directEnd, ""), false, i)
	t.emit(
		asm.Add.Reg(asm.R1, regData),
		asm.Mov.Reg(asm.R2, asm.R1),
		asm.Add.Imm(asm.R2, int32(udpHeader+size)),
	)
	t.jumpTo(asm.JGT.Reg(asm.R2, regEnd, ""), false, i)
	t.emit(asm.LoadMem(regA, asm.R1, udpHeader, width(size)))
	t.emit(hostOrder(regA, size)...)
}

// sum puts X+k into a register. A copy of X that k is added to would not do: the
// verifier of Linux 6.11 and later knows it as X with a distance, and takes the
// distance for part of the pointer that is made with it.
func sum(r asm.Register, k uint32) []asm.Instruction {
	return []asm.Instruction{asm.Mov.Imm32(r, int32(k)), asm.Add.Reg32(r, regX)}
}

// callLoader calls the function that loads so many bytes from the offset that
// the given code puts into R2.
func (t *translation) callLoader(size uint32, offset ...asm.Instruction) {
	t.loaders[size] = true
	t.emit(asm.Mov.Reg(asm.R1, regCtx))
	t.emit(offset...)
	found := asm.JSGE.Imm(regA, 0, "")
	found.Offset = 2
	t.emit(asm.Call.Label(t.loaderName(size)), found)
	t.emit(returnZero()...)
}

func (t *translation) loaderName(size uint32) string {
	return fmt.Sprintf("%s_load%d", t.o.Symbol, 8*size)
}

// Headers that bpf_skb_load_bytes_relative counts from (enum
// bpf_hdr_start_off).
const (
	headerMAC = 0
	headerNet = 1
)

// headerSpan is how far SKF_LL_OFF is below SKF_NET_OFF, and that below 0.
const headerSpan = offNetwork - offLink

// loader is the function that loads size bytes in network byte order from the
// offset in R2, as bpf_skb_load_helper_8, _16 and _32 of net/core/filter.c do
// for classic programs, with a struct sk_reuseport_md. It returns -1 where there
// is nothing to load.
func loader(size uint32) asm.Instructions {
	const far, helper, done, fail = "far", "helper", "done", "fail"
	w := width(size)
	return link(
		// Of every two ways the verifier takes first the one that ends soonest.
		at("", asm.JGT.Imm32(asm.R2, directEnd, far)),
		at("", asm.LoadMem(asm.R3, asm.R1, mdData, asm.DWord)),
		at("", asm.LoadMem(asm.R4, asm.R1, mdDataEnd, asm.DWord)),
		at("", asm.Add.Reg(asm.R3, asm.R2)),
		at("", asm.Mov.Reg(asm.R5, asm.R3)),
		at("", asm.Add.Imm(asm.R5, int32(udpHeader+size))),
		at("", asm.JGT.Reg(asm.R5, asm.R4, helper)),
		at("", asm.LoadMem(regA, asm.R3, udpHeader, w)),
		at("", hostOrder(regA, size)...),
		at("", asm.Return()),

		at(helper, asm.Add.Imm(asm.R2, udpHeader)),
		at("", asm.Mov.Reg(asm.R3, asm.R10)),
		at("", asm.Add.Imm(asm.R3, -4)),
		at("", asm.Mov.Imm(asm.R4, int32(size))),
		at("", asm.FnSkbLoadBytes.Call()),
		at(done, asm.JNE.Imm(regA, 0, fail)),
		at("", asm.LoadMem(regA, asm.R10, -4, w)),
		at("", hostOrder(regA, size)...),
		at("", asm.Return()),

		// Negative offsets count from a header of the packet.
		at(far, asm.JSGE.Imm32(asm.R2, 0, helper)),
		at("", asm.Mov.Imm(asm.R5, headerNet)),
		at("", asm.Add.Imm32(asm.R2, headerSpan)),
		at("", asm.JSGE.Imm32(asm.R2, 0, "relative")),
		at("", asm.Mov.Imm(asm.R5, headerMAC)),
		at("", asm.Add.Imm32(asm.R2, headerSpan)),
		at("", asm.JSLT.Imm32(asm.R2, 0, fail)),
		at("relative", asm.Mov.Reg(asm.R3, asm.R10)),
		at("", asm.Add.Imm(asm.R3, -4)),
		at("", asm.Mov.Imm(asm.R4, int32(size))),
		at("", asm.FnSkbLoadBytesRelative.Call()),
		at("", asm.Ja.Label(done)),

		at(fail, asm.Mov.Imm(regA, -1)),
		at("", asm.Return()),
	)
}

// labelled is code that jumps by the names of places.
type labelled struct {
	label string
	code  []asm.Instruction
}

func at(label string, code ...asm.Instruction) labelled { return labelled{label, code} }

// link resolves the names. They stay out of the program, where symbols are
// functions.
func link(parts ...labelled) asm.Instructions {
	places := map[string]int{}
	var code asm.Instructions
	for _, p := range parts {
		if p.label != "" {
			places[p.label] = len(code)
		}
		code = append(code, p.code...)
	}
	for i, ins := range code {
		if place, ok := places[ins.Reference()]; ok {
			code[i] = ins.WithReference("")
			code[i].Offset = int16(place - i - 1)
		}
	}
	return code
}

func width(size uint32) asm.Size {
	switch size {
	case 1:
		return asm.Byte
	case 2:
		return asm.Half
	}
	return asm.Word
}

// hostOrder turns what was loaded from a packet into a number.
func hostOrder(r asm.Register, size uint32) []asm.Instruction {
	if size == 1 {
		return nil
	}
	return []asm.Instruction{asm.HostTo(asm.BE, r, width(size))}
}
