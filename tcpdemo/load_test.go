// SPDX-License-Identifier: Apache-2.0

package tcpdemo

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"instar/internal/content"
	"instar/internal/testutil"
)

// script is a server that does what a test wants with each request, in its own
// way: conn is the connection's number, request the number on it, from 0. It
// returns false to have the connection closed.
type script func(c *net.TCPConn, r *http.Request, conn, request int) bool

// serve runs the script on a listener of its own.
func serve(t *testing.T, play script) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for n := 0; ; n++ {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				stop := context.AfterFunc(t.Context(), func() { _ = c.Close() })
				defer stop()
				defer func() { _ = c.Close() }()
				r := bufio.NewReader(c)
				for i := 0; ; i++ {
					req, err := http.ReadRequest(r)
					if err != nil || !play(c.(*net.TCPConn), req, n, i) {
						return
					}
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
	})
	return l.Addr().String()
}

// answer answers a request as the server does, but for what change changes in
// the response.
func answer(c *net.TCPConn, r *http.Request, change func(head, body string) string) {
	var n int64
	var seed uint64
	_, _ = fmt.Sscanf(r.URL.Path, "/bytes/%d", &n)
	_, _ = fmt.Sscan(r.FormValue("seed"), &seed)
	body, _ := io.ReadAll(content.New(seed, n))
	head := fmt.Sprintf("HTTP/1.1 200 OK\r\n%s: 7\r\n%s: 70\r\nContent-Length: %d\r\n", HeaderGeneration, HeaderPID, n)
	if change == nil {
		change = func(head, body string) string { return head + "\r\n" + body }
	}
	_, _ = io.WriteString(c, change(head, string(body))) // the client counts what fails
}

func good(c *net.TCPConn, r *http.Request) bool {
	answer(c, r, nil)
	return !r.Close
}

// rst makes the close of the connection a reset.
func rst(c *net.TCPConn) bool {
	_ = c.SetLinger(0)
	return false
}

// silent answers nothing until the test ends.
func silent(t *testing.T) script {
	return func(*net.TCPConn, *http.Request, int, int) bool {
		<-t.Context().Done()
		return false
	}
}

// measure runs a load until cond holds.
func measure(t *testing.T, cfg LoadConfig, cond func(Result) bool) Result {
	t.Helper()
	l, err := NewLoad(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	var seen Result
	defer func() { t.Logf("%+v", seen) }()
	testutil.WaitFor(t, 10*time.Second, func() bool { seen = l.Snapshot(); return cond(seen) }, "what the load has to see")
	seen = l.Stop()
	return seen
}

// Each kind of loss is counted as what it is, of new connections and of those
// that stay.
func TestLosses(t *testing.T) {
	for _, tc := range []struct {
		name string
		play script
		of   func(Counts) int64
	}{
		{"reset", func(c *net.TCPConn, _ *http.Request, _, _ int) bool { return rst(c) }, func(c Counts) int64 { return c.Reset }},
		{"no response", func(*net.TCPConn, *http.Request, int, int) bool { return false }, func(c Counts) int64 { return c.Cut }},
		{"in the head", func(c *net.TCPConn, r *http.Request, _, _ int) bool {
			answer(c, r, func(head, _ string) string { return head })
			return false
		}, func(c Counts) int64 { return c.Cut }},
		{"in the body", func(c *net.TCPConn, r *http.Request, _, _ int) bool {
			answer(c, r, func(head, body string) string { return head + "\r\n" + body[:len(body)-1] })
			return false
		}, func(c Counts) int64 { return c.Cut }},
		{"a wrong byte", func(c *net.TCPConn, r *http.Request, _, _ int) bool {
			answer(c, r, func(head, body string) string {
				last := len(body) - 1
				return head + "\r\n" + body[:last] + string([]byte{body[last] ^ 1})
			})
			return true
		}, func(c Counts) int64 { return c.Wrong }},
		{"a wrong status", func(c *net.TCPConn, r *http.Request, _, _ int) bool {
			answer(c, r, func(head, body string) string { return strings.Replace(head, "200 OK", "503 No", 1) + "\r\n" + body })
			return true
		}, func(c Counts) int64 { return c.Wrong }},
		{"no HTTP", func(c *net.TCPConn, r *http.Request, _, _ int) bool {
			answer(c, r, func(string, string) string { return "220 mail\r\n\r\n" })
			return true
		}, func(c Counts) int64 { return c.Wrong }},
		{"silence", nil, func(c Counts) int64 { return c.Timeout }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			play := tc.play
			if play == nil {
				play = silent(t)
			}
			r := measure(t, LoadConfig{
				Addr: serve(t, play), NewPerSecond: 50, KeepAlive: 2, RequestEvery: 20 * time.Millisecond, Timeout: 200 * time.Millisecond,
			}, func(r Result) bool { return tc.of(r.Kinds[KindNew]) > 0 && tc.of(r.Kinds[KindKeepAlive]) > 0 })
			if tc.of(r.Counts) != r.Lost || r.Requests != 0 || r.Raced != 0 {
				t.Error("something else was counted")
			}
			if len(r.Examples) == 0 {
				t.Error("no example")
			}
		})
	}
}

func TestRefused(t *testing.T) {
	// Bound, so that nobody else gets the port, and not listening.
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Close(fd) }()
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", name.(*syscall.SockaddrInet4).Port)
	r := measure(t, LoadConfig{Addr: addr, NewPerSecond: 100, KeepAlive: 1, RequestEvery: 20 * time.Millisecond}, func(r Result) bool {
		return r.Kinds[KindNew].Refused > 0 && r.Kinds[KindKeepAlive].Refused > 0
	})
	if r.Refused != r.Lost || r.Connections != 0 {
		t.Error("something else was counted")
	}
}

// A close of an idle connection costs nothing: the client sees it before its
// next request, or, in the race, sends the request again.
func TestKeepAlive(t *testing.T) {
	cfg := LoadConfig{NewPerSecond: -1, KeepAlive: 3, RequestEvery: 10 * time.Millisecond, SlowPart: -1}

	t.Run("stays", func(t *testing.T) {
		cfg := cfg
		cfg.Addr = serve(t, func(c *net.TCPConn, r *http.Request, _, _ int) bool { return good(c, r) })
		r := measure(t, cfg, func(r Result) bool { return r.Requests > 20 })
		if r.Connections != 3 || r.Lost+r.Raced+r.ToldToClose+r.ClosedIdle != 0 || r.Generations[7].Requests != r.Requests {
			t.Error("not what 3 connections that stay look like")
		}
	})
	t.Run("told", func(t *testing.T) {
		cfg := cfg
		cfg.Addr = serve(t, func(c *net.TCPConn, r *http.Request, _, i int) bool {
			if i < 2 {
				return good(c, r)
			}
			answer(c, r, func(head, body string) string { return head + "Connection: close\r\n\r\n" + body })
			return false
		})
		r := measure(t, cfg, func(r Result) bool { return r.ToldToClose > 5 })
		if r.Lost+r.Raced+r.ClosedIdle != 0 {
			t.Error("being told to close was counted as something else")
		}
	})
	t.Run("closed idle", func(t *testing.T) {
		cfg := cfg
		cfg.RequestEvery = 100 * time.Millisecond // so that the close comes first
		cfg.Addr = serve(t, func(c *net.TCPConn, r *http.Request, _, _ int) bool { answer(c, r, nil); return false })
		r := measure(t, cfg, func(r Result) bool { return r.ClosedIdle > 5 })
		if r.Lost+r.Raced+r.ToldToClose != 0 {
			t.Error("a close while idle was counted as something else")
		}
	})
	for name, end := range map[string]func(*net.TCPConn) bool{"raced": func(*net.TCPConn) bool { return false }, "raced, reset": rst} {
		t.Run(name, func(t *testing.T) {
			cfg := cfg
			var mu sync.Mutex
			sent := map[string]int{} // seeds
			cfg.Addr = serve(t, func(c *net.TCPConn, r *http.Request, _, i int) bool {
				mu.Lock()
				sent[r.FormValue("seed")]++
				mu.Unlock()
				if i == 0 {
					return good(c, r)
				}
				return end(c)
			})
			r := measure(t, cfg, func(r Result) bool { return r.Raced > 5 })
			if r.Lost+r.ToldToClose+r.ClosedIdle != 0 {
				t.Error("the race was counted as something else")
			}
			var again int64
			for _, n := range sent {
				if n == 2 {
					again++
				}
			}
			// Those at the end of the load were not sent again.
			if again < r.Raced-int64(cfg.KeepAlive) {
				t.Errorf("%d requests were sent again, of %d", again, r.Raced)
			}
		})
	}
	t.Run("answer begun", func(t *testing.T) {
		cfg := cfg
		cfg.Addr = serve(t, func(c *net.TCPConn, r *http.Request, _, i int) bool {
			if i == 0 {
				return good(c, r)
			}
			answer(c, r, func(head, _ string) string { return head[:3] })
			return false
		})
		r := measure(t, cfg, func(r Result) bool { return r.Cut > 2 })
		if r.Raced != 0 || r.Generations[7].Cut != r.Cut {
			t.Error("a response that was cut was not counted as one of its generation")
		}
	})
	t.Run("unasked", func(t *testing.T) {
		cfg := cfg
		cfg.Addr = serve(t, func(c *net.TCPConn, r *http.Request, _, _ int) bool {
			answer(c, r, func(head, body string) string { return head + "\r\n" + body + "more" })
			return true
		})
		if r := measure(t, cfg, func(r Result) bool { return r.Wrong > 2 }); r.Wrong != r.Lost {
			t.Error("what nobody asked for was counted as something else")
		}
	})
}

func TestLong(t *testing.T) {
	var begun atomic.Int32
	goOn := make(chan struct{})
	addr := serve(t, func(c *net.TCPConn, r *http.Request, n, _ int) bool {
		begun.Add(1)
		answer(c, r, func(head, body string) string {
			_, _ = io.WriteString(c, head+"\r\n"+body[:10])
			<-goOn
			return body[10:]
		})
		return false
	})
	l, err := NewLoad(t.Context(), LoadConfig{Addr: addr, NewPerSecond: -1, KeepAlive: -1})
	if err != nil {
		t.Fatal(err)
	}
	done := l.Long(5, 1000, time.Second)
	if n := begun.Load(); n != 5 {
		t.Errorf("returned after %d of 5 had begun", n)
	}
	select {
	case <-done:
		t.Error("done before the end")
	default:
	}
	close(goOn)
	<-done
	if r := l.Stop(); r.Kinds[KindLong].Requests != 5 || r.Lost != 0 {
		t.Errorf("%+v", r)
	}
}

// The rate is kept whether the server answers or not, and clients use all
// sources.
func TestRate(t *testing.T) {
	var mu sync.Mutex
	sources := map[string]int{}
	addr := serve(t, func(c *net.TCPConn, r *http.Request, _, _ int) bool {
		host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
		mu.Lock()
		sources[host]++
		mu.Unlock()
		return good(c, r)
	})
	r := measure(t, LoadConfig{Addr: addr, NewPerSecond: 400, KeepAlive: -1}, func(r Result) bool { return r.Requests >= 200 })
	if rate := float64(r.Connections+r.Skipped) / r.Seconds; rate > 420 || rate < 100 {
		t.Errorf("%.0f new connections a second, want 400", rate)
	}
	if len(sources) != 16 || r.Lost != 0 {
		t.Errorf("sources %v", sources)
	}
}

// When the context ends, so does everything, and nothing is called lost.
func TestLoadCancelled(t *testing.T) {
	addr := serve(t, silent(t))
	ctx, cancel := context.WithCancel(t.Context())
	l, err := NewLoad(ctx, LoadConfig{Addr: addr, NewPerSecond: 100, KeepAlive: 5, RequestEvery: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	testutil.WaitFor(t, 10*time.Second, func() bool { return l.Snapshot().Connections > 10 }, "connections")
	cancel()
	began := time.Now()
	r := l.Stop()
	if took := time.Since(began); took > 5*time.Second || r.Lost != 0 {
		t.Errorf("took %v: %+v", took, r)
	}
}

func TestLoadConfig(t *testing.T) {
	for _, cfg := range []LoadConfig{
		{},
		{Addr: "localhost:1"},
		{Addr: "127.0.0.1:1", NewPerSecond: 5001},
		{Addr: "127.0.0.1:1", MinBytes: 10, MaxBytes: 9},
		{Addr: "127.0.0.1:1", MaxBytes: 1<<30 + 1},
		{Addr: "127.0.0.1:1", MinBytes: -1},
		{Addr: "127.0.0.1:1", Timeout: -1},
		{Addr: "127.0.0.1:1", RequestEvery: -1},
	} {
		if l, err := NewLoad(t.Context(), cfg); err == nil {
			l.Stop()
			t.Errorf("%+v is accepted", cfg)
		}
	}
}

func TestClassify(t *testing.T) {
	for err, want := range map[error]loss{
		&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}: refused,
		&net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)}:      reset,
		&net.OpError{Op: "write", Err: os.NewSyscallError("write", syscall.EPIPE)}:         reset,
		&net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}:                              timedOut,
		os.NewSyscallError("connect", syscall.ETIMEDOUT):                                   timedOut,
		context.DeadlineExceeded:    timedOut,
		io.EOF:                      cut,
		fmt.Errorf("x: %w", errCut): cut,
		io.ErrUnexpectedEOF:         cut,
		content.ErrCorrupt:          wrong,
		errWrong:                    wrong,
		errors.New("x"):             other,
		os.NewSyscallError("connect", syscall.EADDRNOTAVAIL): other,
	} {
		if got := classify(err); got != want {
			t.Errorf("%v: %s, want %s", err, got, want)
		}
	}
}
