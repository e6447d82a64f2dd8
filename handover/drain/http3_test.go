// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"
)

// fake3 is the server of one HTTP/3 connection, at the edge of a QUIC library.
type fake3 struct {
	goaway chan struct{} // closed by Shutdown
	ended  chan struct{} // closed when the connection has ended
	once   sync.Once
	closes int
}

func newFake3() *fake3 { return &fake3{goaway: make(chan struct{}), ended: make(chan struct{})} }

func (f *fake3) Shutdown(ctx context.Context) error {
	close(f.goaway) // panics the second time
	select {
	case <-f.ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// end is the client that goes, or Close.
func (f *fake3) end() { f.once.Do(func() { close(f.ended) }) }

func (f *fake3) close() error {
	f.closes++
	f.end()
	return nil
}

func get(h http.Handler) {
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// GOAWAY goes out when a request has come, and the client leaves.
func TestHTTP3(t *testing.T) {
	d := New(Options{Deadline: time.Minute})
	f, g := newFake3(), newFake3()
	h := d.HTTP3(f, HTTP3Options{Close: f.close, Remote: &net.UDPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 443}})
	other := d.HTTP3(g, HTTP3Options{Close: g.close})
	told := make(chan bool, 1)
	handler := h.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-Draining(r.Context()):
			<-f.goaway
			told <- true
		default:
			told <- isClosed(f.goaway)
		}
	}))
	other.Handler(http.HandlerFunc(ok))
	get(handler)
	if <-told {
		t.Error("GOAWAY before the drain")
	}
	if open := d.waitOpen(t, 2, idle); open[0].Remote != "192.0.2.1:443" || open[0].Member != "http3" {
		t.Errorf("%+v", open)
	}
	done := d.drain(context.Background())
	receive(t, d.Draining(), "the drain")
	get(handler)
	<-told
	get(handler) // no second GOAWAY, which would panic
	<-told
	f.end()
	d.waitOpen(t, 1, nil)
	if isClosed(g.goaway) {
		t.Error("the other connection was told")
	}
	other.Done()
	if r := ended(t, done, 2, 0, 0); r.Told != 1 || f.closes+g.closes != 0 {
		t.Errorf("%d told, %d and %d closed", r.Told, f.closes, g.closes)
	}
}

// An idle one gets GOAWAY in the second half; one that does not heed it is closed a second
// after it, and after its last response.
func TestHTTP3IdleIsClosed(t *testing.T) {
	d := New(Options{Deadline: 200 * time.Millisecond})
	f := newFake3()
	h := d.HTTP3(f, HTTP3Options{Close: f.close})
	var goaway, response time.Time
	handler := h.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := context.Cause(r.Context()); err != nil {
			t.Errorf("cut: %v", err)
		}
	}))
	h.e.mu.Lock()
	h.e.fresh = false
	h.e.mu.Unlock()
	d.options.Deadline = 4 * time.Second
	done := d.drain(context.Background())
	receive(t, f.goaway, "GOAWAY")
	goaway = time.Now()
	if p := d.Report().Phase; p == PhaseWaiting {
		t.Errorf("GOAWAY in phase %s", p)
	}
	get(handler) // crosses it
	response = time.Now()
	receive(t, f.ended, "the close")
	if after := time.Since(response); after < heed || time.Since(goaway) < heed {
		t.Errorf("closed %v after the last response", after)
	}
	ended(t, done, 0, 1, 0)
}

// A request at the deadline is cut, and knows why.
func TestHTTP3Cut(t *testing.T) {
	d := New(Options{Deadline: 100 * time.Millisecond})
	f := newFake3()
	h := d.HTTP3(f, HTTP3Options{Close: f.close})
	cause := make(chan error, 1)
	handler := h.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		<-r.Context().Done()
		cause <- context.Cause(r.Context())
	}))
	go get(handler)
	d.waitOpen(t, 1, func(o Open) bool { return o.Requests == 1 })
	done := d.drain(context.Background())
	if err := receive(t, cause, "a cause"); !errors.Is(err, ErrPlanned) {
		t.Errorf("cause %v", err)
	}
	ended(t, done, 0, 0, 1)
	if !isClosed(f.goaway) || f.closes != 1 {
		t.Errorf("closed %d times", f.closes)
	}
}

// A server whose requests are not counted is told at once, and has until the
// deadline.
func TestHTTP3Uncounted(t *testing.T) {
	d := New(Options{Deadline: time.Minute})
	f := newFake3()
	d.HTTP3(f, HTTP3Options{})
	done := d.drain(context.Background())
	receive(t, f.goaway, "GOAWAY")
	if r := d.Report(); r.Phase != PhaseWaiting || len(r.Open) != 1 || !r.Open[0].Busy || r.Told != 1 {
		t.Errorf("%+v", r)
	}
	d.Hurry()
	// Without Close, the end of Shutdown's context is all.
	ended(t, done, 0, 0, 1)
}

// A Shutdown that fails leaves the connection until the deadline.
func TestHTTP3ShutdownFails(t *testing.T) {
	d := New(Options{Deadline: time.Minute})
	called := make(chan struct{})
	d.HTTP3(shutdown(func(context.Context) error { close(called); return io.ErrUnexpectedEOF }), HTTP3Options{})
	done := d.drain(context.Background())
	receive(t, called, "Shutdown")
	if r := d.Report(); len(r.Open) != 1 {
		t.Errorf("%+v", r)
	}
	d.Hurry()
	ended(t, done, 0, 0, 1)
}

type shutdown func(context.Context) error

func (f shutdown) Shutdown(ctx context.Context) error { return f(ctx) }
