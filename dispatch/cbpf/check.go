// SPDX-License-Identifier: Apache-2.0

package cbpf

import (
	"fmt"

	"golang.org/x/net/bpf"
)

// MaxInstructions is how long a classic program may be (BPF_MAXINSNS).
const MaxInstructions = 4096

// scratchWords is the number of words of scratch memory (BPF_MEMWORDS).
const scratchWords = 16

// The parts of an opcode (include/uapi/linux/bpf_common.h and filter.h).
const (
	classMask = 0x07
	classLd   = 0x00
	classLdx  = 0x01
	classSt   = 0x02
	classStx  = 0x03
	classALU  = 0x04
	classJmp  = 0x05
	classRet  = 0x06
	classMisc = 0x07

	sizeMask = 0x18
	sizeW    = 0x00
	sizeH    = 0x08
	sizeB    = 0x10

	modeMask = 0xe0
	modeImm  = 0x00
	modeAbs  = 0x20
	modeInd  = 0x40
	modeMem  = 0x60
	modeLen  = 0x80
	modeMsh  = 0xa0

	opMask = 0xf0
	aluAdd = 0x00
	aluSub = 0x10
	aluMul = 0x20
	aluDiv = 0x30
	aluOr  = 0x40
	aluAnd = 0x50
	aluLsh = 0x60
	aluRsh = 0x70
	aluNeg = 0x80
	aluMod = 0x90
	aluXor = 0xa0

	jmpJA   = 0x00
	jmpJEQ  = 0x10
	jmpJGT  = 0x20
	jmpJGE  = 0x30
	jmpJSET = 0x40

	sourceX = 0x08 // the operand of an ALU or jump instruction is X, not k
	retA    = 0x10 // the value of a return instruction is A, not k
	miscTXA = 0x80 // A = X, not X = A
)

// Offsets that stand for something else than a place in the packet, as k of a
// load. They are negative as int32.
const (
	offAncillary = 0xfffff000 // SKF_AD_OFF
	offNetwork   = 0xfff00000 // SKF_NET_OFF
	offLink      = 0xffe00000 // SKF_LL_OFF
)

// Ancillary loads: what is added to SKF_AD_OFF.
const (
	adProtocol       = 0
	adPktType        = 4
	adIfIndex        = 8
	adNlattr         = 12
	adNlattrNest     = 16
	adMark           = 20
	adQueue          = 24
	adHatype         = 28
	adRxHash         = 32
	adCPU            = 36
	adALUXorX        = 40
	adVlanTag        = 44
	adVlanTagPresent = 48
	adPayOffset      = 52
	adRandom         = 56
	adVlanTPID       = 60
)

var ancillaryNames = map[uint32]string{
	adProtocol:       "SKF_AD_PROTOCOL",
	adPktType:        "SKF_AD_PKTTYPE",
	adIfIndex:        "SKF_AD_IFINDEX",
	adNlattr:         "SKF_AD_NLATTR",
	adNlattrNest:     "SKF_AD_NLATTR_NEST",
	adMark:           "SKF_AD_MARK",
	adQueue:          "SKF_AD_QUEUE",
	adHatype:         "SKF_AD_HATYPE",
	adRxHash:         "SKF_AD_RXHASH",
	adCPU:            "SKF_AD_CPU",
	adALUXorX:        "SKF_AD_ALU_XOR_X",
	adVlanTag:        "SKF_AD_VLAN_TAG",
	adVlanTagPresent: "SKF_AD_VLAN_TAG_PRESENT",
	adPayOffset:      "SKF_AD_PAY_OFFSET",
	adRandom:         "SKF_AD_RANDOM",
	adVlanTPID:       "SKF_AD_VLAN_TPID",
}

// InstructionError is why an instruction is refused.
type InstructionError struct {
	// Index is the position of the instruction, from 0.
	Index       int
	Instruction bpf.RawInstruction
	// Reason says what is wrong, and what to do where that is not plain.
	Reason string
}

func (e *InstructionError) Error() string {
	return fmt.Sprintf("classic BPF instruction %d (%s): %s", e.Index, describe(e.Instruction), e.Reason)
}

// describe is the instruction in the language of bpf_asm, or its numbers.
func describe(ins bpf.RawInstruction) string {
	if k, ok := ancillary(ins); ok {
		return ancillaryNames[k]
	}
	if s, ok := ins.Disassemble().(fmt.Stringer); ok {
		return s.String()
	}
	return fmt.Sprintf("code %#x jt %d jf %d k %#x", ins.Op, ins.Jt, ins.Jf, ins.K)
}

// ancillary returns what an ancillary load reads: bpf_anc_helper of
// include/linux/filter.h, for which the size of the load does not matter.
func ancillary(ins bpf.RawInstruction) (uint32, bool) {
	if ins.Op&classMask != classLd || ins.Op&modeMask != modeAbs || ins.K < offAncillary {
		return 0, false
	}
	k := ins.K - offAncillary
	_, known := ancillaryNames[k]
	return k, known
}

// allowed is the table of chk_code_allowed.
var allowed = func() map[uint16]bool {
	codes := map[uint16]bool{
		classALU | aluNeg:          true,
		classLd | sizeW | modeLen:  true,
		classLd | modeImm:          true,
		classLd | modeMem:          true,
		classLdx | sizeW | modeLen: true,
		classLdx | sizeB | modeMsh: true,
		classLdx | modeImm:         true,
		classLdx | modeMem:         true,
		classSt:                    true,
		classStx:                   true,
		classMisc:                  true, // TAX
		classMisc | miscTXA:        true,
		classRet:                   true, // of k
		classRet | retA:            true,
		classJmp | jmpJA:           true,
		classLd | sizeW | modeAbs:  true,
		classLd | sizeH | modeAbs:  true,
		classLd | sizeB | modeAbs:  true,
		classLd | sizeW | modeInd:  true,
		classLd | sizeH | modeInd:  true,
		classLd | sizeB | modeInd:  true,
	}
	for _, op := range []uint16{aluAdd, aluSub, aluMul, aluDiv, aluMod, aluAnd, aluOr, aluXor, aluLsh, aluRsh} {
		codes[classALU|op] = true
		codes[classALU|op|sourceX] = true
	}
	for _, op := range []uint16{jmpJEQ, jmpJGE, jmpJGT, jmpJSET} {
		codes[classJmp|op] = true
		codes[classJmp|op|sourceX] = true
	}
	return codes
}()

// Check refuses what the kernel refuses to attach as a classic program:
// bpf_check_classic of net/core/filter.c. The error is an [*InstructionError],
// but where the program as a whole is too short or too long.
//
// The kernel has two more limits, which are not checked here, as they are about
// its own translation: net.core.optmem_max bounds the size of a program, and no
// jump may be longer than 32767 of the kernel's instructions.
func Check(program []bpf.RawInstruction) error {
	switch n := len(program); {
	case n == 0:
		return fmt.Errorf("check classic BPF program: it has no instructions: it needs at least one that returns")
	case n > MaxInstructions:
		return fmt.Errorf("check classic BPF program: it has %d instructions: at most %d are allowed", n, MaxInstructions)
	}
	for i, ins := range program {
		if reason := checkInstruction(ins, uint32(len(program)-i-1)); reason != "" {
			return &InstructionError{i, ins, reason}
		}
	}
	last := len(program) - 1
	if program[last].Op&classMask != classRet {
		return &InstructionError{last, program[last], "the last instruction has to return: append ret #0"}
	}
	return checkScratch(program)
}

// checkInstruction says what is wrong with an instruction that so many follow.
func checkInstruction(ins bpf.RawInstruction, following uint32) string {
	if !allowed[ins.Op] {
		return "no such instruction"
	}
	switch ins.Op & classMask {
	case classALU:
		if ins.Op&sourceX != 0 {
			break
		}
		switch ins.Op & opMask {
		case aluDiv, aluMod:
			if ins.K == 0 {
				return "division by the constant 0"
			}
		case aluLsh, aluRsh:
			if ins.K >= 32 {
				return "shift by more than 31 bits"
			}
		}
	case classJmp:
		if ins.Op&opMask == jmpJA {
			if ins.K >= following {
				return fmt.Sprintf("jump past the end: %d instructions follow", following)
			}
		} else if uint32(ins.Jt) >= following || uint32(ins.Jf) >= following {
			return fmt.Sprintf("jump past the end: %d instructions follow", following)
		}
	case classLd, classLdx:
		if ins.Op&modeMask == modeMem && ins.K >= scratchWords {
			return "scratch memory has the words 0 to 15"
		}
		if _, known := ancillary(ins); ins.Op&classMask == classLd && ins.Op&modeMask == modeAbs && ins.K >= offAncillary && !known {
			return "no such ancillary load"
		}
	case classSt, classStx:
		if ins.K >= scratchWords {
			return "scratch memory has the words 0 to 15"
		}
	}
	return ""
}

// checkScratch is check_load_and_stores: a word of scratch memory is stored on
// all ways to a load of it. Like there, a way leads on from an instruction that
// returns to the one behind it.
func checkScratch(program []bpf.RawInstruction) error {
	const all = 1<<scratchWords - 1
	stored := make([]uint16, len(program)) // on all ways that jump to an instruction
	for i := range stored {
		stored[i] = all
	}
	var valid uint16
	for i, ins := range program {
		valid &= stored[i]
		switch {
		case ins.Op == classSt || ins.Op == classStx:
			valid |= 1 << ins.K
		case ins.Op == classLd|modeMem || ins.Op == classLdx|modeMem:
			if valid&(1<<ins.K) == 0 {
				return &InstructionError{i, ins, fmt.Sprintf("M[%d] is loaded, and not stored on every way to here: store a value at the start", ins.K)}
			}
		case ins.Op == classJmp|jmpJA:
			stored[i+1+int(ins.K)] &= valid
			valid = all
		case ins.Op&classMask == classJmp:
			stored[i+1+int(ins.Jt)] &= valid
			stored[i+1+int(ins.Jf)] &= valid
			valid = all
		}
	}
	return nil
}
