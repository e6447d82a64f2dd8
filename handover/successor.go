// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/pidfile"
)

// envFD is the variable that names the descriptor of the connection with the
// process that started this one, as "FD".
const envFD = "INSTAR_HANDOVER_FD"

// execConn returns the connection with the process that started this one, nil
// when that was no predecessor.
func (h *Handover) execConn() (*peer, error) {
	text := h.opt.getenv(envFD)
	if text == "" {
		return nil, nil
	}
	// Our own children are not the successor's.
	if err := h.opt.unsetenv(envFD); err != nil {
		return nil, err
	}
	fd, err := strconv.Atoi(text)
	if err != nil || fd < 3 {
		return nil, fmt.Errorf("read %s=%q: it has to be a descriptor's number from 3 on; unset it", envFD, text)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
		return nil, fmt.Errorf("read %s=%q: descriptor is not open (%w); unset it, or pass the descriptor on to this process", envFD, text, err)
	}
	// net.FileConn asks for nothing of the kind, and a stray variable may name
	// any descriptor.
	f := os.NewFile(uintptr(fd), "predecessor")
	c, err := net.FileConn(f)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("read %s=%q: %w", envFD, text, err), f.Close())
	}
	if err := f.Close(); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("read %s=%q: it is no Unix socket", envFD, text), c.Close())
	}
	p, err := newPeer(conn)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("read %s=%q: %w", envFD, text, err), conn.Close())
	}
	return p, nil
}

// openSocket takes over from the process that listens at the socket, or listens
// there when nobody does.
func (h *Handover) openSocket(ctx context.Context) error {
	for {
		conn, err := h.dialOrBind(ctx)
		if err != nil {
			return fmt.Errorf("open %s: %w", h.opt.Socket, err)
		}
		if conn == nil {
			return nil
		}
		err = conn.check(h.opt.AllowUIDs)
		if err != nil {
			conn.close()
			return fmt.Errorf("take over at %s: %w", h.opt.Socket, err)
		}
		if err := h.meet(ctx, conn); err != nil {
			return fmt.Errorf("take over at %s: %w", h.opt.Socket, err)
		}
		if h.from != nil || h.control != nil {
			return nil
		}
		h.log.Info("the predecessor died; starting without it")
	}
}

// dialOrBind returns a connection with the process that listens at the socket,
// or nil when this process listens there now.
func (h *Handover) dialOrBind(ctx context.Context) (p *peer, err error) {
	path := h.opt.Socket
	dial := func() (*peer, error) {
		c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
		if err != nil {
			return nil, err
		}
		p, err := newPeer(c)
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		return p, nil
	}
	open := func() error {
		if p, err = dial(); err == nil {
			return nil
		}
		switch {
		case errors.Is(err, unix.ENOENT):
		case errors.Is(err, unix.ECONNREFUSED):
			if path[0] != '@' {
				// Its owner died; or it is no socket at all.
				if err := removeStale(path, "unixpacket"); err != nil {
					return err
				}
			}
		case errors.Is(err, unix.EPROTOTYPE), errors.Is(err, unix.ENOTSOCK):
			return fmt.Errorf("it is not the control socket of a server (%w); choose another path", err)
		default:
			return err
		}
		return h.bindControl()
	}
	if path[0] == '@' {
		err := open()
		for range 100 {
			// No lock: another process was faster, and listens in a moment.
			if !errors.Is(err, unix.EADDRINUSE) {
				break
			}
			select {
			case <-time.After(10 * time.Millisecond):
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			err = open()
		}
		return p, err
	}
	err = underLock(path, open)
	return p, err
}

// bindControl listens at the socket; the folder is locked.
func (h *Handover) bindControl() error {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: h.opt.Socket, Net: "unixpacket"})
	if err != nil {
		return err
	}
	l.SetUnlinkOnClose(false)
	if h.opt.Socket[0] != '@' {
		if err := os.Chmod(h.opt.Socket, 0o600); err != nil {
			return errors.Join(err, l.Close())
		}
	}
	h.setControl(l)
	h.own(h.opt.Socket)
	h.mine[h.opt.Socket] = true
	return nil
}

func (h *Handover) setControl(l acceptor) {
	h.control = newListener(l, l.Addr())
	h.wg.Go(h.answerControl)
}

// meet gets everything but the state from the predecessor. When it returns
// without an error and from is nil, the predecessor died.
func (h *Handover) meet(ctx context.Context, p *peer) (err error) {
	defer p.limit(ctx, h.opt.UpgradeTimeout)()
	p.watch()
	complete := false
	started := !h.main // by exec
	h.main = false     // until the predecessor let go
	defer func() {
		switch {
		case err == nil:
		case p.dead(err):
			// What came is used only if it is all of it: the rest may be sockets
			// without which the application would bind others.
			h.log.Warn("the predecessor died during the handover; going on without it", "step", err.Error(), "descriptors", complete)
			if !complete {
				h.dropInherited()
			}
			p.close()
			err = nil
			if !complete {
				h.predecessor = nil
			}
			h.main = true
			if started && h.control == nil && h.opt.Socket != "" {
				// Whoever is first at the socket now.
				err = h.openSocket(ctx)
			}
		default:
			if ctx.Err() != nil && errors.Is(err, os.ErrDeadlineExceeded) {
				err = ctx.Err()
			}
			if !errors.As(err, new(*RefusedError)) && !errors.Is(err, errPeerGone) {
				p.refuse(err)
			}
			if errors.Is(err, os.ErrDeadlineExceeded) {
				err = fmt.Errorf("the predecessor, process %d, does not answer (%w); it goes on serving if it can. Stop it and start again if it hangs", p.cred.Pid, err)
			}
			p.close()
			h.dropInherited()
		}
	}()
	if err := h.opt.step("hello", p); err != nil {
		return err
	}
	err = p.send(frameHello, hello{MinVersion: minVersion, MaxVersion: maxVersion, Name: h.opt.Name, Build: h.opt.Build, PID: os.Getpid()})
	if err != nil && !errors.Is(err, errPeerGone) {
		return err
	}
	theirs, err := wantJSON[hello](p, frameHello) // a refusal may be there although it is gone
	if err != nil {
		return err
	}
	if theirs.MinVersion != theirs.MaxVersion || theirs.MinVersion < minVersion || theirs.MinVersion > maxVersion {
		return fmt.Errorf("%w: the predecessor (build %s) chose version %d to %d; this build speaks %d to %d", ErrProtocol, theirs.Build, theirs.MinVersion, theirs.MaxVersion, minVersion, maxVersion)
	}
	h.generation = theirs.Generation + 1
	h.predecessor = &Peer{Name: theirs.Name, Generation: theirs.Generation, PID: theirs.PID, Build: theirs.Build}
	count := 0
	for last := false; !last; {
		f, err := p.want(frameManifest)
		if err != nil {
			return err
		}
		n := len(f.fds)
		if last, err = h.accept(f); err != nil {
			return err
		}
		count += n
		if err := h.opt.step("manifest", p); err != nil {
			return err
		}
	}
	if err := h.takeOwn(ctx); err != nil {
		return err
	}
	complete = true
	if err := p.send(frameAccepted, struct {
		Descriptors int `json:"descriptors"`
	}{count}); err != nil {
		return err
	}
	if err := h.opt.step("accepted", p); err != nil {
		return err
	}
	h.from = p
	if theirs.State {
		h.state = &stateReader{p: p, ctx: h.ctx, timeout: h.opt.UpgradeTimeout}
	}
	h.log.Info("got descriptors from the predecessor", "count", count, "predecessor", h.predecessor.PID, "predecessor_build", theirs.Build)
	return nil
}

// accept checks the descriptors of a frame and takes them.
func (h *Handover) accept(f frame) (last bool, err error) {
	fds := f.fds
	defer func() { closeAll(fds) }() // the ones that are left
	m, err := decode[manifest](f)
	if err != nil {
		return false, err
	}
	if len(m.Entries) != len(fds) {
		return false, fmt.Errorf("%w: a manifest of %d entries with %d descriptors", ErrProtocol, len(m.Entries), len(fds))
	}
	for _, e := range m.Entries {
		i := &inherited{entry: e, fd: fds[0], source: fromPredecessor}
		if err := i.check(); err != nil {
			return false, err
		}
		if e.Role != roleControl && e.Role != roleLifeline {
			if slices.Contains(h.handed, e.Name) {
				return false, fmt.Errorf("%w: the manifest has two of the name %q; a name is of one descriptor", ErrProtocol, e.Name)
			}
			h.handed = append(h.handed, e.Name)
		}
		h.inherited = append(h.inherited, i)
		fds = fds[1:]
	}
	return m.Last, nil
}

// takeOwn takes what is the handover's own.
func (h *Handover) takeOwn(ctx context.Context) error {
	for _, i := range slices.Clone(h.inherited) {
		switch i.Role {
		case roleLifeline:
			h.older = append(h.older, &lifeline{Peer{Name: h.opt.Name, Generation: i.Generation, PID: i.PID, Build: i.Build}, i.fd})
			i.fd = -1
		case roleControl:
			if h.opt.Socket == "" || i.Address != h.opt.Socket {
				h.log.Info("the control socket is another than the predecessor's", "predecessor", i.Address, "socket", h.opt.Socket)
				h.leave(i)
				closeAll([]int{i.fd})
				break
			}
			l, err := i.listener()
			if err != nil {
				return fmt.Errorf("inherit the control socket: %w", err)
			}
			l.(*net.UnixListener).SetUnlinkOnClose(false)
			h.setControl(l)
		default:
			continue
		}
		h.inherited = slices.DeleteFunc(h.inherited, func(other *inherited) bool { return other == i })
	}
	if h.control == nil && h.opt.Socket != "" {
		// The predecessor had another, or none.
		p, err := h.dialOrBind(ctx)
		if p != nil {
			p.close()
			err = errors.New("another server listens there")
		}
		if err != nil {
			return fmt.Errorf("open %s: %w", h.opt.Socket, err)
		}
	}
	return nil
}

// leftPath is where the predecessor listens and this process will not.
type leftPath struct {
	path, network string
	at            inode
}

// leave notes the path of a Unix socket that has no use here, unless somebody
// else removes it.
func (h *Handover) leave(i *inherited) {
	if i.source != fromPredecessor || i.Role == rolePacket || !i.unlinks() || i.Address == "" || i.Address[0] == '@' {
		return
	}
	if at, ok := inodeOf(i.Address); ok {
		h.left = append(h.left, leftPath{i.Address, i.Network, at})
	}
}

// removeLeft unlinks what the predecessor left, who serves no more and will not
// take back. What somebody else listens at by now stays.
func (h *Handover) removeLeft() {
	for _, l := range h.left {
		err := underLock(l.path, func() error {
			if at, ok := inodeOf(l.path); !ok || at != l.at {
				return nil
			}
			return removeStale(l.path, l.network)
		})
		if err != nil {
			h.log.Warn("the predecessor's socket stays", "path", l.path, "error", err)
		}
	}
}

// awaitEnd waits until the predecessor, who has sent FINAL, closes the connection:
// its listeners are closed then.
func (h *Handover) awaitEnd(p *peer) {
	defer p.limit(h.ctx, h.opt.CommitTimeout)()
	for {
		f, err := p.receive()
		closeAll(f.fds)
		if err != nil && !errors.Is(err, ErrProtocol) {
			return
		}
	}
}

// dropInherited closes what came from the predecessor.
func (h *Handover) dropInherited() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.inherited = slices.DeleteFunc(h.inherited, func(i *inherited) bool {
		if i.source == fromPredecessor {
			closeAll([]int{i.fd})
			return true
		}
		return false
	})
}

// State is what the predecessor's OnHandover function wrote, nil when there is
// no predecessor or it has no such function. It comes while the predecessor
// serves. io.EOF comes only when all of it was read and its checksum is right;
// any other error means that the state is not to be used. What is not read
// until Ready is thrown away.
func (h *Handover) State() io.Reader {
	if h.state == nil {
		return nil
	}
	return h.state
}

// Ready says that this process can serve. It takes over: the predecessor stops
// accepting, the functions of OnActivate run here, and the listeners accept.
// What was inherited and not asked for is closed, its names are logged.
//
// On an error this process must not serve, and should exit: the predecessor
// serves as before. ErrRolledBack and *RefusedError tell why, ctx's error when it
// was done, or ErrClosed when Close came before the end. When the predecessor
// died, Ready goes on without it.
func (h *Handover) Ready(ctx context.Context) error {
	both, cancel := h.untilClosed(ctx, "the successor stops")
	defer cancel()
	err := h.ready(both)
	if err == nil {
		return nil
	}
	if h.ctx.Err() != nil && !errors.Is(err, ErrClosed) {
		err = fmt.Errorf("%w: %w", ErrClosed, err)
	}
	if stop := ctx.Err(); stop != nil && !errors.Is(err, stop) {
		err = fmt.Errorf("%w: %w", stop, err)
	}
	return fmt.Errorf("take over: %w", err)
}

func (h *Handover) ready(ctx context.Context) error {
	h.mu.Lock()
	if h.phase == phaseClosed || h.readying {
		defer h.mu.Unlock()
		if h.phase == phaseClosed {
			return ErrClosed
		}
		return errors.New("Ready was called before")
	}
	h.readying = true
	p := h.from
	h.mu.Unlock()

	// The state comes first in the connection.
	if h.state != nil {
		if err := h.state.discard(ctx); p.dead(err) {
			p.close()
			p = nil // State has told the application
		} else if err != nil && !errors.Is(err, errStateFailed) {
			return h.giveUp(p, err)
		}
	}
	if p != nil {
		err := h.commit(ctx, p)
		if err == nil {
			return nil
		}
		dead := p.dead(err)
		p.close()
		if !dead {
			return err
		}
	}
	if h.generation > 1 {
		h.log.Warn("the predecessor died; this process serves without its consent")
	}
	h.mu.Lock()
	h.main, h.from = true, nil
	h.mu.Unlock()
	if !h.activated {
		if err := h.runActivate(ctx); err != nil {
			return err
		}
		if err := h.writePID(); err != nil {
			return err
		}
	}
	if err := h.start(nil); err != nil {
		return err
	}
	h.speak()
	h.removeLeft()
	return nil
}

// giveUp tells the predecessor that this process does not take over.
func (h *Handover) giveUp(p *peer, err error) error {
	p.refuse(err)
	return err
}

// commit is the successor's side. Its error is errPeerGone when the predecessor
// died and this process has to go on alone.
func (h *Handover) commit(ctx context.Context, p *peer) error {
	done := p.limit(ctx, h.opt.UpgradeTimeout)
	defer func() { done() }()
	if err := h.opt.step("ready", p); err != nil {
		return h.giveUp(p, err)
	}
	if err := p.send(frameReady, nil); err != nil && !errors.Is(err, errPeerGone) {
		return h.giveUp(p, err)
	}
	if _, err := p.want(frameCommit); err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return h.giveUp(p, err)
		}
		return err
	}
	// Nobody accepts now.
	if err := h.opt.step("commit", p); err != nil {
		return h.giveUp(p, err)
	}
	done()
	ctx, cancel := context.WithTimeout(ctx, h.opt.CommitTimeout)
	defer cancel()
	done = p.limit(ctx, h.opt.CommitTimeout)
	if err := h.runActivate(ctx); err != nil {
		return h.giveUp(p, err)
	}
	if err := h.writePID(); err != nil {
		return h.giveUp(p, err)
	}
	h.activated = true
	if err := h.opt.step("activated", p); err != nil {
		return h.giveUp(p, err)
	}
	// The order matters: once the predecessor took back, it said so before it
	// closed the connection, and this process must not serve.
	if err := p.send(frameCommitted, nil); err != nil {
		_, err = p.want(frameFinal)
		return err
	}
	if err := h.opt.step("committed", p); err != nil {
		return h.giveUp(p, err)
	}
	if err := h.awaitConfirmation(ctx, p); err != nil {
		return err
	}
	done()
	done = func() {}
	return h.start(p)
}

// awaitConfirmation waits for the PING that answers COMMITTED: until then the
// predecessor may have taken back. One that hangs confirms nothing; when it goes
// on it finds the COMMITTED, or takes back and says so.
func (h *Handover) awaitConfirmation(ctx context.Context, p *peer) error {
	for {
		_, err := p.want(framePing)
		switch {
		case err == nil:
			return p.send(framePong, nil)
		case errors.Is(err, ErrProtocol):
			h.log.Warn("the predecessor speaks strangely in the commit; ignored", "error", err)
		case errors.Is(ctx.Err(), context.Canceled): // the application's
			return h.giveUp(p, ctx.Err())
		case errors.Is(err, os.ErrDeadlineExceeded):
			h.log.Warn("the predecessor does not confirm the commit; serving", "waited", h.opt.CommitTimeout)
			return nil
		default:
			return err
		}
	}
}

// start makes this process the one that serves, unless it was closed. With p it
// is in its probation.
func (h *Handover) start(p *peer) error {
	h.mu.Lock()
	if h.phase == phaseClosed {
		h.mu.Unlock()
		return ErrClosed
	}
	unused := h.inherited
	h.inherited = nil
	for _, i := range unused {
		h.leave(i)
	}
	if h.control != nil {
		h.own(h.opt.Socket)
	}
	for _, it := range h.items {
		if it.unlinks() {
			h.own(it.Address)
		}
	}
	if p != nil {
		h.probation = true
		h.wg.Add(1)
	}
	h.openListeners()
	h.mu.Unlock()
	h.dropUnused(unused)
	attrs := []any{"pid", os.Getpid()}
	if h.predecessor != nil {
		attrs = append(attrs, "predecessor", h.predecessor.PID, "predecessor_build", h.predecessor.Build)
	}
	h.log.Info("serving", attrs...)
	if p != nil {
		go func() {
			defer h.wg.Done()
			h.standProbation(p)
		}()
	}
	return nil
}

// standProbation answers the predecessor until it lets go. A predecessor that
// takes back says so before it closes the connection, and nothing else makes
// this process leave: not its death, and no frame that is not understood.
func (h *Handover) standProbation(p *peer) {
	defer p.close()
	for {
		f, err := p.receive()
		closeAll(f.fds)
		switch {
		case err == nil && f.kind == framePing:
			if err := h.opt.step("ping", p); err != nil {
				p.refuse(err)
				h.withdraw(err)
				return
			}
			_ = p.send(framePong, nil) // the next receive tells
		case err == nil && f.kind == frameFinal:
			// Of an older build it has no payload.
			last, _ := decode[final](f)
			h.endProbation(last.Reload)
			h.log.Info("the predecessor has let go")
			if len(h.left) > 0 {
				h.awaitEnd(p)
				h.removeLeft()
			}
			return
		case err == nil && f.kind == frameRollback:
			r, _ := decode[refusal](f)
			h.withdraw(r.err())
			return
		case err == nil, errors.Is(err, ErrProtocol):
			h.log.Warn("the predecessor speaks strangely in the probation; ignored", "frame", f.kind.String(), "error", err)
		case h.ctx.Err() != nil:
			return // Close
		default:
			h.log.Warn("the predecessor died in the probation; this process stays", "error", err)
			h.endProbation(false)
			if p.dead(err) {
				h.removeLeft()
			}
			return
		}
	}
}

// withdraw ends a probation that was not stood.
func (h *Handover) withdraw(reason error) {
	h.log.Error("the predecessor took back; leaving", "reason", reason)
	h.mu.Lock()
	h.probation = false
	h.mu.Unlock()
	h.finish(fmt.Errorf("%w: %w", ErrRolledBack, reason), nil)
	h.returnLease() // the predecessor waits for the end of the connection
}

// endProbation makes this process the only one. reload: the service manager
// waits for the answer to a reload.
func (h *Handover) endProbation(reload bool) {
	h.mu.Lock()
	if h.phase == phaseClosed {
		h.mu.Unlock()
		return
	}
	h.probation = false
	h.main = true
	h.mu.Unlock()
	if reload {
		h.words.Lock()
		h.reload = true
		h.words.Unlock()
	}
	h.speak()
}

// speak tells the service manager that this process is the main one.
func (h *Handover) speak() {
	h.tellManager(func() error {
		return h.sayReady("READY=1", "MAINPID="+strconv.Itoa(os.Getpid()), "STATUS="+h.statusLine())
	})
	h.storeAll()
}

func (h *Handover) statusLine() string {
	return fmt.Sprintf("generation %d, build %s, serving", h.generation, strings.Map(func(r rune) rune {
		if r < ' ' {
			return ' '
		}
		return r
	}, h.opt.Build))
}

// writePID writes the PID file.
func (h *Handover) writePID() error {
	if h.opt.PIDFile == "" {
		return nil
	}
	// A predecessor's may be there, and lives.
	f, err := pidfile.Write(h.opt.PIDFile, pidfile.Options{Replace: h.generation > 1})
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.phase == phaseClosed {
		if h.from == nil {
			return errors.Join(ErrClosed, f.Remove())
		}
		return errors.Join(ErrClosed, f.Close()) // the predecessor writes its own again
	}
	h.pid = f
	return nil
}

var errStateFailed = errors.New("the predecessor could not write its state")

// stateReader reads STATE frames.
type stateReader struct {
	p       *peer
	ctx     context.Context
	timeout time.Duration
	rest    []byte
	sum     checksum
	err     error
}

func (s *stateReader) Read(b []byte) (int, error) {
	for len(s.rest) == 0 && s.err == nil {
		s.err = s.next(s.ctx)
	}
	if len(s.rest) > 0 {
		n := copy(b, s.rest)
		s.rest = s.rest[n:]
		return n, nil
	}
	return 0, s.err
}

// discard reads the rest for nothing.
func (s *stateReader) discard(ctx context.Context) error {
	for s.err == nil {
		s.err = s.next(ctx)
	}
	s.rest = nil
	if errors.Is(s.err, io.EOF) {
		return nil
	}
	return s.err
}

// next gets a frame.
func (s *stateReader) next(ctx context.Context) error {
	defer s.p.limit(ctx, s.timeout)()
	f, err := s.p.receive()
	if err != nil {
		return fmt.Errorf("read state: %w", err)
	}
	closeAll(f.fds)
	switch f.kind {
	case frameState:
		s.rest = f.payload
		s.sum.add(f.payload)
		return nil
	case frameStateEnd:
		end, err := decode[stateEnd](f)
		if err != nil {
			return err
		}
		if end.Error != "" {
			return fmt.Errorf("%w: %s", errStateFailed, end.Error)
		}
		if end.Length != s.sum.n || end.CRC32C != s.sum.crc {
			return fmt.Errorf("%w: state of %d bytes with checksum %#x, announced were %d and %#x", ErrProtocol, s.sum.n, s.sum.crc, end.Length, end.CRC32C)
		}
		return io.EOF
	case frameRefuse:
		r, err := decode[refusal](f)
		if err != nil {
			return err
		}
		return r.err()
	}
	return fmt.Errorf("%w: %v came in the state", ErrProtocol, f.kind)
}
