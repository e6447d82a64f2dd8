// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"time"

	"github.com/quic-go/quic-go"

	"instar/dispatch"
	"instar/dispatch/quicgo"
	"instar/handover"
)

// instarSockets are a generation of a group.
type instarSockets struct {
	group *dispatch.Group
	gen   *dispatch.Generation
}

func openInstar(cfg *ServerConfig, h *handover.Handover) (*instarSockets, error) {
	options := dispatch.Options{
		Network:  cfg.Network,
		Address:  cfg.Addr,
		Service:  cfg.Service,
		Steering: dispatch.SteeringQUIC,
		Root:     cfg.Root,
		Build:    cfg.Build[:min(len(cfg.Build), 31)],
		Logger:   cfg.Logger,
	}
	if cfg.Pinless {
		options.Files = h
	}
	group, err := dispatch.Open(options)
	if err != nil {
		return nil, err
	}
	gen, err := group.Join(cfg.Workers)
	if err != nil {
		return nil, errors.Join(err, group.Close())
	}
	return &instarSockets{group, gen}, nil
}

func (s *instarSockets) generation() uint32                     { return s.gen.Number() }
func (s *instarSockets) state() string                          { return s.gen.State().String() }
func (s *instarSockets) addr() net.Addr                         { return s.gen.Conns()[0].LocalAddr() }
func (s *instarSockets) transports() ([]*quic.Transport, error) { return quicgo.Transports(s.gen) }
func (s *instarSockets) activate() error                        { return s.gen.Activate() }
func (s *instarSockets) superseded() <-chan struct{}            { return s.gen.Superseded() }
func (s *instarSockets) supersede()                             {} // the group tells

// handBack fails when no predecessor is left.
func (s *instarSockets) handBack() bool {
	if s.gen.State() != dispatch.StateActive {
		return false
	}
	_, err := s.group.Rollback()
	return err == nil
}

func (s *instarSockets) serverTLS(base *tls.Config) *tls.Config {
	return quicgo.ServerTLS(s.gen, base)
}

func (s *instarSockets) serverQUIC(base *quic.Config) *quic.Config {
	return quicgo.ServerConfig(s.gen, base)
}

func (s *instarSockets) certificateSeed() ([]byte, error) {
	return s.group.Secret("quicdemo certificate", 32)
}

func (s *instarSockets) reinstated(ctx context.Context) bool {
	state, err := s.gen.Wait(ctx, dispatch.StateActive, dispatch.StateGone)
	return err == nil && state == dispatch.StateActive
}

func (s *instarSockets) drain(ctx context.Context, done <-chan struct{}, deadline time.Duration) error {
	_, err := s.gen.Drain(ctx, dispatch.DrainOptions{Done: done, Deadline: deadline})
	if errors.Is(err, dispatch.ErrReinstated) {
		return errReinstated
	}
	return err
}

func (s *instarSockets) close() error {
	return errors.Join(s.gen.Close(), s.group.Close())
}
