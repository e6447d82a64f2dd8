// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/pidfile"
	"instar/internal/rawconn"
	"instar/internal/systemd"
)

// phase is what a process is in its succession.
type phase int

const (
	phaseStarting   phase = iota // not ready
	phaseActive                  // serves
	phasePaused                  // a successor has the commit, and may fail
	phaseSuperseded              // for good
	phaseClosed
)

func (p phase) String() string {
	return [...]string{"starting", "active", "paused", "draining", "closed"}[p]
}

// Handover is this process's place in the succession of a server's processes.
type Handover struct {
	opt     Options
	log     *slog.Logger
	manager *systemd.Notifier
	main    bool // this process may speak to the service manager

	ctx    context.Context // done when Close begins
	cancel context.CancelFunc
	wg     sync.WaitGroup // of goroutines
	busy   sync.Mutex     // held during an upgrade, by the predecessor

	mu          sync.Mutex
	phase       phase
	generation  int
	predecessor *Peer
	successor   *Peer
	from        *peer // connection with the predecessor, nil when there is none
	state       *stateReader
	items       map[string]*item
	claims      map[string]bool // names whose sockets are being made
	inherited   []*inherited
	stored      []string // names in the service manager's store, of an earlier start
	older       []*lifeline
	control     *Listener
	paths       map[string]inode // of Unix sockets, to be unlinked by the last process
	mine        map[string]bool  // those of them that this process made
	left        []leftPath       // paths of the predecessor that have no use here
	pid         *pidfile.File
	activate    []func(context.Context) error
	write       func(context.Context, io.Writer) error
	probation   bool // of this process
	upgrading   bool // busy is held by an upgrade
	readying    bool // Ready was called
	activated   bool // OnActivate ran; only Ready uses it
	lease       *Lease
	leaseAway   bool          // a successor that was rolled back may still have it
	handed      []string      // names that the predecessor handed over
	news        chan struct{} // closed when the lease or the phase changes

	words  sync.Mutex // what the service manager is told comes in order; of what follows
	owed   bool       // READY has to follow a RELOADING of answerReload
	reload bool       // a reload has to be answered by whoever speaks next
	away   bool       // the manager has the successor as its main process

	superseded chan struct{}
	cause      error
	hurried    chan struct{}
	hurryOnce  sync.Once
	signals    chan os.Signal
}

// Peer is a process of the same server.
type Peer struct {
	Name       string `json:"name,omitempty"`
	Generation int    `json:"generation"`
	PID        int    `json:"pid"`
	Build      string `json:"build,omitempty"`
}

// New is NewContext without a bound but Options.UpgradeTimeout.
func New(options Options) (*Handover, error) {
	return NewContext(context.Background(), options)
}

// NewContext finds the predecessor, if there is one, and gets from it everything
// but the state. It has a predecessor when one started this process, or when one
// listens at Options.Socket. Call it once, early: before other processes are
// started, and before what it hands over is opened.
//
// When the predecessor dies meanwhile NewContext goes on without it. When it
// refuses, the error is a *RefusedError; Retryable tells whether to try again.
// When ctx is done, or the predecessor does not answer for
// Options.UpgradeTimeout, the error wraps ctx's or os.ErrDeadlineExceeded; the
// predecessor serves on. After NewContext has returned ctx has no meaning.
func NewContext(ctx context.Context, options Options) (*Handover, error) {
	h, err := newHandover(ctx, options)
	if err != nil {
		return nil, fmt.Errorf("new handover: %w", err)
	}
	return h, nil
}

func newHandover(ctx context.Context, options Options) (*Handover, error) {
	if err := options.defaults(); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	h := &Handover{
		opt:        options,
		generation: 1,
		items:      make(map[string]*item),
		claims:     make(map[string]bool),
		paths:      make(map[string]inode),
		mine:       make(map[string]bool),
		superseded: make(chan struct{}),
		hurried:    make(chan struct{}),
		news:       make(chan struct{}),
	}
	h.log = options.Logger.With("server", options.Name, "build", options.Build)
	h.ctx, h.cancel = context.WithCancel(context.Background())
	if len(options.Signals) > 0 {
		// Early: a signal to the whole process group must not kill a successor.
		h.signals = make(chan os.Signal, 1)
		signal.Notify(h.signals, options.Signals...)
	}
	if err := h.open(ctx); err != nil {
		return nil, errors.Join(err, h.Close())
	}
	h.log = h.log.With("generation", h.generation)
	h.noteStrays()
	if h.signals != nil {
		// What came until now was for the predecessor.
		select {
		case s := <-h.signals:
			h.ignore(s, ErrNotActive)
		default:
		}
		h.wg.Go(h.obeySignals)
	}
	return h, nil
}

func (h *Handover) open(ctx context.Context) (err error) {
	if h.manager, err = systemd.NewNotifier(h.opt.getenv); err != nil {
		return err
	}
	activated, err := systemd.Inherited(h.opt.getenv, h.opt.unsetenv)
	if err != nil {
		return err
	}
	if err := h.takeActivation(activated); err != nil {
		return err
	}
	conn, err := h.execConn()
	if err != nil {
		return err
	}
	h.main = conn == nil
	if conn != nil {
		return h.meet(ctx, conn)
	}
	if h.opt.Socket == "" {
		return nil
	}
	return h.openSocket(ctx)
}

// takeActivation takes what the service manager passed: sockets of units, and
// what an earlier start stored.
func (h *Handover) takeActivation(activated []systemd.Descriptor) error {
	stored, stale, others := systemd.Latest(activated)
	for _, s := range stored {
		h.stored = append(h.stored, s.Name)
		others = append(others, systemd.Descriptor{Name: s.Role, File: s.File})
	}
	var err error
	for _, s := range stale {
		if err := errors.Join(s.File.Close(), h.manager.RemoveFD(s.Name)); err != nil {
			// The store is a cache: what stays in it is stale once more.
			h.log.Warn("stale descriptor not removed from the store", "name", s.Name, "error", err)
		}
	}
	for _, d := range others {
		fd, failed := duplicate(d.File)
		if failed = errors.Join(failed, d.File.Close()); failed != nil {
			err = errors.Join(err, fmt.Errorf("socket activation %q: %w", d.Name, failed))
			continue
		}
		i := &inherited{source: fromActivation, fd: fd}
		h.inherited = append(h.inherited, i)
		if i.entry, failed = describe(fd); failed == nil {
			i.Name = d.Name
			failed = i.check()
		}
		if failed != nil {
			err = errors.Join(err, fmt.Errorf("socket activation %q: %w", d.Name, failed))
		}
	}
	return err
}

// noteStrays names descriptors that came with the process and belong to nobody
// here. They are left alone.
func (h *Handover) noteStrays() {
	folder, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return // no /proc, no note
	}
	for _, f := range folder {
		var fd int
		if _, err := fmt.Sscan(f.Name(), &fd); err != nil || fd < 3 {
			continue
		}
		// Everything that Go opens is close-on-exec.
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		if err != nil || flags&unix.FD_CLOEXEC != 0 {
			continue
		}
		what, _ := os.Readlink("/proc/self/fd/" + f.Name())
		h.log.Info("ignored a descriptor that came with the process and is not of the handover", "fd", fd, "file", what)
	}
}

// Generation is the number of this process in the succession, from 1.
func (h *Handover) Generation() int { return h.generation }

// Predecessor is the process that this one got its descriptors from.
func (h *Handover) Predecessor() (Peer, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.predecessor == nil {
		return Peer{}, false
	}
	return *h.predecessor, true
}

// OnActivate adds a function that makes new flows come to this process, such as
// the Activate of a dispatch.Generation. It runs at the commit, and again when
// this process takes back from a successor that failed. An error at the commit
// leaves the predecessor serving. Functions run in the order they were added.
func (h *Handover) OnActivate(f func(context.Context) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.activate = append(h.activate, f)
}

// OnHandover sets the function that writes this process's state to a successor
// while this process serves. The context ends when the upgrade does. An error
// aborts the upgrade.
func (h *Handover) OnHandover(f func(ctx context.Context, w io.Writer) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.write = f
}

// Superseded is closed when this process has to leave: a successor took over for
// good, or, as Err tells, the predecessor took back. Drain then, and exit.
func (h *Handover) Superseded() <-chan struct{} { return h.superseded }

// Err is why Superseded is closed: ErrSuperseded, or ErrRolledBack with the
// reason; nil before.
func (h *Handover) Err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.cause
}

// Settled waits while a successor has the commit and is in its probation: after
// that this process is superseded, or active again. The error is ctx's.
func (h *Handover) Settled(ctx context.Context) error {
	for {
		h.mu.Lock()
		phase, changed := h.phase, h.news
		h.mu.Unlock()
		if phase != phasePaused {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Hurried is closed when a newer process asks this one to end its drain now.
func (h *Handover) Hurried() <-chan struct{} { return h.hurried }

// runActivate runs the functions of OnActivate, while ctx lasts and nobody closes.
func (h *Handover) runActivate(ctx context.Context) error {
	h.mu.Lock()
	all := slices.Clone(h.activate)
	h.mu.Unlock()
	for _, f := range all {
		if ctx.Err() != nil {
			return fmt.Errorf("activate: %w", context.Cause(ctx))
		}
		if h.isClosed() { // ctx may learn it a moment later
			return fmt.Errorf("activate: %w", ErrClosed)
		}
		if err := f(ctx); err != nil {
			return fmt.Errorf("activate: %w", err)
		}
	}
	return nil
}

func (h *Handover) isClosed() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.phase == phaseClosed
}

// serve opens all listeners.
func (h *Handover) serve() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.phase >= phaseSuperseded {
		return
	}
	h.openListeners()
}

// openListeners makes this process active. Its caller holds mu.
func (h *Handover) openListeners() {
	h.phase = phaseActive
	for _, l := range h.listeners() {
		l.resume()
	}
	h.changed()
}

// pause stops all listeners, and returns when nothing is accepted any more.
func (h *Handover) pause() {
	h.mu.Lock()
	h.phase = phasePaused
	all := h.listeners()
	h.changed()
	h.mu.Unlock()
	for _, l := range all {
		l.pause()
	}
}

// listeners' caller holds mu.
func (h *Handover) listeners() (all []*Listener) {
	if h.control != nil {
		all = append(all, h.control)
	}
	for _, it := range h.items {
		if it.listener != nil {
			all = append(all, it.listener)
		}
	}
	return all
}

// finish makes this process one that drains: its duplicates of the listening
// sockets are closed, so that they do not outlive the active process.
func (h *Handover) finish(cause error, successor *Peer) {
	h.mu.Lock()
	if h.phase >= phaseSuperseded {
		h.mu.Unlock()
		return
	}
	h.phase = phaseSuperseded
	h.cause, h.successor = cause, successor
	if h.lease != nil {
		h.lease.cancel(cause)
	}
	all := h.listeners()
	h.changed()
	close(h.superseded)
	h.mu.Unlock()
	for _, l := range all {
		_ = l.end(true)
	}
}

// own makes this process the one that unlinks a Unix socket. Its caller holds
// mu.
func (h *Handover) own(path string) {
	if path == "" || path[0] == '@' {
		return
	}
	if at, ok := inodeOf(path); ok {
		h.paths[path] = at
	}
}

// changed wakes who waits for a lease. Its caller holds mu.
func (h *Handover) changed() {
	close(h.news)
	h.news = make(chan struct{})
}

func (h *Handover) obeySignals() {
	for {
		select {
		case <-h.ctx.Done():
			return
		case s := <-h.signals:
			h.wg.Go(func() {
				if err := h.Upgrade(h.ctx); errors.Is(err, ErrNotActive) {
					h.ignore(s, err)
				}
			})
		}
	}
}

// ignore notes a signal to the whole process group that is for the active one.
func (h *Handover) ignore(s os.Signal, reason error) {
	h.log.Debug("signal ignored", "signal", s.String(), "reason", reason)
}

// Close ends this process's part. An upgrade that is under way is aborted, and
// calls of Ready, Listen and Lease end with ErrClosed: nothing begins to serve
// here any more. The last process, which has no successor, unlinks what it bound.
// Listeners are closed; packet sockets, files and connections are the caller's. A
// second call returns ErrClosed.
func (h *Handover) Close() error { return h.Abort(nil) }

// Abort is Close by a process that cannot take over, or cannot go on: while it
// has a predecessor that serves, or may take back, that one learns the reason.
func (h *Handover) Abort(reason error) error {
	h.mu.Lock()
	if h.phase == phaseClosed {
		h.mu.Unlock()
		return ErrClosed
	}
	h.mu.Unlock()
	if h.signals != nil {
		signal.Stop(h.signals)
	}
	h.cancel()
	h.busy.Lock() // an upgrade ends, now that ctx is done
	defer h.busy.Unlock()

	h.mu.Lock()
	if h.phase == phaseClosed { // by another call
		h.mu.Unlock()
		return ErrClosed
	}
	// One that is in its probation has a predecessor that takes back.
	needed := h.from != nil && (h.phase == phaseStarting || h.probation)
	last := !needed && (h.phase == phaseActive || h.phase == phaseStarting)
	// What one has made itself that never serves, or is taken back, is nobody
	// else's.
	alone := h.phase == phaseStarting || needed || errors.Is(h.cause, ErrRolledBack)
	made := maps.Clone(h.paths)
	maps.DeleteFunc(made, func(path string, _ inode) bool { return !last && (!alone || !h.mine[path]) })
	if h.opt.StoreDescriptors && h.manager != nil && h.phase == phaseActive {
		// The service manager keeps the sockets; the next start needs their paths.
		for _, it := range h.items {
			delete(made, it.Address)
		}
	}
	main := h.main
	h.phase = phaseClosed
	h.changed()
	all := h.listeners()
	from := h.from
	h.mu.Unlock()

	var err error
	if needed {
		why := refusal{"closed", "the successor stopped before it had taken over for good"}
		if reason != nil {
			why = refusalOf(reason)
		}
		from.part(frameRefuse, why)
		from.close()
	}
	for _, l := range all {
		_ = l.end(false)
	}
	for path, at := range made {
		err = errors.Join(err, unlink(path, at))
	}
	if last && main {
		err = errors.Join(err, h.manager.Stopping())
	}
	h.wg.Wait()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.pid != nil {
		if last {
			err = errors.Join(err, h.pid.Remove())
		} else {
			err = errors.Join(err, h.pid.Close())
		}
	}
	for _, i := range h.inherited {
		closeAll([]int{i.fd})
	}
	h.inherited = nil
	for _, l := range h.older {
		l.close()
	}
	return err
}

// dropUnused closes what was inherited and is not asked for.
func (h *Handover) dropUnused(unused []*inherited) {
	for _, i := range unused {
		if i.fd < 0 {
			continue // somebody tried
		}
		closeAll([]int{i.fd})
		h.log.Warn("closed a descriptor that was inherited and not asked for", "descriptor", i.String())
	}
}

// untilClosed also ends when this process is closed, with ErrClosed and why.
func (h *Handover) untilClosed(ctx context.Context, why string) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(h.ctx, func() { cancel(fmt.Errorf("%w: %s", ErrClosed, why)) })
	return ctx, func() { stop(); cancel(nil) }
}

// alive drops the older processes that are gone and returns the others.
func (h *Handover) alive() []*lifeline {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.older = slices.DeleteFunc(h.older, func(l *lifeline) bool {
		if l.gone() {
			l.close()
			return true
		}
		return false
	})
	return slices.Clone(h.older)
}

// Status describes a process for control requests.
type Status struct {
	Peer
	Phase     string `json:"phase"`
	Upgrading bool   `json:"upgrading"`
	Probation bool   `json:"probation"`
	// Successor is the process that superseded this one.
	Successor *Peer `json:"successor,omitempty"`
	// Older are the processes before this one that still drain.
	Older []Peer `json:"older,omitempty"`
	// Handed are the names of the sockets and files that go to a successor.
	Handed []string `json:"handed"`
	// Sockets are those of them, and the control socket, as the kernel names them. Builds
	// before this field leave it out.
	Sockets []HandedSocket `json:"sockets,omitempty"`
}

// HandedSocket is a socket that goes to a successor.
type HandedSocket struct {
	Name    string `json:"name"`
	Network string `json:"network"`
	Address string `json:"address"`
	// Inode names it in /proc/PID/fd.
	Inode uint64 `json:"inode"`
}

// Status is this process's.
func (h *Handover) Status() Status {
	s := Status{Handed: []string{}}
	for _, l := range h.alive() {
		s.Older = append(s.Older, l.Peer)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	s.Peer, s.Successor = h.self(), h.successor
	s.Phase, s.Upgrading, s.Probation = h.phase.String(), h.upgrading, h.probation
	for name, it := range h.items {
		s.Handed = append(s.Handed, name)
		if it.Network != "" {
			s.addSocket(it.entry, it.conn)
		}
	}
	if h.control != nil {
		s.addSocket(entry{Name: "control", Network: "unixpacket", Address: h.opt.Socket}, h.control)
	}
	slices.Sort(s.Handed)
	slices.SortFunc(s.Sockets, func(a, b HandedSocket) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Inode, b.Inode)) })
	return s
}

// addSocket leaves one out that is closed.
func (s *Status) addSocket(e entry, c syscall.Conn) {
	var st unix.Stat_t
	if rawconn.Of(c, func(fd int) error { return unix.Fstat(fd, &st) }) == nil {
		s.Sockets = append(s.Sockets, HandedSocket{e.Name, e.Network, e.Address, st.Ino})
	}
}

func (h *Handover) self() Peer {
	return Peer{Name: h.opt.Name, Generation: h.generation, PID: os.Getpid(), Build: h.opt.Build}
}

// store keeps the service manager's descriptor store in step with a new item.
// Its caller holds mu.
func (h *Handover) store(it *item) {
	if !h.opt.StoreDescriptors || !h.main || h.phase != phaseActive {
		return // storeAll does
	}
	name, err := systemd.StoreName(it.Name, h.generation)
	if err == nil {
		err = h.manager.StoreFD(name, it.conn, it.Role == roleConn)
	}
	if err != nil {
		// The store is a cache: the next start binds what is not there.
		h.log.Warn("descriptor not stored", "name", it.Name, "error", err)
	}
}

// unstore is for an item that is no more. Its caller holds mu.
func (h *Handover) unstore(it *item) {
	if !h.opt.StoreDescriptors || !h.main {
		return
	}
	name, err := systemd.StoreName(it.Name, h.generation)
	if err == nil {
		err = h.manager.RemoveFD(name)
	}
	if err != nil {
		h.log.Warn("descriptor not removed from the store", "name", it.Name, "error", err)
	}
}

// storeAll stores all items under this generation, in the place of what is in
// the store.
func (h *Handover) storeAll() {
	if !h.opt.StoreDescriptors {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	// The manager refuses a second entry of the same open file, so the old name
	// goes first.
	old := h.stored
	h.stored = nil
	if h.predecessor != nil {
		// All that it stored, not only what this process took.
		for _, name := range h.handed {
			if name, err := systemd.StoreName(name, h.predecessor.Generation); err == nil {
				old = append(old, name)
			}
		}
	}
	for _, name := range old {
		if err := h.manager.RemoveFD(name); err != nil {
			h.log.Warn("descriptor not removed from the store", "name", name, "error", err)
		}
	}
	for _, it := range h.items {
		h.store(it)
	}
}

// lifeline is one end of a socket pair whose other end an older process holds
// as long as it lives.
type lifeline struct {
	Peer
	fd int
}

func (l *lifeline) close() {
	if l.fd >= 0 {
		_ = unix.Close(l.fd)
		l.fd = -1
	}
}

// gone says whether the other end is closed.
func (l *lifeline) gone() bool {
	fds := []unix.PollFd{{Fd: int32(l.fd), Events: unix.POLLRDHUP}}
	for {
		n, err := unix.Poll(fds, 0)
		if err == unix.EINTR {
			continue
		}
		return err != nil || n > 0 && fds[0].Revents&(unix.POLLHUP|unix.POLLRDHUP|unix.POLLERR|unix.POLLNVAL) != 0
	}
}

// hurry asks the other end to leave.
func (l *lifeline) hurry() {
	_ = unix.Sendto(l.fd, []byte("hurry"), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, nil)
}

// ownLifeline makes a lifeline of this process for a successor.
func (h *Handover) ownLifeline() (held *net.UnixConn, given int, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, -1, os.NewSyscallError("socketpair", err)
	}
	f := os.NewFile(uintptr(pair[0]), "lifeline")
	c, err := net.FileConn(f)
	if err = errors.Join(err, f.Close()); err != nil {
		closeAll(pair[1:])
		return nil, -1, err
	}
	return c.(*net.UnixConn), pair[1], nil
}

// keep holds the lifeline for the rest of this process's life, and obeys it.
func (h *Handover) keep(held *net.UnixConn) {
	h.wg.Go(func() {
		stop := context.AfterFunc(h.ctx, func() { _ = held.SetReadDeadline(time.Unix(1, 0)) })
		defer stop()
		defer func() { _ = held.Close() }()
		b := make([]byte, 16)
		for {
			n, err := held.Read(b)
			if n > 0 && string(b[:n]) == "hurry" {
				h.hurryOnce.Do(func() {
					h.log.Info("asked to end the drain now")
					close(h.hurried)
				})
				continue
			}
			if err != nil || n == 0 {
				// The successors are gone; the process lives until Close.
				<-h.ctx.Done()
				return
			}
		}
	})
}
