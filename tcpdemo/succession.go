// SPDX-License-Identifier: Apache-2.0

package tcpdemo

import (
	"context"
	"fmt"
	"net"
	"syscall"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
)

func (s *Server) succession(ctx context.Context) (succession, error) {
	switch s.cfg.Mode {
	case ModeRestart:
		return &beside{number: s.cfg.Generation}, nil
	case ModeReusePort:
		return &beside{number: s.cfg.Generation, config: net.ListenConfig{Control: reusePort}}, nil
	case ModeInstar:
		return newTakeover(ctx, s.cfg)
	}
	return nil, fmt.Errorf("mode %q", s.cfg.Mode) // NewServer checked it
}

// beside has a listener of its own and knows nothing of other processes. A
// connection can come as soon as it listens.
type beside struct {
	number int
	config net.ListenConfig
}

func (b *beside) listen(ctx context.Context, addr string) (net.Listener, error) {
	return b.config.Listen(ctx, "tcp", addr)
}

func (b *beside) ready(context.Context) error { return nil }
func (b *beside) generation() int             { return b.number }
func (b *beside) superseded() <-chan struct{} { return nil }
func (b *beside) err() error                  { return nil }
func (b *beside) close() error                { return nil }

// reusePort is the Control of a net.ListenConfig.
func reusePort(_, _ string, c syscall.RawConn) error {
	return rawconn.Control(c, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
	})
}
