// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

const (
	addr     = "127.0.0.1:5353"
	patience = 20 * time.Second
)

// load asks from many ports all the time, a question on each at a time.
type load struct {
	t     *testing.T
	stop  chan struct{}
	ports sync.WaitGroup

	asked, answered, twice atomic.Int64
	mu                     sync.Mutex
	by                     map[string]int // "generation worker" -> answers
	failures               []error
}

func newLoad(t *testing.T, ports int) *load {
	l := &load{t: t, stop: make(chan struct{}), by: make(map[string]int)}
	for range ports {
		c, err := net.Dial("udp", addr) // this goroutine is in the namespace
		if err != nil {
			t.Fatal(err)
		}
		l.ports.Go(func() {
			defer c.Close()
			l.ask(c)
		})
	}
	t.Cleanup(l.end)
	return l
}

func (l *load) ask(c net.Conn) {
	b := make([]byte, 1500)
	for id := uint16(1); ; id++ {
		select {
		case <-l.stop:
			// A second answer would have come by now, or is queued.
			_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
			if _, err := c.Read(b); !errors.Is(err, os.ErrDeadlineExceeded) {
				l.twice.Add(1)
			}
			return
		default:
		}
		l.asked.Add(1)
		who, err := query(c, id, b)
		l.mu.Lock()
		if err != nil {
			l.failures = append(l.failures, err)
		} else {
			l.answered.Add(1)
			l.by[who]++
		}
		l.mu.Unlock()
		if err != nil {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// query asks and returns "generation worker".
func query(c net.Conn, id uint16, b []byte) (string, error) {
	q := new(dns.Msg).SetQuestion("who.test.", dns.TypeTXT)
	q.Id = id
	question, err := q.Pack()
	if err != nil {
		return "", err
	}
	if _, err := c.Write(question); err != nil {
		return "", err
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	n, err := c.Read(b)
	if err != nil {
		return "", fmt.Errorf("query %d from %v: %w", id, c.LocalAddr(), err)
	}
	var reply dns.Msg
	if err := reply.Unpack(b[:n]); err != nil {
		return "", err
	}
	if reply.Id != id || len(reply.Answer) != 1 {
		return "", fmt.Errorf("the answer to query %d from %v is that of %d", id, c.LocalAddr(), reply.Id)
	}
	var generation, pid int
	var worker string
	if _, err := fmt.Sscan(reply.Answer[0].(*dns.TXT).Txt[0], &generation, &worker, &pid); err != nil {
		return "", err
	}
	return fmt.Sprint(generation, " ", worker), nil
}

// answers counts those of a generation, by worker.
func (l *load) answers(generation, workers int) (by []int, all int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for w := range workers {
		n := l.by[fmt.Sprint(generation, " ", w)]
		by, all = append(by, n), all+n
	}
	return by, all
}

func (l *load) end() {
	select {
	case <-l.stop:
	default:
		close(l.stop)
	}
	l.ports.Wait()
}

// Four workers, then seven, then one: every query is answered once, and all workers have
// their share. The TCP listener goes along.
func TestWorkers(t *testing.T) {
	ns := testutil.NetNS(t)
	root := testutil.BPFFS(t)
	dir := t.TempDir()
	path := filepath.Join(dir, "dns")
	if out, err := exec.Command("go", "build", "-o", path, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	start := func(workers int) *testutil.Cmd {
		cmd := ns.Command(path, "-addr", addr, "-root", root, "-control", filepath.Join(dir, "control"), "-workers", fmt.Sprint(workers))
		cmd.Stdout, cmd.Stderr = t.Output(), t.Output()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		return cmd
	}
	overTCP := func(generation int) {
		t.Helper()
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		reply, _, err := (&dns.Client{Net: "tcp"}).ExchangeWithConn(new(dns.Msg).SetQuestion("who.test.", dns.TypeTXT), &dns.Conn{Conn: c})
		if err != nil || len(reply.Answer) != 1 {
			t.Fatalf("over TCP: %v, %v", reply, err)
		}
		var by int
		if _, err := fmt.Sscan(reply.Answer[0].(*dns.TXT).Txt[0], &by); err != nil || by != generation {
			t.Errorf("generation %d answers over TCP, want %d (%v)", by, generation, err)
		}
	}
	var servers []*testutil.Cmd
	var l *load
	all := []int{4, 7, 1}
	for i, workers := range all {
		servers = append(servers, start(workers))
		if l == nil {
			testutil.WaitFor(t, patience, func() bool {
				c, err := net.Dial("udp", addr)
				if err != nil {
					return false
				}
				defer c.Close()
				_, err = query(c, 1, make([]byte, 1500))
				return err == nil
			}, "the first server")
			l = newLoad(t, 300)
		}
		testutil.WaitFor(t, patience, func() bool { _, n := l.answers(i+1, workers); return n >= 3000 }, "answers of generation %d", i+1)
		overTCP(i + 1)
	}
	l.end()
	for i, cmd := range servers[:2] {
		if err := cmd.Wait(); err != nil {
			t.Errorf("server %d: %v", i+1, err)
		}
	}
	if err := servers[2].Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := servers[2].Wait(); err != nil {
		t.Errorf("the last server: %v", err)
	}
	if l.asked.Load() != l.answered.Load() || l.twice.Load() > 0 || len(l.failures) > 0 {
		t.Errorf("%d asked, %d answered, %d twice: %v", l.asked.Load(), l.answered.Load(), l.twice.Load(), l.failures)
	}
	for i, workers := range all {
		by, n := l.answers(i+1, workers)
		t.Logf("generation %d: %d answers, by worker %d", i+1, n, by)
		for w, share := range by {
			// 300 ports are spread by a hash: each worker has some of them.
			if share == 0 {
				t.Errorf("worker %d of generation %d had nothing", w, i+1)
			}
		}
	}
}
