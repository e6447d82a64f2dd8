// SPDX-License-Identifier: Apache-2.0

package vmtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/vmtest/job"
)

const qemu = "qemu-system-x86_64"

// acceleration is what executes the guest's instructions.
type acceleration string

const (
	kvm acceleration = "kvm"
	tcg acceleration = "tcg" // software
)

var virtualization = regexp.MustCompile(`(?m)^flags\s*:.*\b(vmx|svm)\b`)

// accelerated says whether KVM works. That its device is there is not enough: a
// virtual machine may have it without the processor's support.
func accelerated() acceleration {
	cpus, err := os.ReadFile("/proc/cpuinfo")
	if err == nil && virtualization.Match(cpus) && unix.Access("/dev/kvm", unix.R_OK|unix.W_OK) == nil {
		return kvm
	}
	return tcg
}

// ErrTime means that the program did not end in time.
var ErrTime = errors.New("time limit exceeded")

// errNotStarted means that the machine never got as far as its first program.
var errNotStarted = errors.New("the virtual machine did not start")

// hardware is a virtual machine without its software.
type hardware struct {
	memory  int // MiB
	cpus    int // with KVM
	timeout time.Duration
	append  string // to the kernel's command line
}

// arguments are those of QEMU.
func (h hardware) arguments(with acceleration, image, initramfs, console, status string) []string {
	a := []string{
		"-M", "q35", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-m", strconv.Itoa(h.memory),
	}
	if with == kvm {
		a = append(a, "-accel", "kvm", "-cpu", "host", "-smp", strconv.Itoa(h.cpus))
	} else {
		// Several threads that emulate one CPU each are no faster, and not as reliable.
		a = append(a, "-accel", "tcg,thread=single", "-cpu", "max", "-smp", "1")
	}
	// What goes wrong in the kernel ends the machine.
	line := "console=ttyS0 quiet panic=-1 oops=panic"
	if with == tcg {
		line += " nokaslr no5lvl tsc=reliable" // takes a seventh less time
	}
	if h.append != "" {
		line += " " + h.append
	}
	return append(a, "-kernel", image, "-initrd", initramfs, "-append", line,
		"-serial", "file:"+console,
		"-chardev", "stdio,id=output,signal=off", "-serial", "chardev:output",
		"-serial", "file:"+status)
}

// boot runs the machine until it is switched off, and returns what it reported.
func (h hardware) boot(ctx context.Context, with acceleration, image, initramfs, dir string, output io.Writer) (report job.Report, console []byte, err error) {
	consoleFile, statusFile := filepath.Join(dir, "console"), filepath.Join(dir, "status")
	limited, cancel := context.WithTimeout(ctx, h.timeout)
	defer cancel()
	cmd := exec.CommandContext(limited, qemu, h.arguments(with, image, initramfs, consoleFile, statusFile)...)
	var messages bytes.Buffer
	cmd.Stdout, cmd.Stderr = output, &messages
	cmd.WaitDelay = 5 * time.Second
	// It ends with this process, which is with the thread that starts it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err = cmd.Run()
	if errors.Is(err, exec.ErrNotFound) {
		return report, nil, fmt.Errorf("%w: install the package qemu-system-x86", err)
	}
	if ctx.Err() != nil {
		return report, nil, ctx.Err()
	}
	console, _ = os.ReadFile(consoleFile) // there is none when QEMU did not start
	if limited.Err() != nil {
		return report, console, fmt.Errorf("%w (%v)", ErrTime, h.timeout)
	}
	if err != nil {
		return report, console, fmt.Errorf("%w: %w: %s", errNotStarted, err, bytes.TrimSpace(messages.Bytes()))
	}
	status, err := os.Open(statusFile)
	if err != nil {
		return report, console, fmt.Errorf("%w: %w", errNotStarted, err)
	}
	defer status.Close()
	report, err = job.ReadReport(status)
	switch {
	case err != nil:
	case report.Error != "":
		err = fmt.Errorf("the program did not start: %s", report.Error)
	case !report.Started:
		err = errNotStarted
	case !report.Ended:
		err = errors.New("the kernel died while the program ran")
	}
	return report, console, err
}

// consoleTail is how much of the console an error comes with.
const consoleTail = 4000

func tail(console []byte) string {
	if len(console) > consoleTail {
		console = console[len(console)-consoleTail:]
	}
	return string(bytes.ReplaceAll(console, []byte("\r"), nil))
}
