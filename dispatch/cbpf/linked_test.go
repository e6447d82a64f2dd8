// SPDX-License-Identifier: Apache-2.0

package cbpf_test

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/net/bpf"

	dataplane "instar/bpf"
	"instar/dispatch/cbpf"
	"instar/internal/capset"
	"instar/internal/testutil"
)

// TestLinked makes a translation the dissector of a group's program: a function
// that the verifier looks at by itself, among compiled ones.
func TestLinked(t *testing.T) {
	testutil.Need(t, capset.BPF, capset.Perfmon, capset.NetAdmin)
	if err := rlimit.RemoveMemlock(); err != nil { // before Linux 5.11
		t.Fatal(err)
	}
	program, err := bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: 0, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: 0x746b, SkipTrue: 4},
		bpf.LoadMemShift{Off: 2},
		bpf.LoadIndirect{Off: 3, Size: 2},
		bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: 0xffff},
		bpf.RetA{},
		bpf.RetConstant{Val: 0x80000000},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, symbol := range []string{"", "other"} {
		code, err := cbpf.Translate(program, cbpf.Options{Context: cbpf.ReusePort, Symbol: symbol})
		if err != nil {
			t.Fatal(err)
		}
		spec, name, err := dataplane.Spec(dataplane.Config{
			Steering: dataplane.SteeringCustom, MaxGenerations: 4, MaxWorkers: 4, Prefix: dataplane.PrefixMin,
			FlowEntries: 16, Dissector: &dataplane.Dissector{Instructions: code},
		})
		if err != nil {
			t.Fatal(err)
		}
		collection, err := ebpf.NewCollection(spec)
		if err != nil {
			t.Fatalf("%+v", err)
		}
		if collection.Programs[name] == nil {
			t.Errorf("no program %s", name)
		}
		collection.Close()
	}
}
