// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"instar/internal/testutil"
)

// Hundreds of keep-alive connections send requests that nobody repeats, at random
// moments, and go to the successor when they are told to.
func TestKeepAliveLosesNothing(t *testing.T) {
	const clients = 300
	var old, next atomic.Int64
	count := func(n *atomic.Int64) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			n.Add(1)
			if rand.IntN(20) == 0 {
				time.Sleep(time.Duration(rand.IntN(30)) * time.Millisecond) // some work
			}
			ok(w, r)
		}
	}
	s := serve(t, Options{Deadline: 8 * time.Second}, count(&old), nil)
	successor := serve(t, Options{}, count(&next), nil)
	addr := &atomic.Value{}
	addr.Store(s.addr)

	var (
		group, connected sync.WaitGroup
		failed, sent     atomic.Int64
	)
	connected.Add(clients)
	for range clients {
		group.Go(func() {
			var c *client
			first := true
			requests := 0
			for moved := 0; moved < 5; {
				if c == nil {
					var err error
					if c, err = connect(addr.Load().(string)); err != nil {
						t.Error(err)
						return
					}
				}
				sent.Add(1)
				_, last, err := c.do()
				if err != nil {
					failed.Add(1)
					t.Errorf("request %d on %v: %v", requests, c.LocalAddr(), err)
				}
				requests++
				if first {
					first = false
					connected.Done()
				}
				if c.RemoteAddr().String() == successor.addr {
					moved++
				}
				if last || err != nil {
					_ = c.Close()
					c = nil
				}
				time.Sleep(time.Duration(rand.IntN(100)) * time.Millisecond) // think
			}
			_ = c.Close()
		})
	}
	connected.Wait()
	addr.Store(successor.addr)
	report := ended(t, s.drain(context.Background()), clients, 0, 0)
	group.Wait()
	if failed.Load() > 0 || old.Load()+next.Load() != sent.Load() {
		t.Errorf("%d of %d requests failed; %d and %d were handled", failed.Load(), sent.Load(), old.Load(), next.Load())
	}
	if report.Told != clients || report.Crossed != 0 {
		t.Errorf("%d told, %d crossed", report.Told, report.Crossed)
	}
	if err := receive(t, s.served, "Serve"); err != http.ErrServerClosed {
		t.Errorf("Serve: %v", err)
	}
}

// The same with Go's client, and think times that reach into the second
// half, where idle connections are closed.
func TestGoClientLosesNothing(t *testing.T) {
	const clients = 200
	s := serve(t, Options{Deadline: 2 * time.Second}, ok, nil)
	successor := serve(t, Options{}, ok, nil)
	addr := &atomic.Value{}
	addr.Store(s.addr)
	transport := &http.Transport{
		MaxIdleConnsPerHost: clients,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, addr.Load().(string))
		},
	}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: patience}
	get := func() error {
		r, err := client.Get("http://test/")
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, r.Body)
		return errors.Join(err, r.Body.Close())
	}
	var group, connected sync.WaitGroup
	connected.Add(clients)
	begin := make(chan struct{})
	for range clients {
		group.Go(func() {
			if err := get(); err != nil {
				t.Error(err)
			}
			connected.Done()
			<-begin
			for range 3 {
				time.Sleep(time.Duration(rand.IntN(1500)) * time.Millisecond) // think
				if err := get(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	connected.Wait()
	addr.Store(successor.addr)
	done := s.drain(context.Background())
	close(begin)
	r := receive(t, done, "the end of the drain")
	group.Wait()
	if r.err != nil || r.Cut != 0 {
		t.Errorf("%v, %v", r.Report, r.err)
	}
}

// A connection that is idle when the drain begins has its next request answered.
// http.Server.Shutdown would have closed it.
func TestIdleConnectionIsAnswered(t *testing.T) {
	s := serve(t, Options{Deadline: time.Minute}, ok, nil)
	c := dial(t, s.addr)
	if c.mustDo(t) {
		t.Fatal("told before the drain")
	}
	s.waitOpen(t, 1, idle)
	done := s.drain(context.Background())
	receive(t, s.Draining(), "the drain")
	if !c.mustDo(t) {
		t.Error("not told")
	}
	c.wantEOF(t)
	if r := ended(t, done, 1, 0, 0); r.Told != 1 {
		t.Errorf("%d told", r.Told)
	}
}

// A connection whose first request comes after the drain began, and one whose response
// had begun, lose nothing either.
func TestNewAndBusyConnections(t *testing.T) {
	hold, held := make(chan struct{}), make(chan struct{})
	s := serve(t, Options{Deadline: time.Minute}, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "begin ")
		_ = http.NewResponseController(w).Flush()
		if r.URL.Path == "/hold" {
			close(held)
			<-hold
		}
		_, _ = io.WriteString(w, "end")
	}, nil)
	fresh, used := dial(t, s.addr), dial(t, s.addr)
	if _, err := io.WriteString(used, "GET /hold HTTP/1.1\r\nHost: test\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	receive(t, held, "the handler")
	s.waitOpen(t, 2, nil)
	done := s.drain(context.Background())
	receive(t, s.Draining(), "the drain")
	close(hold)
	if body, last, err := used.response(); err != nil || body != "begin end" || last {
		t.Errorf("%q, %v, %v", body, last, err)
	}
	for _, c := range []*client{fresh, used} {
		if !c.mustDo(t) {
			t.Error("not told")
		}
	}
	ended(t, done, 2, 0, 0)
}

// New connections are refused from the start of the drain; Serve returns at its end.
func TestServeReturnsAtTheEnd(t *testing.T) {
	s := serve(t, Options{Deadline: time.Minute}, ok, nil)
	c := dial(t, s.addr)
	c.mustDo(t)
	done := s.drain(context.Background())
	testutil.WaitFor(t, patience, func() bool {
		c, err := connect(s.addr)
		if err == nil {
			_ = c.Close()
		}
		return errors.Is(err, syscall.ECONNREFUSED)
	}, "refused connections")
	select {
	case err := <-s.served:
		t.Fatalf("Serve returned early: %v", err)
	default:
	}
	c.mustDo(t)
	if r := receive(t, done, "the end of the drain"); r.err != nil {
		t.Error(r.err)
	}
	if err := receive(t, s.served, "Serve"); err != http.ErrServerClosed {
		t.Errorf("Serve: %v", err)
	}
}

// Who never comes back is closed, in the second half, and orderly.
func TestIdleAreClosed(t *testing.T) {
	const clients = 40
	var phases []Phase
	s := serve(t, Options{Deadline: 2 * time.Second, Progress: func(r Report) {
		phases = append(phases, r.Phase)
		if r.Phase == PhaseWaiting && r.ClosedIdle > 0 {
			t.Errorf("closed in the first half: %v", r)
		}
	}}, ok, nil)
	var group sync.WaitGroup
	for i := range clients {
		c := dial(t, s.addr)
		if i%4 > 0 { // the others send nothing at all
			c.mustDo(t)
		}
		group.Go(func() {
			c.wantEOF(t)
			_ = c.Close()
		})
	}
	s.waitOpen(t, clients, idle)
	ended(t, s.drain(context.Background()), 0, clients, 0)
	group.Wait()
	if phases[0] != PhaseWaiting || phases[len(phases)-1] != PhaseDone {
		t.Errorf("phases %v", phases)
	}
}

// A request that comes after the FIN is not executed and not reset.
func TestCrossingRequest(t *testing.T) {
	var handled atomic.Int64
	s := serve(t, Options{Deadline: 100 * time.Millisecond}, func(w http.ResponseWriter, r *http.Request) {
		handled.Add(1)
		ok(w, r)
	}, nil)
	c := dial(t, s.addr)
	c.mustDo(t)
	s.waitOpen(t, 1, idle)
	done := s.drain(context.Background())
	c.wantEOF(t) // here is the FIN
	if _, err := io.WriteString(c, request); err != nil {
		t.Fatal(err)
	}
	testutil.WaitFor(t, patience, func() bool { return s.Report().Crossed == 1 }, "a request that crossed")
	c.wantEOF(t)
	if r := ended(t, done, 0, 1, 0); r.Crossed != 1 || handled.Load() != 1 {
		t.Errorf("%d crossed, %d handled", r.Crossed, handled.Load())
	}
}

// Requests that go on at the deadline are cut off, and know why.
func TestBusyAreCut(t *testing.T) {
	causes := make(chan error, 3)
	s := serve(t, Options{Deadline: 200 * time.Millisecond}, func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
		causes <- context.Cause(r.Context())
		_, _ = io.WriteString(w, "good bye")
	}, nil)
	var clients []*client
	for range 3 {
		c := dial(t, s.addr)
		if _, err := io.WriteString(c, request); err != nil {
			t.Fatal(err)
		}
		clients = append(clients, c)
	}
	open := s.waitOpen(t, 3, func(o Open) bool { return o.Requests == 1 })
	addrs := map[string]bool{}
	for _, o := range open {
		addrs[o.Remote] = true
		if o.Member != "http" || !o.Busy || time.Since(o.Since) > patience {
			t.Errorf("%+v", o)
		}
	}
	done := s.drain(context.Background())
	for _, c := range clients {
		if !addrs[c.LocalAddr().String()] {
			t.Errorf("%v is not in %v", c.LocalAddr(), open)
		}
		if err := receive(t, causes, "a cause"); !errors.Is(err, ErrPlanned) {
			t.Errorf("cause: %v", err)
		}
		// A handler that heeds its context ends its response.
		if body, _, err := c.response(); err != nil || body != "good bye" {
			t.Errorf("%q, %v", body, err)
		}
	}
	ended(t, done, 0, 0, 3)
}

// A handler that does not heed its context does not hold up the drain.
func TestDeafHandler(t *testing.T) {
	release := make(chan struct{})
	s := serve(t, Options{Deadline: 50 * time.Millisecond}, func(w http.ResponseWriter, r *http.Request) { <-release }, nil)
	c := dial(t, s.addr)
	if _, err := io.WriteString(c, request); err != nil {
		t.Fatal(err)
	}
	s.waitOpen(t, 1, busy)
	ended(t, s.drain(context.Background()), 0, 0, 1)
	close(release)
	if _, _, err := c.response(); err == nil {
		t.Error("got a response")
	}
}

// An event stream ends when its handler is told.
func TestDrainingOfRequests(t *testing.T) {
	s := serve(t, Options{Deadline: time.Minute}, func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).Flush()
		<-Draining(r.Context())
		_, _ = io.WriteString(w, "last event")
	}, nil)
	c := dial(t, s.addr)
	if _, err := io.WriteString(c, request); err != nil {
		t.Fatal(err)
	}
	s.waitOpen(t, 1, busy)
	done := s.drain(context.Background())
	if body, _, err := c.response(); err != nil || body != "last event" {
		t.Errorf("%q, %v", body, err)
	}
	_ = c.Close()
	ended(t, done, 1, 0, 0)
	if Draining(context.Background()) != nil {
		t.Error("a context without a drain has a channel")
	}
}

type key struct{}

// The user's hooks go on working.
func TestHooksAreChained(t *testing.T) {
	var mu sync.Mutex
	var log []string
	note := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		log = append(log, fmt.Sprintf(format, args...))
	}
	s := serve(t, Options{}, func(w http.ResponseWriter, r *http.Request) {
		note("request %v", r.Context().Value(key{}))
	}, func(s *http.Server) {
		s.BaseContext = func(net.Listener) context.Context { return context.WithValue(context.Background(), key{}, "base") }
		s.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
			if _, ok := c.(*net.TCPConn); !ok {
				t.Errorf("the connection is a %T", c)
			}
			return context.WithValue(ctx, key{}, fmt.Sprint(ctx.Value(key{}), " conn"))
		}
		s.ConnState = func(_ net.Conn, state http.ConnState) { note("%v", state) }
	})
	c := dial(t, s.addr)
	c.mustDo(t)
	done := s.drain(context.Background())
	receive(t, s.Draining(), "the drain")
	c.mustDo(t)
	c.wantEOF(t)
	ended(t, done, 1, 0, 0)
	const want = "[new active request base conn idle active request base conn closed]"
	testutil.WaitFor(t, patience, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return fmt.Sprint(log) == want
	}, "%s, got %v", want, &log)
}

// Without HTTP.Listener each new connection is answered once, until the end.
func TestOtherListener(t *testing.T) {
	d := New(Options{Deadline: time.Minute})
	server := &http.Server{Handler: http.HandlerFunc(ok)}
	d.HTTP(server)
	ln := listen(t)
	served := make(chan error, 1)
	go func() { served <- server.Serve(ln) }()
	first := dial(t, ln.Addr().String())
	first.mustDo(t)
	d.waitOpen(t, 1, idle)
	done := d.drain(context.Background())
	receive(t, d.Draining(), "the drain")
	for range 10 {
		c := dial(t, ln.Addr().String())
		if !c.mustDo(t) {
			t.Error("not told")
		}
		c.wantEOF(t)
	}
	if !first.mustDo(t) {
		t.Error("not told")
	}
	ended(t, done, 11, 0, 0)
	if err := receive(t, served, "Serve"); err != http.ErrServerClosed {
		t.Errorf("Serve: %v", err)
	}
}

// Quiet says nothing in the first half.
func TestQuiet(t *testing.T) {
	s := serve(t, Options{Deadline: 2 * time.Second, Quiet: true}, ok, nil)
	c := dial(t, s.addr)
	c.mustDo(t)
	done := s.drain(context.Background())
	receive(t, s.Draining(), "the drain")
	for {
		phase := s.Report().Phase
		last := c.mustDo(t)
		if last && phase == PhaseWaiting && s.Report().Phase == PhaseWaiting {
			t.Error("told in the first half")
		}
		if last {
			break
		}
		time.Sleep(5 * time.Millisecond) // think
	}
	ended(t, done, 1, 0, 0)
}

// A hijacked connection is no longer the server's; a Conns tracks it.
func TestHijack(t *testing.T) {
	var conns *Conns
	handled := make(chan error, 1)
	s := serve(t, Options{Deadline: time.Minute}, func(w http.ResponseWriter, r *http.Request) {
		raw, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			handled <- err
			return
		}
		c := conns.Add(raw)
		defer c.Close()
		_, _ = rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n")
		_ = rw.Flush()
		<-c.Draining()
		_, err = io.WriteString(c, "go away")
		handled <- err
	}, nil)
	conns = s.Conns(ConnsOptions{Name: "websocket"})
	c := dial(t, s.addr)
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: test\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if r, err := http.ReadResponse(c.r, nil); err != nil || r.StatusCode != http.StatusSwitchingProtocols {
		t.Fatal(r, err)
	}
	open := s.waitOpen(t, 1, busy)
	if open[0].Member != "websocket" || conns.Len() != 1 {
		t.Errorf("%v, %d tracked", open, conns.Len())
	}
	done := s.drain(context.Background())
	if err := receive(t, handled, "the handler"); err != nil {
		t.Error(err)
	}
	if b, err := io.ReadAll(c.r); err != nil || string(b) != "go away" {
		t.Errorf("%q, %v", b, err)
	}
	ended(t, done, 1, 0, 0)
}

// A switch of protocols during the drain is not told to close.
func TestUpgradeIsNotTold(t *testing.T) {
	s := serve(t, Options{Deadline: time.Minute}, func(w http.ResponseWriter, r *http.Request) {
		if c := w.Header().Get("Connection"); c != "" {
			t.Errorf("Connection: %s", c)
		}
		raw, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_ = raw.Close()
	}, nil)
	c := dial(t, s.addr)
	s.waitOpen(t, 1, nil)
	done := s.drain(context.Background())
	receive(t, s.Draining(), "the drain")
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: test\r\nConnection: keep-alive, Upgrade\r\nUpgrade: test\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	c.wantEOF(t)
	ended(t, done, 0, 0, 0)
}

// counter counts what is read.
type counter struct {
	net.Conn
	n atomic.Int64
}

func (c *counter) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.n.Add(int64(n))
	return n, err
}

// TLS: close_notify, without which a client may take it for an attack, and
// FIN.
func TestTLSIdleIsClosed(t *testing.T) {
	serverTLS, clientTLS := certificate(t)
	s := serve(t, Options{Deadline: 200 * time.Millisecond}, ok, func(s *http.Server) {
		s.TLSConfig = serverTLS
		s.Protocols = new(http.Protocols)
		s.Protocols.SetHTTP1(true)
	})
	raw := &counter{Conn: dial(t, s.addr).Conn}
	conn := tls.Client(raw, clientTLS)
	c := &client{conn, bufio.NewReader(conn)}
	if c.mustDo(t) {
		t.Error("told before the drain")
	}
	s.waitOpen(t, 1, idle)
	before := raw.n.Load()
	done := s.drain(context.Background())
	c.wantEOF(t)
	if raw.n.Load() == before {
		t.Error("FIN without close_notify")
	}
	_ = raw.Close()
	ended(t, done, 0, 1, 0)
}

// The server's own Shutdown and Close still end Serve.
func TestServerShutdown(t *testing.T) {
	for name, stop := range map[string]func(*http.Server) error{
		"Shutdown": func(s *http.Server) error { return s.Shutdown(context.Background()) },
		"Close":    (*http.Server).Close,
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, Options{}, ok, nil)
			c := dial(t, s.addr)
			c.mustDo(t)
			s.waitOpen(t, 1, idle)
			if err := stop(s.server); err != nil {
				t.Error(err)
			}
			if err := receive(t, s.served, "Serve"); err != http.ErrServerClosed {
				t.Errorf("Serve: %v", err)
			}
			s.waitOpen(t, 0, nil)
		})
	}
}

// A nil handler is http.DefaultServeMux, as without a drain.
func TestDefaultServeMux(t *testing.T) {
	s := serve(t, Options{}, nil, func(s *http.Server) { s.Handler = nil })
	c := dial(t, s.addr)
	if _, _, err := c.do(); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("%v, want the mux's 404", err)
	}
}
