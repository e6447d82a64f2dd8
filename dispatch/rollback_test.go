// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"fmt"
	"testing"

	"instar/dispatch"
)

// Flips to and fro while packets flow: nothing is lost in either direction, flows
// stay where they began, and every packet is counted as what it was.
func TestActivateAndRollbackUnderLoad(t *testing.T) {
	needWorld(t)
	for _, steering := range []dispatch.Steering{dispatch.SteeringQUIC, dispatch.SteeringStateless} {
		for _, processes := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v processes=%t", steering, processes), func(t *testing.T) {
				w := newWorld(t)
				const address, flips = "127.0.0.1:4433", 20
				o := w.options(address)
				o.Steering = steering
				g := w.open(o)
				first := w.serve(g, 2)
				w.activate(first)
				if processes {
					p := w.start(o, nil)
					w.ask(p, "open")
					w.ask(p, "join 3")
				} else {
					w.serve(g, 3)
				}
				l := w.load(address, 3, steering == dispatch.SteeringStateless)
				l.served(20)
				if n := l.got(2); n != 0 {
					t.Errorf("the staged generation got %d new flows", n)
				}
				for i := range flips {
					if i%2 == 0 && i < 10 {
						w.must(g.Activate(2))
					} else {
						number, err := g.Rollback()
						if want := uint32(2 - i%2); err != nil || number != want {
							t.Fatalf("rollback %d to %d, want %d: %v", i, number, want, err)
						}
					}
					l.served(10)
				}
				l.lossless(g, nil)
				if l.got(1) == 0 || l.got(2) == 0 {
					t.Errorf("new flows of each generation: %v", l.by)
				}
				if s := w.snapshot(g); s.Active != 1 || first.State() != dispatch.StateActive {
					t.Errorf("in the end: %+v", s)
				}
			})
		}
	}
}

func TestRefusedChangesChangeNothing(t *testing.T) {
	w := newWorld(t)
	dispatch.SetGuardEvery(t, farOff)
	s := w.stage("127.0.0.1:4433")
	g := s.g
	unchanged := func(what string, err error, kind string, words ...string) {
		t.Helper()
		wantRefused(t, what, err, kind, words...)
		s.traffic(what, 2)
	}
	before := s.picture()
	unchanged("activate nobody", g.Activate(0), "not-exist", "activate generation 0", "instar show lists")
	unchanged("activate one that never was", g.Activate(99), "not-exist", "generation does not exist in the group", "it left, or its process died")
	unchanged("evict the active one", g.Evict(2), "state", "it is active", "activate another generation first, or stop its server")
	unchanged("set the deadline of the active one", g.SetDeadline(2, farFuture), "state", "it is active")
	unchanged("evict nobody", g.Evict(7), "not-exist", "any more")
	unchanged("set the deadline of nobody", g.SetDeadline(7, farFuture), "not-exist", "any more")
	for _, workers := range []int{-1, 0, 3, 1000} {
		_, err := g.Join(workers)
		unchanged(fmt.Sprint(workers, " workers"), err, "options", fmt.Sprint(workers, " workers"), "want 1 to 2", "the group's limit is set when it is made")
	}
	if after := s.picture(); after != before {
		t.Errorf("the state is\n%swant\n%s", after, before)
	}

	// Activating the active one again is no event.
	then := s.snapshot(g)
	changed := s.gens[0].Superseded()
	s.must(s.gens[1].Activate())
	s.must(g.Activate(2))
	now := s.snapshot(g)
	if d := now.Generations[0].Activated.Sub(then.Generations[0].Activated); d.Abs() > 1e6 {
		t.Errorf("activating the active one moved the time by %v", d)
	}
	if after := s.picture(); after != before || s.gens[0].Superseded() != changed {
		t.Errorf("the state is\n%swant\n%s", after, before)
	}

	// A10: every worker has to be there.
	s.must(s.gens[2].Conns()[1].Close())
	unchanged("activate one with a dead worker", s.gens[2].Activate(), "state", "1 of its 2 workers live", "start another generation")
	s.must(s.gens[0].Conns()[0].Close())
	_, err := g.Rollback()
	wantRefused(t, "roll back to one with a dead worker", err, "state", "1 of its 2 workers live")

	// Nobody to go back to.
	s.must(s.gens[0].Close())
	_, err = g.Rollback()
	wantRefused(t, "roll back", err, "state", "no generation that was active before still holds sockets")
	s.must(s.gens[1].Close())
	_, err = g.Rollback()
	wantRefused(t, "roll back with nobody active", err, "state", "no generation that was active before")
	if snap := s.snapshot(g); snap.Active != 0 || len(snap.Generations) != 1 {
		t.Errorf("in the end: %+v", snap)
	}
}
