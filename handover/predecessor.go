// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Upgrade starts a successor with Options.Command and sees it through: until it
// serves and has stood its probation. Then Superseded is closed and the error is
// nil. With an error this process serves as before.
//
// The error is ErrNotActive when this process does not serve, ErrUpgrading when
// another upgrade is under way or this process is in its own probation, and
// ErrTooMany at the limit of generations; Retryable tells whether to try again.
// When ctx is done the upgrade is aborted.
func (h *Handover) Upgrade(ctx context.Context) error {
	err := h.upgrade(ctx)
	if err != nil {
		err = fmt.Errorf("upgrade: %w", err)
		if !errors.Is(err, ErrNotActive) {
			h.noUpgrade(err)
		}
	}
	return err
}

func (h *Handover) upgrade(ctx context.Context) (err error) {
	seen := false
	defer func() {
		// A manager that asked for it (Type=notify-reload) waits for both words.
		switch {
		case err == nil, seen, errors.Is(err, ErrNotActive), errors.Is(err, ErrClosed):
		case errors.Is(err, ErrUpgrading):
			h.answerReload()
		default:
			h.tellManager(h.manager.Reloading)
			h.tellFailure()
		}
	}()
	release, err := h.beginUpgrade()
	if err != nil {
		return err
	}
	defer release()
	ctx, cancel := h.untilClosed(ctx, "the predecessor stops")
	defer cancel()
	ours, theirs, err := socketPair()
	if err != nil {
		return err
	}
	p, err := newPeer(ours)
	if err != nil {
		return errors.Join(err, ours.Close(), theirs.Close())
	}
	child, err := h.startChild(theirs)
	if err = errors.Join(err, theirs.Close()); err != nil {
		p.close()
		return err
	}
	h.log.Info("started a successor", "pid", child.pid(), "command", child.cmd.Path)
	seen = true
	err = h.see(ctx, p, nil, child)
	if err != nil {
		return child.explain(err)
	}
	return nil
}

// beginUpgrade makes this the only upgrade of the process until release.
func (h *Handover) beginUpgrade() (release func(), err error) {
	if !h.busy.TryLock() {
		return nil, ErrUpgrading
	}
	defer func() {
		if err != nil {
			h.busy.Unlock()
		}
	}()
	h.alive()
	h.mu.Lock()
	defer h.mu.Unlock()
	older := h.older
	switch {
	case h.phase == phaseClosed:
		return nil, ErrClosed
	case h.phase != phaseActive:
		return nil, fmt.Errorf("%w: this one is %v", ErrNotActive, h.phase)
	case h.probation:
		return nil, fmt.Errorf("%w: this process is in its probation", ErrUpgrading)
	case len(older)+2 > h.opt.MaxGenerations:
		list := make([]string, len(older))
		for i, l := range older {
			list[i] = fmt.Sprintf("generation %d (pid %d)", l.Generation, l.PID)
		}
		what := "wait, or stop one"
		if h.opt.AtLimit == Hurry {
			oldest := slices.MinFunc(older, func(a, b *lifeline) int { return a.Generation - b.Generation })
			oldest.hurry()
			what = fmt.Sprintf("generation %d was asked to end its drain", oldest.Generation)
		}
		return nil, fmt.Errorf("%w: %d with this one, and MaxGenerations is %d; still draining: %s; %s",
			ErrTooMany, len(older)+1, h.opt.MaxGenerations, strings.Join(list, ", "), what)
	}
	h.upgrading = true
	return func() {
		h.mu.Lock()
		h.upgrading = false
		h.busy.Unlock() // under mu: who sees that there is none can begin one
		h.mu.Unlock()
		h.settleReload()
	}, nil
}

// see brings a successor through the protocol. When it returns an error this
// process serves as before; else it is superseded.
//
// theirs is the successor's HELLO, nil when it was not read yet.
func (h *Handover) see(ctx context.Context, p *peer, theirs *hello, child *child) (err error) {
	kept := false // the connection
	defer func() {
		if !kept {
			p.close()
		}
	}()
	h.tellManager(h.manager.Reloading)
	own, err := h.prepare(ctx, p, theirs)
	if err != nil {
		if own.held != nil {
			_ = own.held.Close()
		}
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		} else if errors.Is(err, os.ErrDeadlineExceeded) {
			err = fmt.Errorf("not ready after %v: %w", h.opt.UpgradeTimeout, err)
		}
		if !errors.Is(err, errPeerGone) && !errors.As(err, new(*RefusedError)) {
			p.refuse(err)
		}
		h.tellFailure()
		h.endChild(child, 2*time.Second)
		return err
	}

	// The critical step. From here on nothing is accepted here, and until the
	// successor says COMMITTED nothing is there; connections queue.
	h.pause()
	err = h.letGo(ctx, p, own)
	if err == nil {
		h.keep(own.held)
		h.finish(ErrSuperseded, &Peer{Name: own.successor.Name, Generation: h.generation + 1, PID: own.successor.PID, Build: own.successor.Build})
		h.log.Info("superseded", "successor", own.successor.PID, "successor_build", own.successor.Build)
		return nil
	}
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	kept = true
	h.takeBack(p, err)
	_ = own.held.Close()
	// It may have connections by now, and drains; unless it hangs.
	h.endChild(child, h.opt.UpgradeTimeout)
	return err
}

// offer is what one upgrade made.
type offer struct {
	held      *net.UnixConn // this process's lifeline
	successor hello
}

// prepare does everything up to READY.
func (h *Handover) prepare(ctx context.Context, p *peer, theirs *hello) (own offer, err error) {
	defer p.limit(ctx, h.opt.UpgradeTimeout)()
	if theirs != nil {
		own.successor = *theirs
	} else {
		if err := h.opt.step("wait-hello", p); err != nil {
			return own, err
		}
		if own.successor, err = wantJSON[hello](p, frameHello); err != nil {
			return own, err
		}
	}
	s := own.successor
	version := min(maxVersion, s.MaxVersion)
	if version < max(minVersion, s.MinVersion) {
		return own, fmt.Errorf("%w: the successor (build %s) speaks versions %d to %d, this process (build %s) %d to %d; stop this one and start the other", ErrProtocol, s.Build, s.MinVersion, s.MaxVersion, h.opt.Build, minVersion, maxVersion)
	}
	h.mu.Lock()
	write := h.write
	h.mu.Unlock()
	h.log.Info("upgrading", "successor", s.PID, "successor_build", s.Build)
	err = p.send(frameHello, hello{
		MinVersion: version, MaxVersion: version, Name: h.opt.Name, Build: h.opt.Build, PID: os.Getpid(),
		Generation: h.generation, State: write != nil, Probation: h.opt.Probation.Milliseconds(),
	})
	if err != nil {
		return own, err
	}
	if err := h.opt.step("sent-hello", p); err != nil {
		return own, err
	}
	if own.held, err = h.sendManifest(p); err != nil {
		return own, err
	}
	if err := h.opt.step("sent-manifest", p); err != nil {
		return own, err
	}
	if _, err := p.want(frameAccepted); err != nil {
		return own, err
	}
	if write != nil {
		if err := h.sendState(ctx, p, write); err != nil {
			return own, err
		}
	}
	if err := h.opt.step("sent-state", p); err != nil {
		return own, err
	}
	_, err = p.want(frameReady)
	if err != nil {
		return own, err
	}
	return own, h.opt.step("got-ready", p)
}

// sendManifest gives the successor duplicates of everything that has a name,
// and the lifelines of the processes before it.
func (h *Handover) sendManifest(p *peer) (held *net.UnixConn, err error) {
	var entries []entry
	var fds []int
	defer func() {
		closeAll(fds)
		if err != nil && held != nil {
			_ = held.Close()
			held = nil
		}
	}()
	add := func(e entry, fd int) error {
		fds = append(fds, fd)
		entries = append(entries, e)
		c, err := cookieOf(fd)
		entries[len(entries)-1].Cookie = c
		return err
	}
	held, given, err := h.ownLifeline()
	if err != nil {
		return nil, err
	}
	if err := add(entry{Role: roleLifeline, Generation: h.generation, PID: os.Getpid(), Build: h.opt.Build}, given); err != nil {
		return held, err
	}
	h.alive()
	h.mu.Lock()
	// Under the lock: a Status at the same time may close them.
	for _, l := range h.older {
		fd, err := unix.FcntlInt(uintptr(l.fd), unix.F_DUPFD_CLOEXEC, 0)
		err = os.NewSyscallError("fcntl", err)
		if err == nil {
			err = add(entry{Role: roleLifeline, Generation: l.Generation, PID: l.PID, Build: l.Build}, fd)
		}
		if err != nil {
			h.mu.Unlock()
			return held, err
		}
	}
	items := make([]*item, 0, len(h.items)+1)
	for _, it := range h.items {
		items = append(items, it)
	}
	if h.control != nil {
		items = append(items, &item{entry: entry{Role: roleControl, Name: "control", Network: "unixpacket", Address: h.opt.Socket}, conn: h.control})
	}
	h.mu.Unlock()
	slices.SortFunc(items, func(a, b *item) int { return strings.Compare(a.Name, b.Name) })
	for _, it := range items {
		fd, err := duplicate(it.conn)
		if err != nil {
			if it.closed() {
				continue // by the application
			}
			return held, fmt.Errorf("duplicate %s %q: %w", it.Role, it.Name, err)
		}
		if err := add(it.entry, fd); err != nil {
			return held, fmt.Errorf("%s %q: %w", it.Role, it.Name, err)
		}
	}
	for start := 0; start < len(entries); start += maxFrameFDs {
		end := min(start+maxFrameFDs, len(entries))
		m := manifest{Entries: entries[start:end], Last: end == len(entries)}
		if err := p.send(frameManifest, m, fds[start:end]...); err != nil {
			return held, err
		}
	}
	return held, nil
}

// cookieOf is a socket's cookie, 0 of a file.
func cookieOf(fd int) (uint64, error) {
	c, err := cookie(fd)
	if errors.Is(err, unix.ENOTSOCK) {
		return 0, nil
	}
	return c, err
}

// sendState runs the application's function. It writes into frames.
func (h *Handover) sendState(ctx context.Context, p *peer, write func(context.Context, io.Writer) error) error {
	w := &stateWriter{p: p}
	err := write(ctx, w)
	if err == nil {
		err = w.flush()
	}
	if w.err != nil {
		return w.err // of the connection
	}
	end := stateEnd{Length: w.sum.n, CRC32C: w.sum.crc}
	if err != nil {
		end.Error = err.Error()
		_ = p.send(frameStateEnd, end)
		return fmt.Errorf("write state: %w", err)
	}
	return p.send(frameStateEnd, end)
}

type stateWriter struct {
	p   *peer
	buf []byte
	sum checksum
	err error
}

func (w *stateWriter) Write(b []byte) (n int, err error) {
	for len(b) > 0 && w.err == nil {
		if w.buf == nil {
			w.buf = make([]byte, 0, maxPayload)
		}
		m := copy(w.buf[len(w.buf):cap(w.buf)], b)
		w.buf = w.buf[:len(w.buf)+m]
		b = b[m:]
		n += m
		if len(w.buf) == cap(w.buf) {
			_ = w.flush()
		}
	}
	return n, w.err
}

func (w *stateWriter) flush() error {
	if w.err == nil && len(w.buf) > 0 {
		w.sum.add(w.buf)
		w.err = w.p.sendRaw(frame{kind: frameState, payload: w.buf})
		w.buf = w.buf[:0]
	}
	return w.err
}

// letGo does what comes after READY: commit and probation. With an error this
// process takes back.
func (h *Handover) letGo(ctx context.Context, p *peer, own offer) error {
	if err := h.awaitLease(ctx); err != nil {
		return err
	}
	done := p.limit(ctx, h.opt.CommitTimeout)
	err := h.opt.step("paused", p)
	if err == nil {
		err = p.send(frameCommit, nil)
	}
	if err == nil {
		err = h.opt.step("sent-commit", p)
	}
	if err == nil {
		_, err = p.want(frameCommitted)
	}
	// The successor serves when it knows that this process knows.
	if err == nil {
		err = p.ping()
	}
	done()
	if err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	if err := h.opt.step("got-committed", p); err != nil {
		return err
	}
	if err := h.watchProbation(ctx, p); err != nil {
		return fmt.Errorf("probation of the successor: %w", err)
	}
	if err := h.opt.step("probation-over", p); err != nil {
		return err
	}

	// The manager has to know its new main process before this one may leave.
	if h.main {
		if err := h.handMain(own.successor.PID); err != nil {
			h.log.Warn("the service manager did not confirm the successor", "error", err)
		}
	}
	done = p.limit(context.Background(), h.opt.CommitTimeout)
	defer done()
	h.words.Lock()
	var last any
	if h.reload {
		last = final{Reload: true}
	}
	h.words.Unlock()
	err = p.send(frameFinal, last)
	if err != nil {
		return err
	}
	h.mu.Lock()
	h.main = false
	h.mu.Unlock()
	return nil
}

// handMain makes the successor the service's main process, and waits until the
// service manager knows.
func (h *Handover) handMain(pid int) error {
	h.words.Lock()
	err := h.manager.Send("MAINPID="+strconv.Itoa(pid), "READY=1")
	h.owed, h.away = false, true
	h.words.Unlock()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return h.manager.Barrier(ctx)
}

// watchProbation returns nil when the successor lived and answers at the end.
func (h *Handover) watchProbation(ctx context.Context, p *peer) error {
	done := p.limit(ctx, h.opt.Probation)
	f, err := p.receive()
	done()
	switch {
	case context.Cause(ctx) != nil:
		// This process is stopped: the successor is to stay.
		if errors.Is(context.Cause(ctx), ErrClosed) {
			return nil
		}
		return context.Cause(ctx)
	case errors.Is(err, os.ErrDeadlineExceeded):
	case err != nil:
		return err
	case f.kind == frameRefuse:
		r, err := decode[refusal](f)
		if err != nil {
			return err
		}
		return r.err()
	default:
		closeAll(f.fds)
		return fmt.Errorf("%w: %v came", ErrProtocol, f.kind)
	}
	defer p.limit(ctx, max(h.opt.Probation, 2*time.Second))()
	return p.ping()
}

// ping asks whether the other process is there.
func (p *peer) ping() error {
	if err := p.send(framePing, nil); err != nil {
		return err
	}
	_, err := p.want(framePong)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("it does not answer: %w", err)
	}
	return err
}

// takeBack makes this process the one that serves, again.
func (h *Handover) takeBack(p *peer, reason error) {
	// First the word, then the deed: a successor that is only slow must know.
	p.part(frameRollback, refusalOf(reason))
	h.mu.Lock()
	closing := h.phase == phaseClosed
	h.mu.Unlock()
	if closing {
		p.close()
		return
	}
	h.awaitReturn(p)
	ctx, cancel := context.WithTimeout(context.Background(), h.opt.CommitTimeout)
	defer cancel()
	if err := h.runActivate(ctx); err != nil {
		h.log.Error("taking back: not all flows come here again", "error", err)
	}
	if h.pid != nil {
		if err := h.pid.Rewrite(); err != nil {
			h.log.Warn("taking back: the PID file still names the successor", "error", err)
		}
	}
	h.serve()
	h.tellManager(func() error {
		h.away = false
		return h.sayReady("MAINPID="+strconv.Itoa(os.Getpid()), "READY=1", "STATUS="+h.statusLine()+"; the last upgrade failed")
	})
	h.log.Warn("took back from the successor; serving", "reason", reason)
}

// noUpgrade logs why there was none. Who may try again is no error.
func (h *Handover) noUpgrade(err error, attrs ...any) {
	level := slog.LevelError
	if Retryable(err) {
		level = slog.LevelInfo
	}
	h.log.Log(h.ctx, level, "no upgrade; serving as before", append(attrs, "error", err)...)
}

// tellFailure ends what Reloading began.
func (h *Handover) tellFailure() {
	h.tellManager(func() error { return h.sayReady("READY=1", "STATUS="+h.statusLine()+"; the last upgrade failed") })
}

// answerReload answers a reload that comes during another upgrade, or in this
// process's probation: a manager that asked for it takes no RELOADING that is
// older than its signal (Type=notify-reload), and waits for a READY after it.
func (h *Handover) answerReload() {
	h.words.Lock()
	defer h.words.Unlock()
	h.mu.Lock()
	main, upgrading := h.main, h.upgrading
	h.mu.Unlock()
	if !main || h.away {
		h.reload = true // see speak, takeBack and FINAL
		return
	}
	err := h.manager.Reloading()
	if h.owed = true; !upgrading {
		err = errors.Join(err, h.sayReady("READY=1", "STATUS="+h.statusLine()))
	}
	if err != nil {
		h.log.Warn("the service manager was not told", "error", err)
	}
}

// settleReload says READY after an upgrade that was over, as far as the manager
// knows, before a reload came.
func (h *Handover) settleReload() {
	h.tellManager(func() error {
		if !h.owed {
			return nil
		}
		return h.sayReady("READY=1", "STATUS="+h.statusLine())
	})
}

// sayReady sends lines with READY, and RELOADING before when that is due. Its
// caller holds words.
func (h *Handover) sayReady(lines ...string) error {
	var err error
	if h.reload {
		err = h.manager.Reloading()
	}
	h.reload, h.owed = false, false
	return errors.Join(err, h.manager.Send(lines...))
}

// tellManager says something to the service manager, which is told by the main
// process only.
func (h *Handover) tellManager(say func() error) {
	h.words.Lock()
	defer h.words.Unlock()
	h.mu.Lock()
	main := h.main
	h.mu.Unlock()
	if !main {
		return
	}
	if err := say(); err != nil {
		h.log.Warn("the service manager was not told", "error", err)
	}
}

func socketPair() (ours *net.UnixConn, theirs *os.File, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	f := os.NewFile(uintptr(pair[0]), "successor")
	theirs = os.NewFile(uintptr(pair[1]), "predecessor")
	c, err := net.FileConn(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	return c.(*net.UnixConn), theirs, nil
}

// child is a successor that this process started; nil of one that somebody else
// did.
type child struct {
	cmd    *exec.Cmd
	number int
	exited chan struct{}
}

// pid does not change with Process.Release.
func (c *child) pid() int { return c.number }

// startChild starts Options.Command, which inherits standard input, output and
// error, and one end of the connection.
func (h *Handover) startChild(end *os.File) (*child, error) {
	line := h.opt.Command
	path := line[0]
	if strings.ContainsRune(path, '/') {
		if !filepath.IsAbs(path) {
			path = filepath.Join(h.opt.Dir, path)
		}
		info, err := os.Stat(path)
		switch {
		case errors.Is(err, os.ErrNotExist):
			return nil, fmt.Errorf("start successor: %s is not there any more (this process has build %s); put the new executable there and try again: %w", path, h.opt.Build, err)
		case err != nil:
			return nil, fmt.Errorf("start successor: %w", err)
		case info.IsDir() || info.Mode()&0o111 == 0:
			return nil, fmt.Errorf("start successor: %s is not executable (%v)", path, info.Mode())
		}
	} else {
		found, err := exec.LookPath(path)
		if err != nil {
			return nil, fmt.Errorf("start successor: %w", err)
		}
		path = found
	}
	cmd := &exec.Cmd{Path: path, Args: line, Dir: h.opt.Dir, Stdin: os.Stdin, Stdout: h.opt.Stdout, Stderr: h.opt.Stderr, ExtraFiles: []*os.File{end}}
	for _, v := range h.opt.Environ() {
		switch name, _, _ := strings.Cut(v, "="); name {
		case envFD, "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES":
		default:
			cmd.Env = append(cmd.Env, v)
		}
	}
	cmd.Env = append(cmd.Env, envFD+"="+strconv.Itoa(3))
	// A service manager looks after its own children only: it takes the
	// successor's exit, and its grace at a stop, from waitid(2). So the successor
	// becomes a child of this process's parent (clone(2)); PID 1 cannot do that.
	adopted := h.manager != nil && os.Getpid() != 1
	pidfd := -1
	if adopted {
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_PARENT, PidFD: &pidfd}
	}
	if err := cmd.Start(); err != nil {
		if errors.Is(err, unix.ETXTBSY) {
			err = fmt.Errorf("%w: somebody is writing the file; put a new one in its place by rename", err)
		}
		return nil, fmt.Errorf("start successor: %w", err)
	}
	c := &child{cmd: cmd, number: cmd.Process.Pid, exited: make(chan struct{})}
	// The goroutine ends with the child, which may outlive this process.
	if !adopted {
		go func() {
			_ = cmd.Wait()
			close(c.exited)
		}()
		return c, nil
	}
	if err := unix.SetNonblock(pidfd, true); err != nil {
		return nil, errors.Join(os.NewSyscallError("fcntl", err), unix.Close(pidfd))
	}
	go func() {
		f := os.NewFile(uintptr(pidfd), "successor")
		_ = rawRead(f, func(fd int) bool {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			return n > 0 || err != nil && err != unix.EINTR
		})
		_ = f.Close()
		_ = cmd.Process.Release()
		close(c.exited)
	}()
	return c, nil
}

// rawRead waits until the file is readable and f is true.
func rawRead(file *os.File, f func(fd int) bool) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Read(func(fd uintptr) bool { return f(int(fd)) })
}

// endChild makes sure that the child ends: it was told to, and is killed when it
// takes too long. A process that stops itself waits for that, and not long.
func (h *Handover) endChild(c *child, patience time.Duration) {
	if c == nil {
		return
	}
	end := func() {
		timer := time.NewTimer(patience)
		defer timer.Stop()
		closing := h.ctx.Done()
		for {
			select {
			case <-c.exited:
				return
			case <-closing:
				closing = nil
				timer.Reset(min(patience, time.Second))
			case <-timer.C:
				_ = c.cmd.Process.Kill()
				return
			}
		}
	}
	h.wg.Go(end) // Close waits
}

// explain adds how the child ended.
func (c *child) explain(err error) error {
	if c == nil {
		return err
	}
	if errors.Is(err, errPeerGone) || errors.As(err, new(*RefusedError)) {
		// It ends about now.
		select {
		case <-c.exited:
		case <-time.After(time.Second):
		}
	}
	select {
	case <-c.exited:
		status := c.cmd.ProcessState
		if status == nil {
			// Its exit status is its parent's, the service manager's.
			return fmt.Errorf("successor %d ended: %w", c.pid(), err)
		}
		if w, ok := status.Sys().(syscall.WaitStatus); ok && w.Exited() && w.ExitStatus() == 0 {
			return fmt.Errorf("successor %d ended (%v) without being superseded: %w", c.pid(), status, err)
		}
		return fmt.Errorf("successor %d ended (%v): %w", c.pid(), status, err)
	default:
		return fmt.Errorf("successor %d: %w", c.pid(), err)
	}
}
