// SPDX-License-Identifier: Apache-2.0

package quicgo_test

import (
	"crypto/tls"
	"errors"
	"testing"

	"github.com/quic-go/quic-go"
)

// unanswered is the longest packet that quic-go does not answer with a
// stateless reset, which has to be shorter than its cause so that two endpoints
// do not go on for ever (RFC 9000, section 10.3.3).
const unanswered = 42

// expectReset has the client say something to a server that is gone. The first
// packet that can be answered has to bring the stateless reset: the client
// sends no other one before.
func expectReset(t *testing.T, c *client) {
	t.Helper()
	asked := 0
	c.wire.forget()
	c.wire.hold(func(datagram []byte) bool {
		if len(datagram) <= unanswered {
			return true
		}
		asked++
		return asked == 1
	})
	_, err := c.talk()
	if _, ok := errors.AsType[*quic.StatelessResetError](err); !ok {
		t.Errorf("the client of a dead server hears %v, want a stateless reset", err)
	}
	sent, received := c.wire.traffic()
	answerable := 0
	for _, p := range sent {
		if len(p) > unanswered {
			answerable++
		}
	}
	if answerable != 1 || len(received) != 1 {
		t.Errorf("after the death of the server the client sent %d packets that can be answered, and received %d", answerable, len(received))
	}
}

// servedAtOnce has a new client connect to the generation. Its first packet has
// to be answered: it sends no other one before.
func servedAtOnce(t *testing.T, s *site, generation uint32) {
	t.Helper()
	c := s.client()
	c.tls.CurvePreferences = []tls.CurveID{tls.X25519} // one Initial
	c.wire.hold(first(1))
	done := make(chan struct{})
	var (
		a   answer
		err error
	)
	go func() {
		defer close(done)
		a, err = c.visit()
	}()
	if err := c.wire.await(func() bool { return len(c.wire.received) > 0 }); err != nil {
		t.Errorf("the first packet of a new client gets no answer: %v", err)
	}
	if err := c.wire.release(); err != nil {
		t.Error(err)
	}
	within(t, done, "a new client to be served")
	if err != nil || a.generation != generation {
		t.Errorf("a new client is served by generation %d, %v; want %d", a.generation, err, generation)
	}
}

// The active generation is killed while its predecessor drains.
func TestKillActive(t *testing.T) {
	s := newSite(t)
	predecessor := s.startProcess(2)
	predecessor.activate()
	old, _ := s.visitor()
	active := s.startProcess(3)
	active.activate()
	clients := make([]*client, 20)
	for i := range clients {
		c, a := s.visitor()
		if a.generation != active.number {
			t.Fatalf("generation %d answers, want %d", a.generation, active.number)
		}
		clients[i] = c
	}

	active.Kill()
	servedAtOnce(t, s, predecessor.number)
	for _, c := range clients {
		expectReset(t, c)
	}
	servedAtOnce(t, s, predecessor.number)
	if a, err := old.talk(); err != nil || a.generation != predecessor.number {
		t.Errorf("client of the predecessor: generation %d, %v", a.generation, err)
	}
	// And the next upgrade works.
	next := s.startProcess(2)
	next.activate()
	servedAtOnce(t, s, next.number)
	if a, err := old.talk(); err != nil || a.generation != predecessor.number {
		t.Errorf("client of the predecessor after the next upgrade: generation %d, %v", a.generation, err)
	}
}

// The only generation is killed, and the server is started again.
func TestRestartFromNothing(t *testing.T) {
	s := newSite(t)
	killed := s.startProcess(3)
	killed.activate()
	clients := make([]*client, 20)
	for i := range clients {
		clients[i], _ = s.visitor()
	}
	killed.Kill()
	again := s.startProcess(2)
	if again.number <= killed.number {
		t.Errorf("generation %d follows on %d", again.number, killed.number)
	}
	again.activate()
	for _, c := range clients {
		expectReset(t, c)
	}
	servedAtOnce(t, s, again.number)
}
