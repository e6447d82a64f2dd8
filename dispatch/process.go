// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"instar/bpf"
)

// processStart is when a process started, in ticks since boot, 0 when it cannot be
// seen. With the pid it names a process for good: /proc/PID/stat, field 22.
func processStart(pid int) uint64 {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0
	}
	// The command, in parentheses, may contain anything.
	s := string(b)
	fields := strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
	if len(fields) < 20 {
		return 0
	}
	n, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// lives reports whether the process of a generation lives. One of another PID namespace
// is not found.
func lives(info *bpf.Info) bool {
	return info.PidNamespace == pidNamespace() && info.PidStart != 0 && processStart(int(info.Pid)) == info.PidStart
}

// hidden reports whether this process may not see the descriptors of another one.
func hidden(pid uint32) bool {
	_, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return errors.Is(err, fs.ErrPermission)
}

// command is the name of a process, "" when it is not the one that started then.
func command(pid int, start uint64) string {
	if start == 0 || processStart(pid) != start {
		return ""
	}
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// pidNamespace is the inode of this process's PID namespace.
var pidNamespace = sync.OnceValue(func() uint32 {
	var st unix.Stat_t
	if unix.Stat("/proc/self/ns/pid", &st) != nil {
		return 0
	}
	return uint32(st.Ino)
})
