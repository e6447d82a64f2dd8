// SPDX-License-Identifier: Apache-2.0

package tcpdemo

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"instar/handover/drain"
	"instar/internal/content"
)

// Response headers that say who answered.
const (
	HeaderGeneration = "Instar-Generation"
	HeaderPID        = "Instar-Pid"
)

// Mode is how a server succeeds its predecessor.
type Mode string

const (
	// ModeRestart listens plainly: the predecessor has to be gone.
	ModeRestart Mode = "restart"
	// ModeReusePort listens with SO_REUSEPORT, beside the predecessor.
	ModeReusePort Mode = "reuseport"
	// ModeInstar takes over the predecessor's listener by package handover.
	ModeInstar Mode = "instar"
)

// ServerConfig configures a Server. Mode and Addr have to be set.
type ServerConfig struct {
	Mode Mode
	// Addr is the "IP:port" to listen on.
	Addr string
	// Generation is what answers say, and events. ModeInstar counts by itself.
	Generation int
	// Socket is where a successor takes over, of ModeInstar.
	Socket string
	// StartDelay is how long the server initialises before it is ready.
	StartDelay time.Duration
	// AcceptEvery makes the server slow in accepting: at this interval it takes
	// what waits in the accept queue. Default: it accepts at once.
	AcceptEvery time.Duration
	// Probation is how long a predecessor may take back, of ModeInstar. Default 500 ms.
	Probation time.Duration
	// DrainDeadline is how long clients may stay when the server leaves. In its
	// first half it waits for requests on idle connections and answers them
	// with "Connection: close" (package drain). ModeRestart closes idle ones at
	// once, as http.Server.Shutdown does. Default 8 s.
	DrainDeadline time.Duration
	// Event, when set, is told what happens. It must not block.
	Event func(Event) `json:"-"`
	// Logger gets errors. Default: nothing is logged.
	Logger *slog.Logger `json:"-"`
}

// Event is something that happened to a server.
type Event struct {
	Kind       EventKind `json:"event"`
	Generation int       `json:"generation"`
	PID        int       `json:"pid"`
	Addr       string    `json:"addr,omitempty"`
	// Waiting is the number of connections in the accept queue when the listener
	// closed, of EventClosed.
	Waiting int `json:"waiting,omitempty"`
	// Requests is how many were begun, of EventDrained.
	Requests int64 `json:"requests,omitempty"`
}

// EventKind names an Event.
type EventKind string

const (
	// EventReady says that the server serves.
	EventReady EventKind = "ready"
	// EventDraining says that the server leaves: another one has taken over for
	// good, or it was told to stop.
	EventDraining EventKind = "draining"
	// EventClosed says that the server closed its listener itself.
	EventClosed EventKind = "closed"
	// EventDrained says that the last connection is closed.
	EventDrained EventKind = "drained"
)

// succession is what the modes differ in.
type succession interface {
	// listen returns the listener, which accepts nothing before ready.
	listen(ctx context.Context, addr string) (net.Listener, error)
	// ready returns when this process serves.
	ready(ctx context.Context) error
	// generation is known after listen.
	generation() int
	// superseded is closed when a successor has taken over for good. It may be
	// nil, for never.
	superseded() <-chan struct{}
	// err says whether this process was rolled back instead.
	err() error
	// close is called when the server has drained.
	close() error
}

// Server is one generation of the HTTP/1.1 server. Make it with NewServer, run
// it with Run, once. It answers /bytes/N?seed=S&ms=M with N bytes that follow
// from the seed, over M milliseconds.
type Server struct {
	cfg      ServerConfig
	log      *slog.Logger
	stop     chan struct{}
	stopOnce sync.Once
	requests atomic.Int64
}

// NewServer checks the configuration.
func NewServer(cfg ServerConfig) (*Server, error) {
	if _, _, err := net.SplitHostPort(cfg.Addr); err != nil {
		return nil, fmt.Errorf("check address: %w", err)
	}
	switch cfg.Mode {
	case ModeRestart, ModeReusePort, ModeInstar:
	default:
		return nil, fmt.Errorf("check mode: %q is none of %s, %s and %s", cfg.Mode, ModeRestart, ModeReusePort, ModeInstar)
	}
	if cfg.Mode == ModeInstar && cfg.Socket == "" {
		return nil, fmt.Errorf("check mode: %s needs a socket for the handover", cfg.Mode)
	}
	if cfg.Probation == 0 {
		cfg.Probation = 500 * time.Millisecond
	}
	if cfg.DrainDeadline == 0 {
		cfg.DrainDeadline = 8 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Event == nil {
		cfg.Event = func(Event) {}
	}
	return &Server{cfg: cfg, log: cfg.Logger, stop: make(chan struct{})}, nil
}

// Stop makes the server drain and Run return.
func (s *Server) Stop() { s.stopOnce.Do(func() { close(s.stop) }) }

// Run serves until Stop, or until a successor has taken over, and drains. It
// returns nil when every request was answered. ctx ends it at once.
func (s *Server) Run(ctx context.Context) (err error) {
	way, err := s.succession(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, way.close()) }()
	plain, err := way.listen(ctx, s.cfg.Addr)
	if err != nil {
		return err
	}
	event := func(kind EventKind, change func(*Event)) {
		e := Event{Kind: kind, Generation: way.generation(), PID: os.Getpid()}
		if change != nil {
			change(&e)
		}
		s.cfg.Event(e)
	}
	queue := newQueue(plain, s.cfg.AcceptEvery, func(waiting int) {
		if s.cfg.Mode != ModeInstar { // where it goes on in the successor
			event(EventClosed, func(e *Event) { e.Waiting = waiting })
		}
	})
	defer func() { _ = queue.Close() }() // closed before, unless something failed
	select {
	case <-time.After(s.cfg.StartDelay):
	case <-s.stop:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}

	server := &http.Server{
		Handler:           s.handler(way.generation()),
		ReadHeaderTimeout: time.Minute,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
	listener, leave := s.leaving(server, queue)
	defer func() { _ = server.Close() }()
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	if err := way.ready(ctx); err != nil {
		return fmt.Errorf("become ready: %w", err)
	}
	event(EventReady, func(e *Event) { e.Addr = plain.Addr().String() })

	select {
	case <-s.stop:
	case <-way.superseded():
	case err := <-served:
		select {
		case <-way.superseded(): // which ended the listener
		default:
			return fmt.Errorf("serve: %w", err)
		}
	case <-ctx.Done():
		return ctx.Err()
	}
	event(EventDraining, nil)
	// One that was rolled back finishes what it has accepted, too.
	if err := errors.Join(way.err(), leave(ctx)); err != nil {
		return err
	}
	event(EventDrained, func(e *Event) { e.Requests = s.requests.Load() })
	return nil
}

// leaving returns the listener to serve on, and what sends the clients away in
// the end.
func (s *Server) leaving(server *http.Server, l net.Listener) (net.Listener, func(context.Context) error) {
	if s.cfg.Mode == ModeRestart {
		return l, func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, s.cfg.DrainDeadline)
			defer cancel()
			if err := server.Shutdown(ctx); err != nil {
				return fmt.Errorf("drain: %w", err)
			}
			return nil
		}
	}
	drainer := drain.New(drain.Options{Deadline: s.cfg.DrainDeadline, Logger: s.log})
	return drainer.HTTP(server).Listener(l), func(ctx context.Context) error {
		report, err := drainer.Run(ctx)
		if err == nil && report.Cut > 0 {
			err = fmt.Errorf("drain: %d connections were busy after %v", report.Cut, s.cfg.DrainDeadline)
		}
		return err
	}
}

func (s *Server) handler(generation int) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /bytes/{n}", content.Serve)
	number, pid := strconv.Itoa(generation), strconv.Itoa(os.Getpid())
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.requests.Add(1)
		h := w.Header()
		h.Set(HeaderGeneration, number)
		h.Set(HeaderPID, pid)
		mux.ServeHTTP(w, r)
	})
}
