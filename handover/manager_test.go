// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
)

// manager is a notify socket. It confirms barriers.
type manager struct {
	path string
	mu   sync.Mutex
	said []word
	hook map[string]func() // called after a line was read, and before a barrier is confirmed
}

// on has f called for each line.
func (m *manager) on(line string, f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hook[line] = f
}

// word is a line that a process said.
type word struct {
	pid  int
	line string
}

func newManager(t testing.TB) *manager {
	t.Helper()
	m := &manager{path: filepath.Join(t.TempDir(), "notify"), hook: map[string]func(){}}
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: m.path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	err = rawconn.Of(c, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1) })
	if err != nil {
		t.Fatal(err)
	}
	var reader sync.WaitGroup
	reader.Go(func() {
		b, oob := make([]byte, 64<<10), make([]byte, 4096)
		for {
			n, oobn, _, _, err := c.ReadMsgUnix(b, oob)
			if err != nil {
				return
			}
			messages, err := unix.ParseSocketControlMessage(oob[:oobn])
			if err != nil {
				t.Error(err)
			}
			pid := 0
			for _, msg := range messages {
				if cred, err := unix.ParseUnixCredentials(&msg); err == nil {
					pid = int(cred.Pid)
				}
			}
			var hooks []func()
			m.mu.Lock()
			for line := range strings.SplitSeq(strings.TrimSpace(string(b[:n])), "\n") {
				m.said = append(m.said, word{pid, line})
				if f := m.hook[line]; f != nil {
					hooks = append(hooks, f)
				}
			}
			m.mu.Unlock()
			for _, f := range hooks {
				f()
			}
			fds, err := parseRights(oob[:oobn])
			if err != nil {
				t.Error(err)
			}
			closeAll(fds) // a barrier is confirmed so
		}
	})
	t.Cleanup(func() {
		_ = c.Close()
		reader.Wait()
	})
	return m
}

// of returns what a process said, without the values that vary.
func (m *manager) of(pid int) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var lines []string
	for _, w := range m.said {
		name, _, _ := strings.Cut(w.line, "=")
		if w.pid == pid && name != "STATUS" {
			line := w.line
			if name == "MONOTONIC_USEC" {
				line = name
			}
			lines = append(lines, line)
		}
	}
	return lines
}

// hears waits until a process has said exactly this, from the index on.
func (m *manager) hears(t testing.TB, pid, from int, want ...string) {
	t.Helper()
	var got []string
	deadline := time.Now().Add(patience)
	for {
		got = m.of(pid)
		got = got[min(from, len(got)):]
		if slices.Equal(got, want) {
			return
		}
		if len(got) >= len(want) || time.Now().After(deadline) {
			t.Errorf("process %d said %q, want %q", pid, got, want)
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// The service manager hears READY of the first, RELOADING with the time, then
// MAINPID and READY and a barrier before the old one leaves; each only of the main
// process, and nothing of one that drains (E1, E2). The successor is a child of the
// predecessor's parent, as managers look after their own children only.
func TestServiceManager(t *testing.T) {
	m := newManager(t)
	t.Setenv("NOTIFY_SOCKET", m.path)
	s := newService(t, appConfig{})
	first := s.up()
	if _, err := s.upgrade(); err != nil {
		t.Fatal(err)
	}
	second := s.await(0, "the second", func(e appEvent) bool { return e.What == "ready" && e.Generation == 2 })
	s.await(0, "the end of the first", func(e appEvent) bool { return e.What == "end" && e.PID == first.PID })
	main := fmt.Sprintf("MAINPID=%d", second.PID)
	m.hears(t, first.PID, 0, "READY=1", fmt.Sprintf("MAINPID=%d", first.PID), "RELOADING=1", "MONOTONIC_USEC", main, "READY=1", "BARRIER=1")
	m.hears(t, second.PID, 0, "READY=1", main)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", second.PID))
	if err != nil || !strings.Contains(string(status), fmt.Sprintf("PPid:\t%d\n", os.Getpid())) {
		t.Errorf("the successor's parent is not the predecessor's (%d): %v", os.Getpid(), err)
	}

	// A successor that fails: RELOADING, then READY again, and no other speaks.
	s.fault(fault{3, "ready", refuse})
	before := len(m.of(second.PID))
	if _, err := s.upgrade(); err == nil {
		t.Error("upgraded in spite of the fault")
	}
	m.hears(t, second.PID, before, "RELOADING=1", "MONOTONIC_USEC", "READY=1")
	// One that is taken back.
	s.fault(fault{3, "committed", kill})
	before = len(m.of(second.PID))
	if _, err := s.upgrade(); err == nil {
		t.Error("upgraded in spite of the fault")
	}
	m.hears(t, second.PID, before, "RELOADING=1", "MONOTONIC_USEC", main, "READY=1")
	// The end.
	if err := unix.Kill(second.PID, unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	s.await(0, "the end of the second", func(e appEvent) bool { return e.What == "end" && e.PID == second.PID })
	m.hears(t, second.PID, before+4, "STOPPING=1")
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range m.said {
		if w.pid != first.PID && w.pid != second.PID {
			t.Errorf("process %d said %q", w.pid, w.line)
		}
	}
}
