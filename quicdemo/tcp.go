// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"

	"instar/handover/drain"
)

// tcpServer serves HTTP/1.1 and HTTP/2 beside HTTP/3.
type tcpServer struct {
	drainer *drain.Drainer
	served  chan error
}

// serveTCP starts to serve; connections are accepted once the handover is ready.
func (s *Server) serveTCP(cert tls.Certificate) error {
	network, address := s.tcpAddr()
	ln, err := s.handover.Listen("web", network, address)
	if err != nil {
		return err
	}
	altSvc := s.altSvc()
	inner := s.handler()
	server := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Alt-Svc", altSvc)
			inner.ServeHTTP(w, r)
		}),
		TLSConfig:         &tls.Config{Certificates: []tls.Certificate{cert}},
		ReadHeaderTimeout: s.cfg.UpgradeTimeout,
	}
	s.tcp = &tcpServer{
		drainer: drain.New(drain.Options{Deadline: s.cfg.DrainDeadline, CloseRate: s.cfg.CloseRate, Logger: s.log}),
		served:  make(chan error, 1),
	}
	web := s.tcp.drainer.HTTP(server)
	go func() { s.tcp.served <- server.ServeTLS(web.Listener(ln), "", "") }()
	return nil
}

// drain sends the clients of TCP away; a done ctx cuts them off.
func (t *tcpServer) drain(ctx context.Context) error {
	if t == nil {
		return nil
	}
	_, err := t.drainer.Run(ctx)
	if ctx.Err() != nil {
		err = nil // at once, as it was asked
	}
	served := <-t.served
	// Leaving the handover closes the listener.
	if !errors.Is(served, http.ErrServerClosed) && !errors.Is(served, net.ErrClosed) {
		err = errors.Join(err, fmt.Errorf("serve TCP: %w", served))
	}
	return err
}
