// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/quic-go/quic-go"

	"instar/internal/content"
	"instar/internal/testutil"
)

// smallLoad is a load that a test can afford and that does a bit of everything.
func smallLoad(addr string) LoadConfig {
	cfg := LoadConfig{
		Addr:                addr,
		Connections:         10,
		RequestsPerSecond:   10,
		NewPerSecond:        30,
		MigrationsPerSecond: 10,
		RebindsPerSecond:    10,
		LargePart:           0.05,
		LargeBytes:          1 << 20,
		Seed:                1,
		// What a starved machine makes of the time is not the test's business.
		HandshakeTimeout: time.Minute,
		RequestTimeout:   time.Minute,
	}
	if underRace {
		// A handshake costs ten times as much.
		cfg.Resume, cfg.RequestsPerSecond, cfg.NewPerSecond = -1, 4, 5
		cfg.MigrationsPerSecond, cfg.RebindsPerSecond = 4, 4
	}
	return cfg
}

func TestLoad(t *testing.T) {
	s, ready := startServer(t, ServerConfig{})
	var sampled, open, handshakes int
	cfg := smallLoad(ready.Addr)
	cfg.Duration = patience
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cfg.Sample = func(s Sample) {
		sampled += s.Requests[1]
		handshakes += s.Handshakes
		open = max(open, s.Open)
		if sampled > 150 && handshakes > 30 {
			cancel()
		}
	}
	r, err := Load(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", r)
	if r.Lost() != 0 || len(r.Errors) != 0 || r.Moved != 0 || r.Retried != 0 {
		t.Error("something was lost or moved")
	}
	if r.Migrations == 0 || r.Rebinds == 0 || r.ZeroRTT.Accepted == 0 && !underRace || r.Resumed < r.ZeroRTT.Accepted || r.Bytes == 0 || r.Request.P50 == 0 || r.Handshake.Max == 0 {
		t.Error("something was not done")
	}
	if int64(sampled) != r.Requests || r.Generations[1] != r.Requests || int64(handshakes) != r.Connections || open != 10 {
		t.Errorf("samples: %d requests, %d handshakes, %d open", sampled, handshakes, open)
	}
	testutil.WaitFor(t, patience, func() bool { return s.conns.live() == 0 }, "the server to see every connection end")
}

// The client moves, and the server sees it.
func TestMoves(t *testing.T) {
	_, ready := startServer(t, ServerConfig{})
	l := newTestLoader(t, ready.Addr)
	c := dialTest(t, l, false)
	seen := map[string]bool{c.status(t).Remote: true}
	for _, move := range []struct {
		name string
		do   func(*client)
	}{
		{"migration", l.migrate}, {"rebind", l.rebind}, {"migration", l.migrate}, {"migration", l.migrate}, {"rebind", l.rebind},
	} {
		q := request{seed: 1}
		q.move(move.do)
		if _, err := c.get(q); err != nil {
			t.Errorf("download during a %s: %v", move.name, err)
		}
		remote := c.status(t).Remote
		if seen[remote] {
			t.Errorf("after a %s the server still sees %s", move.name, remote)
		}
		seen[remote] = true
	}
	r := l.rec.finish(time.Second)
	if r.Migrations != 3 || r.Rebinds != 2 || r.Lost() != 0 {
		t.Errorf("\n%s", r)
	}
}

func skipUnderRace(t testing.TB) {
	t.Helper()
	if underRace {
		t.Skip("quic-go has a race in early data")
	}
}

func TestZeroRTT(t *testing.T) {
	skipUnderRace(t)
	_, ready := startServer(t, ServerConfig{})
	l := newTestLoader(t, ready.Addr)
	for range 5 {
		if c := l.do(nil, request{bytes: 1000, seed: 1, resume: true}, false); c != nil {
			c.close()
		}
	}
	r := l.rec.finish(time.Second)
	if r.Requests != 5 || r.Lost() != 0 || r.Resumed != 4 || r.ZeroRTT != (ZeroRTT{4, 4}) {
		t.Errorf("4 of 5 connections resume with early data:\n%s", r)
	}
}

// A server that cannot read the ticket rejects the early data; the request is
// sent again on another connection and nothing is lost.
func TestZeroRTTRejected(t *testing.T) {
	skipUnderRace(t)
	_, first := startServer(t, ServerConfig{})
	_, second := startServer(t, ServerConfig{})
	l := newTestLoader(t, first.Addr)
	for range 2 {
		l.do(nil, request{bytes: 1000, seed: 1, resume: true}, false).close()
	}
	l.addr.Port = int(addrPort(t, second.Addr))
	if c := l.do(nil, request{bytes: 1000, seed: 1, resume: true}, false); c != nil {
		c.close()
	}
	r := l.rec.finish(time.Second)
	if r.Requests != 3 || r.Lost() != 0 || r.Connections != 4 || r.Resumed != 1 || r.ZeroRTT != (ZeroRTT{2, 1}) {
		t.Errorf("\n%s%+v", r, r.ZeroRTT)
	}
}

func addrPort(t testing.TB, addr string) uint16 {
	t.Helper()
	a, err := net.ResolveUDPAddr("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	return a.AddrPort().Port()
}

// corrupter flips a bit of every tenth write of a body.
type corrupter struct {
	http.ResponseWriter
	writes *atomic.Int64
}

func (c corrupter) Write(b []byte) (int, error) {
	if len(b) > 0 && c.writes.Add(1)%10 == 0 {
		b = bytes.Clone(b)
		b[len(b)/2] ^= 1
	}
	return c.ResponseWriter.Write(b)
}

func (c corrupter) Flush() { c.ResponseWriter.(http.Flusher).Flush() }

func TestLoadSeesBadAnswers(t *testing.T) {
	var writes atomic.Int64
	for _, tc := range []struct {
		kind string
		bad  func(http.ResponseWriter, *http.Request, http.Handler)
	}{
		{"request: corrupt_body", func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			next.ServeHTTP(corrupter{w, &writes}, r)
		}},
		{"request: http_status", func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
			http.Error(w, "no", http.StatusServiceUnavailable)
		}},
		{"request: short_body", func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
			w.WriteHeader(http.StatusOK)
		}},
		{"request: stream_reset", func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
			panic(http.ErrAbortHandler)
		}},
	} {
		t.Run(tc.kind, func(t *testing.T) {
			_, ready := startServer(t, ServerConfig{wrap: func(next http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { tc.bad(w, r, next) })
			}})
			cfg := smallLoad(ready.Addr)
			cfg.NewPerSecond, cfg.MigrationsPerSecond, cfg.RebindsPerSecond = -1, -1, -1
			cfg.Duration = 500 * time.Millisecond
			r, err := Load(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			if r.FailedRequests == 0 || r.Errors[tc.kind] != r.FailedRequests || r.Lost() != r.FailedRequests || len(r.Examples) == 0 {
				t.Errorf("\n%s", r)
			}
		})
	}
}

// A restart without a handover is seen as what it is.
func TestLoadSeesRestart(t *testing.T) {
	first, ready := startServer(t, ServerConfig{Addr: fixedPort(t)})
	cfg := smallLoad(ready.Addr)
	cfg.IdleTimeout = time.Second
	cfg.HandshakeTimeout = time.Second
	served, failed, again := make(chan struct{}), make(chan struct{}), make(chan struct{})
	var failures int
	once := func(c chan struct{}, cond bool) {
		select {
		case <-c:
		default:
			if cond {
				close(c)
			}
		}
	}
	cfg.Sample = func(s Sample) {
		failures += s.Failures
		once(served, s.Open == cfg.Connections && s.Requests[1] > 0)
		once(failed, failures > 0)
		once(again, s.Requests[2] > 0)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	result := make(chan *Result, 1)
	go func() {
		r, _ := Load(ctx, cfg)
		result <- r
	}()
	await(t, served)
	// It dies without a word.
	for _, c := range first.sockets.(*bareSockets).conns {
		c.Close()
	}
	await(t, failed)
	first.cancel()
	if err := <-first.ended; err == nil {
		t.Error("the server did not notice that it lost its socket")
	}
	first.ended <- nil
	startServer(t, ServerConfig{Addr: ready.Addr, Generation: 2})
	await(t, again)
	cancel()
	r := <-result
	t.Logf("\n%s", r)
	if r.BrokenConnections == 0 || r.FailedRequests == 0 || r.FailedHandshakes == 0 || r.Moved != 0 ||
		r.Errors["connection: idle_timeout"] != r.BrokenConnections || r.Errors["handshake: handshake_timeout"] != r.FailedHandshakes {
		t.Error("losses are not as expected")
	}
}

// fixedPort is an address whose port no client gets by chance while the server is
// away: it lies below the ephemeral ones.
func fixedPort(t testing.TB) string {
	t.Helper()
	for {
		addr := &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 10_000 + rand.IntN(20_000)}
		if c, err := net.ListenUDP("udp", addr); err == nil {
			if err := c.Close(); err != nil {
				t.Fatal(err)
			}
			return addr.String()
		}
	}
}

func await(t testing.TB, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(patience):
		t.Fatal("waited in vain")
	}
}

// A server that leaves in good order, and one that takes its place at once, is
// no loss for persistent connections.
func TestLoadCountsMoves(t *testing.T) {
	first, ready := startServer(t, ServerConfig{Mode: ModeReusePort, Workers: 1, HandshakeGrace: -1})
	cfg := smallLoad(ready.Addr)
	cfg.NewPerSecond, cfg.MigrationsPerSecond, cfg.RebindsPerSecond = -1, -1, -1
	var moves, open atomic.Int64
	cfg.Sample = func(s Sample) {
		open.Store(int64(s.Open))
		moves.Add(int64(s.Moved))
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	result := make(chan *Result, 1)
	go func() {
		r, _ := Load(ctx, cfg)
		result <- r
	}()
	testutil.WaitFor(t, patience, func() bool { return open.Load() == int64(cfg.Connections) }, "every connection to open")
	testutil.WaitFor(t, patience, func() bool {
		first.conns.goaway(1, 0)
		return moves.Load() >= int64(cfg.Connections)
	}, "every connection to move")
	cancel()
	r := <-result
	if r.Lost() != 0 || r.Moved < int64(cfg.Connections) {
		t.Errorf("\n%s", r)
	}
}

func TestLoadConfiguration(t *testing.T) {
	for _, cfg := range []LoadConfig{
		{}, {Addr: "x"}, {Addr: "127.0.0.1:0"},
		{Addr: "127.0.0.1:1", MinBytes: 10, MaxBytes: 5},
		{Addr: "127.0.0.1:1", MaxBytes: content.Max + 1},
		{Addr: "127.0.0.1:1", RequestsPerSecond: -1},
		{Addr: "127.0.0.1:1", IdleTimeout: -1},
	} {
		if _, err := Load(t.Context(), cfg); err == nil {
			t.Errorf("Load took %+v", cfg)
		}
	}
}

// The client checks the certificate when it is told which one to trust.
func TestLoadCertificate(t *testing.T) {
	file := t.TempDir() + "/cert.pem"
	_, ready := startServer(t, ServerConfig{CertFile: file})
	cert, err := readCertificate(file)
	if err != nil {
		t.Fatal(err)
	}
	if ready.SPKI != SPKIHash(cert) || len(ready.SPKI) != 44 {
		t.Errorf("SPKI %q, want %q", ready.SPKI, SPKIHash(cert))
	}
	other, err := NewCertificate(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name  string
		roots tls.Certificate
		want  string
	}{{"localhost", cert, ""}, {"127.0.0.1", cert, ""}, {"::1", cert, ""}, {"example.org", cert, "tls"}, {"localhost", other, "tls"}} {
		l, err := newLoader(LoadConfig{Addr: ready.Addr, ServerName: tc.name, RootCAs: rootsOf(tc.roots)})
		if err != nil {
			t.Fatal(err)
		}
		l.work = t.Context()
		c, err := l.dial(false)
		if err == nil {
			c.close()
		}
		if (err != nil) != (tc.want != "") || err != nil && classify(err) != tc.want {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
}

func TestClassify(t *testing.T) {
	for want, err := range map[string]error{
		"corrupt_body":        content.ErrCorrupt,
		"http_status":         errStatus(500),
		"stateless_reset":     &quic.StatelessResetError{},
		"handshake_timeout":   &quic.HandshakeTimeoutError{},
		"idle_timeout":        &quic.IdleTimeoutError{},
		"version_negotiation": &quic.VersionNegotiationError{},
		"connection_refused":  &quic.TransportError{ErrorCode: quic.ConnectionRefused},
		"tls":                 &quic.TransportError{ErrorCode: 0x100 + 42},
		"transport_error":     &quic.TransportError{ErrorCode: quic.ProtocolViolation},
		"application_close":   &quic.ApplicationError{},
		"stream_reset":        &quic.StreamError{},
		"timeout":             errTimeout,
		"early_data_rejected": quic.Err0RTTRejected,
		"short_body":          io.ErrUnexpectedEOF,
		"socket":              &net.OpError{Op: "write", Err: errnoPerm},
		"other":               errors.New("something else"),
	} {
		if got := classify(err); got != want {
			t.Errorf("classify(%v) = %s, want %s", err, got, want)
		}
	}
}
