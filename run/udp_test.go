// SPDX-License-Identifier: Apache-2.0

package run_test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/testutil"
)

const udpAddress = "127.0.0.1:5300"

// echo asks from one port all the time, or from a new one for each question.
func echo(t *testing.T, steady bool) func() (func() (int, error), func()) {
	dial := func() net.Conn {
		c, err := net.Dial("udp", udpAddress)
		if err != nil {
			t.Error(err)
		}
		return c
	}
	return func() (func() (int, error), func()) {
		c, n, b := dial(), 0, make([]byte, 2048)
		ask := func() (int, error) {
			if !steady {
				_ = c.Close()
				c = dial()
			}
			n++
			if _, err := fmt.Fprintf(c, "question-%d", n); err != nil {
				return 0, err
			}
			if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
				return 0, err
			}
			size, err := c.Read(b)
			if err != nil {
				return 0, fmt.Errorf("question %d from %v: %w", n, c.LocalAddr(), err)
			}
			var pid int
			var text string
			if _, err := fmt.Sscan(string(b[:size]), &pid, &text); err != nil || text != fmt.Sprintf("question-%d", n) {
				return 0, fmt.Errorf("question %d: the answer is %q", n, b[:size])
			}
			return pid, nil
		}
		return ask, func() { _ = c.Close() }
	}
}

// sockets counts the UDP sockets that a process has open.
func sockets(t *testing.T, pid int) int {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	all, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range all {
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil && strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}

// An unmodified UDP echo survives ten upgrades under load, of senders that stay and of new
// ones; every question is answered, and no socket is kept.
func TestUDP(t *testing.T) {
	for _, tc := range []struct{ steering, workers string }{{"flow", "1"}, {"flow", "3"}, {"stateless", "2"}} {
		t.Run(tc.steering+tc.workers, func(t *testing.T) {
			ns, root := testutil.NetNS(t), testutil.BPFFS(t)
			s := start(t, ns, "udp.py", "--root", root, "--probation", "100ms", "--drain", "2s", "--max-processes", "100",
				"--listen", "echo=udp:"+udpAddress+",steering="+tc.steering+",workers="+tc.workers)
			before := sockets(t, s.cmd.Process.Pid)
			steady, changing := newLoad(t, ns, 4, echo(t, true)), newLoad(t, ns, 4, echo(t, false))
			upgrades := testutil.UnlessShort(10, 3)
			for i := range upgrades {
				s.behave("exit")
				if err := s.upgrade(); err == nil {
					t.Fatal("a successor that exits takes over")
				}
				s.behave("serve")
				if i%2 == 0 {
					s.mustUpgrade()
				} else {
					s.hangUp()
				}
				changing.waitFor(s.mustStatus().PID)
			}
			testutil.WaitFor(t, patience, func() bool { return len(s.mustStatus().Older) == 0 }, "predecessors do not end")
			steady.waitFor(s.mustStatus().PID)
			steady.check()
			changing.check()
			// The status request that just ended may still have its connection.
			testutil.WaitFor(t, patience, func() bool { return sockets(t, s.cmd.Process.Pid) <= before },
				"the parent keeps sockets")
			if code := s.end(unix.SIGTERM); code != 0 {
				t.Errorf("exit code %d", code)
			}
		})
	}
}

// With steering flow a sender keeps its process while that drains, also when the
// server runs as another user; a new sender gets the successor.
func TestFlow(t *testing.T) {
	ns, root := testutil.NetNS(t), testutil.BPFFS(t)
	const hour = "1h" // nothing ends the drain but SIGTERM to the parent
	s := start(t, ns, "udp.py", "--root", root, "--user", "nobody", "--probation", "0", "--drain", hour,
		"--listen", "echo=udp:"+udpAddress+",steering=flow")
	ask, end := echo(t, true)()
	defer end()
	first := s.mustStatus().PID
	for range 3 {
		if pid, err := ask(); err != nil || pid != first {
			t.Fatalf("process %d answers, %v; want %d", pid, err, first)
		}
		s.mustUpgrade()
		other, endOther := echo(t, true)()
		if pid, err := other(); err != nil || pid != s.mustStatus().PID {
			t.Errorf("process %d answers a new sender, %v; want %d", pid, err, s.mustStatus().PID)
		}
		endOther()
	}
	if pid, err := ask(); err != nil || pid != first {
		t.Fatalf("process %d answers, %v; want %d", pid, err, first)
	}
}

// What was sent while the server was dead waits in the sockets that the parent holds, and
// is answered by the next one.
func TestUDPCrash(t *testing.T) {
	ns, root := testutil.NetNS(t), testutil.BPFFS(t)
	s := start(t, ns, "udp.py", "--root", root, "--probation", "0", "--listen", "echo=udp:"+udpAddress+",steering=flow")
	ask, end := echo(t, true)()
	defer end()
	for range 3 {
		before := s.serving()
		// Stopped, it reads nothing more; then it dies with the question unread.
		signalTo(t, before, unix.SIGSTOP)
		testutil.WaitFor(t, patience, func() bool {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", before))
			return err == nil && strings.Contains(string(b), ") T ")
		}, "the server does not stop")
		type answer struct {
			pid int
			err error
		}
		answered := make(chan answer, 1)
		go func() {
			pid, err := ask()
			answered <- answer{pid, err}
		}()
		signalTo(t, before, unix.SIGKILL)
		if got := <-answered; got.err != nil || got.pid == before {
			t.Fatalf("process %d answers: %v", got.pid, got.err)
		}
	}
}

// A successor that dies in its probation gives new senders back to the predecessor, which
// keeps those that it had.
func TestUDPProbation(t *testing.T) {
	ns, root := testutil.NetNS(t), testutil.BPFFS(t)
	s := start(t, ns, "udp.py", "--root", root, "--probation", "1h", "--listen", "echo=udp:"+udpAddress+",steering=flow")
	first := s.mustStatus().PID
	kept, end := echo(t, true)()
	defer end()
	if pid, err := kept(); err != nil || pid != first {
		t.Fatalf("process %d answers, %v", pid, err)
	}
	failed := make(chan error, 1)
	go func() { failed <- s.upgrade() }()
	testutil.WaitFor(t, patience, func() bool { return s.mustStatus().Probation }, "there is no probation")
	other, endOther := echo(t, true)()
	defer endOther()
	if pid, err := other(); err != nil || pid == first {
		t.Fatalf("process %d answers a new sender, %v", pid, err)
	}
	kill(t, childrenOf(t, s.cmd.Process.Pid), first)
	if err := <-failed; err == nil || !strings.Contains(err.Error(), "ended in its probation") {
		t.Error(err)
	}
	for _, ask := range []func() (int, error){kept, other} {
		if pid, err := ask(); err != nil || pid != first {
			t.Errorf("process %d answers, %v; want %d", pid, err, first)
		}
	}
}
