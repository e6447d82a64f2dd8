// SPDX-License-Identifier: Apache-2.0

// Package capset wraps capget(2): which capabilities the calling thread has,
// and the names of those that it lacks.
package capset

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Cap is a capability's number in linux/capability.h.
type Cap int

// The capabilities that this module talks about. Others are Cap(unix.CAP_X).
const (
	Chown          = Cap(unix.CAP_CHOWN)
	DACOverride    = Cap(unix.CAP_DAC_OVERRIDE)
	Kill           = Cap(unix.CAP_KILL)
	SetGID         = Cap(unix.CAP_SETGID)
	SetUID         = Cap(unix.CAP_SETUID)
	NetBindService = Cap(unix.CAP_NET_BIND_SERVICE)
	NetAdmin       = Cap(unix.CAP_NET_ADMIN)
	NetRaw         = Cap(unix.CAP_NET_RAW)
	SysPtrace      = Cap(unix.CAP_SYS_PTRACE)
	SysAdmin       = Cap(unix.CAP_SYS_ADMIN)
	SysResource    = Cap(unix.CAP_SYS_RESOURCE)
	Perfmon        = Cap(unix.CAP_PERFMON)
	BPF            = Cap(unix.CAP_BPF)
)

// Last is the highest capability that this package can name.
const Last = Cap(unix.CAP_LAST_CAP)

// names is indexed by number.
var names = [Last + 1]string{
	"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL",
	"SETGID", "SETUID", "SETPCAP", "LINUX_IMMUTABLE", "NET_BIND_SERVICE",
	"NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
	"SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT",
	"SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME",
	"SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL",
	"SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM",
	"BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF", "CHECKPOINT_RESTORE",
}

// String is the name as capabilities(7) has it: CAP_NET_ADMIN.
func (c Cap) String() string {
	if c < 0 || c > Last {
		return "capability " + strconv.Itoa(int(c))
	}
	return "CAP_" + names[c]
}

// Set holds capabilities, one bit each.
type Set uint64

// Effective is the set that the kernel checks for the calling thread. The
// threads of a Go program have the same one, unless a program changed it for
// one thread only.
//
// The set counts in the thread's user namespace. In a namespace other than the
// initial one the kernel may still refuse what the set seems to allow.
func Effective() (Set, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return 0, fmt.Errorf("read effective capabilities: %w", err)
	}
	return Set(data[0].Effective) | Set(data[1].Effective)<<32, nil
}

// Of is the set of the given capabilities.
func Of(caps ...Cap) Set {
	var s Set
	for _, c := range caps {
		s |= 1 << c
	}
	return s
}

// Has reports whether c itself is in the set.
func (s Set) Has(c Cap) bool { return c >= 0 && c < 64 && s&(1<<c) != 0 }

// Allows reports whether the set passes a kernel check for c. CAP_SYS_ADMIN
// passes the checks for CAP_BPF, CAP_PERFMON and CAP_CHECKPOINT_RESTORE, which
// were split off it (linux/capability.h: bpf_capable, perfmon_capable,
// checkpoint_restore_ns_capable).
func (s Set) Allows(c Cap) bool {
	switch c {
	case BPF, Perfmon, Cap(unix.CAP_CHECKPOINT_RESTORE):
		return s.Has(c) || s.Has(SysAdmin)
	default:
		return s.Has(c)
	}
}

// Missing is the part of want that the set does not allow, in the order of
// want, each one once.
func (s Set) Missing(want ...Cap) []Cap {
	var missing []Cap
	for _, c := range want {
		if !s.Allows(c) && !slices.Contains(missing, c) {
			missing = append(missing, c)
		}
	}
	return missing
}

// Names lists caps for a message: "CAP_BPF, CAP_NET_ADMIN".
func Names(caps []Cap) string {
	list := make([]string, len(caps))
	for i, c := range caps {
		list[i] = c.String()
	}
	return strings.Join(list, ", ")
}
