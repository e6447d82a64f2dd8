// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/internal/capset"
	"instar/internal/kernel"
)

// floor is the oldest kernel that the project is for.
var floor = kernel.Version{Major: 5, Minor: 10}

// lacks are what kernels before a version cannot do, as operators meet it. docs/kernels.md
// has all of it.
var lacks = []struct {
	feature string // in internal/kerneltest
	since   kernel.Version
	what    string
}{
	{"memlock", kernel.Version{Major: 5, Minor: 11}, "maps count as locked memory (RLIMIT_MEMLOCK)"},
	{"migrate", kernel.Version{Major: 5, Minor: 14}, "TCP listeners have no generations"},
	{"cookie", kernel.Version{Major: 5, Minor: 14}, "a new network namespace can find the groups of one that is gone"},
	{"unprivileged", kernel.Version{Major: 5, Minor: 19}, "a server without CAP_BPF cannot join where kernel.unprivileged_bpf_disabled is set"},
}

// since is the version from which a feature works.
func since(feature string) kernel.Version {
	for _, l := range lacks {
		if l.feature == feature {
			return l.since
		}
	}
	panic("no feature " + feature)
}

func checkKernel(x *exam) []Finding {
	if !x.kernel.AtLeast(floor) {
		return one(Problem, fmt.Sprintf("run Linux %v or later", floor),
			"Linux %v is running, and %v is the oldest that steers packets", x.kernel, floor)
	}
	var missing []string
	newest := floor
	for _, l := range lacks {
		if !x.kernel.AtLeast(l.since) {
			missing, newest = append(missing, l.what), l.since
		}
	}
	if len(missing) > 0 {
		return one(Warning, fmt.Sprintf("run Linux %v or later where that matters", newest),
			"Linux %v is running: %s", x.kernel, strings.Join(missing, "; "))
	}
	return one(OK, "", "Linux %v is running", x.kernel)
}

// bpfError is why maps and programs cannot be made.
type bpfError struct{ maps, programs error }

// tryBPF makes the smallest of both, and lets go of them.
func tryBPF() (e bpfError) {
	_ = rlimit.RemoveMemlock() // as making a group does; checkMemlock tells where it fails
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		e.maps = errno(err)
	} else {
		_ = m.Close()
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SkReuseport, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()}})
	if err != nil {
		e.programs = errno(err)
	} else {
		_ = p.Close()
	}
	return e
}

// errno is what the kernel said, without a library's advice.
func errno(err error) error {
	if e, ok := errors.AsType[unix.Errno](err); ok {
		return e
	}
	return err
}

func checkBPF(x *exam) []Finding {
	missing := x.caps.Missing(groupCapabilities...)
	switch {
	case x.bpf.maps == nil && x.bpf.programs == nil:
		return one(OK, "", "bpf(2) makes maps and loads programs")
	case len(missing) > 0:
		return one(Unknown, "run the doctor as root, or as the process that makes the group",
			"whether bpf(2) works cannot be told without %s", capset.Names(missing))
	case errors.Is(x.bpf.maps, unix.ENOSYS):
		return one(Problem, "allow bpf(2) in the container's seccomp profile, or run a kernel with CONFIG_BPF_SYSCALL",
			"there is no bpf(2): %v", x.bpf.maps)
	case x.bpf.maps != nil:
		return one(Problem, "allow bpf(2) in the seccomp filter (container runtimes have one) or the security module; in a user "+
			"namespace make the group outside, with: instar prepare --owner USER --service SERVICE ADDRESS",
			"the capabilities are there, and bpf(2) makes no map: %v", x.bpf.maps)
	default:
		return one(Problem, "allow networking programs in the security module, or run a kernel with CONFIG_BPF_SYSCALL, CONFIG_INET and CONFIG_NET",
			"maps can be made, and no program can be loaded: %v", x.bpf.programs)
	}
}

// setting reads a number below /proc/sys.
func setting(name string) (int, error) {
	b, err := os.ReadFile(filepath.Join("/proc/sys", name))
	if err != nil {
		return 0, err
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0, fmt.Errorf("read /proc/sys/%s: %w", name, err)
	}
	return n, nil
}

// unreadable is the finding for a setting that cannot be read. Those of the kernel as a
// whole are only in the initial network namespace.
func unreadable(err error) []Finding {
	if errors.Is(err, os.ErrNotExist) {
		return one(Unknown, "run the doctor in the initial network namespace", "this network namespace, or kernel, does not have the setting: %v", err)
	}
	return one(Unknown, "run the doctor as root", "%v", err)
}

func checkJIT(*exam) []Finding {
	n, err := setting("net/core/bpf_jit_enable")
	switch {
	case err != nil:
		return unreadable(err)
	case n == 0:
		return one(Warning, "sysctl -w net.core.bpf_jit_enable=1", "net.core.bpf_jit_enable is 0: programs are interpreted, and each packet costs several times as much")
	default:
		return one(OK, "", "programs are compiled (net.core.bpf_jit_enable is %d)", n)
	}
}

func checkUnprivileged(x *exam) []Finding {
	n, err := setting("kernel/unprivileged_bpf_disabled")
	switch {
	case errors.Is(err, os.ErrNotExist):
		return one(Unknown, "", "this kernel has no kernel.unprivileged_bpf_disabled")
	case err != nil:
		return unreadable(err)
	case n != 0 && !x.kernel.AtLeast(since("unprivileged")):
		return one(Warning, "give the servers CAP_BPF, run Linux "+since("unprivileged").String()+
			" or later, or set kernel.unprivileged_bpf_disabled to 0 at boot",
			"kernel.unprivileged_bpf_disabled is %d: on Linux %v a server needs CAP_BPF to join, also a prepared group", n, x.kernel)
	default:
		return one(OK, "", "servers without capabilities can join prepared groups (kernel.unprivileged_bpf_disabled is %d)", n)
	}
}

func checkMemlock(x *exam) []Finding {
	if x.kernel.AtLeast(since("memlock")) {
		return one(OK, "", "Linux %v counts maps in control groups, not as locked memory", x.kernel)
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit); err != nil {
		return one(Unknown, "", "read RLIMIT_MEMLOCK: %v", err)
	}
	// Up to the hard limit everybody may raise it.
	if limit.Max == unix.RLIM_INFINITY || x.caps.Allows(capset.SysResource) {
		return one(OK, "", "RLIMIT_MEMLOCK is no limit for this process")
	}
	return one(Problem, "raise RLIMIT_MEMLOCK (a unit's LimitMEMLOCK=infinity), or add CAP_SYS_RESOURCE",
		"Linux %v counts maps and programs as locked memory, of which this process may have %d bytes", x.kernel, limit.Max)
}

// roomForMaps is what a group of default size takes, and some.
const roomForMaps = 16 << 20

func checkCgroup(*exam) []Finding {
	c, err := controlGroups()
	if err != nil {
		return one(Unknown, "", "%v", err)
	}
	dir, limit, usage := c.memory()
	if dir == "" {
		return one(OK, "", "no control group limits the memory of this process")
	}
	free, limited, err := headroom(dir, limit, usage)
	switch {
	case err != nil:
		return one(Unknown, "", "%v", err)
	case limited && free < roomForMaps:
		return one(Problem, "raise the limit (a unit's MemoryMax=, a container's memory limit)",
			"control group %s has room for %d KiB: the maps of a group take up to %d MiB and would not be made", dir, max(free, 0)>>10, roomForMaps>>20)
	default:
		return one(OK, "", "control group %s has memory for maps", dir)
	}
}

func checkCgroup2(x *exam) []Finding {
	c, err := controlGroups()
	switch {
	case err != nil:
		return one(Unknown, "", "%v", err)
	case c.v2 != "":
		return one(OK, "", "control groups of version 2 are mounted, this process's is %s", c.v2)
	}
	const cure = "mount -t cgroup2 cgroup2 /sys/fs/cgroup (or below it, where version 1 is there)"
	var found []Finding
	for _, g := range x.groups {
		if g.snapshot != nil && g.snapshot.FlowLearning == dispatch.LearnAnswered.String() {
			found = append(found, g.finding(Problem, cure, "its flows are learned by the answers of its servers, which need a control group of version 2, and none is mounted here: they cannot join"))
		}
	}
	if len(found) == 0 {
		found = one(Warning, cure, "no control group of version 2 is mounted here: servers cannot learn flows by their answers")
	}
	return found
}

// groupsOf are the control groups of this process: folders, empty where there is none.
type groupsOf struct {
	// memory1 is that of version 1 that its memory counts in.
	memory1, v2 string
}

// memory is the control group that the memory of this process counts in, and the names of
// its files; no folder when there is none.
func (c groupsOf) memory() (dir, limit, usage string) {
	if c.memory1 != "" {
		return c.memory1, "memory.limit_in_bytes", "memory.usage_in_bytes"
	}
	if c.v2 != "" && exists(filepath.Join(c.v2, "memory.max")) {
		return c.v2, "memory.max", "memory.current"
	}
	return "", "", ""
}

// controlGroups finds those of the calling thread.
func controlGroups() (c groupsOf, err error) {
	of, err := os.ReadFile("/proc/thread-self/cgroup")
	if err != nil {
		return c, err
	}
	mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return c, err
	}
	// hierarchy:controllers:path (cgroups(7)); version 2 has no controllers there.
	var v1, v2 string
	for line := range strings.Lines(string(of)) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		switch {
		case len(fields) < 3:
		case fields[1] == "memory":
			v1 = fields[2]
		case fields[0] == "0":
			v2 = fields[2]
		}
	}
	for line := range strings.Lines(string(mounts)) {
		// ID, parent, device, root, mount point, options, ... - type, source, options (proc(5))
		before, after, _ := strings.Cut(line, " - ")
		fields, kind := strings.Fields(before), strings.Fields(after)
		if len(fields) < 5 || len(kind) < 3 {
			continue
		}
		at := func(path string) string {
			rest, below := strings.CutPrefix(path, strings.TrimSuffix(fields[3], "/"))
			if path == "" || !below {
				return ""
			}
			return filepath.Join(fields[4], rest)
		}
		switch {
		case kind[0] == "cgroup" && strings.Contains(","+kind[2]+",", ",memory,"):
			c.memory1 = cmp.Or(c.memory1, at(v1))
		case kind[0] == "cgroup2":
			c.v2 = cmp.Or(c.v2, at(v2))
		}
	}
	return c, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// headroom is what a control group may still use, in bytes, and whether it is limited. The
// limits of those above it are not looked at.
func headroom(dir, limit, usage string) (free int64, limited bool, err error) {
	read := func(name string) (n int64, limited bool, err error) {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return 0, false, err
		}
		text := strings.TrimSpace(string(b))
		if text == "max" {
			return 0, false, nil
		}
		n, err = strconv.ParseInt(text, 10, 64)
		return n, err == nil, err
	}
	most, limited, err := read(limit)
	if err != nil || !limited {
		return 0, false, err
	}
	used, _, err := read(usage)
	return most - used, true, err
}
