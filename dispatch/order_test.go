// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"instar/dispatch"
	"instar/internal/testutil"
)

// TestOrderRules compares the pure functions with two lists: those that were
// active, the latest first, and those that never were, the newest first.
func TestOrderRules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var active, fresh, slots []uint8
		activated := 0
		pick := func(from []uint8, what string) uint8 { return rapid.SampledFrom(from).Draw(t, what) }
		remove := func(list []uint8, slot uint8) []uint8 {
			return slices.DeleteFunc(slices.Clone(list), func(s uint8) bool { return s == slot })
		}
		t.Repeat(map[string]func(*rapid.T){
			"join": func(t *rapid.T) {
				slot := rapid.Uint8().Draw(t, "slot")
				if slices.Contains(slots, slot) {
					t.Skip("in use")
				}
				before := slices.Clone(slots)
				next, n := dispatch.Staged(slots, activated, slot)
				if !slices.Equal(slots, before) {
					t.Fatal("the old order was changed")
				}
				slots, activated = next, n
				fresh = slices.Insert(fresh, 0, slot)
			},
			"activate": func(t *rapid.T) {
				if len(slots) == 0 {
					t.Skip("nobody is there")
				}
				slot, before := pick(slots, "slot"), slices.Clone(slots)
				next, n := dispatch.Promoted(slots, activated, slot)
				if !slices.Equal(slots, before) {
					t.Fatal("the old order was changed")
				}
				slots, activated = next, n
				active, fresh = slices.Insert(remove(active, slot), 0, slot), remove(fresh, slot)
			},
			"leave": func(t *rapid.T) {
				slot, before := rapid.Uint8().Draw(t, "slot"), slices.Clone(slots)
				if len(slots) > 0 && rapid.Bool().Draw(t, "one that is there") {
					slot = pick(slots, "slot")
				}
				next, n := dispatch.Without(slots, activated, slot)
				if !slices.Equal(slots, before) {
					t.Fatal("the old order was changed")
				}
				slots, activated = next, n
				active, fresh = remove(active, slot), remove(fresh, slot)
			},
			"": func(t *rapid.T) {
				if want := slices.Concat(active, fresh); !slices.Equal(slots, want) || activated != len(active) {
					t.Fatalf("order %v with %d that were active, want %v with %d", slots, activated, want, len(active))
				}
			},
		})
	})
}

// member is the model's generation.
type member struct {
	*dispatch.Generation
	slot int
	// live are the workers whose socket is open and registered.
	live []bool
	// open are the workers whose socket is open.
	open []bool
	// in says that it is in the table. A generation whose sockets were closed
	// behind the table's back is in it until the next change.
	in    bool
	flows []flow
}

func (m *member) alive() bool { return slices.Contains(m.live, true) }

// heard is a datagram that a socket got.
type heard struct {
	gen, worker int
	serial      uint64
}

// model is what a group has to be. It knows only the documented rules.
type model struct {
	w       *world
	g, tool *dispatch.Group
	client  *net.UDPConn
	packets chan heard
	readers sync.WaitGroup

	all []*member
	// active are those that were active, the latest first; fresh those that
	// never were, the newest first.
	active, fresh []*member
	// owner is the generation that has or last had each slot.
	owner    map[int]*member
	lastUsed map[int]uint32
	number   uint32
	counts   counts
	serial   uint64
}

func (m *model) order() []*member { return slices.Concat(m.active, m.fresh) }

// take removes a member from the table.
func (m *model) take(n *member) {
	n.in = false
	is := func(o *member) bool { return o == n }
	m.active, m.fresh = slices.DeleteFunc(m.active, is), slices.DeleteFunc(m.fresh, is)
}

// repair is what each change does first.
func (m *model) repair() {
	for _, n := range m.order() {
		if !n.alive() {
			m.take(n)
		}
	}
}

func (m *model) promote(n *member) {
	m.take(n)
	n.in = true
	m.active = slices.Insert(m.active, 0, n)
}

// target is who gets a packet of no flow, and with which verdict.
func (m *model) target(verdict string) (*member, string) {
	for i, n := range m.order() {
		switch {
		case !n.alive():
		case i == 0 && len(m.active) > 0:
			return n, verdict
		default:
			return n, "fallback"
		}
	}
	return nil, "drop"
}

func (m *model) read(n *member, worker int, conn *net.UDPConn) {
	m.readers.Go(func() {
		b := make([]byte, 2048)
		for {
			size, _, err := conn.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			m.packets <- heard{int(n.Number()), worker, binary.BigEndian.Uint64(tail(b[:size]))}
		}
	})
}

// send sends one packet and checks who gets it.
func (m *model) send(t *rapid.T, what string, packet []byte, to *member, worker int, verdict string) {
	m.serial++
	packet = binary.BigEndian.AppendUint64(packet, m.serial)
	_, err := m.client.Write(packet)
	if errors.Is(err, unix.ECONNREFUSED) {
		// The answer to the one before, which was dropped.
		_, err = m.client.Write(packet)
	}
	if err != nil {
		t.Fatal(err)
	}
	m.counts[verdict]++
	if to == nil {
		return
	}
	var got heard
	select {
	case got = <-m.packets:
	case <-time.After(patience):
		t.Fatalf("%s: nobody got it, want %d", what, to.Number())
	}
	if got.serial != m.serial || got.gen != int(to.Number()) || worker >= 0 && got.worker != worker {
		t.Fatalf("%s: %d/%d got packet %d, want %d/%d and packet %d", what, got.gen, got.worker, got.serial, to.Number(), worker, m.serial)
	}
	if !to.live[got.worker] {
		t.Fatalf("%s: a dead worker got it", what)
	}
}

func (m *model) check(t *rapid.T) {
	// The table, as a tool of another process sees it.
	s, err := m.tool.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for i, n := range m.order() {
		state := "staged"
		switch {
		case i == 0 && len(m.active) > 0:
			state = "active"
		case i < len(m.active):
			state = "draining"
		}
		live := 0
		for _, l := range n.live {
			if l {
				live++
			}
		}
		want = append(want, fmt.Sprintf("%d in slot %d %s %d/%d", n.Number(), n.slot, state, live, len(n.live)))
	}
	for _, n := range s.Generations {
		got = append(got, fmt.Sprintf("%d in slot %d %v %d/%d", n.Number, n.Slot, n.State, n.Live, n.Workers))
	}
	if !slices.Equal(got, want) {
		t.Fatalf("the table says %q, want %q", got, want)
	}
	active := uint32(0)
	if len(m.active) > 0 {
		active = m.active[0].Number()
	}
	if s.Active != active {
		t.Fatalf("active is %d, want %d", s.Active, active)
	}
	for _, n := range m.all {
		want := dispatch.StateGone
		switch {
		case !n.in:
		case n == m.order()[0] && len(m.active) > 0:
			want = dispatch.StateActive
		case slices.Contains(m.active, n):
			want = dispatch.StateDraining
		default:
			want = dispatch.StateStaged
		}
		if got := n.State(); got != want {
			t.Fatalf("generation %d is %v, want %v", n.Number(), got, want)
		}
		superseded := false
		select {
		case <-n.Superseded():
			superseded = true
		default:
		}
		// The watch of another process's change may be on its way; here all
		// changes are our own.
		if want := want == dispatch.StateDraining || want == dispatch.StateGone; superseded != want {
			t.Fatalf("generation %d superseded: %t, want %t", n.Number(), superseded, want)
		}
	}

	if !slices.ContainsFunc(m.all, func(n *member) bool { return slices.Contains(n.open, true) }) {
		// Without a socket there is no data plane.
		return
	}
	// A new flow.
	id := make([]byte, 16)
	for i := range id {
		id[i] = byte(rand.Uint32())
	}
	to, verdict := m.target("new")
	m.send(t, "new flow", append([]byte{0xc3, 0, 0, 0, 1, 16}, id...), to, -1, verdict)
	// Old ones.
	for _, n := range m.all[max(0, len(m.all)-6):] {
		for _, f := range n.flows {
			to, worker, verdict := n, f.worker, "owner"
			if !n.live[f.worker] {
				verdict = "orphan"
				if m.owner[n.slot] != n {
					verdict = "unknown"
				}
				worker = -1
				to, verdict = m.target(verdict)
			}
			m.send(t, fmt.Sprintf("flow of %d/%d", n.Number(), f.worker), append([]byte{0x40}, f.id...), to, worker, verdict)
		}
	}
	// Every packet was counted once, as what it was.
	m.w.wantCounts(m.g, "packets", nil, m.counts)
	if m.w.Failed() {
		t.FailNow()
	}
}

// TestTableAgainstModel drives a group through random changes and deaths. After
// each one it compares the table, the state of each generation and, by packets,
// the data plane with a model of the documented rules.
func TestTableAgainstModel(t *testing.T) {
	testutil.Slow(t)
	w := newWorld(t)
	// The guard would mend at a time that the model does not know.
	dispatch.SetGuardEvery(t, time.Hour)
	const address, limit, workers = "127.0.0.1:4433", 4, 3
	g := w.open(w.options(address))
	tool, err := dispatch.OpenPath(g.Path())
	w.must(err)
	defer tool.Close()
	client := w.dial(address)
	number, serial := uint32(0), uint64(0)
	lastUsed := map[int]uint32{}

	rapid.Check(t, func(t *rapid.T) {
		m := &model{w: w, g: g, tool: tool, client: client, packets: make(chan heard, 64), owner: map[int]*member{},
			number: number, serial: serial, lastUsed: lastUsed, counts: w.counts(g)}
		for v, n := range m.counts {
			if n == 0 {
				delete(m.counts, v)
			}
		}
		defer func() {
			for _, n := range m.all {
				if err := n.Close(); err != nil {
					t.Error(err)
				}
			}
			m.readers.Wait()
			number, serial = m.number, m.serial
		}()
		pick := func(t *rapid.T, keep func(*member) bool) *member {
			var some []*member
			for _, n := range m.all {
				if keep(n) {
					some = append(some, n)
				}
			}
			if len(some) == 0 {
				t.Skip("there is none")
			}
			return rapid.SampledFrom(some).Draw(t, "generation")
		}
		in := func(n *member) bool { return n.in }
		open := func(n *member) bool { return slices.Contains(n.open, true) }
		isActive := func(n *member) bool { return len(m.active) > 0 && m.active[0] == n }
		check := func(t *rapid.T, what string, err error, kind string) {
			t.Helper()
			if got := kinds(err); err != nil != (kind != "") || kind != "" && !slices.Contains(got, kind) {
				t.Fatalf("%s: %v, want %q", what, err, kind)
			}
		}

		t.Repeat(map[string]func(*rapid.T){
			"join": func(t *rapid.T) {
				n, err := g.Join(rapid.IntRange(1, workers).Draw(t, "workers"))
				m.repair()
				if len(m.order()) == limit {
					check(t, "join a full group", err, "full")
					return
				}
				check(t, "join", err, "")
				m.number++
				if n.Number() != m.number {
					t.Fatalf("number %d, want %d", n.Number(), m.number)
				}
				// The slot that is out of use the longest.
				slot := -1
				for s := range limit {
					if o := m.owner[s]; o != nil && o.in {
						continue
					}
					if slot < 0 || m.lastUsed[s] < m.lastUsed[slot] {
						slot = s
					}
				}
				if got := int(n.Handle(0).Slot()); got != slot {
					t.Fatalf("generation %d has slot %d, want %d", n.Number(), got, slot)
				}
				o := &member{Generation: n, slot: slot, in: true}
				for i, conn := range n.Conns() {
					o.live, o.open = append(o.live, true), append(o.open, true)
					id, err := n.ConnectionIDs().Append(nil, n.Handle(i), n.Number())
					if err != nil {
						t.Fatal(err)
					}
					o.flows = append(o.flows, flow{id: id, gen: n.Number(), worker: i})
					m.read(o, i, conn)
				}
				m.all = append(m.all, o)
				m.fresh = slices.Insert(m.fresh, 0, o)
				m.owner[slot], m.lastUsed[slot] = o, n.Number()
			},
			"activate": func(t *rapid.T) {
				n := pick(t, func(*member) bool { return true })
				by := rapid.SampledFrom([]*dispatch.Group{g, tool}).Draw(t, "by")
				err := by.Activate(n.Number())
				g.Wake()
				m.repair()
				switch {
				case !n.in:
					check(t, "activate one that is gone", err, "not-exist")
				case isActive(n):
					check(t, "activate the active one", err, "")
				case slices.Contains(n.live, false):
					check(t, "activate one with dead workers", err, "state")
				default:
					check(t, "activate", err, "")
					m.promote(n)
				}
			},
			"rollback": func(t *rapid.T) {
				got, err := g.Rollback()
				m.repair()
				switch {
				case len(m.active) < 2:
					check(t, "roll back with no predecessor", err, "state")
				case slices.Contains(m.active[1].live, false):
					check(t, "roll back to one with dead workers", err, "state")
				default:
					check(t, "roll back", err, "")
					if want := m.active[1].Number(); got != want {
						t.Fatalf("rolled back to %d, want %d", got, want)
					}
					m.promote(m.active[1])
				}
			},
			"drain": func(t *rapid.T) {
				n := pick(t, open)
				done := make(chan struct{})
				close(done)
				final := rapid.Bool().Draw(t, "final")
				wasIn := n.in
				r, err := n.Drain(w.Context(), dispatch.DrainOptions{Done: done, Grace: 1, Final: final})
				if isActive(n) && !final {
					check(t, "drain the active one", err, "reinstated")
					return
				}
				if m.repair(); isActive(n) && !final {
					check(t, "drain one that just became active", err, "reinstated")
					return
				}
				check(t, "drain", err, "")
				if want := map[bool]string{true: "done", false: "evicted"}[wasIn]; r.Reason != want {
					t.Fatalf("the drain of generation %d ended as %q, want %q", n.Number(), r.Reason, want)
				}
				m.take(n)
				clear(n.live)
			},
			"close": func(t *rapid.T) {
				n := pick(t, open)
				check(t, "close", n.Close(), "")
				m.take(n)
				m.repair()
				clear(n.live)
				clear(n.open)
			},
			"evict": func(t *rapid.T) {
				n := pick(t, func(*member) bool { return true })
				err := tool.Evict(n.Number())
				g.Wake()
				m.repair()
				switch {
				case !n.in:
					check(t, "evict one that is gone", err, "not-exist")
				case isActive(n):
					check(t, "evict the active one", err, "state")
				default:
					check(t, "evict", err, "")
					m.take(n)
					clear(n.live)
				}
			},
			"die": func(t *rapid.T) {
				n := pick(t, in)
				for _, c := range n.Conns() {
					_ = c.Close() // those of dead workers are closed
				}
				clear(n.live)
				clear(n.open)
			},
			"lose a worker": func(t *rapid.T) {
				n := pick(t, in)
				i := rapid.IntRange(0, len(n.live)-1).Draw(t, "worker")
				_ = n.Conns()[i].Close()
				n.live[i], n.open[i] = false, false
			},
			"repair": func(t *rapid.T) {
				check(t, "repair", tool.Repair(), "")
				g.Wake()
				m.repair()
			},
			"": m.check,
		})
	})
}

// A reader that is slow sees a state that was true, whatever is written meanwhile.
// A generation that takes a torn order for its own end would leave the group.
func TestStateIsNeverTorn(t *testing.T) {
	table := dispatch.NewTable(t)
	const first, middle = 1, 2
	for i := range table.Slots {
		table.Slots[i].Number = uint32(i) + 1
	}
	// Slot first is always active, slot middle always draining, in many places.
	orders := make([][]uint8, 64)
	for i := range orders {
		others := rand.Perm(200)[:1+i*3]
		order := []uint8{first}
		for j, o := range others {
			if j == len(others)/2 {
				order = append(order, middle)
			}
			if o += 10; o < 256 {
				order = append(order, uint8(o))
			}
		}
		orders[i] = order
	}
	table.Change(orders[0], len(orders[0]))
	stop := make(chan struct{})
	var writer sync.WaitGroup
	writer.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				order := orders[i%len(orders)]
				table.Change(order, len(order))
			}
		}
	})
	defer writer.Wait()
	defer close(stop)
	deadline := time.Now().Add(time.Second)
	for reads := 0; time.Now().Before(deadline); reads++ {
		if s := table.State(first, first+1); s != dispatch.StateActive {
			t.Fatalf("after %d reads the active generation is %v", reads, s)
		}
		if s := table.State(middle, middle+1); s != dispatch.StateDraining {
			t.Fatalf("after %d reads the draining generation is %v", reads, s)
		}
	}
}
