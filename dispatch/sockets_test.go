// SPDX-License-Identifier: Apache-2.0

package dispatch_test

import (
	"context"
	"fmt"
	"net"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/internal/testutil"
)

// The sockets of a group, and those of others at its address and around.
func TestSocketsNear(t *testing.T) {
	w := newWorld(t)
	g := w.open(w.options("127.0.0.1:4433"))
	list := func() (found []string) {
		t.Helper()
		sockets, err := g.Sockets()
		w.must(err)
		for _, s := range sockets {
			if s.Cookie == 0 || s.Inode == 0 || s.UID != 0 {
				t.Errorf("%+v", s)
			}
			found = append(found, fmt.Sprintf("%s %s %s %v", s.Network, s.Address, s.Overlap, s.Registered))
		}
		slices.Sort(found)
		return found
	}
	if got := list(); len(got) != 0 {
		t.Errorf("at an address of nobody: %q", got)
	}
	w.join(g, 2)
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
	}}
	for _, address := range []string{"127.0.0.1:4433", "0.0.0.0:4433", "[::]:4433", "[::1]:4433", "127.0.0.2:4433", "127.0.0.1:4434"} {
		network := "udp" // which binds 0.0.0.0 for both families
		if address[0] != '[' {
			network = "udp4"
		}
		c, err := config.ListenPacket(context.Background(), network, address)
		w.must(err)
		defer c.Close()
	}
	client, err := net.Dial("udp", "127.0.0.1:4433") // connected, on a port of its own
	w.must(err)
	defer client.Close()
	want := []string{
		"udp [::]:4433 wider false", "udp4 0.0.0.0:4433 wider false", "udp4 127.0.0.1:4433 same false",
		"udp4 127.0.0.1:4433 same true", "udp4 127.0.0.1:4433 same true",
	}
	if got := list(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}

	network, sockets, err := dispatch.SocketsAt(dispatch.Options{Address: "[::1]:4433"})
	if err != nil || network != "udp6" || len(sockets) != 2 {
		t.Errorf("at [::1]: %s %+v %v", network, sockets, err)
	}
	_, _, err = dispatch.SocketsAt(dispatch.Options{Address: "localhost:4433"})
	wantRefused(t, "SocketsAt", err, "options", "literal IP address")
	_, _, err = dispatch.SocketsAt(dispatch.Options{Address: "127.0.0.1:4433", Device: "none0"})
	if err == nil {
		t.Error("a device that is not there: no error")
	}

	testutil.OtherNetNS(t).Run(func() {
		_, err := g.Sockets()
		wantRefused(t, "Sockets", err, "state", "it is in network namespace")
	})
}
