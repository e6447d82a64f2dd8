// SPDX-License-Identifier: Apache-2.0

package run_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/handover"
	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

const patience = 60 * time.Second

// supervisor is "instar run" as a process.
type supervisor struct {
	t       *testing.T
	cmd     *testutil.Cmd
	dir     string
	control string
	mode    string // file that says how the next server behaves
	done    chan struct{}
	ended   error // how, when done is closed
	log     *output
}

// output is what a process prints.
type output struct {
	t  *testing.T
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	_, _ = o.t.Output().Write(p)
	return o.b.Write(p)
}

func (o *output) count(text string) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return strings.Count(o.b.String(), text)
}

// workspace makes a folder that everybody may read, with the command and the servers.
func workspace(t *testing.T) string {
	t.Helper()
	testutil.NeedRoot(t)
	dir := t.TempDir()
	for _, d := range []string{filepath.Dir(dir), dir} {
		if err := os.Chmod(d, 0o755); err != nil { // #nosec: other users run what is in it
			t.Fatal(err)
		}
	}
	if out, err := exec.Command("go", "build", "-o", filepath.Join(dir, "instar"), "instar/cmd/instar").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	servers, err := filepath.Glob("testdata/*.py")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range servers {
		b, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, filepath.Base(path)), b, 0o644) // #nosec: as above
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// python is the distribution's, which all users can execute.
func python(t *testing.T) string {
	t.Helper()
	const path = "/usr/bin/python3"
	if _, err := os.Stat(path); err != nil {
		return testutil.NeedCommand(t, "python3", "python3")
	}
	return path
}

// start starts "instar run FLAGS -- SERVER" in the namespace, and waits until it serves.
func start(t *testing.T, ns *testutil.Netns, server string, flags ...string) *supervisor {
	t.Helper()
	s := prepare(t, ns, server, flags...)
	s.launch()
	return s
}

func prepare(t *testing.T, ns *testutil.Netns, server string, flags ...string) *supervisor {
	t.Helper()
	dir := workspace(t)
	s := &supervisor{t: t, dir: dir, control: filepath.Join(dir, "control"), mode: filepath.Join(dir, "mode"),
		done: make(chan struct{}), log: &output{t: t}}
	s.behave("serve")
	args := append([]string{"run", "--control", s.control, "-v"}, flags...)
	args = append(args, "--", python(t), filepath.Join(dir, server), s.mode)
	s.cmd = ns.Command(filepath.Join(dir, "instar"), args...)
	s.cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	s.orderly()
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return s
}

// orderly has the end of the test send SIGTERM, at which the servers end, too.
func (s *supervisor) orderly() {
	s.cmd.Cancel = func() error { return s.cmd.Process.Signal(unix.SIGTERM) }
	s.cmd.WaitDelay = patience
}

func (s *supervisor) launch() {
	s.t.Helper()
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	go func() {
		defer close(s.done)
		s.ended = s.cmd.Wait()
	}()
	s.t.Cleanup(func() {
		s.signal(unix.SIGTERM)
		<-s.done // killed after its WaitDelay
		if errors.Is(s.ended, exec.ErrWaitDelay) {
			s.t.Error("instar run did not end at SIGTERM")
		}
	})
	testutil.WaitFor(s.t, patience, func() bool {
		select {
		case <-s.done:
			s.t.Fatal("instar run has ended")
		default:
		}
		status, err := s.status()
		return err == nil && status.Phase == "active"
	}, "instar run does not serve")
}

func (s *supervisor) behave(mode string) {
	s.t.Helper()
	if err := os.WriteFile(s.mode, []byte(mode), 0o644); err != nil { // #nosec: other users read it
		s.t.Fatal(err)
	}
}

func (s *supervisor) signal(sig unix.Signal) { _ = s.cmd.Process.Signal(sig) }

func (s *supervisor) status() (handover.Status, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return handover.RequestStatus(ctx, s.control)
}

func (s *supervisor) mustStatus() handover.Status {
	s.t.Helper()
	status, err := s.status()
	if err != nil {
		s.t.Fatal(err)
	}
	return status
}

// serving is the process that serves, once one does.
func (s *supervisor) serving() (pid int) {
	s.t.Helper()
	testutil.WaitFor(s.t, patience, func() bool { pid = s.mustStatus().PID; return pid > 0 }, "no process serves")
	return pid
}

// signalTo signals a process; 0 and negative numbers would be whole process groups.
func signalTo(t *testing.T, pid int, sig unix.Signal) {
	t.Helper()
	if pid <= 1 {
		t.Fatalf("%v to process %d", sig, pid)
	}
	if err := unix.Kill(pid, sig); err != nil {
		t.Fatalf("%v to process %d: %v", sig, pid, err)
	}
}

// upgrade asks for an upgrade, by the command.
func (s *supervisor) upgrade() error {
	out, err := exec.Command(filepath.Join(s.dir, "instar"), "upgrade", s.control).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

func (s *supervisor) mustUpgrade() {
	s.t.Helper()
	if err := s.upgrade(); err != nil {
		s.t.Fatal(err)
	}
}

// hangUp upgrades by SIGHUP.
func (s *supervisor) hangUp() {
	s.t.Helper()
	before := s.mustStatus().PID
	s.signal(unix.SIGHUP)
	testutil.WaitFor(s.t, patience, func() bool {
		now := s.mustStatus()
		return now.PID != before && now.PID != 0 && !now.Upgrading
	}, "no successor serves after SIGHUP")
}

// end sends a signal and returns the exit code.
func (s *supervisor) end(sig unix.Signal) int {
	s.t.Helper()
	s.signal(sig)
	select {
	case <-s.done:
	case <-time.After(patience):
		s.t.Fatalf("instar run did not end at %v", sig)
	}
	return s.cmd.ProcessState.ExitCode()
}

// load are clients that ask all the time; every one has to be answered.
type load struct {
	t        *testing.T
	stop     chan struct{}
	wg       sync.WaitGroup
	answered atomic.Int64
	mu       sync.Mutex
	by       map[int]int // process -> answers
	failures []error
}

// newLoad runs clients, each of which calls what connect returned again and again.
func newLoad(t *testing.T, ns *testutil.Netns, clients int, connect func() (ask func() (pid int, err error), closeClient func())) *load {
	l := &load{t: t, stop: make(chan struct{}), by: map[int]int{}}
	for range clients {
		l.wg.Go(func() {
			ns.Run(func() {
				ask, closeClient := connect()
				defer closeClient()
				for {
					select {
					case <-l.stop:
						return
					default:
					}
					pid, err := ask()
					l.mu.Lock()
					if err != nil {
						l.failures = append(l.failures, err)
						l.mu.Unlock()
						return
					}
					l.by[pid]++
					l.mu.Unlock()
					l.answered.Add(1)
					time.Sleep(2 * time.Millisecond)
				}
			})
		})
	}
	t.Cleanup(func() { l.end() })
	return l
}

// waitFor waits until a process has answered.
func (l *load) waitFor(pid int) {
	l.t.Helper()
	testutil.WaitFor(l.t, patience, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.by[pid] > 0 || len(l.failures) > 0
	}, "process %d answers nobody", pid)
}

func (l *load) end() {
	select {
	case <-l.stop:
	default:
		close(l.stop)
	}
	l.wg.Wait()
}

// check ends the load and reports what failed.
func (l *load) check() {
	l.t.Helper()
	l.end()
	for _, err := range l.failures {
		l.t.Error(err)
	}
	l.t.Logf("%d answered, %d failed", l.answered.Load(), len(l.failures))
	if l.answered.Load() == 0 {
		l.t.Error("nobody was answered")
	}
}

// get asks an HTTP server once, on a connection of its own.
func get(network, address string) (pid, uid int, err error) {
	c, err := net.DialTimeout(network, address, patience)
	if err != nil {
		return 0, 0, fmt.Errorf("connect: %w", err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, "GET / HTTP/1.0\r\n\r\n"); err != nil {
		return 0, 0, fmt.Errorf("ask: %w", err)
	}
	b, err := io.ReadAll(bufio.NewReader(c))
	if err != nil {
		return 0, 0, fmt.Errorf("read answer: %w", err)
	}
	_, body, ok := bytes.Cut(b, []byte("\r\n\r\n"))
	if !ok {
		return 0, 0, fmt.Errorf("the answer ended early: %q", b)
	}
	_, err = fmt.Sscan(string(body), &pid, &uid)
	return pid, uid, err
}

func web(network, address string) func() (func() (int, error), func()) {
	return func() (func() (int, error), func()) {
		return func() (int, error) {
			pid, _, err := get(network, address)
			return pid, err
		}, func() {}
	}
}

const address = "127.0.0.1:8080"

// An unmodified Python server survives ten upgrades under load.
func TestTCP(t *testing.T) {
	ns := testutil.NetNS(t)
	s := start(t, ns, "tcp.py", "--nonblock", "--listen", "web=tcp:"+address, "--listen", "admin=unix:"+filepath.Join(t.TempDir(), "s"),
		"--probation", "200ms")
	l := newLoad(t, ns, 8, web("tcp", address))
	l.waitFor(s.mustStatus().PID)
	seen := map[int]bool{s.mustStatus().PID: true}
	for i := range 10 {
		if i%2 == 0 {
			s.mustUpgrade()
		} else {
			s.hangUp()
		}
		now := s.mustStatus()
		if seen[now.PID] || now.Generation != i+2 {
			t.Fatalf("upgrade %d: generation %d, process %d serves", i, now.Generation, now.PID)
		}
		seen[now.PID] = true
		l.waitFor(now.PID)
	}
	l.check()
	testutil.WaitFor(t, patience, func() bool { return len(s.mustStatus().Older) == 0 }, "predecessors do not end")
	if code := s.end(unix.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if _, _, err := get("tcp", address); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("after the end: %v, want the listener to be closed", err)
	}
}

// Successors that fail change nothing for clients, and the next one works.
func TestFailures(t *testing.T) {
	ns := testutil.NetNS(t)
	s := start(t, ns, "tcp.py", "--nonblock", "--listen", "web=tcp:"+address, "--probation", "1s", "--ready-timeout", "30s", "--drain", "20s")
	before := s.mustStatus()
	l := newLoad(t, ns, 4, web("tcp", address))
	l.waitFor(before.PID)
	unchanged := func(what string, err error, want string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", what, err, want)
		}
		if now := s.mustStatus(); now.PID != before.PID {
			t.Errorf("%s: process %d serves, not %d any more", what, now.PID, before.PID)
		}
	}
	s.behave("exit")
	unchanged("exit at once", s.upgrade(), "ended before it was ready: exit status 1")
	s.behave("die")
	unchanged("death in the probation", s.upgrade(), "ended")

	// A hanging one is killed by somebody; meanwhile a second upgrade is refused.
	s.behave("hang")
	failed := make(chan error, 1)
	go func() { failed <- s.upgrade() }()
	testutil.WaitFor(t, patience, func() bool { return s.log.count("hangs") == 1 }, "the successor does not hang")
	unchanged("second upgrade", s.upgrade(), "another upgrade is under way")
	kill(t, childrenOf(t, s.cmd.Process.Pid), before.PID)
	unchanged("killed before READY", <-failed, "ended before it was ready: signal: killed")

	s.behave("serve")
	s.mustUpgrade()
	l.waitFor(s.mustStatus().PID)
	l.check()
}

// A successor that hangs is given up after --ready-timeout.
func TestHang(t *testing.T) {
	ns := testutil.NetNS(t)
	s := start(t, ns, "tcp.py", "--nonblock", "--listen", "web=tcp:"+address, "--ready-timeout", "5s", "--probation", "0")
	before := s.mustStatus().PID
	s.behave("hang")
	if err := s.upgrade(); err == nil || !strings.Contains(err.Error(), "did not send READY=1 within 5s") {
		t.Error(err)
	}
	if pid, _, err := get("tcp", address); err != nil || pid != before {
		t.Errorf("process %d answers, %v, want %d", pid, err, before)
	}
	if got := childrenOf(t, s.cmd.Process.Pid); len(got) != 1 || got[0] != before {
		t.Errorf("processes %v, want %d alone", got, before)
	}
}

// kill kills all processes but one.
func kill(t *testing.T, pids []int, but int) {
	t.Helper()
	killed := 0
	for _, pid := range pids {
		if pid == but {
			continue
		}
		killed++
		signalTo(t, pid, unix.SIGKILL)
	}
	if killed != 1 {
		t.Errorf("killed %d processes, want one of %v", killed, pids)
	}
}

// childrenOf lists the children of a process, dead ones that nobody waited for too.
func childrenOf(t *testing.T, pid int) []int {
	t.Helper()
	var list []int
	all, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range all {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		for _, f := range strings.Fields(string(b)) {
			n, err := strconv.Atoi(f)
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, n)
		}
	}
	return list
}

// kill -9 of the server: clients wait until it is there again, and none is refused.
func TestCrash(t *testing.T) {
	ns := testutil.NetNS(t)
	s := start(t, ns, "tcp.py", "--nonblock", "--listen", "web=tcp:"+address, "--probation", "0")
	for range 3 {
		before := s.serving()
		signalTo(t, before, unix.SIGKILL)
		// Asked after the death, so that the connection was not the dead one's.
		testutil.WaitFor(t, patience, func() bool { return s.mustStatus().PID != before }, "the death is not noticed")
		pid, _, err := get("tcp", address)
		if err != nil || pid == before {
			t.Fatalf("process %d answers, %v", pid, err)
		}
	}
	s.mustUpgrade()
}

// Two SIGHUPs at once make one successor, and signals are forwarded to the server.
func TestSignals(t *testing.T) {
	ns := testutil.NetNS(t)
	s := start(t, ns, "tcp.py", "--nonblock", "--listen", "web=tcp:"+address, "--probation", "2s")
	before := s.mustStatus()
	s.signal(unix.SIGHUP)
	testutil.WaitFor(t, patience, func() bool { return s.mustStatus().Upgrading }, "SIGHUP starts no upgrade")
	s.signal(unix.SIGHUP)
	testutil.WaitFor(t, patience, func() bool { return s.log.count("another upgrade is under way") == 1 }, "the second SIGHUP is not refused")
	testutil.WaitFor(t, patience, func() bool { return !s.mustStatus().Upgrading }, "the upgrade does not end")
	if now := s.mustStatus(); now.Generation != before.Generation+1 {
		t.Errorf("generation %d after one upgrade from %d", now.Generation, before.Generation)
	}
	s.signal(unix.SIGUSR1)
	testutil.WaitFor(t, patience, func() bool { return s.log.count("got USR1") == 1 }, "SIGUSR1 is not forwarded")
	if code := s.end(unix.SIGINT); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// The server is nobody on a port below 1024.
func TestNobody(t *testing.T) {
	ns := testutil.NetNS(t)
	const low = "127.0.0.1:80"
	s := start(t, ns, "tcp.py", "--nonblock", "--listen", "web=tcp:"+low, "--user", "nobody", "--probation", "100ms")
	l := newLoad(t, ns, 4, web("tcp", low))
	for range 3 {
		s.mustUpgrade()
		pid := s.mustStatus().PID
		l.waitFor(pid)
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"Uid:\t65534\t65534\t65534\t65534\n", "Gid:\t65534\t65534\t65534\t65534\n", "Groups:\t \n", "CapEff:\t0000000000000000\n", "CapPrm:\t0000000000000000\n"} {
			if !strings.Contains(string(b), want) {
				t.Errorf("the server's status lacks %q:\n%s", want, b)
			}
		}
	}
	l.check()
}

// Without any privilege TCP and Unix sockets work.
func TestUnprivileged(t *testing.T) {
	ns := testutil.NetNS(t)
	dir := t.TempDir()
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil { // #nosec: for nobody
		t.Fatal(err)
	}
	if err := os.Chown(dir, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "s")
	s := prepare(t, ns, "tcp.py", "--nonblock", "--listen", "web=tcp:"+address, "--listen", "local=unix:"+path, "--probation", "100ms")
	s.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 65534, Gid: 65534}
	// The control socket is in a folder of its own, too.
	s.control = filepath.Join(dir, "control")
	s.cmd.Args[3] = s.control
	s.launch()
	l := newLoad(t, ns, 4, web("unix", path))
	s.mustUpgrade()
	s.hangUp()
	l.waitFor(s.mustStatus().PID)
	l.check()
	if pid, uid, err := get("tcp", address); err != nil || uid != 65534 {
		t.Errorf("process %d of user %d answers: %v", pid, uid, err)
	}
	if code := s.end(unix.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
}

// As process 1 of a PID namespace: five upgrades, no zombies, SIGTERM drains all.
func TestFirstProcess(t *testing.T) {
	testutil.NeedCommand(t, "unshare", "util-linux")
	ns := testutil.NetNS(t)
	s := prepare(t, ns, "tcp.py", "--nonblock", "--listen", "web=tcp:"+address, "--probation", "100ms")
	s.behave("orphans")
	unshare := ns.Command("unshare", append([]string{"--pid", "--fork", "--mount-proc", "--kill-child"}, s.cmd.Args...)...)
	unshare.Env, unshare.Stdout, unshare.Stderr, unshare.SysProcAttr = s.cmd.Env, s.log, s.log, s.cmd.SysProcAttr
	s.cmd = unshare
	s.cmd.Cancel = func() error { return nil } // it ends with process 1, which gets SIGTERM
	s.cmd.WaitDelay = patience
	s.launch()
	children := childrenOf(t, s.cmd.Process.Pid)
	if len(children) != 1 {
		t.Fatalf("unshare has the children %v", children)
	}
	first := children[0]
	t.Cleanup(func() {
		select {
		case <-s.done:
		default:
			_ = unix.Kill(first, unix.SIGTERM)
		}
	})
	l := newLoad(t, ns, 4, web("tcp", address))
	for range 5 {
		s.mustUpgrade()
	}
	l.check()
	// Orphans are its children; only the server is left.
	testutil.WaitFor(t, patience, func() bool { return len(childrenOf(t, first)) == 1 }, "process 1 does not wait for its children")
	signalTo(t, first, unix.SIGTERM)
	select {
	case <-s.done:
	case <-time.After(patience):
		t.Fatal("process 1 did not end at SIGTERM")
	}
	if code := s.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// What is wrong with the start is said, with the exit code.
func TestStart(t *testing.T) {
	ns := testutil.NetNS(t)
	dir := workspace(t)
	busy, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	exits := filepath.Join(dir, "exits")
	if err := os.WriteFile(exits, []byte("exit"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name string
		args []string
		code int
		want string
	}{
		{"address in use", []string{"--listen", "web=tcp:" + address, "--", "true"}, 1, "stop who has it"},
		{"missing executable", []string{"--", "/nonexistent/server"}, 4, "start /nonexistent/server"},
		{"not executable", []string{"--", filepath.Join(dir, "tcp.py")}, 3, "permission denied"},
		{"ends at once", []string{"--listen", "web=tcp:127.0.0.1:8081", "--", python(t), filepath.Join(dir, "tcp.py"), exits}, 1, "ended before it was ready: exit status 1"},
		{"no server", nil, 2, "missing SERVER"},
		{"no steering", []string{"--listen", "x=udp:127.0.0.1:53", "--", "true"}, 2, "write steering=stateless"},
		{"two of a name", []string{"--listen", "x=tcp::81", "--listen", "x=tcp::82", "--", "true"}, 2, "two listeners are named"},
		{"unknown user", []string{"--user", "nobody-of-that-name", "--", "true"}, 2, "unknown user"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			out, err := ns.Command(filepath.Join(dir, "instar"), append([]string{"run"}, tc.args...)...).CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != tc.code || !strings.Contains(string(out), tc.want) {
				t.Errorf("%v, %s; want exit code %d and %q", err, out, tc.code, tc.want)
			}
		})
	}
}
