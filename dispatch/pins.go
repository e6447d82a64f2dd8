// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"instar/bpf"
)

// Names of a group's objects: of the pins in its folder, and of descriptors.
const (
	pinSockets  = "sockets"
	pinControl  = "control"
	pinSecrets  = "secrets"
	pinVerdicts = "verdicts"
	pinFlows    = "flows"
	pinProgram  = "program"
)

// pins are the open objects of a group.
type pins struct {
	sockets, control, secrets, verdicts *ebpf.Map
	// flows is nil where the steering remembers none.
	flows   *ebpf.Map
	program *ebpf.Program
}

// maps lists the maps by the names of their pins.
func (p *pins) maps() map[string]*ebpf.Map {
	m := map[string]*ebpf.Map{
		pinSockets: p.sockets, pinControl: p.control, pinSecrets: p.secrets, pinVerdicts: p.verdicts,
	}
	if p.flows != nil {
		m[pinFlows] = p.flows
	}
	return m
}

func (p *pins) close() error {
	var errs []error
	for _, m := range p.maps() {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	if p.program != nil {
		errs = append(errs, p.program.Close())
	}
	return errors.Join(errs...)
}

// openPins opens the objects of a group. It reads the layout version before it looks
// at anything else.
func openPins(at home) (p *pins, t table, err error) {
	p = &pins{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
			p = nil
		}
	}()
	if p.control, err = at.openMap(pinControl); err != nil {
		return p, t, err
	}
	step("open control map")
	if t, err = openTable(at, p.control); err != nil {
		return p, t, err
	}
	if p.sockets, err = at.openMap(pinSockets); err == nil {
		if p.secrets, err = at.openMap(pinSecrets); err == nil {
			p.verdicts, err = at.openMap(pinVerdicts)
		}
	}
	if err == nil {
		t.generations, t.workers = t.MaxGenerations, t.MaxWorkers
		err = p.check(at, t)
	}
	sizes, remembers := flowSizes[Steering(t.Steering)]
	if err == nil && remembers {
		p.flows, err = at.openMap(pinFlows)
	}
	if err == nil && p.flows != nil {
		if k, v := uintptr(p.flows.KeySize()), uintptr(p.flows.ValueSize()); k != sizes[0] || v != sizes[1] {
			err = damaged(at, "pin %q has keys of %d and values of %d bytes", pinFlows, k, v)
		}
	}
	if err != nil {
		t.unmap()
		return p, t, err
	}
	if p.program, err = at.openProgram(); err != nil {
		t.unmap()
	}
	return p, t, err
}

// flowSizes are those of the keys and values of the flow table, where a steering has one.
var flowSizes = map[Steering][2]uintptr{
	SteeringQUIC:      {8, unsafe.Sizeof(bpf.Flow{})},
	SteeringFlow:      {unsafe.Sizeof(bpf.Peer{}), unsafe.Sizeof(bpf.Tracked{})},
	SteeringWireGuard: {4, unsafe.Sizeof(bpf.Tracked{})},
	SteeringCustom:    {8, unsafe.Sizeof(bpf.Flow{})},
}

// check refuses pins that do not belong together.
func (p *pins) check(at home, t table) error {
	switch _, known := steeringNames[Steering(t.Steering)]; {
	case t.generations < 2 || t.generations > LimitGenerations || t.workers < 1 || t.workers > LimitWorkers:
		return damaged(at, "it says %d generations of %d workers", t.generations, t.workers)
	case !known:
		return damaged(at, "it says %v", Steering(t.Steering))
	case p.sockets.Type() != ebpf.ReusePortSockArray || p.sockets.MaxEntries() != t.generations*t.workers:
		return damaged(at, "pin %q is a %v of %d entries", pinSockets, p.sockets.Type(), p.sockets.MaxEntries())
	}
	return nil
}

func damaged(at home, format string, args ...any) error {
	return fmt.Errorf("open group %s: %w: it is damaged: %s; %s",
		at, ErrLayout, fmt.Sprintf(format, args...), at.remedy())
}

// openTable maps the control map after it has seen that the layout is known.
func openTable(at home, m *ebpf.Map) (table, error) {
	page, err := unix.Mmap(m.FD(), 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return table{}, fmt.Errorf("open group %s: map control map into memory: %w", at, err)
	}
	layout := uint32(page[0]) | uint32(page[1])<<8 | uint32(page[2])<<16 | uint32(page[3])<<24
	if err := unix.Munmap(page); err != nil {
		return table{}, fmt.Errorf("open group %s: unmap control map: %w", at, err)
	}
	if layout != bpf.Layout {
		return table{}, fmt.Errorf("open group %s: %w: it has layout %d and this build knows %d; "+
			"use the build that made the group, or %s",
			at, ErrLayout, layout, bpf.Layout, at.remedy())
	}
	t, err := mapTable(m.FD())
	if err != nil {
		return table{}, fmt.Errorf("open group %s: %w", at, err)
	}
	return t, nil
}
