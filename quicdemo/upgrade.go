// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Environment variables between a server and its successor.
const (
	envReady      = "QUICDEMO_READY_FD"
	envGeneration = "QUICDEMO_GENERATION"
)

var (
	// ErrUpgrading means that another upgrade is under way; try again later.
	ErrUpgrading = errors.New("another upgrade is under way; try again when it ended")
	// ErrNotActive means that the generation is staged or draining: upgrades are
	// the active generation's business.
	ErrNotActive = errors.New("only the active generation upgrades itself")
)

// commandLine is this process's command line, with a path that is looked up
// afresh at each start: not /proc/self/exe, which stays with the old file.
var commandLine = func() []string {
	line := append([]string(nil), os.Args...)
	if path, err := exec.LookPath(line[0]); err == nil {
		line[0] = path
	}
	if path, err := filepath.Abs(line[0]); err == nil {
		line[0] = path
	}
	return line
}()

// report is the one line that a successor writes to its predecessor.
type report struct {
	Ready *Ready `json:"ready,omitempty"`
	Error string `json:"error,omitempty"`
}

// Upgrade starts a successor and waits until it is ready. Whatever becomes of
// the successor, this server serves on; it leaves when it is superseded.
func (s *Server) Upgrade(ctx context.Context) error {
	if !s.upgrading.TryLock() {
		return ErrUpgrading
	}
	defer s.upgrading.Unlock()
	select {
	case <-s.serving:
	default:
		return ErrNotActive
	}
	if s.sockets.state() != "active" {
		return ErrNotActive
	}

	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("start successor: %w", err)
	}
	defer func() { _ = r.Close() }()
	cmd := exec.Command(s.cfg.Command[0], s.cfg.Command[1:]...)
	cmd.Env = environ(s.cfg.Environ, envReady+"=3",
		envGeneration+"="+strconv.FormatUint(uint64(s.sockets.generation())+1, 10))
	cmd.ExtraFiles = []*os.File{w}
	// A nil *os.File in an io.Writer is not nil.
	if s.cfg.Stdout != nil {
		cmd.Stdout = s.cfg.Stdout
	}
	if s.cfg.Stderr != nil {
		cmd.Stderr = s.cfg.Stderr
	}
	err = cmd.Start()
	if err = errors.Join(err, w.Close()); err != nil {
		return fmt.Errorf("start successor: %w", err)
	}
	log := s.log.With("successor_pid", cmd.Process.Pid, "path", s.cfg.Command[0])
	log.Info("started a successor")

	began := time.Now()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.closing, cancel)()
	got, err := readReport(ctx, r, began.Add(s.cfg.UpgradeTimeout))
	switch {
	case ctx.Err() != nil:
		err = ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = fmt.Errorf("not ready after %v", s.cfg.UpgradeTimeout)
	case err == nil && got.Ready == nil:
		err = errors.New(got.Error)
	}
	if err != nil && (s.replaced.Load() || s.sockets.state() == "draining") {
		// It serves. Whether it could tell us matters to nobody.
		log.Warn("a successor took over and did not report", "error", err)
		return s.watch(cmd, log)
	}
	if err != nil {
		_ = cmd.Process.Kill() // it may have ended by itself
		if state, ok := errors.AsType[*exec.ExitError](cmd.Wait()); ok && state.Sys().(syscall.WaitStatus).Exited() {
			err = fmt.Errorf("%w (%w)", err, state)
		}
		return fmt.Errorf("upgrade to process %d: %w; this generation serves on", cmd.Process.Pid, err)
	}

	log.Info("successor is ready", "successor_generation", got.Ready.Generation,
		"successor_build", got.Ready.Build, "took", time.Since(began).Round(time.Millisecond))
	s.sockets.supersede()
	return s.watch(cmd, log)
}

// readReport reads the successor's report from the pipe.
func readReport(ctx context.Context, pipe *os.File, deadline time.Time) (r report, err error) {
	if err := pipe.SetReadDeadline(deadline); err != nil {
		return r, err
	}
	stop := context.AfterFunc(ctx, func() { _ = pipe.SetReadDeadline(time.Now()) })
	defer stop()
	line, err := bufio.NewReader(pipe).ReadBytes('\n')
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(line, &r)
}

// watch reaps the successor in case it ends before this server does.
func (s *Server) watch(cmd *exec.Cmd, log *slog.Logger) error {
	fd, err := unix.PidfdOpen(cmd.Process.Pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("watch successor: %w", err)
	}
	pidfd := os.NewFile(uintptr(fd), "pidfd")
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return errors.Join(fmt.Errorf("watch successor: %w", err), pidfd.Close())
	}
	s.children.Go(func() {
		stop := context.AfterFunc(s.closing, func() { _ = pidfd.SetReadDeadline(time.Now()) })
		defer func() {
			stop()
			_ = pidfd.Close()
		}()
		err := raw.Read(func(fd uintptr) bool {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			return n > 0 || err != nil && err != unix.EINTR
		})
		if err != nil {
			return
		}
		_ = cmd.Wait() // the result is in ProcessState
		log.Warn("the successor ended", "status", cmd.ProcessState.String())
	})
	return nil
}

// environ is the base environment with variables set.
func environ(base []string, set ...string) []string {
	env := make([]string, 0, len(base)+len(set))
	for _, v := range base {
		if name, _, _ := strings.Cut(v, "="); name != envReady && name != envGeneration {
			env = append(env, v)
		}
	}
	return append(env, set...)
}

// predecessor is the way back to the process that started this one, nil when
// nobody waits for us.
type predecessor struct{ file *os.File }

// openPredecessor takes the descriptor that Upgrade passed.
func openPredecessor(getenv func(string) string) (*predecessor, error) {
	text := getenv(envReady)
	if text == "" {
		return nil, nil
	}
	fd, err := strconv.Atoi(text)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", envReady, err)
	}
	syscall.CloseOnExec(fd)
	return &predecessor{os.NewFile(uintptr(fd), "predecessor")}, nil
}

// tell sends the report, once.
func (p *predecessor) tell(r report) {
	if p == nil || p.file == nil {
		return
	}
	// A predecessor that is gone needs no report.
	_ = json.NewEncoder(p.file).Encode(r)
	_ = p.file.Close()
	p.file = nil
}
