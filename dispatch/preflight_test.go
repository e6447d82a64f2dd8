// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"instar/bpf"
	"instar/dispatch"
	"instar/dispatch/connid"
	"instar/internal/bpffs"
	"instar/internal/capset"
	"instar/internal/testutil"
)

// Options out of their ranges are refused before anything is touched.
func TestOptionsAreChecked(t *testing.T) {
	lb := func(server, nonce int) *connid.LoadBalancer {
		return &connid.LoadBalancer{ServerID: make([]byte, server), NonceLen: nonce}
	}
	for _, tc := range []struct {
		name    string
		options dispatch.Options
		words   []string
	}{
		{"no address", dispatch.Options{}, []string{`address ""`, "want IP:port, such as"}},
		{"no port", dispatch.Options{Address: "127.0.0.1"}, []string{"want IP:port"}},
		{"port 0", dispatch.Options{Address: "127.0.0.1:0"}, []string{"port 0", "name one"}},
		{"port 65536", dispatch.Options{Address: "127.0.0.1:65536"}, []string{`"65536"`, "from 1 to 65535"}},
		{"negative port", dispatch.Options{Address: "127.0.0.1:-1"}, []string{"from 1 to 65535"}},
		{"named port", dispatch.Options{Address: "127.0.0.1:https"}, []string{`"https"`, "from 1 to 65535"}},
		{"host name", dispatch.Options{Address: "localhost:443"}, []string{`"localhost"`, "literal IP address"}},
		{"address cut off", dispatch.Options{Address: "127.0.0:443"}, []string{"literal IP address"}},
		{"IPv6 with no brackets", dispatch.Options{Address: "2001:db8::1:443"}, []string{"want IP:port"}},
		{"multicast", dispatch.Options{Address: "224.0.0.1:443"}, []string{"multicast", "cannot be steered"}},
		{"multicast 6", dispatch.Options{Address: "[ff02::1]:443"}, []string{"multicast"}},
		{"unknown network", dispatch.Options{Network: "ip", Address: "127.0.0.1:443"}, []string{`network "ip"`, "udp, udp4, udp6, tcp, tcp4 or tcp6"}},
		{"IPv6 on udp4", dispatch.Options{Network: "udp4", Address: "[::1]:443"}, []string{`not of network "udp4"`}},
		{"IPv4 on udp6", dispatch.Options{Network: "udp6", Address: "127.0.0.1:443"}, []string{`not of network "udp6"`}},
		{"device of 16 bytes", dispatch.Options{Device: "0123456789abcdef"}, []string{"0123456789abcdef", "no name of a network device"}},
		{"device with a slash", dispatch.Options{Device: "a/b"}, []string{"no name of a network device"}},
		{"service of 64 bytes", dispatch.Options{Service: strings.Repeat("s", 64)}, []string{"service", "63 bytes"}},
		{"service of two lines", dispatch.Options{Service: "a\nb"}, []string{"line break"}},
		{"unknown steering", dispatch.Options{Steering: 99}, []string{"steering 99", "quic, stateless, flow, wireguard, custom and tcp"}},
		{"one generation", dispatch.Options{MaxGenerations: 1}, []string{"MaxGenerations is 1", "2 to 256"}},
		{"257 generations", dispatch.Options{MaxGenerations: 257}, []string{"MaxGenerations is 257", "2 to 256"}},
		{"-1 workers", dispatch.Options{Workers: -1}, []string{"Workers is -1", "1 to 256"}},
		{"257 workers", dispatch.Options{Workers: 257}, []string{"Workers is 257", "1 to 256"}},
		{"63 flows", dispatch.Options{FlowEntries: 63}, []string{"FlowEntries is 63", "64 to 16777216"}},
		{"too many flows", dispatch.Options{FlowEntries: 1<<24 + 1}, []string{"FlowEntries is 16777217"}},
		{"negative buffer", dispatch.Options{ReceiveBuffer: -1}, []string{"ReceiveBuffer is -1"}},
		{"balancer with no server ID", dispatch.Options{LoadBalancer: lb(0, 4)}, []string{"LoadBalancer"}},
		{"balancer with a long prefix", dispatch.Options{LoadBalancer: lb(10, 4)}, []string{"LoadBalancer"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := t.TempDir()
			o := tc.options
			if o.Address == "" && tc.name != "no address" {
				o.Address = "127.0.0.1:443"
			}
			o.Root = root
			_, err := dispatch.Open(o)
			wantRefused(t, "Open", err, "options", append(tc.words, "open group: ")...)
			_, err = dispatch.Prepare(o, dispatch.Owner{})
			wantRefused(t, "Prepare", err, "options", tc.words...)
			if left := list(t, root); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

// What an address may look like, and the group that it names.
func TestAddressForms(t *testing.T) {
	w := newWorld(t)
	for i, tc := range []struct {
		network, address  string
		wantNet, wantAddr string
	}{
		{"", "127.0.0.1", "udp4", "127.0.0.1"},
		{"udp4", "127.0.0.1", "udp4", "127.0.0.1"},
		{"udp", "[::ffff:127.0.0.1]", "udp4", "127.0.0.1"},
		{"", "[::1]", "udp6", "[::1]"},
		{"udp6", "[::1]", "udp6", "[::1]"},
		{"", "", "udp", "[::]"},
		{"udp", "[::]", "udp", "[::]"},
		{"udp4", "", "udp4", "0.0.0.0"},
		{"", "0.0.0.0", "udp4", "0.0.0.0"},
		{"udp6", "", "udp6", "[::]"},
		{"udp6", "[::]", "udp6", "[::]"},
	} {
		port := fmt.Sprintf(":%d", 4000+i)
		o := w.options(tc.address + port)
		o.Network = tc.network
		g := w.open(o)
		s := w.snapshot(g)
		if s.Network != tc.wantNet || s.Address != tc.wantAddr+port {
			t.Errorf("%q %q: group %s %s, want %s %s", tc.network, o.Address, s.Network, s.Address, tc.wantNet, tc.wantAddr)
		}
		n := w.join(g, 1)
		local := n.Conns()[0].LocalAddr().String()
		if want := strings.NewReplacer("[::ffff:127.0.0.1]", "127.0.0.1").Replace(tc.wantAddr + port); local != want {
			t.Errorf("%q %q: bound to %s, want %s", tc.network, o.Address, local, want)
		}
		if name := filepath.Base(g.Path()); strings.ContainsAny(name, "./") || !strings.HasPrefix(name, tc.wantNet+"-") {
			t.Errorf("%q %q: folder %q", tc.network, o.Address, name)
		}
	}
}

// I1: each thing that can be missing is named, with what to do about it.
func TestNoBPFFS(t *testing.T) {
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	for _, root := range []string{t.TempDir() + "/instar", t.TempDir(), t.TempDir() + "/a/b", "/sys/fs/bpf-none/instar"} {
		o.Root = root
		_, err := dispatch.Open(o)
		wantRefused(t, root, err, "no-bpffs", root, "not on a bpffs", "mount -t bpf bpf "+root)
		if filepath.Base(root) != "instar" {
			continue
		}
		if _, err := os.Stat(root); err == nil {
			t.Errorf("%s was made", root)
		}
	}
}

// denied runs a server whose system call of that number, with that first argument if
// there is one, fails with EPERM, as a container's seccomp filter does it.
var denied = testutil.NewProgram("denied", func(c *testutil.Conversation) error {
	var number uint32
	if _, err := fmt.Sscan(c.Args[1], &number); err != nil {
		return err
	}
	const load, equal, ret = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_RET | unix.BPF_K
	filter := []unix.SockFilter{
		{Code: load, K: 0}, // the number
		{Code: equal, Jt: 0, Jf: 1, K: number},
		{Code: ret, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
		{Code: ret, K: unix.SECCOMP_RET_ALLOW},
	}
	if len(c.Args) > 2 {
		var first uint32
		if _, err := fmt.Sscan(c.Args[2], &first); err != nil {
			return err
		}
		filter = slices.Insert(filter, 2,
			unix.SockFilter{Code: load, K: 16}, // the lower half of the first argument
			unix.SockFilter{Code: equal, Jt: 0, Jf: 1, K: first})
		filter[1].Jf += 2
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&prog))); errno != 0 {
		return errno
	}
	return runServer(c)
})

func (w *world) startDenied(o dispatch.Options, syscall int) *testutil.Process {
	w.Helper()
	return denied.Start(w, testutil.Options{Args: []string{encode(o), fmt.Sprint(syscall)}, NS: w.ns})
}

func TestNoRights(t *testing.T) {
	testutil.NeedRoot(t)
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	for _, tc := range []struct {
		name  string
		start func() *testutil.Process
		words []string
	}{
		{"no capability", func() *testutil.Process { return w.start(o, &testutil.Identity{}) },
			[]string{"lacks CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON;", "AmbientCapabilities=", "instar prepare --owner"}},
		{"CAP_NET_ADMIN only", func() *testutil.Process {
			return w.start(o, &testutil.Identity{Caps: []capset.Cap{capset.NetAdmin}})
		}, []string{"lacks CAP_BPF, CAP_PERFMON;", "AmbientCapabilities=", "instar prepare --owner"}},
		{"CAP_BPF only", func() *testutil.Process {
			return w.start(o, &testutil.Identity{Caps: []capset.Cap{capset.BPF}})
		}, []string{"lacks CAP_NET_ADMIN, CAP_PERFMON;", "AmbientCapabilities=", "instar prepare --owner"}},
		{"no CAP_PERFMON", func() *testutil.Process {
			return w.start(o, &testutil.Identity{Caps: []capset.Cap{capset.BPF, capset.NetAdmin}})
		}, []string{"lacks CAP_PERFMON;", "AmbientCapabilities=", "instar prepare --owner"}},
		{"seccomp", func() *testutil.Process { return w.startDenied(o, unix.SYS_BPF) },
			[]string{"bpf(2) is refused (operation not permitted); ", "seccomp", "allow bpf(2)", "instar prepare --owner"}},
		{"nobody", func() *testutil.Process { return w.start(o, testutil.Nobody()) },
			[]string{"lacks CAP_BPF", "instar prepare --owner"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := os.RemoveAll(w.root); err != nil {
				t.Fatal(err)
			}
			p := tc.start()
			wantRefusal(t, "open", p.Ask("open"), "permission", append(tc.words, "create group: ")...)
			if entries, err := filepath.Glob(w.root + "/*/*"); err != nil || len(entries) > 0 {
				t.Errorf("left behind: %v, %v", entries, err)
			}
		})
	}
	// The three are enough.
	p := w.start(o, &testutil.Identity{Caps: []capset.Cap{capset.BPF, capset.NetAdmin, capset.Perfmon}})
	for _, line := range []string{"open", "join 2", "activate", "close", "leave"} {
		w.ask(p, "%s", line)
	}
}

// What is refused although all rights are there is one line: what the library adds
// to the kernel's answer would have people look for another cause.
func TestRefusedLoadIsOneLine(t *testing.T) {
	testutil.Need(t, capset.BPF, capset.NetAdmin, capset.Perfmon)
	if err := rlimit.RemoveMemlock(); err != nil { // before 5.11 it would be the reason
		t.Fatal(err)
	}
	err := dispatch.ExplainLoad(fmt.Errorf("program quic: load program: %w (MEMLOCK may be too low, consider rlimit.RemoveMemlock)\n\tlog", unix.EPERM), dispatch.SteeringQUIC)
	wantRefused(t, "load", err, "permission", "maps can be created but not the program (operation not permitted); ", "security module")
	if text := err.Error(); strings.Contains(text, "MEMLOCK may") || strings.Contains(text, "\n") {
		t.Errorf("%q", text)
	}
}

// Sockets that would take part of each other's traffic: in both orders, with the
// reason and the cure. Instar's own groups and strangers are the same here.
func TestOverlap(t *testing.T) {
	needWorld(t)
	const more, less = "is more specific and takes its packets", "is less specific; this group would take packets from it"
	for _, tc := range []struct {
		name                    string
		theirNetwork, their     string
		ourNetwork, our, reason string
		// clients and which side gets their packets.
		traffic map[string]string
	}{
		{"0.0.0.0 in front of [::]", "udp4", "0.0.0.0", "udp", "[::]", more,
			map[string]string{"127.0.0.1": "their", "[::1]": "our"}},
		{"[::] behind 0.0.0.0", "udp", "[::]", "udp4", "0.0.0.0", less,
			map[string]string{"127.0.0.1": "our", "[::1]": "their"}},
		{"specific in front of 0.0.0.0", "udp4", "127.0.0.1", "udp4", "0.0.0.0", more,
			map[string]string{"127.0.0.1": "their", "127.0.0.2": "our"}},
		{"0.0.0.0 behind specific", "udp4", "0.0.0.0", "udp4", "127.0.0.1", less,
			map[string]string{"127.0.0.1": "our", "127.0.0.2": "their"}},
		{"specific IPv4 in front of [::]", "udp4", "127.0.0.1", "udp", "[::]", more,
			map[string]string{"127.0.0.1": "their", "[::1]": "our"}},
		{"[::] behind specific IPv4", "udp", "[::]", "udp4", "127.0.0.1", less,
			map[string]string{"127.0.0.1": "our", "[::1]": "their"}},
		{"specific IPv6 in front of [::]", "udp6", "[::1]", "udp", "[::]", more,
			map[string]string{"[::1]": "their", "127.0.0.1": "our"}},
		{"[::] behind specific IPv6", "udp", "[::]", "udp6", "[::1]", less,
			map[string]string{"[::1]": "our", "127.0.0.1": "their"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			rivals := w.plainSocket(tc.theirNetwork, tc.their+":4433", "", true)
			o := w.options(tc.our + ":4433")
			o.Network = tc.ourNetwork
			pid := fmt.Sprintf("(pid %d)", os.Getpid())
			_, err := dispatch.Open(o)
			wantRefused(t, "Open", err, "occupied", tc.their+":4433", tc.reason, pid, "stop that process, bind the same address, or set AllowOverlap")
			if entries, err := filepath.Glob(w.root + "/*/*"); err != nil || len(entries) > 0 {
				t.Errorf("left behind: %v, %v", entries, err)
			}

			var logged bytes.Buffer
			o.AllowOverlap = true
			o.Logger = slog.New(slog.NewTextHandler(&logged, nil))
			g := w.open(o)
			n := w.join(g, 1)
			w.activate(n)
			if !strings.Contains(logged.String(), tc.their+":4433") {
				t.Errorf("the overlap is not in the log: %s", logged.String())
			}
			for host, who := range tc.traffic {
				before := w.counts(g)
				c := w.dial(host + ":4433")
				if _, err := c.Write([]byte("who?")); err != nil {
					t.Fatal(err)
				}
				reader, want := n.Conns()[0], counts{"unknown": 1}
				if who == "their" {
					reader, want = rivals, nil
				}
				if err := reader.SetReadDeadline(time.Now().Add(patience)); err != nil {
					t.Fatal(err)
				}
				if _, _, err := reader.ReadFromUDP(make([]byte, 16)); err != nil {
					t.Errorf("a packet to %s did not reach %s socket: %v", host, who, err)
				}
				w.wantCounts(g, host, before, want)
			}

			// One that comes later is refused by Join, before it binds.
			o.AllowOverlap = false
			if err := n.Close(); err != nil {
				t.Fatal(err)
			}
			if err := rivals.Close(); err != nil {
				t.Fatal(err)
			}
			strict := w.open(o)
			w.plainSocket(tc.theirNetwork, tc.their+":4433", "", true)
			before := *strict.Control()
			_, err = strict.Join(1)
			wantRefused(t, "Join", err, "occupied", tc.their+":4433", tc.reason, "AllowOverlap")
			after := *strict.Control()
			after.Changes = before.Changes
			if before != after {
				t.Error("a refused Join changed the table")
			}
		})
	}
}

// A2 and its kin: who is at the same address already.
func TestOccupied(t *testing.T) {
	testutil.NeedRoot(t)
	w := newWorld(t)
	const address = "127.0.0.1:4433"
	o := w.options(address)

	t.Run("foreign process", func(t *testing.T) {
		w.ns.Run(func() {
			p := rival.Start(t, testutil.Options{Args: []string{"udp4", address, "reuseport"}})
			p.Expect("bound")
			_, err := dispatch.Open(o)
			wantRefused(t, "Open", err, "occupied", address, fmt.Sprintf("(pid %d)", p.PID), "not registered with this group",
				"stop that process, or start it through Instar as service \"test\"")
		})
	})
	t.Run("socket without SO_REUSEPORT", func(t *testing.T) {
		w.ns.Run(func() {
			p := rival.Start(t, testutil.Options{Args: []string{"udp4", address, ""}})
			p.Expect("bound")
			_, err := dispatch.Open(o)
			wantRefused(t, "Open", err, "occupied", address, fmt.Sprintf("(pid %d)", p.PID), "stop that process")
		})
	})
	// E5: the message names both users.
	t.Run("another user", func(t *testing.T) {
		w.ns.Run(func() {
			p := rival.Start(t, testutil.Options{Args: []string{"udp4", address, "reuseport"}, As: testutil.Nobody()})
			p.Expect("bound")
			_, err := dispatch.Open(o)
			wantRefused(t, "Open", err, "occupied", address, fmt.Sprintf("(pid %d)", p.PID), "uid 65534", "effective uid 0",
				"run both as the same user, or stop the other one")
		})
	})
	// One that the kernel refuses although nobody saw it coming.
	t.Run("wildcard of another user", func(t *testing.T) {
		w.ns.Run(func() {
			p := rival.Start(t, testutil.Options{Args: []string{"udp4", "0.0.0.0:4433", "reuseport"}, As: testutil.Nobody()})
			p.Expect("bound")
			w := &world{t, w.ns, w.root}
			overlap := o
			overlap.AllowOverlap = true
			g := w.open(overlap)
			_, err := g.Join(2)
			wantRefused(t, "Join", err, "occupied", "0.0.0.0:4433", fmt.Sprintf("(pid %d)", p.PID), "uid 65534", "we are 0", "address already in use")
			if s := w.snapshot(g); len(s.Generations) != 0 {
				t.Errorf("after it: %+v", s)
			}
		})
	})
	t.Run("another service", func(t *testing.T) {
		w.ns.Run(func() {
			w := &world{t, w.ns, w.root}
			g := w.open(o)
			n := w.join(g, 1)
			w.activate(n)
			other := o
			other.Service = "other"
			_, err := dispatch.Open(other)
			wantRefused(t, "Open", err, "service", `belongs to service "test"`, `this one is "other"`,
				fmt.Sprintf("generation %d (active, pid %d", n.Number(), os.Getpid()),
				"choose", "another address", "instar forget "+g.Path())
			_, err = dispatch.Prepare(other, dispatch.Owner{})
			wantRefused(t, "Prepare", err, "service", `belongs to service "test"`)
			if s := w.snapshot(g); s.Active != n.Number() || n.State() != dispatch.StateActive {
				t.Errorf("after it: %+v", s)
			}
		})
	})
	t.Run("between Open and Join", func(t *testing.T) {
		w.ns.Run(func() {
			w := &world{t, w.ns, w.root}
			g := w.open(o)
			p := rival.Start(t, testutil.Options{Args: []string{"udp4", address, "reuseport"}})
			p.Expect("bound")
			_, err := g.Join(1)
			wantRefused(t, "Join", err, "occupied", fmt.Sprintf("(pid %d)", p.PID), "not registered with this group")
			p.Kill()
			w.join(g, 1)
		})
	})
	t.Run("a client with the same port", func(t *testing.T) {
		w.ns.Run(func() {
			w := &world{t, w.ns, w.root}
			// Connected sockets of the port that leave the address alone.
			c, err := net.DialUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 2), Port: 4433}, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 9})
			w.must(err)
			defer c.Close()
			g := w.open(o)
			w.join(g, 1)
		})
	})
}

// Dual stack: a successor with another family or v6only is refused with the reason.
func TestV6OnlyMismatch(t *testing.T) {
	needWorld(t)
	for _, tc := range []struct{ name, first, second string }{
		{"IPv6 only after dual stack", "udp", "udp6"},
		{"dual stack after IPv6 only", "udp6", "udp"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			o := w.options("[::]:4433")
			o.Network = tc.first
			g := w.open(o)
			n := w.join(g, 1)
			w.activate(n)
			o.Network = tc.second
			_, err := dispatch.Open(o)
			wantRefused(t, "Open", err, "occupied", "[::]:4433", fmt.Sprintf("(pid %d)", os.Getpid()), "by the order of binding",
				"differ in v6only", `set Network to "udp" (dual stack) or "udp6" (IPv6 only) in both`, "udp [::]", "udp6 [::]")
			if n.State() != dispatch.StateActive {
				t.Errorf("the first one is %v", n.State())
			}
		})
	}
}

func TestAddressThatCannotBeBound(t *testing.T) {
	w := newWorld(t)
	t.Run("no such device", func(t *testing.T) {
		w.ns.Run(func() {
			o := w.options("127.0.0.1:4433")
			o.Device = "nope0"
			_, err := dispatch.Open(o)
			wantRefused(t, "Open", err, "", "find device nope0: no such device", "create it first, or correct the name")
			_, err = dispatch.Prepare(o, dispatch.Owner{})
			wantRefused(t, "Prepare", err, "", "create group: find device nope0: no such device", "create it first, or correct the name")
			if entries, err := filepath.Glob(w.root + "*"); err != nil || len(entries) > 0 {
				t.Errorf("left behind: %v, %v", entries, err)
			}
		})
	})
	t.Run("no such address", func(t *testing.T) {
		w.ns.Run(func() {
			w := &world{t, w.ns, w.root}
			g := w.open(w.options("192.0.2.7:4433"))
			_, err := g.Join(1)
			wantRefused(t, "Join", err, "", "192.0.2.7:4433", "no device of this network namespace has that address")
			if s := w.snapshot(g); len(s.Generations) != 0 {
				t.Errorf("after it: %+v", s)
			}
		})
	})
	// I7: a port that the user may not bind is refused at the start.
	t.Run("privileged port", func(t *testing.T) {
		testutil.NeedRoot(t)
		needUnprivilegedMaps(t)
		w.ns.Run(func() {
			w := &world{t, w.ns, w.root}
			o := w.options("127.0.0.1:443")
			_, err := dispatch.Prepare(o, dispatch.Owner{UID: 65534, GID: 65534})
			w.must(err)
			p := w.start(o, testutil.Nobody())
			w.ask(p, "open")
			wantRefusal(t, "join", p.Ask("join 1"), "permission", "127.0.0.1:443", "permission denied",
				"ip_unprivileged_port_start", "CAP_NET_BIND_SERVICE")
		})
	})
}

// The group has the address in its name, and its properties inside.
func TestMismatch(t *testing.T) {
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	g := w.open(o)
	w.activate(w.join(g, 1))
	steering := o
	steering.Steering = dispatch.SteeringStateless
	_, err := dispatch.Open(steering)
	wantRefused(t, "another steering", err, "mismatch", "its steering is quic", "the options say stateless", "instar forget "+g.Path())
	balancer := o
	balancer.LoadBalancer = &connid.LoadBalancer{ServerID: make([]byte, 4), NonceLen: 6}
	_, err = dispatch.Open(balancer)
	wantRefused(t, "another prefix", err, "mismatch", "prefixes of 8 bytes", "ask for 11", "load balancer", "instar forget "+g.Path())

	// A balancer's prefix that is as long as ours does not differ.
	balancer.LoadBalancer = &connid.LoadBalancer{ServerID: make([]byte, 3), NonceLen: 4}
	w.open(balancer)
	// Sizes count at creation only.
	sizes := o
	sizes.Workers, sizes.MaxGenerations, sizes.FlowEntries = 8, 8, 128
	if s := w.snapshot(w.open(sizes)); s.MaxWorkers != 4 || s.MaxGenerations != 4 || s.FlowEntries != dispatch.DefaultFlowEntries {
		t.Errorf("who joins later changed the sizes: %+v", s)
	}
}

// I3: a layout that this build does not know is refused, and stays as it was.
func TestUnknownLayout(t *testing.T) {
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	g := w.open(o)
	path := g.Path()
	g.Control().Layout = 7
	w.leave(g)
	before := contents(t, path)
	try := map[string]func() error{
		"Open":     func() error { _, err := dispatch.Open(o); return err },
		"OpenPath": func() error { _, err := dispatch.OpenPath(path); return err },
		"Prepare":  func() error { _, err := dispatch.Prepare(o, dispatch.Owner{UID: 65534, GID: 65534}); return err },
	}
	for name, f := range try {
		wantRefused(t, name, f(), "layout", path, "layout 7", "knows 1", "use the build that made the group", "instar forget "+path)
	}
	entries, err := dispatch.List(w.root)
	w.must(err)
	if len(entries) != 1 || entries[0].Snapshot != nil {
		t.Fatalf("list: %+v", entries)
	}
	wantRefused(t, "List", entries[0].Err, "layout", "layout 7")
	if after := contents(t, path); after != before {
		t.Errorf("it was touched:\nbefore %s\nafter  %s", before, after)
	}
	// Another byte order, or a map of something else.
	for _, layout := range []uint32{0, 0x01000000, 0xffffffff} {
		setLayout(t, path, layout)
		_, err := dispatch.Open(o)
		wantRefused(t, fmt.Sprint(layout), err, "layout", fmt.Sprintf("layout %d ", layout))
	}
	setLayout(t, path, bpf.Layout)
	w.open(o)
}

func setLayout(t *testing.T, path string, layout uint32) {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(path, "control"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	b, err := m.LookupBytes(uint32(0))
	if err != nil {
		t.Fatal(err)
	}
	b[0], b[1], b[2], b[3] = byte(layout), byte(layout>>8), byte(layout>>16), byte(layout>>24)
	if err := m.Put(uint32(0), b); err != nil {
		t.Fatal(err)
	}
}

// contents is all that a group's folder holds: names, owners, times, and what
// the maps of one entry contain.
func contents(t *testing.T, path string) string {
	t.Helper()
	var all strings.Builder
	err := filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		fmt.Fprintf(&all, "%s inode %d mode %o uid %d gid %d changed %v\n", d.Name(), st.Ino, st.Mode, st.Uid, st.Gid, st.Mtim)
		switch d.Name() {
		case "control", "secrets":
			m, err := ebpf.LoadPinnedMap(p, nil)
			if err != nil {
				return err
			}
			defer m.Close()
			b, err := m.LookupBytes(uint32(0))
			if err != nil {
				return err
			}
			fmt.Fprintf(&all, "%x\n", b)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all.String()
}

func TestMissingPin(t *testing.T) {
	testutil.Slow(t)
	needWorld(t)
	for _, pin := range []string{"control", "sockets", "secrets", "verdicts", "flows", "program"} {
		t.Run(pin, func(t *testing.T) {
			w := newWorld(t)
			o := w.options("127.0.0.1:4433")
			g := w.open(o)
			if got := len(list(t, g.Path())); got != 6 {
				t.Errorf("the folder has %d pins, want 6", got)
			}
			w.must(os.Remove(filepath.Join(g.Path(), pin)))
			_, err := dispatch.Open(o)
			wantRefused(t, "Open", err, "not-exist", g.Path(), fmt.Sprintf("pin %q is missing", pin), "instar forget "+g.Path())
			_, err = dispatch.OpenPath(g.Path())
			wantRefused(t, "OpenPath", err, "not-exist", fmt.Sprintf("pin %q is missing", pin))
			w.must(dispatch.Forget(g.Path()))
			again := w.open(o)
			w.activate(w.join(again, 1))
		})
	}
}

func TestFolderOfAnotherUser(t *testing.T) {
	testutil.NeedRoot(t)
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	g := w.open(o)
	path := g.Path()
	for what, mode := range map[string]os.FileMode{"the folder is closed": 0o700, "the folder is open": 0o755} {
		w.must(os.Chmod(path, mode))
		p := w.start(o, testutil.Nobody())
		for _, line := range []string{"open", "path " + path} {
			wantRefusal(t, what+": "+line, p.Ask("%s", line), "permission", "uid 65534", "owner is uid 0", "instar prepare --owner")
		}
	}
}

// A writer that holds the lock for too long.
func TestLockedGroup(t *testing.T) {
	w := newWorld(t)
	o := w.options("127.0.0.1:4433")
	g := w.open(o)
	n := w.join(g, 1)
	dispatch.SetLockWait(t, 50*time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	folder, err := bpffs.Acquire(ctx, g.Path(), false)
	w.must(err)
	holder := fmt.Sprintf("(pid %d)", os.Getpid())
	wantRefused(t, "Activate", n.Activate(), "busy", g.Path(), holder, "try again when it is done")
	_, err = g.Join(1)
	wantRefused(t, "Join", err, "busy", holder)
	_, err = g.Rollback()
	wantRefused(t, "Rollback", err, "busy", holder)
	wantRefused(t, "Forget", dispatch.Forget(g.Path()), "busy", holder)
	if s := w.snapshot(g); len(s.Generations) != 1 || n.State() != dispatch.StateStaged {
		t.Errorf("while it is locked: %+v", s)
	}
	w.must(folder.Unlock())
	w.activate(n)

	// Creating another group waits for the lock of the namespace's folder.
	above, err := bpffs.Acquire(ctx, filepath.Dir(g.Path()), true)
	w.must(err)
	_, err = dispatch.Open(w.options("127.0.0.1:4434"))
	wantRefused(t, "Open", err, "busy", filepath.Dir(g.Path()), holder)
	w.open(o)
	w.must(above.Unlock())
	w.open(w.options("127.0.0.1:4434"))
}

// A goroutine that moved to another network namespace binds nothing there.
func TestJoinFromAnotherNamespace(t *testing.T) {
	w := newWorld(t)
	other := testutil.OtherNetNS(t)
	g := w.open(w.options("127.0.0.1:4433"))
	other.Run(func() {
		_, err := g.Join(1)
		wantRefused(t, "Join", err, "mismatch", "another network namespace", "open and join it in the same one")
		tool, err := dispatch.OpenPath(g.Path())
		w.must(err)
		_, err = tool.Join(1)
		wantRefused(t, "Join through OpenPath", err, "mismatch", "another network namespace")
		w.must(tool.Close())
	})
	tool, err := dispatch.OpenPath(g.Path())
	w.must(err)
	n, err := tool.Join(1)
	w.must(err)
	w.must(n.Close())
	w.must(tool.Close())
}

func TestClosedGroup(t *testing.T) {
	w := newWorld(t)
	g := w.open(w.options("127.0.0.1:4433"))
	n := w.join(g, 1)
	w.must(n.Close())
	w.must(n.Close())
	w.leave(g)
	w.leave(g)
	_, err := g.Join(1)
	wantRefused(t, "Join", err, "closed", "join udp4 127.0.0.1:4433: already closed")
	wantRefused(t, "Activate", g.Activate(1), "closed", "of udp4 127.0.0.1:4433: already closed")
	_, err = g.Rollback()
	wantRefused(t, "Rollback", err, "closed", "roll back udp4 127.0.0.1:4433: already closed")
	wantRefused(t, "Repair", g.Repair(), "closed", "repair udp4 127.0.0.1:4433: already closed")
	wantRefused(t, "Evict", g.Evict(1), "closed", "of udp4 127.0.0.1:4433: already closed")
	wantRefused(t, "SetDeadline", g.SetDeadline(1, time.Now()), "closed", "of udp4 127.0.0.1:4433: already closed")
	_, err = g.UpgradeProgram()
	wantRefused(t, "UpgradeProgram", err, "closed", "of udp4 127.0.0.1:4433: already closed")
	_, err = g.Snapshot()
	wantRefused(t, "Snapshot", err, "closed", "of udp4 127.0.0.1:4433: already closed")
	_, err = n.Wait(t.Context(), dispatch.StateActive)
	wantRefused(t, "Wait", err, "closed")
	_, err = n.Drain(t.Context(), dispatch.DrainOptions{Idle: time.Second})
	wantRefused(t, "Drain", err, "closed")
}
