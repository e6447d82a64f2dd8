// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"instar/dispatch/connid"
	"instar/internal/testutil"
)

// constant is a dissector that says the same of every packet.
func constant(names uint64) *Dissector {
	return &Dissector{Instructions: asm.Instructions{
		asm.LoadImm(asm.R0, int64(names), asm.DWord).WithSymbol("f"),
		asm.Return(),
	}}
}

// reading is a dissector that returns the payload's first eight octets, big endian. It has a
// function of its own, a label, and a map in which it counts.
func reading() *Dissector {
	return &Dissector{
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1).WithSymbol("f"),
			asm.StoreImm(asm.RFP, -4, 0, asm.Word),
			asm.LoadMapPtr(asm.R1, 0).WithReference("counts"),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "uncounted"),
			asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord),
			asm.Add.Imm(asm.R1, 1),
			asm.StoreMem(asm.R0, 0, asm.R1, asm.DWord),
			asm.Mov.Reg(asm.R1, asm.R6).WithSymbol("uncounted"),
			asm.Call.Label("read"),
			asm.Return(),

			asm.Mov.Imm(asm.R2, 8).WithSymbol("read"),
			asm.Mov.Reg(asm.R3, asm.RFP),
			asm.Add.Imm(asm.R3, -8),
			asm.Mov.Imm(asm.R4, 8),
			asm.FnSkbLoadBytes.Call(),
			asm.JNE.Imm(asm.R0, 0, "short"),
			asm.LoadMem(asm.R0, asm.RFP, -8, asm.DWord),
			asm.HostTo(asm.BE, asm.R0, asm.DWord),
			asm.Return(),
			asm.LoadImm(asm.R0, 1<<62, asm.DWord).WithSymbol("short"),
			asm.Return(),
		},
		Maps: map[string]*ebpf.MapSpec{"counts": {Name: "counts", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1}},
	}
}

var customConfig = Config{Steering: SteeringCustom, MaxGenerations: 8, MaxWorkers: 16, FlowEntries: 4096, Prefix: PrefixMin}

// What a dissector says is obeyed: cookies name workers, keys stay where they began, and
// everything else goes to the active generation.
func TestCustom(t *testing.T) {
	testutil.NetNS(t)
	c := customConfig
	c.Dissector = reading()
	g := newGroup(t, c, loopback4)
	g.join(1, 7, 2)
	g.join(2, 8, 2)
	g.setOrder(1, []uint8{2, 1}, nil)
	g.activate(g.word(2, 1))
	says := func(names uint64) []byte { return binary.BigEndian.AppendUint64(nil, names) }
	cookie := func(slot, worker uint8) []byte { return says(uint64(connid.MakeHandle(slot, worker) ^ 0xffff)) }

	for range 3 {
		g.wantSteered("a cookie of the draining one", cookie(1, 1), "1/1", "owner=1 slot1=1")
		g.wantSteered("a cookie of the active one", cookie(2, 0), "2/0", "owner=1 slot2=1")
	}
	g.wantSteered("a cookie of nobody", cookie(5, 1), "2/*", "orphan=1 slot2=1")
	g.wantSteered("a worker that cannot be", cookie(1, 200), "2/*", "orphan=1 slot2=1")
	g.wantSteered("the last cookie", says(0xffff), "2/*", "orphan=1 slot2=1")
	g.wantSteered("nothing", says(0), "2/*", "new=1 slot2=1")
	g.wantSteered("one more", says(0x10000), "2/*", "new=1 slot2=1")
	g.wantSteered("a short packet", []byte("short"), "2/*", "new=1 slot2=1")
	g.wantSteered("the largest number without a key", says(1<<63-1), "2/*", "new=1 slot2=1")

	key := says(DissectedKey | 42)
	socket := g.wantSteered("a key", key, "2/*", "new=1 slot2=1")
	g.setOrder(2, []uint8{1, 2}, nil)
	g.activate(g.word(1, 2))
	g.newClient()
	g.wantSteered("the key after a flip, from another port", key, socket, "known=1 slot2=1")
	g.wantSteered("another key", says(DissectedKey|43), "1/*", "new=1 slot1=1")
	g.closeSlot(2)
	g.wantSteered("the key when its owner is dead", key, "1/*", "new=1 slot1=1")
	var counted uint64
	if err := g.coll.Maps["dissect.counts"].Lookup(uint32(0), &counted); err != nil || counted < 10 {
		t.Errorf("the dissector counted %d packets in its map (%v)", counted, err)
	}
}

// What cannot be linked is refused, with the reason.
func TestLinkRefuses(t *testing.T) {
	c := customConfig
	for word, d := range map[string]*Dissector{
		"there is none":              nil,
		`a map "counts" that it`:     {Instructions: reading().Instructions},
		`"elsewhere", which it does`: {Instructions: asm.Instructions{asm.Call.Label("elsewhere").WithSymbol("f"), asm.Return()}},
		"pinned": {
			Instructions: reading().Instructions,
			Maps:         map[string]*ebpf.MapSpec{"counts": {Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1, Pinning: ebpf.PinByName}},
		},
	} {
		c.Dissector = d
		if _, _, err := Spec(c); !errors.Is(err, ErrDissector) || !strings.Contains(fmt.Sprint(err), word) {
			t.Errorf("%s: %v", word, err)
		}
	}
	a, b := Build(SteeringCustom, nil), Build(SteeringCustom, &Dissector{Source: []byte("x")})
	if a == b || len(b) != len(a) {
		t.Errorf("builds %q and %q", a, b)
	}
}
