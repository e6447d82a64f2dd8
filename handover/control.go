// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// answerControl answers at the control socket while this process serves: the
// listener is paused otherwise.
func (h *Handover) answerControl() {
	// The logger gets its last attribute while this waits for the first caller.
	warn := func(err error) { h.log.Warn("control socket", "error", err) }
	acceptCallers(h.ctx, h.control, warn, h.wg.Go, h.answer)
}

// acceptCallers calls answer with each connection, in goroutines that start makes, until
// ctx ends or the listener is closed. The context that answer gets is how long a caller is
// listened to that has said nothing; spoke says that it has. warn gets what keeps it from
// accepting for a while.
func acceptCallers(ctx context.Context, l net.Listener, warn func(error), start func(func()),
	answer func(ctx context.Context, c *net.UnixConn, spoke func()),
) {
	slots := make(chan struct{}, 64)
	var silent quiet
	for {
		c, err := l.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			// Out of descriptors, most likely.
			warn(err)
			select {
			case <-time.After(100 * time.Millisecond):
				continue
			case <-ctx.Done():
				return
			}
		}
		who := silent.add(ctx)
		select {
		case slots <- struct{}{}:
			start(func() {
				defer func() { <-slots }()
				defer silent.remove(who)
				answer(who.ctx, c.(*net.UnixConn), func() { silent.remove(who) })
			})
		case <-ctx.Done():
			silent.remove(who)
			_ = c.Close()
			return
		}
	}
}

// quiet are callers that have said nothing yet, in the order in which they were
// accepted. A newer one is worth more than an old one: peers that connect and say
// nothing do not keep others out.
type quiet struct {
	mu  sync.Mutex
	all []*caller
}

// caller is a connection of the control socket; ctx is how long it is listened
// to.
type caller struct {
	ctx    context.Context
	cancel context.CancelFunc
}

// maxQuiet is less than the number of connections at once.
const maxQuiet = 16

func (q *quiet) add(ctx context.Context) *caller {
	who := &caller{}
	who.ctx, who.cancel = context.WithCancel(ctx)
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.all = append(q.all, who); len(q.all) > maxQuiet {
		q.all[0].cancel()
		q.all = q.all[1:]
	}
	return who
}

// remove is for one that has spoken, or is gone.
func (q *quiet) remove(who *caller) {
	who.cancel()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.all = slices.DeleteFunc(q.all, func(other *caller) bool { return other == who })
}

// answer serves one connection of the control socket. It waits for the first
// frame while ctx lasts, and tells that it came.
func (h *Handover) answer(ctx context.Context, c *net.UnixConn, spoke func()) {
	p, err := newPeer(c)
	if err != nil {
		_ = c.Close()
		return
	}
	ours := true // the connection
	defer func() {
		if ours {
			p.close()
		}
	}()
	done := p.limit(ctx, 5*time.Second)
	if err := p.check(h.opt.AllowUIDs); err != nil {
		h.log.Warn("control socket", "error", err)
		_ = p.send(frameRefuse, refusalOf(err))
		return
	}
	f, err := p.receive()
	done()
	spoke()
	if err != nil {
		if !errors.Is(err, errPeerGone) {
			h.log.Warn("control socket", "peer", p.cred.Pid, "error", err)
			p.refuse(err)
		}
		return
	}
	closeAll(f.fds)
	switch f.kind {
	case frameHello:
		ours, err = h.takenOver(p, f)
	case frameRequest:
		err = h.obey(p, f)
	default:
		err = fmt.Errorf("%w: a connection begins with HELLO or REQUEST, not with %v", ErrProtocol, f.kind)
	}
	if err != nil {
		p.refuse(err)
	}
}

// takenOver sees a process through that somebody else started. Unless ours is
// true, the connection was closed, or is by whoever has it.
func (h *Handover) takenOver(p *peer, f frame) (ours bool, err error) {
	s, err := decode[hello](f)
	if err != nil {
		return true, err
	}
	release, err := h.beginUpgrade()
	if err != nil {
		h.noUpgrade(err, "successor", p.cred.Pid)
		return true, err
	}
	defer release()
	ctx, cancel := h.untilClosed(h.ctx, "the predecessor stops")
	defer cancel()
	s.PID = int(p.cred.Pid)
	if err := h.see(ctx, p, &s, nil); err != nil {
		h.noUpgrade(err, "successor", p.cred.Pid)
	}
	return false, nil // see has told the peer
}

// obey answers a request.
func (h *Handover) obey(p *peer, f frame) error {
	r, err := decode[request](f)
	if err != nil {
		return err
	}
	var answer result
	switch r.Do {
	case "status":
	case "upgrade":
		err = h.requested(p)
	default:
		err = fmt.Errorf("%w: request %q; this build knows status and upgrade", ErrProtocol, r.Do)
	}
	if err != nil {
		why := refusalOf(err)
		answer.Error, answer.Code = why.Reason, why.Code
	}
	s := h.Status()
	answer.Now = &s
	_ = p.conn.SetWriteDeadline(time.Now().Add(5 * time.Second))
	return p.send(frameResult, answer)
}

// requested upgrades for a peer. When the peer leaves, the upgrade goes on.
func (h *Handover) requested(p *peer) error {
	h.log.Info("upgrade requested", "peer", p.cred.Pid, "uid", p.cred.Uid)
	return h.Upgrade(h.ctx)
}

// RequestUpgrade asks the server at a control socket to upgrade itself, and
// waits until the successor has stood its probation. The status is that of the
// process that answered, afterwards. Errors are as of Handover.Upgrade; a
// *RefusedError carries the reason.
func RequestUpgrade(ctx context.Context, socket string) (Status, error) {
	return control(ctx, socket, "upgrade")
}

// RequestStatus asks the server at a control socket how it is.
func RequestStatus(ctx context.Context, socket string) (Status, error) {
	return control(ctx, socket, "status")
}

func control(ctx context.Context, socket, do string) (_ Status, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("request %s at %s: %w", do, socket, err)
		}
	}()
	var d net.Dialer
	c, err := d.DialContext(ctx, "unixpacket", socket)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return Status{}, fmt.Errorf("no server has its control socket there: %w", err)
	case errors.Is(err, unix.ECONNREFUSED):
		return Status{}, fmt.Errorf("the server that had its control socket there is gone; start it: %w", err)
	case errors.Is(err, unix.EPROTOTYPE):
		return Status{}, fmt.Errorf("it is not the control socket of a server: %w", err)
	case err != nil:
		return Status{}, err
	}
	p, err := newPeer(c.(*net.UnixConn))
	if err != nil {
		return Status{}, errors.Join(err, c.Close())
	}
	defer p.close()
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	err = p.send(frameRequest, request{Do: do})
	var answer result
	if err == nil {
		answer, err = wantJSON[result](p, frameResult)
	}
	switch {
	case ctx.Err() != nil:
		return Status{}, ctx.Err()
	case errors.Is(err, errPeerGone):
		return Status{}, fmt.Errorf("the server ended before it answered: %w", err)
	case err != nil:
		return Status{}, err
	}
	var status Status
	if answer.Now != nil {
		status = *answer.Now
	}
	if answer.Error != "" {
		return status, refusal{answer.Code, answer.Error}.err()
	}
	return status, nil
}
