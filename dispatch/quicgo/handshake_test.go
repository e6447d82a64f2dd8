// SPDX-License-Identifier: Apache-2.0

package quicgo_test

import (
	"crypto/tls"
	"errors"
	"fmt"
	"testing"

	"instar/dispatch"
	"instar/dispatch/connid"
	"instar/internal/testutil"
)

// interrupted is a handshake with a flip in its middle.
type interrupted struct {
	// curve decides the size of the ClientHello.
	curve tls.CurveID
	// initials is the number of Initial packets that the ClientHello takes. The
	// first of them reaches the server before the flip.
	initials int
	// repeated says that what was sent before the flip is sent again after it.
	repeated bool
}

var (
	// A key share of X25519 fits into one Initial with the rest.
	repeatedInitial = interrupted{curve: tls.X25519, initials: 1, repeated: true}
	// That of X25519MLKEM768 has 1,216 bytes.
	twoInitials = interrupted{curve: tls.X25519MLKEM768, initials: 2}
)

// run has n clients begin a handshake, calls flip once the first packet of each
// was received, and lets them go on. It returns who answered. A handshake is
// named by the client's first connection ID.
func (h interrupted) run(s *site, n int, received func(handshakes []string) bool, flip func()) (handshakes []string, answers []answer) {
	s.t.Helper()
	type result struct {
		answer answer
		err    error
	}
	results := make(chan result)
	clients := make([]*client, n)
	for i := range clients {
		c, err := s.newClient()
		if err != nil {
			s.t.Fatal(err)
		}
		clients[i] = c
		c.tls.CurvePreferences = []tls.CurveID{h.curve}
		c.wire.hold(first(1))
		c.wire.listenNoMore()
		go func() {
			a, err := c.visit()
			results <- result{a, errors.Join(err, c.close())}
		}()
	}
	for i, c := range clients {
		if err := c.wire.await(func() bool { return len(c.wire.sent) == 1 && len(c.wire.held) >= h.initials-1 }); err != nil {
			s.t.Errorf("client %d: %v", i, err)
		}
		id, err := h.name(c.wire)
		if err != nil {
			s.t.Errorf("client %d: %v", i, err)
		}
		handshakes = append(handshakes, id)
	}
	testutil.WaitFor(s.t, patience, func() bool { return received(handshakes) }, "%d first packets to be received", n)
	flip()
	for i, c := range clients {
		if h.repeated {
			if err := c.wire.repeat(); err != nil {
				s.t.Errorf("client %d: %v", i, err)
			}
		}
		if err := c.wire.release(); err != nil {
			s.t.Errorf("client %d: %v", i, err)
		}
	}
	for range clients {
		r := <-results
		if r.err != nil {
			s.t.Error(r.err)
		}
		answers = append(answers, r.answer)
	}
	return handshakes, answers
}

// name returns the name of a handshake whose first flight has as many Initials
// as it is to have. The client hears nothing, so it knows no ID of the server.
func (h interrupted) name(w *wire) (dcid string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	flight := append([]packet(nil), w.sent...)
	flight = append(flight, w.held[:h.initials-1]...)
	for i, p := range flight {
		header, err := connid.ParseHeader(p.data)
		if err != nil || !header.Long || header.Version != 1 || p.data[0]&0x30 != 0 {
			return "", fmt.Errorf("packet %d of the first flight is no Initial: %x", i, p.data[:16])
		}
		if i > 0 && string(header.DCID) != dcid {
			return "", fmt.Errorf("packet %d of the first flight has another connection ID", i)
		}
		dcid = string(header.DCID)
	}
	return dcid, nil
}

// A handshake stays in the process that got its first packet. Of 1,000 whose
// Initial comes again after a flip none is split, and no packet makes a second
// connection anywhere.
func TestRepeatedInitialAcrossFlip(t *testing.T) { repeatedInitial.thousand(t) }

// The same of 1,000 whose ClientHello takes two Initials, with a flip in
// between.
func TestTwoInitialsAcrossFlip(t *testing.T) { twoInitials.thousand(t) }

func (h interrupted) thousand(t *testing.T) {
	total, batch := testutil.UnlessShort(1000, 60), testutil.UnlessShort(50, 15)
	s := newSite(t)
	servers := []*server{s.start(setup{workers: 4}), s.start(setup{workers: 4})}
	s.flip(servers[0])
	before := s.snapshot()
	split := 0
	for i := range total / batch {
		owner, next := servers[i%2], servers[(i+1)%2]
		handshakes, answers := h.run(s, batch, func(ids []string) bool { return owner.has(ids) == batch }, func() {
			// The two ways in which a flip happens.
			if i%4 < 2 {
				s.flip(next)
			} else if number, err := owner.Group().Rollback(); err != nil || number != next.Number() {
				t.Fatalf("Rollback = %d, %v; want %d", number, err, next.Number())
			}
		})
		split += next.has(handshakes)
		for _, a := range answers {
			if a.generation != owner.Number() {
				t.Errorf("generation %d answers, want %d", a.generation, owner.Number())
			}
		}
	}
	t.Logf("%d handshakes, %d flips, %d split", total, total/batch, split)
	if split != 0 {
		t.Errorf("%d of %d handshakes were split", split, total)
	}
	verdicts := s.verdictsSince(before)
	if verdicts["new"] != uint64(total) || verdicts["known"] < uint64(total) {
		t.Errorf("%d handshakes were new to the data plane and %d packets known, want %d and at least as many", verdicts["new"], verdicts["known"], total)
	}
	s.only(verdicts, "new", "known", "owner")
}

// The same between two processes.
func TestHandshakeAcrossFlipOfProcesses(t *testing.T) {
	testutil.NeedRoot(t)
	for name, h := range map[string]interrupted{"repeated Initial": repeatedInitial, "two Initials": twoInitials} {
		t.Run(name, func(t *testing.T) {
			total, batch := testutil.UnlessShort(100, 12), testutil.UnlessShort(25, 6)
			s := newSite(t)
			servers := []*process{s.startProcess(2), s.startProcess(2)}
			servers[0].activate()
			for i := range total / batch {
				owner, next := servers[i%2], servers[(i+1)%2]
				handshakes, answers := h.run(s, batch, func(ids []string) bool { return owner.has(t, ids) == batch }, next.activate)
				for _, a := range answers {
					if a.generation != owner.number {
						t.Errorf("generation %d answers, want %d", a.generation, owner.number)
					}
				}
				if n := next.has(t, handshakes); n != 0 {
					t.Errorf("%d of %d handshakes were split", n, batch)
				}
			}
		})
	}
}

// These tests can fail: in a group that gives each packet to the active
// generation, the second half of a handshake begins another one there.
func TestHandshakeSplitIsSeen(t *testing.T) {
	testutil.NeedRoot(t)
	for name, h := range map[string]interrupted{"repeated Initial": repeatedInitial, "two Initials": twoInitials} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			conf := setup{options: s.options(), workers: 1}
			conf.options.Steering = dispatch.SteeringStateless
			owner, next := s.start(conf), s.start(conf)
			s.flip(owner)
			c := s.client()
			c.tls.CurvePreferences = []tls.CurveID{h.curve}
			c.wire.hold(first(1))
			c.wire.listenNoMore()
			dialled := make(chan struct{})
			go func() {
				defer close(dialled)
				_ = c.dial() // it is closed, or gets through by accident
			}()
			testutil.WaitFor(t, patience, func() bool { return owner.created.Load() > 0 }, "the first Initial")
			s.flip(next)
			if h.repeated {
				if err := c.wire.repeat(); err != nil {
					t.Error(err)
				}
			}
			if err := c.wire.release(); err != nil {
				t.Error(err)
			}
			testutil.WaitFor(t, patience, func() bool { return next.created.Load() > 0 }, "a second connection")
			if err := c.transport.Close(); err != nil {
				t.Error(err)
			}
			within(t, dialled, "the end of the attempt")
		})
	}
}
