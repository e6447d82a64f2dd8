// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// hold is a handler that ends with its context.
func hold(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body) // the server notices the client's end then
	<-r.Context().Done()
}

// held is a server with an open request, and the client's end.
func held(t *testing.T, o Options) (*site, *client) {
	t.Helper()
	s := serve(t, o, hold, nil)
	c := dial(t, s.addr)
	if _, err := io.WriteString(c, request); err != nil {
		t.Fatal(err)
	}
	s.waitOpen(t, 1, busy)
	return s, c
}

func TestNothingOpen(t *testing.T) {
	s := serve(t, Options{Deadline: time.Hour}, ok, nil)
	ended(t, s.drain(context.Background()), 0, 0, 0)
	if err := receive(t, s.served, "Serve"); err != http.ErrServerClosed {
		t.Errorf("Serve: %v", err)
	}
}

func TestRunsOnce(t *testing.T) {
	d := New(Options{})
	if r := d.Report(); r.Phase != PhaseServing || r.Elapsed != 0 {
		t.Errorf("before Run: %+v", r)
	}
	if _, err := d.Run(context.Background()); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Run(context.Background()); !errors.Is(err, ErrRan) {
		t.Errorf("second Run: %v", err)
	}
}

func TestHurry(t *testing.T) {
	for name, f := range map[string]func(*Drainer, context.CancelCauseFunc){
		"method":  func(d *Drainer, _ context.CancelCauseFunc) { d.Hurry() },
		"context": func(_ *Drainer, hurry context.CancelCauseFunc) { hurry(ErrHurry) },
	} {
		t.Run(name, func(t *testing.T) {
			hurried, hurry := context.WithCancelCause(context.Background())
			defer hurry(nil)
			s, c := held(t, Options{Deadline: time.Hour})
			done := s.drain(hurried)
			receive(t, s.Draining(), "the drain")
			if r := s.Report(); r.Phase != PhaseWaiting || r.Left < 50*time.Minute || r.Hurried {
				t.Errorf("before: %+v", r)
			}
			f(s.Drainer, hurry)
			if r := ended(t, done, 0, 0, 1); !r.Hurried || r.Left != 0 {
				t.Errorf("%+v", r)
			}
			_, _ = io.Copy(io.Discard, c)
		})
	}
}

func TestHurryBeforeRun(t *testing.T) {
	s, _ := held(t, Options{Deadline: time.Hour})
	s.Hurry()
	s.Hurry()
	ended(t, s.drain(context.Background()), 0, 0, 1)
}

// Whoever gives the drain up gets the cause, and finds nothing open.
func TestGiveUp(t *testing.T) {
	s, c := held(t, Options{Deadline: time.Hour})
	idle := dial(t, s.addr)
	s.waitOpen(t, 2, nil)
	ctx, cancel := context.WithCancelCause(context.Background())
	done := s.drain(ctx)
	receive(t, s.Draining(), "the drain")
	why := errors.New("enough")
	cancel(why)
	r := receive(t, done, "the end of the drain")
	if !errors.Is(r.err, why) || r.Cut != 2 || len(r.Open) > 0 {
		t.Errorf("%v, %v", r.Report, r.err)
	}
	if err := receive(t, s.served, "Serve"); err != http.ErrServerClosed {
		t.Errorf("Serve: %v", err)
	}
	_, _ = io.Copy(io.Discard, c)
	_, _ = io.Copy(io.Discard, idle)
}

// Deadlines that contradict each other are refused, both named, and the server
// goes on serving.
func TestContradictions(t *testing.T) {
	soon, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for _, tc := range []struct {
		name  string
		o     Options
		conns *ConnsOptions
		ctx   context.Context
		want  []string // nil: it is fine
	}{
		{"context", Options{}, nil, soon, []string{"Options.Deadline of 30s", "the context's deadline of"}},
		{"later context", Options{Deadline: time.Second}, nil, soon, nil},
		{"killed before", Options{KillAfter: 10 * time.Second}, nil, nil, []string{"Options.Deadline", "31s", "Options.KillAfter of 10s"}},
		{"killed just before", Options{KillAfter: 30500 * time.Millisecond}, nil, nil, []string{"31s", "Options.KillAfter of 30.5s"}},
		{"killed later", Options{Deadline: time.Second, KillAfter: 2 * time.Second}, nil, nil, nil},
		{"conns", Options{}, &ConnsOptions{Name: "db", Deadline: time.Minute}, nil, []string{`ConnsOptions.Deadline of "db" of 1m0s`, "Options.Deadline of 30s"}},
		{"conns at the same time", Options{}, &ConnsOptions{Deadline: 30 * time.Second}, nil, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.ctx == nil {
				tc.ctx = context.Background()
			}
			s := serve(t, tc.o, ok, nil)
			if tc.conns != nil {
				s.Conns(*tc.conns)
			}
			_, err := s.Run(tc.ctx)
			if tc.want == nil {
				if err != nil {
					t.Error(err)
				}
				return
			}
			var conflict *ConflictError
			if !errors.As(err, &conflict) || !errors.Is(err, ErrOptions) {
				t.Fatalf("%v, want a ConflictError", err)
			}
			for _, w := range tc.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not name %q", err, w)
				}
			}
			if tc.ctx == context.Background() && !errors.Is(s.Check(), ErrOptions) {
				t.Errorf("Check: %v", s.Check())
			}
			c := dial(t, s.addr)
			if c.mustDo(t) {
				t.Error("told")
			}
			if p := s.Report().Phase; p != PhaseServing {
				t.Errorf("phase %s", p)
			}
		})
	}
}

func TestOptionsOutOfRange(t *testing.T) {
	for _, o := range []Options{{Deadline: -1}, {CloseRate: -1}, {KillAfter: -1}} {
		if _, err := New(o).Run(context.Background()); !errors.Is(err, ErrOptions) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	d := New(Options{})
	d.Conns(ConnsOptions{Deadline: -1})
	if _, err := d.Run(context.Background()); !errors.Is(err, ErrOptions) {
		t.Errorf("%v", err)
	}
	if d.options.Deadline != 30*time.Second || d.options.CloseRate != 500 {
		t.Errorf("defaults: %+v", d.options)
	}
}

// Before the supervisor kills the process, all that the rate has left over is cut.
func TestKilledBefore(t *testing.T) {
	d := New(Options{Deadline: 100 * time.Millisecond, CloseRate: 1, KillAfter: 1500 * time.Millisecond})
	conns := d.Conns(ConnsOptions{})
	for range 20 {
		a, b := net.Pipe()
		defer b.Close()
		conns.Add(a)
	}
	r, err := d.Run(context.Background())
	if !errors.Is(err, ErrKilled) || r.Cut != 20 || r.Elapsed >= 1500*time.Millisecond {
		t.Errorf("%+v, %v", r, err)
	}
}

// A refused Run does not count as the one.
func TestRunAfterRefusal(t *testing.T) {
	d := New(Options{})
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if _, err := d.Run(ctx); !errors.Is(err, ErrOptions) {
		t.Fatal(err)
	}
	if _, err := d.Run(context.Background()); err != nil {
		t.Error(err)
	}
}

// The report counts down.
func TestReport(t *testing.T) {
	log := &strings.Builder{}
	s, c := held(t, Options{Deadline: time.Hour, Logger: slog.New(slog.NewTextHandler(log, nil))})
	done := s.drain(context.Background())
	receive(t, s.Draining(), "the drain")
	first := s.Report()
	second := s.Report()
	if first.Left <= second.Left || first.Elapsed >= second.Elapsed || first.Left+first.Elapsed != time.Hour {
		t.Errorf("%v, then %v", first.Left, second.Left)
	}
	line := first.String()
	for _, want := range []string{"waiting", "1 open", "1h0m0s left"} {
		if !strings.Contains(line, want) {
			t.Errorf("%q has no %q", line, want)
		}
	}
	line = first.Open[0].String()
	for _, want := range []string{"http " + c.LocalAddr().String(), "1 requests"} {
		if !strings.Contains(line, want) {
			t.Errorf("%q has no %q", line, want)
		}
	}
	_ = c.Close()
	ended(t, done, 1, 0, 0)
	if !strings.Contains(log.String(), "msg=drained report.phase=done") || !strings.Contains(log.String(), "report.finished=1") {
		t.Errorf("logged %s", log)
	}
}

// Planned errors are those of a closed connection to who knows no drains.
func TestErrors(t *testing.T) {
	for _, err := range []error{errIdle, errCut, errAtOnce} {
		if !errors.Is(err, ErrPlanned) || !strings.Contains(err.Error(), "planned stop") {
			t.Errorf("%v", err)
		}
	}
}
