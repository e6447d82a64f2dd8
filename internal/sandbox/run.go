// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/capset"
)

// patience is how long a sandbox may take to end after it was told to.
const patience = 10 * time.Second

// EnvironmentError says what the machine lacks, and what to do.
type EnvironmentError struct{ Text string }

func (e *EnvironmentError) Error() string { return e.Text }

// Command is how a sandbox is started.
type Command struct {
	// Self is the file of this program and the name it gets as argument zero.
	Self [2]string
	// Args are the arguments that lead the program to its sandbox.
	Args []string
	// Purpose is what root is needed for, as in "it makes a network namespace".
	Purpose string
	// Mounts says that it gets a mount namespace of its own, too.
	Mounts bool
	// Stderr gets what the sandbox writes there itself: a crash. Default: nowhere.
	Stderr io.Writer
}

// Run starts the sandbox, calls receive with what it writes to its pipe, and
// waits for it. receive reads to the end. Before Run returns every process of
// the sandbox has ended. It needs root. ctx ends it early.
//
// The result is receive's error when there is one of type EnvironmentError or
// the sandbox ended as it should.
func Run(ctx context.Context, c Command, receive func(io.Reader) error) error {
	if err := Check(c.Purpose); err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make pipe: %w", err)
	}
	defer func() { _ = r.Close() }()

	cmd := &exec.Cmd{
		Path:       c.Self[0],
		Args:       append([]string{c.Self[1]}, c.Args...),
		ExtraFiles: []*os.File{w},
		SysProcAttr: &syscall.SysProcAttr{
			Cloneflags: unix.CLONE_NEWNET,
			Pdeathsig:  unix.SIGTERM,
			Setsid:     true, // a Ctrl-C reaches only us; we pass it on in order
		},
	}
	if c.Mounts {
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWNS
	}
	tail := &Tail{}
	cmd.Stderr = tail
	if c.Stderr != nil {
		cmd.Stderr = io.MultiWriter(c.Stderr, tail)
	}

	// The signal at our death is tied to the thread that started the sandbox, so
	// that thread has to stay.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err = cmd.Start()
	_ = w.Close()
	if errors.Is(err, unix.EPERM) {
		return &EnvironmentError{fmt.Sprintf("the namespaces cannot be made: %v; "+
			"a seccomp filter or a security module forbids it: in a container, run it privileged", err)}
	}
	if err != nil {
		return fmt.Errorf("start sandbox: %w", err)
	}

	watchdog, cancelWatchdog := context.WithCancel(context.Background())
	defer cancelWatchdog()
	stop := context.AfterFunc(ctx, func() {
		_ = cmd.Process.Signal(unix.SIGTERM)
		select {
		case <-watchdog.Done():
		case <-time.After(patience):
			_ = cmd.Process.Kill()
		}
	})
	defer stop()

	failed := receive(r)
	waited := cmd.Wait()
	_, environment := errors.AsType[*EnvironmentError](failed)
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("interrupted: %w", ctx.Err())
	case environment:
		return failed
	case waited != nil && failed == nil:
		return fmt.Errorf("sandbox: %w%s", waited, tail.Because())
	}
	return failed
}

// Check finds out whether this process has the rights to run a sandbox, for the
// purpose.
func Check(purpose string) error {
	if os.Geteuid() != 0 {
		return &EnvironmentError{fmt.Sprintf("needs root: %s; run it with sudo", purpose)}
	}
	have, err := capset.Effective()
	if err != nil {
		return err
	}
	if missing := have.Missing(capset.SysAdmin, capset.NetAdmin); len(missing) > 0 {
		return &EnvironmentError{fmt.Sprintf("needs %s: %s; in a container, run it privileged", capset.Names(missing), purpose)}
	}
	return nil
}

// Enter is called first in the sandbox. It makes sure that this is one indeed:
// nothing may be changed in the namespaces of somebody who tried the command by
// hand. The names are those in /proc/self/ns. The file is the pipe to Run.
func Enter(namespaces ...string) (*os.File, error) {
	for _, ns := range namespaces {
		mine, err := os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			return nil, fmt.Errorf("read namespace: %w", err)
		}
		parents, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", os.Getppid(), ns))
		if err != nil || mine == parents {
			return nil, fmt.Errorf("no %s namespace of its own", ns)
		}
	}
	// The pipe must not reach the servers: the command waits for its end.
	if _, err := unix.FcntlInt(3, unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
		return nil, fmt.Errorf("descriptor 3: %w", err)
	}
	return os.NewFile(3, "report"), nil
}
