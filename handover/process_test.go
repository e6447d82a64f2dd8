// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"instar/internal/testutil"
)

// Upgrades by exec under new connections all the time: none is lost, and
// exactly one process serves after each (F2, G1).
func TestExecUpgrades(t *testing.T) {
	s := newService(t, appConfig{State: 1 << 20})
	first := s.up()
	load := s.client(4)
	pid := first.PID
	for n := range testutil.UnlessShort(10, 2) {
		status, err := s.upgrade()
		if err != nil {
			t.Fatalf("upgrade %d: %v", n, err)
		}
		if status.Phase != "draining" {
			t.Errorf("status %+v", status)
		}
		now := s.one()
		if now == pid {
			t.Errorf("process %d still serves", pid)
		}
		pid = now
		s.await(0, "the end of the probation", func(e appEvent) bool { return e.What == "superseded" && e.Generation == n+1 })
	}
	load.end()
	if load.lost() > 0 {
		t.Errorf("lost: %v", load.errors)
	}
	t.Logf("%d connections", load.asked.Load())
}

// The steps of the protocol, in their order, at which a fault can strike.
var (
	successorSteps   = []string{"hello", "manifest", "accepted", "ready", "commit", "activated", "committed", "ping"}
	predecessorSteps = []string{"wait-hello", "sent-hello", "sent-manifest", "sent-state", "got-ready", "paused", "sent-commit", "got-committed", "probation-over"}
)

// Whatever goes wrong at whatever step on whichever side: exactly one process
// serves afterwards, nothing was lost but what a killed process had accepted,
// and the next upgrade works (F7, G2, G4).
func TestFaults(t *testing.T) {
	for _, side := range []struct {
		name       string
		generation int
		steps      []string
	}{{"predecessor", 1, predecessorSteps}, {"successor", 2, successorSteps}} {
		for i, step := range side.steps {
			for j, kind := range []faultKind{kill, stop, slow, refuse, garbage} {
				if testing.Short() && (i != j || side.generation != 1+i%2) { // each kind, at some step
					continue
				}
				t.Run(fmt.Sprintf("%s/%s/%s", side.name, step, kind), func(t *testing.T) {
					t.Parallel()
					testFault(t, fault{side.generation, step, kind})
				})
			}
		}
	}
}

func testFault(t *testing.T, f fault) {
	config := appConfig{State: 100_000}
	if f.Kind == stop {
		config.Timeout = time.Duration(testutil.UnlessShort(3, 10)) * time.Second
	}
	s := newService(t, config)
	s.fault(f)
	first := s.up()
	load := s.client(2)

	answered := make(chan error, 1)
	go func() {
		_, err := s.upgrade()
		answered <- err
	}()
	struck := s.await(0, "the fault", func(e appEvent) bool { return e.What == "fault" })
	if f.Kind == stop {
		// A predecessor that was stopped goes on once its successor gave up, or
		// serves; a successor is not helped.
		if f.Generation == 1 {
			s.await(0, "the successor's end or readiness", func(e appEvent) bool {
				return e.PID != first.PID && (e.What == "end" || e.What == "ready")
			})
			// It told of the fault before it stopped.
			testutil.WaitFor(t, patience, func() bool { return stopped(struck.PID) }, "process %d to stop", struck.PID)
			if err := syscall.Kill(struck.PID, syscall.SIGCONT); err != nil {
				t.Error(err)
			}
		}
	}
	err := <-answered
	s.settle(first.PID)
	serving := s.one()

	// Who is to serve?
	switch {
	case f.Kind == slow:
		if err != nil || serving == first.PID {
			t.Errorf("upgrade failed, %d serves: %v", serving, err)
		}
	case f.Kind == kill && f.Generation == 1:
		if serving == first.PID || err == nil {
			t.Errorf("process %d serves: %v", serving, err)
		}
	case f.Generation == 2, f.Kind == refuse:
		if serving != first.PID || err == nil {
			t.Errorf("process %d serves, the first is %d: %v", serving, first.PID, err)
		}
	}
	t.Logf("result: %v", err)

	// The next upgrade does not depend on this one.
	if _, err := s.upgrade(); err != nil {
		t.Errorf("the next upgrade: %v", err)
	}
	if now := s.one(); now == serving {
		t.Errorf("process %d still serves after the next upgrade", now)
	}
	load.end()

	// What a process had accepted dies with it; each client has one at a time.
	// A predecessor that dies before it gave its sockets away leaves a gap.
	cut, refused := load.reset.Load()+load.other.Load(), load.refused.Load()
	dies := f.Kind == kill && (f.Generation == 1 || f.Step == "ping") || f.Kind == stop && f.Step == "ping"
	early := f.Kind == kill && f.Generation == 1 && (f.Step == "wait-hello" || f.Step == "sent-hello")
	if cut > 0 && (!dies || cut > 4 && !early) || refused > 0 && !early {
		t.Errorf("%d cut, %d refused of %d: %v", cut, refused, load.asked.Load(), load.errors[:min(10, len(load.errors))])
	}
}

// stopped says whether a signal has stopped the process (proc(5)).
func stopped(pid int) bool {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	return err == nil && strings.Contains(string(status), "\nState:\tT")
}

// settle waits until all processes but one have ended, or drain.
func (s *service) settle(first int) {
	s.t.Helper()
	testutil.WaitFor(s.t, patience, func() bool {
		s.mu.Lock()
		state := map[int]string{}
		for _, e := range s.events {
			if e.What != "fault" {
				state[e.PID] = e.What
			}
		}
		s.mu.Unlock()
		serving := 0
		for pid, what := range state {
			if !s.lives(pid) {
				continue
			}
			switch what {
			case "ready":
				serving++
			case "new", "measure":
				return false // it will be killed, or end
			}
		}
		return serving == 1
	}, "one process to be left")
}
