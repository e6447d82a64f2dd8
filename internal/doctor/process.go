// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/internal/capset"
)

// groupCapabilities are those that making a group needs.
var groupCapabilities = []capset.Cap{capset.BPF, capset.NetAdmin, capset.Perfmon}

// purposes say what a capability is for.
var purposes = map[capset.Cap]string{
	capset.BPF:      "makes maps and loads programs",
	capset.NetAdmin: "loads programs for sockets",
	capset.Perfmon:  "lets a program read what the verifier shows to trusted users alone",
}

func checkCapabilities(x *exam) []Finding {
	missing := x.caps.Missing(groupCapabilities...)
	if len(missing) > 0 && len(x.o.Paths) > 0 && x.allReadable() {
		return one(OK, "", "the group is there: this process needs no capability to use it")
	}
	// A server that joins a prepared group needs none; root without them is a container.
	result := Warning
	if x.euid == 0 {
		result = Problem
	}
	var found []Finding
	for _, c := range missing {
		found = append(found, finding(result, "add it (a unit's AmbientCapabilities=, a container's cap-add), or make the group as root with: "+
			"instar prepare --owner USER --service SERVICE ADDRESS",
			"this process lacks %v, which %s: it cannot make a group", c, purposes[c]))
	}
	return orOK(found, "this process has %s: it can make groups", capset.Names(groupCapabilities))
}

func (x *exam) allReadable() bool {
	for _, g := range x.groups {
		if g.snapshot == nil {
			return false
		}
	}
	return len(x.groups) > 0
}

// statusField reads a line of /proc/thread-self/status.
func statusField(name string) (string, error) {
	b, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		if value, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(value), nil
		}
	}
	return "", fmt.Errorf("/proc/thread-self/status has no %s", name)
}

func checkSeccomp(x *exam) []Finding {
	mode, err := statusField("Seccomp")
	switch {
	case err != nil:
		return one(Unknown, "", "%v", err)
	case mode == "0":
		return one(OK, "", "no filter of system calls is on this process")
	case x.bpf.maps == nil && x.bpf.programs == nil:
		return one(OK, "", "a seccomp filter is on this process, and lets bpf(2) through")
	case len(x.caps.Missing(groupCapabilities...)) > 0:
		return one(Unknown, "run the doctor with "+capset.Names(groupCapabilities), "a seccomp filter is on this process; whether it lets bpf(2) through cannot be told")
	default:
		return one(Warning, "allow bpf(2) in the filter (Docker: a seccomp profile of your own; systemd: SystemCallFilter=bpf)",
			"a seccomp filter is on this process, and bpf(2) does not work: most likely it is the filter")
	}
}

// The initial namespaces of the kernel have fixed inodes (include/linux/proc_ns.h,
// PROC_USER_INIT_INO and PROC_PID_INIT_INO).
const (
	initialUser = "user:[4026531837]"
	initialPID  = "pid:[4026531836]"
)

func checkUserNamespace(*exam) []Finding {
	at, err := os.Readlink("/proc/thread-self/ns/user")
	switch {
	case err != nil:
		return one(Unknown, "", "%v", err)
	case at != initialUser:
		return one(Warning, "make the group outside, with: instar prepare --owner USER --service SERVICE ADDRESS; the server then needs no capability",
			"this process is in a user namespace, where the capabilities for BPF do not count")
	default:
		return one(OK, "", "this process is in the initial user namespace")
	}
}

func checkPIDNamespace(x *exam) []Finding {
	self, err := os.Readlink("/proc/self")
	if err != nil || self != strconv.Itoa(os.Getpid()) {
		return one(Problem, "mount -t proc proc /proc, in this PID namespace",
			"/proc is not that of this PID namespace: the owners of sockets cannot be found, nor whether a generation lives")
	}
	at, err := os.Readlink("/proc/thread-self/ns/pid")
	switch {
	case err != nil:
		return one(Unknown, "", "%v", err)
	case at != initialPID:
		return one(Warning, "run the doctor and other commands where the servers run, or outside of the container",
			"this process is in a PID namespace: processes outside cannot be seen, and generations of theirs have no name")
	case x.unseen > 0:
		return one(OK, "", "this process is in the initial PID namespace; it may not look into %d processes of other users", x.unseen)
	default:
		return one(OK, "", "this process is in the initial PID namespace, and sees all processes")
	}
}

func checkBPFFS(x *exam) []Finding {
	switch {
	case errors.Is(x.listing, dispatch.ErrNoBPFFS):
		return one(Problem, "mount one, with: mount -t bpf bpf /sys/fs/bpf (or whatever --root is on); or do without pins (dispatch.Options.Files)",
			"%s is not on a bpffs: no group can be pinned there", x.o.Root)
	case errors.Is(x.listing, dispatch.ErrPermission):
		return one(Unknown, "run the doctor as root", "%v", x.listing)
	case x.listing != nil:
		return one(Problem, "look at that folder", "%v", x.listing)
	}
	var st unix.Stat_t
	switch err := unix.Stat(x.o.Root, &st); {
	case errors.Is(err, unix.ENOENT):
		return one(OK, "", "%s is on a bpffs; the first group makes it", x.o.Root)
	case err != nil:
		return one(Unknown, "", "%s: %v", x.o.Root, err)
	case st.Uid != 0:
		return one(Problem, "chown root:root "+x.o.Root, "%s belongs to uid %d, who could replace the groups of others", x.o.Root, st.Uid)
	case st.Mode&0o002 != 0:
		return one(Problem, "chmod o-w "+x.o.Root, "everybody may write to %s, and could replace the groups of others", x.o.Root)
	}
	return one(OK, "", "%s is on a bpffs and belongs to root", x.o.Root)
}
