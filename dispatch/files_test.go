// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/internal/rawconn"
	"instar/internal/testutil"
)

// passed are files as a process passes them on: its successor gets duplicates of the
// descriptors, of the same open files.
type passed struct {
	t testing.TB

	mu      sync.Mutex
	came    map[string]*os.File
	offered map[string]syscall.Conn
}

func newPassed(t testing.TB) *passed {
	return &passed{t: t, came: make(map[string]*os.File), offered: make(map[string]syscall.Conn)}
}

func (p *passed) File(name string) (*os.File, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.came[name]
	if f == nil {
		return nil, fs.ErrNotExist
	}
	delete(p.came, name)
	p.offered[name] = f
	return f, nil
}

func (p *passed) Add(name string, c syscall.Conn) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.offered[name] != nil {
		return errors.New("the name is in use")
	}
	p.offered[name] = c
	return nil
}

func (p *passed) Remove(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.offered, name)
}

// next is what a successor gets.
func (p *passed) next() *passed {
	p.t.Helper()
	n := newPassed(p.t)
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, c := range p.offered {
		err := rawconn.Of(c, func(fd int) error {
			d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
			if err == nil {
				n.came[name] = os.NewFile(uintptr(d), name)
			}
			return err
		})
		if err != nil && !errors.Is(err, os.ErrClosed) {
			p.t.Fatal(err)
		}
	}
	p.t.Cleanup(func() {
		for _, f := range n.came {
			_ = f.Close()
		}
	})
	return n
}

func (p *passed) names() (names []string) {
	for name := range p.came {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// withoutPins are options for a group that needs no bpffs.
func (w *world) withoutPins(address string, p *passed) dispatch.Options {
	o := w.options(address)
	o.Root = "/nowhere"
	o.Files = p
	return o
}

// One upgrade after the other, back and forth, with descriptors in the place of pins:
// whatever a process learns of the others it learns by them.
func TestWithoutPins(t *testing.T) {
	// Nothing that is learnt may wait for the guard.
	dispatch.SetGuardEvery(t, time.Hour)
	for _, address := range []string{"127.0.0.1:4433", "[::1]:4433"} {
		t.Run(address, func(t *testing.T) {
			w := newWorld(t)
			first := newPassed(t)
			g1 := w.open(w.withoutPins(address, first))
			if g1.Path() != "" || w.snapshot(g1).Path != "" {
				t.Errorf("the path is %q", g1.Path())
			}
			n1 := w.serve(g1, 2)
			w.activate(n1)
			c := w.client(address)
			w.newFlow(c, 1)

			second := first.next()
			if got := second.names(); len(got) != 7 || strings.ContainsFunc(strings.Join(got, ""), func(r rune) bool { return r <= ' ' || r > '~' || r == ':' }) {
				t.Errorf("files %q", got)
			}
			g2 := w.open(w.withoutPins(address, second))
			if len(second.came) > 0 {
				t.Errorf("not taken: %q", second.names())
			}
			n2 := w.serve(g2, 2)
			if n2.Number() != 2 {
				t.Errorf("generation %d", n2.Number())
			}
			w.activate(n2)
			<-n1.Superseded()
			w.newFlow(c, 2)
			if number, err := g1.Rollback(); err != nil || number != 1 {
				t.Errorf("rollback: %d, %v", number, err)
			}
			<-n2.Superseded()
			w.newFlow(c, 1)
			w.activate(n2)
			w.newFlow(c, 2)
			w.must(n1.Close())
			w.leave(g1) // its Group is closed: the later ones have the objects all the same
			if s := w.snapshot(g2); len(s.Generations) != 1 || s.Generations[0].Number != 2 {
				t.Errorf("%+v", s.Generations)
			}

			third := second.next()
			g3 := w.open(w.withoutPins(address, third))
			w.activate(w.serve(g3, 1))
			w.newFlow(c, 3)
			w.wantCounts(g3, "over three processes", nil, counts{"new": 5})
		})
	}
}

// The lock excludes processes that have the same open file by inheritance.
func TestLockWithoutPins(t *testing.T) {
	dispatch.SetLockWait(t, 50*time.Millisecond)
	w := newWorld(t)
	first := newPassed(t)
	g1 := w.open(w.withoutPins("127.0.0.1:4433", first))
	g2 := w.open(w.withoutPins("127.0.0.1:4433", first.next()))
	var other error
	asked := false
	dispatch.OnStep(t, func(done string) {
		if done == "lock" && !asked {
			asked = true
			other = g2.Repair()
		}
	})
	w.must(g1.Repair())
	if !errors.Is(other, dispatch.ErrBusy) {
		t.Errorf("a change beside another one: %v", other)
	}
	w.must(g2.Repair())
}

// What does not belong together, or elsewhere, is refused with the reason, and the
// predecessor keeps its group.
func TestWrongFiles(t *testing.T) {
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	first := newPassed(t)
	g := w.open(w.withoutPins(address, first))
	w.activate(w.serve(g, 1))
	refused := func(what string, o dispatch.Options, kind string, words ...string) {
		t.Helper()
		got, err := dispatch.Open(o)
		if err == nil {
			w.must(got.Close())
		}
		wantRefused(t, what, err, kind, words...)
	}
	prefix := "udp4-127%2e0%2e0%2e1-4433/"
	for _, name := range []string{"control", "sockets", "secrets", "verdicts", "flows", "program"} {
		next := first.next()
		w.must(next.came[prefix+name].Close())
		delete(next.came, prefix+name)
		refused("without "+name, w.withoutPins(address, next), "layout", prefix+name, "stop its servers")
	}
	next := first.next()
	next.came[prefix+"control"], next.came[prefix+"sockets"] = next.came[prefix+"sockets"], next.came[prefix+"control"]
	refused("two maps swapped", w.withoutPins(address, next), "")
	next = first.next()
	next.came[prefix+"program"], next.came[prefix+"state"] = next.came[prefix+"state"], next.came[prefix+"program"]
	refused("a program in the place of the state", w.withoutPins(address, next), "layout", prefix+"state")

	o := w.withoutPins(address, first.next())
	o.Service = "another"
	refused("another service", o, "service", "stop its servers")
	o = w.withoutPins(address, first.next())
	o.Steering = dispatch.SteeringStateless
	refused("another steering", o, "mismatch", "stop its servers")
	// Nothing was passed, and the sockets of the group are in the way.
	refused("a second first process", w.withoutPins(address, newPassed(t)), "occupied")
	if _, err := dispatch.Prepare(w.withoutPins(address, first.next()), dispatch.Owner{UID: 1, GID: 1}); !errors.Is(err, dispatch.ErrOptions) {
		t.Errorf("Prepare: %v", err)
	}
	next = first.next()
	testutil.OtherNetNS(t).Run(func() {
		refused("another network namespace", w.withoutPins(address, next), "mismatch", "network namespace")
	})
	w.newFlow(w.client(address), 1)
}

// A program that one process replaced stays, whoever joins with the old one; and is gone
// when the sockets that had it are.
func TestUpgradeProgramWithoutPins(t *testing.T) {
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	first := newPassed(t)
	g1 := w.open(w.withoutPins(address, first))
	n1 := w.serve(g1, 1)
	w.activate(n1)
	second := first.next()
	g2 := w.open(w.withoutPins(address, second))
	n2 := w.serve(g2, 1)
	c := w.client(address)

	build := w.snapshot(g1).Program
	g2.SetProgramBuild("another")
	if upgraded, err := g2.UpgradeProgram(); err != nil || !upgraded {
		t.Fatalf("upgrade: %t, %v", upgraded, err)
	}
	ran := func(g *dispatch.Group) uint64 {
		t.Helper()
		stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
		w.must(err)
		defer stats.Close()
		before, err := g.Program().Stats()
		w.must(err)
		w.newFlow(c, w.snapshot(g).Active)
		after, err := g.Program().Stats()
		w.must(err)
		return after.RunCount - before.RunCount
	}
	if old, now := ran(g1), ran(g2); old != 0 || now != 1 {
		t.Errorf("after the upgrade the old program ran %d times for a packet and the new one %d times", old, now)
	}
	// Passed on by the one that has the old program: it leaves the new one in place.
	late := first.next()
	g3 := w.open(w.withoutPins(address, late))
	n3 := w.serve(g3, 1)
	w.activate(n3)
	if old, now := ran(g3), ran(g2); old != 0 || now != 1 {
		t.Errorf("after a late join the old program ran %d times and the new one %d times", old, now)
	}
	if s := w.snapshot(g3); s.Program != build {
		t.Errorf("the table says %q, want %q", s.Program, build)
	}
	// Passed on by the one that replaced it: the new one.
	g4 := w.open(w.withoutPins(address, second.next()))
	if ran(g4) != 1 {
		t.Error("the program that was passed on is not the one that runs")
	}
	// With nobody left at the address the old program is what there is, and the table
	// does not say that it were the new one.
	for _, n := range []*dispatch.Generation{n1, n2, n3} {
		w.must(n.Close())
	}
	w.activate(w.serve(g3, 1))
	if ran(g3) != 1 || ran(g2) != 0 {
		t.Error("alone at the address: not the own program")
	}
	if s := w.snapshot(g3); s.Program != "" {
		t.Errorf("the table says %q", s.Program)
	}
	if upgraded, err := g3.UpgradeProgram(); err != nil || !upgraded || w.snapshot(g3).Program != build {
		t.Errorf("upgrade: %t, %v, %q", upgraded, err, w.snapshot(g3).Program)
	}
}
