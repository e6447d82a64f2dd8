// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"fmt"
	"maps"
	"net/netip"
	"testing"
	"time"

	"instar/dispatch"
)

func (w *world) flowOptions(address string) dispatch.Options {
	o := w.options(address)
	o.Steering = dispatch.SteeringFlow
	return o
}

// wantAnswer asks and wants a generation to answer.
func (w *world) wantAnswer(c *client, generation uint32) {
	w.Helper()
	if by, err := c.plain(); err != nil || by != generation {
		w.Errorf("generation %d answered, want %d (%v)", by, generation, err)
	}
}

func (w *world) flowCounts(g *dispatch.Group) dispatch.FlowCounts {
	w.Helper()
	c, err := g.FlowCounts()
	if err != nil {
		w.Fatal(err)
	}
	return c
}

// peer is a client's address as its server sees it.
func (c *client) peer() netip.AddrPort {
	a := c.conn.LocalAddr().(interface{ AddrPort() netip.AddrPort }).AddrPort()
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// B1, A1: a hundred generations in a row: each flow stays where it began, each new one
// goes to the active generation, and every packet is counted as what it was.
func TestFlowsOverManyGenerations(t *testing.T) {
	needWorld(t)
	for _, address := range []string{"127.0.0.1:4433", "[::]:4433"} {
		t.Run(address, func(t *testing.T) {
			w := newWorld(t)
			o := w.flowOptions(address)
			o.MaxGenerations, o.Workers = 128, 2
			g := w.open(o)
			before := w.counts(g)
			generations := 100
			if testing.Short() {
				generations = 10
			}
			target := address
			if target == "[::]:4433" {
				target = "[::1]:4433" // and by IPv4, below
			}
			type kept struct {
				c   *client
				gen uint32
			}
			var flows []kept
			want := counts{}
			for i := range generations {
				n := w.serve(g, 2)
				w.activate(n)
				for range 2 {
					c := w.client(target)
					w.wantAnswer(c, n.Number())
					flows = append(flows, kept{c, n.Number()})
					want["new"]++
				}
				for j := 0; j < len(flows); j += 1 + i/10 {
					w.wantAnswer(flows[j].c, flows[j].gen)
					want["known"]++
				}
				if t.Failed() {
					t.Fatalf("after %d generations", i+1)
				}
			}
			for _, f := range flows {
				w.wantAnswer(f.c, f.gen)
				want["known"]++
			}
			w.wantCounts(g, "over all generations", before, want)
			c := w.flowCounts(g)
			if c.Ended != 0 || len(c.Live) != generations || c.Live[1] != 2 || c.Room != dispatch.DefaultFlowEntries {
				t.Errorf("%+v", c)
			}
			peers := map[netip.AddrPort]uint32{}
			w.must(g.Flows(func(f dispatch.Flow) bool {
				peers[f.Peer] = f.Generation
				if time.Since(f.Seen) > time.Minute || f.Worker < 0 || f.Worker > 1 {
					t.Errorf("%+v", f)
				}
				return true
			}))
			for _, f := range flows {
				if gen := peers[f.c.peer()]; gen != f.gen {
					t.Errorf("the flow of %v is listed with generation %d, want %d", f.c.peer(), gen, f.gen)
				}
			}
		})
	}
}

// A flow over IPv4 and one over IPv6 to the same dual-stack socket.
func TestFlowsOfBothFamilies(t *testing.T) {
	w := newWorld(t)
	g := w.open(w.flowOptions("[::]:4433"))
	w.activate(w.serve(g, 1))
	four, six := w.client("127.0.0.1:4433"), w.client("[::1]:4433")
	w.wantAnswer(four, 1)
	w.wantAnswer(six, 1)
	w.activate(w.serve(g, 1))
	w.wantAnswer(four, 1)
	w.wantAnswer(six, 1)
	w.wantCounts(g, "two flows", nil, counts{"new": 2, "known": 2})
	got := map[netip.AddrPort]bool{}
	w.must(g.Flows(func(f dispatch.Flow) bool { got[f.Peer] = true; return true }))
	if want := map[netip.AddrPort]bool{four.peer(): true, six.peer(): true}; !maps.Equal(got, want) {
		t.Errorf("flows of %v, want %v", got, want)
	}
}

// Flows are the kernel's: they outlive every process but their own. Those of a process
// that was killed begin anew with the next packet.
func TestFlowsOutliveProcesses(t *testing.T) {
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	o := w.flowOptions(address)
	p := w.start(o, nil) // it makes the group
	w.ask(p, "open")
	g := w.open(o)
	w.activate(w.serve(g, 1))
	old := w.client(address)
	w.wantAnswer(old, 1)
	w.ask(p, "join 2")
	w.ask(p, "activate")
	lost := w.client(address)
	w.wantAnswer(lost, 2)
	p.Kill()
	w.wantAnswer(old, 1)
	w.wantAnswer(lost, 1)
	w.must(g.Repair())
	w.wantAnswer(lost, 1)
	if c := w.flowCounts(g); c.Live[1] != 2 || len(c.Live) != 1 || c.Ended != 0 {
		t.Errorf("%+v", c)
	}
	heir := w.start(o, nil)
	for _, line := range []string{"open", "join 1", "activate"} {
		w.ask(heir, "%s", line)
	}
	w.wantAnswer(old, 1)
	w.wantAnswer(w.client(address), 3)
}

// With assured flows only what the server vouches for stays; and what it releases does not.
func TestAssure(t *testing.T) {
	w := newWorld(t)
	o := w.flowOptions("127.0.0.1:4433")
	o.FlowLearning, o.FlowTimeout = dispatch.LearnAssured, time.Hour
	g := w.open(o)
	if s := w.snapshot(g); s.FlowLearning != "assured" || s.FlowTimeout != 3600 || s.Steering != "flow" {
		t.Errorf("%+v", s)
	}
	one := w.serve(g, 2)
	w.activate(one)
	known, stranger := w.client("127.0.0.1:4433"), w.client("127.0.0.1:4433")
	w.wantAnswer(known, 1)
	w.wantAnswer(stranger, 1)
	w.must(one.Assure(1, known.peer()))
	two := w.serve(g, 1)
	w.activate(two)
	w.wantAnswer(known, 1)
	w.wantAnswer(stranger, 2)
	w.wantCounts(g, "one assured flow", nil, counts{"new": 3, "known": 1})
	w.must(one.Release(known.peer()))
	w.must(one.Release(known.peer()))
	w.wantAnswer(known, 2)

	wantRefused(t, "a worker that is not there", one.Assure(2, known.peer()), "options", "worker 2", "0 to 1")
	wantRefused(t, "no address", one.Assure(0, netip.AddrPort{}), "options")
	plain := w.options("127.0.0.1:4434")
	quic := w.join(w.open(plain), 1)
	wantRefused(t, "another steering", quic.Assure(0, known.peer()), "state", "quic")
	_, err := quic.Group().FlowCounts()
	wantRefused(t, "counts of another steering", err, "state", "quic")
}

// A drain ends with its last flow, or says how many there were.
func TestDrainOfFlows(t *testing.T) {
	w := newWorld(t)
	o := w.flowOptions("127.0.0.1:4433")
	o.FlowTimeout = time.Second
	g := w.open(o)
	one := w.serve(g, 1)
	w.activate(one)
	c := w.client("127.0.0.1:4433")
	w.wantAnswer(c, 1)
	w.activate(w.serve(g, 1))
	// It lives until it was silent for a second.
	if r, err := one.Drain(t.Context(), dispatch.DrainOptions{}); err != nil || r.Reason != "flows ended" || r.Flows != 0 {
		t.Errorf("%+v, %v", r, err)
	}
	w.wantAnswer(c, 2)
	w.wantCounts(g, "the flow ended", nil, counts{"new": 2})

	o = w.flowOptions("127.0.0.1:4434")
	g = w.open(o)
	one = w.serve(g, 1)
	w.activate(one)
	c = w.client("127.0.0.1:4434")
	w.wantAnswer(c, 1)
	w.activate(w.serve(g, 1))
	if r, err := one.Drain(t.Context(), dispatch.DrainOptions{Deadline: time.Millisecond}); err != nil || r.Reason != "deadline" || r.Flows != 1 {
		t.Errorf("%+v, %v", r, err)
	}
	w.wantAnswer(c, 2)
	if counts := w.flowCounts(g); counts.Live[2] != 1 || counts.Ended != 0 {
		t.Errorf("%+v", counts)
	}
}

// The options of flows are checked.
func TestFlowOptions(t *testing.T) {
	for _, tc := range []struct {
		o    dispatch.Options
		word string
	}{
		{dispatch.Options{FlowTimeout: 999 * time.Millisecond}, "1s"},
		{dispatch.Options{FlowTimeout: dispatch.LimitFlowTimeout + time.Second}, fmt.Sprint(dispatch.LimitFlowTimeout)},
		{dispatch.Options{FlowLearning: 3}, "LearnAnswered or LearnAssured"},
	} {
		tc.o.Address, tc.o.Steering = "127.0.0.1:4433", dispatch.SteeringFlow
		_, err := dispatch.Open(tc.o)
		wantRefused(t, fmt.Sprintf("%v", tc.o.FlowTimeout), err, "options", tc.word)
	}
}
