// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Starter starts processes that get SIGKILL when this one dies. The kernel ties
// that signal to the thread that made the process, and the Go runtime may end
// threads, so all are made by one that stays.
type Starter struct {
	jobs chan func()
	done chan struct{}
}

// NewStarter returns a Starter, to be stopped by Stop.
func NewStarter() *Starter {
	s := &Starter{jobs: make(chan func()), done: make(chan struct{})}
	go func() {
		defer close(s.done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for job := range s.jobs {
			job()
		}
	}()
	return s
}

func (s *Starter) start(cmd *exec.Cmd) error {
	result := make(chan error)
	s.jobs <- func() { result <- cmd.Start() }
	return <-result
}

// Stop ends the Starter. Processes that it started should have ended.
func (s *Starter) Stop() {
	close(s.jobs)
	<-s.done
}

// Process is a process that a Starter started.
type Process struct {
	PID  int
	Tail *Tail // of its standard error

	cmd   *exec.Cmd
	ended chan struct{}
	// endedAt and err are set before ended is closed.
	endedAt time.Time
	err     error
}

// Start starts this program again, with the environment of this process and
// more. line is called, from one goroutine, for each line of the standard
// output; its argument is valid during the call.
func (s *Starter) Start(self [2]string, args, environ []string, line func([]byte)) (*Process, error) {
	p := &Process{Tail: &Tail{}, ended: make(chan struct{})}
	p.cmd = &exec.Cmd{
		Path:        self[0],
		Args:        append([]string{self[1]}, args...),
		Env:         append(os.Environ(), environ...),
		Stderr:      p.Tail,
		SysProcAttr: &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL},
		// What a process leaves behind must not keep us waiting for its output.
		WaitDelay: time.Second,
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := s.start(p.cmd); err != nil {
		return nil, err
	}
	p.PID = p.cmd.Process.Pid
	go p.watch(stdout, line)
	return p, nil
}

func (p *Process) watch(stdout io.Reader, line func([]byte)) {
	defer close(p.ended)
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		line(lines.Bytes())
	}
	_, _ = io.Copy(io.Discard, stdout)
	p.err = p.cmd.Wait()
	p.endedAt = time.Now()
}

// Ended is closed when the process has ended and its output was read.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// EndedAt is when the process ended; only after it did.
func (p *Process) EndedAt() time.Time { return p.endedAt }

// Err is nil for exit code 0; only after the process ended.
func (p *Process) Err() error { return p.err }

// Signal sends a signal to the process, if it is still there.
func (p *Process) Signal(sig unix.Signal) { _ = p.cmd.Process.Signal(sig) }

// Kill ends the process and waits until it has.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
}

// Wait returns whether the process ended within the time.
func (p *Process) Wait(ctx context.Context, patience time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	select {
	case <-p.ended:
	case <-ctx.Done():
	}
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// How says how the process ended; only after it did.
func (p *Process) How() string {
	if p.err == nil {
		return "exit code 0"
	}
	return p.err.Error()
}

// ExitCode is -1 for a signal; only after the process ended.
func (p *Process) ExitCode() int { return p.cmd.ProcessState.ExitCode() }

// Tail keeps the end of what a process writes. The zero value is empty.
type Tail struct {
	mu  sync.Mutex
	buf []byte
}

const tailSize = 8 << 10

// Write never fails.
func (t *Tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	if over := len(t.buf) - tailSize; over > 0 {
		t.buf = append(t.buf[:0], t.buf[over:]...)
	}
	return len(p), nil
}

// Because is the last line, after a colon, or nothing.
func (t *Tail) Because() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	lines := bytes.Split(bytes.TrimSpace(t.buf), []byte("\n"))
	last := string(bytes.TrimSpace(lines[len(lines)-1]))
	if last == "" {
		return ""
	}
	return ": " + last
}
