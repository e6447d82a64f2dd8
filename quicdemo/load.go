// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"instar/internal/content"
)

// LoadConfig configures Load. Only Addr has to be set; of the numbers, zero
// stands for the default and a negative value for none.
type LoadConfig struct {
	// Addr is the server's "IP:port".
	Addr string
	// ServerName is the name that the certificate has to be valid for.
	// Default "localhost".
	ServerName string
	// RootCAs are trusted. Default: any certificate is accepted.
	RootCAs *x509.CertPool

	// Connections is the number of persistent connections. They open at 200 a
	// second. Default 200.
	Connections int
	// RequestsPerSecond is the rate of downloads on each persistent connection.
	// Default 1.
	RequestsPerSecond float64
	// MinBytes and MaxBytes bound the downloads; sizes spread evenly over the
	// orders of magnitude. Defaults 1 kB and 256 kB.
	MinBytes, MaxBytes int64
	// LargePart is the part of the downloads that is LargeBytes long instead.
	// Defaults 0.002 and 4 MB.
	LargePart  float64
	LargeBytes int64
	// NewPerSecond is the rate of new connections; each makes one request and
	// closes. Default 50.
	NewPerSecond float64
	// Resume is the part of the new connections that resumes a TLS session and
	// sends its request as early data. Default 0.5.
	Resume float64
	// MigrationsPerSecond and RebindsPerSecond are the rates, over all
	// persistent connections, of downloads in whose middle the client moves to
	// another port: with path validation first, and without a word, as when a
	// NAT forgets its mapping. Default 5 each.
	MigrationsPerSecond, RebindsPerSecond float64

	// Duration ends the run. Default: it ends with the context.
	Duration time.Duration
	// HandshakeTimeout fails a handshake. Default 10 s.
	HandshakeTimeout time.Duration
	// IdleTimeout fails a connection on which nothing arrives. Default 10 s.
	IdleTimeout time.Duration
	// RequestTimeout fails a request. Default 20 s.
	RequestTimeout time.Duration
	// Seed makes everything random repeatable. Default: a random seed.
	Seed uint64

	// Sample is called every 100 ms, one call at a time.
	Sample func(Sample)

	listen func(network string, laddr *net.UDPAddr) (*net.UDPConn, error) // for tests, default net.ListenUDP
}

const (
	sampleEvery = 100 * time.Millisecond
	// rampRate is how many persistent connections open in a second.
	rampRate = 200
	// probeTime is how long a new path may take to answer.
	probeTime = 5 * time.Second
	// moveBytes and moveTime are the shape of a download that moves: long
	// enough that the move is in its middle.
	moveBytes = 64 << 10
	moveTime  = 400 * time.Millisecond
	// maxTries is how often a request is sent that the server does not process.
	maxTries = 5
)

var errTimeout = errors.New("no answer in time")

// pick returns the default for zero and zero for negative values.
func pick[T int | int64 | float64 | time.Duration](value *T, fallback T) {
	switch {
	case *value == 0:
		*value = fallback
	case *value < 0:
		*value = 0
	}
}

func (cfg *LoadConfig) complete() (*net.UDPAddr, error) {
	addr, err := net.ResolveUDPAddr("udp", cfg.Addr)
	if err != nil {
		return nil, fmt.Errorf("check configuration: %w", err)
	}
	if addr.Port == 0 {
		return nil, fmt.Errorf("check configuration: address %q has no port", cfg.Addr)
	}
	if addr.IP == nil {
		addr.IP = net.IPv4(127, 0, 0, 1)
	}
	if cfg.ServerName == "" {
		cfg.ServerName = "localhost"
	}
	pick(&cfg.Connections, 200)
	pick(&cfg.RequestsPerSecond, 1)
	pick(&cfg.MinBytes, 1<<10)
	pick(&cfg.MaxBytes, 256<<10)
	pick(&cfg.LargePart, 0.002)
	pick(&cfg.LargeBytes, 4<<20)
	pick(&cfg.NewPerSecond, 50)
	pick(&cfg.Resume, 0.5)
	pick(&cfg.MigrationsPerSecond, 5)
	pick(&cfg.RebindsPerSecond, 5)
	pick(&cfg.HandshakeTimeout, 10*time.Second)
	pick(&cfg.IdleTimeout, 10*time.Second)
	pick(&cfg.RequestTimeout, 20*time.Second)
	if cfg.MinBytes < 1 || cfg.MaxBytes < cfg.MinBytes || max(cfg.MaxBytes, cfg.LargeBytes) > content.Max {
		return nil, fmt.Errorf("check configuration: downloads of %d to %d and %d bytes; use 1 to %d, in order",
			cfg.MinBytes, cfg.MaxBytes, cfg.LargeBytes, content.Max)
	}
	if cfg.Connections > 0 && cfg.RequestsPerSecond == 0 {
		return nil, errors.New("check configuration: persistent connections without requests")
	}
	if cfg.HandshakeTimeout == 0 || cfg.IdleTimeout == 0 || cfg.RequestTimeout == 0 {
		return nil, errors.New("check configuration: a timeout is negative")
	}
	if cfg.Seed == 0 {
		cfg.Seed = rand.Uint64()
	}
	if cfg.listen == nil {
		cfg.listen = net.ListenUDP
	}
	return addr, nil
}

// loader is one run of Load.
type loader struct {
	cfg      LoadConfig
	addr     *net.UDPAddr
	network  string // of client sockets
	rec      *recorder
	work     context.Context // done some time after the end of the run
	tls      *tls.Config
	quic     *quic.Config
	sessions tls.ClientSessionCache
	tokens   quic.TokenStore
	http     http3.Transport
}

// Load puts load on a server until ctx is done or the duration is over, lets
// the requests that are under way end, and returns what it found. An error is
// about the configuration.
func Load(ctx context.Context, cfg LoadConfig) (*Result, error) {
	l, err := newLoader(cfg)
	if err != nil {
		return nil, err
	}
	return l.run(ctx), nil
}

func newLoader(cfg LoadConfig) (*loader, error) {
	addr, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	l := &loader{
		cfg:  cfg,
		addr: addr,
		rec:  newRecorder(),
		tls: &tls.Config{
			ServerName:         cfg.ServerName,
			RootCAs:            cfg.RootCAs,
			InsecureSkipVerify: cfg.RootCAs == nil,
			NextProtos:         []string{http3.NextProtoH3},
		},
		quic: &quic.Config{
			// The context of a handshake ends it first.
			HandshakeIdleTimeout: 2 * cfg.HandshakeTimeout,
			MaxIdleTimeout:       cfg.IdleTimeout,
			KeepAlivePeriod:      cfg.IdleTimeout / 3,
			MaxIncomingStreams:   -1,
		},
		sessions: sessionCache{tls.NewLRUClientSessionCache(4)},
		tokens:   quic.NewLRUTokenStore(4, 16),
		http:     http3.Transport{DisableCompression: true},
		network:  "udp6",
	}
	if addr.IP.To4() != nil {
		l.network = "udp4"
	}
	return l, nil
}

func (l *loader) run(ctx context.Context) *Result {
	if l.cfg.Duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, l.cfg.Duration)
		defer cancel()
	}
	work, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	l.work = work

	began := time.Now()
	var workers, sampler sync.WaitGroup
	ended := make(chan struct{})
	sampler.Go(func() { l.sample(began, ended) })
	for i := range l.cfg.Connections {
		workers.Go(func() { l.persistent(ctx, uint64(i)) })
	}
	workers.Go(func() { l.arrivals(ctx) })

	<-ctx.Done()
	took := time.Since(began)
	// What is dead fails by itself before that.
	giveUp := time.AfterFunc(max(l.cfg.HandshakeTimeout, l.cfg.IdleTimeout)+time.Second, func() { cancel(errTimeout) })
	workers.Wait()
	giveUp.Stop()
	close(ended)
	sampler.Wait()
	return l.rec.finish(took)
}

// sample reports every 100 ms, and once more at the end.
func (l *loader) sample(began time.Time, ended <-chan struct{}) {
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	last, done := began, false
	for !done {
		select {
		case <-tick.C:
		case <-ended:
			done = true
		}
		late := time.Since(last) - sampleEvery
		last = last.Add(late + sampleEvery)
		l.rec.update(func(r *Result) { r.Stall = max(r.Stall, late.Seconds()*1000) })
		if s := l.rec.sample(last.Sub(began)); l.cfg.Sample != nil {
			l.cfg.Sample(s)
		}
	}
}

func (l *loader) random(stream uint64) *rand.Rand {
	return rand.New(rand.NewPCG(l.cfg.Seed, stream))
}

// size draws the length of a download.
func (l *loader) size(r *rand.Rand) int64 {
	if r.Float64() < l.cfg.LargePart {
		return l.cfg.LargeBytes
	}
	low, high := math.Log(float64(l.cfg.MinBytes)), math.Log(float64(l.cfg.MaxBytes))
	return int64(math.Round(math.Exp(low + r.Float64()*(high-low))))
}

// persistent keeps one connection busy until ctx is done, and opens it again
// whenever it ended.
func (l *loader) persistent(ctx context.Context, number uint64) {
	r := l.random(number)
	total := float64(l.cfg.Connections) * l.cfg.RequestsPerSecond
	migrate, rebind := l.cfg.MigrationsPerSecond/total, l.cfg.RebindsPerSecond/total
	var c *client
	defer func() {
		if c != nil {
			l.rec.opened(-1)
			c.close()
		}
	}()
	timer := time.NewTimer(time.Duration(float64(number) / rampRate * float64(time.Second)))
	defer timer.Stop()
	for {
		var gone <-chan struct{}
		if c != nil {
			gone = c.conn.Context().Done()
		}
		select {
		case <-ctx.Done():
			return
		case <-gone:
			c = l.ended(c)
			continue
		case <-timer.C:
		}
		q := request{bytes: l.size(r), seed: r.Uint64()}
		switch draw := r.Float64(); {
		case draw < migrate:
			q.move(l.migrate)
		case draw < migrate+rebind:
			q.move(l.rebind)
		}
		c = l.do(c, q, true)
		timer.Reset(time.Duration(r.ExpFloat64() / l.cfg.RequestsPerSecond * float64(time.Second)))
	}
}

// arrivals opens new connections until ctx is done.
func (l *loader) arrivals(ctx context.Context) {
	if l.cfg.NewPerSecond == 0 {
		return
	}
	r := l.random(math.MaxUint64)
	var wg sync.WaitGroup
	defer wg.Wait()
	tick := time.NewTicker(time.Duration(float64(time.Second) / l.cfg.NewPerSecond))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		q := request{bytes: l.cfg.MinBytes, seed: r.Uint64(), resume: r.Float64() < l.cfg.Resume}
		wg.Go(func() {
			if c := l.do(nil, q, false); c != nil {
				c.close()
			}
		})
	}
}

// do makes a request on connection c, on a new one when c is nil, and again
// when the server did not process it. It returns the connection for the next
// request, nil when there is none.
func (l *loader) do(c *client, q request, persistent bool) *client {
	var err error
	for range maxTries {
		if c == nil {
			if c, err = l.dial(q.resume); err != nil {
				l.rec.lost(lostHandshake, err)
				return nil
			}
			c.persistent = persistent
			if persistent {
				l.rec.opened(1)
			}
		}
		var sent bool
		sent, err = c.get(q)
		if established := c.established(); established != nil {
			l.rec.lost(lostHandshake, established)
			return l.drop(c)
		}
		switch {
		case err == nil:
			return c
		case errors.Is(err, quic.Err0RTTRejected):
			// Again on another connection: quic-go would reset a stream of this
			// one that has the number of the early one (quic-go issue 4706).
			l.rec.update(func(r *Result) { r.ZeroRTT.Attempted++ })
			q.resume = false
			c = l.drop(c)
		case rejected(err):
			l.rec.update(func(r *Result) { r.Retried++ })
			c = l.replace(c)
		case !sent, c.leftByUs():
			// Our own HTTP/3 saw GOAWAY, or the connection had ended already.
			c = l.replace(c)
		default:
			l.rec.lost(lostRequest, err)
			if c.conn.Context().Err() != nil {
				return l.ended(c)
			}
			return c
		}
	}
	l.rec.lost(lostRequest, fmt.Errorf("not processed %d times: %w", maxTries, err))
	return c
}

// replace is for a connection that takes no more requests.
func (l *loader) replace(c *client) *client {
	if c.conn.Context().Err() != nil {
		return l.ended(c)
	}
	if c.persistent {
		l.rec.moved()
	}
	return l.drop(c)
}

// ended records how a connection ended.
func (l *loader) ended(c *client) *client {
	cause := context.Cause(c.conn.Context())
	switch {
	case !graceful(cause) && !c.leftByUs():
		l.rec.lost(lostConnection, cause)
	case c.persistent:
		l.rec.moved()
	}
	return l.drop(c)
}

func (l *loader) drop(c *client) *client {
	if c.persistent {
		l.rec.opened(-1)
	}
	c.close()
	return nil
}

// graceful says whether a connection ended because the server wanted it to, in
// order: by H3_NO_ERROR, from the server or, after GOAWAY, from our own HTTP/3.
func graceful(cause error) bool {
	app, ok := errors.AsType[*quic.ApplicationError](cause)
	return ok && app.ErrorCode == quic.ApplicationErrorCode(http3.ErrCodeNoError)
}

// leftByUs says whether our own HTTP/3 closed the connection under a request
// that was not sent. It does so in two races: GOAWAY finds no open stream while
// a request opens one, and early data is rejected while it opens its control
// stream.
func (c *client) leftByUs() bool {
	app, ok := errors.AsType[*quic.ApplicationError](context.Cause(c.conn.Context()))
	return ok && !app.Remote && (graceful(app) || c.early)
}
