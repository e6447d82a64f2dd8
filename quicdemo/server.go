// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"instar/handover"
	"instar/internal/build"
)

// ServerConfig configures a Server. Only Addr has to be set.
type ServerConfig struct {
	// Mode says where the sockets come from. Default ModeInstar.
	Mode Mode
	// Network is "udp", "udp4" or "udp6". Default "udp".
	Network string
	// Addr is "IP:port". ModeInstar refuses port 0.
	Addr string
	// Workers is the number of sockets and transports, 1 to 256. ModePlain has
	// always one. Default 2.
	Workers int
	// Root is the folder below which groups are pinned (ModeInstar). Default
	// dispatch.DefaultRoot.
	Root string
	// Pinless keeps the group in descriptors that go from server to server, and needs
	// no bpffs (ModeInstar).
	Pinless bool
	// Service is the owner's name in the group (ModeInstar). Default "quicdemo".
	Service string
	// Generation is the number to answer with in the other modes, where nobody
	// gives one. Default 1.
	Generation uint32
	// Build names the build in logs and answers. Default: the VCS revision, or
	// the executable's size and modification time.
	Build string

	// Certificate is what clients see. When it is nil, CertFile is used; when
	// that is empty too, a self-signed certificate for localhost, 127.0.0.1 and
	// ::1 is made, in ModeInstar with a key that all generations share.
	Certificate *tls.Certificate
	// CertFile is a PEM file with certificate and key; see LoadCertificate.
	CertFile string

	// HandshakeGrace is how long a superseded generation waits before it says
	// GOAWAY: handshakes are still in flight, and the successor may die.
	// Default 3 s, negative for none.
	HandshakeGrace time.Duration
	// DrainDeadline is how long connections may stay after that. In its second
	// half idle connections are closed, spread over the time; at its end all.
	// Default 30 s.
	DrainDeadline time.Duration
	// GoawayRate is the most GOAWAYs a second, unless half the deadline is too
	// short for so few. Default 200.
	GoawayRate float64
	// CloseRate is the most connections closed a second while draining.
	// Default 500.
	CloseRate float64

	// Command is the successor's command line for Upgrade, its path looked up
	// afresh each time. Default: the command line of this process.
	Command []string
	// Environ is the successor's environment. Default: this process's.
	Environ []string
	// UpgradeTimeout is how long a successor may take to become ready before it
	// is killed. Default 30 s.
	UpgradeTimeout time.Duration
	// Probation is how long this server stays ready to take back from its
	// successor. Default 5 s, negative for none.
	Probation time.Duration
	// Control is the path of the control socket ("@NAME" for an abstract one), at
	// which a server that was started by somebody else takes over. Default none.
	Control string
	// TCP serves HTTP/1.1 and HTTP/2 at the same address and port (ModeInstar).
	TCP bool
	// Stdout and Stderr are the successor's. Default: those of this process.
	Stdout, Stderr *os.File

	// Ready is called once new connections come to this server.
	Ready func(Ready)
	// Logger receives the events of the life cycle. Default: nothing is logged.
	Logger *slog.Logger

	wrap func(http.Handler) http.Handler // for tests
}

// Ready describes a server that is ready.
type Ready struct {
	Generation uint32 `json:"generation"`
	PID        int    `json:"pid"`
	Addr       string `json:"addr"`
	Mode       Mode   `json:"mode"`
	Build      string `json:"build"`
	// SPKI is the certificate's SPKIHash.
	SPKI string `json:"spki"`
}

// Server is one generation of the HTTP/3 server. Make it with NewServer, run
// it with Run, once.
type Server struct {
	cfg      ServerConfig
	log      *slog.Logger
	sockets  sockets
	conns    connSet
	started  time.Time
	requests atomic.Int64
	refusing atomic.Bool // stopping with no successor
	handover *handover.Handover
	tcp      *tcpServer // nil without TCP

	stopOnce sync.Once
	stop     chan struct{} // closed by Stop
	serving  chan struct{} // closed once the fields below and above are set

	transports []*quic.Transport
	acceptors  sync.WaitGroup
	followers  sync.WaitGroup
}

// NewServer checks the configuration and fills in its defaults. It opens
// nothing.
func NewServer(cfg ServerConfig) (*Server, error) {
	if cfg.Mode == "" {
		cfg.Mode = ModeInstar
	}
	if cfg.Network == "" {
		cfg.Network = "udp"
	}
	if cfg.Workers == 0 {
		cfg.Workers = 2
	}
	if cfg.Workers < 1 || cfg.Workers > 256 {
		return nil, fmt.Errorf("check configuration: %d workers; use 1 to 256", cfg.Workers)
	}
	if cfg.Service == "" {
		cfg.Service = "quicdemo"
	}
	if cfg.Generation == 0 {
		cfg.Generation = 1
	}
	if cfg.Build == "" {
		cfg.Build = build.ID()
	}
	if cfg.HandshakeGrace == 0 {
		cfg.HandshakeGrace = 3 * time.Second
	}
	if cfg.DrainDeadline == 0 {
		cfg.DrainDeadline = 30 * time.Second
	}
	if cfg.DrainDeadline < 0 {
		return nil, fmt.Errorf("check configuration: drain deadline %v is negative", cfg.DrainDeadline)
	}
	if cfg.GoawayRate <= 0 {
		cfg.GoawayRate = 200
	}
	if cfg.CloseRate <= 0 {
		cfg.CloseRate = 500
	}
	if cfg.UpgradeTimeout == 0 {
		cfg.UpgradeTimeout = 30 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Environ == nil {
		cfg.Environ = os.Environ()
	}
	return &Server{cfg: cfg, stop: make(chan struct{}), serving: make(chan struct{})}, nil
}

// Stop makes Run end. The last generation of a group refuses new connections,
// says GOAWAY and waits for its connections until the drain deadline. One whose
// predecessor still drains hands back to it, and drains. One that is draining
// already closes what is left.
func (s *Server) Stop() { s.stopOnce.Do(func() { close(s.stop) }) }

// Run opens the sockets, becomes active, and serves until the server was
// replaced or stopped and its connections are gone. When ctx is done it closes
// them at once. It returns nil in all these cases.
func (s *Server) Run(ctx context.Context) (err error) {
	s.started = time.Now()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if s.handover, err = openHandover(ctx, &s.cfg); err != nil {
		return err
	}
	if s.cfg.Mode != ModeInstar {
		s.cfg.Generation = max(s.cfg.Generation, uint32(s.handover.Generation()))
	}
	if s.sockets, err = openSockets(ctx, &s.cfg, s.handover); err != nil {
		return errors.Join(err, s.handover.Abort(err))
	}
	s.log = s.cfg.Logger.With("generation", s.sockets.generation(), "build", s.cfg.Build)
	defer func() {
		cancel()
		err = errors.Join(err, s.close(err))
	}()

	// Everything runs before the first connection can come.
	cert, err := s.certificate()
	if err != nil {
		return err
	}
	if err := s.listen(ctx, cert); err != nil {
		return err
	}
	if s.cfg.TCP && s.cfg.Mode == ModeInstar {
		if err := s.serveTCP(cert); err != nil {
			return err
		}
	}
	s.handover.OnActivate(func(context.Context) error { return s.sockets.activate() })
	if err := s.handover.Ready(ctx); err != nil {
		return err
	}
	close(s.serving)
	s.followers.Go(func() { s.follow(ctx) })
	s.log.Info("serving", "mode", s.cfg.Mode, "addr", s.sockets.addr().String(), "workers", len(s.transports), "pid", os.Getpid())
	if s.cfg.Ready != nil {
		s.cfg.Ready(Ready{
			Generation: s.sockets.generation(),
			PID:        os.Getpid(),
			Addr:       s.sockets.addr().String(),
			Mode:       s.cfg.Mode,
			Build:      s.cfg.Build,
			SPKI:       SPKIHash(cert),
		})
	}

	tcp, leaving := make(chan error, 1), make(chan struct{})
	s.followers.Go(func() {
		select {
		case <-s.handover.Superseded():
		case <-s.stop:
		case <-leaving:
		case <-ctx.Done():
		}
		tcp <- s.tcp.drain(ctx)
	})
	s.serve(ctx)
	s.leaveHandover()
	close(leaving)
	open, _ := s.conns.size()
	s.conns.close(math.MaxInt, true)
	if ctx.Err() == nil {
		s.pause(ctx, s.conns.settle())
	}
	err = <-tcp
	s.log.Info("left", "connections_closed", open)
	return err
}

// serve returns when the server has nobody left to serve, or ctx is done.
func (s *Server) serve(ctx context.Context) {
	for stopping := false; ; {
		hurry := s.stop
		select {
		case <-ctx.Done():
			s.log.Info("stopping at once")
			return
		case <-s.sockets.superseded():
		case <-s.stop:
			// Ends a probation: the predecessor takes back.
			s.leaveHandover()
			// Only once: two generations that stop would hand back for ever.
			if stopping || !s.sockets.handBack() {
				s.leave(ctx)
				return
			}
			s.log.Info("stopping, the predecessor is active again")
			stopping, hurry = true, nil
		}
		if !s.retire(ctx, hurry) {
			return
		}
		s.log.Info("active again, by a rollback or because the successor is gone")
		select {
		case <-s.stop:
			stopping = true
		default:
		}
	}
}

// leaveHandover ends this server's part in the succession, once.
func (s *Server) leaveHandover() {
	if err := s.handover.Close(); err != nil && !errors.Is(err, handover.ErrClosed) {
		s.log.Warn("handover", "error", err)
	}
}

func (s *Server) certificate() (tls.Certificate, error) {
	switch {
	case s.cfg.Certificate != nil:
		return *s.cfg.Certificate, nil
	case s.cfg.CertFile != "":
		return LoadCertificate(s.cfg.CertFile)
	}
	seed, err := s.sockets.certificateSeed()
	if err != nil {
		return tls.Certificate{}, err
	}
	return NewCertificate(seed)
}

// acceptors is the number of accept loops of a listener. quic-go refuses a
// connection when 32 wait to be accepted; each loop that waits takes one more
// in a burst.
const acceptors = 64

// listen starts a listener and its accept loops on each transport.
func (s *Server) listen(ctx context.Context, cert tls.Certificate) error {
	s.conns.handler = s.handler()
	if s.cfg.wrap != nil {
		s.conns.handler = s.cfg.wrap(s.conns.handler)
	}
	transports, err := s.sockets.transports()
	if err != nil {
		return err
	}
	tlsConfig := s.sockets.serverTLS(http3.ConfigureTLSConfig(&tls.Config{Certificates: []tls.Certificate{cert}}))
	quicConfig := s.sockets.serverQUIC(&quic.Config{
		Allow0RTT:      true,
		MaxIdleTimeout: 30 * time.Second,
		// More than quic-go's 5 s: on a busy machine a handshake takes its time.
		HandshakeIdleTimeout: 20 * time.Second,
	})
	for _, t := range transports {
		t.ConnContext = s.connContext
		s.transports = append(s.transports, t)
		listener, err := t.ListenEarly(tlsConfig, quicConfig)
		if err != nil {
			return fmt.Errorf("listen on %v: %w", s.sockets.addr(), err)
		}
		for range acceptors {
			s.acceptors.Go(func() {
				for {
					c, err := listener.Accept(ctx)
					if err != nil {
						return
					}
					s.conns.serve(c)
				}
			})
		}
	}
	return nil
}

// connContext refuses new connections once the server stops with no successor
// (the client gets CONNECTION_REFUSED, not silence) and counts the others.
func (s *Server) connContext(ctx context.Context, info *quic.ClientInfo) (context.Context, error) {
	if s.refusing.Load() && s.sockets.state() == "active" {
		return nil, http.ErrServerClosed
	}
	return s.conns.track(ctx, info)
}

// retire lets a superseded server go. It returns true when the generation is
// active again, else false with the packets stopped. A close of hurry ends it
// early.
func (s *Server) retire(ctx context.Context, hurry <-chan struct{}) (reinstated bool) {
	open, _ := s.conns.size()
	s.log.Info("superseded, accepting the handshakes that are in flight", "connections", open, "grace", s.cfg.HandshakeGrace)
	if s.grace(ctx, hurry) {
		return true
	}

	open, _ = s.conns.size()
	s.log.Info("draining", "connections", open, "deadline", s.cfg.DrainDeadline)
	began := time.Now()
	connsCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{})
	var drain sync.WaitGroup
	drain.Go(func() {
		if s.drainConns(connsCtx, hurry) {
			close(done)
		}
	})
	// Our own deadline closes connections while their packets still come here.
	// The one of the sockets leaves time for that.
	last := time.Duration(float64(open)/s.cfg.CloseRate*float64(time.Second)) + 5*time.Second
	err := s.sockets.drain(ctx, done, s.cfg.DrainDeadline+last)
	cancel()
	drain.Wait()
	if errors.Is(err, errReinstated) {
		return true
	}
	if err != nil && ctx.Err() == nil {
		s.log.Error("draining ended early", "error", err)
	}
	open, _ = s.conns.size()
	s.log.Info("drained", "connections", open, "took", time.Since(began).Round(time.Millisecond))
	return false
}

// grace waits for handshakes that are in flight, and as long as the successor may
// still fail; true when reinstated.
func (s *Server) grace(ctx context.Context, hurry <-chan struct{}) bool {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.followers.Go(func() {
		defer cancel()
		timer := time.NewTimer(max(s.cfg.HandshakeGrace, 0))
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-hurry:
			return
		case <-ctx.Done():
			return
		}
		stop := make(chan struct{})
		defer close(stop)
		settling, done := context.WithCancel(ctx)
		defer done()
		s.followers.Go(func() {
			select {
			case <-hurry:
				done()
			case <-stop:
			}
		})
		_ = s.handover.Settled(settling)
	})
	return s.sockets.reinstated(ctx)
}

// leave ends a server that has no successor.
func (s *Server) leave(ctx context.Context) {
	s.refusing.Store(true)
	open, _ := s.conns.size()
	s.log.Info("stopping", "connections", open, "deadline", s.cfg.DrainDeadline)
	s.drainConns(ctx, nil)
}

// drainTick is the time between two looks at the connections of a drain.
const drainTick = 20 * time.Millisecond

// drainConns sends the clients away, spread over time, and returns true once
// they are gone and three probe timeouts passed. It returns false when ctx is
// done. A close of hurry moves the deadline to now.
func (s *Server) drainConns(ctx context.Context, hurry <-chan struct{}) bool {
	var (
		half     = time.Now().Add(s.cfg.DrainDeadline / 2)
		deadline = time.Now().Add(s.cfg.DrainDeadline)
		tick     = time.NewTicker(drainTick)
	)
	defer tick.Stop()
	for s.conns.live() > 0 {
		open, untold := s.conns.size()
		late := time.Until(deadline) <= 0
		if late && open == 0 {
			break // only handshakes that do not finish
		}
		s.conns.goaway(quota(untold, time.Until(half), s.cfg.GoawayRate, math.Inf(1)), min(shy, time.Until(half)))
		switch {
		case late:
			s.conns.close(quota(open, 0, 0, s.cfg.CloseRate), true)
		case time.Until(half) <= 0:
			s.conns.close(quota(open, time.Until(deadline), 0, s.cfg.CloseRate), false)
		}
		select {
		case <-ctx.Done():
			return false
		case <-hurry:
			hurry, deadline = nil, time.Now()
		case <-tick.C:
		}
	}
	return s.pause(ctx, s.conns.settle())
}

// quota is how many of n connections it is the turn of in one tick, so that
// all had theirs after the window, at a rate a second from low to high.
func quota(n int, window time.Duration, low, high float64) int {
	const perTick = float64(drainTick) / float64(time.Second)
	share := float64(n)
	if window > drainTick {
		share *= float64(drainTick) / float64(window)
	}
	share = min(max(share, low*perTick), high*perTick, float64(n))
	return int(math.Ceil(share))
}

// pause waits; false when ctx is done first.
func (s *Server) pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// close releases everything. The context of the accept loops is done. failed is
// why the server ends, if it does for a reason.
func (s *Server) close(failed error) error {
	var err error
	s.acceptors.Wait()
	if e := s.handover.Abort(failed); !errors.Is(e, handover.ErrClosed) {
		err = errors.Join(err, e)
	}
	for _, t := range s.transports {
		err = errors.Join(err, t.Close())
	}
	err = errors.Join(err, s.sockets.close())
	s.conns.wg.Wait()
	s.followers.Wait()
	return err
}
