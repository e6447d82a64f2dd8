// SPDX-License-Identifier: Apache-2.0

package quicgo_test

import (
	"crypto/tls"
	"errors"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quic-go/quic-go"

	"instar/dispatch"
	"instar/internal/testutil"
)

// strict has the transports send a Retry to each client without a token.
func strict(_ int, t *quic.Transport) {
	t.VerifySourceAddress = func(net.Addr) bool { return true }
}

// retries counts the Retry packets that the client received.
func retries(c *client) (n int) {
	_, received := c.wire.traffic()
	for _, p := range received {
		if p[0]&0xf0 == 0xf0 {
			n++
		}
	}
	return n
}

// A client got a Retry just before the flip. Its Initial with the token goes to
// the generation that sent the Retry, and where that is gone, to the next one,
// which takes the token and does not send another Retry.
func TestRetryAcrossFlip(t *testing.T) {
	testutil.NeedRoot(t)
	for name, gone := range map[string]bool{"predecessor drains": false, "predecessor is gone": true} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			before := s.start(setup{transport: strict})
			after := s.start(setup{transport: strict})
			s.flip(before)
			want, other := before, after
			if gone {
				want, other = after, before
			}

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
			if err := c.wire.await(func() bool { return len(c.wire.received) > 0 && len(c.wire.held) > 0 }); err != nil {
				t.Fatal(err)
			}
			s.flip(after)
			if gone {
				s.stop(before)
			}
			if err := c.wire.release(); err != nil {
				t.Fatal(err)
			}
			within(t, done, "the handshake")
			if err != nil || a.generation != want.Number() {
				t.Errorf("generation %d answers, %v; want %d", a.generation, err, want.Number())
			}
			if n := retries(c); n != 1 {
				t.Errorf("the client got %d Retry packets, want 1", n)
			}
			if want.created.Load() != 1 || want.verified.Load() != 1 || other.created.Load() != 0 {
				t.Errorf("connections begun: %d, %d with a token; by the other generation %d", want.created.Load(), want.verified.Load(), other.created.Load())
			}
		})
	}
}

// tokenStore says when it got a token.
type tokenStore struct {
	quic.TokenStore
	put chan struct{}
}

func newTokenStore() *tokenStore {
	return &tokenStore{quic.NewLRUTokenStore(1, 4), make(chan struct{}, 16)}
}

func (s *tokenStore) Put(key string, token *quic.ClientToken) {
	s.TokenStore.Put(key, token)
	s.put <- struct{}{}
}

// sessionCache says when it got a ticket.
type sessionCache struct {
	tls.ClientSessionCache
	put chan struct{}
}

func newSessionCache() *sessionCache {
	return &sessionCache{tls.NewLRUClientSessionCache(1), make(chan struct{}, 16)}
}

func (c *sessionCache) Put(key string, state *tls.ClientSessionState) {
	c.ClientSessionCache.Put(key, state)
	if state != nil {
		c.put <- struct{}{}
	}
}

// next starts one more generation for each of three ways in which it follows on
// the one before, and calls visit with it: the first one, the next one with
// the predecessor draining, the next one with the predecessor gone, and one
// that was started from nothing.
func next(s *site, conf setup, visit func(how string, now *server)) {
	first := s.start(conf)
	s.flip(first)
	visit("first visit", first)
	second := s.start(conf)
	s.flip(second)
	visit("predecessor drains", second)
	third := s.start(conf)
	s.flip(third)
	s.stop(first)
	s.stop(second)
	visit("predecessor is gone", third)
	s.stop(third)
	fourth := s.start(conf)
	s.flip(fourth)
	visit("started from nothing", fourth)
}

// A token that a client got from one generation proves its address to every
// later one: no Retry.
func TestNewTokenAcrossGenerations(t *testing.T) {
	s := newSite(t)
	tokens := newTokenStore()
	next(s, setup{transport: strict}, func(how string, now *server) {
		c := s.client()
		c.quic.TokenStore = tokens
		a, err := c.visit()
		if err != nil || a.generation != now.Number() {
			t.Fatalf("%s: generation %d answers, %v; want %d", how, a.generation, err, now.Number())
		}
		// One for each Initial of the ClientHello, of which the client takes the first.
		if n := retries(c); (n > 0) != (how == "first visit") {
			t.Errorf("%s: the client got %d Retry packets", how, n)
		}
		if now.verified.Load() != 1 {
			t.Errorf("%s: the address is not verified", how)
		}
		select {
		case <-tokens.put:
		case <-time.After(patience):
			t.Fatalf("%s: the server gives no token", how)
		}
	})
}

// dialAgain connects and talks, with early in early data. It says whether that
// was rejected; the client then talks again, after the handshake.
func (c *client) dialAgain(early bool) (a answer, rejected bool, err error) {
	if err := c.dialEarly(early); err != nil {
		return a, false, err
	}
	a, err = c.talk()
	if !errors.Is(err, quic.Err0RTTRejected) {
		return a, false, err
	}
	if c.conn, err = c.conn.NextConnection(c.site.t.Context()); err != nil {
		return a, true, err
	}
	a, err = c.talk()
	return a, true, err
}

// A ticket of one generation resumes a session on every later one, with early
// data.
func TestTicketAcrossGenerations(t *testing.T) {
	s := newSite(t)
	sessions := newSessionCache()
	next(s, setup{}, func(how string, now *server) {
		c := s.client()
		c.tls.ClientSessionCache = sessions
		again := how != "first visit"
		a, rejected, err := c.dialAgain(again)
		if err != nil || rejected || a.generation != now.Number() {
			t.Fatalf("%s: generation %d answers, rejected = %t, %v; want %d", how, a.generation, rejected, err, now.Number())
		}
		if state := c.conn.ConnectionState(); state.TLS.DidResume != again || state.Used0RTT != again {
			t.Errorf("%s: resumed = %t, early data = %t, want %t", how, state.TLS.DidResume, state.Used0RTT, again)
		}
		select {
		case <-sessions.put:
		case <-time.After(patience):
			t.Fatalf("%s: the server gives no ticket", how)
		}
	})
}

// Early data is for the active generation alone. One that is not takes the
// handshake without it: a draining one that gets to the client's first packet
// only after the flip, and a staged one that gets it as the last resort.
func TestEarlyDataOnlyWhereActive(t *testing.T) {
	s := newSite(t)
	sessions := newSessionCache()
	const accepted, refused, none = "accepted", "refused", "not tried"
	visit := func(how string, now *server, want string) {
		t.Helper()
		c := s.client()
		c.tls.ClientSessionCache = sessions
		before := now.heard.Load()
		a, rejected, err := c.dialAgain(want != none)
		if err != nil || a.generation != now.Number() {
			t.Fatalf("%s: generation %d answers, %v; want %d", how, a.generation, err, now.Number())
		}
		state := c.conn.ConnectionState()
		early := none
		switch {
		case rejected:
			early = refused
		case state.Used0RTT:
			early = accepted
		}
		if !state.TLS.DidResume || early != want {
			t.Errorf("%s: resumed = %t, early data %s, want %s", how, state.TLS.DidResume, early, want)
		}
		if n := now.heard.Load() - before; n != 1 {
			t.Errorf("%s: the server heard %d requests, want 1", how, n)
		}
		<-sessions.put
	}

	// The server gets to the packet when we let it.
	var gate atomic.Pointer[func()]
	slow := &quic.Config{GetConfigForClient: func(*quic.ClientInfo) (*quic.Config, error) {
		if f := gate.Load(); f != nil {
			(*f)()
		}
		return nil, nil
	}, Allow0RTT: true, HandshakeIdleTimeout: patience}
	one := s.start(setup{quic: slow})
	s.flip(one)
	c := s.client()
	c.tls.ClientSessionCache = sessions
	if _, err := c.visit(); err != nil {
		t.Fatal(err)
	}
	<-sessions.put
	visit("active", one, accepted)

	two := s.start(setup{})
	flip := func() {
		if two.State() == dispatch.StateStaged {
			s.flip(two)
		}
	}
	gate.Store(&flip)
	visit("draining", one, refused)
	gate.Store(nil)
	// The ticket of a generation that takes no early data is good for none.
	visit("the next one", two, none)
	visit("the next one again", two, accepted)

	three := s.start(setup{})
	s.stop(one)
	s.stop(two)
	if state := three.State(); state != dispatch.StateStaged {
		t.Fatalf("the third generation is %v", state)
	}
	visit("staged", three, refused)
	s.flip(three)
	visit("active after all", three, none)
	visit("active again", three, accepted)
}

// The certificate is that of the moment of each handshake, on every generation.
func TestCertificateOfTheMoment(t *testing.T) {
	s := newSite(t)
	var served atomic.Pointer[tls.Certificate]
	conf := setup{tls: &tls.Config{
		NextProtos:     []string{protocol},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return served.Load(), nil },
	}}
	serve := func(name string) {
		c := newCertificate(name)
		served.Store(&c)
	}
	serve("first")
	next(s, conf, func(how string, now *server) {
		for _, name := range []string{how, "renewed"} {
			serve(name)
			c, _ := s.visitor()
			if got := c.conn.ConnectionState().TLS.PeerCertificates[0].DNSNames; !slices.Equal(got, []string{name}) {
				t.Errorf("%s: generation %d serves the certificate of %v, want %q", how, now.Number(), got, name)
			}
		}
	})
}
