// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"instar/internal/testutil"
)

const patience = 30 * time.Second

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Logf("%s", strings.TrimSuffix(string(b), "\n"))
	return len(b), nil
}

func testLogger(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// testOptions are for a process that lives in the test's.
func testOptions(t testing.TB, socket string) Options {
	return Options{
		Name: "test", Socket: socket, Signals: []os.Signal{}, Probation: 50 * time.Millisecond, Logger: testLogger(t),
		// The default would start this test binary, tests and all.
		Command:        []string{filepath.Join(t.TempDir(), "no-successor")},
		UpgradeTimeout: 10 * time.Second, CommitTimeout: 5 * time.Second,
		getenv: func(string) string { return "" }, unsetenv: func(string) error { return nil },
	}
}

func socketPath(t testing.TB) string { return filepath.Join(t.TempDir(), "control") }

// generation is a server in the test's process.
type generation struct {
	*Handover
	t       testing.TB
	l       net.Listener
	serving sync.WaitGroup
}

// start makes a generation with one listener; prepare may do more with it.
func start(t testing.TB, options Options, prepare func(*generation)) (*generation, error) {
	h, err := New(options)
	if err != nil {
		return nil, err
	}
	g := &generation{Handover: h, t: t}
	l, err := h.Listen("web", "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, errors.Join(err, h.Close())
	}
	g.l = l
	g.serving.Go(g.serve)
	t.Cleanup(func() { g.stop() })
	if prepare != nil {
		prepare(g)
	}
	if err := h.Ready(t.Context()); err != nil {
		return nil, err
	}
	return g, nil
}

func mustStart(t testing.TB, options Options, prepare func(*generation)) *generation {
	t.Helper()
	g, err := start(t, options, prepare)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// serve answers each connection with a letter: the number of the generation.
func (g *generation) serve() {
	for {
		c, err := g.l.Accept()
		if err != nil {
			if !errors.Is(err, net.ErrClosed) {
				g.t.Errorf("accept: %v", err)
			}
			return
		}
		_, _ = c.Write([]byte{byte('0' + g.Generation())})
		_ = c.Close()
	}
}

func (g *generation) stop() {
	_ = g.Close()
	g.serving.Wait()
}

// ask connects, and returns who answered.
func ask(t testing.TB, addr net.Addr) string {
	t.Helper()
	c, err := net.DialTimeout(addr.Network(), addr.String(), patience)
	if err != nil {
		t.Fatalf("dial: %v", err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	b, err := io.ReadAll(c)
	if err != nil {
		t.Fatalf("read: %v", err)
	}
	return string(b)
}

func superseded(t testing.TB, g *generation) {
	t.Helper()
	select {
	case <-g.Superseded():
	case <-time.After(patience):
		t.Fatal("not superseded")
	}
}

func TestTakeover(t *testing.T) {
	socket := socketPath(t)
	first := mustStart(t, testOptions(t, socket), func(g *generation) {
		g.OnHandover(func(_ context.Context, w io.Writer) error {
			_, err := io.WriteString(w, "the state")
			return err
		})
		if g.State() != nil {
			t.Error("the first generation has a state")
		}
	})
	addr := first.l.Addr()
	if got := ask(t, addr); got != "1" {
		t.Errorf("answer %q", got)
	}
	second := mustStart(t, testOptions(t, socket), func(g *generation) {
		if got := ask(t, addr); got != "1" {
			t.Errorf("while the second starts, %q answers", got)
		}
		state, err := io.ReadAll(g.State())
		if err != nil || string(state) != "the state" {
			t.Errorf("state %q, %v", state, err)
		}
	})
	for range 20 {
		if got := ask(t, addr); got != "2" {
			t.Errorf("answer %q", got)
		}
	}
	superseded(t, first)
	if err := first.Err(); !errors.Is(err, ErrSuperseded) {
		t.Errorf("Err() = %v", err)
	}
	if _, err := first.l.Accept(); !errors.Is(err, ErrSuperseded) || !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept after a planned stop: %v", err)
	}
	if p, ok := second.Predecessor(); !ok || p.Generation != 1 || p.PID != os.Getpid() {
		t.Errorf("predecessor %+v, %v", p, ok)
	}
	testutil.WaitFor(t, patience, func() bool { return !second.Status().Probation }, "the end of the probation")
	status, err := RequestStatus(t.Context(), socket)
	if err != nil || status.Generation != 2 || status.Phase != "active" || len(status.Older) != 1 {
		t.Errorf("status %+v, %v", status, err)
	}
	first.stop()
	if got := second.Status().Older; len(got) != 0 {
		t.Errorf("the first is gone, and older has %+v", got)
	}
	second.stop()
	if _, err := os.Stat(socket); !os.IsNotExist(err) {
		t.Errorf("the last one left its socket: %v", err)
	}
}

// A state that is larger than any buffer comes while the predecessor serves, and
// a successor that does not want it leaves everything as it was.
func TestState(t *testing.T) {
	socket := socketPath(t)
	size := 100 << 20
	if testing.Short() {
		size = 10 << 20
	}
	big := bytes.Repeat([]byte("0123456789abcdef"), size/16)
	first := mustStart(t, testOptions(t, socket), func(g *generation) {
		g.OnHandover(func(_ context.Context, w io.Writer) error {
			_, err := w.Write(big)
			return err
		})
	})
	addr := first.l.Addr()
	// One that does not want the state.
	h, err := New(testOptions(t, socket))
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.ReadFull(h.State(), make([]byte, 1000))
	if err != nil {
		t.Error(err)
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	if got := ask(t, addr); got != "1" {
		t.Errorf("answer %q", got)
	}
	// One that does, once the first has noticed.
	testutil.WaitFor(t, patience, func() bool { return !first.Status().Upgrading }, "the end of the first upgrade")
	mustStart(t, testOptions(t, socket), func(g *generation) {
		if got := ask(t, addr); got != "1" {
			t.Errorf("answer %q", got)
		}
		state, err := io.ReadAll(g.State())
		if err != nil || !bytes.Equal(state, big) {
			t.Errorf("%d bytes of state, %v", len(state), err)
		}
	})
	if got := ask(t, addr); got != "2" {
		t.Errorf("answer %q", got)
	}
	superseded(t, first)
}
