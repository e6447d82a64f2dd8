// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"

	"instar/dispatch"
	"instar/internal/capset"
	"instar/internal/kernel"
	"instar/internal/sockdiag"
)

// Result is what a check found.
type Result string

const (
	// OK is fine.
	OK Result = "ok"
	// Warning works, and can lose packets or refuse an upgrade later.
	Warning Result = "warning"
	// Problem does not work.
	Problem Result = "problem"
	// Unknown was not looked at; the reason says why.
	Unknown Result = "not looked at"
)

// Finding is one sentence of the doctor's.
type Finding struct {
	// Check is the name of the check.
	Check  string `json:"check"`
	Result Result `json:"result"`
	// Group is the group that it is about, as a listing names it; empty for the machine.
	Group string `json:"group,omitempty"`
	// Reason says what was found.
	Reason string `json:"reason"`
	// Cure says what to do; empty where nothing is to be done.
	Cure string `json:"cure,omitempty"`
}

// Options say what to look at. The zero value looks at the machine and all groups.
type Options struct {
	// Root is the folder below which groups are pinned. Default dispatch.DefaultRoot.
	Root string
	// Paths are the pin folders of the groups to look at. Default: all below Root.
	Paths []string
	// Address is one that no group has yet, instead of groups: Network, Address and Device
	// count. Default: none.
	Address *dispatch.Options
	// Sockets are control sockets of servers whose handovers to look at. Default: none.
	Sockets []string
}

// check is one thing to look at.
type check struct {
	name string
	// about says what it looks at, for the help.
	about string
	run   func(*exam) []Finding
}

var checks = []check{
	{"kernel", "Linux is new enough, and what it lacks", checkKernel},
	{"bpf", "bpf(2) makes maps and loads programs", checkBPF},
	{"jit", "programs are compiled, not interpreted", checkJIT},
	{"unprivileged", "servers without capabilities can join (unprivileged_bpf_disabled)", checkUnprivileged},
	{"capabilities", "this process may make a group", checkCapabilities},
	{"memlock", "RLIMIT_MEMLOCK, where the kernel counts it", checkMemlock},
	{"cgroup", "the control group has memory for maps", checkCgroup},
	{"cgroup2", "control groups of version 2, for flows that are learned by answers", checkCgroup2},
	{"seccomp", "a filter of system calls", checkSeccomp},
	{"userns", "the user namespace", checkUserNamespace},
	{"pidns", "the PID namespace and /proc", checkPIDNamespace},
	{"bpffs", "a bpffs is mounted at the root, and who owns it", checkBPFFS},
	{"groups", "the groups can be read, and have a process that serves", checkGroups},
	{"rmem", "net.core.rmem_max: bursts fit into the receive buffers", checkReceiveBuffers},
	{"somaxconn", "net.core.somaxconn: accept queues are long enough", checkAcceptQueues},
	{"migrate", "net.ipv4.tcp_migrate_req, for listeners without a group", checkMigrate},
	{"ports", "net.ipv4.ip_unprivileged_port_start, and who may bind", checkPorts},
	{"conntrack", "the kernel tracks connections in front of the sockets", checkConntrack},
	{"owner", "sockets and pins of a group belong to one user", checkOwners},
	{"strangers", "sockets at a group's address that it does not have", checkStrangers},
	{"dualstack", "sockets of the other IP family that take part of the traffic", checkDualStack},
	{"reuseaddr", "SO_REUSEADDR, which lets others take over a UDP address", checkReuseAddr},
	{"gro", "receive offload that joins packets before the group sees them", checkOffload},
	{"handover", "listeners of a server that no successor gets (with control sockets)", checkHandovers},
}

// Checks lists the names of the checks and what they look at, in the order of their
// findings.
func Checks() (names, about []string) {
	for _, c := range checks {
		names, about = append(names, c.name), append(about, c.about)
	}
	return names, about
}

// Examine looks at everything. Each check has at least one finding.
func Examine(ctx context.Context, o Options) []Finding {
	if o.Root == "" {
		o.Root = dispatch.DefaultRoot
	}
	x := newExam(ctx, o)
	var all []Finding
	for _, c := range checks {
		found := c.run(x)
		for i := range found {
			found[i].Check = c.name
		}
		all = append(all, found...)
	}
	return all
}

// exam is what several checks need.
type exam struct {
	ctx    context.Context
	o      Options
	kernel kernel.Version
	caps   capset.Set
	euid   int
	// bpf is why bpf(2) does not work.
	bpf bpfError

	groups  []group
	listing error
	// holders are who has which socket, without the processes that were not to be seen.
	holders map[uint32][]sockdiag.Descriptor
	unseen  int
}

// group is one to look at, or an address without a group.
type group struct {
	name, path string
	snapshot   *dispatch.Snapshot // nil for an address
	uid        int                // the pins' owner
	sockets    []dispatch.Socket
	err        error // why the sockets could not be listed
}

func (g *group) network() string { return g.snapshot.Network }

func newExam(ctx context.Context, o Options) *exam {
	x := &exam{ctx: ctx, o: o, euid: os.Geteuid()}
	x.kernel, _ = kernel.Current() // 0.0, which checkKernel tells
	x.caps, _ = capset.Effective() // none
	x.bpf = tryBPF()
	x.readGroups()
	// Without /proc checkPIDNamespace says so.
	x.holders, x.unseen, _ = sockdiag.Descriptors()
	return x
}

func one(r Result, cure, format string, args ...any) []Finding {
	return []Finding{finding(r, cure, format, args...)}
}

func finding(r Result, cure, format string, args ...any) Finding {
	return Finding{Result: r, Reason: fmt.Sprintf(format, args...), Cure: cure}
}

func (g *group) finding(r Result, cure, format string, args ...any) Finding {
	f := finding(r, cure, format, args...)
	f.Group = g.name
	return f
}

// orOK is what a check found, or that there was nothing to find.
func orOK(found []Finding, format string, args ...any) []Finding {
	if len(found) > 0 {
		return found
	}
	return one(OK, "", format, args...)
}

// ofGroups is orOK of a check that looks at groups: those that it could not look at are not
// fine.
func (x *exam) ofGroups(found []Finding, format string, args ...any) []Finding {
	unseen := 0
	for _, g := range x.groups {
		if g.err != nil {
			unseen++
		}
	}
	switch {
	case len(found) > 0:
		return found
	case unseen > 0:
		return one(Unknown, "do what the check \"groups\" says", "%d of %d groups", unseen, len(x.groups))
	case errors.Is(x.listing, dispatch.ErrPermission) && len(x.groups) == 0:
		return one(Unknown, "run the doctor as root", "the groups could not be listed")
	}
	return one(OK, "", format, args...)
}

// why is an error on one line.
func why(err error) string {
	if joined, ok := err.(interface{ Unwrap() []error }); ok && len(joined.Unwrap()) == 1 {
		err = joined.Unwrap()[0]
	}
	return err.Error()
}

// isAny reports whether err is one of targets.
func isAny(err error, targets ...error) bool {
	for _, t := range targets {
		if errors.Is(err, t) {
			return true
		}
	}
	return false
}
