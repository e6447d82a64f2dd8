// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// trace prepares a data plane for telling of packets, or takes that out of it.
func trace(spec *ebpf.CollectionSpec, room uint32) error {
	tracing := spec.Variables[quicVarTracing]
	if room > 0 {
		spec.Maps[MapEvents].MaxEntries = room
		if err := tracing.Set(uint32(1)); err != nil {
			return fmt.Errorf("set constant %s: %w", quicVarTracing, err)
		}
		return nil
	}
	for _, p := range spec.Programs {
		var err error
		if p.Instructions, err = untraced(p.Instructions, tracing); err != nil {
			return fmt.Errorf("program %s: %w", p.Name, err)
		}
	}
	delete(spec.Maps, MapEvents)
	delete(spec.Maps, MapTraced)
	return nil
}

var errTracing = errors.New("constant tracing is read in an unknown way")

// untraced makes each read of a constant, which is 0, a move of 0. What depends on it is then
// taken out by the verifier, and with it all use of the maps, which need not be there. (With the
// read left in, the verifier does the same but for the read itself, a nanosecond.)
func untraced(code asm.Instructions, constant *ebpf.VariableSpec) (asm.Instructions, error) {
	out := make(asm.Instructions, 0, len(code))
	pointer := asm.Register(0)
	reading := false
	for _, ins := range code {
		switch {
		case reading:
			if ins.OpCode.Class() != asm.LdXClass || ins.Src != pointer || ins.Offset != 0 || ins.Symbol() != "" {
				return nil, fmt.Errorf("%w: %v", errTracing, ins)
			}
			reading = false
			ins = replace(ins, asm.Mov.Imm(ins.Dst, 0))
		case !ins.IsLoadFromMap():
		case ins.Reference() == constant.SectionName && uint32(ins.Constant>>32) == constant.Offset:
			pointer, reading = ins.Dst, true
			// As long as what it replaces.
			out = append(out, replace(ins, asm.Mov.Imm(ins.Dst, 0)))
			ins = asm.Instruction{OpCode: asm.OpCode(asm.JumpClass).SetJumpOp(asm.Ja)}
		case ins.Reference() == MapEvents || ins.Reference() == MapTraced:
			ins = replace(ins, asm.LoadImm(ins.Dst, 0, asm.DWord))
		}
		out = append(out, ins)
	}
	return out, nil
}

// replace returns an instruction with the symbol and the line of another one.
func replace(old, ins asm.Instruction) asm.Instruction {
	ins.Metadata = old.Metadata
	return ins.WithReference("")
}
