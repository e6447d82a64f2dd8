// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"instar/dispatch"
	"instar/internal/testutil"
)

// tracing is a trace that runs until the test is over.
type tracing struct {
	events chan dispatch.Event
	done   chan error
	lost   uint64
	stop   context.CancelFunc
}

// trace begins a trace, and returns once it sees packets, which it makes with probe.
func (w *world) trace(g *dispatch.Group, probe func()) *tracing {
	w.Helper()
	ctx, stop := context.WithCancel(w.Context())
	tr := &tracing{events: make(chan dispatch.Event, 1<<16), done: make(chan error, 1), stop: stop}
	go func() {
		w.ns.Run(func() {
			var err error
			tr.lost, err = g.Trace(ctx, func(e dispatch.Event) { tr.events <- e })
			tr.done <- err
		})
	}()
	w.Cleanup(stop)
	for deadline := time.Now().Add(patience); ; {
		probe()
		select {
		case <-tr.events:
			for {
				select { // those of earlier probes that it saw
				case <-tr.events:
				case <-time.After(50 * time.Millisecond):
					return tr
				}
			}
		case err := <-tr.done:
			w.Fatalf("the trace ended: %v", err)
		case <-time.After(10 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			w.Fatal("the trace sees nothing")
		}
	}
}

// next is the next event.
func (tr *tracing) next(w *world) dispatch.Event {
	w.Helper()
	select {
	case e := <-tr.events:
		return e
	case err := <-tr.done:
		w.Fatalf("the trace ended: %v", err)
	case <-time.After(patience):
		w.Fatal("no event")
	}
	return dispatch.Event{}
}

// end ends it, and wants nothing to be left.
func (tr *tracing) end(w *world) {
	w.Helper()
	tr.stop()
	if err := <-tr.done; err != nil || tr.lost > 0 || len(tr.events) > 0 {
		w.Errorf("%v, %d lost, %d more events", err, tr.lost, len(tr.events))
	}
}

// C4: each packet's way is told, with what it names.
func TestTrace(t *testing.T) {
	for _, address := range []string{"127.0.0.1:4433", "[::1]:4433"} {
		t.Run(address, func(t *testing.T) {
			w := newWorld(t)
			g := w.open(w.options(address))
			n1 := w.serve(g, 2)
			w.activate(n1)
			c := w.client(address)
			tr := w.trace(g, func() { w.newFlow(c, 1) })

			f := w.newFlow(c, 1)
			began := time.Now()
			e := tr.next(w)
			if e.Peer != c.peer() || e.Verdict != "new" || e.Generation != 1 || e.Worker != f.worker || e.Length != 32 ||
				len(e.Payload) != 32 || e.Payload[0] != 0xc3 || !strings.HasPrefix(e.Name, "long header, ID ") || began.Sub(e.Time).Abs() > time.Minute {
				t.Errorf("a new flow: %+v", e)
			}
			w.activate(w.serve(g, 1)) // whom the trace has to look up
			w.newFlow(c, 2)
			if e := tr.next(w); e.Verdict != "new" || e.Generation != 2 || e.Worker != 0 {
				t.Errorf("a flow of the second generation: %+v", e)
			}
			w.use(c, f)
			want := fmt.Sprintf("short header, ID %x of generation 1, worker %d", f.id, f.worker)
			if e := tr.next(w); e.Verdict != "owner" || e.Generation != 1 || e.Worker != f.worker || e.Name != want {
				t.Errorf("a packet of the first flow: %+v, want %q", e, want)
			}
			w.must(n1.Close())
			w.orphaned(c, f, 2)
			if e := tr.next(w); e.Verdict != "orphan" || e.Generation != 2 {
				t.Errorf("an orphan: %+v", e)
			}
			_, err := c.conn.Write(make([]byte, 1200))
			w.must(err)
			_, err = c.conn.Read(make([]byte, 64))
			w.must(err)
			if e := tr.next(w); e.Verdict != "unknown" || e.Length != 1200 || len(e.Payload) != 64 || !strings.HasPrefix(e.Name, "short header, ID 0000") {
				t.Errorf("zeros: %+v", e)
			}
			tr.end(w)
			w.newFlow(c, 2) // nobody hangs on it
		})
	}
}

// A trace that begins, and an upgrade of the program, end one that runs. Whatever ends
// it, the program is as before then, or as the next one has it.
func TestTraceIsReplaced(t *testing.T) {
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	o.Steering = dispatch.SteeringStateless
	g := w.open(o)
	w.activate(w.serve(g, 1))
	c := w.client("127.0.0.1:4433")
	ask := func() {
		if _, err := c.plain(); err != nil {
			t.Error(err)
		}
	}
	program := func(want string) {
		t.Helper()
		if got := w.snapshot(g).Program; got != dispatch.ProgramBuild(dispatch.SteeringStateless)+want {
			t.Errorf("program %s, want a build and %q", got, want)
		}
	}
	program("")
	first := w.trace(g, ask)
	program("+trace")
	tool, err := dispatch.OpenPath(g.Path())
	w.must(err)
	defer tool.Close()
	second := w.trace(tool, ask)
	wantRefused(t, "the first trace", <-first.done, "state", "the program was replaced")
	program("+trace")
	if upgraded, err := g.UpgradeProgram(); err != nil || !upgraded {
		t.Fatal(upgraded, err)
	}
	wantRefused(t, "the second trace", <-second.done, "state", "the program was replaced")
	program("")
	w.trace(g, ask).end(w)
	program("")
	ask()
}

// One whose process is killed leaves a program that steers, and that is easy to replace.
func TestTraceKilled(t *testing.T) {
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	g := w.open(o)
	n1 := w.serve(g, 2)
	w.activate(n1)
	c := w.client("127.0.0.1:4433")
	p := tracer.Start(w, testutil.Options{Args: []string{g.Path()}, NS: w.ns})
	p.Expect("ready")
	var flows []flow
	for range 10 {
		flows = append(flows, w.newFlow(c, 1))
	}
	p.Expect("event")
	p.Kill()
	w.use(c, flows...)
	w.newFlow(c, 1)
	w.activate(w.serve(g, 1)) // takes over what it finds
	w.newFlow(c, 2)
	w.use(c, flows...)
	if upgraded, err := g.UpgradeProgram(); err != nil || !upgraded {
		t.Error(upgraded, err)
	}
	w.use(c, flows...)
}

// Connections of TCP, and those that move.
func TestTraceTCP(t *testing.T) {
	w := newTCPWorld(t)
	g := w.open(w.tcpOptions(tcpAddress))
	n1 := w.serveTCP(g, 1)
	w.activate(n1)
	tr := w.trace(g, func() { w.wantAnswers(1, w.say(tcpAddress)) })
	n2 := w.join(g, 1)
	w.activate(n2)
	c := w.say(tcpAddress)
	if e := tr.next(w); e.Verdict != "new" || e.Generation != 2 || e.Peer.String() != c.LocalAddr().String() || e.Name != "" || len(e.Payload) != 0 {
		t.Errorf("%+v", e)
	}
	w.waits(n2, 1)
	w.must(n2.Close())
	w.wantAnswers(1, c)
	if e := tr.next(w); e.Verdict != "known" || e.Generation != 1 || e.Peer.IsValid() {
		t.Errorf("%+v", e)
	}
	tr.end(w)
}

// tracer is a process that traces the group at the path in Args until it is killed; with
// another argument it says how that ended.
var tracer = testutil.NewProgram("tracer", func(c *testutil.Conversation) error {
	g, err := dispatch.OpenPath(c.Args[0])
	if err != nil {
		return err
	}
	if len(c.Args) > 1 {
		_, err := g.Trace(context.Background(), func(dispatch.Event) {})
		c.Send("%s", describe(err))
		return nil
	}
	var once sync.Once
	go func() {
		for !strings.HasSuffix(programOf(g), "+trace") {
			time.Sleep(time.Millisecond)
		}
		c.Send("ready")
	}()
	_, err = g.Trace(context.Background(), func(dispatch.Event) { once.Do(func() { c.Send("event") }) })
	return err
})

// Without rights it says which are missing, and the program stays.
func TestTraceNeedsRights(t *testing.T) {
	w := newWorld(t)
	needUnprivilegedMaps(t)
	o := w.options("127.0.0.1:4433")
	path, err := dispatch.Prepare(o, dispatch.Owner{UID: 65534, GID: 65534})
	w.must(err)
	p := tracer.Start(w, testutil.Options{Args: []string{path, "once"}, NS: w.ns, As: nobody(t)})
	wantRefusal(t, "trace", p.Recv(), "permission", "lacks CAP_BPF", "run it as root")
	g, err := dispatch.OpenPath(path)
	w.must(err)
	defer g.Close()
	if got := programOf(g); got != dispatch.ProgramBuild(dispatch.SteeringQUIC) {
		t.Errorf("program %s", got)
	}
}

func programOf(g *dispatch.Group) string {
	s, err := g.Snapshot()
	if err != nil {
		return err.Error()
	}
	return s.Program
}
