// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"

	"instar/internal/testutil"
)

// group sends a signal to all processes of the service, which are in the process
// group of the first one.
func (s *service) group(first appEvent, sig syscall.Signal) {
	s.t.Helper()
	if !s.ownGroup {
		s.t.Fatal("they are in the group of the test")
	}
	if err := syscall.Kill(-first.PID, sig); err != nil {
		s.t.Fatal(err)
	}
}

// logged waits for a line of a generation's log with all of the words, the nth.
func (s *service) logged(generation, n int, words ...string) {
	s.t.Helper()
	testutil.WaitFor(s.t, patience, func() bool {
		found := 0
		for line := range strings.Lines(s.logs()) {
			fits := strings.Contains(line, fmt.Sprintf("generation=%d ", generation))
			for _, w := range words {
				fits = fits && strings.Contains(line, w)
			}
			if fits {
				found++
			}
		}
		return found >= n
	}, "generation %d to log %q", generation, words)
}

// generations are those of which a process came out of New, in their order.
func (s *service) generations() (all []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.events {
		if e.What == "new" {
			all = append(all, e.Generation)
		}
	}
	slices.Sort(all)
	return all
}

// upgraded waits until the generation is the only one that is active.
func (s *service) upgraded(generation int) appEvent {
	s.t.Helper()
	e := s.await(0, fmt.Sprintf("generation %d", generation), func(e appEvent) bool { return e.What == "ready" && e.Generation == generation })
	testutil.WaitFor(s.t, patience, func() bool {
		st, err := s.status()
		return err == nil && st.PID == e.PID && !st.Probation && !st.Upgrading
	}, "the end of the upgrade to generation %d", generation)
	return e
}

// Each signal of the default set starts an upgrade.
func TestSignals(t *testing.T) {
	s := newService(t, appConfig{})
	now := s.up()
	for n, sig := range []syscall.Signal{syscall.SIGUSR2, syscall.SIGHUP} {
		if err := syscall.Kill(now.PID, sig); err != nil {
			t.Fatal(err)
		}
		next := s.upgraded(n + 2)
		if pid := s.one(); pid != next.PID {
			t.Errorf("after %v: process %d serves, not %d", sig, pid, next.PID)
		}
		now = next
	}
}

// With no signals the application has all of them: SIGUSR2 starts nothing, and a
// SIGHUP that the application does not take ends the process.
func TestNoSignals(t *testing.T) {
	s := newService(t, appConfig{NoSignals: true})
	first := s.up()
	if err := syscall.Kill(first.PID, syscall.SIGUSR2); err != nil {
		t.Fatal(err)
	}
	s.await(0, "the signal", func(e appEvent) bool { return e.What == "signal" })
	if _, err := s.upgrade(); err != nil { // one that was started would be in the way
		t.Fatal(err)
	}
	second := s.upgraded(2)
	if all := s.generations(); !slices.Equal(all, []int{1, 2}) {
		t.Errorf("generations %v", all)
	}
	if err := syscall.Kill(second.PID, syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	testutil.WaitFor(t, patience, func() bool { return !s.lives(second.PID) }, "the end of %d", second.PID)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.events {
		if e.PID == second.PID && e.What == "end" {
			t.Errorf("it ended by itself: %+v", e)
		}
	}
}

// A signal to the whole process group, while a successor is in New or between New and
// Ready, neither kills it nor starts another one (E10).
func TestSignalToStartingSuccessor(t *testing.T) {
	for _, step := range []string{"hello", "manifest", "listening", "ready"} {
		t.Run(step, func(t *testing.T) {
			s := newService(t, appConfig{})
			s.ownGroup = true
			first := s.up()
			held := s.held(2, step)
			s.group(first, syscall.SIGHUP)
			s.awaitHeld(held)
			s.group(first, syscall.SIGHUP)
			s.logged(1, 1, "no upgrade; serving as before", ErrUpgrading.Error())
			if step == "listening" || step == "ready" {
				s.logged(2, 1, "signal ignored")
			}
			s.letGo(held)
			second := s.upgraded(2)
			s.logged(2, 1, "signal ignored")
			if pid := s.one(); pid != second.PID {
				t.Errorf("process %d serves, not %d", pid, second.PID)
			}
			// Another one would be in the way of this.
			if _, err := s.upgrade(); err != nil {
				t.Errorf("the next upgrade: %v", err)
			}
			if all := s.generations(); !slices.Equal(all, []int{1, 2, 3}) {
				t.Errorf("generations %v", all)
			}
		})
	}
}

// A signal to the process group is for the active process: one that drains and one
// that starts ignore it, and so there is one upgrade (E10).
func TestSignalToGroup(t *testing.T) {
	s := newService(t, appConfig{})
	s.ownGroup = true
	first := s.up()
	// A client keeps the first one.
	var conn net.Conn
	var err error
	s.ns.Run(func() { conn, err = net.Dial("tcp", s.addr) })
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	r := bufio.NewReader(conn)
	ask := func() string {
		t.Helper()
		if _, err := io.WriteString(conn, "who\n"); err != nil {
			t.Fatal(err)
		}
		line, err := r.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		return line
	}
	ask() // it is accepted
	if _, err := s.upgrade(); err != nil {
		t.Fatal(err)
	}
	s.upgraded(2)

	held := s.held(3, "hello")
	s.group(first, syscall.SIGHUP) // one that drains and one that is active
	s.awaitHeld(held)
	s.logged(1, 1, "signal ignored")
	s.group(first, syscall.SIGHUP) // and one that starts
	s.logged(1, 2, "signal ignored")
	s.logged(2, 1, "no upgrade; serving as before", ErrUpgrading.Error())
	s.letGo(held)
	third := s.upgraded(3)
	s.logged(3, 1, "signal ignored")
	if pid := s.one(); pid != third.PID {
		t.Errorf("process %d serves, not %d", pid, third.PID)
	}
	if line := ask(); line != fmt.Sprintf("1 %d last\n", first.PID) {
		t.Errorf("the first one's client got %q", line)
	}
	if _, err := s.upgrade(); err != nil {
		t.Errorf("the next upgrade: %v", err)
	}
	if all := s.generations(); !slices.Equal(all, []int{1, 2, 3, 4}) {
		t.Errorf("generations %v", all)
	}
}

// Of ten that request an upgrade at once one has it; the others learn that they can
// try again, and can.
func TestSimultaneousRequests(t *testing.T) {
	s := newService(t, appConfig{})
	s.up()
	held := s.held(2, "hello")
	results := make(chan error, 10)
	for range cap(results) {
		go func() {
			_, err := s.upgrade()
			results <- err
		}()
	}
	for range cap(results) - 1 { // while the one is held
		if err := receiveError(t, "a request", results); !errors.Is(err, ErrUpgrading) || !Retryable(err) {
			t.Errorf("request: %v", err)
		}
	}
	s.letGo(held)
	if err := receiveError(t, "the request", results); err != nil {
		t.Errorf("the one request: %v", err)
	}
	s.upgraded(2)
	if _, err := s.upgrade(); err != nil {
		t.Errorf("a later one: %v", err)
	}
	s.upgraded(3)
	if all := s.generations(); !slices.Equal(all, []int{1, 2, 3}) {
		t.Errorf("generations %v", all)
	}
}
