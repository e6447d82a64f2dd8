// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"testing"

	"instar/dispatch"
)

// A5: the program of a live group is swapped between two packets.
func TestUpgradeProgramUnderLoad(t *testing.T) {
	needWorld(t)
	for _, steering := range []dispatch.Steering{dispatch.SteeringQUIC, dispatch.SteeringStateless} {
		t.Run(steering.String(), func(t *testing.T) {
			w := newWorld(t)
			const address = "127.0.0.1:4433"
			o := w.options(address)
			o.Steering = steering
			g := w.open(o)
			w.activate(w.serve(g, 2))
			late := w.open(o) // it has the first program in its hands
			build := dispatch.ProgramBuild(steering)
			if s := w.snapshot(g); s.Program != build || s.Layout != 1 {
				t.Errorf("program %s, layout %d", s.Program, s.Layout)
			}
			if upgraded, err := g.UpgradeProgram(); err != nil || upgraded {
				t.Errorf("upgrade to the same program: %t, %v", upgraded, err)
			}
			l := w.load(address, 3, steering == dispatch.SteeringStateless)
			id := programID(t, g.Path())
			for range 3 {
				g.SetProgramBuild("another")
				if s := w.snapshot(late); s.Program != "another" {
					t.Errorf("program %s", s.Program)
				}
				l.served(10)
				upgraded, err := g.UpgradeProgram()
				if err != nil || !upgraded {
					t.Fatalf("upgrade: %t, %v", upgraded, err)
				}
				now := programID(t, g.Path())
				if now == id || w.snapshot(late).Program != build {
					t.Errorf("after an upgrade the pin is program %d, before %d, build %s", now, id, w.snapshot(late).Program)
				}
				id = now
				// What is pinned is what runs.
				if ran := runs(t, g.Path(), func() { l.served(20) }); ran < 20 {
					t.Errorf("the pinned program ran %d times", ran)
				}
				if pins := len(list(t, g.Path())); pins < 5 || pins > 6 {
					t.Errorf("%d pins", pins)
				}
			}
			// Who joins with the old program in his hands attaches the new one.
			w.activate(w.serve(late, 1))
			l.served(20)
			l.lossless(g, nil)
			c := w.client(address)
			if ran := runs(t, g.Path(), func() {
				for range 10 {
					var err error
					if steering == dispatch.SteeringStateless {
						_, err = c.plain()
					} else {
						_, err = c.start()
					}
					w.must(err)
				}
			}); ran != 10 {
				t.Errorf("after a late join the pinned program ran %d times for 10 packets", ran)
			}
		})
	}
}

// An upgrade with nobody there counts for whoever comes next.
func TestUpgradeProgramOfAnEmptyGroup(t *testing.T) {
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	g := w.open(w.options(address))
	id := programID(t, g.Path())
	g.SetProgramBuild("another")
	if upgraded, err := g.UpgradeProgram(); err != nil || !upgraded {
		t.Fatalf("upgrade: %t, %v", upgraded, err)
	}
	if now := programID(t, g.Path()); now == id {
		t.Error("the pin is the old program")
	}
	w.activate(w.serve(g, 1))
	c := w.client(address)
	if ran := runs(t, g.Path(), func() { w.newFlow(c, 1) }); ran != 1 {
		t.Errorf("the pinned program ran %d times for one packet", ran)
	}
}

// The flows that the packet path remembers, and the counters, outlive the program.
func TestUpgradeKeepsHandshakes(t *testing.T) {
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	g := w.open(w.options(address))
	w.activate(w.serve(g, 1))
	c := w.client(address)
	initial := append([]byte{0xc3, 0, 0, 0, 1, 8}, "handmade"...)
	ask := func(gen uint32) {
		t.Helper()
		kind, f, err := c.ask(initial)
		if err != nil || kind != answerNew || f.gen != gen {
			t.Errorf("the handshake is answered with %q by %d, want %d (%v)", kind, f.gen, gen, err)
		}
	}
	ask(1)
	w.activate(w.serve(g, 1))
	ask(1)
	g.SetProgramBuild("another")
	if _, err := g.UpgradeProgram(); err != nil {
		t.Fatal(err)
	}
	ask(1)
	w.newFlow(c, 2)
	w.wantCounts(g, "over an upgrade", nil, counts{"new": 2, "known": 2})
}
