// SPDX-License-Identifier: Apache-2.0

package sockdiag

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"instar/internal/testutil"
)

func TestDescriptors(t *testing.T) {
	conn := listen(t, "udp", "127.0.0.1:0")
	_, inode := identity(t, conn)
	raw, err := conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var number int
	if err := raw.Control(func(fd uintptr) { number = int(fd) }); err != nil {
		t.Fatal(err)
	}
	holders, _, err := Descriptors()
	if err != nil {
		t.Fatal(err)
	}
	got := holders[inode]
	if len(got) != 1 || got[0].PID != os.Getpid() || got[0].FD != number || got[0].Command == "" {
		t.Errorf("the socket is held by %+v, want descriptor %d of process %d", got, number, os.Getpid())
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	if holders, _, err = Descriptors(); err != nil || len(holders[inode]) > 0 {
		t.Errorf("the closed socket is held by %+v (%v)", holders[inode], err)
	}
}

// looker counts the processes that it may not look into.
var looker = testutil.NewProgram("looker", func(c *testutil.Conversation) error {
	_, unseen, err := Descriptors()
	c.Send("%v %v", unseen > 0, err)
	return nil
})

func TestDescriptorsOfOthers(t *testing.T) {
	testutil.NeedRoot(t)
	looker.Start(t, testutil.Options{As: testutil.Nobody()}).Expect("true <nil>")
}

func TestUnixListeners(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	find := func() []UnixListener {
		t.Helper()
		all, err := UnixListeners()
		if err != nil {
			t.Fatal(err)
		}
		return slices.DeleteFunc(all, func(l UnixListener) bool { return l.Path != path })
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	// The connection's end here has the path as well, and does not listen.
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer accepted.Close()
	raw, err := l.(*net.UnixListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := raw.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &st) }); err != nil {
		t.Fatal(err)
	}
	if got := find(); err != nil || len(got) != 1 || got[0].Inode != uint32(st.Ino) {
		t.Errorf("%+v, want inode %d (%v)", got, st.Ino, err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if got := find(); len(got) > 0 {
		t.Errorf("closed: %+v", got)
	}
}

// Port 0 stands for all ports.
func TestAllPorts(t *testing.T) {
	testutil.NetNS(t)
	for _, address := range []string{"127.0.0.1:4433", "127.0.0.1:4434", "[::1]:4433"} {
		listen(t, "udp", address)
	}
	unbound, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(unbound) }()
	all, err := UDP(0)
	if err != nil || len(all) != 3 {
		t.Errorf("%d sockets on all ports, want 3: %+v (%v)", len(all), all, err)
	}
	if some, err := UDP(4433); err != nil || len(some) != 2 {
		t.Errorf("%d sockets on port 4433, want 2 (%v)", len(some), err)
	}
}
