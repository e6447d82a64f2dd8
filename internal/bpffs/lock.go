// SPDX-License-Identifier: Apache-2.0

package bpffs

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Lock is a lock on a folder, or a file. It belongs to the open folder, not to the
// process or thread: it ends with Unlock, or with the process. No other
// program sees more of it than flock(2) does.
type Lock struct {
	dir *os.File
}

// Holder is a process that holds a lock.
type Holder struct {
	PID     int
	Command string // as in /proc/PID/comm
}

func (h Holder) String() string { return fmt.Sprintf("%s (pid %d)", h.Command, h.PID) }

// BusyError says that a lock was not had in time.
type BusyError struct {
	Dir string
	// Holders are those that held the lock, as far as this process can see
	// them. It is empty when they are in another PID namespace.
	Holders []Holder
	// Err is the context's.
	Err error
}

func (e *BusyError) Error() string {
	holders := "a process of another PID namespace"
	if len(e.Holders) > 0 {
		list := make([]string, len(e.Holders))
		for i, h := range e.Holders {
			list[i] = h.String()
		}
		holders = strings.Join(list, ", ")
	}
	return fmt.Sprintf("lock %s: %v: held by %s; try again when it is done", e.Dir, e.Err, holders)
}

// Unwrap returns the error of the context.
func (e *BusyError) Unwrap() error { return e.Err }

// pollLimit is the longest pause between two attempts to get a lock. flock(2)
// can wait by itself, but only a signal would end that.
const pollLimit = 20 * time.Millisecond

// Acquire locks the folder (or file): exclusively for a writer, shared for readers. It
// waits until ctx ends, and then returns a *BusyError. What it locked is the
// folder that has the name at that moment: one that was removed, or replaced
// by a rename while it waited, is not locked.
//
// The caller needs the right to read the folder.
func Acquire(ctx context.Context, dir string, exclusive bool) (*Lock, error) {
	how := unix.LOCK_SH
	if exclusive {
		how = unix.LOCK_EX
	}
	for pause := 200 * time.Microsecond; ; pause = min(2*pause, pollLimit) {
		l, err := try(dir, how)
		if err != nil {
			return nil, fmt.Errorf("lock folder: %w", err)
		}
		if l != nil {
			return l, nil
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, &BusyError{Dir: dir, Holders: holders(dir), Err: context.Cause(ctx)}
		}
	}
}

// try returns nil and no error when another one holds the lock.
func try(dir string, how int) (_ *Lock, err error) {
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	locked := false
	defer func() {
		if !locked {
			err = errors.Join(err, f.Close())
		}
	}()
	switch err := flock(f, how|unix.LOCK_NB); {
	case errors.Is(err, unix.EWOULDBLOCK):
		return nil, nil
	case err != nil:
		return nil, &os.PathError{Op: "flock", Path: dir, Err: err}
	}
	// Whoever held the lock may have removed the folder, or put another one in
	// its place.
	mine, err := f.Stat()
	if err != nil {
		return nil, err
	}
	current, err := os.Stat(dir)
	if err != nil {
		return nil, err
	}
	if !os.SameFile(mine, current) {
		return nil, nil
	}
	locked = true
	return &Lock{dir: f}, nil
}

func flock(f *os.File, how int) error {
	for {
		if err := unix.Flock(int(f.Fd()), how); err != unix.EINTR {
			return err
		}
	}
}

// Unlock gives the lock up. A Lock is unlocked once; later calls return
// os.ErrClosed.
func (l *Lock) Unlock() error {
	// Closing is not enough: a process that is being started has a duplicate of
	// the descriptor until it executes.
	if err := flock(l.dir, unix.LOCK_UN); err != nil {
		if errors.Is(err, unix.EBADF) {
			return fmt.Errorf("unlock folder: %w", os.ErrClosed)
		}
		return errors.Join(fmt.Errorf("unlock folder %s: %w", l.dir.Name(), err), l.dir.Close())
	}
	return l.dir.Close()
}

// holders finds who has a lock on the folder, by /proc/locks.
func holders(dir string) []Holder {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return nil
	}
	locks, err := os.ReadFile("/proc/locks")
	if err != nil {
		return nil
	}
	var list []Holder
	for _, pid := range lockers(locks, unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino) {
		command := "?"
		if comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); err == nil {
			command = strings.TrimSuffix(string(comm), "\n")
		}
		list = append(list, Holder{pid, command})
	}
	return list
}

// lockers reads /proc/locks, whose lines look like
//
//	1: FLOCK  ADVISORY  WRITE 1234 00:1d:5678 0 EOF
//
// with the process, and device and inode of the file. One with an arrow as its
// second word waits. A process of another PID namespace is 0 or left out.
func lockers(locks []byte, major, minor uint32, inode uint64) []int {
	file := fmt.Sprintf("%02x:%02x:%d", major, minor, inode)
	var pids []int
	lines := bufio.NewScanner(bytes.NewReader(locks))
	for lines.Scan() {
		word := strings.Fields(lines.Text())
		if len(word) < 6 || word[1] != "FLOCK" || word[5] != file {
			continue
		}
		if pid, err := strconv.Atoi(word[4]); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	return pids
}
