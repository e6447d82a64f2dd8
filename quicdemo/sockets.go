// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/quic-go/quic-go"
	"golang.org/x/sys/unix"

	"instar/handover"
)

// Mode says where a server's sockets come from.
type Mode string

const (
	// ModeInstar takes a generation of a group of package dispatch.
	ModeInstar Mode = "instar"
	// ModeReusePort binds bare SO_REUSEPORT sockets.
	ModeReusePort Mode = "reuseport"
	// ModePlain binds one ordinary socket.
	ModePlain Mode = "plain"
)

// sockets is one generation's sockets and what decides over their life.
type sockets interface {
	generation() uint32
	state() string
	addr() net.Addr
	transports() ([]*quic.Transport, error)
	serverTLS(base *tls.Config) *tls.Config
	serverQUIC(base *quic.Config) *quic.Config
	// certificateSeed is the same for all generations, or nil.
	certificateSeed() ([]byte, error)
	// activate makes new flows come here.
	activate() error
	// superseded is closed once another generation took the place.
	superseded() <-chan struct{}
	// supersede says that a successor is ready. Only sockets that cannot see
	// that by themselves do something about it.
	supersede()
	// handBack makes the predecessor active again, if one is left.
	handBack() bool
	// reinstated waits until the generation is active again and returns true,
	// or until ctx is done and returns false.
	reinstated(ctx context.Context) bool
	// drain waits until done is closed or the deadline, of whoever, is over,
	// and stops packets from coming. errReinstated: serve on.
	drain(ctx context.Context, done <-chan struct{}, deadline time.Duration) error
	close() error
}

// errReinstated means that the generation is active again.
var errReinstated = errors.New("generation is active again")

func openSockets(ctx context.Context, cfg *ServerConfig, h *handover.Handover) (sockets, error) {
	switch cfg.Mode {
	case ModeInstar:
		return openInstar(cfg, h)
	case ModePlain, ModeReusePort:
		return openBare(ctx, cfg)
	}
	return nil, fmt.Errorf("open sockets: unknown mode %q; use %s, %s or %s", cfg.Mode, ModeInstar, ModeReusePort, ModePlain)
}

// bareSockets are sockets that nothing steers to.
type bareSockets struct {
	number uint32
	conns  []*net.UDPConn

	once sync.Once
	gone chan struct{} // closed by supersede
}

func openBare(ctx context.Context, cfg *ServerConfig) (*bareSockets, error) {
	s := &bareSockets{number: cfg.Generation, gone: make(chan struct{})}
	var lc net.ListenConfig
	workers := 1
	if cfg.Mode == ModeReusePort {
		workers = cfg.Workers
		lc.Control = func(_, _ string, c syscall.RawConn) error {
			var option error
			err := c.Control(func(fd uintptr) {
				option = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
			})
			return errors.Join(err, option)
		}
	}
	address := cfg.Addr
	for range workers {
		c, err := lc.ListenPacket(ctx, cfg.Network, address)
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.conns = append(s.conns, c.(*net.UDPConn))
		address = c.LocalAddr().String() // the others join the port that the first one got
	}
	return s, nil
}

func (s *bareSockets) generation() uint32                        { return s.number }
func (s *bareSockets) addr() net.Addr                            { return s.conns[0].LocalAddr() }
func (s *bareSockets) serverTLS(base *tls.Config) *tls.Config    { return base }
func (s *bareSockets) serverQUIC(base *quic.Config) *quic.Config { return base }
func (s *bareSockets) certificateSeed() ([]byte, error)          { return nil, nil }
func (s *bareSockets) activate() error                           { return nil }
func (s *bareSockets) superseded() <-chan struct{}               { return s.gone }
func (s *bareSockets) supersede()                                { s.once.Do(func() { close(s.gone) }) }

func (s *bareSockets) handBack() bool { return false }

func (s *bareSockets) state() string {
	select {
	case <-s.gone:
		return "draining"
	default:
		return "active"
	}
}

func (s *bareSockets) transports() ([]*quic.Transport, error) {
	var all []*quic.Transport
	for _, c := range s.conns {
		all = append(all, &quic.Transport{Conn: c})
	}
	return all, nil
}

func (s *bareSockets) reinstated(ctx context.Context) bool {
	<-ctx.Done()
	return false
}

func (s *bareSockets) drain(ctx context.Context, done <-chan struct{}, deadline time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	select {
	case <-done:
	case <-ctx.Done():
	}
	return nil
}

func (s *bareSockets) close() error {
	var err error
	for _, c := range s.conns {
		err = errors.Join(err, c.Close())
	}
	return err
}
