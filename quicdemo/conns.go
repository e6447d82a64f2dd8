// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
)

// connSet is the set of a server's connections.
type connSet struct {
	handler http.Handler
	wg      sync.WaitGroup
	// alive counts connections from their first packet on, accepted or not.
	alive atomic.Int64

	mu   sync.Mutex
	open map[*conn]struct{} // accepted and not closed
	told int                // how many of open were told to go
	pto  time.Duration      // the longest probe timeout of the connections that we closed
}

// conn is one accepted connection.
type conn struct {
	quic    *quic.Conn
	http    *http3.Server
	serving chan struct{} // closed once http serves it
	since   time.Time
	began   atomic.Bool   // had a request
	next    chan struct{} // receives when a request begins, if somebody waits for it

	// Guarded by connSet.mu.
	told     bool      // chosen to get GOAWAY
	requests int       // under way
	quiet    time.Time // when it got GOAWAY or its last request ended, whichever was later
}

const (
	// shy is how long a connection may wait with its first request before it is
	// told to go.
	shy = time.Second
	// heed is the time that a client has to act on GOAWAY before its idle
	// connection is closed: a request may be on its way. It has the same time
	// after the last response: a handler returns before its data arrived, and
	// what the client did not read by the close is lost to it.
	heed = time.Second
)

// settled says whether the connection can be told to go. One that has just
// come is about to send its first request, and would have to send it again.
func (c *conn) settled() bool { return c.began.Load() || time.Since(c.since) > shy }

// idle says whether closing the connection cuts nothing off. Its caller holds
// connSet.mu.
func (c *conn) idle() bool {
	return c.requests == 0 && !c.quiet.IsZero() && time.Since(c.quiet) > heed
}

// request counts a request until the function that it returns is called.
func (s *connSet) request(c *conn) (done func()) {
	c.began.Store(true)
	s.mu.Lock()
	c.requests++
	s.mu.Unlock()
	select {
	case c.next <- struct{}{}:
	default:
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		c.requests--
		if !c.quiet.IsZero() {
			c.quiet = time.Now()
		}
	}
}

type connKey struct{}

// connOf returns the connection of a request.
func connOf(ctx context.Context) *conn {
	c, _ := ctx.Value(connKey{}).(*conn)
	return c
}

// track is a quic.Transport's ConnContext. It counts connections from their
// first packet until they are gone, so handshakes under way count too.
func (s *connSet) track(ctx context.Context, _ *quic.ClientInfo) (context.Context, error) {
	s.alive.Add(1)
	context.AfterFunc(ctx, func() { s.alive.Add(-1) })
	return ctx, nil
}

func (s *connSet) live() int { return int(s.alive.Load()) }

// serve serves an accepted connection in the background until it is closed.
func (s *connSet) serve(q *quic.Conn) {
	c := &conn{quic: q, serving: make(chan struct{}), since: time.Now(), next: make(chan struct{})}
	c.http = &http3.Server{
		Handler: s.handler,
		ConnContext: func(ctx context.Context, _ *quic.Conn) context.Context {
			close(c.serving)
			return context.WithValue(ctx, connKey{}, c)
		},
	}
	s.mu.Lock()
	if s.open == nil {
		s.open = make(map[*conn]struct{})
	}
	s.open[c] = struct{}{}
	s.mu.Unlock()

	s.wg.Go(func() {
		_ = c.http.ServeQUICConn(q) // how the client left
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.open, c)
		if c.told {
			s.told--
		}
	})
}

// size returns how many connections are open and how many of them were not
// told to go.
func (s *connSet) size() (open, untold int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.open), len(s.open) - s.told
}

// goaway sends GOAWAY on up to n connections that did not get it yet. It waits
// for a connection's next request, but no longer than patience: a client that
// has just opened a request is not about to open another, which the GOAWAY
// would cross and make it send again. Browsers give some of those up.
func (s *connSet) goaway(n int, patience time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.open {
		if n <= 0 {
			return
		}
		if c.told || !c.settled() {
			continue
		}
		n--
		c.told = true
		s.told++
		s.wg.Go(func() {
			// Shutdown of a server that serves nothing yet closes it for good,
			// and with it the connection that comes next.
			select {
			case <-c.serving:
			case <-c.quic.Context().Done():
				return
			}
			timer := time.NewTimer(patience)
			defer timer.Stop()
			select {
			case <-c.next:
			case <-timer.C:
			case <-c.quic.Context().Done():
				return
			}
			s.mu.Lock()
			c.quiet = time.Now()
			s.mu.Unlock()
			_ = c.http.Shutdown(context.Background()) // returns when the connection ends
		})
	}
}

// close closes up to n connections with H3_NO_ERROR: idle ones that were told
// to go, and when that is not enough and busy is true, any.
func (s *connSet) close(n int, busy bool) {
	s.mu.Lock()
	var chosen, others []*conn
	for c := range s.open {
		switch {
		case len(chosen) == n:
		case c.idle():
			chosen = append(chosen, c)
		case busy:
			others = append(others, c)
		}
	}
	chosen = append(chosen, others[:min(len(others), n-len(chosen))]...)
	for _, c := range chosen {
		s.pto = max(s.pto, probeTimeout(c.quic.ConnectionStats()))
	}
	s.mu.Unlock()
	for _, c := range chosen {
		_ = c.quic.CloseWithError(quic.ApplicationErrorCode(http3.ErrCodeNoError), "server is leaving")
	}
}

// settle is how long the transports have to stay after connections were closed
// by us: three probe timeouts, RFC 9000 section 10.2, so that a client whose
// CONNECTION_CLOSE was lost gets it again. Zero when we closed none.
func (s *connSet) settle() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return min(3*s.pto, 3*time.Second)
}

// probeTimeout is the PTO of RFC 9002 section 6.2.1 with the default of 25 ms
// for the peer's longest delay of an acknowledgement.
func probeTimeout(stats quic.ConnectionStats) time.Duration {
	return stats.SmoothedRTT + max(4*stats.MeanDeviation, time.Millisecond) + 25*time.Millisecond
}
