// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/rawconn"
)

// peer is the connection with the other process.
type peer struct {
	conn *net.UnixConn
	cred unix.Ucred // of the other process; of an exec'd one: of this process

	mu    sync.Mutex
	pidfd int // of the predecessor, -1 when it is not watched

	limits  sync.Mutex // of the connection's deadlines
	parting bool       // the last word is said: nobody else bounds writing any more

	reading sync.Mutex // held by receive; of what follows
	in      []byte     // of the packet that was read last
	oob     []byte
	early   []packet // read in the search for a refusal; they come first
}

// packet is a frame that came, or what is wrong with it.
type packet struct {
	frame
	err error
}

func newPeer(conn *net.UnixConn) (*peer, error) {
	p := &peer{conn: conn, pidfd: -1}
	p.in, p.oob = packetBuffers()
	err := rawconn.Of(conn, func(fd int) error {
		kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
		if err != nil {
			return err
		}
		if kind != unix.SOCK_SEQPACKET {
			return fmt.Errorf("socket type %d, not SOCK_SEQPACKET", kind)
		}
		cred, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err == nil {
			p.cred = *cred
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("check peer: %w", err)
	}
	return p, nil
}

func packetBuffers() (in, oob []byte) {
	return make([]byte, headerLen+maxPayload+1), make([]byte, unix.CmsgSpace(maxFrameFDs*4))
}

// check refuses strangers: only root, our own effective user and the ones that
// the options name may send or receive descriptors.
func (p *peer) check(allowed []int) error {
	uid := int(p.cred.Uid)
	if uid == 0 || uid == os.Geteuid() {
		return nil
	}
	for _, other := range allowed {
		if uid == other {
			return nil
		}
	}
	return fmt.Errorf("%w: process %d has uid %d; allowed are 0, %d and Options.AllowUIDs", ErrPeer, p.cred.Pid, uid, os.Geteuid())
}

// watch makes dead find out whether the other process lives.
func (p *peer) watch() {
	fd, err := unix.PidfdOpen(int(p.cred.Pid), 0)
	if err != nil {
		return // of another PID namespace, or dead
	}
	p.pidfd = fd
}

// dead says whether an error means that the other process died. One that lives
// and closed the connection goes on serving.
func (p *peer) dead(err error) bool {
	if !errors.Is(err, errPeerGone) {
		return false
	}
	// It is closed by whoever is the first to close the connection.
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pidfd < 0 {
		return unix.Kill(int(p.cred.Pid), 0) != nil
	}
	// A process that ends closes its files some time before it is dead.
	fds := []unix.PollFd{{Fd: int32(p.pidfd), Events: unix.POLLIN}}
	for deadline := time.Now().Add(5 * time.Second); ; {
		n, err := unix.Poll(fds, int(max(0, time.Until(deadline).Milliseconds())))
		if err != unix.EINTR {
			return n > 0
		}
	}
}

// send sends a frame with a JSON payload, or none when v is nil, and duplicates
// of the descriptors.
func (p *peer) send(kind frameType, v any, fds ...int) error {
	var payload []byte
	if v != nil {
		var err error
		if payload, err = json.Marshal(v); err != nil {
			return fmt.Errorf("write %v: %w", kind, err)
		}
	}
	return p.sendRaw(frame{kind: kind, payload: payload, fds: fds})
}

func (p *peer) sendRaw(f frame) error {
	b, err := appendFrame(make([]byte, 0, headerLen+len(f.payload)), f)
	if err != nil {
		return err
	}
	var oob []byte
	if len(f.fds) > 0 {
		oob = unix.UnixRights(f.fds...)
	}
	if _, _, err = p.conn.WriteMsgUnix(b, oob, nil); err != nil {
		err = p.lost("write "+f.kind.String(), err)
		if errors.Is(err, errPeerGone) {
			// It may have said why, before it closed.
			if why := p.findRefusal(); why != nil {
				return why
			}
		}
		return err
	}
	return nil
}

// receive reads the next frame that is known here. Its payload is valid until
// the next call; its descriptors are the caller's. errPeerGone: nothing comes any
// more.
func (p *peer) receive() (frame, error) {
	p.reading.Lock()
	defer p.reading.Unlock()
	if len(p.early) > 0 {
		first := p.early[0]
		p.early = p.early[1:]
		return first.frame, first.err
	}
	for {
		n, oobn, flags, _, err := p.conn.ReadMsgUnix(p.in, p.oob)
		if errors.Is(err, unix.ECONNRESET) {
			// It comes before what is still queued (skb_recv_datagram in
			// net/core/datagram.c), once.
			continue
		}
		if err == nil && n == 0 && oobn == 0 {
			err = io.EOF
		}
		if err != nil {
			return frame{}, p.lost("read", err)
		}
		if f, known, err := parsePacket(p.in[:n], p.oob[:oobn], flags); known || err != nil {
			return f, err
		}
	}
}

// findRefusal looks for why the other process closed the connection. What it
// reads stays for receive. It does not wait, and does not look while somebody
// receives: that one finds everything.
func (p *peer) findRefusal() error {
	if !p.reading.TryLock() {
		return nil
	}
	defer p.reading.Unlock()
	in, oob := packetBuffers() // whoever received last may still read the others
	for {
		var n, oobn, flags int
		err := rawconn.Of(p.conn, func(fd int) (err error) {
			n, oobn, flags, _, err = unix.Recvmsg(fd, in, oob, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
			return err
		})
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ECONNRESET) { // see receive
			continue
		}
		if err != nil || n == 0 && oobn == 0 {
			break
		}
		f, known, err := parsePacket(in[:n], oob[:oobn], flags)
		if known || err != nil {
			f.payload = slices.Clone(f.payload)
			p.early = append(p.early, packet{f, err})
		}
	}
	for _, early := range p.early {
		if early.err == nil {
			if why := refused(early.frame); why != nil {
				return why
			}
		}
	}
	return nil
}

// parsePacket reads a frame and its descriptors. Those of a frame that is not
// known or has no use for them are closed. The payload is a part of b.
func parsePacket(b, oob []byte, flags int) (f frame, known bool, err error) {
	fds, err := parseRights(oob)
	if err == nil && flags&unix.MSG_CTRUNC != 0 {
		// unix(7): descriptors over RLIMIT_NOFILE are dropped in silence.
		err = fmt.Errorf("descriptors of the peer were dropped: this process has too many open; raise RLIMIT_NOFILE (%w)", unix.EMFILE)
	}
	if err == nil && flags&unix.MSG_TRUNC != 0 {
		err = fmt.Errorf("%w: a frame of more than %d bytes", ErrProtocol, maxPayload)
	}
	if err == nil {
		f, err = parseFrame(b)
	}
	if err != nil {
		closeAll(fds)
		return frame{}, false, err
	}
	_, known = frameNames[f.kind]
	if !known || f.kind != frameManifest {
		closeAll(fds)
		fds = nil
	}
	f.fds = fds
	return f, known, nil
}

// want receives a frame of the type. A refusal becomes a RefusedError.
func (p *peer) want(kind frameType) (frame, error) {
	f, err := p.receive()
	if err != nil {
		return frame{}, fmt.Errorf("wait for %v: %w", kind, err)
	}
	if f.kind == kind {
		return f, nil
	}
	closeAll(f.fds)
	if why := refused(f); why != nil {
		return frame{}, why
	}
	return frame{}, fmt.Errorf("%w: %v came, %v was due", ErrProtocol, f.kind, kind)
}

// refused is what a REFUSE or ROLLBACK says, nil of other frames.
func refused(f frame) error {
	switch f.kind {
	case frameRefuse:
		r, err := decode[refusal](f)
		if err != nil {
			return err
		}
		return r.err()
	case frameRollback:
		r, _ := decode[refusal](f)
		return fmt.Errorf("%w: %s", ErrRolledBack, r.Reason)
	}
	return nil
}

// wantJSON is want for a frame with a payload.
func wantJSON[T any](p *peer, kind frameType) (v T, err error) {
	f, err := p.want(kind)
	if err != nil {
		return v, err
	}
	closeAll(f.fds)
	return decode[T](f)
}

// limit bounds everything that is sent and received from now on, but for a last
// word: for d, and while ctx lasts. The returned function ends that.
func (p *peer) limit(ctx context.Context, d time.Duration) (done func()) {
	over := false // under limits
	set := func(t time.Time) {
		if p.parting {
			_ = p.conn.SetReadDeadline(t)
		} else {
			_ = p.conn.SetDeadline(t)
		}
	}
	p.limits.Lock()
	defer p.limits.Unlock()
	set(time.Now().Add(d))
	stop := context.AfterFunc(ctx, func() {
		p.limits.Lock()
		defer p.limits.Unlock()
		if !over {
			set(time.Unix(1, 0))
		}
	})
	return func() {
		stop()
		p.limits.Lock()
		defer p.limits.Unlock()
		over = true
		set(time.Time{})
	}
}

// part says the last word, for which there is a second, whatever other limits
// there are.
func (p *peer) part(kind frameType, why refusal) {
	p.limits.Lock()
	p.parting = true
	_ = p.conn.SetWriteDeadline(time.Now().Add(time.Second))
	p.limits.Unlock()
	_ = p.send(kind, why)
}

// refuse says why it ends here.
func (p *peer) refuse(err error) { p.part(frameRefuse, refusalOf(err)) }

// lost words an error of the connection.
func (p *peer) lost(what string, err error) error {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%s: %w", what, os.ErrDeadlineExceeded)
	case errors.Is(err, io.EOF), errors.Is(err, unix.EPIPE), errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.ENOTCONN):
		return fmt.Errorf("%s: %w", what, errPeerGone)
	case errors.Is(err, unix.ETOOMANYREFS):
		// unix(7): more descriptors in flight than RLIMIT_NOFILE allows.
		return fmt.Errorf("%s: too many descriptors are on their way; raise RLIMIT_NOFILE: %w", what, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

func (p *peer) close() {
	_ = p.conn.Close()
	// Whoever receives returns now.
	p.reading.Lock()
	for _, early := range p.early {
		closeAll(early.fds)
	}
	p.early = nil
	p.reading.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pidfd >= 0 {
		_ = unix.Close(p.pidfd)
		p.pidfd = -1
	}
}

// parseRights returns the descriptors in control messages. Go has asked for
// MSG_CMSG_CLOEXEC.
func parseRights(oob []byte) (fds []int, err error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("%w: control message: %w", ErrProtocol, err)
	}
	for _, m := range messages {
		got, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue // of another type
		}
		fds = append(fds, got...)
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// duplicate returns a duplicate of a connection's descriptor, close-on-exec. It
// is the same open file: its O_NONBLOCK stays as it is.
func duplicate(c syscall.Conn) (fd int, err error) {
	fd = -1
	err = rawconn.Of(c, func(old int) (err error) {
		fd, err = unix.FcntlInt(uintptr(old), unix.F_DUPFD_CLOEXEC, 0)
		return err
	})
	return fd, err
}
