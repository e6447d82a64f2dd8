// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// Wherever Ready is when another goroutine closes the Handover: it returns
// ErrClosed, nothing serves here and no more functions of OnActivate run, and the
// predecessor serves as before.
func TestCloseDuringReady(t *testing.T) {
	for _, at := range []string{"ready", "commit", "activate", "activated", "committed"} {
		t.Run(at, func(t *testing.T) {
			socket := socketPath(t)
			first := mustStart(t, testOptions(t, socket), nil)
			addr := first.l.Addr()
			var h *Handover
			strike := func(step string) {
				if step != at {
					return
				}
				closed := make(chan error)
				go func() { closed <- h.Close() }()
				if err := <-closed; err != nil {
					t.Errorf("Close: %v", err)
				}
			}
			options := testOptions(t, socket)
			options.PIDFile = filepath.Join(t.TempDir(), "pid")
			options.step = func(step string, _ *peer) error { strike(step); return nil }
			h, err := New(options)
			if err != nil {
				t.Fatal(err)
			}
			l, err := h.Listen("web", "tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			h.OnActivate(func(context.Context) error { strike("activate"); return nil })
			h.OnActivate(func(ctx context.Context) error {
				if h.Status().Phase == "closed" {
					t.Error("activated after Close")
				}
				return ctx.Err()
			})
			if err := h.Ready(t.Context()); !errors.Is(err, ErrClosed) {
				t.Errorf("Ready: %v", err)
			}
			isOver(t, h, l)
			settledUpgrade(t, first)
			if got := ask(t, addr); got != "1" {
				t.Errorf("generation %s answers", got)
			}
			settled(t, mustStart(t, testOptions(t, socket), nil))
		})
	}
}

// isOver makes sure that nothing is left of a closed Handover.
func isOver(t testing.TB, h *Handover, l net.Listener) {
	t.Helper()
	if phase := h.Status().Phase; phase != "closed" {
		t.Errorf("it is %s", phase)
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) || errors.Is(err, ErrSuperseded) {
		t.Errorf("Accept: %v", err)
	}
	if err := h.Ready(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("Ready after Close: %v", err)
	}
	if err := h.Close(); !errors.Is(err, ErrClosed) {
		t.Errorf("a second Close: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Errorf("Close of the listener: %v", err)
	}
}

// The same without a predecessor; and the files are gone.
func TestCloseDuringFirstReady(t *testing.T) {
	folder := t.TempDir()
	options := testOptions(t, filepath.Join(folder, "control"))
	options.PIDFile = filepath.Join(folder, "pid")
	h, err := New(options)
	if err != nil {
		t.Fatal(err)
	}
	l, err := h.Listen("local", "unix", filepath.Join(folder, "local"))
	if err != nil {
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	h.OnActivate(func(ctx context.Context) error {
		go func() { closed <- h.Close() }()
		<-ctx.Done()
		if cause := context.Cause(ctx); !errors.Is(cause, ErrClosed) {
			t.Errorf("cause %v", cause)
		}
		return nil // it does not care
	})
	if err := h.Ready(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("Ready: %v", err)
	}
	if err := receiveError(t, "Close", closed); err != nil {
		t.Errorf("Close: %v", err)
	}
	isOver(t, h, l)
	if files, err := os.ReadDir(folder); err != nil || len(files) > 0 {
		t.Errorf("left over: %v, %v", files, err)
	}
}

// Close at any moment of Ready.
func TestCloseRacesReady(t *testing.T) {
	socket := socketPath(t)
	options := testOptions(t, socket)
	options.Probation, options.Logger = time.Minute, nil // it may take back all the time
	first := mustStart(t, options, nil)
	for n := range 100 {
		settledUpgrade(t, first)
		h, err := New(options)
		if err != nil {
			t.Fatal(err)
		}
		l, err := h.Listen("web", "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		var both sync.WaitGroup
		both.Go(func() {
			if err := h.Ready(t.Context()); err != nil && !errors.Is(err, ErrClosed) {
				t.Errorf("Ready: %v", err)
			}
		})
		both.Go(func() {
			time.Sleep(time.Duration(n) * 20 * time.Microsecond) // another moment each time
			if err := h.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
		both.Wait()
		isOver(t, h, l)
		if got := ask(t, first.l.Addr()); got != "1" {
			t.Fatalf("generation %s answers", got)
		}
	}
}
