// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"instar/internal/testutil"
)

// A successor that has another control socket removes the predecessor's, once that
// one has let go or is dead, and not while it may take back.
func TestAnotherControlSocket(t *testing.T) {
	testutil.Slow(t)
	for _, tc := range []struct {
		name    string
		fault   fault
		removed bool
	}{
		{"superseded", fault{1, "probation-over", slow}, true},
		{"dies in the probation", fault{1, "probation-over", kill}, true},
		{"dies before it has told its state", fault{1, "sent-manifest", kill}, true},
		{"takes back", fault{2, "ping", refuse}, false},
		{"refuses", fault{1, "got-ready", refuse}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newService(t, appConfig{})
			probation := s.held(2, "committed") // it has the commit, and may be taken back
			if tc.fault.Step == "sent-manifest" || tc.fault.Step == "got-ready" {
				probation = fault{}
			}
			s.fault(tc.fault)
			first := s.up()
			old := s.config.control()
			if err := os.WriteFile(filepath.Join(s.config.Dir, "control-name"), []byte("another"), 0o600); err != nil {
				t.Fatal(err)
			}
			there := func(path string) bool {
				_, err := os.Lstat(path)
				if err != nil && !errors.Is(err, os.ErrNotExist) {
					t.Error(err)
				}
				return err == nil
			}
			answered := make(chan error, 1)
			go func() {
				_, err := RequestUpgrade(t.Context(), old)
				answered <- err
			}()
			if probation.Kind == hold {
				s.awaitHeld(probation)
				if !there(old) || !there(s.config.control()) {
					t.Error("a socket is gone during the upgrade")
				}
				s.letGo(probation)
			}
			err := receiveError(t, "the upgrade", answered)
			if !tc.removed {
				if err == nil {
					t.Error("upgraded in spite of the fault")
				}
				s.settle(first.PID)
				status, err := RequestStatus(t.Context(), old)
				if err != nil || status.PID != first.PID {
					t.Errorf("at the first's socket: %+v, %v", status, err)
				}
				testutil.WaitFor(t, patience, func() bool { return !there(s.config.control()) }, "the failed successor's socket to go")
				return
			}
			second := s.await(0, "the second", func(e appEvent) bool { return e.What == "ready" && e.PID != first.PID })
			testutil.WaitFor(t, patience, func() bool { return !there(old) }, "the first's socket to go")
			if status, err := s.status(); err != nil || status.PID != second.PID {
				t.Errorf("at the second's socket: %+v, %v", status, err)
			}
			if pid := s.one(); pid != second.PID {
				t.Errorf("process %d serves, the second is %d", pid, second.PID)
			}
			// The next one has the same, which stays.
			if _, err := s.upgrade(); err != nil {
				t.Fatal(err)
			}
			s.settle(first.PID)
			if !there(s.config.control()) {
				t.Error("the socket that is in use is gone")
			}
		})
	}
}

// The path of a listener that the successor does not ask for goes in the same way;
// what another process listens at by now stays.
func TestListenerNotTakenOver(t *testing.T) {
	folder := t.TempDir()
	socket, gone, stranger := filepath.Join(folder, "control"), filepath.Join(folder, "gone"), filepath.Join(folder, "stranger")
	probation := newGate()
	defer probation.release()
	options := testOptions(t, socket)
	options.step = probation.at("probation-over")
	first := mustStart(t, options, func(g *generation) {
		for _, path := range []string{gone, stranger} {
			if _, err := g.Listen(filepath.Base(path), "unix", path); err != nil {
				t.Fatal(err)
			}
		}
	})
	second := mustStart(t, testOptions(t, socket), nil)
	if _, err := os.Lstat(gone); err != nil {
		t.Errorf("in the probation: %v", err)
	}
	if err := os.Remove(stranger); err != nil {
		t.Fatal(err)
	}
	other := mustStart(t, testOptions(t, ""), func(g *generation) {
		if _, err := g.Listen("stranger", "unix", stranger); err != nil {
			t.Fatal(err)
		}
	})
	probation.release()
	superseded(t, first)
	testutil.WaitFor(t, patience, func() bool { _, err := os.Lstat(gone); return errors.Is(err, os.ErrNotExist) }, "the path to go")
	settled(t, second)
	second.stop() // waits for what it removes
	if _, err := os.Lstat(stranger); err != nil {
		t.Errorf("the other server's socket: %v", err)
	}
	other.stop()
}
