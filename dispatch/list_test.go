// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"

	"instar/bpf"
	"instar/dispatch"
	"instar/internal/testutil"
)

func TestListOfNothing(t *testing.T) {
	w := newWorld(t)
	for _, root := range []string{w.root, w.root + "/none", filepath.Dir(w.root)} {
		if entries, err := dispatch.List(root); err != nil || len(entries) != 0 {
			t.Errorf("%s: %v, %v", root, entries, err)
		}
	}
	w.must(os.MkdirAll(w.root+"/empty", 0o755))
	if entries, err := dispatch.List(w.root); err != nil || len(entries) != 0 {
		t.Errorf("an empty one: %v, %v", entries, err)
	}
}

// What List says of good groups, damaged ones, and those that one may not read.
func TestList(t *testing.T) {
	testutil.NeedRoot(t)
	w := newWorld(t)
	good := w.open(w.options("127.0.0.1:4433"))
	w.activate(w.serve(good, 2))
	w.newFlow(w.client("127.0.0.1:4433"), 1)
	damaged := w.open(w.options("[::]:4434"))
	w.must(os.Remove(filepath.Join(damaged.Path(), "sockets")))
	other := testutil.OtherNetNS(t)
	var there *dispatch.Group
	other.Run(func() { there = w.open(w.options("127.0.0.1:4433")) })

	entries, err := dispatch.List(w.root)
	w.must(err)
	got := map[string]dispatch.Entry{}
	for _, e := range entries {
		got[e.Path] = e
	}
	if len(entries) != 3 || len(got) != 3 {
		t.Fatalf("listed: %+v", entries)
	}
	if e := got[good.Path()]; e.Err != nil || !e.Here || e.Name != "udp4-127.0.0.1-4433" || e.Snapshot.Active != 1 || e.Snapshot.Verdicts["new"] != 1 {
		t.Errorf("the good one: %+v", e)
	}
	e := got[damaged.Path()]
	wantRefused(t, "the damaged one", e.Err, "not-exist", `pin "sockets" is missing`)
	if e.Snapshot != nil || !e.Here || e.Name != "udp-::-4434" {
		t.Errorf("the damaged one: %+v", e)
	}
	if e := got[there.Path()]; e.Err != nil || e.Here || e.Netns == got[good.Path()].Netns || e.Name != "udp4-127.0.0.1-4433" {
		t.Errorf("the one there: %+v", e)
	}

	p := w.start(w.options("127.0.0.1:4433"), testutil.Nobody())
	for _, line := range strings.Split(w.ask(p, "list"), " | ") {
		path, refusal, _ := strings.Cut(line, " ")
		if _, ok := got[path]; !ok {
			t.Errorf("nobody lists %q", line)
		}
		wantRefusal(t, "as nobody", refusal, "permission", "uid 65534", "owner is uid 0")
		delete(got, path)
	}
	if len(got) != 0 {
		t.Errorf("nobody does not list %v", got)
	}
	// Where even the folder may not be read.
	w.must(os.Chmod(w.root, 0o700))
	wantRefusal(t, "a closed root", p.Ask("list"), "permission", "list groups", w.root, "uid 0")
}

// I3: a group that somebody uses is never removed; whatever else is left can be.
func TestForget(t *testing.T) {
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	g := w.open(o)
	path := g.Path()
	n := w.join(g, 2)
	unused := w.join(g, 1)
	w.activate(n)
	before := contents(t, path)
	for _, layout := range []uint32{1, 7} {
		g.Control().Layout = layout
		wantRefused(t, "a live group", dispatch.Forget(path), "state", "forget "+path, "3 sockets of the group live", "stop their servers first")
	}
	g.Control().Layout = 1
	if after := contents(t, path); after != before {
		t.Errorf("a refused Forget changed the group:\n%s\nbefore it was\n%s", after, before)
	}
	w.must(unused.Close())
	wantRefused(t, "a live group", dispatch.Forget(path+"/."), "state", "2 sockets")
	secret, err := g.Secret("key", 8)
	w.must(err)
	w.must(n.Close())
	w.must(dispatch.Forget(path))
	if _, err := os.Lstat(path); err == nil {
		t.Error("it is still there")
	}
	wantRefused(t, "twice", dispatch.Forget(path), "not-exist", "forget "+path)

	// A Group of before says what happened, and makes nothing worse.
	for what, words := range map[string][]string{
		"nobody made it anew":   {"does not exist (any more)"},
		"somebody made it anew": {"removed and made anew since it was opened", "open it again"},
	} {
		if what == "somebody made it anew" {
			w.open(o)
		}
		_, err := g.Join(1)
		wantRefused(t, what+": Join", err, "not-exist", words...)
		wantRefused(t, what+": Activate", g.Activate(1), "not-exist", words...)
		wantRefused(t, what+": Repair", g.Repair(), "not-exist", words...)
		_, err = g.UpgradeProgram()
		wantRefused(t, what+": UpgradeProgram", err, "not-exist", words...)
		if s := w.snapshot(g); s.Active != 0 || len(s.Generations) != 0 {
			t.Errorf("%s: %+v", what, s)
		}
		if what == "somebody made it anew" {
			anew, err := dispatch.OpenPath(path)
			w.must(err)
			if again, err := anew.Secret("key", 8); err != nil || string(again) == string(secret) {
				t.Errorf("the secret outlived Forget: %x, %v", again, err)
			}
			w.must(anew.Close())
			w.must(dispatch.Forget(path))
		}
	}
}

// What Forget takes for a group, and what not.
func TestForgetOfWhatIsNoGroup(t *testing.T) {
	w := newWorld(t)
	g := w.open(w.options("127.0.0.1:4433"))
	w.must(os.Mkdir(w.root+"/here", 0o755))
	for what, path := range map[string]string{
		"a folder of a namespace":       filepath.Dir(g.Path()),
		"another folder on the bpffs":   w.root + "/here",
		"the root":                      w.root,
		"a folder of another file type": t.TempDir(),
	} {
		wantRefused(t, what, dispatch.Forget(path), "options", "forget "+path, "no folder of a group")
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	wantRefused(t, "nothing", dispatch.Forget(w.root+"/none/udp4-1"), "not-exist")
	if s := w.snapshot(g); s.Path != g.Path() {
		t.Errorf("%+v", s)
	}
}

// Damaged groups are no dead end.
func TestForgetOfDamagedGroups(t *testing.T) {
	testutil.Slow(t)
	needWorld(t)
	for _, tc := range []struct {
		name   string
		damage func(w *world, path string)
	}{
		{"unknown layout", func(w *world, path string) { setLayout(w.T, path, 99) }},
		{"no pin but the sockets", func(w *world, path string) {
			for _, pin := range list(w, path) {
				if pin != "sockets" {
					w.must(os.Remove(filepath.Join(path, pin)))
				}
			}
		}},
		{"no socket map", func(w *world, path string) { w.must(os.Remove(filepath.Join(path, "sockets"))) }},
		{"nothing", func(w *world, path string) {
			for _, pin := range list(w, path) {
				w.must(os.Remove(filepath.Join(path, pin)))
			}
		}},
		{"another map for the socket map", func(w *world, path string) {
			w.must(os.Remove(filepath.Join(path, "sockets")))
			m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 4})
			w.must(err)
			w.must(m.Pin(filepath.Join(path, "sockets")))
			w.must(m.Close())
		}},
		{"a program for the socket map", func(w *world, path string) {
			w.must(os.Remove(filepath.Join(path, "sockets")))
			w.must(os.Rename(filepath.Join(path, "program"), filepath.Join(path, "sockets")))
		}},
		{"a pin too many", func(w *world, path string) {
			m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 4})
			w.must(err)
			w.must(m.Pin(filepath.Join(path, "program-new")))
			w.must(m.Close())
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			o := w.options("127.0.0.1:4433")
			g := w.open(o)
			path := g.Path()
			w.leave(g)
			tc.damage(w, path)
			w.must(dispatch.Forget(path))
			again := w.open(o)
			if again.Path() != path || len(list(t, path)) != 6 {
				t.Errorf("made anew: %s with %q", again.Path(), list(t, path))
			}
			w.activate(w.join(again, 1))
		})
	}
}

// Pins that do not belong together are refused, and what the owner of a group writes
// into it later harms nobody else.
func TestDamagedControl(t *testing.T) {
	testutil.Slow(t)
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	g := w.open(o)
	path, c := g.Path(), g.Control()
	intact := *c
	for what, damage := range map[string]func(){
		"no generations":    func() { c.MaxGenerations = 0 },
		"many generations":  func() { c.MaxGenerations = 257 },
		"no workers":        func() { c.MaxWorkers = 0 },
		"many workers":      func() { c.MaxWorkers = 1 << 31 },
		"others":            func() { c.MaxWorkers = 5 },
		"unknown steering":  func() { c.Steering = 9 },
		"no steering":       func() { c.Steering = 0 },
		"no address":        func() { c.Address[0] = 'x' },
		"address of a host": func() { copy(c.Address[:], "localhost:443\x00") },
		"another address":   func() { copy(c.Address[:], "127.0.0.1:4434\x00") },
	} {
		damage()
		before := contents(t, path)
		_, err := dispatch.Open(o)
		wantRefused(t, what, err, "layout", "damaged", "instar forget "+path)
		if _, err := dispatch.OpenPath(path); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", what, err)
		}
		if after := contents(t, path); after != before {
			t.Errorf("%s: it was touched", what)
		}
		*c = intact
	}
	n := w.join(g, 2)
	w.activate(n)
	tool, err := dispatch.OpenPath(path)
	w.must(err)
	defer tool.Close()
	// An order that names slots which cannot be, or one twice, is mended at the next change.
	order := &c.Orders[c.Active>>40&3]
	copy(order.Slot[:], []uint8{200, n.Slot(), 3, n.Slot(), 3})
	order.Total, order.Activated = 5, 2
	w.must(tool.Repair())
	if s := w.snapshot(tool); len(s.Generations) != 1 || s.Active != n.Number() || s.Generations[0].State != dispatch.StateActive {
		t.Errorf("mended: %+v", s)
	}
	order = &c.Orders[c.Active>>40&3]
	if order.Total != 1 || order.Activated != 1 || order.Slot[0] != n.Slot() {
		t.Errorf("mended: %+v", order.Slot[:order.Total])
	}
	held := *c
	for what, damage := range map[string]func(){
		"sizes":        func() { c.MaxGenerations, c.MaxWorkers, c.NextNumber = 1<<32-1, 1<<32-1, 0 },
		"all ones":     func() { fill(c, 0xff) },
		"all zeros":    func() { fill(c, 0) },
		"long orders":  func() { c.Orders[c.Active>>40&3].Total, c.Orders[c.Active>>40&3].Activated = 1<<16-1, 1<<16-1 },
		"many workers": func() { c.Slots[0].Workers = 1<<16 - 1 },
	} {
		damage()
		if s, err := tool.Snapshot(); err == nil {
			t.Logf("%s: active %d, %d generations", what, s.Active, len(s.Generations))
		}
		_ = n.State()
		_ = tool.Activate(1)
		_, _ = tool.Rollback()
		if m, err := g.Join(1); err == nil {
			_ = m.Close()
		}
		_ = tool.Evict(1)
		_ = tool.Repair()
		*c = held
	}
	w.must(n.Close())
	w.must(dispatch.Forget(path))
}

// A group that is forgotten and made anew while it is being opened is one of the two, not
// a part of each.
func TestForgottenWhileOpened(t *testing.T) {
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	w.must(w.open(o).Close())
	path := w.path(o)
	var anew *dispatch.Group
	dispatch.OnStep(t, func(done string) {
		if done == "open control map" {
			dispatch.HoldAtSteps(nil)
			w.must(dispatch.Forget(path))
			anew = w.open(o)
		}
	})
	g := w.open(o)
	if anew == nil {
		t.Fatal("it was not made anew")
	}
	w.activate(w.join(anew, 1))
	if s := w.snapshot(g); s.Active != 1 || len(s.Generations) != 1 || s.Generations[0].Live != 1 {
		t.Errorf("the one that was being opened: %+v", s)
	}
}

func fill(c *bpf.Control, octet byte) {
	memory := unsafe.Slice((*byte)(unsafe.Pointer(c)), unsafe.Sizeof(*c))
	for i := range memory {
		memory[i] = octet
	}
}
