// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
	"instar/internal/testutil"
)

// Ten that ask at once: one upgrade, and the others can try again.
func TestSimultaneousTakeovers(t *testing.T) {
	socket := socketPath(t)
	first := mustStart(t, testOptions(t, socket), nil)
	addr := first.l.Addr()
	var mu sync.Mutex
	won, retryable := 0, 0
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() {
			_, err := start(t, testOptions(t, socket), nil)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				won++
			case Retryable(err) && errors.Is(err, ErrUpgrading):
				retryable++
			default:
				t.Errorf("takeover: %v", err)
			}
		})
	}
	all.Wait()
	if won < 1 || won+retryable != 10 {
		t.Errorf("%d took over, %d may try again", won, retryable)
	}
	if got := ask(t, addr); got != fmt.Sprint(1+won) {
		t.Errorf("generation %s answers after %d takeovers", got, won)
	}
}

// Drains fill the limit; then upgrades are refused with who it is, and work again
// when one has ended (G1, H1).
func TestGenerationLimit(t *testing.T) {
	for _, policy := range []Policy{Refuse, Hurry} {
		t.Run(fmt.Sprint(policy), func(t *testing.T) {
			socket := socketPath(t)
			options := func() Options {
				o := testOptions(t, socket)
				o.MaxGenerations, o.AtLimit, o.Probation = 3, policy, -1
				return o
			}
			one := mustStart(t, options(), nil)
			two := mustStart(t, options(), nil)
			superseded(t, one)
			settled(t, two)
			three := mustStart(t, options(), nil)
			superseded(t, two)
			settled(t, three)
			_, err := start(t, options(), nil)
			if !errors.Is(err, ErrTooMany) || !Retryable(err) {
				t.Fatalf("the fourth: %v", err)
			}
			for _, word := range []string{"MaxGenerations is 3", "generation 1 (pid", "generation 2 (pid"} {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("%q is not in %q", word, err)
				}
			}
			if got := ask(t, three.l.Addr()); got != "3" {
				t.Errorf("generation %s answers", got)
			}
			select {
			case <-one.Hurried():
				if policy == Refuse {
					t.Error("the oldest was hurried")
				}
			case <-time.After(map[Policy]time.Duration{Refuse: 0, Hurry: patience}[policy]):
				if policy == Hurry {
					t.Error("the oldest was not hurried")
				}
			}
			one.stop()
			four := mustStart(t, options(), nil)
			if got := ask(t, four.l.Addr()); got != "4" {
				t.Errorf("generation %s answers", got)
			}
		})
	}
}

// The lease moves at the commit, and nobody has it at the same time as another;
// it returns from a successor that fails (G5).
func TestLease(t *testing.T) {
	socket := socketPath(t)
	first := mustStart(t, testOptions(t, socket), nil)
	l, err := first.Lease(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := first.Lease(timeout(t, 20*time.Millisecond)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a second lease: %v", err)
	}
	released := make(chan struct{})
	go func() {
		<-l.Context().Done()
		if !errors.Is(context.Cause(l.Context()), ErrSuperseded) {
			t.Errorf("cause %v", context.Cause(l.Context()))
		}
		close(released)
		l.Release()
	}()
	// A successor whose activation fails.
	_, err = start(t, testOptions(t, socket), func(g *generation) {
		g.OnActivate(func(context.Context) error {
			select {
			case <-released:
			default:
				t.Error("the commit came before the release")
			}
			return errors.New("not active after all")
		})
	})
	if err == nil || !strings.Contains(err.Error(), "not active after all") {
		t.Fatalf("start: %v", err)
	}
	again, err := first.Lease(timeout(t, patience))
	if err != nil {
		t.Fatal(err)
	}
	go func() { <-again.Context().Done(); again.Release() }()
	testutil.WaitFor(t, patience, func() bool { return !first.Status().Upgrading }, "the end of the upgrade")
	second := mustStart(t, testOptions(t, socket), nil)
	got, err := second.Lease(timeout(t, patience))
	if err != nil {
		t.Fatal(err)
	}
	got.Release()
	superseded(t, first)
	if _, err := first.Lease(t.Context()); !errors.Is(err, ErrSuperseded) {
		t.Errorf("lease of a superseded one: %v", err)
	}
}

// settled waits until the predecessor has let go.
func settled(t testing.TB, g *generation) {
	t.Helper()
	testutil.WaitFor(t, patience, func() bool { return !g.Status().Probation }, "the end of the probation")
}

func timeout(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// What is at the path of the control socket, and what becomes of it.
func TestControlPath(t *testing.T) {
	dir := t.TempDir()
	for name, tc := range map[string]struct {
		path  string
		make  func(path string) error
		wrong string
	}{
		"file": {"file", func(p string) error { return os.WriteFile(p, nil, 0o600) }, "choose another path"},
		"stream": {"stream", func(p string) error {
			l, err := listenUnix(&net.ListenConfig{}, "unix", p)
			if err == nil {
				t.Cleanup(func() { _ = l.Close() })
			}
			return err
		}, "choose another path"},
		"no folder": {"none/control", nil, "no such file or directory"},
		"long":      {strings.Repeat("x", 120), nil, "at most 107 fit"},
		"stale": {"stale", func(p string) error {
			l, err := listenUnix(&net.ListenConfig{}, "unixpacket", p)
			if err != nil {
				return err
			}
			return l.Close()
		}, ""},
	} {
		path := filepath.Join(dir, tc.path)
		if tc.make != nil {
			if err := tc.make(path); err != nil {
				t.Fatal(err)
			}
		}
		h, err := New(testOptions(t, path))
		switch {
		case tc.wrong == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case tc.wrong != "" && (err == nil || !strings.Contains(err.Error(), tc.wrong)):
			t.Errorf("%s: %v, want %q", name, err, tc.wrong)
		}
		if err == nil {
			if err := h.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// A listener and a datagram socket honour deadlines and Close in both processes,
// and stay non-blocking (F1).
func TestDeadlinesAndClose(t *testing.T) {
	rounds := 1000
	if testing.Short() {
		rounds = 50
	}
	socket := socketPath(t)
	options := testOptions(t, socket)
	options.Probation = -1
	options.Logger = nil
	var before *Handover
	for round := range rounds {
		h, err := New(options)
		for Retryable(err) { // the one before may not have read FINAL yet
			h, err = New(options)
		}
		if err != nil {
			t.Fatal(err)
		}
		ln, err := h.Listen("web", "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		pc, err := h.ListenPacket("dns", "udp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l, u := ln.(*Listener), pc.(*net.UDPConn)
		accepted := make(chan error, 1)
		go func() { _, err := l.Accept(); accepted <- err }()
		if err := h.Ready(t.Context()); err != nil {
			t.Fatal(err)
		}
		if before != nil {
			<-before.Superseded()
			if err := before.Close(); err != nil {
				t.Fatal(err)
			}
		}
		for _, f := range []func(func(int) error) error{
			func(f func(int) error) error { return rawconn.Of(l, f) },
			func(f func(int) error) error { return rawconn.Of(u, f) },
		} {
			err := f(func(fd int) error {
				flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
				if err == nil && flags&unix.O_NONBLOCK == 0 {
					err = errors.New("the socket blocks")
				}
				cloexec, _ := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
				if cloexec&unix.FD_CLOEXEC == 0 {
					err = errors.Join(err, errors.New("the socket is not close-on-exec"))
				}
				return err
			})
			if err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
		}
		// A deadline interrupts, in the successor as in the first.
		_ = l.SetDeadline(time.Now().Add(time.Millisecond))
		if err := <-accepted; !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("round %d: accept: %v", round, err)
		}
		_ = u.SetReadDeadline(time.Now().Add(time.Millisecond))
		if _, _, err := u.ReadFrom(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("round %d: read: %v", round, err)
		}
		// So does Close.
		_ = l.SetDeadline(time.Time{})
		_ = u.SetReadDeadline(time.Time{})
		read := make(chan error, 1)
		go func() { _, _, err := u.ReadFrom(make([]byte, 1)); read <- err }()
		if round%2 == 1 {
			go func() { _, err := l.Accept(); accepted <- err }()
			// The other half goes to the next process open.
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			if err := <-accepted; !errors.Is(err, net.ErrClosed) {
				t.Fatalf("round %d: accept after Close: %v", round, err)
			}
		}
		if err := u.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-read; !errors.Is(err, net.ErrClosed) {
			t.Fatalf("round %d: read after Close: %v", round, err)
		}
		before = h
	}
	if err := before.Close(); err != nil {
		t.Error(err)
	}
}

// Two Handovers in one process do not disturb each other.
func TestTwoInOneProcess(t *testing.T) {
	a := mustStart(t, testOptions(t, socketPath(t)), nil)
	b := mustStart(t, testOptions(t, socketPath(t)), nil)
	mustStart(t, testOptions(t, a.opt.Socket), nil)
	superseded(t, a)
	if got := ask(t, b.l.Addr()); got != "1" || b.Status().Phase != "active" {
		t.Errorf("generation %s of the other one answers", got)
	}
}
