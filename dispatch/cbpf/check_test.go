// SPDX-License-Identifier: Apache-2.0

package cbpf

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

func TestCheck(t *testing.T) {
	ret := op(0x06, 0)
	raw := func(ins ...bpf.RawInstruction) []bpf.RawInstruction { return ins }
	for _, tc := range []struct {
		name    string
		program []bpf.RawInstruction
		index   int    // of the error; -1 for an error about the whole
		want    string // empty where it is accepted
	}{
		{"shortest", raw(ret), 0, ""},
		{"longest", slices.Repeat(raw(ret), MaxInstructions), 0, ""},
		{"empty", nil, -1, "it has no instructions"},
		{"too long", slices.Repeat(raw(ret), MaxInstructions+1), -1, "it has 4097 instructions: at most 4096"},
		{"no return", raw(ret, op(0x00, 1)), 1, "the last instruction has to return"},
		{"return of X", raw(op(0x0e, 0)), 0, "no such instruction"},
		{"unknown", raw(ret, op(0xff, 0), ret), 1, "no such instruction"},
		{"high bits", raw(op(0x106, 0)), 0, "no such instruction"},
		{"X = word at X", raw(op(0x41, 0), ret), 0, "no such instruction"},
		{"division by 0", raw(op(0x34, 0), ret), 0, "division by the constant 0"},
		{"remainder by 0", raw(op(0x94, 0), ret), 0, "division by the constant 0"},
		{"division by X", raw(op(0x3c, 0), ret), 0, ""},
		{"shift by 31", raw(op(0x64, 31), op(0x74, 31), ret), 0, ""},
		{"left by 32", raw(op(0x64, 32), ret), 0, "shift by more than 31 bits"},
		{"right by 32", raw(op(0x74, 32), ret), 0, "shift by more than 31 bits"},
		{"shift by X", raw(op(0x6c, 99), op(0x7c, 99), ret), 0, ""},
		{"M[16]", raw(op(0x02, 16), ret), 0, "scratch memory has the words 0 to 15"},
		{"M[16] of X", raw(op(0x03, 16), ret), 0, "scratch memory has the words 0 to 15"},
		{"M[16] loaded", raw(op(0x60, 16), ret), 0, "scratch memory has the words 0 to 15"},
		{"M[16] loaded to X", raw(op(0x61, 16), ret), 0, "scratch memory has the words 0 to 15"},
		{"M[15]", raw(op(0x02, 15), op(0x60, 15), op(0x61, 15), ret), 0, ""},
		{"not stored", raw(op(0x02, 1), op(0x60, 2), ret), 1, "M[2] is loaded, and not stored on every way to here"},
		{"stored on one way", raw(jmp(0x15, 1, 0, 1), op(0x02, 3), op(0x61, 3), ret), 2, "M[3] is loaded"},
		{"stored on both", raw(jmp(0x15, 1, 0, 2), op(0x02, 3), op(0x05, 1), op(0x03, 3), op(0x61, 3), ret), 0, ""},
		{"behind a return", raw(op(0x02, 3), jmp(0x15, 1, 1, 0), ret, op(0x61, 3), ret), 0, ""},
		{"behind a return, not stored before", raw(jmp(0x15, 1, 2, 0), op(0x05, 0), ret, op(0x61, 3), ret), 3, "M[3] is loaded"},
		{"never reached, behind a jump", raw(op(0x05, 1), op(0x60, 3), ret), 0, ""},
		{"to the last", raw(jmp(0x15, 1, 0, 0), op(0x05, 0), ret), 0, ""},
		{"past the end", raw(op(0x05, 1), ret), 0, "jump past the end: 1 instructions follow"},
		{"back", raw(ret, op(0x05, 0xffffffff), ret), 1, "jump past the end"},
		{"true past the end", raw(jmp(0x15, 1, 1, 0), ret), 0, "jump past the end"},
		{"false past the end", raw(jmp(0x4d, 1, 0, 1), ret), 0, "jump past the end"},
		{"ancillary", raw(op(0x20, 0xfffff000), op(0x28, 0xfffff000+60), op(0x30, 0xfffff000+4), ret), 0, ""},
		{"no ancillary", raw(op(0x20, 0xfffff000+1), ret), 0, "no such ancillary load"},
		{"past the ancillary", raw(op(0x30, 0xfffff000+64), ret), 0, "no such ancillary load"},
		{"ancillary at X", raw(op(0x40, 0xfffff001), ret), 0, ""},
		{"headers", raw(op(0x20, offNetwork), op(0x20, offLink), op(0x20, 0x80000000), ret), 0, ""},
	} {
		w := newWire(t)
		if err := attachClassic(w.to, unix.SO_ATTACH_FILTER, tc.program); (err == nil) != (tc.want == "") && !errors.Is(err, unix.ENOMEM) {
			t.Errorf("%s: the kernel says %v", tc.name, err)
		}
		err := Check(tc.program)
		if tc.want == "" {
			if err != nil {
				t.Errorf("%s: %v", tc.name, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
		if _, other := Translate(tc.program, Options{}); other == nil || other.Error() != err.Error() {
			t.Errorf("%s: translated: %v, want %v", tc.name, other, err)
		}
		var at *InstructionError
		if errors.As(err, &at) != (tc.index >= 0) || at != nil && (at.Index != tc.index || at.Instruction != tc.program[tc.index]) {
			t.Errorf("%s: %v, want index %d", tc.name, err, tc.index)
		}
	}
}

func TestInstructionError(t *testing.T) {
	err := Check([]bpf.RawInstruction{op(0x00, 1), op(0x34, 0), op(0x06, 0)})
	if want := "classic BPF instruction 1 (div #0): division by the constant 0"; err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	err = Check([]bpf.RawInstruction{jmp(0xff, 1, 2, 3)})
	if want := "classic BPF instruction 0 (code 0xff jt 2 jf 3 k 0x1): no such instruction"; err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

// TestRefuseAncillary is the table of what each context has.
func TestRefuseAncillary(t *testing.T) {
	refused := map[Context][]uint32{
		SocketFilter: {adHatype, adPayOffset, adNlattr, adNlattrNest},
		ReusePort: {adHatype, adPayOffset, adNlattr, adNlattrNest,
			adPktType, adIfIndex, adMark, adQueue, adRxHash, adVlanTag, adVlanTagPresent, adVlanTPID},
	}
	for context, list := range refused {
		for k, name := range ancillaryNames {
			program := []bpf.RawInstruction{op(0x00, 1), op(0x28, offAncillary+k), op(0x16, 0)}
			_, err := Translate(program, Options{Context: context})
			if !slices.Contains(list, k) {
				if err != nil {
					t.Errorf("%v: %v", context, err)
				}
				continue
			}
			var at *InstructionError
			if !errors.As(err, &at) || at.Index != 1 || !strings.Contains(err.Error(), name) || !strings.Contains(at.Reason, ": ") {
				t.Errorf("%v, %s: %v", context, name, err)
			}
			// Where control never comes it does not matter.
			program = append([]bpf.RawInstruction{op(0x05, 2)}, program...)
			if _, err := Translate(program, Options{Context: context}); err != nil {
				t.Errorf("%v, %s, not reached: %v", context, name, err)
			}
		}
	}
	if _, err := Translate([]bpf.RawInstruction{op(0x06, 0)}, Options{Context: 7}); err == nil || !strings.Contains(err.Error(), "no context 7: use") {
		t.Errorf("context 7: %v", err)
	}
}
