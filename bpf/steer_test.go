// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"instar/dispatch/connid"
	"instar/internal/testutil"
)

// The slots of a group in the middle of its life: an upgrade is being prepared
// while the last one drains. Numbers and slots are in no order on purpose.
const (
	slotOlder    = 4 // staged, before slotNewer
	slotDraining = 3 // was active before slotActive
	slotActive   = 1
	slotNewer    = 0 // staged last
	slotGone     = 5 // nobody is there any more
	slotEmpty    = 6 // nobody ever was

	workersOfEach = 3
)

var numbers = map[uint8]uint32{slotGone: 20, slotDraining: 21, slotActive: 22, slotOlder: 23, slotNewer: 24}

// newWorld is that group.
func newWorld(t testing.TB, steering uint32, host netip.Addr) *group {
	t.Helper()
	g := newGroup(t, configOf(steering), host)
	g.world()
	return g
}

func configOf(steering uint32) Config {
	c := quicConfig
	c.Steering = steering
	return c
}

func (g *group) world() {
	g.t.Helper()
	for _, slot := range []uint8{slotDraining, slotActive, slotOlder, slotNewer} {
		g.join(slot, numbers[slot], workersOfEach)
	}
	g.control.Slots[slotGone] = Slot{Number: numbers[slotGone], Workers: workersOfEach, Exhausted: 1}
	// Another order lies about: the one before the newest generation joined.
	g.setOrder(0, []uint8{slotDraining}, []uint8{slotActive})
	g.setOrder(2, []uint8{slotActive, slotDraining}, []uint8{slotNewer, slotOlder})
	g.activate(g.word(slotActive, 2))
}

// id is a new connection ID of a socket, made by the generation in its slot.
func (g *group) id(slot, worker uint8) []byte {
	g.t.Helper()
	return g.idOf(slot, worker, g.control.Slots[slot].Number)
}

func (g *group) idOf(slot, worker uint8, number uint32) []byte {
	g.t.Helper()
	return seal(g.t, g.codec, g.random, connid.MakeHandle(slot, worker), number)
}

// matches tells whether a socket ("1/2", "none") is the wanted one ("1/2",
// "1/*", "none").
func matches(socket, want string) bool {
	slot, anyWorker := strings.CutSuffix(want, "/*")
	return socket == want || anyWorker && strings.HasPrefix(socket, slot+"/")
}

func (g *group) wantSteered(what string, datagram []byte, socket, counted string) (got string) {
	g.t.Helper()
	got, gotCounted := g.steer(datagram)
	if !matches(got, socket) || gotCounted != counted {
		g.t.Errorf("%s: went to %s and counted %q, want %s and %q", what, got, gotCounted, socket, counted)
	}
	return got
}

func TestQUIC(t *testing.T) {
	ns := testutil.NetNS(t)
	g := newGroup(t, quicConfig, loopback4)
	for _, host := range []netip.Addr{loopback4, loopback6} {
		for _, tc := range []struct {
			name     string
			arrange  func(*group)
			datagram func(*group) []byte
			socket   string
			counted  string
		}{
			{name: "owner, active, short header",
				datagram: func(g *group) []byte { return shortHeader(g.id(slotActive, 2), 0) },
				socket:   "1/2", counted: "owner=1 slot1=1"},
			{name: "owner, draining, short header",
				datagram: func(g *group) []byte { return shortHeader(g.id(slotDraining, 0), 0) },
				socket:   "3/0", counted: "owner=1 slot3=1"},
			{name: "owner, staged, short header",
				datagram: func(g *group) []byte { return shortHeader(g.id(slotOlder, 1), 0) },
				socket:   "4/1", counted: "owner=1 slot4=1"},
			{name: "owner, long header",
				datagram: func(g *group) []byte { return longHeader(version2, g.id(slotDraining, 1), 0) },
				socket:   "3/1", counted: "owner=1 slot3=1"},
			{name: "owner, short header with nothing behind the ID",
				datagram: func(g *group) []byte { return shortHeader(g.id(slotDraining, 2)) },
				socket:   "3/2", counted: "owner=1 slot3=1"},
			{name: "owner whose generation has other dead workers",
				arrange:  func(g *group) { g.close(connid.MakeHandle(slotDraining, 0)) },
				datagram: func(g *group) []byte { return shortHeader(g.id(slotDraining, 1), 0) },
				socket:   "3/1", counted: "owner=1 slot3=1"},
			{name: "owner of a generation that is marked exhausted",
				arrange:  func(g *group) { g.control.Slots[slotDraining].Exhausted = 1 },
				datagram: func(g *group) []byte { return shortHeader(g.id(slotDraining, 1), 0) },
				socket:   "3/1", counted: "owner=1 slot3=1"},

			{name: "known",
				arrange: func(g *group) {
					g.setFlow([]byte("chosen"), Flow{Generation: numbers[slotDraining], Handle: slotDraining<<8 | 2})
				},
				datagram: func(*group) []byte { return initial([]byte("chosen")) },
				socket:   "3/2", counted: "known=1 slot3=1"},
			{name: "known, of another version",
				arrange: func(g *group) {
					g.setFlow([]byte("chosen"), Flow{Generation: numbers[slotDraining], Handle: slotDraining<<8 | 2})
				},
				datagram: func(*group) []byte { return longHeader(versionGrease, []byte("chosen")) },
				socket:   "3/2", counted: "known=1 slot3=1"},
			{name: "known to a worker that died",
				arrange: func(g *group) {
					g.setFlow([]byte("chosen"), Flow{Generation: numbers[slotDraining], Handle: slotDraining<<8 | 2})
					g.close(connid.MakeHandle(slotDraining, 2))
				},
				datagram: func(*group) []byte { return initial([]byte("chosen")) },
				socket:   "1/*", counted: "new=1 slot1=1"},
			{name: "known to a generation whose slot another one has",
				arrange: func(g *group) {
					g.setFlow([]byte("chosen"), Flow{Generation: numbers[slotDraining] - 1, Handle: slotDraining<<8 | 2})
				},
				datagram: func(*group) []byte { return initial([]byte("chosen")) },
				socket:   "1/*", counted: "new=1 slot1=1"},

			{name: "new",
				datagram: func(*group) []byte { return initial([]byte("new here")) },
				socket:   "1/*", counted: "new=1 slot1=1"},
			{name: "new, empty connection ID",
				datagram: func(*group) []byte { return initial(nil) },
				socket:   "1/*", counted: "new=1 slot1=1"},
			{name: "new, connection ID of 255 octets",
				datagram: func(g *group) []byte { return initial(g.random.octets(255)) },
				socket:   "1/*", counted: "new=1 slot1=1"},
			{name: "new, other connection ID as long as ours",
				datagram: func(g *group) []byte { return initial(g.random.octets(g.codec.Len())) },
				socket:   "1/*", counted: "new=1 slot1=1"},
			{name: "new, version negotiation",
				datagram: func(g *group) []byte { return longHeader(versionNegotiation, []byte("new here")) },
				socket:   "1/*", counted: "new=1 slot1=1"},
			{name: "new, datagram larger than a page",
				datagram: func(g *group) []byte { return append(initial([]byte("large")), g.random.octets(20000)...) },
				socket:   "1/*", counted: "new=1 slot1=1"},

			{name: "orphan of a generation that is gone",
				datagram: func(g *group) []byte { return shortHeader(g.id(slotGone, 0), 0) },
				socket:   "1/*", counted: "orphan=1 slot1=1"},
			{name: "orphan of a dead worker",
				arrange:  func(g *group) { g.close(connid.MakeHandle(slotDraining, 1)) },
				datagram: func(g *group) []byte { return shortHeader(g.id(slotDraining, 1), 0) },
				socket:   "1/*", counted: "orphan=1 slot1=1"},
			{name: "orphan of a dead worker of the active generation",
				arrange:  func(g *group) { g.close(connid.MakeHandle(slotActive, 1)) },
				datagram: func(g *group) []byte { return shortHeader(g.id(slotActive, 1), 0) },
				socket:   "1/*", counted: "orphan=1 slot1=1"},
			{name: "orphan of a worker that never was",
				datagram: func(g *group) []byte { return shortHeader(g.id(slotDraining, workersOfEach), 0) },
				socket:   "1/*", counted: "orphan=1 slot1=1"},
			{name: "orphan in a long header starts a handshake",
				datagram: func(g *group) []byte { return longHeader(version1, g.id(slotGone, 0)) },
				socket:   "1/*", counted: "new=1 slot1=1"},

			{name: "unknown, random connection ID",
				datagram: func(g *group) []byte { return shortHeader(g.random.octets(14), 0) },
				socket:   "1/*", counted: "unknown=1 slot1=1"},
			{name: "unknown, ID of an earlier user of the slot",
				datagram: func(g *group) []byte { return shortHeader(g.idOf(slotDraining, 0, 3), 0) },
				socket:   "1/*", counted: "unknown=1 slot1=1"},
			{name: "unknown, ID of a slot that nobody ever had",
				datagram: func(g *group) []byte { return shortHeader(g.idOf(slotEmpty, 0, 22), 0) },
				socket:   "1/*", counted: "unknown=1 slot1=1"},
			{name: "unknown, slot beyond the map",
				datagram: func(g *group) []byte { return shortHeader(g.idOf(200, 0, 22), 0) },
				socket:   "1/*", counted: "unknown=1 slot1=1"},
			{name: "unknown, one octet",
				datagram: func(*group) []byte { return []byte{0x40} },
				socket:   "1/*", counted: "unknown=1 slot1=1"},

			{name: "invalid, empty",
				datagram: func(*group) []byte { return nil },
				socket:   "1/*", counted: "invalid=1 slot1=1"},
			{name: "invalid, long header of one octet",
				datagram: func(*group) []byte { return []byte{0xc0} },
				socket:   "1/*", counted: "invalid=1 slot1=1"},
			{name: "invalid, long header that ends within its connection ID",
				datagram: func(g *group) []byte { return longHeader(version1, g.id(slotActive, 0))[:19] },
				socket:   "1/*", counted: "invalid=1 slot1=1"},
			{name: "invalid, 31 octets",
				datagram: func(g *group) []byte { return longHeader(version1, g.random.octets(200))[:31] },
				socket:   "1/*", counted: "invalid=1 slot1=1"},
		} {
			t.Run(fmt.Sprint(host, " ", tc.name), func(t *testing.T) {
				ns.Run(func() {
					g.reset(t, host)
					g.world()
					if tc.arrange != nil {
						tc.arrange(g)
					}
					g.wantSteered("the packet", tc.datagram(g), tc.socket, tc.counted)
				})
			})
		}
	}
}

// TestPrefixLengths brings packets to their owner with each length of prefix.
func TestPrefixLengths(t *testing.T) {
	needBPF(t)
	prefixLengths(func(prefix int) {
		t.Run(fmt.Sprint(prefix), func(t *testing.T) {
			testutil.NetNS(t)
			c := quicConfig
			c.Prefix = prefix
			g := newGroup(t, c, loopback6)
			g.join(2, 7, 2)
			g.join(3, 8, 2)
			g.setOrder(0, []uint8{3, 2}, nil)
			g.activate(g.word(3, 0))
			g.wantSteered("short header", shortHeader(g.id(2, 1), 0), "2/1", "owner=1 slot2=1")
			g.wantSteered("long header", longHeader(version1, g.id(2, 0)), "2/0", "owner=1 slot2=1")
			cid := g.id(2, 1)
			cid[len(cid)-1] ^= 1
			g.wantSteered("altered, short header", shortHeader(cid, 0), "3/*", "unknown=1 slot3=1")
			g.wantSteered("altered, long header", longHeader(version1, cid, 0), "3/*", "new=1 slot3=1")
			g.wantSteered("Initial", initial([]byte{1, 2, 3, 4, 5, 6, 7, 8}), "3/*", "new=1 slot3=1")
		})
	})
}

// kinds are a packet of each kind that is not for its owner, and the verdict
// that it ends in while the active generation lives.
var kinds = []struct {
	name     string
	steering uint32
	datagram func(*group) []byte
	verdict  Verdict
}{
	{"Initial", SteeringQUIC, func(g *group) []byte { return initial(g.random.octets(8)) }, VerdictNew},
	{"orphan", SteeringQUIC, func(g *group) []byte { return shortHeader(g.id(slotGone, 1), 0) }, VerdictOrphan},
	{"orphan, long header", SteeringQUIC, func(g *group) []byte { return longHeader(version1, g.id(slotGone, 1)) }, VerdictNew},
	{"unknown", SteeringQUIC, func(g *group) []byte { return shortHeader(g.random.octets(20)) }, VerdictUnknown},
	{"invalid", SteeringQUIC, func(g *group) []byte { return nil }, VerdictInvalid},
	{"query", SteeringStateless, func(g *group) []byte { return []byte("query") }, VerdictNew},
	{"empty query", SteeringStateless, func(g *group) []byte { return nil }, VerdictNew},
	{"large query", SteeringStateless, func(g *group) []byte { return g.random.octets(60000) }, VerdictNew},
}

// TestLastResort lets one generation after the other die.
func TestLastResort(t *testing.T) {
	needBPF(t)
	for _, host := range []netip.Addr{loopback4, loopback6} {
		for _, steering := range []uint32{SteeringQUIC, SteeringStateless} {
			t.Run(fmt.Sprintf("%v steering %d", host, steering), func(t *testing.T) {
				testutil.NetNS(t)
				g := newWorld(t, steering, host)
				// As many of each as there are workers, and more.
				all := func(situation, socket string, counted func(Verdict) string) {
					t.Helper()
					for range testutil.UnlessShort(10, 4) {
						for _, k := range kinds {
							if k.steering == steering {
								g.wantSteered(situation+": "+k.name, k.datagram(g), socket, counted(k.verdict))
							}
						}
					}
				}
				to := func(slot int) func(Verdict) string {
					return func(v Verdict) string { return fmt.Sprintf("%s=1 slot%d=1", VerdictNames[v], slot) }
				}
				fallback := func(slot int) func(Verdict) string {
					return func(Verdict) string { return fmt.Sprintf("fallback=1 slot%d=1", slot) }
				}
				exhausted := func(slots ...int) {
					t.Helper()
					var want [MaxSlots]uint8
					for _, s := range append(slots, slotGone) {
						want[s] = 1
					}
					for s := range want {
						if got := g.control.Slots[s].Exhausted; got != want[s] {
							t.Errorf("exhausted of slot %d is %d, want %d", s, got, want[s])
						}
					}
				}
				all("all live", "1/*", to(slotActive))
				g.close(connid.MakeHandle(slotActive, 1))
				all("a worker of the active one is dead", "1/*", to(slotActive))
				g.close(connid.MakeHandle(slotActive, 0))
				all("all but one are dead", "1/2", to(slotActive))
				exhausted()
				g.close(connid.MakeHandle(slotActive, 2))
				all("the active one is dead", "3/*", fallback(slotDraining))
				exhausted(slotActive)
				g.close(connid.MakeHandle(slotDraining, 0))
				all("a worker of the one before it is dead too", "3/*", fallback(slotDraining))
				g.closeSlot(slotDraining)
				all("the one before it is dead too", "0/*", fallback(slotNewer))
				g.closeSlot(slotNewer)
				all("the newest staged one is dead too", "4/*", fallback(slotOlder))
				g.closeSlot(slotOlder)
				all("none is left", "none", func(Verdict) string { return "drop=1" })
				exhausted(slotActive, slotDraining, slotNewer, slotOlder)
				all("none is left, as is known by now", "none", func(Verdict) string { return "drop=1" })
			})
		}
	}
}

// TestNoneActive is a group before its first activation.
func TestNoneActive(t *testing.T) {
	needBPF(t)
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			testutil.NetNS(t)
			g := newGroup(t, configOf(k.steering), loopback4)
			g.control.Slots[slotGone].Number = numbers[slotGone]
			// The first generation has slot 0, as in every group.
			g.join(0, 1, 3)
			for range 10 {
				g.wantSteered("nobody in the order", k.datagram(g), "none", "drop=1")
			}
			g.setOrder(1, nil, []uint8{0})
			g.activate(1 << 40)
			workers := map[string]bool{}
			for range 60 {
				workers[g.wantSteered("one is staged", k.datagram(g), "0/*", "fallback=1 slot0=1")] = true
			}
			if k.name == "Initial" && len(workers) != 3 {
				t.Errorf("60 handshakes went to %v", workers)
			}
			g.join(1, 2, 3)
			g.setOrder(2, nil, []uint8{1, 0})
			g.activate(2 << 40)
			for range 10 {
				g.wantSteered("two are staged", k.datagram(g), "1/*", "fallback=1 slot1=1")
			}
			g.setOrder(3, []uint8{0}, []uint8{1})
			g.activate(g.word(0, 3))
			for range 10 {
				g.wantSteered("one is active", k.datagram(g), "0/*", VerdictNames[k.verdict]+"=1 slot0=1")
			}
		})
	}
}

// TestExhausted has generations that live and are marked exhausted: they are
// not looked into.
func TestExhausted(t *testing.T) {
	testutil.NetNS(t)
	g := newWorld(t, SteeringQUIC, loopback4)
	g.closeSlot(slotActive)
	g.control.Slots[slotDraining].Exhausted = 1
	g.wantSteered("the one before the active is marked", initial([]byte{1}), "0/*", "fallback=1 slot0=1")
	g.control.Slots[slotNewer].Exhausted = 1
	g.control.Slots[slotOlder].Exhausted = 1
	g.wantSteered("all are marked", initial([]byte{2}), "none", "drop=1")
	g.control.Slots[slotOlder].Exhausted = 0
	g.wantSteered("the last is not marked", initial([]byte{3}), "4/*", "fallback=1 slot4=1")
}

// TestFallbackIsRemembered repeats a handshake that went to the last resort.
func TestFallbackIsRemembered(t *testing.T) {
	testutil.NetNS(t)
	g := newWorld(t, SteeringQUIC, loopback4)
	g.closeSlot(slotActive)
	dcid := []byte("fallback")
	socket := g.wantSteered("first", initial(dcid), "3/*", "fallback=1 slot3=1")
	g.wantSteered("repeated", initial(dcid), socket, "known=1 slot3=1")
	if f, ok := g.flow(dcid); !ok || f.Generation != numbers[slotDraining] || fmt.Sprint(connid.Handle(f.Handle)) != socket {
		t.Errorf("remembered as %+v, %v, want generation %d, %s", f, ok, numbers[slotDraining], socket)
	}
	// Once a living generation is active, it gets what is new only.
	g.setOrder(1, []uint8{slotNewer, slotActive, slotDraining}, []uint8{slotOlder})
	g.activate(g.word(slotNewer, 1))
	g.wantSteered("repeated after a flip", initial(dcid), socket, "known=1 slot3=1")
	g.wantSteered("new after the flip", initial([]byte("other")), "0/*", "new=1 slot0=1")
}

// TestNoFlowOfDrop: a handshake that nobody could take leaves nothing behind.
func TestNoFlowOfDrop(t *testing.T) {
	testutil.NetNS(t)
	g := newWorld(t, SteeringQUIC, loopback4)
	for _, slot := range []uint8{slotActive, slotDraining, slotOlder, slotNewer} {
		g.closeSlot(slot)
	}
	dcid := []byte("dropped")
	g.wantSteered("nobody is there", initial(dcid), "none", "drop=1")
	if f, ok := g.flow(dcid); ok {
		t.Errorf("remembered as %+v", f)
	}
	// A successor that starts now gets the repetition.
	g.join(7, 30, 2)
	g.setOrder(1, []uint8{7}, nil)
	g.activate(g.word(7, 1))
	g.wantSteered("repeated", initial(dcid), "7/*", "new=1 slot7=1")
}

// TestReusedSlot gives a slot to another generation while IDs and handshakes of
// its former user are still about.
func TestReusedSlot(t *testing.T) {
	testutil.NetNS(t)
	g := newWorld(t, SteeringQUIC, loopback4)
	old := g.id(slotDraining, 1)
	dcid := []byte("spans it")
	g.setFlow(dcid, Flow{Generation: numbers[slotDraining], Handle: slotDraining<<8 | 1})
	g.wantSteered("ID", shortHeader(old, 0), "3/1", "owner=1 slot3=1")
	g.wantSteered("handshake", initial(dcid), "3/1", "known=1 slot3=1")

	g.closeSlot(slotDraining)
	g.wantSteered("ID of the dead", shortHeader(old, 0), "1/*", "orphan=1 slot1=1")
	g.join(slotDraining, 25, workersOfEach)
	g.wantSteered("ID of the former user", shortHeader(old, 0), "1/*", "unknown=1 slot1=1")
	g.wantSteered("long header with it", longHeader(version1, old), "1/*", "new=1 slot1=1")
	socket := g.wantSteered("handshake of the former user", initial(dcid), "1/*", "new=1 slot1=1")
	g.wantSteered("the same, repeated", initial(dcid), socket, "known=1 slot1=1")
	g.wantSteered("ID of the new user", shortHeader(g.id(slotDraining, 1), 0), "3/1", "owner=1 slot3=1")
	if f, _ := g.flow(dcid); f.Generation != numbers[slotActive] {
		t.Errorf("the handshake is remembered for generation %d, want %d", f.Generation, numbers[slotActive])
	}
}

// TestDeadIDKeepsAffinity: the long-header packets of a connection whose server
// is gone are a handshake like any other: all of them go to one socket.
func TestDeadIDKeepsAffinity(t *testing.T) {
	testutil.NetNS(t)
	g := newWorld(t, SteeringQUIC, loopback4)
	var dead [][]byte
	var sockets []string
	for i := range 40 {
		cid := g.id(slotGone, 0)
		dead = append(dead, cid)
		sockets = append(sockets, g.wantSteered(fmt.Sprint("packet ", i), longHeader(version1, cid), "1/*", "new=1 slot1=1"))
	}
	g.setOrder(1, []uint8{slotNewer, slotActive, slotDraining}, []uint8{slotOlder})
	g.activate(g.word(slotNewer, 1))
	for i, cid := range dead {
		if want := connid.MakeHandle(slotActive, g.share(cid, workersOfEach)).String(); sockets[i] != want {
			t.Errorf("packet %d went to %s, its share is that of %s", i, sockets[i], want)
		}
		g.wantSteered(fmt.Sprint("packet ", i, " after a flip"), longHeader(version1, cid), sockets[i], "known=1 slot1=1")
	}
}

// TestAffinity starts 1,000 handshakes, flips, and repeats them from another
// address: none is split.
func TestAffinity(t *testing.T) {
	needBPF(t)
	handshakes := testutil.UnlessShort(1000, 100)
	for _, host := range []netip.Addr{loopback4, loopback6} {
		t.Run(host.String(), func(t *testing.T) {
			testutil.NetNS(t)
			g := newWorld(t, SteeringQUIC, host)
			dcids := make([][]byte, handshakes)
			for i := range dcids {
				dcids[i] = g.random.octets(8 + i%13)
			}
			send := func(counted string) map[int]connid.Handle {
				t.Helper()
				want := fmt.Sprintf(counted, handshakes)
				before := g.counted()
				for i, dcid := range dcids {
					g.send(token(initial(dcid), i))
				}
				by := make(map[int]connid.Handle)
				for _, r := range g.receive(handshakes) {
					by[tokenOf(r.datagram)] = r.by
				}
				if got := g.counted().minus(before).String(); got != want {
					t.Errorf("counted %q, want %q", got, want)
				}
				return by
			}
			first := send("new=%[1]d slot1=%[1]d")
			for i, dcid := range dcids {
				if want := connid.MakeHandle(slotActive, g.share(dcid, workersOfEach)); first[i] != want {
					t.Errorf("handshake %d went to %v, its share is that of %v", i, first[i], want)
				}
			}
			g.setOrder(1, []uint8{slotNewer, slotActive, slotDraining}, []uint8{slotOlder})
			g.activate(g.word(slotNewer, 1))
			g.newClient()
			second := send("known=%[1]d slot1=%[1]d")
			split := 0
			for i := range dcids {
				if first[i] != second[i] {
					split++
				}
			}
			if split != 0 {
				t.Errorf("%d of %d handshakes were split by the flip", split, handshakes)
			}
		})
	}
}

// TestFullFlows sends more handshakes than the table holds: what was pushed out
// still gets to the same worker as long as the active generation stays.
func TestFullFlows(t *testing.T) {
	const handshakes = 5000
	testutil.NetNS(t)
	c := quicConfig
	c.FlowEntries = 128
	g := newGroup(t, c, loopback4)
	g.join(0, 1, 8)
	g.setOrder(0, []uint8{0}, nil)
	g.activate(g.word(0, 0))
	dcids := make([][]byte, handshakes)
	for i := range dcids {
		dcids[i] = g.random.octets(8)
	}
	round := func() map[int]connid.Handle {
		for i, dcid := range dcids {
			g.send(token(longHeader(version1, dcid, make([]byte, 8)...), i))
		}
		by := make(map[int]connid.Handle)
		for _, r := range g.receive(handshakes) {
			by[tokenOf(r.datagram)] = r.by
		}
		return by
	}
	first := round()
	second := round()
	for i := range dcids {
		if first[i] != second[i] {
			t.Fatalf("handshake %d went to %v, then to %v", i, first[i], second[i])
		}
	}
	got := g.counted()
	if n := got.verdicts[VerdictNew]; n < 2*handshakes-128 {
		t.Errorf("only %d packets were new: the table did not overflow", n)
	}
	if n := got.verdicts[VerdictNew] + got.verdicts[VerdictKnown]; n != 2*handshakes || got.total() != n || got.slots[0] != n {
		t.Errorf("counted %v", got)
	}
}

// fromNewPorts sends n datagrams, each from a socket of its own.
func (g *group) fromNewPorts(n int, datagram []byte) {
	g.t.Helper()
	for range n {
		fd := openSocket(g.t, g.address.Addr())
		sendTo(g.t, fd, g.address, datagram)
		if err := unix.Close(fd); err != nil {
			g.t.Fatal(err)
		}
	}
}

// TestUniform spreads new flows over four workers.
func TestUniform(t *testing.T) {
	needBPF(t)
	const workers = 4
	flows := testutil.UnlessShort(8000, 400)
	for _, tc := range []struct {
		name     string
		steering uint32
		send     func(*group)
		counted  string
	}{
		{"handshakes", SteeringQUIC, func(g *group) {
			for range flows {
				g.send(longHeader(version1, g.random.octets(8)))
			}
		}, "new=%d slot2=%d"},
		{"unknown, by the sender's port", SteeringQUIC, func(g *group) {
			g.fromNewPorts(flows, shortHeader(make([]byte, 20)))
		}, "unknown=%d slot2=%d"},
		{"invalid, by the sender's port", SteeringQUIC, func(g *group) { g.fromNewPorts(flows, nil) }, "invalid=%d slot2=%d"},
		{"stateless, by the sender's port", SteeringStateless, func(g *group) {
			g.fromNewPorts(flows, []byte("query"))
		}, "new=%d slot2=%d"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			testutil.NetNS(t)
			g := newGroup(t, configOf(tc.steering), loopback4)
			g.join(2, 5, workers)
			g.setOrder(0, []uint8{2}, nil)
			g.activate(g.word(2, 0))
			tc.send(g)
			observed := make([]int, workers)
			for _, r := range g.receive(flows) {
				observed[r.by.Worker()]++
			}
			wantUniform(t, "flows of each worker", observed)
			if got, want := g.counted().String(), fmt.Sprintf(tc.counted, flows, flows); got != want {
				t.Errorf("counted %q, want %q", got, want)
			}
		})
	}
}

// TestDeadWorkers: the share of workers that died goes to their live siblings
// alone, the same to each; nobody else's share changes.
func TestDeadWorkers(t *testing.T) {
	needBPF(t)
	flows := testutil.UnlessShort(12000, 600)
	for _, tc := range []struct {
		workers int
		dead    []uint8
	}{
		{4, []uint8{2}},
		{4, []uint8{3}},
		{4, []uint8{0, 1}},
		{16, []uint8{0, 1, 2, 7, 15}},
		{16, []uint8{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}},
	} {
		t.Run(fmt.Sprintf("%d of %d", len(tc.dead), tc.workers), func(t *testing.T) {
			testutil.NetNS(t)
			g := newGroup(t, quicConfig, loopback4)
			g.join(1, 8, tc.workers)
			g.join(2, 9, tc.workers)
			g.join(3, 10, tc.workers)
			g.setOrder(0, []uint8{2, 1}, []uint8{3})
			g.activate(g.word(2, 0))
			dead := map[uint8]bool{}
			for _, w := range tc.dead {
				dead[w] = true
				g.close(connid.MakeHandle(2, w))
			}
			dcids := make([][]byte, flows)
			orphaned := 0
			for i := range dcids {
				dcids[i] = g.random.octets(12)
				if dead[g.share(dcids[i], tc.workers)] {
					orphaned++
				}
				g.send(token(longHeader(version1, dcids[i], make([]byte, 8)...), i))
			}
			inherited := make([]int, tc.workers)
			for _, r := range g.receive(flows) {
				share := g.share(dcids[tokenOf(r.datagram)], tc.workers)
				switch {
				case dead[share]:
					inherited[r.by.Worker()]++
				case r.by.Worker() != share:
					t.Fatalf("a flow of worker %d, who lives, went to %v", share, r.by)
				}
			}
			var siblings []int
			for w, n := range inherited {
				if !dead[uint8(w)] {
					siblings = append(siblings, n)
				}
			}
			t.Logf("%d flows of the dead: %v", orphaned, siblings)
			if len(siblings) > 1 {
				wantUniform(t, "what the siblings inherited", siblings)
			}
			want := fmt.Sprintf("new=%d slot2=%d", flows, flows)
			if got := g.counted().String(); got != want {
				t.Errorf("counted %q, want %q", got, want)
			}
		})
	}
}

// TestLast: each slot's time of its last packet is that of a packet.
func TestLast(t *testing.T) {
	testutil.NetNS(t)
	g := newWorld(t, SteeringQUIC, loopback4)
	now := func() uint64 {
		var ts unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
			t.Fatal(err)
		}
		return uint64(ts.Nano())
	}
	last := func(slot int) (last uint64) {
		var all []Counters
		if err := g.coll.Maps[MapVerdicts].Lookup(uint32(0), &all); err != nil {
			t.Fatal(err)
		}
		for _, cpu := range all {
			last = max(last, cpu.Slots[slot].Last)
		}
		return last
	}
	before := now()
	g.wantSteered("first", initial([]byte{1}), "1/*", "new=1 slot1=1")
	after := now()
	if got := last(slotActive); got < before || got > after {
		t.Errorf("last packet at %d, sent between %d and %d", got, before, after)
	}
	if got := last(slotDraining); got != 0 {
		t.Errorf("last packet of a generation that had none at %d", got)
	}
	// The time is refreshed once a tick, which is 10 ms at most.
	testutil.WaitFor(t, patience, func() bool { return now() > after+20e6 }, "the next tick")
	before = now()
	g.wantSteered("second", initial([]byte{1}), "1/*", "known=1 slot1=1")
	if got := last(slotActive); got < before || got > now() {
		t.Errorf("last packet at %d, sent at %d", got, before)
	}
}
