// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"instar/bpf"
	"instar/dispatch"
)

// skPass is SK_PASS of enum sk_action (linux/bpf.h).
const skPass = 1

// emptyProgram decides nothing: the kernel's hash does. It is the zero.
func emptyProgram() (*ebpf.Program, error) {
	return loadProgram(emptyName, asm.Instructions{
		asm.Mov.Imm(asm.R0, skPass),
		asm.Return(),
	})
}

// selectProgram gives each packet to the first socket of an array.
func selectProgram(sockets *ebpf.Map) (*ebpf.Program, error) {
	return loadProgram("select", asm.Instructions{
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.LoadMapPtr(asm.R2, sockets.FD()),
		asm.Mov.Reg(asm.R3, asm.RFP),
		asm.Add.Imm(asm.R3, -4),
		asm.Mov.Imm(asm.R4, 0),
		asm.FnSkSelectReuseport.Call(),
		asm.Mov.Imm(asm.R0, skPass),
		asm.Return(),
	})
}

func loadProgram(name string, code asm.Instructions) (*ebpf.Program, error) {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: name, Type: ebpf.SkReuseport, AttachType: ebpf.AttachSkReuseportSelect,
		Instructions: code, License: "Dual BSD/GPL",
	})
	if err != nil {
		return nil, fmt.Errorf("load program %s: %w", name, err)
	}
	return p, nil
}

// Program is how large a program is.
type Program struct {
	Name string `json:"name"`
	// Verified counts the instructions that the verifier went through, on all
	// paths together.
	Verified int `json:"verified_instructions"`
	// JITed is the size of the machine code in bytes.
	JITed int `json:"jited_bytes"`
}

// measurePrograms loads the data plane of each steering, at the default sizes.
func measurePrograms() ([]Program, error) {
	var programs []Program
	for _, s := range []dispatch.Steering{dispatch.SteeringStateless, dispatch.SteeringQUIC, dispatch.SteeringFlow, dispatch.SteeringWireGuard,
		dispatch.SteeringCustom, dispatch.SteeringTCP} {
		p, err := measureProgram(s)
		if err != nil {
			return nil, fmt.Errorf("load program %s: %w", s, err)
		}
		programs = append(programs, p)
	}
	return programs, nil
}

func measureProgram(s dispatch.Steering) (Program, error) {
	p := Program{Name: s.String()}
	var dissector *bpf.Dissector
	if s == dispatch.SteeringCustom {
		var err error
		if dissector, err = linkedClassic(); err != nil {
			return p, err
		}
	}
	spec, name, err := bpf.Spec(bpf.Config{
		Dissector: dissector,
		Steering:  uint32(s), Prefix: bpf.PrefixMin, FlowEntries: dispatch.DefaultFlowEntries,
		MaxGenerations: dispatch.DefaultMaxGenerations, MaxWorkers: dispatch.DefaultWorkers,
		FlowTimeout: uint16(dispatch.DefaultFlowTimeout / time.Second),
	})
	if err != nil {
		return p, err
	}
	c, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats},
	})
	if err != nil {
		return p, err
	}
	defer c.Close()
	program := c.Programs[name]
	if p.Verified, err = verified(program.VerifierLog); err != nil {
		return p, err
	}
	info, err := program.Info()
	if err != nil {
		return p, err
	}
	size, err := info.JitedSize()
	p.JITed = int(size)
	return p, err
}

var errLog = errors.New("verifier's log has no line \"processed N insns\"")

// verified finds the number in the verifier's summary.
func verified(log string) (n int, err error) {
	_, rest, ok := strings.Cut(log, "processed ")
	if !ok {
		return 0, errLog
	}
	if _, err := fmt.Sscanf(rest, "%d insns", &n); err != nil {
		return 0, errLog
	}
	return n, nil
}
