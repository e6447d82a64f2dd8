// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
)

// A status names the sockets that go to a successor as the kernel does.
func TestStatusOfSockets(t *testing.T) {
	dir := t.TempDir()
	h, err := New(Options{Socket: filepath.Join(dir, "control")})
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	web, err := h.Listen("web", "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dns, err := h.ListenPacket("dns", "udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer dns.Close()
	file, err := os.Create(filepath.Join(dir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := h.Add("log", file); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := rawconn.Of(web.(syscall.Conn), func(fd int) error { return unix.Fstat(fd, &st) }); err != nil {
		t.Fatal(err)
	}
	s := h.Status()
	names := []string{}
	for _, socket := range s.Sockets {
		names = append(names, socket.Name)
		if socket.Inode == 0 || socket.Name == "web" && (socket.Inode != st.Ino || socket.Address != web.Addr().String() || socket.Network != "tcp") {
			t.Errorf("%+v, want inode %d", socket, st.Ino)
		}
	}
	if len(s.Handed) != 3 || len(names) != 3 || names[0] != "control" || names[1] != "dns" || names[2] != "web" {
		t.Errorf("sockets %q of %q", names, s.Handed)
	}
	if err := web.Close(); err != nil {
		t.Fatal(err)
	}
	for _, socket := range h.Status().Sockets {
		if socket.Name == "web" {
			t.Errorf("closed, and told: %+v", socket)
		}
	}
}
