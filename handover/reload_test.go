// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"instar/internal/systemd"
	"instar/internal/testutil"
)

// managed are options of a process that the manager looks after.
func managed(t testing.TB, m *manager, socket string) Options {
	o := testOptions(t, socket)
	o.getenv = func(name string) string {
		if name == "NOTIFY_SOCKET" {
			return m.path
		}
		return ""
	}
	return o
}

// from is how many lines this process has said.
func (m *manager) from() int { return len(m.of(os.Getpid())) }

// started waits for the words of a first start, and returns their number.
func (m *manager) started(t testing.TB) int {
	t.Helper()
	m.hears(t, os.Getpid(), 0, "READY=1", fmt.Sprintf("MAINPID=%d", os.Getpid()))
	return 2
}

// Each reload that a service manager asks for is answered by RELOADING, sent after
// the request, and READY after that, also when another upgrade is under way: systemd
// (Type=notify-reload) takes no older RELOADING, and waits.
func TestReloadDuringUpgrade(t *testing.T) {
	main := fmt.Sprintf("MAINPID=%d", os.Getpid())
	reload := func(h *Handover) {
		if err := h.Upgrade(context.Background()); !errors.Is(err, ErrUpgrading) {
			t.Errorf("an upgrade during another one: %v", err)
		}
	}
	t.Run("fails", func(t *testing.T) {
		m, socket := newManager(t), socketPath(t)
		first := mustStart(t, managed(t, m, socket), nil)
		said := m.started(t)
		_, err := start(t, testOptions(t, socket), func(g *generation) {
			reload(first.Handover)
			m.hears(t, os.Getpid(), said, "RELOADING=1", "MONOTONIC_USEC", "RELOADING=1", "MONOTONIC_USEC")
			g.OnActivate(func(context.Context) error { return errors.New("not active after all") })
		})
		if err == nil {
			t.Error("the second serves")
		}
		settledUpgrade(t, first)
		m.hears(t, os.Getpid(), said+4, main, "READY=1")
		// A start that fails says both words, too.
		said = m.from()
		if err := first.Upgrade(t.Context()); err == nil || errors.Is(err, ErrUpgrading) {
			t.Errorf("Upgrade: %v", err)
		}
		m.hears(t, os.Getpid(), said, "RELOADING=1", "MONOTONIC_USEC", "READY=1")
	})
	t.Run("succeeds", func(t *testing.T) {
		m, socket := newManager(t), socketPath(t)
		first := mustStart(t, managed(t, m, socket), nil)
		said := m.started(t)
		mustStart(t, testOptions(t, socket), func(*generation) { reload(first.Handover) })
		superseded(t, first)
		m.hears(t, os.Getpid(), said, "RELOADING=1", "MONOTONIC_USEC", "RELOADING=1", "MONOTONIC_USEC", main, "READY=1", "BARRIER=1")
	})
	t.Run("nothing more to say", func(t *testing.T) {
		// The upgrade has said READY, and is not over yet.
		m := newManager(t)
		first := mustStart(t, managed(t, m, ""), nil)
		said := m.started(t)
		release, err := first.beginUpgrade()
		if err != nil {
			t.Fatal(err)
		}
		reload(first.Handover)
		m.hears(t, os.Getpid(), said, "RELOADING=1", "MONOTONIC_USEC")
		release()
		m.hears(t, os.Getpid(), said+2, "READY=1")
	})
	t.Run("successor is named", func(t *testing.T) {
		// The manager listens to the successor only, which has to answer.
		m, socket := newManager(t), socketPath(t)
		first := mustStart(t, managed(t, m, socket), nil)
		said := m.started(t)
		m.on("BARRIER=1", func() { reload(first.Handover) })
		second := mustStart(t, managed(t, m, socket), nil)
		superseded(t, first)
		settled(t, second)
		m.hears(t, os.Getpid(), said, "RELOADING=1", "MONOTONIC_USEC", main, "READY=1", "BARRIER=1",
			"RELOADING=1", "MONOTONIC_USEC", "READY=1", main)
	})
	t.Run("in the probation", func(t *testing.T) {
		m, socket := newManager(t), socketPath(t)
		options := managed(t, m, socket)
		probation := newGate()
		defer probation.release()
		options.step = probation.at("probation-over")
		first := mustStart(t, options, nil)
		said := m.started(t)
		second := mustStart(t, managed(t, m, socket), nil)
		// It was started by somebody else, and serves, but is not the main process yet.
		reload(second.Handover)
		m.hears(t, os.Getpid(), said, "RELOADING=1", "MONOTONIC_USEC")
		probation.release()
		superseded(t, first)
		settled(t, second)
		m.hears(t, os.Getpid(), said+2, main, "READY=1", "BARRIER=1", "RELOADING=1", "MONOTONIC_USEC", "READY=1", main)
	})
}

// A successor whose predecessor dies speaks to the service manager itself.
func TestManagerHearsTheSurvivor(t *testing.T) {
	m := newManager(t)
	t.Setenv("NOTIFY_SOCKET", m.path)
	for _, step := range []string{"sent-manifest", "sent-commit", "probation-over"} {
		s := newService(t, appConfig{})
		s.fault(fault{1, step, kill})
		first := s.up()
		if _, err := s.upgrade(); err == nil {
			t.Errorf("%s: the answer of a dead process", step)
		}
		second := s.await(0, "the second", func(e appEvent) bool { return e.What == "ready" && e.PID != first.PID })
		m.hears(t, second.PID, 0, "READY=1", fmt.Sprintf("MAINPID=%d", second.PID))
	}
}

// The store is a cache: that a stale descriptor cannot be removed from it keeps
// nothing from starting, and is in the log.
func TestStaleDescriptorStays(t *testing.T) {
	null := func(name string) systemd.Descriptor {
		f, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		return systemd.Descriptor{Name: name, File: f}
	}
	name := func(generation int) string {
		s, err := systemd.StoreName("data", generation)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	n, err := systemd.NewNotifier(func(string) string { return filepath.Join(t.TempDir(), "nobody") })
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	h := &Handover{manager: n, log: slog.New(slog.NewTextHandler(&log, nil))}
	if err := h.takeActivation([]systemd.Descriptor{null(name(1)), null(name(2))}); err != nil {
		t.Errorf("start: %v", err)
	}
	if len(h.inherited) != 1 || h.inherited[0].Name != "data" {
		t.Errorf("inherited %v", h.inherited)
	}
	for _, i := range h.inherited {
		closeAll([]int{i.fd})
	}
	if text := log.String(); !strings.Contains(text, "level=WARN") || !strings.Contains(text, "name="+name(1)) {
		t.Errorf("log: %s", text)
	}
}

// together tells whether two lines came one after the other.
func (m *manager) together(from int, first, second string) bool {
	lines := m.of(os.Getpid())[from:]
	for i := range len(lines) - 1 {
		if lines[i] == first && lines[i+1] == second {
			return true
		}
	}
	return false
}

// The successor has everything removed that its predecessor stored, also what it
// did not take; a name that is used again stands for one descriptor in the store.
func TestStoreIsKeptInStep(t *testing.T) {
	m, socket := newManager(t), socketPath(t)
	options := func() Options {
		o := managed(t, m, socket)
		o.StoreDescriptors = true
		return o
	}
	first := mustStart(t, options(), func(g *generation) {
		null, err := os.Open(os.DevNull)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = null.Close() })
		if err := g.Add("unwanted", null); err != nil {
			t.Fatal(err)
		}
	})
	for _, name := range []string{"web", "unwanted"} {
		testutil.WaitFor(t, patience, func() bool { return m.together(0, "FDSTORE=1", "FDNAME=instar/1/"+name) }, "%s to be stored", name)
	}
	said := m.from()
	second := mustStart(t, options(), nil)
	superseded(t, first)
	settled(t, second)
	for _, name := range []string{"web", "unwanted"} {
		testutil.WaitFor(t, patience, func() bool { return m.together(said, "FDSTOREREMOVE=1", "FDNAME=instar/1/"+name) }, "the first's %s to be removed", name)
	}
	testutil.WaitFor(t, patience, func() bool { return m.together(said, "FDSTORE=1", "FDNAME=instar/2/web") }, "web to be stored")

	said = m.from()
	if err := second.l.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := second.Listen("web", "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	testutil.WaitFor(t, patience, func() bool { return m.together(said, "FDSTORE=1", "FDNAME=instar/2/web") }, "the new one to be stored")
	lines := m.of(os.Getpid())[said:]
	if remove, store := slices.Index(lines, "FDSTOREREMOVE=1"), slices.Index(lines, "FDSTORE=1"); remove < 0 || remove > store {
		t.Errorf("the manager heard %q", lines)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// The service manager keeps Unix sockets over a restart, and the next start needs
// their paths; the control socket's goes.
func TestStoredPathsStay(t *testing.T) {
	for _, store := range []bool{true, false} {
		m, folder := newManager(t), t.TempDir()
		options := managed(t, m, filepath.Join(folder, "control"))
		options.StoreDescriptors = store
		local := filepath.Join(folder, "local")
		g := mustStart(t, options, func(g *generation) {
			if _, err := g.Listen("local", "unix", local); err != nil {
				t.Fatal(err)
			}
		})
		g.stop()
		_, err := os.Lstat(local)
		if stays := err == nil; stays != store {
			t.Errorf("stored: %t, the path: %v", store, err)
		}
		if _, err := os.Lstat(options.Socket); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the control socket: %v", err)
		}
	}
}
