// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"instar/dispatch"
	"instar/internal/capset"
	"instar/internal/testutil"
)

func TestControlGroupOf(t *testing.T) {
	const mounts = "25 30 0:23 / /sys rw - sysfs sysfs rw\n" +
		"33 25 0:28 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw\n"
	for _, tt := range []struct{ name, own, mounts, want, refused string }{
		{"root", "0::/\n", mounts, "/sys/fs/cgroup/unified", ""},
		{"below", "12:cpu:/x\n0::/system.slice/a.service\n", mounts, "/sys/fs/cgroup/unified/system.slice/a.service", ""},
		{"a part is mounted", "0::/docker/1/app\n", "33 25 0:28 /docker/1 /mnt/c\\040g rw - cgroup2 cgroup2 rw\n", "/mnt/c g/app", ""},
		{"another part is mounted", "0::/docker/12\n", "33 25 0:28 /docker/1 /cg rw - cgroup2 cgroup2 rw\n", "", "is not in a file system"},
		{"version 1 alone", "1:cpu:/\n", mounts, "", "in no control group of version 2"},
		{"not mounted", "0::/\n", "25 30 0:23 / /sys rw - sysfs sysfs rw\nbroken\n", "", "mount -t cgroup2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := dispatch.ControlGroup(tt.own, tt.mounts)
			if tt.refused != "" {
				wantRefused(t, "find", err, "not-supported", tt.refused)
				return
			}
			if err != nil || got != tt.want {
				t.Errorf("%q, %v; want %q", got, err, tt.want)
			}
		})
	}
}

// watchers counts the programs that see what this process's control group sends, for a
// group.
func (w *world) watchers(g *dispatch.Group) (n int) {
	w.Helper()
	flows, err := ebpf.LoadPinnedMap(filepath.Join(g.Path(), "flows"), nil)
	w.must(err)
	defer flows.Close()
	info, err := flows.Info()
	w.must(err)
	id, _ := info.ID()
	dir, err := dispatch.OwnControlGroup()
	w.must(err)
	f, err := os.Open(dir)
	w.must(err)
	defer f.Close()
	for _, attach := range []ebpf.AttachType{ebpf.AttachCGroupUDP4Sendmsg, ebpf.AttachCGroupUDP6Sendmsg} {
		r, err := link.QueryPrograms(link.QueryOptions{Target: int(f.Fd()), Attach: attach})
		w.must(err)
		for _, p := range r.Programs {
			program, err := ebpf.NewProgramFromID(p.ID)
			if err != nil {
				continue // it is gone
			}
			info, err := program.Info()
			w.must(errors.Join(err, program.Close()))
			if maps, _ := info.MapIDs(); slices.Contains(maps, id) {
				n++
			}
		}
	}
	return n
}

func needControlGroup(t *testing.T) {
	t.Helper()
	if _, err := dispatch.OwnControlGroup(); err != nil {
		testutil.Skip(t, "%v", err)
	}
}

// B7: a flow is remembered when it is answered, and not before, over all families.
func TestLearnAnswered(t *testing.T) {
	needControlGroup(t)
	for _, tt := range []struct{ address, target string }{
		{"127.0.0.1:4433", "127.0.0.1:4433"}, {"[::1]:4433", "[::1]:4433"}, {"[::]:4433", "[::1]:4433"}, {"[::]:4433", "127.0.0.1:4433"},
	} {
		t.Run(tt.address+" from "+tt.target, func(t *testing.T) {
			w := newWorld(t)
			o := w.flowOptions(tt.address)
			o.FlowLearning = dispatch.LearnAnswered
			g := w.open(o)
			silent := w.join(g, 1)
			w.activate(silent)
			c := w.client(tt.target)
			for range 3 {
				_, err := c.conn.Write([]byte("anybody there?"))
				w.must(err)
			}
			w.wantCounts(g, "not answered", nil, counts{"new": 3})
			if f := w.flowCounts(g); len(f.Live) != 0 {
				t.Errorf("without an answer: %+v", f)
			}
			one := w.serve(g, 2)
			w.activate(one)
			w.wantAnswer(c, 2)
			if f := w.flowCounts(g); len(f.Live) != 1 || f.Live[2] != 1 || f.Evicted != 0 {
				t.Errorf("after the answer: %+v", f)
			}
			w.activate(w.serve(g, 2))
			w.wantAnswer(c, 2)
			other := w.client(tt.target)
			w.wantAnswer(other, 3)
			// Nobody takes a flow by speaking to its peer.
			from := silent.Conns()[0]
			_, err := from.WriteToUDPAddrPort(make([]byte, answerHead), c.peer())
			w.must(err)
			_, err = c.conn.Read(make([]byte, 64))
			w.must(err)
			w.wantAnswer(c, 2)
			// Unless its owner is gone.
			w.must(one.Close())
			w.wantAnswer(c, 3)
			w.activate(w.serve(g, 1))
			w.wantAnswer(c, 3)
			w.wantAnswer(other, 3)
			w.wantAnswer(w.client(tt.target), 4)
			if f := w.flowCounts(g); f.Live[3] != 2 || f.Live[4] != 1 || f.Evicted != 0 {
				t.Errorf("at the end: %+v", f)
			}
		})
	}
}

// What a process does to its control group ends with it, also when it is killed; two
// processes and two groups in one do not disturb each other.
func TestAnswersOfProcesses(t *testing.T) {
	needControlGroup(t)
	w := newWorld(t)
	o := w.flowOptions("127.0.0.1:4433")
	o.FlowLearning = dispatch.LearnAnswered
	other := w.flowOptions("127.0.0.1:4434")
	other.FlowLearning = dispatch.LearnAnswered
	h := w.open(other)
	w.activate(w.serve(h, 1))
	beside := w.client("127.0.0.1:4434")
	w.wantAnswer(beside, 1)

	a, b := w.start(o, nil), w.start(o, nil)
	w.ask(a, "open")
	w.ask(a, "join 2")
	w.ask(a, "activate 1")
	c := w.client("127.0.0.1:4433")
	w.wantAnswer(c, 1)
	w.ask(b, "open")
	w.ask(b, "join 2")
	w.ask(b, "activate 2")
	d := w.client("127.0.0.1:4433")
	w.wantAnswer(d, 2)
	w.wantAnswer(c, 1)
	g := w.open(o)
	if n, m := w.watchers(g), w.watchers(h); n != 4 || m != 2 {
		t.Errorf("%d and %d programs, want two of each generation", n, m)
	}
	b.Kill()
	w.wantAnswer(d, 1)
	w.wantAnswer(c, 1)
	w.activate(w.serve(h, 1))
	w.wantAnswer(beside, 1)
	testutil.WaitFor(t, patience, func() bool { return w.watchers(g) == 2 }, "the programs of a process that was killed to go")
	w.ask(a, "close")
	testutil.WaitFor(t, patience, func() bool { return w.watchers(g) == 0 }, "the programs of a generation that was closed to go")
	if n := w.watchers(h); n != 4 {
		t.Errorf("%d programs of two generations", n)
	}
}

// A server without the rights is told what it can do.
func TestAnswersNeedRights(t *testing.T) {
	needControlGroup(t)
	w := newWorld(t)
	o := w.flowOptions("127.0.0.1:4433")
	o.FlowLearning = dispatch.LearnAnswered
	o.Service = "test"
	needUnprivilegedMaps(t)
	if _, err := dispatch.Prepare(o, dispatch.Owner{UID: 65534, GID: 65534}); err != nil {
		t.Fatal(err)
	}
	p := w.start(o, nobody(t))
	w.ask(p, "open")
	refusal := p.Ask("join 1")
	wantRefusal(t, "join", refusal, "permission", capset.BPF.String(), "LearnAssured", "Generation.Assure")
	if strings.Contains(refusal, "instar prepare") {
		t.Errorf("%s: it is prepared already", refusal)
	}
}
