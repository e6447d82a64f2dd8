// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"instar/bpf"
)

// slotTraffic is what all CPUs together gave to a slot.
type slotTraffic struct {
	packets uint64
	last    uint64
}

// counters sums the data plane's counters over the CPUs.
func (g *Group) counters() (verdicts [bpf.Verdicts]uint64, slots [bpf.MaxSlots]slotTraffic, err error) {
	var cpus []bpf.Counters
	if err := g.pins.verdicts.Lookup(uint32(0), &cpus); err != nil {
		return verdicts, slots, fmt.Errorf("read counters of %s: %w", g.key, err)
	}
	for i := range cpus {
		for v, n := range cpus[i].Verdicts {
			verdicts[v] += n
		}
		for s := range cpus[i].Slots {
			slots[s].packets += cpus[i].Slots[s].Packets
			slots[s].last = max(slots[s].last, cpus[i].Slots[s].Last)
		}
	}
	return verdicts, slots, nil
}

func (g *Group) traffic() ([bpf.MaxSlots]slotTraffic, error) {
	_, slots, err := g.counters()
	return slots, err
}

// Snapshot reads the group's table and counters, without the lock.
func (g *Group) Snapshot() (Snapshot, error) {
	release, err := g.use()
	if err != nil {
		return Snapshot{}, fmt.Errorf("read snapshot of %s: %w", g.key, err)
	}
	defer release()
	verdicts, traffic, err := g.counters()
	if err != nil {
		return Snapshot{}, err
	}
	t := &g.table
	s := Snapshot{
		Path:           g.Path(),
		Network:        g.key.network,
		Address:        g.key.addr.String(),
		Device:         g.key.device,
		Service:        g.service,
		Steering:       Steering(t.Steering).String(),
		Layout:         t.Layout,
		Program:        text(t.Program[:]),
		MaxGenerations: int(t.generations),
		MaxWorkers:     int(t.workers),
		FlowEntries:    int(t.FlowEntries),
		FlowTimeout:    int(t.FlowTimeout),
		Verdicts:       make(map[string]uint64, len(verdicts)),
	}
	// A change during the reading is seen by the counter; a stream of changes must
	// not keep the reader for ever.
	for range 100 {
		before := atomic.LoadUint64(&t.Changes)
		word := t.active()
		s.Active = word.number()
		s.Generations = g.generationsOf(word, traffic)
		if atomic.LoadUint64(&t.Changes) == before && t.active() == word {
			break
		}
	}
	if Steering(t.Steering) == SteeringFlow {
		s.FlowLearning = Learning(t.FlowLearning).String()
	}
	for v, n := range verdicts {
		s.Verdicts[bpf.VerdictNames[v]] = n
		s.Packets += n
	}
	return s, nil
}

// generations lists those that hold sockets, without counters.
func (g *Group) generations() []GenerationInfo {
	return g.generationsOf(g.table.active(), [bpf.MaxSlots]slotTraffic{})
}

func (g *Group) generationsOf(w word, traffic [bpf.MaxSlots]slotTraffic) []GenerationInfo {
	slots, activated := g.table.orderOf(w)
	list := make([]GenerationInfo, 0, len(slots))
	for i, slot := range slots {
		info := g.table.Info[slot]
		state := StateStaged
		switch {
		case i == 0 && activated > 0:
			state = StateActive
		case i < activated:
			state = StateDraining
		}
		gen := GenerationInfo{
			Number:     g.table.Slots[slot].Number,
			Slot:       int(slot),
			State:      state,
			Workers:    int(g.table.Slots[slot].Workers),
			Live:       g.live(slot),
			PID:        int(info.Pid),
			Build:      text(info.Build[:]),
			Joined:     wall(info.Joined),
			Activated:  wall(info.Activated),
			Superseded: wall(info.Superseded),
			Deadline:   wall(info.Deadline),
		}
		if info.PidNamespace == pidNamespace() {
			gen.Command = command(int(info.Pid), info.PidStart)
		}
		if t := traffic[slot]; t.packets > info.PacketsBefore {
			gen.Packets = t.packets - info.PacketsBefore
			// The time is that of the tick, in which the slot's former user may have
			// had packets as well.
			gen.LastPacket = wall(max(t.last, info.Joined))
		}
		list = append(list, gen)
	}
	return list
}

// receiveMemory is the memory that a socket's receive queue takes, in bytes
// (SK_MEMINFO_RMEM_ALLOC of SO_MEMINFO, socket(7); Linux 4.12).
func receiveMemory(fd int) uint32 {
	var info [9]uint32
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return 0
	}
	return info[0]
}
