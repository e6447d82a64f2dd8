// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bufio"
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

	"instar/quicdemo"
)

// starter starts processes that get SIGKILL when this one dies. The kernel ties
// that signal to the thread that made the process, and the Go runtime may end
// threads, so all are made by one that stays.
type starter struct {
	jobs chan func()
	done chan struct{}
}

func newStarter() *starter {
	s := &starter{jobs: make(chan func()), done: make(chan struct{})}
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

func (s *starter) start(cmd *exec.Cmd) error {
	result := make(chan error)
	s.jobs <- func() { result <- cmd.Start() }
	return <-result
}

func (s *starter) stop() {
	close(s.jobs)
	<-s.done
}

// server is one server process.
type server struct {
	number uint32
	cmd    *exec.Cmd
	tail   *tailBuffer

	ready chan quicdemo.Ready // gets one value, or is closed without
	ended chan struct{}       // closed when the process has ended
	// endedAt and err are set before ended is closed.
	endedAt time.Time
	err     error
}

// errNotReady says that a server ended or kept silent before it was ready.
var errNotReady = errors.New("not ready")

// startServer starts a server process. Its end is announced through ended.
func startServer(st *starter, number uint32, self [2]string, args, environ []string) (*server, error) {
	s := &server{number: number, tail: &tailBuffer{}, ready: make(chan quicdemo.Ready, 1), ended: make(chan struct{})}
	s.cmd = &exec.Cmd{
		Path:        self[0],
		Args:        append([]string{self[1], ServerCommand}, args...),
		Env:         append(os.Environ(), environ...),
		Stderr:      s.tail,
		SysProcAttr: &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL},
		// What a server leaves behind must not keep us waiting for its output.
		WaitDelay: time.Second,
	}
	stdout, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start server %d: %w", number, err)
	}
	if err := st.start(s.cmd); err != nil {
		return nil, fmt.Errorf("start server %d: %w", number, err)
	}
	go s.watch(stdout)
	return s, nil
}

func (s *server) watch(stdout io.Reader) {
	defer close(s.ended)
	announced := false
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		if announced {
			continue
		}
		if line, ok := parseReady(lines.Bytes()); ok {
			s.ready <- line
			announced = true
		}
	}
	if !announced {
		close(s.ready)
	}
	_, _ = io.Copy(io.Discard, stdout)
	s.err = s.cmd.Wait()
	s.endedAt = time.Now()
}

// waitReady returns once the server serves.
func (s *server) waitReady(ctx context.Context, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	select {
	case _, ok := <-s.ready:
		if ok {
			return nil
		}
		<-s.ended
		return fmt.Errorf("server %d: %w: %s%s", s.number, errNotReady, s.how(), s.tail.because())
	case <-ctx.Done():
		return fmt.Errorf("server %d: %w after %v%s", s.number, errNotReady, patience, s.tail.because())
	}
}

// terminate asks the server to end.
func (s *server) terminate() { _ = s.cmd.Process.Signal(unix.SIGTERM) }

// kill ends the server and waits until it has.
func (s *server) kill() {
	_ = s.cmd.Process.Kill()
	<-s.ended
}

// wait returns whether the server ended within the time.
func (s *server) wait(ctx context.Context, patience time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	select {
	case <-s.ended:
	case <-ctx.Done():
	}
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// how says how the server ended; only after it did.
func (s *server) how() string {
	if s.err == nil {
		return "exit code 0"
	}
	return s.err.Error()
}

// exitCode is -1 for a signal; only after the server ended.
func (s *server) exitCode() int { return s.cmd.ProcessState.ExitCode() }
