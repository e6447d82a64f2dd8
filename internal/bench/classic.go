// SPDX-License-Identifier: Apache-2.0

package main

import (
	classic "golang.org/x/net/bpf"

	"instar/bpf"
	"instar/dispatch"
	"instar/dispatch/cbpf"
)

// Where the cookie is in a connection ID of classicLen octets: at its end.
const (
	classicLen  = 14
	shortCookie = 1 + classicLen - 2
	longCookie  = longDCID + classicLen - 2
)

// classicProgram is what a QUIC server of another make could bring: it returns the last
// two octets of a connection ID of the server's length, behind either form of header.
func classicProgram() ([]classic.RawInstruction, error) {
	return classic.Assemble([]classic.Instruction{
		classic.LoadExtension{Num: classic.ExtLen},
		classic.JumpIf{Cond: classic.JumpGreaterOrEqual, Val: 1 + classicLen, SkipFalse: 9},
		classic.LoadAbsolute{Off: 0, Size: 1},
		classic.JumpIf{Cond: classic.JumpBitsSet, Val: 0x40, SkipFalse: 7}, // fixed bit
		classic.JumpIf{Cond: classic.JumpBitsSet, Val: 0x80, SkipFalse: 4}, // long header
		classic.LoadAbsolute{Off: longDCID - 1, Size: 1},
		classic.JumpIf{Cond: classic.JumpEqual, Val: classicLen, SkipFalse: 4},
		classic.LoadAbsolute{Off: longCookie, Size: 2},
		classic.RetA{},
		classic.LoadAbsolute{Off: shortCookie, Size: 2},
		classic.RetA{},
		classic.RetConstant{Val: 0},
	})
}

// newClassic is a group with that program.
func newClassic(root, addr string) (*receiver, error) {
	program, err := classicProgram()
	if err != nil {
		return nil, err
	}
	d, err := dispatch.ClassicDissector(program)
	if err != nil {
		return nil, err
	}
	return newInstar(root, addr, dispatch.SteeringCustom, func(o *dispatch.Options) { o.Dissector = d })
}

// linkedClassic is the program as a part of the data plane.
func linkedClassic() (*bpf.Dissector, error) {
	program, err := classicProgram()
	if err != nil {
		return nil, err
	}
	code, err := cbpf.Translate(program, cbpf.Options{Context: cbpf.ReusePort})
	if err != nil {
		return nil, err
	}
	return &bpf.Dissector{Instructions: code, Source: []byte(cbpf.Format(program))}, nil
}
