// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

const (
	addr     = "127.0.0.1:7008"
	patience = 10 * time.Second
)

// player is a client with state in a server.
type player struct {
	head  [9]byte
	times int
	pid   int
}

// play sends a datagram from a new port, whose answer has to come from the process that has
// the state.
func (p *player) play(t *testing.T) {
	t.Helper()
	c, err := net.Dial("udp", addr) // this goroutine is in the namespace
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p.times++
	if p.times == 1 {
		copy(p.head[:], "tk")
	}
	if _, err := c.Write(append(p.head[:], "move"...)); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 1500)
	n, err := c.Read(b)
	if err != nil {
		t.Fatalf("a player lost a datagram: %v", err)
	}
	var pid, times int
	if n < 9 || copy(p.head[:], b) != 9 {
		t.Fatalf("answer %q", b[:n])
	}
	if _, err := fmt.Sscan(string(b[9:n]), &pid, &times); err != nil {
		t.Fatalf("answer %q: %v", b[:n], err)
	}
	if p.pid == 0 {
		p.pid = pid
	}
	if pid != p.pid || times != p.times {
		t.Fatalf("move %d was answered by process %d as move %d; process %d has the state", p.times, pid, times, p.pid)
	}
}

// Each player stays with the process that has his state, from whatever port he plays; the
// processes end after their last players.
func TestTokens(t *testing.T) {
	ns := testutil.NetNS(t)
	root := testutil.BPFFS(t)
	path := filepath.Join(t.TempDir(), "token")
	if out, err := exec.Command("go", "build", "-o", path, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	var servers []*testutil.Cmd
	var players []*player
	for range 3 {
		cmd := ns.Command(path, "-addr", addr, "-root", root, "-idle", "1s")
		cmd.Stderr = t.Output()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		servers = append(servers, cmd)
		testutil.WaitFor(t, patience, func() bool { return newest(cmd.Process.Pid) }, "process %d to answer", cmd.Process.Pid)
		for range 5 {
			p := &player{}
			p.play(t)
			if p.pid != cmd.Process.Pid {
				t.Errorf("a new player is with process %d, want the newest, %d", p.pid, cmd.Process.Pid)
			}
			players = append(players, p)
		}
		for range 20 {
			for _, p := range players {
				p.play(t)
			}
		}
	}
	for _, cmd := range servers[:2] {
		if err := cmd.Wait(); err != nil {
			t.Errorf("a server that was replaced: %v", err)
		}
	}
	// A token of a server that has gone leads to one that knows nothing of it.
	head := players[0].head
	binary.BigEndian.PutUint32(head[5:], 1<<31)
	if c, err := net.Dial("udp", addr); err != nil {
		t.Fatal(err)
	} else {
		defer c.Close()
		if _, err := c.Write(append(head[:], "move"...)); err != nil {
			t.Fatal(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(patience))
		b := make([]byte, 100)
		n, err := c.Read(b)
		var pid, times int
		if _, scan := fmt.Sscan(string(b[min(9, n):n]), &pid, &times); err != nil || scan != nil || pid != servers[2].Process.Pid {
			t.Errorf("a token of a process that is gone: answer %q (%v)", b[:n], err)
		}
	}
	if err := servers[2].Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := servers[2].Wait(); err != nil {
		t.Errorf("the last server: %v", err)
	}
}

// newest reports whether a process answers new players.
func newest(want int) bool {
	c, err := net.Dial("udp", addr)
	if err != nil {
		return false
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(100 * time.Millisecond))
	_, _ = c.Write(append([]byte("tk"), make([]byte, 7)...))
	b := make([]byte, 100)
	n, err := c.Read(b)
	var pid int
	if err != nil || n < 9 {
		return false
	}
	_, err = fmt.Sscan(string(b[9:n]), &pid)
	return err == nil && pid == want
}
