// SPDX-License-Identifier: Apache-2.0

package cbpf

import "golang.org/x/net/bpf"

// flow is how control and values go through a classic program. Classic jumps
// lead forward only, so that one pass in order sees every predecessor first,
// and one in reverse every successor.
type flow struct {
	program []bpf.RawInstruction
	// reachable instructions are the only ones that are translated: the
	// verifier refuses others.
	reachable []bool
	// sources counts the instructions that lead to one.
	sources []int
	// liveA and liveX say whether the value of a register before an instruction
	// is used, there or later.
	liveA, liveX []bool
	// packet says whether the instruction or a later one loads from the packet.
	packet []bool
}

func analyze(program []bpf.RawInstruction) *flow {
	n := len(program)
	f := &flow{
		program:   program,
		reachable: make([]bool, n),
		sources:   make([]int, n),
		liveA:     make([]bool, n),
		liveX:     make([]bool, n),
		packet:    make([]bool, n),
	}
	f.reachable[0] = true
	for i := range program {
		if !f.reachable[i] {
			continue
		}
		for _, next := range f.next(i) {
			f.reachable[next] = true
			f.sources[next]++
		}
	}
	for i := n - 1; i >= 0; i-- {
		var liveA, liveX, packet bool
		for _, next := range f.next(i) {
			liveA = liveA || f.liveA[next]
			liveX = liveX || f.liveX[next]
			packet = packet || f.packet[next]
		}
		u := uses(program[i])
		f.liveA[i] = u.readsA || liveA && !u.writesA
		f.liveX[i] = u.readsX || liveX && !u.writesX
		f.packet[i] = packet || loadsPacket(program[i])
	}
	return f
}

// next lists where control goes from an instruction, each place once.
func (f *flow) next(i int) []int {
	ins := f.program[i]
	switch {
	case ins.Op&classMask == classRet:
		return nil
	case ins.Op == classJmp|jmpJA:
		return []int{i + 1 + int(ins.K)}
	case ins.Op&classMask == classJmp && ins.Jt != ins.Jf:
		return []int{i + 1 + int(ins.Jt), i + 1 + int(ins.Jf)}
	case ins.Op&classMask == classJmp:
		return []int{i + 1 + int(ins.Jt)}
	}
	return []int{i + 1}
}

// usage is what an instruction does to the registers.
type usage struct{ readsA, writesA, readsX, writesX bool }

func uses(ins bpf.RawInstruction) usage {
	withX := ins.Op&sourceX != 0
	switch ins.Op & classMask {
	case classLd:
		switch k, special := ancillary(ins); {
		case ins.Op&modeMask == modeInd:
			return usage{writesA: true, readsX: true}
		case special && k == adALUXorX:
			return usage{readsA: true, writesA: true, readsX: true}
		case special && k == adIfIndex:
			return usage{readsA: true, writesA: true} // may return A
		}
		return usage{writesA: true}
	case classLdx:
		return usage{writesX: true}
	case classSt:
		return usage{readsA: true}
	case classStx:
		return usage{readsX: true}
	case classALU:
		return usage{readsA: true, writesA: true, readsX: withX}
	case classJmp:
		// The condition does not matter where both ways are the same.
		if ins.Op&opMask == jmpJA || ins.Jt == ins.Jf {
			return usage{}
		}
		return usage{readsA: true, readsX: withX}
	case classRet:
		return usage{readsA: ins.Op&retA != 0}
	}
	if ins.Op&miscTXA != 0 {
		return usage{writesA: true, readsX: true}
	}
	return usage{readsA: true, writesX: true}
}

func isAncillary(ins bpf.RawInstruction) bool {
	_, ok := ancillary(ins)
	return ok
}

// loadsPacket reports whether an instruction reads the packet.
func loadsPacket(ins bpf.RawInstruction) bool {
	switch ins.Op & classMask {
	case classLd:
		mode := ins.Op & modeMask
		return mode == modeInd || mode == modeAbs && !isAncillary(ins)
	case classLdx:
		return ins.Op&modeMask == modeMsh
	}
	return false
}

// sizeOf is how many bytes an instruction that loads from the packet reads.
func sizeOf(ins bpf.RawInstruction) uint32 {
	switch ins.Op & sizeMask {
	case sizeH:
		return 2
	case sizeB:
		return 1
	}
	return 4
}
