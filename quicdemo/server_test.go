// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"instar/internal/testutil"
)

// patience is how long a test waits for what has to happen.
const patience = 30 * time.Second

// running is a server that a test started in this process.
type running struct {
	*Server
	cancel context.CancelFunc
	ended  chan error
}

// startServer runs a server, by default in plain mode on a free port, and
// waits until it is ready. It has to end without an error.
func startServer(t testing.TB, cfg ServerConfig) (*running, Ready) {
	t.Helper()
	return startServerIn(t, nil, cfg)
}

// startServerIn runs it in a network namespace.
func startServerIn(t testing.TB, ns *testutil.Netns, cfg ServerConfig) (*running, Ready) {
	t.Helper()
	if cfg.Mode == "" {
		cfg.Mode = ModePlain
	}
	if cfg.Addr == "" {
		cfg.Addr = "127.0.0.1:0"
	}
	ready := make(chan Ready, 1)
	cfg.Ready = func(r Ready) { ready <- r }
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.NewTextHandler(testWriter{t}, nil))
	}
	server, err := NewServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{server, cancel, make(chan error, 1)}
	go func() {
		if ns == nil {
			r.ended <- server.Run(ctx)
			return
		}
		ns.Run(func() { r.ended <- server.Run(ctx) })
	}()
	t.Cleanup(func() {
		cancel()
		r.wait(t)
	})
	select {
	case info := <-ready:
		return r, info
	case err := <-r.ended:
		r.ended <- err
		t.Fatalf("server ended: %v", err)
	case <-time.After(patience):
		t.Fatal("server is not ready")
	}
	return nil, Ready{}
}

// wait waits for the end of the server.
func (r *running) wait(t testing.TB) {
	t.Helper()
	select {
	case err := <-r.ended:
		if err != nil {
			t.Errorf("server ended: %v", err)
		}
		r.ended <- nil
	case <-time.After(patience):
		t.Fatal("server does not end")
	}
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Logf("%s", strings.TrimSuffix(string(b), "\n"))
	return len(b), nil
}

// refusingServer accepts no connection and says so.
func refusingServer(t testing.TB) string {
	t.Helper()
	socket, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	cert, err := NewCertificate(nil)
	if err != nil {
		t.Fatal(err)
	}
	transport := &quic.Transport{Conn: socket, ConnContext: func(context.Context, *quic.ClientInfo) (context.Context, error) {
		return nil, errors.New("nobody comes in")
	}}
	if _, err := transport.Listen(&tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"h3"}}, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(transport.Close(), socket.Close()); err != nil {
			t.Error(err)
		}
	})
	return socket.LocalAddr().String()
}

// newLoader makes the client side for a single connection.
func newTestLoader(t testing.TB, addr string) *loader {
	t.Helper()
	l, err := newLoader(LoadConfig{Addr: addr})
	if err != nil {
		t.Fatal(err)
	}
	l.work = t.Context()
	return l
}

func dialTest(t testing.TB, l *loader, resume bool) *client {
	t.Helper()
	c, err := l.dial(resume)
	if err != nil {
		t.Fatalf("dial: %v", err)
	}
	t.Cleanup(c.close)
	return c
}

// fetch gets a page as text.
func (c *client) fetch(t testing.TB, path string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://localhost"+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.http.RoundTrip(req)
	if err != nil {
		t.Fatalf("get %s: %v", path, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("get %s: %v", path, err)
	}
	return resp, string(body)
}

func (c *client) status(t testing.TB) Status {
	t.Helper()
	var s Status
	_, body := c.fetch(t, "/status")
	if err := json.Unmarshal([]byte(body), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

func TestPages(t *testing.T) {
	_, ready := startServer(t, ServerConfig{Generation: 7, Build: "test"})
	c := dialTest(t, newTestLoader(t, ready.Addr), false)

	resp, body := c.fetch(t, "/")
	if !strings.Contains(body, "<!doctype html>") || !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/html") {
		t.Errorf("/: %v %q", resp.Header, body)
	}
	if resp.Header.Get(HeaderGeneration) != "7" || resp.Header.Get(HeaderPID) == "" {
		t.Errorf("headers: %v", resp.Header)
	}
	s := c.status(t)
	if s.Generation != 7 || s.State != "active" || s.PID != ready.PID || s.Build != "test" || s.Connections != 1 || s.Requests != 2 || s.Remote != c.conn.LocalAddr().String() && !strings.HasPrefix(s.Remote, "127.0.0.1:") {
		t.Errorf("status: %+v", s)
	}
	if _, body = c.fetch(t, "/stream?seconds=1"); strings.Count(body, "generation=7") != 10 || !strings.HasSuffix(body, "end\n") {
		t.Errorf("/stream: %q", body)
	}
	if _, body = c.fetch(t, "/slow?seconds=0"); !strings.Contains(body, "generation 7") {
		t.Errorf("/slow: %q", body)
	}
	for path, want := range map[string]int{
		"/bytes/x":             400,
		"/bytes/1073741825":    400,
		"/bytes/1?seed=-1":     400,
		"/bytes/1?ms=600001":   400,
		"/stream?seconds=0":    400,
		"/stream?seconds=601":  400,
		"/slow?seconds=1.5":    400,
		"/elsewhere":           404,
		"/bytes/0":             200,
		"/bytes/5?seed=1&ms=1": 200,
	} {
		resp, body := c.fetch(t, path)
		if resp.StatusCode != want {
			t.Errorf("%s: status %d, want %d: %s", path, resp.StatusCode, want, body)
		}
	}
	resp, body = c.fetch(t, "/bytes/100000?seed=3")
	if want, _ := io.ReadAll(NewContent(3, 100000)); body != string(want) || resp.ContentLength != 100000 {
		t.Errorf("/bytes: %d bytes, length %d", len(body), resp.ContentLength)
	}
}

// A server that is superseded lets requests finish, sends its clients away in
// good order, serves whoever comes nevertheless, and leaves.
func TestRetire(t *testing.T) {
	s, ready := startServer(t, ServerConfig{HandshakeGrace: -1})
	l := newTestLoader(t, ready.Addr)
	c := dialTest(t, l, false)

	q := request{bytes: 200_000, seed: 1, over: 500 * time.Millisecond}
	q.mid = func(*client) { s.sockets.supersede() }
	if _, err := c.get(q); err != nil {
		t.Errorf("request that was under way: %v", err)
	}
	// The client's HTTP/3 leaves after its last request.
	select {
	case <-c.conn.Context().Done():
	case <-time.After(patience):
		t.Fatal("GOAWAY did not send the client away")
	}
	if cause := context.Cause(c.conn.Context()); !graceful(cause) {
		t.Errorf("connection ended by %v", cause)
	}
	s.wait(t)
}

// A connection is not closed as soon as its last handler returned: the client
// may not have read the response yet (F4).
func TestRetireUnreadResponse(t *testing.T) {
	returned := make(chan struct{})
	s, ready := startServer(t, ServerConfig{
		HandshakeGrace: -1,
		DrainDeadline:  8 * time.Second,
		wrap: func(h http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				h.ServeHTTP(w, r)
				close(returned)
			})
		},
	})
	c := dialTest(t, newTestLoader(t, ready.Addr), false)
	const size = 200_000 // less than the client's window, so the handler does not wait for it
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, fmt.Sprintf("https://localhost/bytes/%d?ms=5000", size), nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.http.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	s.sockets.supersede()
	<-returned // in the second half of the drain, when idle connections are closed
	time.Sleep(10 * drainTick)
	if n, err := io.Copy(io.Discard, resp.Body); err != nil || n != size {
		t.Errorf("read %d of %d bytes: %v", n, size, err)
	}
	s.wait(t)
}

// GOAWAY comes with a response, where it crosses no other request, unless the
// client asks for nothing.
func TestGoawayWithRequest(t *testing.T) {
	s, ready := startServer(t, ServerConfig{})
	c := dialTest(t, newTestLoader(t, ready.Addr), false)
	c.status(t)
	s.conns.goaway(1, time.Hour)
	time.Sleep(10 * drainTick)
	told := func() bool {
		s.conns.mu.Lock()
		defer s.conns.mu.Unlock()
		for c := range s.conns.open {
			return !c.quiet.IsZero()
		}
		return true // it left
	}
	if told() {
		t.Error("GOAWAY was sent between two requests")
	}
	c.status(t)
	testutil.WaitFor(t, patience, told, "GOAWAY")

	quiet := dialTest(t, newTestLoader(t, ready.Addr), false)
	quiet.status(t)
	s.conns.goaway(1, drainTick)
	select {
	case <-quiet.conn.Context().Done():
	case <-time.After(patience):
		t.Error("a client that asks for nothing gets no GOAWAY")
	}
}

// A connection that comes to a server whose other connections got GOAWAY is
// served, and is told to go only then.
func TestRetireLateConnection(t *testing.T) {
	s, ready := startServer(t, ServerConfig{HandshakeGrace: -1})
	l := newTestLoader(t, ready.Addr)
	first := dialTest(t, l, false)
	held := make(chan struct{})
	var late *client
	q := request{bytes: 200_000, seed: 1, over: 500 * time.Millisecond}
	q.mid = func(*client) {
		defer close(held)
		s.sockets.supersede()
		testutil.WaitFor(t, patience, func() bool { _, untold := s.conns.size(); return untold == 0 }, "GOAWAY")
		late = dialTest(t, l, false)
		if _, err := late.get(request{bytes: 1000, seed: 2}); err != nil && !rejected(err) && !late.leftByUs() {
			t.Errorf("late connection: %v", err)
		}
	}
	if _, err := first.get(q); err != nil {
		t.Errorf("request that was under way: %v", err)
	}
	<-held
	s.wait(t)
	if cause := context.Cause(late.conn.Context()); !graceful(cause) {
		t.Errorf("late connection ended by %v", cause)
	}
}

// Stop refuses new connections at once, with a word, and waits for the others.
func TestStop(t *testing.T) {
	s, ready := startServer(t, ServerConfig{})
	l := newTestLoader(t, ready.Addr)
	c := dialTest(t, l, false)
	q := request{bytes: 200_000, seed: 1, over: 500 * time.Millisecond}
	q.mid = func(*client) {
		s.Stop()
		testutil.WaitFor(t, patience, s.refusing.Load, "the server to stop")
		if _, err := l.dial(false); classify(err) != "connection_refused" {
			t.Errorf("dial a server that stops: %v", err)
		}
	}
	if _, err := c.get(q); err != nil {
		t.Errorf("request that was under way: %v", err)
	}
	s.wait(t)
}

// At the deadline the rest is closed with H3_NO_ERROR, whatever it does.
func TestDrainDeadline(t *testing.T) {
	s, ready := startServer(t, ServerConfig{DrainDeadline: 200 * time.Millisecond})
	c := dialTest(t, newTestLoader(t, ready.Addr), false)
	reading := make(chan struct{})
	body := make(chan error, 1)
	go func() {
		req, _ := http.NewRequest(http.MethodGet, "https://localhost/stream?seconds=60", nil)
		resp, err := c.http.RoundTrip(req)
		close(reading)
		if err == nil {
			_, err = io.Copy(io.Discard, resp.Body)
		}
		body <- err
	}()
	<-reading
	s.Stop()
	err := <-body
	h3, ok := errors.AsType[*http3.Error](err)
	if !ok || !h3.Remote || h3.ErrorCode != http3.ErrCodeNoError {
		t.Errorf("stream ended by %v, want H3_NO_ERROR", err)
	}
	s.wait(t)
}

// The end of the context closes connections at once, and still says so.
func TestCancel(t *testing.T) {
	s, ready := startServer(t, ServerConfig{})
	c := dialTest(t, newTestLoader(t, ready.Addr), false)
	c.status(t)
	s.cancel()
	s.wait(t)
	select {
	case <-c.conn.Context().Done():
	case <-time.After(patience):
		t.Fatal("the client heard nothing")
	}
	if cause := context.Cause(c.conn.Context()); !graceful(cause) {
		t.Errorf("connection ended by %v", cause)
	}
}

func TestReusePort(t *testing.T) {
	s, ready := startServer(t, ServerConfig{Mode: ModeReusePort, Workers: 4})
	if len(s.transports) != 4 {
		t.Errorf("%d transports, want 4", len(s.transports))
	}
	// A second server joins the port.
	_, second := startServer(t, ServerConfig{Mode: ModeReusePort, Workers: 4, Addr: ready.Addr, Generation: 2})
	if second.Addr != ready.Addr {
		t.Errorf("addresses %s and %s", ready.Addr, second.Addr)
	}
	// In plain mode it cannot.
	server, err := NewServer(ServerConfig{Mode: ModePlain, Addr: ready.Addr})
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("plain server on a used port: %v", err)
	}
}

func TestQuota(t *testing.T) {
	for _, tc := range []struct {
		n         int
		window    time.Duration
		low, high float64
		want      int
	}{
		{0, time.Second, 200, 500, 0},
		{1, time.Hour, 0, 500, 1},           // progress in every tick
		{1000, 10 * time.Second, 0, 500, 2}, // spread over the window
		{1000, 10 * time.Second, 200, 1e9, 4},
		{1000, 0, 0, 500, 10}, // late: the rate is the limit
		{3, 0, 0, 500, 3},     // and what there is
		{10, -time.Hour, 0, 1e9, 10},
	} {
		if got := quota(tc.n, tc.window, tc.low, tc.high); got != tc.want {
			t.Errorf("quota(%d, %v, %v, %v) = %d, want %d", tc.n, tc.window, tc.low, tc.high, got, tc.want)
		}
	}
}

func TestCheckConfiguration(t *testing.T) {
	for _, cfg := range []ServerConfig{{Workers: -1}, {Workers: 257}, {DrainDeadline: -1}} {
		if _, err := NewServer(cfg); err == nil {
			t.Errorf("NewServer(%+v) took it", cfg)
		}
	}
	s, err := NewServer(ServerConfig{Mode: "other", Addr: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "unknown mode") {
		t.Errorf("Run = %v", err)
	}
}
