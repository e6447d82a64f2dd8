// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"
)

// ControlServer answers at a control socket in the place of a Handover, for a server whose
// processes somebody else starts and ends: RequestUpgrade and RequestStatus work with it.
// There is nothing to take over there. Listen, then Serve, then Close.
type ControlServer struct {
	// Status answers requests. Required.
	Status func() Status
	// Upgrade upgrades the server and returns when that has ended. Its context ends with
	// that of Serve, not when the caller leaves. Required.
	Upgrade func(context.Context) error
	// AllowUIDs are users that may ask, besides root and the effective user of this process.
	AllowUIDs []int
	// Logger gets requests, and who was refused. Default: nothing is logged.
	Logger *slog.Logger

	socket string
	l      *net.UnixListener
	made   inode
}

// Listen makes the socket, with mode 0600 unless its name is abstract ("@name"). A path that
// a dead process left is replaced.
func (c *ControlServer) Listen(socket string) error {
	if socket == "" {
		return errors.New("control socket: no path")
	}
	l, err := listenUnix(&net.ListenConfig{}, "unixpacket", socket)
	if err != nil {
		return err
	}
	if socket[0] != '@' {
		if err := os.Chmod(socket, 0o600); err != nil {
			return errors.Join(err, l.Close())
		}
		c.made, _ = inodeOf(socket)
	}
	c.socket, c.l = socket, l
	return nil
}

// Serve answers until ctx ends, and returns when no request is under way.
func (c *ControlServer) Serve(ctx context.Context) {
	log := c.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.l.Close() })
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	warn := func(err error) { log.Warn("control socket", "error", err) }
	acceptCallers(ctx, c.l, warn, wg.Go, func(quiet context.Context, conn *net.UnixConn, spoke func()) {
		c.answer(ctx, quiet, log, conn, spoke)
	})
}

func (c *ControlServer) answer(ctx, quiet context.Context, log *slog.Logger, conn *net.UnixConn, spoke func()) {
	p, err := newPeer(conn)
	if err != nil {
		_ = conn.Close()
		return
	}
	defer p.close()
	done := p.limit(quiet, 5*time.Second)
	if err := p.check(c.AllowUIDs); err != nil {
		log.Warn("control socket", "error", err)
		_ = p.send(frameRefuse, refusalOf(err))
		return
	}
	f, err := p.receive()
	done()
	spoke()
	if err != nil {
		if !errors.Is(err, errPeerGone) {
			p.refuse(err)
		}
		return
	}
	closeAll(f.fds)
	if f.kind != frameRequest {
		p.refuse(fmt.Errorf("%w: nothing can be taken over here, only REQUEST is answered", ErrProtocol))
		return
	}
	r, err := decode[request](f)
	if err != nil {
		p.refuse(err)
		return
	}
	before := c.Status()
	var answer result
	now := before
	switch r.Do {
	case "status":
	case "upgrade":
		log.Info("upgrade requested", "peer", p.cred.Pid, "uid", p.cred.Uid)
		if err = c.Upgrade(ctx); err == nil {
			// The status is that of the process that answered for the server before.
			after := c.Status()
			now.Phase, now.Successor, now.Older = "draining", &after.Peer, nil
		}
	default:
		err = fmt.Errorf("%w: request %q; this build knows status and upgrade", ErrProtocol, r.Do)
	}
	if err != nil {
		why := refusalOf(err)
		answer.Error, answer.Code = why.Reason, why.Code
	}
	answer.Now = &now
	_ = conn.SetWriteDeadline(time.Now().Add(5 * time.Second))
	_ = p.send(frameResult, answer)
}

// Close closes the socket and removes its path.
func (c *ControlServer) Close() error {
	if c.l == nil {
		return nil
	}
	err := c.l.Close()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	c.l = nil
	if c.socket[0] != '@' {
		err = errors.Join(err, unlink(c.socket, c.made))
	}
	return err
}
