// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"instar/bpf"
	"instar/dispatch"
	"instar/internal/testutil"
)

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// wait waits for a state of a generation.
func (w *world) wait(n *dispatch.Generation, state dispatch.State) {
	w.Helper()
	ctx, cancel := contextWithPatience()
	defer cancel()
	if got, err := n.Wait(ctx, state); err != nil {
		w.Fatalf("generation %d is %v, want %v: %v", n.Number(), got, state, err)
	}
}

// superseded waits until another generation took the place of this one.
func (w *world) superseded(n *dispatch.Generation) {
	w.Helper()
	ctx, cancel := contextWithPatience()
	defer cancel()
	select {
	case <-n.Superseded():
	case <-ctx.Done():
		w.Fatalf("generation %d does not learn that it was superseded", n.Number())
	}
}

// drained is what Drain returned.
type drained struct {
	report dispatch.DrainReport
	err    error
}

func drain(ctx context.Context, n *dispatch.Generation, o dispatch.DrainOptions) <-chan drained {
	c := make(chan drained, 1)
	go func() {
		r, err := n.Drain(ctx, o)
		c <- drained{r, err}
	}()
	return c
}

// took waits for the end of a drain.
func (w *world) took(c <-chan drained) drained {
	w.Helper()
	ctx, cancel := contextWithPatience()
	defer cancel()
	select {
	case d := <-c:
		return d
	case <-ctx.Done():
		w.Fatal("the drain does not end")
		return drained{}
	}
}

// A successor that dies while its predecessor drains is no gap: the data plane goes
// on to the predecessor with the next packet, before anybody repairs anything.
func TestActiveKilledBeforeTheRepair(t *testing.T) {
	w := newWorld(t)
	dispatch.SetGuardEvery(t, farOff)
	const address = "127.0.0.1:4433"
	g := w.open(w.options(address))
	n := w.serve(g, 2)
	w.activate(n)
	c := w.client(address)
	old := w.newFlow(c, 1)
	successor := w.start(w.options(address), nil)
	for _, line := range []string{"open", "join 2", "activate"} {
		w.ask(successor, "%s", line)
	}
	lost := w.newFlow(c, 2)
	w.wantCounts(g, "before", nil, counts{"new": 2})

	successor.Kill()
	before := w.counts(g)
	kept := w.newFlow(c, 1)
	w.orphaned(c, lost, 1)
	w.use(c, old, kept)
	w.wantCounts(g, "before the repair", before, counts{"fallback": 2, "owner": 2})
	if s := n.State(); s != dispatch.StateDraining {
		t.Errorf("before the repair: %v", s)
	}
	if s := w.snapshot(g); s.Active != 2 || s.Generations[0].Live != 0 {
		t.Errorf("before the repair: %+v", s)
	}

	w.must(g.Repair())
	before = w.counts(g)
	w.newFlow(c, 1)
	w.orphaned(c, lost, 1)
	w.use(c, old, kept)
	w.wantCounts(g, "after the repair", before, counts{"new": 1, "orphan": 1, "owner": 2})
	if s := w.snapshot(g); s.Active != 1 || len(s.Generations) != 1 || !s.Generations[0].Superseded.IsZero() {
		t.Errorf("after the repair: %+v", s)
	}
}

// The guard of a living generation reinstates it.
func TestActiveKilledWhileThePredecessorDrains(t *testing.T) {
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	g := w.open(w.options(address))
	n := w.serve(g, 2)
	w.activate(n)
	c := w.client(address)
	old := w.newFlow(c, 1)
	for _, number := range []uint32{2, 3} {
		successor := w.start(w.options(address), nil)
		for _, line := range []string{"open", "join 2", "activate"} {
			w.ask(successor, "%s", line)
		}
		w.superseded(n)
		was := n.Superseded()
		w.must(g.SetDeadline(1, farFuture))
		draining := drain(w.Context(), n, dispatch.DrainOptions{Idle: farOff})
		lost := w.newFlow(c, number)

		successor.Kill()
		w.newFlow(c, 1) // at once, whoever was faster
		w.wait(n, dispatch.StateActive)
		if d := w.took(draining); !errors.Is(d.err, dispatch.ErrReinstated) {
			t.Errorf("the drain ended with %+v", d)
		}
		if !isClosed(was) || isClosed(n.Superseded()) {
			t.Errorf("superseded: the old channel is closed: %t, the new one: %t", isClosed(was), isClosed(n.Superseded()))
		}
		before := w.counts(g)
		w.newFlow(c, 1)
		w.use(c, old)
		w.orphaned(c, lost, 1)
		w.wantCounts(g, "reinstated", before, counts{"new": 1, "owner": 1, "orphan": 1})
		// Nothing of the first drain is left that would end the next one.
		if s := w.snapshot(g); !s.Generations[0].Deadline.IsZero() || !s.Generations[0].Superseded.IsZero() {
			t.Errorf("reinstated: %+v", s)
		}
	}
	// It drains like any other when somebody takes over at last.
	heir := w.start(w.options(address), nil)
	for _, line := range []string{"open", "join 1", "activate"} {
		w.ask(heir, "%s", line)
	}
	w.superseded(n)
	done := make(chan struct{})
	draining := drain(w.Context(), n, dispatch.DrainOptions{Done: done})
	w.use(c, old)
	close(done)
	if d := w.took(draining); d.err != nil || d.report.Reason != "done" {
		t.Errorf("the last drain: %+v", d)
	}
	w.orphaned(c, old, 4)
	w.newFlow(c, 4)
}

// D1: a service that died altogether and comes back has the same secrets, and knows
// the connection IDs of before for its own.
func TestRestartFromNothing(t *testing.T) {
	w := newWorld(t)
	const address = "[::1]:4433"
	o := w.options(address)
	c := w.client(address)
	var flows []flow
	secrets := map[string]bool{}
	var processes []interface{ Kill() }
	begin := func(want string) {
		p := w.start(o, nil)
		w.ask(p, "open")
		if got := w.ask(p, "join 2"); got != want {
			t.Errorf("the generation has number %s, want %s", got, want)
		}
		w.ask(p, "activate")
		secrets[w.ask(p, "secret reset")] = true
		if w.ask(p, "secret reset") == w.ask(p, "secret token") {
			t.Error("two labels have the same secret")
		}
		processes = append(processes, p)
	}
	begin("1")
	flows = append(flows, w.newFlow(c, 1))
	begin("2")
	flows = append(flows, w.newFlow(c, 2))
	for _, p := range processes {
		p.Kill()
	}
	// Nobody is there: the client learns that as well.
	if _, err := c.start(); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("with nobody there: %v", err)
	}
	g, err := dispatch.OpenPath(w.path(o))
	w.must(err)
	defer g.Close()
	before := w.counts(g)
	begin("3")
	for _, f := range flows {
		w.orphaned(c, f, 3)
	}
	fresh := w.newFlow(c, 3)
	w.use(c, fresh)
	w.wantCounts(g, "after the restart", before, counts{"orphan": 2, "new": 1, "owner": 1})
	if len(secrets) != 1 {
		t.Errorf("the secrets differ: %v", secrets)
	}
	if s := w.snapshot(g); s.Active != 3 || len(s.Generations) != 1 {
		t.Errorf("after the restart: %+v", s)
	}
}

// A3: a worker that dies takes nobody with it. Its own flows are orphans at once, its
// share of new flows goes to its siblings.
func TestWorkerDies(t *testing.T) {
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	g := w.open(w.options(address))
	n := w.serve(g, 3)
	w.activate(n)
	c := w.client(address)
	var flows []flow
	for len(flows) < 60 {
		flows = append(flows, w.newFlow(c, 1))
	}
	w.must(n.Conns()[1].Close())
	before, want := w.counts(g), counts{}
	for _, f := range flows {
		if f.worker == 1 {
			w.orphaned(c, f, 1)
			want["orphan"]++
		} else {
			w.use(c, f)
			want["owner"]++
		}
	}
	by := map[int]int{}
	for range 60 {
		f := w.newFlow(c, 1)
		by[f.worker]++
		want["new"]++
	}
	w.wantCounts(g, "after a worker died", before, want)
	if want["orphan"] == 0 || by[0] == 0 || by[2] == 0 || by[1] != 0 {
		t.Errorf("orphans %d, new flows by worker %v", want["orphan"], by)
	}
	if s := w.snapshot(g); s.Generations[0].Live != 2 || s.Generations[0].Workers != 3 {
		t.Errorf("%+v", s)
	}
}

// B1: one that has drained keeps its sockets to send from, for as long as it likes. It is
// not taken for a stranger: not when others had all slots since, not when its process
// cannot be looked into, and not when that is in another PID namespace.
func TestDrainedGenerationStays(t *testing.T) {
	testutil.Slow(t)
	w := newWorld(t)
	who := nobody(t)
	const address = "127.0.0.1:4433"
	o := w.options(address)
	w.must(prepare(o, who.UID))
	g, err := dispatch.OpenPath(w.path(o))
	w.must(err)
	defer g.Close()

	stays := w.start(o, who)
	for _, line := range []string{"open", "join 2", "activate"} {
		w.ask(stays, "%s", line)
	}
	upgrade := func(number string) {
		t.Helper()
		p := w.start(o, who)
		w.ask(p, "open")
		if got := w.ask(p, "join 1"); got != number {
			t.Errorf("generation %s, want %s", got, number)
		}
		w.ask(p, "activate")
		if number == "2" {
			w.ask(stays, "drain")
		}
		w.ask(p, "drain {\"Deadline\":1,\"Final\":true}")
		p.Kill()
	}
	// More than there are slots.
	for number := range 6 {
		upgrade(fmt.Sprint(number + 2))
	}
	w.ask(stays, "hide")
	upgrade("8")
	info := &g.Control().Info
	i := slices.IndexFunc(info[:], func(i bpf.Info) bool { return i.Number == 1 })
	if i < 0 {
		t.Fatal("the slot of a process that lives was given away while others were free")
	}
	info[i].PidNamespace, info[i].Pid = 1, 1
	upgrade("9")

	// Whom nobody knows is a stranger all the same.
	stays.Kill()
	info[i].PidNamespace = info[(i+1)%4].PidNamespace
	hidden := rival.Start(t, testutil.Options{Args: []string{"udp4", address, "reuseport", "hide"}, NS: w.ns, As: who})
	hidden.Expect("bound")
	p := w.start(o, who)
	wantRefusal(t, "open", p.Ask("open"), "occupied", "of uid 65534; its process cannot be seen from here", "not registered")
	hidden.Kill()
	w.ask(p, "open")
}
