// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/dispatch/connid"
	"instar/internal/rawconn"
	"instar/internal/testutil"
)

// B5: a snapshot says who is there, since when, and what came.
func TestSnapshot(t *testing.T) {
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	o := w.options(address)
	o.Build = strings.Repeat("b", 40)
	g := w.open(o)
	began := time.Now()
	near := func(what string, at time.Time) {
		t.Helper()
		if at.Before(began.Add(-time.Second)) || at.After(time.Now().Add(time.Second)) {
			t.Errorf("%s is %v, and the test began at %v", what, at, began)
		}
	}
	first := w.serve(g, 2)
	s := w.snapshot(g)
	if s.Path != g.Path() || s.Network != "udp4" || s.Address != address || s.Device != "" || s.Service != "test" ||
		s.Steering != "quic" || s.Layout != 1 || s.Active != 0 || s.MaxGenerations != 4 || s.MaxWorkers != 4 ||
		s.FlowEntries != dispatch.DefaultFlowEntries || len(s.Verdicts) != 8 || s.Packets != 0 {
		t.Errorf("%+v", s)
	}
	n := s.Generations[0]
	near("joined", n.Joined)
	comm, err := os.ReadFile("/proc/self/comm")
	w.must(err)
	if n.Number != 1 || n.Slot != 0 || n.State != dispatch.StateStaged || n.Workers != 2 || n.Live != 2 || n.PID != os.Getpid() ||
		n.Command != strings.TrimSpace(string(comm)) || n.Build != o.Build[:31] || n.Packets != 0 || !n.LastPacket.IsZero() ||
		!n.Activated.IsZero() || !n.Superseded.IsZero() || !n.Deadline.IsZero() {
		t.Errorf("%+v", n)
	}

	w.activate(first)
	c := w.client(address)
	f := w.newFlow(c, 1)
	w.use(c, f, f)
	n = w.snapshot(g).Generations[0]
	near("activated", n.Activated)
	near("last packet", n.LastPacket)
	if n.Packets != 3 || n.State != dispatch.StateActive || !n.Superseded.IsZero() {
		t.Errorf("%+v", n)
	}

	p := w.start(o, nil)
	for _, line := range []string{"open", "join 1", "activate"} {
		w.ask(p, "%s", line)
	}
	deadline := time.Now().Add(time.Hour)
	w.must(g.SetDeadline(1, deadline))
	s = w.snapshot(g)
	other, old := s.Generations[0], s.Generations[1]
	near("superseded", old.Superseded)
	if d := old.Deadline.Sub(deadline); d.Abs() > time.Second {
		t.Errorf("the deadline is off by %v", d)
	}
	if other.PID != p.PID || other.Command == "" || other.Packets != 0 || old.State != dispatch.StateDraining || old.Packets != 3 {
		t.Errorf("%+v", s.Generations)
	}
	// What tools read.
	b, err := json.Marshal(s)
	w.must(err)
	for _, want := range []string{`"active":2`, `"state":"draining"`, `"state":"active"`, `"verdicts":{`, `"steering":"quic"`, fmt.Sprintf(`"pid":%d`, p.PID)} {
		if !strings.Contains(string(b), want) {
			t.Errorf("no %s in %s", want, b)
		}
	}
	if strings.Contains(string(b), "0001-01-01") {
		t.Errorf("a time that never was in %s", b)
	}

	// The process of another PID namespace has a number and no name.
	g.Control().Info[other.Slot].PidNamespace++
	if n := w.snapshot(g).Generations[0]; n.Command != "" || n.PID != p.PID {
		t.Errorf("%+v", n)
	}
	// A process that has the number of a dead one has not its name.
	g.Control().Info[other.Slot].PidNamespace--
	g.Control().Info[other.Slot].PidStart++
	if n := w.snapshot(g).Generations[0]; n.Command != "" {
		t.Errorf("%+v", n)
	}
}

// A generation is not charged for what earlier users of its slot got.
func TestPacketsOfAReusedSlot(t *testing.T) {
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	o := w.options(address)
	o.MaxGenerations = 2
	g := w.open(o)
	c := w.client(address)
	for round := range uint32(6) {
		n := w.serve(g, 1)
		w.activate(n)
		i := w.snapshot(g).Generations[0]
		if i.Packets != 0 || !i.LastPacket.IsZero() {
			t.Errorf("generation %d begins with %+v", n.Number(), i)
		}
		for range round + 1 {
			w.newFlow(c, n.Number())
		}
		i = w.snapshot(g).Generations[0]
		if i.Packets != uint64(round+1) || i.LastPacket.IsZero() {
			t.Errorf("generation %d got %d packets: %+v", n.Number(), round+1, i)
		}
		w.must(n.Close())
	}
}

func TestDefaults(t *testing.T) {
	w := newWorld(t)
	g := w.open(dispatch.Options{Address: ":4433", Root: w.root})
	s := w.snapshot(g)
	if s.Service != filepath.Base(os.Args[0]) || s.Steering != "quic" || s.Address != "[::]:4433" || s.Network != "udp" ||
		s.MaxGenerations != dispatch.DefaultMaxGenerations || s.MaxWorkers != dispatch.DefaultWorkers || s.FlowEntries != dispatch.DefaultFlowEntries {
		t.Errorf("%+v", s)
	}
	n := w.join(g, 1)
	if i := w.snapshot(g).Generations[0]; i.Build == "" {
		t.Errorf("%+v", i)
	}
	if n.Workers() != 1 || n.Group() != g || n.Number() != 1 || n.Handle(0) != connid.MakeHandle(0, 0) {
		t.Errorf("%d workers, number %d, handle %v", n.Workers(), n.Number(), n.Handle(0))
	}
	// What it hands out is the caller's.
	n.Conns()[0] = nil
	if n.Conns()[0] == nil {
		t.Error("the slice of sockets is shared")
	}
}

func TestWords(t *testing.T) {
	for state, want := range map[dispatch.State]string{dispatch.StateGone: "gone", dispatch.StateStaged: "staged",
		dispatch.StateActive: "active", dispatch.StateDraining: "draining", 99: "gone"} {
		if text, err := state.MarshalText(); state.String() != want || string(text) != want || err != nil {
			t.Errorf("%d: %v, %s, %v", state, state, text, err)
		}
	}
	for _, steering := range []dispatch.Steering{dispatch.SteeringQUIC, dispatch.SteeringStateless} {
		if got, err := dispatch.ParseSteering(steering.String()); got != steering || err != nil {
			t.Errorf("%v: %v, %v", steering, got, err)
		}
	}
	_, err := dispatch.ParseSteering("magic")
	wantRefused(t, "ParseSteering", err, "options", `"magic"`, "quic, stateless")
	if got := dispatch.Steering(7).String(); got != "steering 7" {
		t.Error(got)
	}
}

func TestSecrets(t *testing.T) {
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	g, again, other := w.open(o), w.open(o), w.open(w.options("127.0.0.1:4434"))
	seen := map[string]string{}
	secret := func(g *dispatch.Group, label string, n int) string {
		t.Helper()
		b, err := g.Secret(label, n)
		if err != nil || len(b) != n {
			t.Fatalf("%q: %d bytes, %v", label, len(b), err)
		}
		return string(b)
	}
	for _, label := range []string{"", "reset", "token", "reset ", "connection id keys v1"} {
		s := secret(g, label, 32)
		if s != secret(again, label, 32) {
			t.Errorf("%q: two openings differ", label)
		}
		for _, x := range []string{s, secret(other, label, 32)} {
			if before, ok := seen[x]; ok {
				t.Errorf("%q is the same as %q", label, before)
			}
			seen[x] = label
		}
	}
	secret(g, "long", 255*32)
	for _, n := range []int{-1, 0, 255*32 + 1} {
		_, err := g.Secret("x", n)
		wantRefused(t, "Secret", err, "options", fmt.Sprintf("length %d", n), "1 to 8160")
	}
}

// F1, F2: the sockets stay as package net made them, and no child inherits them.
func TestSockets(t *testing.T) {
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	o.ReceiveBuffer = 8 << 20
	g := w.open(o)
	n := w.join(g, 2)
	for _, conn := range n.Conns() {
		w.must(rawconn.Of(conn, func(fd int) error {
			flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
			if err != nil || flags&unix.O_NONBLOCK == 0 {
				t.Errorf("flags %x, %v", flags, err)
			}
			if flags, err = unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("descriptor flags %x, %v", flags, err)
			}
			for name, want := range map[int]int{unix.SO_RCVBUF: 16 << 20, unix.SO_REUSEPORT: 1, unix.SO_REUSEADDR: 0} {
				if got, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, name); err != nil || got != want {
					t.Errorf("socket option %d is %d, want %d (%v)", name, got, want, err)
				}
			}
			// One run of the program for each packet.
			if got, err := unix.GetsockoptInt(fd, unix.SOL_UDP, unix.UDP_GRO); err == nil && got != 0 {
				t.Errorf("UDP_GRO is %d", got)
			}
			return nil
		}))
	}
	entries, err := os.ReadDir("/proc/self/fd")
	w.must(err)
	for _, e := range entries {
		target, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil || !strings.Contains(target, "bpf") && !strings.Contains(target, "inotify") {
			continue
		}
		info, err := os.ReadFile("/proc/self/fdinfo/" + e.Name())
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		w.must(err)
		var flags int
		_, after, _ := strings.Cut(string(info), "flags:")
		if _, err := fmt.Sscanf(after, "%o", &flags); err != nil || flags&unix.O_CLOEXEC == 0 {
			t.Errorf("%s is inherited: flags %o (%v)", target, flags, err)
		}
	}
}

// A group behind a load balancer: its identifiers are longer, and steered all the same.
func TestLoadBalancerPrefix(t *testing.T) {
	w := newWorld(t)
	const address = "[::1]:4433"
	o := w.options(address)
	o.LoadBalancer = &connid.LoadBalancer{ConfigRotation: 2, ServerID: []byte{1, 2, 3, 4, 5}, NonceLen: 6}
	g := w.open(o)
	w.activate(w.serve(g, 2))
	if n := g.Codec().PrefixLen(); n != 12 {
		t.Errorf("the prefix has %d bytes", n)
	}
	l := w.load(address, 2, false)
	l.served(20)
	// The next host of the same balancer has another server ID, as long.
	o.LoadBalancer.ServerID = []byte{5, 4, 3, 2, 1}
	w.activate(w.serve(w.open(o), 1))
	l.served(20)
	l.lossless(g, nil)
	// A tool needs no configuration.
	tool, err := dispatch.OpenPath(g.Path())
	w.must(err)
	defer tool.Close()
	if s := w.snapshot(tool); s.Active != 2 {
		t.Errorf("%+v", s)
	}
}

// Where nobody may list sockets, groups work; only strangers are not seen.
func TestWithoutNetlink(t *testing.T) {
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	o := w.options(address)
	p := denied.Start(w, testutil.Options{Args: []string{encode(o), fmt.Sprint(unix.SYS_SOCKET), fmt.Sprint(unix.AF_NETLINK)}, NS: w.ns})
	for _, line := range []string{"open", "join 2", "activate"} {
		w.ask(p, "%s", line)
	}
	c := w.client(address)
	w.use(c, w.newFlow(c, 1))
	for _, line := range []string{"close", "leave"} {
		w.ask(p, "%s", line)
	}
}
