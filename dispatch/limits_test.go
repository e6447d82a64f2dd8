// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/internal/sockdiag"
	"instar/internal/testutil"
)

// sockets are the cookies of the sockets that have a port.
func (w *world) sockets(port uint16) []uint64 {
	w.Helper()
	all, err := sockdiag.UDP(port)
	w.must(err)
	var cookies []uint64
	for _, s := range all {
		if !s.Peer.IsValid() {
			cookies = append(cookies, s.Cookie)
		}
	}
	slices.Sort(cookies)
	return cookies
}

// A6, G1: a pinned connection in each generation, and room for four. The fifth is
// refused before it binds, and nothing notices.
func TestSixUpgradesWithRoomForFour(t *testing.T) {
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	o := w.options(address)
	g := w.open(o)
	c := w.client(address)
	var gens []*dispatch.Generation
	var flows []flow
	upgrade := func() {
		t.Helper()
		n := w.serve(g, 2)
		w.activate(n)
		gens = append(gens, n)
		flows = append(flows, w.newFlow(c, n.Number()))
		if int(n.Number()) != len(gens) {
			t.Errorf("upgrade %d has number %d", len(gens), n.Number())
		}
	}
	refused := func(oldest int) {
		t.Helper()
		before, sockets, seen := w.snapshot(g), w.sockets(4433), w.counts(g)
		dispatch.OnStep(t, func(done string) {
			if done == "bind" || done == "announce" {
				t.Errorf("it came to %q", done)
			}
		})
		_, err := g.Join(1)
		dispatch.HoldAtSteps(nil)
		words := []string{"join udp4 127.0.0.1:4433: all 4 slots", fmt.Sprintf("(instar drain %s %d --deadline 0s)", g.Path(), oldest), "wait until the oldest has drained", "larger MaxGenerations"}
		for _, n := range before.Generations {
			words = append(words, fmt.Sprintf("generation %d (%v, pid %d", n.Number, n.State, os.Getpid()))
		}
		wantRefused(t, "Join", err, "full", words...)
		var full *dispatch.FullError
		if !errors.As(err, &full) || full.Limit != 4 || len(full.Occupants) != 4 {
			t.Fatalf("%+v", full)
		}
		// Another process hears the same.
		p := w.start(o, nil)
		w.ask(p, "open")
		wantRefusal(t, "another process", p.Ask("join 1"), "full", words...)
		p.Kill()
		if now := w.sockets(4433); !slices.Equal(now, sockets) {
			t.Errorf("sockets before %v, after %v", sockets, now)
		}
		after := w.snapshot(g)
		if after.Active != before.Active || len(after.Generations) != 4 {
			t.Errorf("before %+v, after %+v", before, after)
		}
		w.use(c, flows[oldest-1:]...)
		f := w.newFlow(c, before.Active)
		w.use(c, f)
		w.wantCounts(g, "after a refusal", seen, counts{"owner": 5, "new": 1})
	}
	end := func(oldest int) {
		t.Helper()
		if r, err := gens[oldest-1].Drain(t.Context(), dispatch.DrainOptions{Done: closed()}); err != nil {
			t.Errorf("drain: %+v, %v", r, err)
		}
		w.must(gens[oldest-1].Close())
	}
	for range 4 {
		upgrade()
	}
	refused(1)
	end(1)
	upgrade()
	refused(2)
	end(2)
	upgrade()
	w.use(c, flows[2:]...)
	for _, f := range flows[:2] {
		// Their slots belong to others now: nobody takes their IDs for its own.
		if by, err := c.orphaned(f); err != nil || by != 6 {
			t.Errorf("a flow of generation %d was answered by %d (%v)", f.gen, by, err)
		}
	}
}

// uniform checks that shares differ only as chance has it: the sum of squares of n
// counts has a mean of n-1 and a standard deviation of sqrt(2n).
func uniform(t *testing.T, what string, shares []int) {
	t.Helper()
	total := 0
	for _, n := range shares {
		total += n
	}
	mean, sum := float64(total)/float64(len(shares)), 0.0
	for _, n := range shares {
		sum += (float64(n) - mean) * (float64(n) - mean) / mean
	}
	n := float64(len(shares))
	if limit := n + 6*math.Sqrt(2*n); sum > limit {
		t.Errorf("%s: shares %v; sum of squares %.0f, want at most %.0f", what, shares, sum, limit)
	}
}

func TestManyWorkers(t *testing.T) {
	testutil.Slow(t)
	w := newWorld(t)
	const address, workers, flows = "127.0.0.1:4433", 256, 256 * 24
	o := w.options(address)
	o.Workers, o.MaxGenerations = workers, 2
	g := w.open(o)
	n := w.serve(g, workers)
	w.activate(n)
	c := w.client(address)
	share := func() []int {
		by := make([]int, workers)
		for range flows {
			f := w.newFlow(c, n.Number())
			by[f.worker]++
		}
		return by
	}
	uniform(t, "256 workers", share())
	f := w.newFlow(c, 1)
	w.use(c, f)
	w.wantCounts(g, "256 workers", nil, counts{"new": flows + 1, "owner": 1})

	// What the dead ones had is spread over the living.
	for i := range workers {
		if i%2 == 1 {
			w.must(n.Conns()[i].Close())
		}
	}
	before := w.counts(g)
	var living []int
	for i, k := range share() {
		switch {
		case i%2 == 0:
			living = append(living, k)
		case k != 0:
			t.Errorf("dead worker %d got %d flows", i, k)
		}
	}
	uniform(t, "128 of 256 workers", living)
	w.wantCounts(g, "128 of 256 workers", before, counts{"new": flows})
	if s := w.snapshot(g); s.Generations[0].Live != workers/2 {
		t.Errorf("%+v", s.Generations)
	}

	// The next one has as many again.
	next := w.serve(g, workers)
	w.activate(next)
	if got := w.newFlow(c, 2); got.gen != 2 {
		t.Errorf("%+v", got)
	}
	w.must(n.Close())
	w.must(next.Close())
}

func TestManyGenerations(t *testing.T) {
	testutil.Slow(t)
	w := newWorld(t)
	const address, limit, workers = "127.0.0.1:4433", 256, 4
	o := w.options(address)
	o.Workers, o.MaxGenerations = workers, limit
	g := w.open(o)
	c := w.client(address)
	var gens []*dispatch.Generation
	var flows []flow
	for range limit {
		n := w.serve(g, workers)
		w.activate(n)
		gens = append(gens, n)
		flows = append(flows, w.newFlow(c, n.Number()))
	}
	w.use(c, flows...)
	w.wantCounts(g, "all of them", nil, counts{"new": limit, "owner": limit})
	_, err := g.Join(1)
	wantRefused(t, "Join", err, "full", "all 256 slots", "instar drain "+g.Path()+" 1 --deadline 0s")
	s := w.snapshot(g)
	if len(s.Generations) != limit || s.Active != limit {
		t.Fatalf("%d generations, active %d", len(s.Generations), s.Active)
	}
	for i, n := range s.Generations {
		if int(n.Number) != limit-i || n.Live != workers || n.Packets != 2 {
			t.Errorf("place %d: %+v", i, n)
		}
	}
	// A flip to the other end of the order.
	w.must(g.Activate(1))
	w.newFlow(c, 1)
	_, err = g.Rollback()
	w.must(err)
	w.newFlow(c, limit)
	w.must(gens[99].Close())
	n := w.serve(g, workers)
	w.activate(n)
	if got := w.newFlow(c, limit+1); got.worker >= workers || n.Handle(0).Slot() != 99 {
		t.Errorf("the new one has slot %d", n.Handle(0).Slot())
	}
	w.use(c, slices.Delete(flows, 99, 100)...)
	for _, n := range gens {
		w.must(n.Close())
	}
}

// A server with no capability at all, as instar prepare makes it possible.
func TestUnprivilegedServer(t *testing.T) {
	w := newWorld(t)
	who := nobody(t)
	const address, sysctl = "127.0.0.1:4433", "/proc/sys/kernel/unprivileged_bpf_disabled"
	disabled, err := os.ReadFile(sysctl)
	w.must(err)
	t.Logf("kernel.unprivileged_bpf_disabled is %s", disabled)
	needUnprivilegedMaps(t)
	o := w.options(address)
	path, err := dispatch.Prepare(o, dispatch.Owner{UID: who.UID, GID: who.GID})
	w.must(err)
	if want := w.path(o); path != want {
		t.Errorf("Prepare made %s, want %s", path, want)
	}
	checkOwner(t, "prepared", path, uint32(who.UID))
	g, err := dispatch.OpenPath(path)
	w.must(err)
	w.Cleanup(func() { _ = g.Close() })

	begin := func(number string) *testutil.Process {
		t.Helper()
		p := w.start(o, who)
		w.ask(p, "open")
		if got := w.ask(p, "join 2"); got != number {
			t.Errorf("generation %s, want %s", got, number)
		}
		w.ask(p, "activate")
		return p
	}
	var processes []*testutil.Process
	processes = append(processes, begin("1"))
	l := w.load(address, 3, false)
	for _, number := range []string{"2", "3"} {
		l.served(20)
		processes = append(processes, begin(number))
		w.ask(processes[len(processes)-2], "superseded")
		// Preparing again is what a unit does at each start.
		_, err := dispatch.Prepare(o, dispatch.Owner{UID: who.UID, GID: who.GID})
		w.must(err)
	}
	l.served(20)
	// Root upgrades the program for it, sockets and pins stay the user's.
	g.SetProgramBuild("another")
	if upgraded, err := g.UpgradeProgram(); err != nil || !upgraded {
		t.Errorf("upgrade as root: %t, %v", upgraded, err)
	}
	if ran := runs(t, path, func() { l.served(20) }); ran < 20 {
		t.Errorf("the pinned program ran %d times", ran)
	}
	checkOwner(t, "program upgraded", path, uint32(who.UID))
	late := begin("4")
	if ran := runs(t, path, func() { l.served(20) }); ran < 20 {
		t.Errorf("after the next join the pinned program ran %d times", ran)
	}
	w.ask(late, "rollback")
	w.ask(late, "drain {\"Idle\":200000000}") // 0.2 s
	late.Kill()
	l.served(20)
	l.lossless(g, nil)
	for n := uint32(1); n <= 3; n++ {
		if l.got(n) == 0 {
			t.Errorf("generation %d got no new flow", n)
		}
	}
	if got := w.ask(processes[1], "rollback"); got != "2" {
		t.Errorf("rolled back to %s", got)
	}
	w.ask(processes[0], "drain")
	for _, line := range []string{"close", "leave"} {
		w.ask(processes[0], "%s", line)
	}

	// Another user gets no foot in the door.
	_, err = g.Join(1)
	wantRefused(t, "Join as root", err, "occupied", "uid 65534", "we are 0", "4433: address is occupied: bind: address already in use: a socket on ")

	// It cannot load a program, nor take the group away.
	if got := processes[2].Ask("upgrade"); got != "false" {
		t.Errorf("upgrading to the same program: %s", got)
	}
	g.SetProgramBuild("another")
	wantRefusal(t, "upgrade", processes[2].Ask("upgrade"), "permission", "upgrade program", "lacks CAP_BPF, CAP_NET_ADMIN")
	for _, p := range processes[1:] {
		p.Kill()
	}
	before := contents(t, path)
	p := w.start(o, who)
	wantRefusal(t, "forget", p.Ask("forget %s", path), "permission", "uid 65534", "belongs to uid 0")
	if after := contents(t, path); after != before {
		t.Errorf("a refused Forget changed the group:\n%s\nbefore it was\n%s", after, before)
	}
	// Another service has no business there, whoever runs it.
	other := o
	other.Service = "other"
	wantRefusal(t, "another service", w.start(other, who).Ask("open"), "service", `"test"`, `"other"`)
	if now, err := os.ReadFile(sysctl); err != nil || string(now) != string(disabled) {
		t.Errorf("%s is now %s (%v)", sysctl, now, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil || st.Uid != uint32(who.UID) {
		t.Errorf("the folder's owner is %d (%v)", st.Uid, err)
	}
}

// All or nothing: a Join that fails half-way leaves no socket, and no trace but a number.
func TestJoinThatFailsHalfWay(t *testing.T) {
	w := newWorld(t)
	s := w.stage("127.0.0.1:4433")
	before, sockets := s.picture(), w.sockets(4433)
	var limit unix.Rlimit
	w.must(unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	dispatch.OnStep(t, func(done string) {
		if done == "register" { // the first of two
			w.must(unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: limit.Max}))
		}
	})
	n, err := s.g.Join(2)
	dispatch.HoldAtSteps(nil)
	w.must(unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	wantRefused(t, "Join", err, "", "join udp4 127.0.0.1:4433: socket: too many open files")
	if n != nil {
		t.Errorf("it returned generation %d", n.Number())
	}
	if after := s.picture(); after != before || !slices.Equal(w.sockets(4433), sockets) {
		t.Errorf("the state is\n%swant\n%ssockets %v, before %v", after, before, w.sockets(4433), sockets)
	}
	s.traffic("after it", 2)
	if n := w.join(s.g, 2); n.Number() != 5 || n.Handle(0).Slot() != 3 {
		t.Errorf("the next one is generation %d in slot %d", n.Number(), n.Handle(0).Slot())
	}
	s.traffic("after the next", 2)
}
