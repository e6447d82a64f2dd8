// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"context"
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"instar/dispatch"
)

// Changes by other processes arrive by notification: there is no tick in this test.
func TestChangesOfOtherProcesses(t *testing.T) {
	w := newWorld(t)
	dispatch.SetGuardEvery(t, farOff)
	const address = "127.0.0.1:4433"
	o := w.options(address)
	g := w.open(o)
	n := w.join(g, 1)
	if isClosed(n.Superseded()) {
		t.Error("a staged generation is superseded")
	}
	p := w.start(o, nil)
	w.ask(p, "open")
	w.ask(p, "activate 1")
	w.wait(n, dispatch.StateActive)
	w.ask(p, "join 1")
	for range 3 {
		open := n.Superseded()
		w.ask(p, "activate")
		w.superseded(n)
		w.wait(n, dispatch.StateDraining)
		if !isClosed(open) {
			t.Error("the channel of before stays open")
		}
		w.ask(p, "rollback")
		w.wait(n, dispatch.StateActive)
		if isClosed(n.Superseded()) {
			t.Error("a reinstated generation is superseded")
		}
	}
	w.ask(p, "activate")
	w.ask(p, "evict 1")
	w.wait(n, dispatch.StateGone)
	w.superseded(n)

	// And the other way round.
	m := w.join(g, 1)
	w.activate(m)
	w.ask(p, "superseded")
	w.ask(p, "wait draining")
	w.must(g.Evict(2))
	w.ask(p, "wait gone")
}

// Where inotify is not to be had, polling tells the same.
func TestChangesWithoutInotify(t *testing.T) {
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	o := w.options(address)
	g := w.open(o)
	n := w.join(g, 1)
	w.activate(n)
	p := w.startDenied(o, unix.SYS_INOTIFY_INIT1)
	for _, line := range []string{"open", "join 1", "activate"} {
		w.ask(p, "%s", line)
	}
	w.superseded(n)
	w.must(n.Activate())
	w.ask(p, "superseded")
	w.ask(p, "wait draining")
	// It is a guard as well.
	w.must(n.Conns()[0].Close())
	w.ask(p, "wait active")
	for _, line := range []string{"close", "leave"} {
		w.ask(p, "%s", line)
	}
}

// Whatever ends, ends those who wait.
func TestWaitEnds(t *testing.T) {
	w := newWorld(t)
	g := w.open(w.options("127.0.0.1:4433"))
	n := w.join(g, 1)
	type waited struct {
		state dispatch.State
		err   error
	}
	wait := func(ctx context.Context, states ...dispatch.State) <-chan waited {
		c := make(chan waited, 1)
		go func() {
			s, err := n.Wait(ctx, states...)
			c <- waited{s, err}
		}()
		return c
	}
	end := func(c <-chan waited) waited {
		t.Helper()
		ctx, cancel := contextWithPatience()
		defer cancel()
		select {
		case got := <-c:
			return got
		case <-ctx.Done():
			t.Fatal("Wait does not end")
			return waited{}
		}
	}
	// At once, when the state is one of those.
	if got := end(wait(t.Context(), dispatch.StateActive, dispatch.StateStaged)); got.state != dispatch.StateStaged || got.err != nil {
		t.Errorf("%+v", got)
	}
	ctx, cancel := context.WithCancel(t.Context())
	waiting := wait(ctx, dispatch.StateGone)
	cancel()
	if got := end(waiting); !errors.Is(got.err, context.Canceled) || got.state != dispatch.StateStaged {
		t.Errorf("%+v", got)
	}
	// Any change, when none is named.
	waiting = wait(t.Context())
	for done := false; !done; {
		// Wait notes the state that it waits for the end of when it begins.
		w.must(g.Activate(n.Number()))
		select {
		case got := <-waiting:
			if got.err != nil {
				t.Errorf("%+v", got)
			}
			done = true
		default:
			m := w.join(g, 1)
			w.activate(m)
			w.must(m.Close())
		}
	}
	// Closing the group ends a drain, which did not take place.
	other := w.open(w.options("127.0.0.1:4434"))
	m, err := other.Join(1)
	w.must(err)
	leaving := drain(t.Context(), m, dispatch.DrainOptions{Idle: farOff})
	w.leave(other)
	if d := w.took(leaving); !errors.Is(d.err, dispatch.ErrClosed) {
		t.Errorf("a drain whose group was closed: %+v", d)
	}
	// The sockets are closed all the same.
	wantRefused(t, "Close", m.Close(), "closed")
	if left := w.sockets(4434); len(left) != 0 {
		t.Errorf("sockets %v are left", left)
	}
	waiting = wait(t.Context(), dispatch.StateStaged)
	draining := drain(t.Context(), n, dispatch.DrainOptions{Final: true})
	w.must(n.Close())
	if d := w.took(draining); d.err != nil || d.report.Reason != "evicted" {
		t.Errorf("a drain whose generation was closed: %+v", d)
	}
	w.leave(g)
	if got := end(waiting); !errors.Is(got.err, dispatch.ErrClosed) {
		t.Errorf("%+v", got)
	}
}

// Superseded never lags behind State: who is told that it is active again must not take
// the channel of before for the next change.
func TestSupersededIsUpToDate(t *testing.T) {
	w := newWorld(t)
	dispatch.SetGuardEvery(t, farOff)
	g := w.open(w.options("127.0.0.1:4433"))
	first, second := w.join(g, 1), w.join(g, 1)
	tool, err := dispatch.OpenPath(g.Path())
	w.must(err)
	defer tool.Close()
	w.must(tool.Activate(1))
	for round := range 100 {
		w.must(tool.Activate(2 - uint32(round%2)))
		for _, n := range []*dispatch.Generation{first, second} {
			active := n.Number() == 2-uint32(round%2)
			if n.State() == dispatch.StateActive != active || isClosed(n.Superseded()) == active {
				t.Fatalf("round %d: generation %d is %v, superseded %t", round, n.Number(), n.State(), isClosed(n.Superseded()))
			}
		}
	}
}
