// SPDX-License-Identifier: Apache-2.0

package systemd

import (
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// The variables of sd_listen_fds(3).
const (
	listenPID     = "LISTEN_PID"
	listenPIDFDID = "LISTEN_PIDFDID" // since systemd 258
	listenFDs     = "LISTEN_FDS"
	listenNames   = "LISTEN_FDNAMES"
)

const (
	// firstFD is SD_LISTEN_FDS_START.
	firstFD = 3

	// NameUnknown is the name of descriptors when the manager gave none.
	NameUnknown = "unknown"
	// NameStored is the name of those that were stored without one.
	NameStored = "stored"
)

// Descriptor is one that the manager passed to this process.
type Descriptor struct {
	// Name is the FileDescriptorName= of a socket unit, which has all sockets of
	// the unit, by default the unit's name; or the name it was stored by.
	Name string
	// File is the caller's. It is close-on-exec and, if it is a socket,
	// non-blocking.
	File *os.File
}

// Inherited takes over the descriptors that the manager passed to this process,
// by socket activation or out of its store. There are none when LISTEN_PID is
// not set or names another process. It returns an error when the variables
// contradict each other or the descriptors, and then takes none.
//
// In each case the variables are unset, so that no other process believes them
// and a second call returns nothing. getenv and unset are usually os.Getenv and
// os.Unsetenv. It has to be called before anybody else sets close-on-exec on
// inherited descriptors: one that has it is taken for a file that this process
// opened, and refused.
//
// The manager and the generations before have the same open files: an option
// that is set on a socket is set for all of them. Nobody may call shutdown(2).
func Inherited(getenv func(string) string, unset func(string) error) ([]Descriptor, error) {
	pid, id, count, list := getenv(listenPID), getenv(listenPIDFDID), getenv(listenFDs), getenv(listenNames)
	var failed error
	for _, variable := range []string{listenPID, listenPIDFDID, listenFDs, listenNames} {
		if err := unset(variable); err != nil {
			failed = errors.Join(failed, fmt.Errorf("unset %s: %w", variable, err))
		}
	}
	if failed != nil {
		return nil, failed
	}
	if ours, err := meansUs(pid, id); err != nil || !ours {
		return nil, err
	}
	n, err := parseCount(count)
	if err != nil {
		return nil, err
	}
	// Before the names, of which there might be billions.
	if err := claim(n); err != nil {
		return nil, err
	}
	names, err := parseNames(list, n)
	if err != nil {
		return nil, err
	}
	var all []Descriptor
	for i, name := range names {
		all = append(all, Descriptor{name, os.NewFile(uintptr(firstFD+i), name)})
	}
	return all, nil
}

// meansUs reports whether the variables are for this process.
func meansUs(pid, id string) (bool, error) {
	if pid == "" {
		return false, nil
	}
	number, err := strconv.Atoi(pid)
	if err != nil || number <= 0 {
		return false, fmt.Errorf("read %s=%q: not the number of a process; correct or unset the variable", listenPID, pid)
	}
	if number != os.Getpid() {
		return false, nil
	}
	if id == "" {
		return true, nil
	}
	// Numbers of processes come around again; this one does not.
	want, err := strconv.ParseUint(id, 10, 64)
	if err != nil {
		return false, fmt.Errorf("read %s=%q: not a number; correct or unset the variable", listenPIDFDID, id)
	}
	own, known := pidfdID()
	return !known || own == want, nil
}

// pidfdID returns the number that no other process has until the machine
// starts again. Linux has it since 6.9.
func pidfdID() (id uint64, known bool) {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return 0, false
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	defer f.Close()
	var (
		fs unix.Statfs_t
		st unix.Stat_t
	)
	if unix.Fstatfs(fd, &fs) != nil || fs.Type != unix.PID_FS_MAGIC || unix.Fstat(fd, &st) != nil {
		return 0, false // before 6.9 all of them were one inode
	}
	return st.Ino, true
}

// parseCount returns how many descriptors there are; no variable says none.
func parseCount(count string) (int, error) {
	if count == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(count)
	if err != nil || n < 0 || n > math.MaxInt32-firstFD {
		return 0, fmt.Errorf("read %s=%q: not a number of descriptors; correct or unset the variable", listenFDs, count)
	}
	return n, nil
}

// parseNames returns a name for each of n descriptors.
func parseNames(list string, n int) ([]string, error) {
	if list == "" { // the manager is older than 227, or someone else
		return slices.Repeat([]string{NameUnknown}, n), nil
	}
	names := strings.Split(list, ":")
	if len(names) != n {
		return nil, fmt.Errorf("read %s=%q: it names %d descriptors, but %s=%d; correct them or unset %s",
			listenNames, list, len(names), listenFDs, n, listenNames)
	}
	return names, nil
}

// claim makes sure that the n descriptors were inherited and sets close-on-exec
// on them, and on sockets non-blocking: the manager passes those blocking where
// the unit says nothing.
func claim(n int) error {
	for fd := firstFD; fd < firstFD+n; fd++ {
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		switch {
		case errors.Is(err, unix.EBADF):
			return fmt.Errorf("take %d descriptors from %d on, as %s says: %d is not open; start the process by its unit, or correct the variable",
				n, firstFD, listenFDs, fd)
		case err != nil:
			return fmt.Errorf("take descriptor %d: %w", fd, err)
		case flags&unix.FD_CLOEXEC != 0:
			// It would not have survived the execution of this program.
			return fmt.Errorf("take %d descriptors from %d on, as %s says: %d was not inherited, this process opened it itself; correct the variable",
				n, firstFD, listenFDs, fd)
		}
		// Whatever is wrong with a later one, no child shall have this one.
		unix.CloseOnExec(fd)
	}
	for fd := firstFD; fd < firstFD+n; fd++ {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			return fmt.Errorf("take descriptor %d: %w", fd, err)
		}
		if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
			continue
		}
		if err := unix.SetNonblock(fd, true); err != nil {
			return fmt.Errorf("make descriptor %d non-blocking: %w", fd, err)
		}
	}
	return nil
}
