// SPDX-License-Identifier: Apache-2.0

package systemd

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
	"instar/internal/testutil"
)

func TestNoManager(t *testing.T) {
	n, err := NewNotifier(env{}.get)
	if n != nil || err != nil {
		t.Fatalf("%v, %v", n, err)
	}
	for what, err := range map[string]error{
		"Ready":     n.Ready("x"),
		"Reloading": n.Reloading(),
		"Stopping":  n.Stopping(),
		"Status":    n.Status("x"),
		"MainPID":   n.MainPID(1),
		"Send":      n.Send("not an assignment"),
		"StoreFD":   n.StoreFD("", nil, true),
		"RemoveFD":  n.RemoveFD(""),
		"RenameFD":  n.RenameFD("", "", nil, true),
		"Barrier":   n.Barrier(t.Context()),
	} {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestSocketNames(t *testing.T) {
	for _, tc := range []struct{ socket, want string }{
		{"vsock:2:1234", "AF_VSOCK"},
		{"vsock-stream:2:1234", "AF_VSOCK"},
		{"run/notify", "neither a path"},
		{"@", "empty"},
		{"/", "empty"},
		{"/" + strings.Repeat("x", maxSocketPath), "108 octets, at most 107"},
	} {
		n, err := NewNotifier(env{socketEnv: tc.socket}.get)
		if n != nil || err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "unset the variable") {
			t.Errorf("%q: %v, %v, want %q", tc.socket, n, err, tc.want)
		}
	}
	// The longest ones that are accepted can be sent to.
	dir := filepath.Dir(newManager(t).socket)
	for _, start := range []string{dir + "/", "@" + dir} {
		m := newManagerAt(t, start+strings.Repeat("x", maxSocketPath-len(start)))
		if err := m.notifier().Stopping(); err != nil {
			t.Fatal(err)
		}
		m.expect("STOPPING=1")
	}
}

func TestMessages(t *testing.T) {
	m := newManager(t)
	n := m.notifier()
	for _, tc := range []struct {
		send func() error
		want string
	}{
		{func() error { return n.Ready("") }, "READY=1"},
		{func() error { return n.Ready("serving") }, "READY=1\nSTATUS=serving"},
		{func() error { return n.Stopping() }, "STOPPING=1"},
		{func() error { return n.Status("2 of 3") }, "STATUS=2 of 3"},
		{func() error { return n.Status("") }, "STATUS="},
		{func() error { return n.Status("a\nREADY=1\x00\tb") }, "STATUS=a READY=1  b"},
		{func() error { return n.Status("größe\xff") }, "STATUS=größe\uFFFD"},
		{func() error { return n.Status(strings.Repeat("x", maxStatus-1) + "ö") }, "STATUS=" + strings.Repeat("x", maxStatus-1)},
		{func() error { return n.Ready(strings.Repeat("x", maxDatagram)) }, "READY=1\nSTATUS=" + strings.Repeat("x", maxStatus)},
		{func() error { return n.MainPID(4711) }, "MAINPID=4711"},
		{func() error { return n.Send("MAINPID=4711", "READY=1", "X_INSTAR_EMPTY=") }, "MAINPID=4711\nREADY=1\nX_INSTAR_EMPTY="},
		{func() error { return n.Send("X=" + strings.Repeat("x", maxDatagram-2)) }, "X=" + strings.Repeat("x", maxDatagram-2)},
	} {
		if err := tc.send(); err != nil {
			t.Errorf("%.80q: %v", tc.want, err)
			continue
		}
		m.expect(tc.want)
	}
	m.nothing()
}

func TestReloading(t *testing.T) {
	m := newManager(t)
	clock := func() int64 {
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
			t.Fatal(err)
		}
		return now.Nano() / 1000
	}
	before := clock()
	if err := m.notifier().Reloading(); err != nil {
		t.Fatal(err)
	}
	after := clock()
	got := m.recv()
	usec, err := strconv.ParseInt(got.value("MONOTONIC_USEC"), 10, 64)
	if err != nil || usec < before || usec > after {
		t.Errorf("MONOTONIC_USEC: %d, %v, want it from %d to %d", usec, err, before, after)
	}
	if want := fmt.Sprintf("RELOADING=1\nMONOTONIC_USEC=%d", usec); got.state != want {
		t.Errorf("%q, want %q", got.state, want)
	}
}

// What is refused does not reach the manager, not even in part.
func TestRefused(t *testing.T) {
	m := newManager(t)
	n := m.notifier()
	null := open(t, os.DevNull)
	long := strings.Repeat("x", 256)
	for _, tc := range []struct {
		err  error
		want string
	}{
		{n.Send(), "nothing to send"},
		{n.Send("READY=1", "READY"), "not of the form"},
		{n.Send("=1"), "not of the form"},
		{n.Send("STATUS=a\nREADY=1"), "has one line"},
		{n.Send("STATUS=\x00"), "no NUL"},
		{n.Send("X=" + strings.Repeat("x", maxDatagram)), "4098 octets, the manager reads 4096"},
		{n.Send("READY=1", "BARRIER=1"), `"BARRIER=1": it goes with a descriptor`},
		{n.Send("FDSTORE=1"), `"FDSTORE=1": it goes with a descriptor`},
		{n.MainPID(0), `"MAINPID=0": not the number`},
		{n.MainPID(-1), `"MAINPID=-1": not the number`},
		{n.Send("MAINPID=me"), `"MAINPID=me": not the number`},
		{n.StoreFD("a:b", null, true), `"a:b": ':' is not allowed`},
		{n.StoreFD("ö", null, true), `"ö": 'Ã' is not allowed`},
		{n.StoreFD(long, null, true), "256 octets, at most 255"},
		{n.RemoveFD("a\n"), `"a\n": '\n' is not allowed`},
		{n.RemoveFD("\x7f"), `is not allowed`},
		{n.RemoveFD(""), "the name is empty"},
		{n.RenameFD("a", "b:c", null, true), `"b:c": ':' is not allowed`},
		{n.RenameFD("", "b", null, true), "the name is empty"},
	} {
		if tc.err == nil || !strings.Contains(tc.err.Error(), tc.want) || !strings.Contains(tc.err.Error(), m.socket) {
			t.Errorf("%v, want %q and the socket", tc.err, tc.want)
		}
	}
	m.nothing()
}

func open(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			t.Error(err)
		}
	})
	return f
}

func TestUnreachable(t *testing.T) {
	m := newManager(t)
	dir := filepath.Dir(m.socket)
	check := func(socket string, want error, hint string) {
		t.Helper()
		err := notifierFor(t, socket).Ready("")
		if !errors.Is(err, want) || !strings.Contains(err.Error(), socket) || !strings.Contains(err.Error(), hint) {
			t.Errorf("%s: %v, want %v and %q", socket, err, want, hint)
		}
	}
	check(dir+"/none", fs.ErrNotExist, "visible here")
	check("@"+dir+"/none", unix.ECONNREFUSED, "left over")
	stream, err := net.Listen("unix", dir+"/stream")
	if err != nil {
		t.Fatal(err)
	}
	check(dir+"/stream", unix.EPROTOTYPE, "datagram socket")
	if err := stream.Close(); err != nil {
		t.Fatal(err)
	}
	// The path stays when the manager is gone.
	if err := m.conn.Close(); err != nil {
		t.Fatal(err)
	}
	if err := m.notifier().Barrier(t.Context()); !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("barrier at no manager: %v", err)
	}
}

var notifyProgram = testutil.NewProgram("notify", func(c *testutil.Conversation) error {
	n, err := NewNotifier(os.Getenv)
	if err != nil {
		return err
	}
	if err := n.Ready(""); err != nil {
		c.Send("%v", err)
		return nil
	}
	c.Send("ok")
	return nil
})

// The manager knows the sender by its credentials, and a user may lack the right
// to write to the socket.
func TestOtherUser(t *testing.T) {
	testutil.NeedRoot(t)
	m := newManager(t)
	if err := os.Chmod(filepath.Dir(m.socket), 0o755); err != nil {
		t.Fatal(err)
	}
	start := func() *testutil.Process {
		return notifyProgram.Start(t, testutil.Options{As: testutil.Nobody(), Env: []string{socketEnv + "=" + m.socket}})
	}
	if err := os.Chmod(m.socket, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := start().Recv(); !strings.Contains(got, "permission denied; may this user") {
		t.Errorf("without the right: %s", got)
	}
	if err := os.Chmod(m.socket, 0o777); err != nil {
		t.Fatal(err)
	}
	p := start()
	p.Expect("ok")
	if got := m.recv(); got.state != "READY=1" || got.pid != int32(p.PID) {
		t.Errorf("%q from %d, want it from %d", got.state, got.pid, p.PID)
	}
}

// fill sends datagrams until the manager's queue is full, and returns how many.
func fill(t *testing.T, m *manager) int {
	t.Helper()
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: m.socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for n := 0; ; n++ {
		err := rawconn.Of(conn, func(fd int) error {
			return unix.Sendto(fd, []byte("X_FILL=1"), unix.MSG_DONTWAIT, nil)
		})
		if errors.Is(err, unix.EAGAIN) {
			return n
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestQueueIsFull(t *testing.T) {
	m := newManager(t)
	n := m.notifier()
	n.patience = 20 * time.Millisecond
	queued := fill(t, m)
	if queued == 0 {
		t.Fatal("the queue was full from the start")
	}
	err := n.Ready("")
	if !errors.Is(err, os.ErrDeadlineExceeded) || !strings.Contains(err.Error(), "queue was full for 20ms") {
		t.Errorf("no room: %v", err)
	}
	// No descriptor stays behind for the manager; TestMain looks for ours.
	if err := n.Barrier(t.Context()); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a barrier without room: %v", err)
	}
	// A datagram waits for room.
	n.patience = testTimeout
	sent := make(chan error)
	go func() { sent <- n.Ready("late") }()
	for range queued {
		if got := m.recv(); got.state != "X_FILL=1" {
			t.Fatalf("%q before those of the queue", got.state)
		}
	}
	m.expect("READY=1", "STATUS=late")
	if err := <-sent; err != nil {
		t.Errorf("with room: %v", err)
	}
	m.nothing()
}

// A child that is started while a datagram waits gets nothing of it.
func TestNothingLeaks(t *testing.T) {
	m := newManager(t)
	l := listenTCP(t)
	n := m.notifier()
	n.patience = testTimeout
	// count counts the descriptors, and those that a child would have.
	count := func() (all, leaking int) {
		for fd := range 200 {
			if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil {
				all++
				if flags&unix.FD_CLOEXEC == 0 {
					leaking++
				}
			}
		}
		return all, leaking
	}
	for what, send := range map[string]func() error{
		"store":   func() error { return n.StoreFD("a", l, true) },
		"barrier": func() error { return n.Barrier(t.Context()) },
	} {
		queued := fill(t, m)
		all, leaking := count()
		sent := make(chan error, 1)
		go func() { sent <- send() }()
		// The duplicate or the pipe, and the socket.
		testutil.WaitFor(t, testTimeout, func() bool { now, _ := count(); return now >= all+2 }, "%s waits for room", what)
		if _, now := count(); now != leaking {
			t.Errorf("%s: a child would have %d descriptors more", what, now-leaking)
		}
		for range queued {
			m.recv()
		}
		m.close(m.recv().fds...)
		if err := <-sent; err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestBarrier(t *testing.T) {
	m := newManager(t)
	n := m.notifier()
	if err := n.Ready(""); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- n.Barrier(t.Context()) }()
	m.expect("READY=1")
	got := m.recv()
	if got.state != "BARRIER=1" || len(got.fds) != 1 {
		t.Fatalf("%q with descriptors %v, want one", got.state, got.fds)
	}
	// The manager has it, late: only its end of the pipe holds the barrier up.
	select {
	case err := <-done:
		t.Fatalf("the barrier ended before the manager closed it: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	m.close(got.fds...)
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(testTimeout):
		t.Error("the barrier does not end")
	}
}

func TestBarrierNeverClosed(t *testing.T) {
	m := newManager(t)
	n := m.notifier()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err := n.Barrier(ctx)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), m.socket) || !strings.Contains(err.Error(), "busy or stopped") {
		t.Errorf("%v, want the context's error", err)
	}
	m.close(m.recv().fds...)

	// By another reason of the context.
	reason := errors.New("reason")
	other, cancelOther := context.WithCancelCause(t.Context())
	done := make(chan error, 1)
	go func() { done <- n.Barrier(other) }()
	got := m.recv()
	cancelOther(reason)
	if err := <-done; !errors.Is(err, reason) {
		t.Errorf("%v, want %v", err, reason)
	}
	m.close(got.fds...)

	// One that has ended already sends nothing.
	if err := n.Barrier(other); !errors.Is(err, reason) {
		t.Errorf("%v, want %v", err, reason)
	}
	m.nothing()

	// The next one is not disturbed.
	go func() { done <- n.Barrier(t.Context()) }()
	m.close(m.recv().fds...)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestBarrierManagerDies(t *testing.T) {
	m := newManager(t)
	done := make(chan error, 1)
	n := m.notifier()
	go func() { done <- n.Barrier(t.Context()) }()
	testutil.WaitFor(t, testTimeout, func() bool {
		return rawconn.Of(m.conn, func(fd int) error {
			_, _, err := unix.Recvfrom(fd, make([]byte, 16), unix.MSG_PEEK|unix.MSG_DONTWAIT)
			return err
		}) == nil
	}, "the barrier is in the queue")
	if err := m.conn.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(testTimeout):
		t.Fatal("the barrier outlives the manager")
	}
}

func listenTCP(t *testing.T) *net.TCPListener {
	t.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	})
	return l
}

func TestStore(t *testing.T) {
	m := newManager(t)
	n := m.notifier()
	store := newStore(m, 3)
	step := func(err error, want string) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		store.handle()
		if got := store.String(); got != want {
			t.Fatalf("the store has %q, want %q", got, want)
		}
	}
	a, b := listenTCP(t), listenTCP(t)
	step(n.StoreFD("a", a, false), "a!")
	step(n.StoreFD("b", b, true), "a! b")
	// The same open file is not stored again.
	step(n.StoreFD("c", a, false), "a! b")
	step(n.StoreFD("b", open(t, os.DevNull), false), "a! b b!")
	// The store is full.
	step(n.StoreFD("d", open(t, os.DevNull), true), "a! b b!")
	step(n.RemoveFD("b"), "a!")
	step(n.RemoveFD("none"), "a!")

	// A new name.
	if err := n.RenameFD("a", "a2", a, true); err != nil {
		t.Fatal(err)
	}
	store.handle()
	step(nil, "a2")

	// It is the listener, not a copy of it, and nobody made it blocking.
	err := rawconn.Of(a, func(fd int) error {
		if !sameFile(t, fd, store.entries[0].fd) {
			t.Error("the store has another file")
		}
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
		if flags&unix.O_NONBLOCK == 0 {
			t.Error("the listener blocks")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}

	// A closed one is refused.
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if err := n.StoreFD("b", b, true); !errors.Is(err, net.ErrClosed) || !strings.Contains(err.Error(), `"b"`) {
		t.Errorf("a closed listener: %v", err)
	}
	m.nothing()
}
