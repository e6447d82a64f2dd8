// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

const patience = 20 * time.Second

// listen listens on a port of the loopback device.
func listen(t testing.TB) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return ln
}

// site is a server of net/http that serves.
type site struct {
	*Drainer
	web    *HTTP
	server *http.Server
	addr   string
	served chan error // what Serve returned
}

// serve starts a server; set may change it before it is added. With a TLS
// configuration it speaks TLS.
func serve(t testing.TB, o Options, handler http.HandlerFunc, set func(*http.Server)) *site {
	t.Helper()
	s := &site{Drainer: New(o), server: &http.Server{Handler: handler}, served: make(chan error, 1)}
	if set != nil {
		set(s.server)
	}
	s.server.ErrorLog = log.New(io.Discard, "", 0) // connections that a test ends in their handshake
	withTLS := s.server.TLSConfig != nil
	s.web = s.HTTP(s.server)
	ln := listen(t)
	s.addr = ln.Addr().String()
	go func() {
		if withTLS {
			s.served <- s.server.ServeTLS(s.web.Listener(ln), "", "")
		} else {
			s.served <- s.server.Serve(s.web.Listener(ln))
		}
	}()
	t.Cleanup(func() { _ = s.server.Close() })
	return s
}

// certificate makes servers and clients that trust each other.
func certificate(t testing.TB) (server, client *tls.Config) {
	t.Helper()
	s := httptest.NewUnstartedServer(nil)
	s.StartTLS()
	defer s.Close()
	client = s.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	client.ServerName = "example.com"
	return &tls.Config{Certificates: s.TLS.Certificates}, client
}

type result struct {
	Report
	err error
}

// drain calls Run and returns at once.
func (d *Drainer) drain(ctx context.Context) <-chan result {
	c := make(chan result, 1)
	go func() {
		r, err := d.Run(ctx)
		c <- result{r, err}
	}()
	return c
}

func receive[T any](t testing.TB, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("waited in vain for %s", what)
		panic("unreachable")
	}
}

// ended checks the numbers of a drain.
func ended(t testing.TB, c <-chan result, finished, closedIdle, cut int) Report {
	t.Helper()
	r := receive(t, c, "the end of the drain")
	if r.err != nil {
		t.Error(r.err)
	}
	if r.Finished != finished || r.ClosedIdle != closedIdle || r.Cut != cut || len(r.Open) != 0 || r.Phase != PhaseDone {
		t.Errorf("%v, want %d finished, %d closed idle, %d cut", r.Report, finished, closedIdle, cut)
	}
	return r.Report
}

// client is one HTTP/1.1 connection that repeats nothing.
type client struct {
	net.Conn
	r *bufio.Reader
}

func dial(t testing.TB, addr string) *client {
	t.Helper()
	c, err := connect(addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func connect(addr string) (*client, error) {
	c, err := net.Dial("tcp4", addr)
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	return &client{c, bufio.NewReader(c)}, nil
}

const request = "POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 4\r\n\r\nbody"

// do sends a request, and reads its response.
func (c *client) do() (body string, last bool, err error) {
	if _, err := io.WriteString(c, request); err != nil {
		return "", false, err
	}
	return c.response()
}

func (c *client) response() (body string, last bool, err error) {
	r, err := http.ReadResponse(c.r, nil)
	if err != nil {
		return "", false, err
	}
	b, err := io.ReadAll(r.Body)
	if err == nil && r.StatusCode != http.StatusOK {
		err = errors.New(r.Status)
	}
	return string(b), r.Close, err
}

func (c *client) mustDo(t testing.TB) (last bool) {
	t.Helper()
	_, last, err := c.do()
	if err != nil {
		t.Fatal(err)
	}
	return last
}

// wantEOF checks that the other end closed the connection orderly.
func (c *client) wantEOF(t testing.TB) {
	t.Helper()
	if b, err := c.r.ReadByte(); err != io.EOF {
		t.Errorf("read %q, %v, want EOF", b, err)
	}
}

// waitOpen waits until n connections are open and cond, if any, holds for all.
func (d *Drainer) waitOpen(t testing.TB, n int, cond func(Open) bool) []Open {
	t.Helper()
	var r Report
	testutil.WaitFor(t, patience, func() bool {
		r = d.Report()
		if len(r.Open) != n {
			return false
		}
		for _, o := range r.Open {
			if cond != nil && !cond(o) {
				return false
			}
		}
		return true
	}, "%d open, of: %v", n, &r.Open)
	return r.Open
}

func idle(o Open) bool { return !o.Busy }
func busy(o Open) bool { return o.Busy }

func ok(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	_, _ = io.WriteString(w, "ok")
}
