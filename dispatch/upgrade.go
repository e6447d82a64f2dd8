// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"instar/bpf"
	"instar/internal/capset"
	"instar/internal/rawconn"
)

// UpgradeProgram replaces the kernel program of the group, while it carries traffic, by
// the one of this build. The maps stay; the kernel swaps the program between two
// packets. It has to run in the group's network namespace, with the rights to load a
// program, and as the group's owner or, with CAP_CHOWN, as another user. When the group
// has that program already nothing changes and upgraded is false.
func (g *Group) UpgradeProgram() (upgraded bool, err error) {
	err = g.update(func() error {
		if text(g.table.Program[:]) == bpf.Build(g.table.Steering, g.dissector.forLinking()) {
			return nil
		}
		if Steering(g.table.Steering) == SteeringCustom && g.dissector == nil {
			return fmt.Errorf("%w: its dissector is its server's; let the server upgrade it", ErrOptions)
		}
		upgraded = true
		_, _, err := g.swapProgram(0)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("upgrade program of %s: %w", g.key, err)
	}
	return upgraded, nil
}

// swapProgram makes a program of this build the group's. With room for a trace it tells of
// packets in the first map that is returned, and the second one is bpf.MapTraced.
func (g *Group) swapProgram(room uint32) (events, traced *ebpf.Map, err error) {
	spec, name, err := bpf.Spec(bpf.Config{
		Steering:       g.table.Steering,
		MaxGenerations: int(g.table.generations),
		MaxWorkers:     int(g.table.workers),
		FlowEntries:    int(g.table.FlowEntries),
		Prefix:         int(g.table.Prefix),
		FlowTimeout:    g.table.FlowTimeout,
		FlowLearning:   g.table.FlowLearning,
		Dissector:      g.dissector.forLinking(),
		Trace:          room,
	})
	if err != nil {
		return nil, nil, err
	}
	replace := map[string]*ebpf.Map{
		bpf.MapSockets: g.pins.sockets, bpf.MapVerdicts: g.pins.verdicts,
		bpf.MapControl: g.pins.control, bpf.MapSecrets: g.pins.secrets,
	}
	if g.pins.flows != nil {
		replace[bpf.MapFlows] = g.pins.flows
	}
	c, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: replace})
	if missing := missingCapabilities(); err != nil && len(missing) > 0 {
		return nil, nil, fmt.Errorf("%w: this process lacks %s, which loading a program takes; run it as root", ErrPermission, capset.Names(missing))
	}
	if err != nil {
		return nil, nil, explainLoad(err, Steering(g.table.Steering))
	}
	program := c.DetachProgram(name)
	if room > 0 {
		events, traced = c.DetachMap(bpf.MapEvents), c.DetachMap(bpf.MapTraced)
	}
	c.Close()
	defer func() {
		if err != nil && room > 0 {
			err = errors.Join(err, events.Close(), traced.Close())
		}
	}()
	old := g.pins.program
	err = g.home.replaceProgram(program, func() error {
		g.pins.program = program
		if err := g.attachLive(); err != nil {
			g.pins.program = old
			return err
		}
		step("attach")
		return nil
	})
	if g.pins.program == old {
		return nil, nil, errors.Join(err, program.Close())
	}
	err = errors.Join(err, old.Close())
	if err == nil {
		build := bpf.Build(g.table.Steering, g.dissector.forLinking())
		if room > 0 {
			build += tracedSuffix
		}
		setText(g.table.Program[:], build)
	}
	return events, traced, err
}

// tracedSuffix is behind the build of a program that tells of packets.
const tracedSuffix = "+trace"

// reloadProgram takes the group's program as it is now.
func (g *Group) reloadProgram() error {
	old := g.pins.program
	program, err := g.home.refresh(old)
	if err != nil || program == old {
		return err
	}
	g.pins.program = program
	return old.Close()
}

func chownLike(path, like string) error {
	uid, gid, err := owners(like)
	if err != nil {
		return err
	}
	return os.Lchown(path, uid, gid) // the folder's owner may have put a link there
}

func owners(path string) (uid, gid int, err error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, 0, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return int(st.Uid), int(st.Gid), nil
}

// attachLive attaches the program to the sockets of the address, through a socket that
// joins them for the purpose. The data plane never chooses it, for it is not in the map.
// Without any socket there is nothing to attach to.
func (g *Group) attachLive() error {
	slots, _ := g.table.order()
	if len(slots) == 0 {
		return nil
	}
	here, err := namespaceName()
	if err != nil {
		return err
	}
	if here != g.namespace {
		return fmt.Errorf("%w: the group is of another network namespace; run it there (nsenter --net)", ErrMismatch)
	}
	owner, err := g.home.owner()
	if err != nil {
		return err
	}
	conn, err := g.bind(func(fd int) error {
		if owner == os.Geteuid() {
			return nil
		}
		// The kernel lets only sockets of one user share an address.
		return os.NewSyscallError("fchown socket", unix.Fchown(fd, owner, -1))
	})
	if err != nil {
		return g.explainBind(err)
	}
	return errors.Join(rawconn.Of(conn, g.attach), closeSockets(conn))
}

// liveSockets counts the sockets of a group's map, whatever the layout of the rest.
func liveSockets(dir string) (int, error) {
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, pinSockets), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		if p, e := ebpf.LoadPinnedProgram(filepath.Join(dir, pinSockets), nil); e == nil {
			return 0, p.Close() // the pin is damaged, and no sockets are in a program
		}
		return 0, fmt.Errorf("open socket map: %w", err)
	}
	if m.Type() != ebpf.ReusePortSockArray {
		return 0, m.Close()
	}
	live := 0
	for i := range min(m.MaxEntries(), math.MaxUint16+1) {
		var cookie uint64
		if m.Lookup(i, &cookie) == nil {
			live++
		}
	}
	return live, m.Close()
}
