// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"instar/bpf"
	"instar/dispatch/connid"
)

// Learning is when SteeringFlow remembers a flow.
type Learning uint8

const (
	// LearnReceived remembers a flow with its first packet. A flood of forged senders
	// fills the table, and pushes flows out (FlowCounts.Evicted), whose next packet goes to the
	// active generation: first those that have sent no second packet, then those that were silent
	// for the longest time.
	LearnReceived = Learning(bpf.LearningReceived)
	// LearnAssured remembers the flows that their servers name with Generation.Assure,
	// as soon as the peer has shown that it receives. Packets of all others go to
	// the active generation.
	LearnAssured = Learning(bpf.LearningAssured)
	// LearnAnswered remembers a flow when its server sends something to the peer on a
	// socket of its generation; Generation.Assure works as well. Packets of all others go to the
	// active generation. The kernel calls a program for what the process's control group (version
	// 2, that of the time of Join) sends to a named address, so each server needs the rights to
	// load one: CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON. A flow that a living generation has
	// stays with that, whoever sends to its peer.
	LearnAnswered = Learning(bpf.LearningAnswered)
)

var learningNames = []string{LearnReceived: "received", LearnAssured: "assured", LearnAnswered: "answered"}

// ParseLearning reads the name of a Learning.
func ParseLearning(name string) (Learning, error) {
	i := slices.Index(learningNames, name)
	if i < 0 {
		return 0, fmt.Errorf("%w: learning %q; there are %s", ErrOptions, name, strings.Join(learningNames, ", "))
	}
	return Learning(i), nil
}

func (l Learning) String() string {
	if int(l) < len(learningNames) {
		return learningNames[l]
	}
	return fmt.Sprintf("learning %d", uint8(l))
}

// Flow is a flow that SteeringFlow remembers.
type Flow struct {
	Peer       netip.AddrPort
	Generation uint32
	Worker     int
	// Seen is when a packet came or the flow was assured, exact to a second.
	Seen time.Time
}

// FlowCounts say what is in a table of flows.
type FlowCounts struct {
	// Live are the flows of each generation that holds sockets, by its number.
	Live map[uint32]int `json:"live"`
	// Ended are entries of flows that timed out, or whose generation is gone. They are
	// used again when their turn comes.
	Ended int `json:"ended"`
	// Room is the size of the table.
	Room int `json:"room"`
	// Evicted are entries that the kernel gave to other flows, since the group was made: those
	// that were added, less those deleted and those that are there. The counting is no
	// snapshot: under traffic it differs by what changes meanwhile, and without is exact, unless
	// a process died between adding an entry and saying so.
	Evicted uint64 `json:"evicted"`
}

// lookupChunk is how many entries are read at a time, at most.
const lookupChunk = 1 << 14

// Flows calls f with each flow that lives, until f returns false. The table changes
// meanwhile: a flow may be missed or come twice. A million takes a second.
//
// Errors: ErrState when the group has another steering.
func (g *Group) Flows(f func(Flow) bool) error {
	err := g.eachFlow(func(p bpf.Peer, t bpf.Tracked, live bool) bool {
		return !live || f(Flow{peerOf(p), uint32(t.Owner), int(connid.Handle(t.Owner >> 32).Worker()), wall(t.Seen)})
	})
	if err != nil {
		return fmt.Errorf("read flows of %s: %w", g.key, err)
	}
	return nil
}

// FlowCounts counts the flows of each generation. A million takes a good part of a second.
//
// Errors: ErrState when the group has another steering.
func (g *Group) FlowCounts() (FlowCounts, error) {
	c := FlowCounts{Live: make(map[uint32]int), Room: int(g.table.FlowEntries)}
	present := uint64(0)
	err := g.eachFlow(func(_ bpf.Peer, t bpf.Tracked, live bool) bool {
		if live {
			c.Live[uint32(t.Owner)]++
		} else {
			c.Ended++
		}
		present++
		return true
	})
	var added uint64
	if err == nil {
		err = g.withPins(func() (err error) {
			added, err = g.addedFlows()
			return err
		})
	}
	if err != nil {
		return c, fmt.Errorf("count flows of %s: %w", g.key, err)
	}
	c.Evicted = max(added, present) - present
	return c, nil
}

// addedFlows counts the entries that were added, less those that processes deleted.
func (g *Group) addedFlows() (uint64, error) {
	var cpus []bpf.Counters
	if err := g.pins.verdicts.Lookup(uint32(0), &cpus); err != nil {
		return 0, fmt.Errorf("read counters: %w", err)
	}
	added := atomic.LoadUint64(&g.table.FlowsAdded)
	for _, c := range cpus {
		added += c.Added
	}
	// A process that was killed may have added one without a word, and another deleted that.
	return added - min(added, atomic.LoadUint64(&g.table.FlowsDeleted)), nil
}

func (g *Group) eachFlow(f func(p bpf.Peer, t bpf.Tracked, live bool) bool) error {
	if Steering(g.table.Steering) != SteeringFlow {
		return fmt.Errorf("%w: the group's steering is %s, which tracks no flows", ErrState, Steering(g.table.Steering))
	}
	release, err := g.use()
	if err != nil {
		return err
	}
	defer release()
	// Only slots in the order hold sockets.
	slots, _ := g.table.order()
	var numbers [bpf.MaxSlots]uint32
	for _, slot := range slots {
		numbers[slot] = g.table.Slots[slot].Number
	}
	clock, timeout := now(), g.flowTimeout()
	var cursor ebpf.MapBatchCursor
	chunk := min(lookupChunk, max(int(g.table.FlowEntries), 1))
	keys, values := make([]bpf.Peer, chunk), make([]bpf.Tracked, chunk)
	for {
		n, err := g.pins.flows.BatchLookup(&cursor, keys, values, nil)
		if errors.Is(err, unix.ENOSPC) && len(keys) < math.MaxInt32/2 {
			// A bucket with more entries than fit; the cursor is as it was.
			keys, values = make([]bpf.Peer, 2*len(keys)), make([]bpf.Tracked, 2*len(values))
			continue
		}
		last := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !last {
			return err
		}
		for i, t := range values[:n] {
			number := numbers[connid.Handle(t.Owner>>32).Slot()]
			live := number != 0 && number == uint32(t.Owner) && int64(clock-t.Seen) <= int64(timeout)
			if !f(keys[i], t, live) {
				return nil
			}
		}
		if last {
			return nil
		}
	}
}

// flowTimeout is when an entry ends, in nanoseconds of the table's clock.
func (g *Group) flowTimeout() uint64 { return uint64(g.table.FlowTimeout) * uint64(time.Second) }

// Assure makes a peer's packets come to a worker of this generation until they were
// silent for Options.FlowTimeout, whoever is active. Call it for a peer that has shown
// that it receives what is sent to it, and again for one that sends nothing while the
// flow lives on. It costs a system call.
//
// Errors: ErrState when the group has another steering, ErrOptions when there is no such
// worker or peer has no address.
func (n *Generation) Assure(worker int, peer netip.AddrPort) error {
	p, err := n.ownFlow(worker, peer)
	if err == nil {
		t := bpf.Tracked{Owner: n.owner(worker), Seen: now()}
		err = n.group.withPins(func() error {
			err := n.group.pins.flows.Update(&p, &t, ebpf.UpdateNoExist)
			if errors.Is(err, ebpf.ErrKeyExist) {
				return n.group.pins.flows.Put(&p, &t)
			}
			if err == nil {
				atomic.AddUint64(&n.group.table.FlowsAdded, 1)
			}
			return err
		})
	}
	if err != nil {
		return fmt.Errorf("assure flow of %s to generation %d of %s: %w", peer, n.number, n.group.key, err)
	}
	return nil
}

// owner is Tracked.Owner of a worker's flows.
func (n *Generation) owner(worker int) uint64 {
	return uint64(n.Handle(worker))<<32 | uint64(n.number)
}

// Release forgets a peer's flow, when it has one: its next packet begins a new one.
// Errors are those of Assure.
func (n *Generation) Release(peer netip.AddrPort) error {
	p, err := n.ownFlow(0, peer)
	if err == nil {
		err = n.group.withPins(func() error {
			err := n.group.pins.flows.Delete(&p)
			if err == nil {
				atomic.AddUint64(&n.group.table.FlowsDeleted, 1)
			}
			return err
		})
	}
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("release flow of %s from generation %d of %s: %w", peer, n.number, n.group.key, err)
	}
	return nil
}

func (n *Generation) ownFlow(worker int, peer netip.AddrPort) (bpf.Peer, error) {
	if s := Steering(n.group.table.Steering); s != SteeringFlow {
		return bpf.Peer{}, fmt.Errorf("%w: the group's steering is %s, which tracks no flows", ErrState, s)
	}
	if worker < 0 || worker >= len(n.sockets) {
		return bpf.Peer{}, fmt.Errorf("%w: worker %d; there are 0 to %d", ErrOptions, worker, len(n.sockets)-1)
	}
	if !peer.IsValid() {
		return bpf.Peer{}, fmt.Errorf("%w: the peer has no address", ErrOptions)
	}
	return bpf.Peer{Address: peer.Addr().As16(), Port: peer.Port()<<8 | peer.Port()>>8}, nil
}

func peerOf(p bpf.Peer) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(p.Address).Unmap(), p.Port<<8|p.Port>>8)
}

// withPins runs f while the pins are open.
func (g *Group) withPins(f func() error) error {
	release, err := g.use()
	if err != nil {
		return err
	}
	defer release()
	return f()
}

// liveFlows counts the generation's own.
func (n *Generation) liveFlows() (count int, err error) {
	err = n.group.eachFlow(func(_ bpf.Peer, t bpf.Tracked, live bool) bool {
		if live && uint32(t.Owner) == n.number {
			count++
		}
		return true
	})
	return count, err
}
