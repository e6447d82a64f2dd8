// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"instar/internal/testutil"
)

// tracked is a tracker with one connection and its client.
func tracked(t *testing.T, o Options) (d *Drainer, c *Conn, client net.Conn) {
	t.Helper()
	d = New(o)
	ln := d.Conns(ConnsOptions{}).Track(listen(t))
	client, err := net.Dial("tcp4", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conn, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close(); _ = conn.Close(); _ = ln.Close() })
	_ = client.SetDeadline(time.Now().Add(patience))
	return d, conn.(*Conn), client
}

// An accept loop ends with a planned error, and whoever knows no drains takes it
// for a closed listener.
func TestAcceptEndsPlanned(t *testing.T) {
	d := New(Options{})
	conns := d.Conns(ConnsOptions{})
	ln := conns.Track(listen(t))
	accepted := make(chan error, 2)
	for range 2 {
		go func() {
			_, err := ln.Accept()
			accepted <- err
		}()
	}
	done := d.drain(context.Background())
	for range 2 {
		if err := receive(t, accepted, "Accept"); !errors.Is(err, ErrPlanned) || !errors.Is(err, net.ErrClosed) {
			t.Errorf("Accept: %v", err)
		}
	}
	receive(t, conns.Draining(), "the drain")
	ended(t, done, 0, 0, 0)
	if _, err := ln.Accept(); !errors.Is(err, ErrPlanned) {
		t.Errorf("Accept again: %v", err)
	}
	if err := ln.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}

// A listener that its owner closes is not planned.
func TestAcceptEndsUnplanned(t *testing.T) {
	ln := New(Options{}).Conns(ConnsOptions{}).Track(listen(t))
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := ln.Accept(); errors.Is(err, ErrPlanned) || !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept: %v", err)
	}
}

// A listener that comes when the drain has begun accepts nothing.
func TestTrackLate(t *testing.T) {
	d := New(Options{})
	conns := d.Conns(ConnsOptions{})
	ended(t, d.drain(context.Background()), 0, 0, 0)
	if _, err := conns.Track(listen(t)).Accept(); !errors.Is(err, ErrPlanned) {
		t.Errorf("Accept: %v", err)
	}
}

// A busy connection ends its work by itself.
func TestConnFinishes(t *testing.T) {
	d, c, client := tracked(t, Options{Deadline: time.Minute})
	select {
	case <-c.Draining():
		t.Error("draining before Run")
	default:
	}
	done := d.drain(context.Background())
	receive(t, c.Draining(), "the drain")
	if _, err := io.WriteString(c, "bye"); err != nil {
		t.Error(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if b, err := io.ReadAll(client); string(b) != "bye" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	ended(t, done, 1, 0, 0)
	if err := context.Cause(c.Context()); err != context.Canceled {
		t.Errorf("cause %v", err)
	}
}

// An idle one is closed: its reader gets a planned error, its client an orderly
// end.
func TestIdleConnIsClosed(t *testing.T) {
	d, c, client := tracked(t, Options{Deadline: 200 * time.Millisecond})
	c.Idle()
	read := make(chan error, 1)
	go func() {
		_, err := c.Read(make([]byte, 1))
		read <- err
	}()
	done := d.drain(context.Background())
	if err := receive(t, read, "Read"); !errors.Is(err, ErrPlanned) || !errors.Is(err, net.ErrClosed) {
		t.Errorf("Read: %v", err)
	}
	receive(t, c.Context().Done(), "the context")
	if err := context.Cause(c.Context()); !errors.Is(err, ErrPlanned) {
		t.Errorf("cause %v", err)
	}
	if b, err := io.ReadAll(client); len(b) > 0 || err != nil {
		t.Errorf("client: %q, %v", b, err)
	}
	if c.Busy() {
		t.Error("busy again")
	}
	_ = client.Close()
	ended(t, done, 0, 1, 0)
	for name, f := range map[string]func() error{
		"read":     func() error { _, err := c.Read(make([]byte, 1)); return err },
		"write":    func() error { _, err := c.Write([]byte("x")); return err },
		"writeto":  func() error { _, err := c.WriteTo(io.Discard); return err },
		"readfrom": func() error { _, err := c.ReadFrom(bytes.NewReader([]byte("x"))); return err },
		"deadline": func() error { return c.SetDeadline(time.Now()) },
	} {
		if err := f(); !errors.Is(err, ErrPlanned) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := c.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}

// What was written before the close arrives, even when the client has sent
// something that nobody reads: no reset overtakes it.
func TestNothingWrittenIsLost(t *testing.T) {
	d, c, client := tracked(t, Options{Deadline: 100 * time.Millisecond})
	if err := client.(*net.TCPConn).SetReadBuffer(32 << 10); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(client, "unread"); err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte("0123456789abcdef"), 24<<10) // 384 KiB
	if err := c.NetConn().(*net.TCPConn).SetWriteBuffer(2 * len(data)); err != nil {
		t.Fatal(err)
	}
	_ = c.SetWriteDeadline(time.Now().Add(time.Second))
	n, err := c.Write(data) // as much as the kernel takes
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
	c.Idle()
	d.waitOpen(t, 1, func(o Open) bool { return o.Unread == 6 && o.Unsent > 0 })
	done := d.drain(context.Background())
	receive(t, c.Context().Done(), "the close")
	if got, err := io.ReadAll(client); err != nil || !bytes.Equal(got, data[:n]) {
		t.Errorf("got %d of %d bytes, %v", len(got), n, err)
	}
	_ = client.Close()
	ended(t, done, 0, 0, 1) // the unread bytes may have been a request
}

// What is read ends the idleness.
func TestReadMakesBusy(t *testing.T) {
	d, c, client := tracked(t, Options{})
	c.Idle()
	if o := d.Report().Open[0]; o.Busy {
		t.Errorf("%+v", o)
	}
	if _, err := io.WriteString(client, "abc"); err != nil {
		t.Fatal(err)
	}
	// What has come and was not read keeps it, too.
	d.waitOpen(t, 1, func(o Open) bool { return o.Unread == 3 })
	if c.entry.letGo(time.Now()) {
		t.Error("closed with unread bytes")
	}
	if _, err := c.Read(make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	if o := d.Report().Open[0]; !o.Busy || o.Unread != 0 {
		t.Errorf("%+v", o)
	}
}

// A message that was read when the connection was already being closed is not
// handed to the handler.
func TestReadTooLate(t *testing.T) {
	d, c, client := tracked(t, Options{})
	c.Idle()
	c.entry.mu.Lock()
	c.entry.leaving = leavingIdle // the decision was made, and nothing done yet
	c.entry.mu.Unlock()
	if _, err := io.WriteString(client, "abc"); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 3)); n != 0 || !errors.Is(err, ErrPlanned) {
		t.Errorf("read %d, %v", n, err)
	}
	if d.Report().Crossed != 1 {
		t.Error("not counted")
	}
}

// At the deadline the handler of a busy connection is told by its context, and
// may still write.
func TestBusyConnIsCut(t *testing.T) {
	d, c, client := tracked(t, Options{Deadline: 100 * time.Millisecond})
	handled := make(chan error, 1)
	go func() {
		<-c.Context().Done()
		_, err := io.WriteString(c, "sorry")
		c.Idle()
		handled <- errors.Join(err, context.Cause(c.Context()))
	}()
	done := d.drain(context.Background())
	if err := receive(t, handled, "the handler"); !errors.Is(err, ErrPlanned) {
		t.Errorf("handler: %v", err)
	}
	if b, err := io.ReadAll(client); string(b) != "sorry" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	_ = client.Close()
	ended(t, done, 0, 0, 1)
}

// One whose handler hangs in Read and in Write loses it all the same.
func TestHangingConnIsCut(t *testing.T) {
	d, c, client := tracked(t, Options{Deadline: 100 * time.Millisecond})
	ends := make(chan error, 2)
	go func() {
		_, err := c.Read(make([]byte, 1))
		ends <- err
	}()
	go func() {
		_, err := c.Write(make([]byte, 64<<20)) // more than fits into any buffer
		ends <- err
	}()
	d.waitOpen(t, 1, func(o Open) bool { return o.Unsent > 0 })
	done := d.drain(context.Background())
	for range 2 {
		if err := receive(t, ends, "the handler"); !errors.Is(err, ErrPlanned) {
			t.Errorf("%v", err)
		}
	}
	ended(t, done, 0, 0, 1)
	_ = client
}

// recorder notes which of the fast ways were taken.
type recorder struct {
	*net.TCPConn
	readFrom, writeTo int
}

func (r *recorder) ReadFrom(src io.Reader) (int64, error) {
	r.readFrom++
	return r.TCPConn.ReadFrom(src)
}

func (r *recorder) WriteTo(dst io.Writer) (int64, error) {
	r.writeTo++
	return r.TCPConn.WriteTo(dst)
}

// sendfile, splice and the descriptor are reached through the wrapper.
func TestTCPShowsThrough(t *testing.T) {
	_, inner, client := tracked(t, Options{})
	tcp, isTCP := inner.NetConn().(*net.TCPConn)
	if !isTCP {
		t.Fatalf("NetConn is a %T", inner.NetConn())
	}
	rec := &recorder{TCPConn: tcp}
	c := New(Options{}).Conns(ConnsOptions{}).Add(rec)
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if n, err := io.Copy(struct{ io.Writer }{c}, file); n != 7 || err != nil {
		t.Errorf("copied %d, %v", n, err)
	}
	if rec.readFrom != 0 {
		t.Error("a plain writer was seen through")
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(c, struct{ io.Reader }{file}); n != 7 || err != nil || rec.readFrom != 1 {
		t.Errorf("copied %d, %v; %d by ReadFrom", n, err, rec.readFrom)
	}
	if _, err := io.WriteString(client, "question"); err != nil {
		t.Fatal(err)
	}
	if err := client.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, c); n != 8 || err != nil || rec.writeTo != 1 {
		t.Errorf("copied %d, %v; %d by WriteTo", n, err, rec.writeTo)
	}
	raw, err := syscall.Conn(c).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) {
		if _, err := syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_TYPE); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Error(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Error(err)
	}
	if b, err := io.ReadAll(client); string(b) != "contentcontent" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
}

// A connection that can nothing but the least still works.
func TestBareConn(t *testing.T) {
	a, b := net.Pipe()
	d := New(Options{Deadline: 50 * time.Millisecond})
	c := d.Conns(ConnsOptions{}).Add(a)
	for name, err := range map[string]error{
		"CloseWrite":  c.CloseWrite(),
		"CloseRead":   c.CloseRead(),
		"SyscallConn": func() error { _, err := c.SyscallConn(); return err }(),
	} {
		if !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
	go func() {
		_, _ = io.WriteString(b, "ping")
		_, _ = io.Copy(io.Discard, b)
		_ = b.Close()
	}()
	buf := make([]byte, 4)
	if _, err := io.ReadFull(c, buf); err != nil || string(buf) != "ping" {
		t.Errorf("%q, %v", buf, err)
	}
	if n, err := c.ReadFrom(bytes.NewReader([]byte("pong"))); n != 4 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	c.Idle()
	ended(t, d.drain(context.Background()), 0, 1, 0)
}

// A connection that comes between the accept and its handler is waited for.
func TestGateWaitsForTheAccepted(t *testing.T) {
	g := &gate{Listener: listen(t), wait: true, closed: make(chan struct{})}
	accepted := make(chan net.Conn)
	errs := make(chan error, 1)
	go func() {
		for {
			c, err := g.Accept()
			if err != nil {
				errs <- err
				return
			}
			accepted <- c
		}
	}()
	client := dial(t, g.Addr().String())
	defer client.Close()
	// The connection was returned by Accept, and its receiver has not entered
	// it: it has not called Accept again.
	if !g.pending() {
		t.Error("nothing is pending")
	}
	if err := g.shut(); err != nil {
		t.Fatal(err)
	}
	if !g.pending() {
		t.Error("nothing is pending when shut")
	}
	c := receive(t, accepted, "the connection")
	defer c.Close()
	testutil.WaitFor(t, patience, func() bool { return !g.pending() }, "the loop")
	select {
	case err := <-errs:
		t.Errorf("Accept did not wait: %v", err)
	default:
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	if err := receive(t, errs, "Accept"); !errors.Is(err, ErrPlanned) {
		t.Errorf("Accept: %v", err)
	}
}

// handedOver is a listener that ends with an error of its own.
type handedOver struct {
	net.Listener
	err error
}

func (h *handedOver) Accept() (net.Conn, error) { return nil, h.err }

func (h *handedOver) Close() error {
	_ = h.Listener.Close()
	return h.Listener.Close() // closed already
}

type plan struct{ is bool }

func (p plan) Error() string { return "handed over" }
func (p plan) Planned() bool { return p.is }

// A listener that ended by plan before the drain did, and was closed, is no
// fault; one that ended otherwise is.
func TestHandedOverListener(t *testing.T) {
	d := New(Options{})
	for err, want := range map[error]bool{
		plan{true}:       true,
		plan{false}:      false,
		net.ErrClosed:    false,
		errIdle:          true,
		os.ErrPermission: false,
	} {
		ln := d.Conns(ConnsOptions{}).Track(&handedOver{listen(t), err})
		if _, got := ln.Accept(); errors.Is(got, ErrPlanned) != want || !want && got != err {
			t.Errorf("%v became %v", err, got)
		}
	}
	server := &http.Server{}
	web := d.HTTP(server)
	served := make(chan error, 1)
	go func() { served <- server.Serve(web.Listener(&handedOver{listen(t), plan{true}})) }()
	testutil.WaitFor(t, patience, func() bool {
		web.mu.Lock()
		defer web.mu.Unlock()
		return web.served == 1
	}, "Serve")
	ended(t, d.drain(context.Background()), 0, 0, 0)
	if err := receive(t, served, "Serve"); err != http.ErrServerClosed {
		t.Errorf("Serve: %v", err)
	}
}
