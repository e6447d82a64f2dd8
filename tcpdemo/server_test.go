// SPDX-License-Identifier: Apache-2.0

package tcpdemo

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"instar/internal/content"
	"instar/internal/testutil"
)

// running is a server in this process.
type running struct {
	*Server
	events chan Event
	ended  chan error
}

func run(t *testing.T, cfg ServerConfig) *running {
	t.Helper()
	r := &running{events: make(chan Event, 16), ended: make(chan error, 1)}
	cfg.Event = func(e Event) { r.events <- e }
	var err error
	if r.Server, err = NewServer(cfg); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.ended <- r.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return r
}

// expect waits for the next event.
func (r *running) expect(t *testing.T, kind EventKind) Event {
	t.Helper()
	select {
	case e := <-r.events:
		if e.Kind != kind {
			t.Fatalf("%+v, want %s", e, kind)
		}
		return e
	case err := <-r.ended:
		t.Fatalf("ended before it was %s: %v", kind, err)
	case <-time.After(10 * time.Second):
		t.Fatalf("not %s", kind)
	}
	return Event{}
}

// end waits for the end of Run.
func (r *running) end(t *testing.T) error {
	t.Helper()
	select {
	case err := <-r.ended:
		return err
	case <-time.After(20 * time.Second):
		t.Fatal("does not end")
		return nil
	}
}

func get(client *http.Client, url string) (*http.Response, string, error) {
	resp, err := client.Get(url)
	if err != nil {
		return nil, "", err
	}
	body, err := io.ReadAll(resp.Body)
	return resp, string(body), errors.Join(err, resp.Body.Close())
}

// A server of each mode answers, and when it is stopped it answers what was
// asked and tells the others to go.
func TestServer(t *testing.T) {
	for _, mode := range []Mode{ModeRestart, ModeReusePort, ModeInstar} {
		t.Run(string(mode), func(t *testing.T) {
			s := run(t, ServerConfig{
				Mode: mode, Addr: "127.0.0.1:0", Generation: 1, Socket: filepath.Join(t.TempDir(), "s"), AcceptEvery: time.Millisecond,
				DrainDeadline: 6 * time.Second,
			})
			ready := s.expect(t, EventReady)
			if ready.Generation != 1 {
				t.Errorf("generation %d", ready.Generation)
			}
			transport := &http.Transport{}
			defer transport.CloseIdleConnections()
			client := &http.Client{Transport: transport, Timeout: 10 * time.Second}
			url := "http://" + ready.Addr + "/bytes/1000?seed=3"
			resp, body, err := get(client, url)
			if err != nil {
				t.Fatal(err)
			}
			want, _ := io.ReadAll(content.New(3, 1000))
			if body != string(want) || resp.Header.Get(HeaderGeneration) != "1" || resp.Header.Get(HeaderPID) == "" || resp.Close {
				t.Errorf("%d bytes, %v", len(body), resp.Header)
			}

			slow := make(chan error, 1)
			begun := make(chan struct{})
			go func() {
				once := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
				resp, err := once.Get(url + "&ms=500")
				close(begun)
				if err == nil {
					_, err = io.Copy(io.Discard, resp.Body)
					err = errors.Join(err, resp.Body.Close())
				}
				slow <- err
			}()
			<-begun
			s.Stop()
			s.expect(t, EventDraining)
			if mode != ModeInstar {
				s.expect(t, EventClosed)
			}
			if mode != ModeRestart {
				// The connection that is idle is answered once more.
				resp, _, err := get(client, url)
				if err != nil || !resp.Close {
					t.Errorf("while draining: %v", err)
				}
			}
			if err := <-slow; err != nil {
				t.Errorf("in flight: %v", err)
			}
			s.expect(t, EventDrained)
			if err := s.end(t); err != nil {
				t.Error(err)
			}
			if _, _, err := get(client, url); err == nil {
				t.Error("answers after its end")
			}
		})
	}
}

// Generations of ModeInstar count themselves, and the predecessor leaves by
// itself.
func TestSuccession(t *testing.T) {
	cfg := ServerConfig{Mode: ModeInstar, Addr: "127.0.0.1:0", Socket: filepath.Join(t.TempDir(), "s"), Probation: 50 * time.Millisecond}
	first := run(t, cfg)
	addr := first.expect(t, EventReady).Addr
	second := run(t, cfg)
	if e := second.expect(t, EventReady); e.Generation != 2 || e.Addr != addr {
		t.Errorf("%+v, want generation 2 at %s", e, addr)
	}
	first.expect(t, EventDraining)
	first.expect(t, EventDrained)
	if err := first.end(t); err != nil {
		t.Error(err)
	}
	resp, _, err := get(&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, "http://"+addr+"/bytes/1")
	if err != nil || resp.Header.Get(HeaderGeneration) != "2" {
		t.Errorf("%v, %v", resp, err)
	}
}

// A server that is slow in accepting leaves connections in the queue, and knows
// how many.
func TestWaiting(t *testing.T) {
	s := run(t, ServerConfig{Mode: ModeReusePort, Addr: "127.0.0.1:0", AcceptEvery: time.Hour})
	addr := s.expect(t, EventReady).Addr
	for range 3 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
	}
	s.Stop()
	s.expect(t, EventDraining)
	if e := s.expect(t, EventClosed); e.Waiting != 3 {
		t.Errorf("%d waited, want 3", e.Waiting)
	}
	s.expect(t, EventDrained)
	if err := s.end(t); err != nil {
		t.Error(err)
	}
}

// A queue takes what waits once in an interval.
func TestQueue(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	const every = 300 * time.Millisecond
	q := newQueue(l, every, func(int) {})
	var open []net.Conn
	defer func() {
		for _, c := range open {
			_ = c.Close()
		}
	}()
	dial := func() {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, c)
	}
	accept := func() {
		c, err := q.Accept()
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, c)
	}
	began := time.Now()
	dial()
	dial()
	testutil.WaitFor(t, time.Minute, func() bool { n, err := waiting(l); return err == nil && n == 2 }, "two in the queue")
	accept()
	if took := time.Since(began); took < every/2 {
		t.Errorf("the first round came after %v", took)
	}
	dial() // for the round after
	accept()
	again := time.Now()
	accept()
	if took := time.Since(again); took < every/2 {
		t.Errorf("the second round came after %v", took)
	}

	ended := make(chan error)
	go func() {
		_, err := q.Accept()
		ended <- err
	}()
	if err := errors.Join(q.Close(), q.Close()); err != nil {
		t.Error(err)
	}
	if err := <-ended; !errors.Is(err, net.ErrClosed) {
		t.Errorf("accept after close: %v", err)
	}
}

func TestServerConfig(t *testing.T) {
	for want, cfg := range map[string]ServerConfig{
		"missing port":   {Mode: ModeRestart, Addr: "127.0.0.1"},
		"none of":        {Addr: "127.0.0.1:0"},
		"needs a socket": {Mode: ModeInstar, Addr: "127.0.0.1:0"},
	} {
		if _, err := NewServer(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %s", cfg, err, want)
		}
	}
	for _, mode := range []Mode{ModeRestart, ModeReusePort, ModeInstar} {
		s := run(t, ServerConfig{Mode: mode, Addr: "192.0.2.1:1", Socket: filepath.Join(t.TempDir(), "s")})
		if err := s.end(t); err == nil || !strings.Contains(err.Error(), "assign requested address") {
			t.Errorf("%s: %v", mode, err)
		}
	}
	// It can be stopped before it is ready.
	s := run(t, ServerConfig{Mode: ModeRestart, Addr: "127.0.0.1:0", StartDelay: time.Hour})
	s.Stop()
	if err := s.end(t); err != nil {
		t.Error(err)
	}
}
