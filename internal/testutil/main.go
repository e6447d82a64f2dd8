// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// hooked is set in a test binary that calls Main. Without it a child would run
// the tests again, and start children of its own.
var hooked bool

// Main is the whole of a TestMain. It runs the function that this process was
// started for, when it is a child, and the tests otherwise. After tests that
// passed it looks for goroutines and descriptors that were not there before,
// and fails when there are any. It does not return.
//
// The options go to goleak.
func Main(m *testing.M, options ...goleak.Option) {
	if name, ok := os.LookupEnv(childEnv); ok {
		runtime.UnlockOSThread() // a child uses its main thread like any other
		os.Exit(runChild(name))
	}
	hooked = true
	before, err := descriptors()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if fuzz := flag.Lookup("test.fuzz"); code == 0 && (fuzz == nil || fuzz.Value.String() == "") {
		if err := errors.Join(goleak.Find(options...), leaked(before, time.Second)); err != nil {
			fmt.Fprintln(os.Stderr, "FAIL: left over after the tests:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// descriptor is an open file of this process.
type descriptor struct {
	fd     int
	target string // what /proc/self/fd links to
}

// descriptors lists the open files of this process.
func descriptors() ([]descriptor, error) {
	// The runtime opens descriptors of its own for the first file that it
	// polls, and keeps them. They are to be in every list.
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start the poller: %w", err)
	}
	if err := errors.Join(r.Close(), w.Close()); err != nil {
		return nil, err
	}

	dir, err := os.Open("/proc/self/fd")
	if err != nil {
		return nil, fmt.Errorf("list descriptors: %w", err)
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("list descriptors: %w", err)
	}
	var list []descriptor
	for _, name := range names {
		fd, err := strconv.Atoi(name)
		if err != nil || fd == int(dir.Fd()) {
			continue
		}
		target, err := os.Readlink(filepath.Join("/proc/self/fd", name))
		if err != nil {
			continue // closed since
		}
		list = append(list, descriptor{fd, target})
	}
	slices.SortFunc(list, func(a, b descriptor) int { return cmp.Compare(a.fd, b.fd) })
	return list, nil
}

// leaked waits for at most patience until no more descriptors are open than
// before, and returns an error that lists those that are. A descriptor whose
// owner was collected by the garbage collector is not found.
func leaked(before []descriptor, patience time.Duration) error {
	deadline := time.Now().Add(patience)
	for {
		now, err := descriptors()
		if err != nil {
			return err
		}
		extra := slices.DeleteFunc(now, func(d descriptor) bool { return slices.Contains(before, d) })
		if len(extra) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			list := fmt.Sprintf("%d leaked descriptors:", len(extra))
			for _, d := range extra {
				list += "\n\t" + d.String()
			}
			return errors.New(list)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (d descriptor) String() string {
	s := fmt.Sprintf("%d -> %s", d.fd, d.target)
	sa, err := unix.Getsockname(d.fd)
	if err != nil {
		return s
	}
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		s += " " + netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port)).String()
	case *unix.SockaddrInet6:
		s += " " + netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port)).String()
	case *unix.SockaddrUnix:
		s += " unix " + strconv.Quote(sa.Name)
	}
	return s
}
