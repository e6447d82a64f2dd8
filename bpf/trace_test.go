// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// Without a trace there is nothing of it in a program: neither maps nor calls. With one the
// verifier takes the program as well.
func TestTraceIsThereWhenAskedFor(t *testing.T) {
	needBPF(t)
	for name, o := range dataPlanes {
		t.Run(name, func(t *testing.T) {
			size := map[bool]uint32{}
			for _, traced := range []bool{false, true} {
				c := Config{Steering: o.steering, MaxGenerations: 4, MaxWorkers: 4, FlowEntries: 64, Prefix: 8, FlowTimeout: 1}
				if o.steering == SteeringCustom {
					c.Dissector = constant(0)
				}
				if traced {
					c.Trace = 1 << 16
				}
				spec, program, err := Spec(c)
				if err != nil {
					t.Fatal(err)
				}
				loaded, err := ebpf.NewCollection(spec)
				if err != nil {
					t.Fatal(err)
				}
				defer loaded.Close()
				info, err := loaded.Programs[program].Info()
				if err != nil {
					t.Fatal(err)
				}
				maps, _ := info.MapIDs()
				for _, m := range []string{MapEvents, MapTraced} {
					if (loaded.Maps[m] != nil) != traced {
						t.Errorf("traced: %t; map %s is there: %t", traced, m, loaded.Maps[m] != nil)
					}
					if !traced {
						continue
					}
					i, err := loaded.Maps[m].Info()
					if err != nil {
						t.Fatal(err)
					}
					if id, _ := i.ID(); !slices.Contains(maps, id) {
						t.Errorf("the program does not use map %s", m)
					}
				}
				if size[traced], err = info.JitedSize(); err != nil {
					t.Fatal(err)
				}
			}
			// Its two functions alone take that.
			if size[true] < size[false]+300 {
				t.Errorf("%d octets of machine code with a trace, %d without", size[true], size[false])
			}
		})
	}
}

// Compiled code that reads the constant in another way than is known is refused.
func TestUntracedRefuses(t *testing.T) {
	spec, err := loadStateless()
	if err != nil {
		t.Fatal(err)
	}
	constant := spec.Variables[quicVarTracing]
	read := asm.LoadMapValue(asm.R1, 0, constant.Offset).WithReference(constant.SectionName)
	for _, next := range []asm.Instruction{
		asm.LoadMem(asm.R1, asm.R2, 0, asm.Word), asm.LoadMem(asm.R1, asm.R1, 4, asm.Word), asm.Mov.Imm(asm.R0, 0),
	} {
		if code, err := untraced(asm.Instructions{read, next, asm.Return()}, constant); !errors.Is(err, errTracing) {
			t.Errorf("%v: %v, %v", next, code, err)
		}
	}
	code, err := untraced(asm.Instructions{read, asm.LoadMem(asm.R0, asm.R1, 0, asm.Word), asm.Return()}, constant)
	if err != nil || len(code) != 4 || code.Size() != 4*asm.InstructionSize {
		t.Errorf("%v, %v", code, err)
	}
}
