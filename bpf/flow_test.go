// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"instar/dispatch/connid"
	"instar/internal/testutil"
)

var flowConfig = Config{Steering: SteeringFlow, MaxGenerations: 8, MaxWorkers: 16, FlowEntries: 4096, Prefix: PrefixMin, FlowTimeout: 60}

// peer is the key of the current client.
func (g *group) peer() (p Peer) {
	g.t.Helper()
	sa, err := unix.Getsockname(g.client)
	if err != nil {
		g.t.Fatal(err)
	}
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		p.Address = g.address.Addr().As16() // the client's is bound to any
		p.Port = uint16(sa.Port)
	case *unix.SockaddrInet6:
		p.Address = g.address.Addr().As16()
		p.Port = uint16(sa.Port)
	}
	p.Port = p.Port<<8 | p.Port>>8
	return p
}

func (g *group) tracked() (v Tracked, ok bool) {
	g.t.Helper()
	err := g.coll.Maps[MapFlows].Lookup(g.peer(), &v)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		g.t.Fatal(err)
	}
	return v, err == nil
}

func (g *group) setTracked(v Tracked) {
	g.t.Helper()
	if err := g.coll.Maps[MapFlows].Put(g.peer(), v); err != nil {
		g.t.Fatal(err)
	}
}

func owner(slot, worker uint8, number uint32) uint64 {
	return uint64(connid.MakeHandle(slot, worker))<<32 | uint64(number)
}

func (v Tracked) String() string {
	return fmt.Sprintf("generation %d, %v", uint32(v.Owner), connid.Handle(v.Owner>>32))
}

// A flow stays where it began, whatever is active, and is known to all CPUs by address and
// port (B1, A2).
func TestFlowStays(t *testing.T) {
	needBPF(t)
	for _, host := range []netip.Addr{loopback4, loopback6} {
		t.Run(host.String(), func(t *testing.T) {
			testutil.NetNS(t)
			g := newGroup(t, flowConfig, host)
			g.join(1, 7, 3)
			g.join(2, 8, 3)
			g.setOrder(1, []uint8{1}, []uint8{2})
			g.activate(g.word(1, 1))
			datagram := []byte("hello")
			first := g.wantSteered("first packet", datagram, "1/*", "new=1 slot1=1")
			v, ok := g.tracked()
			if !ok || uint32(v.Owner) != 7 || fmt.Sprint(connid.Handle(v.Owner>>32)) != first {
				t.Errorf("remembered as %v, %t; want generation 7, %s", v, ok, first)
			}
			for range 20 {
				g.wantSteered("next packet", datagram, first, "known=1 slot1=1")
			}
			g.setOrder(2, []uint8{2, 1}, nil)
			g.activate(g.word(2, 2))
			for range 20 {
				g.wantSteered("after a flip", nil, first, "known=1 slot1=1")
			}
			// Another port, another flow.
			g.newClient()
			second := g.wantSteered("another client", datagram, "2/*", "new=1 slot2=1")
			g.wantSteered("another client again", datagram, second, "known=1 slot2=1")
		})
	}
}

// Flows of dead workers go to a sibling, which may have what it takes, those of dead
// generations and of reused slots begin anew (B4).
func TestFlowOfTheDead(t *testing.T) {
	testutil.NetNS(t)
	g := newGroup(t, flowConfig, loopback4)
	g.join(1, 7, 2)
	g.join(2, 8, 2)
	g.setOrder(1, []uint8{2, 1}, nil)
	g.activate(g.word(2, 1))
	recent := func() uint64 { return g.monotonic() }

	datagram := []byte("hello")
	g.wantSteered("so that there is a client's port", datagram, "2/*", "new=1 slot2=1")
	g.setTracked(Tracked{Owner: owner(1, 0, 7), Seen: recent()})
	g.wantSteered("of a draining one", datagram, "1/0", "known=1 slot1=1")
	g.close(connid.MakeHandle(1, 0))
	g.wantSteered("the worker is dead", datagram, "1/1", "known=1 slot1=1")
	if v, ok := g.tracked(); !ok || v.Owner != owner(1, 1, 7) {
		t.Errorf("remembered as %v, %t", v, ok)
	}
	g.closeSlot(1)
	g.wantSteered("the generation is dead", datagram, "2/*", "new=1 slot2=1")
	if v, ok := g.tracked(); !ok || uint32(v.Owner) != 8 {
		t.Errorf("remembered as %v, %t", v, ok)
	}
	g.setTracked(Tracked{Owner: owner(1, 1, 7), Seen: recent()})
	g.join(1, 9, 2)
	g.wantSteered("the slot has another user", datagram, "2/*", "new=1 slot2=1")
	g.setTracked(Tracked{Owner: owner(5, 1, 77), Seen: recent()})
	g.wantSteered("of a slot that nobody ever had", datagram, "2/*", "new=1 slot2=1")
}

// A flow that was silent for the timeout begins anew; its time is refreshed by traffic.
func TestFlowTimeout(t *testing.T) {
	testutil.NetNS(t)
	g := newGroup(t, flowConfig, loopback4)
	g.join(1, 7, 1)
	g.join(2, 8, 1)
	g.setOrder(1, []uint8{2, 1}, nil)
	g.activate(g.word(2, 1))
	datagram := []byte("hello")
	g.wantSteered("so that there is a client's port", datagram, "2/0", "new=1 slot2=1")
	ago := func(seconds uint64) uint64 { return g.monotonic() - seconds*1e9 }

	old := ago(50)
	g.setTracked(Tracked{Owner: owner(1, 0, 7), Seen: old})
	g.wantSteered("50 of 60 s", datagram, "1/0", "known=1 slot1=1")
	v, _ := g.tracked()
	if v.Seen-old < 40e9 { // old is before the start of a machine that is younger
		t.Errorf("the flow's time is %d s ago", (g.monotonic()-v.Seen)/1e9)
	}
	g.wantSteered("at once", datagram, "1/0", "known=1 slot1=1")
	if again, _ := g.tracked(); again.Seen != v.Seen {
		t.Error("the time was refreshed within a second")
	}
	g.setTracked(Tracked{Owner: owner(1, 0, 7), Seen: ago(61)})
	g.wantSteered("61 of 60 s", datagram, "2/0", "new=1 slot2=1")
	g.wantSteered("the new flow", datagram, "2/0", "known=1 slot2=1")
}

// Where the server assures flows, packets alone leave nothing in the table: a flood
// cannot push anybody out.
func TestFlowAssured(t *testing.T) {
	testutil.NetNS(t)
	c := flowConfig
	c.FlowLearning = LearningAssured
	g := newGroup(t, c, loopback4)
	g.join(1, 7, 2)
	g.join(2, 8, 2)
	g.setOrder(1, []uint8{2, 1}, nil)
	g.activate(g.word(2, 1))
	datagram := []byte("hello")
	g.wantSteered("first", datagram, "2/*", "new=1 slot2=1")
	g.wantSteered("second", datagram, "2/*", "new=1 slot2=1")
	if v, ok := g.tracked(); ok {
		t.Errorf("remembered as %v", v)
	}
	g.setTracked(Tracked{Owner: owner(1, 1, 7), Seen: g.monotonic()})
	g.wantSteered("assured", datagram, "1/1", "known=1 slot1=1")
	g.closeSlot(1)
	g.wantSteered("its generation is dead", datagram, "2/*", "new=1 slot2=1")
	if v, ok := g.tracked(); !ok || v.Owner != owner(1, 1, 7) {
		t.Errorf("the entry is %v, %t; it was the server's", v, ok)
	}
}

// New flows are spread over the workers.
func TestFlowShares(t *testing.T) {
	testutil.NetNS(t)
	g := newGroup(t, flowConfig, loopback4)
	g.join(1, 7, 4)
	g.setOrder(1, []uint8{1}, nil)
	g.activate(g.word(1, 1))
	counts := make([]int, 4)
	for range testutil.UnlessShort(2000, 200) {
		g.newClient()
		socket, counted := g.steer(nil)
		if counted == "known=1 slot1=1" {
			continue // a port that came by before
		}
		var slot, worker int
		if _, err := fmt.Sscanf(socket, "%d/%d", &slot, &worker); err != nil || counted != "new=1 slot1=1" {
			t.Fatalf("went to %s and counted %q (%v)", socket, counted, err)
		}
		counts[worker]++
	}
	wantUniform(t, "flows by worker", counts)
}

func (g *group) monotonic() uint64 {
	g.t.Helper()
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		g.t.Fatal(err)
	}
	return uint64(ts.Nano())
}
