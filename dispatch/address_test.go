// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/internal/rawconn"
	"instar/internal/sockdiag"
	"instar/internal/testutil"
)

// place is where a socket is bound.
type place struct{ network, address, device string }

func (p place) String() string {
	if p.device != "" {
		return fmt.Sprintf("%s %s on %s", p.network, p.address, p.device)
	}
	return p.network + " " + p.address
}

// ends make sockets of a protocol and say where packets to them go.
type ends struct {
	bind func(place) (syscall.Conn, error)
	// send says which socket got what was sent to a host, -1 for none.
	send func(host string, sockets ...syscall.Conn) int
	list func(port uint16) ([]sockdiag.Socket, error)
}

const overlapPort = 4433

// ready polls sockets and returns the index of one that can be read, -1 for none within
// a second.
func ready(t testing.TB, sockets ...syscall.Conn) int {
	t.Helper()
	fds := make([]unix.PollFd, 0, 3)
	for _, s := range sockets {
		err := rawconn.Of(s, func(fd int) error {
			fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for start := time.Now(); time.Since(start) < time.Second; {
		if _, err := unix.Poll(fds, 1000); err != nil && !errors.Is(err, unix.EINTR) {
			t.Fatal(err)
		}
		if i := slices.IndexFunc(fds, func(f unix.PollFd) bool { return f.Revents != 0 }); i >= 0 {
			return i
		}
	}
	return -1
}

func udpEnds(t testing.TB, clients *testutil.Netns) ends {
	// Each packet that nobody gets is answered.
	for name, value := range map[string]string{"ipv4/icmp_ratelimit": "0", "ipv4/icmp_msgs_per_sec": "1000000", "ipv4/icmp_msgs_burst": "1000000", "ipv6/icmp/ratelimit": "0"} {
		if err := os.WriteFile("/proc/sys/net/"+name, []byte(value), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	knock := map[string]*net.UDPConn{}
	return ends{
		bind: func(p place) (syscall.Conn, error) { return plainSocket(p.network, p.address, p.device, true) },
		list: sockdiag.UDP,
		send: func(host string, sockets ...syscall.Conn) int {
			c := knock[host]
			if c == nil {
				var err error
				clients.Run(func() { c, err = net.DialUDP("udp", nil, &net.UDPAddr{IP: net.ParseIP(host), Port: overlapPort}) })
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = c.Close() })
				knock[host] = c
			}
			// An answer of ICMP may be held back.
			for range 10 {
				if _, err := c.Write([]byte("knock")); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
					t.Fatal(err)
				}
				i := ready(t, append(sockets, c)...)
				if i == len(sockets) {
					_, _ = c.Read(make([]byte, 16)) // takes the error
					return -1
				}
				if i >= 0 {
					if _, _, err := sockets[i].(*net.UDPConn).ReadFromUDP(make([]byte, 16)); err != nil {
						t.Fatal(err)
					}
					return i
				}
			}
			t.Fatalf("a packet to %s got lost", host)
			return 0
		},
	}
}

func tcpEnds(t testing.TB, clients *testutil.Netns) ends {
	return ends{
		bind: func(p place) (syscall.Conn, error) { return plainListener(p.network, p.address, p.device) },
		list: sockdiag.TCPListeners,
		send: func(host string, sockets ...syscall.Conn) int {
			var c net.Conn
			var err error
			clients.Run(func() { c, err = net.DialTimeout("tcp", net.JoinHostPort(host, fmt.Sprint(overlapPort)), patience) })
			if errors.Is(err, unix.ECONNREFUSED) {
				return -1
			}
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			i := ready(t, sockets...)
			if i < 0 {
				t.Fatalf("a connection to %s came nowhere", host)
			}
			accepted, err := sockets[i].(*net.TCPListener).Accept()
			if err != nil {
				t.Fatal(err)
			}
			_ = accepted.(*net.TCPConn).SetLinger(0) // leaves nothing behind
			_ = accepted.Close()
			return i
		},
	}
}

// TestOverlapIsTheKernels binds two sockets at all pairs of addresses and devices,
// sends packets, and compares who gets them with what the preflight says.
func TestOverlapIsTheKernels(t *testing.T) {
	for protocol, makeEnds := range map[string]func(testing.TB, *testutil.Netns) ends{"udp": udpEnds, "tcp": tcpEnds} {
		t.Run(protocol, func(t *testing.T) {
			w := newWorld(t)
			clients := testutil.OtherNetNS(t)
			devices := map[string]int{}
			devices["d1"], _ = testutil.Veth(t, testutil.End{NS: w.ns, Name: "d1", Addresses: []string{"192.0.2.1/24", "2001:db8:1::1/64"}},
				testutil.End{NS: clients, Name: "e1", Addresses: []string{"192.0.2.2/24", "2001:db8:1::2/64"}})
			devices["d2"], _ = testutil.Veth(t, testutil.End{NS: w.ns, Name: "d2", Addresses: []string{"198.51.100.1/24", "2001:db8:2::1/64"}},
				testutil.End{NS: clients, Name: "e2", Addresses: []string{"198.51.100.2/24", "2001:db8:2::2/64"}})
			testOverlap(t, protocol, makeEnds(t, clients), devices)
		})
	}
}

func testOverlap(t *testing.T, protocol string, e ends, devices map[string]int) {
	probes := []string{"192.0.2.1", "2001:db8:1::1", "198.51.100.1", "2001:db8:2::1"}
	var places []place
	for _, device := range []string{"", "d1", "d2"} {
		for _, p := range []place{{"4", "0.0.0.0:4433", ""}, {"", "[::]:4433", ""}, {"6", "[::]:4433", ""},
			{"4", "192.0.2.1:4433", ""}, {"6", "[2001:db8:1::1]:4433", ""}} {
			places = append(places, place{protocol + p.network, p.address, device})
		}
	}
	bind := func(p place) syscall.Conn {
		c, err := e.bind(p)
		if err != nil {
			t.Fatalf("%v: %v", p, err)
		}
		return c
	}
	unbind := func(sockets ...syscall.Conn) {
		for _, c := range sockets {
			if err := c.(io.Closer).Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	// Which packets reach a socket that is alone.
	alone := make(map[place][]bool)
	for _, p := range places {
		c := bind(p)
		for _, host := range probes {
			alone[p] = append(alone[p], e.send(host, c) == 0)
		}
		unbind(c)
	}
	seen := map[string]int{}
	for _, ours := range places {
		for _, theirs := range places {
			o := dispatch.Options{Network: ours.network, Address: ours.address, Device: ours.device}
			other := bind(theirs)
			listed, err := e.list(overlapPort)
			if err != nil || len(listed) != 1 {
				t.Fatalf("%v: %d sockets, %v", theirs, len(listed), err)
			}
			relation, err := dispatch.Relate(o, listed[0], devices[ours.device])
			if err != nil {
				t.Fatal(err)
			}
			seen[relation]++
			unbind(other)
			got := make([][2]int, len(probes))
			for order := range 2 {
				var our, other syscall.Conn
				if order == 0 {
					our, other = bind(ours), bind(theirs)
				} else {
					other, our = bind(theirs), bind(ours)
				}
				for i, host := range probes {
					if alone[ours][i] && alone[theirs][i] {
						got[i][order] = e.send(host, our, other)
					}
				}
				unbind(our, other)
			}
			if (relation == "same") != (ours == theirs) {
				t.Errorf("%v and %v are held to be %s", ours, theirs, relation)
			}
			for probe, got := range got {
				if !alone[ours][probe] || !alone[theirs][probe] || relation == "same" {
					continue
				}
				want := [2]int{-1, -1}
				switch relation {
				case "wider":
					want = [2]int{0, 0}
				case "narrower":
					want = [2]int{1, 1}
				case "contested":
					want = [2]int{got[0], 1 - got[0]}
				}
				if got != want {
					t.Errorf("for %v a socket at %v is held to be %s; packets to %s went to %v (0: ours; in both orders of binding)",
						ours, theirs, relation, probes[probe], got)
				}
			}
		}
	}
	for _, relation := range []string{"same", "apart", "narrower", "wider", "contested"} {
		if seen[relation] == 0 {
			t.Errorf("no pair is %s", relation)
		}
	}
}

// I13: the same address in two network namespaces is two groups.
func TestSameAddressInTwoNamespaces(t *testing.T) {
	here := newWorld(t)
	other := testutil.OtherNetNS(t)
	const address = "127.0.0.1:4433"
	g := here.open(here.options(address))
	n := here.serve(g, 2)
	here.activate(n)
	c := here.client(address)
	flows := []flow{here.newFlow(c, 1)}
	next := here.serve(g, 1)
	other.Run(func() {
		there := &world{t, other, here.root}
		h := there.open(there.options(address))
		if g.Path() == h.Path() {
			t.Fatalf("both are %s", g.Path())
		}
		m := there.serve(h, 1)
		if m.Number() != 1 {
			t.Errorf("the first generation has number %d", m.Number())
		}
		there.activate(m)
		d := there.client(address)
		f := there.newFlow(d, 1)
		there.wantCounts(h, "there", nil, counts{"new": 1})
		here.wantCounts(g, "here", nil, counts{"new": 1})
		// An ID of here means nothing there.
		there.orphaned(d, flows[0], 1)
		there.use(d, f)
		there.wantCounts(h, "there", nil, counts{"new": 1, "owner": 1, "unknown": 1})

		// Neither an upgrade nor the end of one touches the other.
		second := there.serve(h, 1)
		there.activate(second)
		there.must(m.Close())
		there.newFlow(d, 2)
		here.use(c, flows...)
		here.newFlow(c, 1)
		there.wantCounts(h, "there", nil, counts{"new": 2, "owner": 1, "unknown": 1})

		// A tool of that namespace changes the group of this one, all but joining.
		tool, err := dispatch.OpenPath(g.Path())
		there.must(err)
		there.must(tool.Activate(next.Number()))
		if n.State() != dispatch.StateDraining || next.State() != dispatch.StateActive {
			t.Errorf("after Activate from another namespace: %v, %v", n.State(), next.State())
		}
		_, err = tool.Rollback()
		there.must(err)
		tool.SetProgramBuild("other")
		_, err = tool.UpgradeProgram()
		wantRefused(t, "UpgradeProgram", err, "mismatch", "another network namespace", "nsenter --net")
		there.must(tool.Close())

		entries, err := dispatch.List(there.root)
		there.must(err)
		if len(entries) != 2 {
			t.Fatalf("%d groups are listed", len(entries))
		}
		for _, e := range entries {
			if e.Here != (e.Path == h.Path()) || e.Name != "udp4-127.0.0.1-4433" || e.Err != nil || e.Snapshot.Address != address {
				t.Errorf("listed: %+v", e)
			}
		}
	})
	here.use(c, flows...)
	here.wantCounts(g, "here", nil, counts{"new": 2, "owner": 2})
}

// I13: the same address on two devices is two groups; on none it is refused.
func TestSameAddressOnTwoDevices(t *testing.T) {
	w := newWorld(t)
	const address = "192.0.2.1:4433"
	type side struct {
		group   *dispatch.Group
		clients *testutil.Netns
		client  *client
	}
	var sides []side
	for i, device := range []string{"d1", "d2"} {
		s := side{clients: testutil.OtherNetNS(t)}
		testutil.Veth(t, testutil.End{NS: w.ns, Name: device, Addresses: []string{"192.0.2.1/24"}},
			testutil.End{NS: s.clients, Name: "e", Addresses: []string{fmt.Sprintf("192.0.2.%d/24", 10+i)}})
		o := w.options(address)
		o.Device = device
		s.group = w.open(o)
		w.activate(w.serve(s.group, 2))
		s.clients.Run(func() { s.client = w.client(address) })
		sides = append(sides, s)
	}
	for i, s := range sides {
		f := w.newFlow(s.client, 1)
		w.use(s.client, f)
		if i == 0 {
			w.activate(w.serve(s.group, 1))
			w.use(s.client, f)
			w.newFlow(s.client, 2)
		}
	}
	w.wantCounts(sides[0].group, "d1", nil, counts{"new": 2, "owner": 2})
	w.wantCounts(sides[1].group, "d2", nil, counts{"new": 1, "owner": 1})
	if s := w.snapshot(sides[1].group); s.Device != "d2" || s.Active != 1 || len(s.Generations) != 1 {
		t.Errorf("d2: %+v", s)
	}
	_, err := dispatch.Open(w.options(address))
	wantRefused(t, "on no device", err, "occupied", "on device d1", "by the order of binding", "bind both to devices")
	wildcard := w.options("0.0.0.0:4433")
	_, err = dispatch.Open(wildcard)
	wantRefused(t, "wildcard", err, "occupied", "on device d1", "is more specific")
	// A device that is neither.
	w.ns.AddDevice("d3", "203.0.113.1/24")
	wildcard.Device = "d3"
	g := w.open(wildcard)
	w.activate(w.join(g, 1))
}

// Each kind of address carries flows over two upgrades, with nothing lost and
// every packet counted as what it was.
func TestUpgradesUnderLoad(t *testing.T) {
	needWorld(t)
	for _, tc := range []struct {
		network, address string
		clients          []string
	}{
		{"udp", "127.0.0.1:4433", []string{"127.0.0.1:4433"}},
		{"udp", "0.0.0.0:4433", []string{"127.0.0.1:4433"}},
		{"udp", "[::1]:4433", []string{"[::1]:4433"}},
		{"udp", "[::]:4433", []string{"127.0.0.1:4433", "[::1]:4433"}},
		{"udp6", "[::]:4433", []string{"[::1]:4433"}},
	} {
		for _, steering := range []dispatch.Steering{dispatch.SteeringQUIC, dispatch.SteeringStateless} {
			if testing.Short() && steering != dispatch.SteeringQUIC {
				continue // the address is the same to it
			}
			t.Run(fmt.Sprintf("%s %s %v", tc.network, tc.address, steering), func(t *testing.T) {
				w := newWorld(t)
				o := w.options(tc.address)
				o.Network, o.Steering = tc.network, steering
				g := w.open(o)
				w.activate(w.serve(g, 3))
				var loads []*load
				for _, target := range tc.clients {
					loads = append(loads, w.load(target, 2, steering == dispatch.SteeringStateless))
				}
				for _, workers := range []int{4, 1} { // I12
					n := w.serve(g, workers)
					w.activate(n)
					for _, l := range loads {
						l.served(uint64(testutil.UnlessShort(50, 10)))
					}
				}
				for _, l := range loads {
					l.end()
				}
				all := counts{}
				for _, l := range loads {
					if len(l.failures) > 0 {
						t.Errorf("%d questions failed, the first: %v", len(l.failures), l.failures[0])
					}
					all["new"] += l.newFlows.Load() + l.plain.Load()
					all["owner"] += l.oldFlows.Load()
					for n := uint32(1); n <= 3; n++ {
						if l.got(n) == 0 {
							t.Errorf("generation %d got no new flow", n)
						}
					}
				}
				w.wantCounts(g, "load", nil, all)
			})
		}
	}
}

// Groups of one process do not know of each other.
func TestSeveralGroupsInOneProcess(t *testing.T) {
	testutil.Slow(t)
	w := newWorld(t)
	const n = 5
	var groups []*dispatch.Group
	var loads []*load
	for i := range n {
		address := fmt.Sprintf("127.0.0.1:%d", 4433+i)
		g := w.open(w.options(address))
		w.activate(w.serve(g, 1+i%3))
		groups = append(groups, g)
		loads = append(loads, w.load(address, 1, false))
	}
	for i := range n {
		for range i % 3 {
			w.activate(w.serve(groups[i], 1))
		}
	}
	for i, l := range loads {
		l.served(20)
		l.lossless(groups[i], nil)
		if s := w.snapshot(groups[i]); int(s.Active) != 1+i%3 {
			t.Errorf("group %d: %+v", i, s)
		}
	}
}
