// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
)

// Dissector is a function that takes a struct sk_reuseport_md and returns what names a
// packet's flow: see enum instar_dissected in abi.h.
type Dissector struct {
	// Instructions are the function, and behind it those that it calls, each with its
	// symbol.
	Instructions asm.Instructions
	// Maps are what they refer to.
	Maps map[string]*ebpf.MapSpec
	// Source tells one dissector from another.
	Source []byte
}

// ErrDissector means that a dissector cannot be linked.
var ErrDissector = errors.New("invalid dissector")

// dissect is the name of the function in custom.bpf.c that a dissector replaces.
const dissect = "dissect"

// number is the type of what a function returns.
var number = &btf.Int{Name: "unsigned long long", Size: 8}

// link puts a dissector in the place of the function of that name.
func link(spec *ebpf.CollectionSpec, program string, d *Dissector) error {
	if d == nil || len(d.Instructions) == 0 {
		return fmt.Errorf("%w: there is none", ErrDissector)
	}
	p := spec.Programs[program]
	var out asm.Instructions
	var was *btf.Func
	var line fmt.Stringer
	// Functions follow each other; in compiled code nothing else has a symbol.
	skipping := false
	for _, ins := range p.Instructions {
		if s := ins.Symbol(); s != "" {
			if skipping = s == dissect; skipping {
				was, line = btf.FuncMetadata(&ins), ins.Source()
			}
		}
		if !skipping {
			out = append(out, ins)
		}
	}
	if was == nil {
		return fmt.Errorf("%w: the program has no function %s to replace", ErrDissector, dissect)
	}
	// Its functions and labels must not be taken for the program's.
	const prefix = dissect + "."
	ours, called := make(map[string]bool), make(map[string]bool)
	for _, ins := range d.Instructions {
		ours[ins.Symbol()] = true
		if ins.IsFunctionCall() {
			called[ins.Reference()] = true
		}
	}
	first := d.Instructions[0].Symbol()
	rename := func(symbol string) string {
		if symbol == first {
			return dissect
		}
		return prefix + symbol
	}
	for i, ins := range d.Instructions {
		symbol, reference := ins.Symbol(), ins.Reference()
		// The kernel wants to know of every function and where it comes from, if of any.
		if (i == 0 || called[symbol]) && ins.Source() == nil {
			ins = ins.WithSource(line)
		}
		switch {
		case i == 0:
			ins = btf.WithFuncMetadata(ins.WithSymbol(dissect), was)
		case symbol != "":
			if called[symbol] && btf.FuncMetadata(&ins) == nil {
				ins = btf.WithFuncMetadata(ins, &btf.Func{Name: symbol, Linkage: btf.StaticFunc, Type: &btf.FuncProto{Return: number}})
			}
			ins = ins.WithSymbol(rename(symbol))
		}
		switch {
		case reference == "":
		case ins.IsLoadFromMap():
			if d.Maps[reference] == nil {
				return fmt.Errorf("%w: it refers to a map %q that it does not bring", ErrDissector, reference)
			}
			ins = ins.WithReference(prefix + reference)
		case !ours[reference]:
			return fmt.Errorf("%w: it refers to %q, which it does not have", ErrDissector, reference)
		default:
			ins = ins.WithReference(rename(reference))
		}
		out = append(out, ins)
	}
	for name, m := range d.Maps {
		if m.Type == ebpf.StructOpsMap || m.Pinning != ebpf.PinNone {
			return fmt.Errorf("%w: map %q is a %v that is pinned by name or of the kernel; it needs a map of its own", ErrDissector, name, m.Type)
		}
		m = m.Copy()
		m.Name = ""
		spec.Maps[prefix+name] = m
	}
	p.Instructions = slices.Clip(out)
	return nil
}
