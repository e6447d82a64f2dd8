// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"instar/dispatch"
)

// events is what Group.Changes tells, and how it ended.
type events struct {
	told chan dispatch.Change
	end  chan error
}

func (w *world) events(ctx context.Context, g *dispatch.Group) *events {
	w.Helper()
	e := &events{make(chan dispatch.Change, 100), make(chan error, 1)}
	ready := make(chan struct{})
	go func() {
		e.end <- g.Changes(ctx, func() { close(ready) }, func(event dispatch.Change) error {
			e.told <- event
			return nil
		})
	}()
	select {
	case <-ready:
	case err := <-e.end:
		w.Fatal(err)
	}
	return e
}

// want waits for events, "KIND GENERATION" each, in their order.
func (e *events) want(w *world, want ...string) []dispatch.Change {
	w.Helper()
	var got []dispatch.Change
	for _, next := range want {
		select {
		case event := <-e.told:
			got = append(got, event)
			if is := fmt.Sprintf("%s %d", event.Kind, event.Generation); is != next {
				w.Fatalf("event %+v, want %s", event, next)
			}
		case err := <-e.end:
			w.Fatalf("%v, want event %s", err, next)
		case <-time.After(patience):
			w.Fatalf("no event for %v, want %s", patience, next)
		}
	}
	return got
}

// Field B5, A7: each step of an upgrade is seen, in its order, by a process that has no part
// in it.
func TestChangeEvents(t *testing.T) {
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	g := w.open(o)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	e := w.events(ctx, g)
	began := time.Now().Add(-time.Minute)

	one, two := w.start(o, nil), w.start(o, nil)
	w.ask(one, "open")
	w.ask(one, "join 1")
	joined := e.want(w, "joined 1")[0]
	if joined.PID != one.PID || joined.Command == "" || joined.Build == "" || joined.Time.Before(began) || joined.Time.After(time.Now()) {
		t.Errorf("%+v, want process %d", joined, one.PID)
	}
	w.ask(one, "activate")
	e.want(w, "activated 1")
	w.ask(two, "open")
	w.ask(two, "join 1")
	e.want(w, "joined 2")
	w.ask(two, "activate")
	flip := e.want(w, "activated 2", "superseded 1")
	if flip[1].Time.Before(flip[0].Time) {
		t.Errorf("%+v", flip)
	}
	w.ask(two, "rollback")
	e.want(w, "activated 1", "superseded 2")
	w.ask(one, "activate 2")
	e.want(w, "activated 2", "superseded 1")
	w.ask(one, "close")
	e.want(w, "left 1")
	two.Kill()
	died := e.want(w, "died 2")[0]
	if died.PID != two.PID {
		t.Errorf("%+v, want process %d", died, two.PID)
	}
	// That the table is mended later is no event.
	w.must(g.Repair())
	third := w.start(o, nil)
	w.ask(third, "open")
	w.ask(third, "join 1")
	e.want(w, "joined 3")
	w.ask(third, "close")
	e.want(w, "left 3")

	cancel()
	if err := <-e.end; err != nil {
		t.Errorf("at its end: %v", err)
	}
}

// What was there before is no event, and neither a function that fails nor a group that is
// forgotten keeps the watcher.
func TestChangeEventsEnd(t *testing.T) {
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	g := w.open(o)
	n := w.join(g, 1)
	w.activate(n)
	watched, err := dispatch.OpenPath(g.Path())
	w.must(err)
	defer watched.Close()
	e := w.events(t.Context(), watched)
	enough := errors.New("enough")
	failing := make(chan error, 1)
	ready := make(chan struct{})
	go func() {
		failing <- g.Changes(t.Context(), func() { close(ready) }, func(dispatch.Change) error { return enough })
	}()
	<-ready
	w.must(n.Close())
	e.want(w, "left 1")
	if err := <-failing; !errors.Is(err, enough) {
		t.Errorf("the function fails: %v", err)
	}
	w.must(dispatch.Forget(g.Path()))
	wantRefused(t, "Changes of a forgotten group", <-e.end, "not-exist", "the group is forgotten")

	again := w.open(o)
	e = w.events(t.Context(), again)
	w.must(again.Close())
	wantRefused(t, "Changes of a closed group", <-e.end, "closed")
}

// Two looks and what is told of them.
func TestChangeEventsOfTwoLooks(t *testing.T) {
	for _, c := range []struct {
		name          string
		before, after map[uint32]dispatch.Look
		lives         bool
		want          []string
	}{
		{"nothing", map[uint32]dispatch.Look{1: {Joined: 1, Activated: 2}}, map[uint32]dispatch.Look{1: {Joined: 1, Activated: 2}}, true, nil},
		{"all at once", nil, map[uint32]dispatch.Look{1: {Joined: 1, Activated: 2, Superseded: 4}, 2: {Joined: 3, Activated: 4}}, true,
			[]string{"joined 1", "activated 1", "joined 2", "activated 2", "superseded 1"}},
		{"there and back", map[uint32]dispatch.Look{1: {Joined: 1, Activated: 2}, 2: {Joined: 3}},
			map[uint32]dispatch.Look{1: {Joined: 1, Activated: 6}, 2: {Joined: 3, Activated: 5, Superseded: 6}}, true,
			[]string{"activated 2", "activated 1", "superseded 2"}},
		{"died", map[uint32]dispatch.Look{1: {Joined: 1}}, map[uint32]dispatch.Look{1: {Joined: 1, Dead: true}}, false, []string{"died 1"}},
		{"mended", map[uint32]dispatch.Look{1: {Joined: 1, Dead: true}}, nil, false, nil},
		{"left", map[uint32]dispatch.Look{1: {Joined: 1}}, nil, true, []string{"left 1"}},
		{"left or died", map[uint32]dispatch.Look{1: {Joined: 1}}, nil, false, []string{"gone 1"}},
		{"killed before it was seen", nil, map[uint32]dispatch.Look{1: {Joined: 1, Dead: true}}, false, []string{"joined 1", "died 1"}},
	} {
		got := []string(nil)
		for _, e := range dispatch.ChangesOf(c.before, c.after, c.lives) {
			got = append(got, fmt.Sprintf("%s %d", e.Kind, e.Generation))
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}
