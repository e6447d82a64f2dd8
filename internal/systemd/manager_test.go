// SPDX-License-Identifier: Apache-2.0

package systemd

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
)

const testTimeout = 20 * time.Second

// manager is the receiving side of NOTIFY_SOCKET, as src/core/manager.c and
// src/core/service.c of systemd have it.
type manager struct {
	t      *testing.T
	socket string
	conn   *net.UnixConn
}

// message is a datagram.
type message struct {
	state string
	pid   int32
	fds   []int // the receiver's
}

func (m message) has(line string) bool { return slices.Contains(strings.Split(m.state, "\n"), line) }

func (m message) value(variable string) string {
	for line := range strings.SplitSeq(m.state, "\n") {
		if v, ok := strings.CutPrefix(line, variable+"="); ok {
			return v
		}
	}
	return ""
}

// newManager listens at a path.
func newManager(t *testing.T) *manager {
	// t.TempDir's name can be too long for a socket.
	dir, err := os.MkdirTemp("", "sd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return newManagerAt(t, filepath.Join(dir, "notify"))
}

func newManagerAt(t *testing.T, socket string) *manager {
	t.Helper()
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	err = rawconn.Of(conn, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	})
	return &manager{t, socket, conn}
}

// notifier returns one for the manager's socket.
func (m *manager) notifier() *Notifier {
	m.t.Helper()
	return notifierFor(m.t, m.socket)
}

func notifierFor(t *testing.T, socket string) *Notifier {
	t.Helper()
	n, err := NewNotifier(env{socketEnv: socket}.get)
	if err != nil || n == nil {
		t.Fatalf("a notifier for %s: %v, %v", socket, n, err)
	}
	return n
}

// recv waits for a datagram.
func (m *manager) recv() message {
	m.t.Helper()
	got, err := m.tryRecv(testTimeout)
	if err != nil {
		m.t.Fatalf("the manager receives: %v", err)
	}
	return got
}

func (m *manager) tryRecv(timeout time.Duration) (message, error) {
	if err := m.conn.SetReadDeadline(time.Now().Add(timeout)); err != nil {
		return message{}, err
	}
	buf := make([]byte, maxDatagram+1)
	oob := make([]byte, 4096)
	n, oobn, flags, _, err := m.conn.ReadMsgUnix(buf, oob)
	if err != nil {
		return message{}, err
	}
	got := message{state: string(buf[:n])}
	controls, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return message{}, err
	}
	for _, c := range controls {
		switch c.Header.Type {
		case unix.SCM_CREDENTIALS:
			creds, err := unix.ParseUnixCredentials(&c)
			if err != nil {
				return message{}, err
			}
			got.pid = creds.Pid
		case unix.SCM_RIGHTS:
			if got.fds, err = unix.ParseUnixRights(&c); err != nil {
				return message{}, err
			}
		}
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return message{}, fmt.Errorf("a datagram was truncated: %q", got.state)
	}
	return got, nil
}

// expect waits for a datagram, without descriptors, of exactly these lines.
func (m *manager) expect(lines ...string) {
	m.t.Helper()
	got := m.recv()
	if want := strings.Join(lines, "\n"); got.state != want || len(got.fds) != 0 {
		m.t.Fatalf("the manager got %q with descriptors %v, want %q", got.state, got.fds, want)
	}
	if got.pid != int32(os.Getpid()) {
		m.t.Fatalf("the message is from process %d, want %d", got.pid, os.Getpid())
	}
}

// nothing checks that no datagram is in the queue.
func (m *manager) nothing() {
	m.t.Helper()
	err := rawconn.Of(m.conn, func(fd int) error {
		var buf [maxDatagram]byte
		n, _, err := unix.Recvfrom(fd, buf[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		if err == nil {
			return fmt.Errorf("the manager got %q", buf[:n])
		}
		return err
	})
	if !errors.Is(err, unix.EAGAIN) {
		m.t.Fatal(err)
	}
}

func (m *manager) close(fds ...int) {
	m.t.Helper()
	for _, fd := range fds {
		if err := unix.Close(fd); err != nil {
			m.t.Error(err)
		}
	}
}

// entry is one of the store's.
type entry struct {
	name string
	fd   int
	poll bool
}

// fdStore is a manager's store of descriptors.
type fdStore struct {
	m       *manager
	max     int
	entries []entry
}

func newStore(m *manager, limit int) *fdStore {
	s := &fdStore{m: m, max: limit}
	m.t.Cleanup(func() {
		for _, e := range s.entries {
			m.close(e.fd)
		}
	})
	return s
}

// handle receives a datagram and does what it says.
func (s *fdStore) handle() message {
	s.m.t.Helper()
	got := s.m.recv()
	name := got.value("FDNAME")
	switch {
	case got.has("FDSTOREREMOVE=1"):
		s.m.close(got.fds...)
		s.entries = slices.DeleteFunc(s.entries, func(e entry) bool {
			if e.name == name {
				s.m.close(e.fd)
			}
			return e.name == name
		})
	case got.has("FDSTORE=1"):
		if name == "" {
			name = NameStored
		}
		for _, fd := range got.fds {
			same := slices.ContainsFunc(s.entries, func(e entry) bool { return sameFile(s.m.t, e.fd, fd) })
			if same || len(s.entries) == s.max {
				s.m.close(fd)
				continue
			}
			s.entries = append(s.entries, entry{name, fd, !got.has("FDPOLL=0")})
		}
	default:
		s.m.t.Fatalf("not for the store: %q", got.state)
	}
	return got
}

// String lists the entries; one that the manager would not poll has a mark.
func (s *fdStore) String() string {
	list := []string{}
	for _, e := range s.entries {
		if !e.poll {
			e.name += "!"
		}
		list = append(list, e.name)
	}
	return strings.Join(list, " ")
}

// sameFile reports whether the descriptors are of one open file.
func sameFile(t *testing.T, a, b int) bool {
	t.Helper()
	const kcmpFile = 0
	pid := uintptr(os.Getpid())
	r, _, errno := unix.Syscall6(unix.SYS_KCMP, pid, pid, kcmpFile, uintptr(a), uintptr(b), 0)
	if errno != 0 {
		t.Fatalf("kcmp: %v", errno)
	}
	return r == 0
}

// env is an environment.
type env map[string]string

func (e env) get(name string) string { return e[name] }

func (e env) unset(name string) error {
	delete(e, name)
	return nil
}
