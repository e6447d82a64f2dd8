// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

const (
	addr     = "127.0.0.1:7007"
	patience = 10 * time.Second
)

// player is a client with state in a server.
type player struct {
	t     *testing.T
	conn  net.Conn
	times int
	pid   int
}

// play sends a datagram, whose answer has to come from the process that has the state.
func (p *player) play() {
	p.t.Helper()
	p.times++
	question := fmt.Sprintf("move %d", p.times)
	if _, err := p.conn.Write([]byte(question)); err != nil {
		p.t.Fatal(err)
	}
	if err := p.conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		p.t.Fatal(err)
	}
	b := make([]byte, 1500)
	n, err := p.conn.Read(b)
	if err != nil {
		p.t.Fatalf("player %v lost a datagram: %v", p.conn.LocalAddr(), err)
	}
	var generation, pid, times int
	if _, err := fmt.Sscan(string(b[:n]), &generation, &pid, &times); err != nil || !strings.HasSuffix(string(b[:n]), question) {
		p.t.Fatalf("answer %q (%v)", b[:n], err)
	}
	if p.pid == 0 {
		p.pid = pid
	}
	if pid != p.pid || times != p.times {
		p.t.Fatalf("move %d was answered by process %d as move %d; process %d has the state", p.times, pid, times, p.pid)
	}
}

// Each player stays with the process that has his state, over three starts; the processes
// end with their last players.
func TestPlayersStay(t *testing.T) {
	ns := testutil.NetNS(t)
	root := testutil.BPFFS(t)
	path := filepath.Join(t.TempDir(), "echo")
	if out, err := exec.Command("go", "build", "-o", path, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	start := func() *testutil.Cmd {
		cmd := ns.Command(path, "-addr", addr, "-root", root, "-silence", "2s")
		cmd.Stderr = t.Output()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	join := func() *player {
		c, err := net.Dial("udp", addr) // this goroutine is in the namespace
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return &player{t: t, conn: c}
	}
	answers := func(cmd *testutil.Cmd) func() bool {
		return func() bool {
			c, err := net.Dial("udp", addr)
			if err != nil {
				return false
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(100 * time.Millisecond))
			_, _ = c.Write([]byte("?"))
			b := make([]byte, 100)
			n, err := c.Read(b)
			var generation, pid int
			_, scan := fmt.Sscan(string(b[:n]), &generation, &pid)
			return err == nil && scan == nil && pid == cmd.Process.Pid
		}
	}
	var servers []*testutil.Cmd
	var players []*player
	for range 3 {
		cmd := start()
		testutil.WaitFor(t, patience, answers(cmd), "process %d to answer", cmd.Process.Pid)
		servers = append(servers, cmd)
		for range 5 {
			p := join()
			p.play()
			if p.pid != cmd.Process.Pid {
				t.Errorf("a new player is with process %d, want the newest, %d", p.pid, cmd.Process.Pid)
			}
			players = append(players, p)
		}
		for range 20 {
			for _, p := range players {
				p.play()
			}
		}
	}
	// The players go home: the first two processes end by themselves.
	for _, cmd := range servers[:2] {
		if err := cmd.Wait(); err != nil {
			t.Errorf("a server that was replaced: %v", err)
		}
	}
	if err := servers[2].Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := servers[2].Wait(); err != nil {
		t.Errorf("the last server: %v", err)
	}
}
