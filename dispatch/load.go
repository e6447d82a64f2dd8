// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"instar/bpf"
	"instar/internal/capset"
	"instar/internal/kernel"
)

// oldestKernel has what the data plane needs: global functions, mapped arrays,
// bounded loops and the jiffies helper; it is the oldest one that is tested.
var oldestKernel = kernel.Version{Major: 5, Minor: 10}

// migrates is the first with SEC("sk_reuseport/migrate").
var migrates = kernel.Version{Major: 5, Minor: 14}

// ownMemlock accounts the memory of maps and programs to the control group: before
// it, RLIMIT_MEMLOCK bounded it.
var ownMemlock = kernel.Version{Major: 5, Minor: 11}

// load creates the maps and loads the program.
func load(o Options, prefix int) (*pins, error) {
	spec, name, err := bpf.Spec(bpf.Config{
		Steering:       uint32(o.Steering),
		MaxGenerations: o.MaxGenerations,
		MaxWorkers:     o.Workers,
		FlowEntries:    o.FlowEntries,
		Prefix:         prefix,
		FlowTimeout:    uint16(o.FlowTimeout / time.Second),
		FlowLearning:   uint8(o.FlowLearning),
		Dissector:      o.Dissector.forLinking(),
	})
	if errors.Is(err, bpf.ErrDissector) {
		err = fmt.Errorf("%w: Dissector: %w", ErrOptions, err)
	}
	if err != nil {
		return nil, fmt.Errorf("create group: %w", err)
	}
	// Raises the limit only on kernels that need it (before ownMemlock). Where that
	// fails, loading says so.
	_ = rlimit.RemoveMemlock()
	c, err := ebpf.NewCollection(spec)
	if err != nil {
		return nil, fmt.Errorf("create group: %w", explainLoad(err, o.Steering))
	}
	p := &pins{
		sockets:  c.DetachMap(bpf.MapSockets),
		control:  c.DetachMap(bpf.MapControl),
		secrets:  c.DetachMap(bpf.MapSecrets),
		verdicts: c.DetachMap(bpf.MapVerdicts),
		program:  c.DetachProgram(name),
	}
	if spec.Maps[bpf.MapFlows] != nil {
		p.flows = c.DetachMap(bpf.MapFlows)
	}
	c.Close()
	return p, nil
}

// explainLoad finds out why the kernel refused the data plane. It tries one
// thing at a time, since the kernel answers most of them with a bare EPERM.
func explainLoad(err error, s Steering) error {
	if e := lacksCapabilities(); e != nil {
		return e
	}
	if v, e := kernel.Current(); e == nil && !v.AtLeast(oldestKernel) {
		return fmt.Errorf("%w: Linux %v is running and %v is the oldest that can (%w)",
			ErrNotSupported, v, oldestKernel, answer(err))
	} else if e == nil && s == SteeringTCP && !v.AtLeast(migrates) {
		return fmt.Errorf("%w: Linux %v is running and %v is the oldest that moves connections from a TCP listener that closes "+
			"to another one (%w); pass the listener itself on instead, with package handover", ErrNotSupported, v, migrates, answer(err))
	}
	if errors.Is(err, unix.EPERM) {
		if e := lacksMemory(answer(err)); e != nil {
			return e
		}
		if e := features.HaveMapType(ebpf.Array); e != nil {
			return fmt.Errorf("%w: the capabilities are there but bpf(2) is refused (%w); a seccomp filter "+
				"(container runtimes have one), a security module, or a user namespace without a BPF token forbids it: "+
				"allow bpf(2) there, or make the group outside with: instar prepare --owner USER --service SERVICE ADDRESS",
				ErrPermission, answer(e))
		}
		return fmt.Errorf("%w: maps can be created but not the program (%w); a security module forbids networking programs: allow them",
			ErrPermission, answer(err))
	}
	return fmt.Errorf("load data plane: %w", err)
}

// answer is what the kernel said, without the library's advice and the verifier's
// log: where a right is missing both lead astray.
func answer(err error) error {
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		return errno
	}
	return err
}

// lacksMemory tells of the limit that bounds maps and programs before ownMemlock, where
// this process could not raise it.
func lacksMemory(cause error) error {
	var limit unix.Rlimit
	v, err := kernel.Current()
	bounded := err == nil && !v.AtLeast(ownMemlock) &&
		unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit) == nil && limit.Cur != unix.RLIM_INFINITY
	if !bounded {
		return nil
	}
	return fmt.Errorf("%w: Linux %v counts maps and programs as locked memory, of which this process may have %d bytes (%w); "+
		"raise RLIMIT_MEMLOCK (a unit's LimitMEMLOCK=infinity), or add CAP_SYS_RESOURCE", ErrPermission, v, limit.Cur, cause)
}

// missingCapabilities are those that this process lacks for loading programs.
func missingCapabilities() []capset.Cap {
	set, err := capset.Effective()
	if err != nil {
		set = ^capset.Set(0) // the kernel will say
	}
	return set.Missing(capset.BPF, capset.NetAdmin, capset.Perfmon)
}

// lacksCapabilities names what this process lacks for making a group.
func lacksCapabilities() error {
	missing := missingCapabilities()
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("%w: this process lacks %s; add them (a unit's AmbientCapabilities=, a container's "+
		"cap-add), or make the group beforehand as root with: instar prepare --owner USER --service SERVICE ADDRESS",
		ErrPermission, capset.Names(missing))
}

// initialise fills the maps of a new group before anybody can see them.
func initialise(p *pins, o Options, k key, prefix int) error {
	t, err := mapTable(p.control.FD())
	if err != nil {
		return fmt.Errorf("create group: %w", err)
	}
	defer t.unmap()
	t.Layout = bpf.Layout
	t.Steering = uint32(o.Steering)
	t.MaxGenerations = uint32(o.MaxGenerations)
	t.MaxWorkers = uint32(o.Workers)
	if _, remembers := flowSizes[o.Steering]; remembers {
		t.FlowEntries = uint32(o.FlowEntries)
	}
	t.Prefix = uint32(prefix)
	if o.Steering == SteeringFlow || o.Steering == SteeringWireGuard {
		t.FlowTimeout = uint16(o.FlowTimeout / time.Second)
	}
	if o.Steering == SteeringFlow {
		t.FlowLearning = uint8(o.FlowLearning)
	}
	t.NextNumber = 1
	setText(t.Service[:], o.Service)
	setText(t.Network[:], k.network)
	setText(t.Address[:], k.addr.String())
	setText(t.Device[:], k.device)
	setText(t.Program[:], bpf.Build(uint32(o.Steering), o.Dissector.forLinking()))

	var secrets bpf.Secrets
	if _, err := rand.Read(secrets.Master[:]); err != nil {
		return fmt.Errorf("create group: make secrets: %w", err)
	}
	if err := deriveKeys(&secrets); err != nil {
		return fmt.Errorf("create group: %w", err)
	}
	if err := p.secrets.Put(uint32(0), &secrets); err != nil {
		return fmt.Errorf("create group: store secrets: %w", err)
	}
	return nil
}
