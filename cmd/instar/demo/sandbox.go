// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/sandbox"
)

// Sandbox is the process in the namespaces: args are the folder for the bpffs
// and the options. It reports on descriptor 3, and returns the exit code.
func Sandbox(ctx context.Context, self [2]string, args []string) int {
	out, options, dir, err := sandboxSetup(args)
	if err != nil {
		fmt.Fprintf(os.Stderr, "instar: %s: %v; it is a part of \"instar demo\"\n", SandboxCommand, err)
		return 2
	}
	s := sandbox.NewSender(out)
	report, err := runAll(ctx, self, s, dir, options)
	if err != nil {
		if len(report.Runs) > 0 {
			s.Send(message{Report: newDocument(report)})
		}
		s.Send(message{Fail: sandbox.FailureOf(err)})
		return 1
	}
	s.Send(message{Report: newDocument(report)})
	return 0
}

// sandboxSetup makes sure that this is a sandbox indeed: nothing may be mounted
// in the namespaces of somebody who tried the command by hand.
func sandboxSetup(args []string) (out *os.File, o Options, dir string, err error) {
	if len(args) != 2 {
		return nil, o, "", errors.New("cannot be started by hand")
	}
	if out, err = sandbox.Enter("net", "mnt"); err != nil {
		return nil, o, "", err
	}
	if err := json.Unmarshal([]byte(args[1]), &o); err != nil {
		return nil, o, "", fmt.Errorf("read options: %w", err)
	}
	return out, o, args[0], nil
}

// runAll makes the runs. When ctx ends it returns an error and those that were
// measured, the last one in part.
func runAll(ctx context.Context, self [2]string, s *sandbox.Sender, dir string, o Options) (Report, error) {
	if err := prepareNamespaces(dir); err != nil {
		return Report{}, err
	}
	defer func() {
		_ = unix.Unmount(dir, unix.MNT_DETACH)
		_ = os.Remove(dir)
	}()

	sandbox.RaisePriority()

	report := Report{Started: time.Now(), Options: o, Host: sandbox.ThisHost()}
	starter := sandbox.NewStarter()
	defer starter.Stop()
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
		return &sandbox.EnvironmentError{Text: fmt.Sprintf("make mounts private: %v", err)}
	}
	if err := unix.Mount("instar-demo", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return &sandbox.EnvironmentError{Text: fmt.Sprintf("mount a bpffs: %v; the kernel needs CONFIG_BPF_SYSCALL, and the caller CAP_SYS_ADMIN in the initial user namespace", err)}
	}
	return sandbox.LoopbackUp()
}
