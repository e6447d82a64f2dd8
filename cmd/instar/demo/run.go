// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/capset"
)

// SandboxCommand and ServerCommand are the arguments with which the demo starts
// this program again: the command line has to lead them to [Sandbox] and to
// [Server].
const (
	SandboxCommand = "demo-sandbox"
	ServerCommand  = "demo-server"
)

// sandboxPatience is how long the sandbox may take to end after it was told to.
const sandboxPatience = 10 * time.Second

// EnvironmentError says what the machine lacks, and what to do.
type EnvironmentError struct{ Text string }

func (e *EnvironmentError) Error() string { return e.Text }

// Hooks connect a run to who started it.
type Hooks struct {
	// Self is the file of this program and the name it gets as argument zero.
	Self [2]string
	// Stderr gets what the sandbox writes there itself: a crash. Default: nowhere.
	Stderr io.Writer
	// Event and Status are called from one goroutine. Default: nothing happens.
	Event  func(Event)
	Status func(Status)
}

// Run starts the sandbox, waits for it and returns its report. Before it
// returns every process it started has ended. It needs root. ctx ends it early:
// the report then comes with ctx's error, and has what was measured so far.
func Run(ctx context.Context, o Options, h Hooks) (Report, error) {
	if os.Geteuid() != 0 {
		return Report{}, &EnvironmentError{"needs root: it makes a network namespace of its own and loads a kernel program there; run it with sudo"}
	}
	have, err := capset.Effective()
	if err != nil {
		return Report{}, err
	}
	if missing := have.Missing(capset.SysAdmin, capset.NetAdmin); len(missing) > 0 {
		return Report{}, &EnvironmentError{fmt.Sprintf("needs %s to make a network namespace of its own and to load a kernel program there; "+
			"in a container, run it privileged", capset.Names(missing))}
	}
	options, err := json.Marshal(o)
	if err != nil {
		return Report{}, fmt.Errorf("write options: %w", err)
	}
	dir, err := os.MkdirTemp("", "instar-demo-")
	if err != nil {
		return Report{}, &EnvironmentError{fmt.Sprintf("temporary folder: %v; TMPDIR can name another", err)}
	}
	// The sandbox mounts a bpffs there in its own namespace, out of our sight.
	defer func() { _ = os.Remove(dir) }()

	r, w, err := os.Pipe()
	if err != nil {
		return Report{}, fmt.Errorf("make pipe: %w", err)
	}
	defer func() { _ = r.Close() }()

	cmd := &exec.Cmd{
		Path:       h.Self[0],
		Args:       []string{h.Self[1], SandboxCommand, dir, string(options)},
		ExtraFiles: []*os.File{w},
		SysProcAttr: &syscall.SysProcAttr{
			Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS,
			Pdeathsig:  unix.SIGTERM,
			Setsid:     true, // a Ctrl-C reaches only us; we pass it on in order
		},
	}
	tail := &tailBuffer{}
	cmd.Stderr = tail
	if h.Stderr != nil {
		cmd.Stderr = io.MultiWriter(h.Stderr, tail)
	}

	// The signal at our death is tied to the thread that started the sandbox, so
	// that thread has to stay.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err = cmd.Start()
	_ = w.Close()
	if errors.Is(err, unix.EPERM) {
		return Report{}, &EnvironmentError{fmt.Sprintf("a network and a mount namespace cannot be made: %v; "+
			"a seccomp filter or a security module forbids it: in a container, run it privileged", err)}
	}
	if err != nil {
		return Report{}, fmt.Errorf("start sandbox: %w", err)
	}

	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Signal(unix.SIGTERM) })
	defer stop()
	watchdog, cancelWatchdog := context.WithCancel(context.Background())
	defer cancelWatchdog()
	context.AfterFunc(ctx, func() {
		select {
		case <-watchdog.Done():
		case <-time.After(sandboxPatience):
			_ = cmd.Process.Kill()
		}
	})

	doc, fail, readErr := receive(r, h)
	waitErr := cmd.Wait()
	switch {
	case ctx.Err() != nil:
		report := Report{}
		if doc != nil {
			report = doc.report()
		}
		return report, fmt.Errorf("interrupted: %w", ctx.Err())
	case fail != nil && fail.Environment:
		return Report{}, &EnvironmentError{fail.Text}
	case fail != nil:
		return Report{}, errors.New(fail.Text)
	case waitErr != nil:
		return Report{}, fmt.Errorf("sandbox: %w%s", waitErr, tail.because())
	case readErr != nil:
		return Report{}, fmt.Errorf("read from sandbox: %w", readErr)
	case doc == nil:
		return Report{}, errors.New("sandbox ended without a report")
	}
	return doc.report(), nil
}

// receive reads the sandbox's messages until it closes the pipe.
func receive(r io.Reader, h Hooks) (doc *document, fail *failure, err error) {
	dec := json.NewDecoder(r)
	for {
		var m message
		if err := dec.Decode(&m); err != nil {
			if errors.Is(err, io.EOF) {
				return doc, fail, nil
			}
			return doc, fail, err
		}
		switch {
		case m.Event != nil && h.Event != nil:
			h.Event(*m.Event)
		case m.Status != nil && h.Status != nil:
			h.Status(*m.Status)
		case m.Report != nil:
			doc = m.Report
		case m.Fail != nil:
			fail = m.Fail
		}
	}
}

// tailBuffer keeps the end of what a process writes.
type tailBuffer struct {
	mu  sync.Mutex
	buf []byte
}

const tailSize = 8 << 10

func (t *tailBuffer) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	if over := len(t.buf) - tailSize; over > 0 {
		t.buf = append(t.buf[:0], t.buf[over:]...)
	}
	return len(p), nil
}

// because is the last line, after a colon, or nothing.
func (t *tailBuffer) because() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	lines := bytes.Split(bytes.TrimSpace(t.buf), []byte("\n"))
	last := string(bytes.TrimSpace(lines[len(lines)-1]))
	if last == "" {
		return ""
	}
	return ": " + last
}
