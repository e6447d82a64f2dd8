// SPDX-License-Identifier: Apache-2.0

package run

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// process is one process of the server.
type process struct {
	number  int
	pid     int
	file    os.FileInfo // of the executable
	build   string
	sockets *sockets
	handle  *os.Process
	started time.Time

	ready     chan struct{} // closed when it said READY=1
	readyOnce sync.Once
	executed  chan error    // nil once the server was executed, or why not
	done      chan struct{} // closed when it was waited for
	state     *os.ProcessState
}

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// how says how an ended process ended.
func (p *process) how() string {
	if p.state == nil {
		return "ended"
	}
	return p.state.String()
}

func (p *process) signal(sig syscall.Signal) {
	_ = p.handle.Signal(sig) // it may have ended
}

// kill ends the process and its process group.
func (p *process) kill() {
	if !p.ended() {
		_ = unix.Kill(-p.pid, unix.SIGKILL)
	}
	_ = p.handle.Kill() // also when it has left its process group
}

// start starts the server with a set of sockets, which stays the caller's.
func (s *Supervisor) start(set *sockets) (*process, error) {
	path, err := exec.LookPath(s.o.Command[0])
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil {
		return nil, fmt.Errorf("start %s: %w; put it back, the next upgrade looks again", s.o.Command[0], err)
	}
	file, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", s.o.Command[0], err)
	}
	files, names, err := set.duplicate()
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	report := 3 + len(files)
	cmd := exec.Command(s.o.Launcher[0]) // #nosec G204: that is what it is for
	cmd.Args = slices.Concat(s.o.Launcher[1:], launchArgs(report, s.o.User, path, s.o.Command))
	cmd.Env = s.environ(len(files), names)
	cmd.Stdout, cmd.Stderr = s.o.Stdout, s.o.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// They stay in the mode that they have: Fd changes only what package os made non-blocking.
	cmd.ExtraFiles = append(slices.Clone(files), w)

	s.mu.Lock()
	s.number++
	p := &process{number: s.number, file: file, build: buildOf(file), sockets: set, started: time.Now(),
		ready: make(chan struct{}), executed: make(chan error, 1), done: make(chan struct{})}
	err = cmd.Start()
	if err == nil {
		p.pid, p.handle = cmd.Process.Pid, cmd.Process
		s.processes = append(s.processes, p)
	}
	s.mu.Unlock()
	_ = w.Close()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start %s: %w", path, err), r.Close())
	}
	s.o.Logger.Info("process has started", "generation", p.number, "pid", p.pid, "build", p.build)
	s.wg.Go(func() {
		defer r.Close()
		b, _ := io.ReadAll(io.LimitReader(r, 4096))
		if len(b) > 0 {
			p.executed <- errors.New(string(b))
			return
		}
		close(p.executed)
		if s.o.NoNotify {
			p.readyOnce.Do(func() { close(p.ready) })
		}
	})
	s.wg.Go(func() {
		_ = cmd.Wait() // the result is in cmd.ProcessState
		// What it left of its group would go on with the sockets.
		_ = unix.Kill(-p.pid, unix.SIGKILL)
		s.mu.Lock()
		p.state = cmd.ProcessState
		s.processes = slices.DeleteFunc(s.processes, func(q *process) bool { return p == q })
		s.mu.Unlock()
		close(p.done)
		s.o.Logger.Info("process has ended", "generation", p.number, "pid", p.pid, "state", p.how())
		s.reap()
	})
	return p, nil
}

// environ is the server's environment; LISTEN_PID is the launcher's to add.
func (s *Supervisor) environ(count int, names []string) []string {
	own := []string{"LISTEN_PID", "LISTEN_PIDFDID", "LISTEN_FDS", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"}
	if s.o.User != nil && s.o.User.Name != "" {
		own = append(own, "USER", "LOGNAME", "HOME")
	}
	env := slices.DeleteFunc(os.Environ(), func(assignment string) bool {
		name, _, _ := strings.Cut(assignment, "=")
		return slices.Contains(own, name)
	})
	env = append(env, "LISTEN_FDS="+strconv.Itoa(count), "LISTEN_FDNAMES="+strings.Join(names, ":"))
	if !s.o.NoNotify {
		env = append(env, "NOTIFY_SOCKET="+s.notify.name)
	}
	if u := s.o.User; u != nil && u.Name != "" {
		env = append(env, "USER="+u.Name, "LOGNAME="+u.Name, "HOME="+u.Home)
	}
	return env
}

// buildOf names the build of a file by its size and time.
func buildOf(file os.FileInfo) string {
	return fmt.Sprintf("%d-%s", file.Size(), file.ModTime().UTC().Format("20060102T150405.000"))
}

// childInfo is the beginning of siginfo_t as waitid(2) fills it in, on 64-bit machines.
type childInfo struct {
	_, _, _, _ int32
	pid        int32
}

// reap waits for orphans, which become children of the first process of a PID namespace.
// A process of the server is left to who waits for it, and reap called again after that.
func (s *Supervisor) reap() {
	if os.Getpid() != 1 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		pid := int((*childInfo)(unsafe.Pointer(&info)).pid)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid == 0 || slices.ContainsFunc(s.processes, func(p *process) bool { return p.pid == pid }) {
			return
		}
		_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
	}
}
