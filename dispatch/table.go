// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"instar/bpf"
)

// table is a group's control map, in memory that the data plane and every
// process of the group share. Readers need no lock. Writers hold the lock of
// the group's folder; each of their steps leaves a table that repair can mend.
type table struct {
	*bpf.Control
	// generations and workers are the sizes, checked once: the memory belongs to the
	// group's owner, who may write there what he likes.
	generations, workers uint32
}

// word is the truth about who is active: see instar_control in abi.h.
type word uint64

func newWord(number uint32, slot uint8, order int, workers uint16) word {
	return word(number) | word(slot)<<32 | word(order)<<40 | word(workers)<<48
}

func (w word) number() uint32 { return uint32(w) }
func (w word) slot() uint8    { return uint8(w >> 32) }
func (w word) order() int     { return int(w>>40) % bpf.Orders }

// mapTable maps the control map into memory, for as long as the table is used.
func mapTable(fd int) (table, error) {
	size := int(unsafe.Sizeof(bpf.Control{}))
	memory, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return table{}, fmt.Errorf("map control map into memory: %w", err)
	}
	return table{Control: (*bpf.Control)(unsafe.Pointer(&memory[0]))}, nil
}

// unmap is called when nobody can read the table any more.
func (t table) unmap() {
	memory := unsafe.Slice((*byte)(unsafe.Pointer(t.Control)), unsafe.Sizeof(bpf.Control{}))
	_ = unix.Munmap(memory)
}

// unmapWith unmaps the table once owner is unreachable: a late reader of a
// closed group reads old memory instead of a hole.
func unmapWith[T any](owner *T, t table) {
	runtime.AddCleanup(owner, func(c *bpf.Control) { table{Control: c}.unmap() }, t.Control)
}

func (t table) active() word { return word(atomic.LoadUint64(&t.Active)) }

// order returns the slots in the order of last resort, and how many of them, from
// the front, have been active.
func (t table) order() (slots []uint8, activated int) {
	return t.orderOf(t.active())
}

func (t table) orderOf(w word) (slots []uint8, activated int) {
	slots, activated, _ = t.readOrder(w)
	return slots, activated
}

// readOrder also says whether the order is as publish writes it. Of one that is not, what
// no slot has, or another place has already, is left out.
func (t table) readOrder(w word) (slots []uint8, activated int, sound bool) {
	o := &t.Orders[w.order()]
	total := min(int(o.Total), len(o.Slot))
	sound = int(o.Total) == total && int(o.Activated) <= total
	var seen [bpf.MaxSlots]bool
	slots = make([]uint8, 0, total)
	for i, slot := range o.Slot[:total] {
		if uint32(slot) >= t.generations || seen[slot] {
			sound = false
			continue
		}
		seen[slot] = true
		slots = append(slots, slot)
		if i < int(o.Activated) {
			activated++
		}
	}
	return slots, activated, sound
}

// publish makes the order the one that the data plane follows. This is the
// critical step of every change: the order is written aside, then one store
// of the active word makes it, the active generation and with them the state of
// every generation true at once.
func (t table) publish(slots []uint8, activated int) {
	next := (t.active().order() + 1) % bpf.Orders
	o := &t.Orders[next]
	copy(o.Slot[:], slots)
	o.Total = uint16(len(slots))
	o.Activated = uint16(activated)
	w := newWord(0, 0, next, 0)
	if activated > 0 {
		s := &t.Slots[slots[0]]
		w = newWord(s.Number, slots[0], next, s.Workers)
	}
	step("write order")
	atomic.StoreUint64(&t.Active, uint64(w))
	step("publish order")
}

// workersOf is how many sockets the generation of a slot has or had.
func (t table) workersOf(slot uint8) uint32 {
	return min(uint32(t.Slots[slot].Workers), t.workers)
}

// state reads a generation's state off the order, without the lock. It reads again
// when the order changed meanwhile: after some changes its place is written anew,
// and what a slow reader takes for the end of a generation would make that leave.
func (t table) state(slot uint8, number uint32) State {
	for {
		changes, w := atomic.LoadUint64(&t.Changes), t.active()
		s := t.stateOf(w, slot, number)
		if t.active() == w && atomic.LoadUint64(&t.Changes) == changes {
			return s
		}
	}
}

func (t table) stateOf(w word, slot uint8, number uint32) State {
	if atomic.LoadUint32(&t.Slots[slot].Number) != number {
		return StateGone
	}
	slots, activated := t.orderOf(w)
	switch i := slices.Index(slots, slot); {
	case i < 0:
		return StateGone
	case i == 0 && activated > 0:
		return StateActive
	case i < activated:
		return StateDraining
	default:
		return StateStaged
	}
}

// find returns the slot of a generation that holds sockets.
func (t table) find(number uint32) (uint8, bool) {
	slots, _ := t.order()
	for _, s := range slots {
		if t.Slots[s].Number == number {
			return s, true
		}
	}
	return 0, false
}

// freeSlot returns the slot that has been out of use the longest. One whose last process
// may live comes after the others: the slot says whose the sockets are that left the
// map and are not closed yet.
func (t table) freeSlot(mayLive func(slot uint8) bool) (uint8, bool) {
	var free []uint8
	for s := range int(t.generations) {
		if t.Info[s].Stage == bpf.StageFree {
			free = append(free, uint8(s))
		}
	}
	if len(free) == 0 {
		return 0, false
	}
	slices.SortStableFunc(free, func(a, b uint8) int { return cmp.Compare(t.Slots[a].Number, t.Slots[b].Number) })
	for _, s := range free {
		if t.Slots[s].Number == 0 || !mayLive(s) {
			return s, true
		}
	}
	return free[0], true
}

// Orders after a change. They are pure, so that their rules can be tested apart.

// staged puts a new slot in front of the staged ones.
func staged(slots []uint8, activated int, slot uint8) ([]uint8, int) {
	return slices.Insert(slices.Clone(slots), activated, slot), activated
}

// promoted puts a slot first; what was active becomes second.
func promoted(slots []uint8, activated int, slot uint8) ([]uint8, int) {
	rest, activated := without(slots, activated, slot)
	return slices.Insert(slices.Clone(rest), 0, slot), activated + 1
}

// without takes a slot out.
func without(slots []uint8, activated int, slot uint8) ([]uint8, int) {
	i := slices.Index(slots, slot)
	if i < 0 {
		return slots, activated
	}
	if i < activated {
		activated--
	}
	return slices.Delete(slices.Clone(slots), i, i+1), activated
}

// text reads a fixed-size, zero-padded field.
func text(field []uint8) string {
	if i := slices.Index(field, 0); i >= 0 {
		field = field[:i]
	}
	return string(field)
}

// setText writes one; what does not fit is cut.
func setText(field []uint8, s string) {
	n := copy(field[:len(field)-1], s)
	clear(field[n:])
}
