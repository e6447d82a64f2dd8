// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// niceness is the priority of everything in the sandbox.
const niceness = -10

// Sandbox is the process in the namespaces: args are the folder for the bpffs
// and the options. It reports on descriptor 3, and returns the exit code.
func Sandbox(ctx context.Context, self [2]string, args []string) int {
	out, options, dir, err := sandboxSetup(args)
	if err != nil {
		fmt.Fprintf(os.Stderr, "instar: %s: %v; it is a part of \"instar demo\"\n", SandboxCommand, err)
		return 2
	}
	s := newSender(out)
	report, err := sandbox(ctx, self, s, dir, options)
	if err != nil {
		if len(report.Runs) > 0 {
			s.send(message{Report: newDocument(report)})
		}
		var env *EnvironmentError
		s.send(message{Fail: &failure{Text: err.Error(), Environment: errors.As(err, &env)}})
		return 1
	}
	s.send(message{Report: newDocument(report)})
	return 0
}

// sandboxSetup makes sure that this is a sandbox indeed: nothing may be mounted
// in the namespaces of somebody who tried the command by hand.
func sandboxSetup(args []string) (out *os.File, o Options, dir string, err error) {
	if len(args) != 2 {
		return nil, o, "", errors.New("cannot be started by hand")
	}
	for _, ns := range []string{"net", "mnt"} {
		mine, err := os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			return nil, o, "", fmt.Errorf("read namespace: %w", err)
		}
		parents, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", os.Getppid(), ns))
		if err != nil || mine == parents {
			return nil, o, "", fmt.Errorf("no %s namespace of its own", ns)
		}
	}
	// The pipe must not reach the servers: the command waits for its end.
	if _, err := unix.FcntlInt(3, unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
		return nil, o, "", fmt.Errorf("descriptor 3: %w", err)
	}
	if err := json.Unmarshal([]byte(args[1]), &o); err != nil {
		return nil, o, "", fmt.Errorf("read options: %w", err)
	}
	return os.NewFile(3, "report"), o, args[0], nil
}

// sandbox makes the runs. When ctx ends it returns an error and those that were
// measured, the last one in part.
func sandbox(ctx context.Context, self [2]string, s *sender, dir string, o Options) (Report, error) {
	if err := prepareNamespaces(dir); err != nil {
		return Report{}, err
	}
	defer func() {
		_ = unix.Unmount(dir, unix.MNT_DETACH)
		_ = os.Remove(dir)
	}()

	raisePriority()

	report := Report{Started: time.Now(), Options: o, Host: host()}
	starter := newStarter()
	defer starter.stop()
	for _, m := range o.Methods() {
		run, err := runMethod(ctx, m, o, self, filepath.Join(dir, "instar"), starter, s)
		switch {
		case err != nil && run.Interrupted:
			report.Runs = append(report.Runs, run)
			return report, err
		case err != nil && ctx.Err() != nil:
			return report, err // with the runs before
		case err != nil && m != MethodInstar:
			// What the others cannot do must not cost the result.
			run = Result{Method: m, ServerFailures: 1, Problems: []string{err.Error()}}
		case err != nil:
			return Report{}, fmt.Errorf("run of %s: %w", m, err)
		}
		report.Runs = append(report.Runs, run)
	}
	return report, nil
}

// prepareNamespaces cuts the mounts off from the machine's, mounts a bpffs and
// brings the loopback device up.
func prepareNamespaces(dir string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return &EnvironmentError{fmt.Sprintf("make mounts private: %v", err)}
	}
	if err := unix.Mount("instar-demo", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return &EnvironmentError{fmt.Sprintf("mount a bpffs: %v; the kernel needs CONFIG_BPF_SYSCALL, and the caller CAP_SYS_ADMIN in the initial user namespace", err)}
	}
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

// raisePriority takes the CPUs from others. What is measured is upgrades, and
// where CPUs are missing for seconds, clients give up whatever the servers do.
// The servers inherit it. Without the right to it nothing else changes.
func raisePriority() {
	// Of a process it would be one thread's priority. The group is ours alone.
	_ = unix.Setpriority(unix.PRIO_PGRP, 0, niceness)
	// With CONFIG_SCHED_AUTOGROUP that counts within our session only, and this
	// among the sessions (sched(7)).
	_ = os.WriteFile("/proc/self/autogroup", []byte(strconv.Itoa(niceness)), 0)
}

func host() Host {
	h := Host{CPUs: runtime.NumCPU(), Arch: runtime.GOARCH}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		h.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	return h
}
