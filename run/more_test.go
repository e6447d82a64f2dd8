// SPDX-License-Identifier: Apache-2.0

package run_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"instar/internal/testutil"
)

// wrap makes the server an executable of its own, which can be replaced, and returns its
// path and its text.
func (s *supervisor) wrap() (path, text string) {
	s.t.Helper()
	i := slices.Index(s.cmd.Args, "--")
	path = filepath.Join(s.dir, "server")
	text = "#!/bin/sh\nexec " + strings.Join(s.cmd.Args[i+1:], " ") + "\n"
	s.cmd.Args = append(s.cmd.Args[:i+1:i+1], path)
	s.replace(path, text)
	return path, text
}

// replace puts another file in the place of the executable, at once.
func (s *supervisor) replace(path, text string) {
	s.t.Helper()
	err := os.WriteFile(path+".new", []byte(text), 0o755) // #nosec: an executable
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

// An executable that is missing, or that the kernel does not execute, at upgrade time
// changes nothing; the next upgrade finds it.
func TestMissingExecutable(t *testing.T) {
	ns := testutil.NetNS(t)
	s := prepare(t, ns, "tcp.py", "--nonblock", "--listen", "web=tcp:"+address, "--probation", "0")
	path, text := s.wrap()
	s.launch()
	before := s.serving()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := s.upgrade(); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("without the executable: %v", err)
	}
	s.replace(path, "neither a script nor a program\n")
	if err := s.upgrade(); err == nil || !strings.Contains(err.Error(), "exec format error") {
		t.Errorf("with garbage: %v", err)
	}
	if pid, _, err := get("tcp", address); err != nil || pid != before {
		t.Errorf("process %d answers, %v, want %d", pid, err, before)
	}
	s.replace(path, text)
	s.mustUpgrade()
	if pid, _, err := get("tcp", address); err != nil || pid == before {
		t.Errorf("process %d answers, %v", pid, err)
	}
}

// With --watch a new executable is an upgrade; one that fails is tried once.
func TestWatch(t *testing.T) {
	ns := testutil.NetNS(t)
	s := prepare(t, ns, "tcp.py", "--nonblock", "--listen", "web=tcp:"+address, "--probation", "0", "--watch")
	path, text := s.wrap()
	s.launch()
	for generation := 2; generation <= 3; generation++ {
		s.replace(path, text+strings.Repeat("# newer\n", generation))
		testutil.WaitFor(t, patience, func() bool { return s.mustStatus().Generation == generation }, "no upgrade to the new executable")
	}
	generation := s.mustStatus().Generation
	s.replace(path, "#!/bin/sh\necho broken; exit 1\n")
	testutil.WaitFor(t, patience, func() bool { return s.log.count("upgrade to the new executable") == 1 }, "the broken one is not tried")
	s.replace(path, text)
	testutil.WaitFor(t, patience, func() bool { return s.mustStatus().Generation > generation }, "no upgrade to the mended executable")
	if n := s.log.count("broken\n"); n != 1 {
		t.Errorf("the broken executable was started %d times", n)
	}
}

// SIGTERM while a successor hangs, or stands its probation, ends both.
func TestStopDuringUpgrade(t *testing.T) {
	for _, mode := range []string{"hang", "serve"} {
		t.Run(mode, func(t *testing.T) {
			ns := testutil.NetNS(t)
			s := start(t, ns, "tcp.py", "--nonblock", "--listen", "web=tcp:"+address, "--probation", "1h", "--ready-timeout", "1h")
			s.behave(mode)
			failed := make(chan error, 1)
			go func() { failed <- s.upgrade() }()
			testutil.WaitFor(t, patience, func() bool {
				return s.log.count("hangs") == 1 || s.mustStatus().Probation
			}, "no successor")
			pids := childrenOf(t, s.cmd.Process.Pid)
			if len(pids) != 2 {
				t.Errorf("processes %v, want two", pids)
			}
			if code := s.end(unix.SIGTERM); code != 0 {
				t.Errorf("exit code %d", code)
			}
			if err := <-failed; err == nil && mode == "hang" {
				t.Error("the upgrade to a process that hangs succeeded")
			}
			for _, pid := range pids {
				if err := unix.Kill(pid, 0); err == nil {
					t.Errorf("process %d is left", pid)
				}
			}
		})
	}
}

// kill -9 of the predecessor while its successor starts, and while that is in its
// probation: the successor serves.
func TestPredecessorDies(t *testing.T) {
	for _, when := range []string{"start", "probation"} {
		t.Run(when, func(t *testing.T) {
			ns := testutil.NetNS(t)
			s := prepare(t, ns, "tcp.py", "--nonblock", "--listen", "web=tcp:"+address, "--probation", "1h")
			path, text := s.wrap()
			s.launch()
			before := s.serving()
			fifo := filepath.Join(s.dir, "fifo")
			if when == "start" { // the successor waits for a word
				if err := unix.Mkfifo(fifo, 0o600); err != nil {
					t.Fatal(err)
				}
				s.replace(path, strings.Replace(text, "exec", "echo waits\nread word <"+fifo+"\nexec", 1))
			}
			upgraded := make(chan error, 1)
			go func() { upgraded <- s.upgrade() }()
			testutil.WaitFor(t, patience, func() bool {
				return s.log.count("waits\n") == 1 || s.mustStatus().Probation
			}, "no successor")
			signalTo(t, before, unix.SIGKILL)
			if when == "start" {
				testutil.WaitFor(t, patience, func() bool { return s.log.count("signal: killed") == 1 }, "the death is not noticed")
				if err := os.WriteFile(fifo, []byte("go\n"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if err := <-upgraded; err != nil {
				t.Error(err)
			}
			now := s.mustStatus()
			if pid, _, err := get("tcp", address); err != nil || pid != now.PID || pid == before {
				t.Errorf("process %d answers, %v; want %d", pid, err, now.PID)
			}
		})
	}
}

// A server that never says READY=1 is upgraded as well.
func TestNoNotify(t *testing.T) {
	ns := testutil.NetNS(t)
	s := start(t, ns, "tcp.py", "--nonblock", "--no-notify", "--listen", "web=tcp:"+address, "--probation", "1s")
	l := newLoad(t, ns, 4, web("tcp", address))
	for range 3 {
		s.mustUpgrade()
		l.waitFor(s.mustStatus().PID)
	}
	l.check()
}

// A predecessor that ignores SIGTERM is killed after --drain.
func TestStubborn(t *testing.T) {
	ns := testutil.NetNS(t)
	s := prepare(t, ns, "tcp.py", "--nonblock", "--listen", "web=tcp:"+address, "--probation", "0", "--drain", "2s")
	s.behave("stubborn")
	s.launch()
	before := s.serving()
	s.behave("serve")
	s.mustUpgrade()
	testutil.WaitFor(t, patience, func() bool { return len(s.mustStatus().Older) == 0 }, "process %d lives", before)
	if n := s.log.count("did not end at SIGTERM and is killed"); n != 1 {
		t.Errorf("%d processes were killed, want one", n)
	}
}

// No upgrade begins while too many processes live; afterwards it does.
func TestLimit(t *testing.T) {
	ns := testutil.NetNS(t)
	s := prepare(t, ns, "tcp.py", "--nonblock", "--listen", "web=tcp:"+address, "--probation", "0", "--drain", "1h", "--max-processes", "2")
	s.behave("stubborn")
	s.launch()
	before := s.serving()
	t.Cleanup(func() {
		for _, pid := range childrenOf(t, s.cmd.Process.Pid) {
			if pid == before {
				_ = unix.Kill(pid, unix.SIGKILL)
			}
		}
	})
	s.behave("serve")
	s.mustUpgrade()
	now := s.mustStatus()
	if err := s.upgrade(); err == nil || !strings.Contains(err.Error(), "2 live, and that is the limit") {
		t.Errorf("third process: %v", err)
	}
	if got := s.mustStatus(); got.PID != now.PID || len(got.Older) != 1 {
		t.Errorf("after a refused upgrade: %+v", got)
	}
	kill(t, childrenOf(t, s.cmd.Process.Pid), now.PID)
	testutil.WaitFor(t, patience, func() bool { return len(s.mustStatus().Older) == 0 }, "process %d lives", before)
	s.mustUpgrade()
}

// Both die in the probation: the server is started again.
func TestBothDie(t *testing.T) {
	ns, root := testutil.NetNS(t), testutil.BPFFS(t)
	s := start(t, ns, "udp.py", "--root", root, "--probation", "1h", "--listen", "echo=udp:"+udpAddress+",steering=stateless")
	failed := make(chan error, 1)
	go func() { failed <- s.upgrade() }()
	testutil.WaitFor(t, patience, func() bool { return s.mustStatus().Probation }, "there is no probation")
	pids := childrenOf(t, s.cmd.Process.Pid)
	for _, pid := range pids {
		signalTo(t, pid, unix.SIGKILL)
	}
	t.Log(<-failed) // or nil: the one that died first may have left the other alone
	ask, end := echo(t, true)()
	defer end()
	if pid, err := ask(); err != nil || slices.Contains(pids, pid) {
		t.Errorf("process %d answers, %v", pid, err)
	}
}

// systemd accepts the unit, and reads the words that were given.
func TestPrintUnit(t *testing.T) {
	dir := workspace(t)
	analyze := testutil.NeedCommand(t, "systemd-analyze", "systemd")
	out, err := exec.Command(filepath.Join(dir, "instar"), "run", "--listen", "web=tcp::80", "--listen", "a=unix:/run/a b", "--user", "nobody",
		"--control", "/run/x/control", "--drain", "1m", "--print-unit", "--", "/bin/echo", "100%", "$HOME", `two "words"`).Output()
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf(`ExecStart=%[1]s run --control=/run/x/control --drain=1m0s --listen=web=tcp::80 "--listen=a=unix:/run/a b" --user=nobody -- /bin/echo 100%%%% $$HOME "two \"words\""
ExecReload=%[1]s upgrade /run/x/control
`, filepath.Join(dir, "instar"))
	if !strings.Contains(string(out), want) || !strings.Contains(string(out), "TimeoutStopSec=130\n") {
		t.Errorf("%s\nwant in it\n%s", out, want)
	}
	unit := filepath.Join(dir, "app.service")
	if err := os.WriteFile(unit, out, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(analyze, "verify", "--man=no", unit).CombinedOutput(); err != nil || strings.Contains(string(out), "app.service") {
		t.Errorf("%v\n%s", err, out)
	}
}
