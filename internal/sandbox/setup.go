// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"fmt"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// LoopbackUp brings the device lo of the network namespace up.
func LoopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("bring lo up: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	req, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("bring lo up: %w", err)
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req); err != nil {
		return fmt.Errorf("bring lo up: %w", err)
	}
	return nil
}

// niceness is the priority of everything in the sandbox.
const niceness = -10

// RaisePriority takes the CPUs from others. What is measured is upgrades, and
// where CPUs are missing for seconds, clients give up whatever the servers do.
// The servers inherit it. Without the right to it nothing else changes.
func RaisePriority() {
	// Of a process it would be one thread's priority. The group is ours alone.
	_ = unix.Setpriority(unix.PRIO_PGRP, 0, niceness)
	// With CONFIG_SCHED_AUTOGROUP that counts within our session only, and this
	// among the sessions (sched(7)).
	_ = os.WriteFile("/proc/self/autogroup", []byte(strconv.Itoa(niceness)), 0)
}

// Host is the machine that a demonstration ran on.
type Host struct {
	Kernel string `json:"kernel"`
	CPUs   int    `json:"cpus"`
	Arch   string `json:"arch"`
}

// ThisHost describes this machine.
func ThisHost() Host {
	h := Host{CPUs: runtime.NumCPU(), Arch: runtime.GOARCH}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		h.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	return h
}
