// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"instar/dispatch"
	"instar/internal/testutil"
)

// stage is a group in the middle of its life, of this process: generation 1 is
// draining, 2 active, 3 staged, each with a flow.
type stage struct {
	*world
	g      *dispatch.Group
	gens   []*dispatch.Generation
	client *client
	flows  []flow
	before counts
	asked  counts
	// dead is a generation whose sockets were closed behind the table's back. As
	// long as it is in the table, strangers' packets count as fallbacks.
	dead uint32
	// unsettled says that a change stopped half-way.
	unsettled bool
}

func (w *world) stage(address string) *stage {
	w.Helper()
	o := w.options(address)
	o.Workers = 2
	s := &stage{world: w, g: w.open(o), client: w.client(address), asked: counts{}}
	for number := uint32(1); number <= 3; number++ {
		n := w.serve(s.g, 2)
		s.gens = append(s.gens, n)
		if number < 3 {
			w.activate(n)
			s.flows = append(s.flows, w.newFlow(s.client, number))
		}
	}
	s.before = w.counts(s.g)
	return s
}

// traffic checks that the flows of all generations reach their owners and that a
// new one reaches one of those given.
func (s *stage) traffic(when string, active ...uint32) {
	s.Helper()
	for i, f := range s.flows {
		var err error
		verdict := "owner"
		if n := s.gens[i]; n.State() == dispatch.StateGone || n.Number() == s.dead {
			verdict = "orphan"
			if _, err = s.client.orphaned(f); err != nil && s.unsettled {
				// It left the order, and its sockets are still in the map.
				verdict, err = "owner", s.client.use(f)
				s.asked[verdict]++
			}
		} else {
			err = s.client.use(f)
		}
		if err != nil {
			s.Errorf("%s: %v", when, err)
		}
		s.asked[verdict]++
	}
	f, err := s.client.start()
	if err != nil || !slices.Contains(active, f.gen) {
		s.Errorf("%s: a new flow went to generation %d, want one of %d (%v)", when, f.gen, active, err)
	}
	s.asked["new"]++
	if s.dead == 0 {
		s.wantCounts(s.g, when, s.before, s.asked)
		return
	}
	got := s.counts(s.g)
	if got["owner"]-s.before["owner"] != s.asked["owner"] || sum(got)-sum(s.before) != sum(s.asked) {
		s.Errorf("%s: counted %v, before %v, asked %v", when, got, s.before, s.asked)
	}
}

// picture is the whole state of a group but for what may differ between runs.
func (s *stage) picture() string {
	s.Helper()
	var b strings.Builder
	snapshot := s.snapshot(s.g)
	fmt.Fprintf(&b, "active %d, program of this build %t\n", snapshot.Active, snapshot.Program == s.build())
	for _, n := range snapshot.Generations {
		fmt.Fprintf(&b, "%d: slot %d %v, %d of %d workers, activated %t, superseded %t, deadline %t\n", n.Number, n.Slot, n.State,
			n.Live, n.Workers, !n.Activated.IsZero(), !n.Superseded.IsZero(), !n.Deadline.IsZero())
	}
	c := s.g.Control()
	for slot := range c.MaxGenerations {
		if c.Info[slot].Stage != 0 {
			fmt.Fprintf(&b, "slot %d: stage %d, exhausted %d\n", slot, c.Info[slot].Stage, c.Slots[slot].Exhausted)
		}
	}
	// The next upgrade removes what one left that died.
	names := slices.DeleteFunc(list(s.T, s.g.Path()), func(name string) bool { return name == "program-new" })
	slices.Sort(names)
	fmt.Fprintf(&b, "pins %v\n", names)
	for _, name := range list(s.T, filepath.Dir(s.g.Path())) {
		if !strings.HasPrefix(name, "udp4-") {
			fmt.Fprintf(&b, "beside it %s\n", name)
		}
	}
	return b.String()
}

func (s *stage) build() string { return dispatch.ProgramBuild(dispatch.SteeringQUIC) }

// change is what a process does that is killed on the way.
type change struct {
	// line is what it is told.
	line string
	// prepare is done before the state of before is taken.
	prepare func(*stage, *testutil.Process)
	// active is who may be active meanwhile, and after.
	active []uint32
	// own says that the change is of the process's own generation, which dies with
	// it, so that before and after are as without it.
	own bool
}

func TestKilledActivating(t *testing.T) {
	killedBetweenSteps(t, change{line: "activate 3", active: []uint32{2, 3}})
}

func TestKilledRollingBack(t *testing.T) {
	testutil.Slow(t)
	killedBetweenSteps(t, change{line: "rollback", active: []uint32{2, 1}})
}

func TestKilledRollingBackToOneWithADeadline(t *testing.T) {
	testutil.Slow(t)
	killedBetweenSteps(t, change{line: "rollback", active: []uint32{2, 1}, prepare: func(s *stage, _ *testutil.Process) {
		s.must(s.g.SetDeadline(1, farFuture))
	}})
}

func TestKilledEvicting(t *testing.T) {
	testutil.Slow(t)
	killedBetweenSteps(t, change{line: "evict 1", active: []uint32{2}})
}

func TestKilledRepairing(t *testing.T) {
	testutil.Slow(t)
	killedBetweenSteps(t, change{line: "repair", active: []uint32{1}, prepare: func(s *stage, _ *testutil.Process) {
		for _, c := range s.gens[1].Conns() {
			s.must(c.Close())
		}
		s.dead = 2
	}})
}

func TestKilledJoining(t *testing.T) {
	killedBetweenSteps(t, change{line: "quiet 2", active: []uint32{2}, own: true})
}

func joined(s *stage, p *testutil.Process) { s.ask(p, "join 2") }

func TestKilledActivatingItself(t *testing.T) {
	testutil.Slow(t)
	killedBetweenSteps(t, change{line: "activate", active: []uint32{2, 4}, own: true, prepare: joined})
}

func TestKilledClosing(t *testing.T) {
	killedBetweenSteps(t, change{line: "close", active: []uint32{2}, own: true, prepare: joined})
}

func TestKilledClosingTheActiveOne(t *testing.T) {
	testutil.Slow(t)
	killedBetweenSteps(t, change{line: "close", active: []uint32{4, 2}, own: true, prepare: func(s *stage, p *testutil.Process) {
		s.ask(p, "join 2")
		s.ask(p, "activate")
	}})
}

func TestKilledDraining(t *testing.T) {
	testutil.Slow(t)
	killedBetweenSteps(t, change{line: "drain", active: []uint32{2}, own: true, prepare: func(s *stage, p *testutil.Process) {
		s.ask(p, "join 2")
		s.ask(p, "activate")
		s.must(s.gens[1].Activate())
	}})
}

func TestKilledUpgradingTheProgram(t *testing.T) {
	testutil.Slow(t)
	killedBetweenSteps(t, change{line: "upgrade", active: []uint32{2}, prepare: func(s *stage, _ *testutil.Process) {
		s.g.SetProgramBuild("another")
	}})
}

// killedBetweenSteps kills a process between every two steps of a change. While it is
// stopped there, and after it died, all flows go on. The next writer finds, or makes,
// the state of before or that of after the change, nothing else, and goes on from
// there.
func killedBetweenSteps(t *testing.T, change change) {
	w := newWorld(t)
	// The guard of this process is another writer, which comes when it likes.
	dispatch.SetGuardEvery(t, farOff)
	port := 5000
	run := func(hold int) (s *stage, p *testutil.Process, before, held string) {
		port++
		address := fmt.Sprintf("127.0.0.1:%d", port)
		s = w.stage(address)
		before = s.picture()
		o := w.options(address)
		p = w.start(o, nil)
		s.ask(p, "open")
		if change.prepare != nil {
			change.prepare(s, p)
			if !change.own {
				before = s.picture()
			}
		}
		s.ask(p, "hold %d", hold)
		return s, p, before, s.ask(p, "%s", change.line)
	}

	// Once to the end.
	done, p, _, answer := run(-1)
	if strings.HasPrefix(answer, "held") {
		t.Fatalf("a process that was not to stop %s", answer)
	}
	steps := strings.Split(done.ask(p, "steps"), ",")
	done.traffic("after the change", change.active...)
	p.Kill()
	done.must(done.g.Repair())
	after := done.picture()

	for i, step := range steps {
		if testing.Short() && i != len(steps)/2 {
			continue
		}
		when := fmt.Sprintf("killed after step %d, %q", i+1, step)
		s, p, before, answer := run(i)
		if answer != "held "+step {
			t.Fatalf("step %d is %q, want %q", i, answer, step)
		}
		s.unsettled = true
		s.traffic("stopped after step "+step, change.active...)
		p.Kill()
		// A dead active generation counts as a fallback until the repair.
		if !change.own {
			s.traffic(when, change.active...)
		}
		s.must(s.g.Repair())
		s.unsettled = false
		got := s.picture()
		if got != before && got != after {
			t.Errorf("%s, the state is\n%swant\n%sor\n%s", when, got, before, after)
		}
		// Another process goes on.
		heir := w.start(w.options(fmt.Sprintf("127.0.0.1:%d", port)), nil)
		for _, line := range []string{"open", "join 2", "activate"} {
			s.ask(heir, "%s", line)
		}
		active := w.snapshot(s.g).Active
		if active <= 3 {
			t.Errorf("%s: after another Activate generation %d is active", when, active)
		}
		s.traffic(when+", another one went on", active)
		if again := s.ask(heir, "upgrade"); again != fmt.Sprint(!strings.Contains(got, "program of this build true")) {
			t.Errorf("%s: upgrading the program then: %s", when, again)
		}
		s.traffic(when+", program upgraded", active)
		if pins := list(t, s.g.Path()); len(pins) != 6 {
			t.Errorf("%s: pins in the end: %q", when, pins)
		}
		heir.Kill()
		s.leaveAll()
	}
	done.leaveAll()
	if len(steps) < 5 {
		t.Errorf("only %d steps: %q", len(steps), steps)
	}
}

// leaveAll ends the stage before the test does.
func (s *stage) leaveAll() {
	s.Helper()
	for _, n := range s.gens {
		s.must(n.Close())
	}
	s.must(s.g.Close())
}

func TestKilledMakingAGroup(t *testing.T) { killedMaking(t, "open", false, 0) }

func TestKilledPreparingAGroup(t *testing.T) {
	testutil.Slow(t)
	killedMaking(t, "prepare 65534", false, 65534)
}

func TestKilledGivingAGroup(t *testing.T) {
	testutil.Slow(t)
	killedMaking(t, "prepare 65534", true, 65534)
}

func TestKilledForgettingAGroup(t *testing.T) {
	testutil.Slow(t)
	killedMaking(t, "forget", true, 0)
}

// killedMaking kills a process between every two steps of making a group, giving it
// away, and forgetting it.
func killedMaking(t *testing.T, line string, exists bool, owner uint32) {
	testutil.NeedRoot(t)
	w := newWorld(t)
	var path string
	run := func(port, hold int) (*testutil.Process, dispatch.Options, string) {
		o := w.options(fmt.Sprintf("127.0.0.1:%d", port))
		path = w.path(o)
		if exists {
			g, err := dispatch.Open(o)
			w.must(err)
			w.must(g.Close())
		}
		p := w.start(o, nil)
		w.ask(p, "hold %d", hold)
		line := line
		if line == "forget" {
			line += " " + path
		}
		return p, o, w.ask(p, "%s", line)
	}
	p, _, answer := run(5000, -1)
	if answer != "ok" {
		t.Fatal(answer)
	}
	steps := strings.Split(w.ask(p, "steps"), ",")
	p.Kill()
	if _, err := os.Stat(path); (err == nil) != (line != "forget") {
		t.Fatalf("at the end: %v", err)
	}
	for i, step := range steps {
		if testing.Short() && i != len(steps)/2 {
			continue
		}
		when := fmt.Sprintf("killed after step %d, %q", i+1, step)
		p, o, answer := run(5001+i, i)
		if answer != "held "+step && !strings.HasPrefix(step, "pin") {
			t.Fatalf("step %d is %q, want %q", i, answer, step)
		}
		p.Kill()
		// What is there is whole, or not there at all.
		entries, err := dispatch.List(w.root)
		w.must(err)
		for _, e := range entries {
			if e.Err != nil {
				t.Errorf("%s: listed %s: %v", when, e.Path, e.Err)
			}
		}
		if owner != 0 {
			w.must(prepare(o, int(owner)))
			checkOwner(t, when, path, owner)
		}
		g, err := dispatch.Open(o)
		if err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		if got := len(list(t, path)); got != 6 {
			t.Errorf("%s: %d pins, want 6", when, got)
		}
		if owner == 0 {
			n, err := g.Join(2)
			w.must(err)
			w.must(n.Activate())
			w.must(n.Close())
		}
		w.must(g.Close())
		for _, name := range list(t, filepath.Dir(path)) {
			if !strings.HasPrefix(name, "udp4-127") && line != "forget" {
				t.Errorf("%s: %q is left", when, name)
			}
		}
	}
	// The next one that is made cleans up.
	w.open(w.options("127.0.0.1:4999"))
	for _, name := range list(t, filepath.Dir(path)) {
		if !strings.HasPrefix(name, "udp4-127") {
			t.Errorf("in the end %q is left", name)
		}
	}
	if len(steps) < 5 {
		t.Errorf("only %d steps: %q", len(steps), steps)
	}
}

func prepare(o dispatch.Options, uid int) error {
	_, err := dispatch.Prepare(o, dispatch.Owner{UID: uid, GID: uid})
	return err
}

// TestKilledUpgradeLeavesOneProgram compares what is attached with what is pinned.
func TestKilledUpgradeLeavesOneProgram(t *testing.T) {
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	s := w.stage(address)
	var steps []string
	for _, hold := range []string{"", "attach", "publish program"} {
		s.g.SetProgramBuild("another")
		p := w.start(w.options(address), nil)
		s.ask(p, "open")
		s.ask(p, "hold %d", slices.Index(steps, hold))
		answer := s.ask(p, "upgrade")
		if hold == "" {
			steps = strings.Split(s.ask(p, "steps"), ",")
			continue
		}
		if answer != "held "+hold {
			t.Fatalf("the process does not stop at %q: %s", hold, answer)
		}
		p.Kill()
		s.traffic(hold, 2)
		first := programID(t, s.g.Path())
		upgraded, err := s.g.UpgradeProgram()
		if err != nil || !upgraded {
			t.Errorf("after a kill at %q: %t, %v", hold, upgraded, err)
		}
		s.traffic(hold+", upgraded", 2)
		if id := programID(t, s.g.Path()); id == first {
			t.Errorf("after a kill at %q the pin is still program %d", hold, id)
		}
		if ran := runs(t, s.g.Path(), func() { s.traffic("counted", 2) }); ran != 3 {
			t.Errorf("after a kill at %q the pinned program ran %d times for 3 packets", hold, ran)
		}
	}
	s.leaveAll()
}

func programID(t testing.TB, path string) ebpf.ProgramID {
	t.Helper()
	p, err := ebpf.LoadPinnedProgram(filepath.Join(path, "program"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := info.ID()
	return id
}
