// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"instar/handover"
)

// openHandover finds the predecessor. It waits while that one is busy with
// another upgrade.
func openHandover(ctx context.Context, cfg *ServerConfig) (*handover.Handover, error) {
	options := handover.Options{
		Name:           cfg.Service,
		Build:          cfg.Build,
		Socket:         cfg.Control,
		Command:        cfg.Command,
		Environ:        func() []string { return cfg.Environ },
		Signals:        []os.Signal{}, // Main's
		UpgradeTimeout: cfg.UpgradeTimeout,
		Probation:      cfg.Probation,
		Stdout:         cfg.Stdout,
		Stderr:         cfg.Stderr,
		Logger:         cfg.Logger,
	}
	deadline := time.Now().Add(cfg.UpgradeTimeout)
	for {
		h, err := handover.NewContext(ctx, options)
		if err == nil || !handover.Retryable(err) || time.Now().After(deadline) {
			return h, err
		}
		cfg.Logger.Info("waiting for the predecessor", "reason", err)
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Upgrade starts a successor, and returns when it has taken over for good.
// Whatever becomes of the successor, this server serves on; it leaves when it is
// superseded. Errors are those of handover.Handover.Upgrade.
func (s *Server) Upgrade(ctx context.Context) error {
	select {
	case <-s.serving:
		return s.handover.Upgrade(ctx)
	default:
		return handover.ErrNotActive
	}
}

// follow tells sockets that cannot see it by themselves that there is a
// successor.
func (s *Server) follow(ctx context.Context) {
	select {
	case <-s.handover.Superseded():
		s.sockets.supersede()
	case <-ctx.Done():
	}
}

// tcpAddr is where HTTP/1.1 and HTTP/2 are served: the port of HTTP/3.
func (s *Server) tcpAddr() (network, address string) {
	network = map[string]string{"udp": "tcp", "udp4": "tcp4", "udp6": "tcp6"}[s.cfg.Network]
	host, _, err := net.SplitHostPort(s.cfg.Addr)
	if err != nil {
		return network, s.cfg.Addr
	}
	_, port, err := net.SplitHostPort(s.sockets.addr().String())
	if err != nil {
		return network, s.cfg.Addr
	}
	return network, net.JoinHostPort(host, port)
}

// altSvc says at which port HTTP/3 is served (RFC 7838, RFC 9114 section 3.1.1).
func (s *Server) altSvc() string {
	_, port, _ := net.SplitHostPort(s.sockets.addr().String())
	return fmt.Sprintf(`h3=":%s"; ma=3600`, port)
}
