// SPDX-License-Identifier: Apache-2.0

// Command guest is process 1 of a virtual machine of package vmtest. It mounts the
// usual file systems, loads modules, runs one program, reports its exit code and
// switches the machine off.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"instar/internal/vmtest/job"
)

func main() {
	err := run()
	if err != nil {
		fmt.Println("guest:", err)
	}
	unix.Sync()
	err = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	fmt.Println("guest: power off:", err)
	select {}
}

// run reports what it can; the error is for the console.
func run() error {
	// Without /dev there are no ports.
	if err := mount("dev", "/dev", "devtmpfs", ""); err != nil {
		return err
	}
	status, err := openPort(job.Status)
	if err != nil {
		return err
	}
	output, err := openPort(job.Output)
	if err == nil {
		var pid int
		if pid, err = start(output); err == nil {
			job.Starting(status)
			job.Ending(status, wait(pid))
			return errors.Join(drain(output), drain(status))
		}
	}
	job.Failing(status, err)
	return errors.Join(err, drain(status))
}

// start prepares the machine and starts the program.
func start(output *os.File) (pid int, err error) {
	text, err := os.ReadFile(job.Path)
	if err != nil {
		return 0, err
	}
	var j job.Job
	if err := json.Unmarshal(text, &j); err != nil {
		return 0, fmt.Errorf("read %s: %w", job.Path, err)
	}
	if err := prepare(j.Modules); err != nil {
		return 0, err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	defer null.Close()
	p, err := os.StartProcess(j.Args[0], j.Args, &os.ProcAttr{
		Dir: j.Dir, Env: j.Env, Files: []*os.File{null, output, output},
	})
	if err != nil {
		return 0, err
	}
	// wait waits for it, and for orphans, whose parent process 1 is.
	pid = p.Pid
	return pid, p.Release()
}

func wait(pid int) (code int) {
	for {
		var status unix.WaitStatus
		ended, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			fmt.Println("guest: wait for the program:", err)
			return 128
		case ended != pid:
		case status.Signaled():
			return 128 + int(status.Signal())
		case status.Exited():
			return status.ExitStatus()
		}
	}
}

// prepare makes the machine one that programs can run on.
func prepare(modules []string) error {
	for _, m := range []struct{ source, path, kind, options string }{
		{"proc", "/proc", "proc", ""},
		{"sys", "/sys", "sysfs", ""},
		{"devpts", "/dev/pts", "devpts", "ptmxmode=0666"},
		{"shm", "/dev/shm", "tmpfs", ""},
		{"run", "/run", "tmpfs", "mode=0755"},
		{"tmp", "/tmp", "tmpfs", "mode=1777"},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2", ""},
		{"bpf", "/sys/fs/bpf", "bpf", "mode=0700"},
		{"debugfs", "/sys/kernel/debug", "debugfs", ""},
		{"tracefs", "/sys/kernel/tracing", "tracefs", ""},
	} {
		if err := mount(m.source, m.path, m.kind, m.options); err != nil {
			return err
		}
	}
	for name, target := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2",
	} {
		if err := os.Symlink(target, "/dev/"+name); err != nil {
			return err
		}
	}
	for _, file := range modules {
		if err := load(file); err != nil {
			return err
		}
	}
	return setUp("lo")
}

func mount(source, path, kind, options string) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(source, path, kind, 0, options); err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("mount %s: %w", path, err)
	}
	return nil
}

func load(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("load kernel module %s: %w", file, err)
	}
	return nil
}

func setUp(device string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	request, err := unix.NewIfreq(device)
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request); err != nil {
		return fmt.Errorf("set device %s up: %w", device, err)
	}
	return nil
}

// openPort opens a serial port through which bytes go as they are.
func openPort(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	port := os.NewFile(uintptr(fd), path)
	settings, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return nil, fmt.Errorf("set up %s: %w", path, errors.Join(err, port.Close()))
	}
	settings.Oflag &^= unix.OPOST
	settings.Lflag &^= unix.ECHO | unix.ICANON | unix.ISIG
	settings.Cflag = settings.Cflag&^unix.CBAUD | unix.B115200
	if err := unix.IoctlSetTermios(fd, unix.TCSETS, settings); err != nil {
		return nil, fmt.Errorf("set up %s: %w", path, errors.Join(err, port.Close()))
	}
	return port, nil
}

// drain waits until everything went out.
func drain(port *os.File) error {
	if err := unix.IoctlSetInt(int(port.Fd()), unix.TCSBRK, 1); err != nil {
		return fmt.Errorf("drain %s: %w", port.Name(), err)
	}
	return nil
}
