// SPDX-License-Identifier: Apache-2.0

package run

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"instar/handover"
)

// The pauses before a server that crashed is started again.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 30 * time.Second
	// calm is how long a server has to live for its next crash to count as the first.
	calm = 30 * time.Second
)

var (
	// ErrUpgrading means that another upgrade is under way. It can be tried again.
	ErrUpgrading = handover.ErrUpgrading
	// ErrTooMany means that Options.MaxProcesses live. It can be tried again.
	ErrTooMany = handover.ErrTooMany
	// ErrStopping means that the supervisor stops, or has stopped.
	ErrStopping = errors.New("the supervisor stops")
)

// Supervisor holds the sockets of a server and runs its processes.
type Supervisor struct {
	o      Options
	bound  []*bound
	notify *notifySocket
	serve  *handover.ControlServer // nil without Options.Control
	wg     sync.WaitGroup          // of all goroutines

	requests chan chan error // unbuffered: taken while nothing else is done
	over     chan struct{}   // closed when Run stops

	mu        sync.Mutex
	number    int        // of the latest process
	processes []*process // that live
	active    *process
	upgrading bool
	probation bool
	last      Change
}

// Change is one process that took another one's place.
type Change struct{ From, To Process }

// Process describes a process of the server.
type Process struct {
	// Number counts the processes that were started, from 1.
	Number int
	PID    int
	// Build is size and time of the executable when the process was started.
	Build string
}

// Status describes a Supervisor.
type Status struct {
	// Active is the process that serves; PID 0 when there is none at the moment.
	Active Process
	// Others are all other processes: predecessors that drain, and a successor.
	Others []Process
	// Upgrading says that a successor starts or is in its probation.
	Upgrading, Probation bool
	// Last is the last upgrade that succeeded.
	Last Change
	// Names are those of the listeners.
	Names []string
}

// New binds the listeners. Run has to be called after it, which closes them.
//
// Errors: ErrOptions, those of binding, and of dispatch.Open with UDP.
func New(o Options) (*Supervisor, error) {
	if err := o.setDefaults(); err != nil {
		return nil, err
	}
	s := &Supervisor{o: o, requests: make(chan chan error), over: make(chan struct{})}
	var err error
	if s.notify, err = listenNotify(); err != nil {
		return nil, err
	}
	for _, l := range o.Listen {
		b, err := s.bind(l)
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.bound = append(s.bound, b)
	}
	if o.Control != "" {
		s.serve = &handover.ControlServer{Status: s.report, Upgrade: s.Upgrade, AllowUIDs: o.AllowUIDs, Logger: o.Logger}
		if err := s.serve.Listen(o.Control); err != nil {
			return nil, errors.Join(fmt.Errorf("control socket: %w", err), s.close())
		}
	}
	return s, nil
}

// close closes what New opened.
func (s *Supervisor) close() error {
	err := s.notify.conn.Close()
	if s.serve != nil {
		err = errors.Join(err, s.serve.Close())
	}
	for _, b := range s.bound {
		err = errors.Join(err, b.close())
	}
	return err
}

// report is Status in the words of control sockets. Right after an upgrade, whoever asked
// for it gets both sides.
func (s *Supervisor) report() handover.Status {
	peer := func(p Process) handover.Peer {
		return handover.Peer{Name: s.o.Service, Generation: p.Number, PID: p.PID, Build: p.Build}
	}
	now := s.Status()
	status := handover.Status{Peer: peer(now.Active), Phase: "active", Upgrading: now.Upgrading, Probation: now.Probation, Handed: now.Names}
	if now.Active.PID == 0 {
		status.Phase = "waiting to be started again"
	}
	for _, p := range now.Others {
		if p.Number < now.Active.Number {
			status.Older = append(status.Older, peer(p))
		}
	}
	return status
}

// Run starts the server and keeps it running until ctx ends. Then all processes get
// SIGTERM, and SIGKILL after Options.Drain, and Run returns nil. It returns an error when
// the first start fails, and has closed everything in each case.
//
// ready, which may be nil, is called when the first process is ready.
func (s *Supervisor) Run(ctx context.Context, ready func()) error {
	s.wg.Go(func() { s.notify.serve(s.heard) })
	children := make(chan os.Signal, 1)
	signal.Notify(children, unix.SIGCHLD)
	s.wg.Go(func() {
		for range children {
			s.reap()
		}
	})
	err := s.run(ctx, ready)
	close(s.over)
	signal.Stop(children)
	close(children)
	err = errors.Join(err, s.notify.conn.Close())
	s.wg.Wait()
	if s.serve != nil {
		err = errors.Join(err, s.serve.Close())
	}
	for _, b := range s.bound {
		err = errors.Join(err, b.close())
	}
	return err
}

func (s *Supervisor) run(ctx context.Context, ready func()) error {
	set, err := s.join()
	if err != nil {
		return err
	}
	first, err := s.begin(ctx, set)
	if err != nil {
		err = errors.Join(err, set.close())
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	s.set(first)
	if s.serve != nil {
		controlled, cancel := context.WithCancel(ctx)
		var serving sync.WaitGroup
		defer serving.Wait()
		defer cancel()
		serving.Go(func() { s.serve.Serve(controlled) })
	}
	if s.o.Watch {
		s.wg.Go(func() { s.watch(ctx) })
	}
	if ready != nil {
		ready()
	}
	crashes := 0
	for {
		if ctx.Err() != nil {
			s.stop()
			return nil
		}
		select {
		case <-ctx.Done():
		case answer := <-s.requests:
			answer <- s.upgrade(ctx)
		case <-s.active.done:
			if time.Since(s.active.started) > calm {
				crashes = 0
			}
			s.restart(ctx, crashes)
			crashes++
		}
	}
}

// begin starts a process and waits until it is ready; then it gets new UDP flows. When it
// fails nothing of it is left but the sockets.
func (s *Supervisor) begin(ctx context.Context, set *sockets) (*process, error) {
	p, err := s.start(set)
	if err != nil {
		return nil, err
	}
	timer := time.NewTimer(s.o.ReadyTimeout)
	defer timer.Stop()
	executed := p.executed
	for {
		select {
		case reason := <-executed:
			if reason != nil {
				err = fmt.Errorf("start %s: %w", s.o.Command[0], reason)
				break
			}
			executed = nil
			continue
		case <-p.done:
			// Whatever the launcher had to say, it has said: the pipe ended with it.
			if reason := <-p.executed; reason != nil {
				return nil, fmt.Errorf("start %s: %w", s.o.Command[0], reason)
			}
			return nil, fmt.Errorf("process %d ended before it was ready: %s; see its output", p.pid, p.how())
		case <-timer.C:
			err = fmt.Errorf("process %d did not send READY=1 within %v", p.pid, s.o.ReadyTimeout)
		case <-ctx.Done():
			err = ErrStopping
		case <-p.ready:
			if err = set.activate(); err == nil {
				s.o.Logger.Info("process is ready", "generation", p.number, "pid", p.pid)
				return p, nil
			}
		}
		break
	}
	s.terminate(p)
	return nil, err
}

// heard is what a notification says.
func (s *Supervisor) heard(pid int, lines []string) {
	s.mu.Lock()
	i := slices.IndexFunc(s.processes, func(p *process) bool { return p.pid == pid })
	if i < 0 {
		s.mu.Unlock()
		s.o.Logger.Debug("notification of another process than the server's main one is ignored", "pid", pid)
		return
	}
	p := s.processes[i]
	s.mu.Unlock()
	if slices.Contains(lines, "READY=1") {
		p.readyOnce.Do(func() { close(p.ready) })
	}
}

func (s *Supervisor) set(p *process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.active = p
}

// Upgrade starts a successor and waits until it has stood its probation. With an error the
// server serves as before. When ctx ends the upgrade goes on. When the server crashed and
// waits to be started again, it is started at once.
//
// Errors: ErrUpgrading, ErrTooMany, ErrStopping, ctx's, or why the successor failed.
func (s *Supervisor) Upgrade(ctx context.Context) error {
	s.mu.Lock()
	if s.upgrading {
		s.mu.Unlock()
		return ErrUpgrading
	}
	if len(s.processes) >= s.o.MaxProcesses {
		s.mu.Unlock()
		return fmt.Errorf("%w: %d live, and that is the limit; wait until one has ended", ErrTooMany, s.o.MaxProcesses)
	}
	s.upgrading = true
	s.mu.Unlock()
	answer := make(chan error, 1)
	select {
	case s.requests <- answer:
	case <-ctx.Done():
		s.upgraded()
		return ctx.Err()
	case <-s.over:
		s.upgraded()
		return ErrStopping
	}
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *Supervisor) upgraded() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.upgrading, s.probation = false, false
}

func (s *Supervisor) upgrade(ctx context.Context) (err error) {
	defer s.upgraded()
	old := s.active
	defer func() {
		if err != nil {
			s.o.Logger.Warn("upgrade has failed; the server is as before", "error", err)
		}
	}()
	set, err := s.join()
	if err != nil {
		return err
	}
	p, err := s.begin(ctx, set)
	if err != nil {
		return errors.Join(err, set.close())
	}
	s.mu.Lock()
	s.probation = true
	s.mu.Unlock()
	if err := s.prove(ctx, p, old); err != nil {
		if !old.ended() {
			return errors.Join(err, old.sockets.activate(), set.close())
		}
		// Both are gone: the newer sockets are the ones that are started again.
		s.set(p)
		return errors.Join(err, old.sockets.close())
	}
	s.mu.Lock()
	s.active = p
	s.last = Change{old.info(), p.info()}
	s.mu.Unlock()
	s.o.Logger.Info("upgraded", "generation", p.number, "pid", p.pid, "predecessor", old.pid)
	s.wg.Go(func() {
		s.leave(old)
		if err := old.sockets.close(); err != nil {
			s.o.Logger.Warn("close sockets of a predecessor", "pid", old.pid, "error", err)
		}
	})
	return nil
}

// prove waits for the end of the probation.
func (s *Supervisor) prove(ctx context.Context, p, old *process) error {
	timer := time.NewTimer(max(0, s.o.Probation))
	defer timer.Stop()
	select {
	case <-p.done:
	case <-old.done:
	case <-timer.C:
	case <-ctx.Done(): // stop ends both
	}
	if p.ended() {
		return fmt.Errorf("process %d ended in its probation: %s; see its output", p.pid, p.how())
	}
	return nil
}

// leave drains a process that another one follows, and ends it.
func (s *Supervisor) leave(p *process) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	s.wg.Go(func() {
		select {
		case <-p.done: // nobody reads any more
		case <-s.over: // everybody ends
		case <-ctx.Done():
		}
		cancel()
	})
	if err := p.sockets.drain(ctx, s.o.Drain, false); err != nil && ctx.Err() == nil {
		s.o.Logger.Warn("drain of UDP sockets", "pid", p.pid, "error", err)
	}
	s.terminate(p)
}

// terminate sends SIGTERM, then SIGKILL, and returns when the process is gone.
func (s *Supervisor) terminate(p *process) {
	p.signal(unix.SIGTERM)
	p.signal(unix.SIGCONT) // a stopped one would not hear
	timer := time.NewTimer(s.o.Drain)
	defer timer.Stop()
	select {
	case <-p.done:
		return
	case <-timer.C:
		s.o.Logger.Warn("process did not end at SIGTERM and is killed", "pid", p.pid, "after", s.o.Drain)
	}
	p.kill()
	<-p.done
}

// restart starts the server again after a crash, with the sockets that it had, and tries
// until that works or ctx ends. A request for an upgrade cuts a pause short.
func (s *Supervisor) restart(ctx context.Context, crashes int) {
	set := s.active.sockets
	s.o.Logger.Error("the server has ended and is started again", "pid", s.active.pid, "state", s.active.how())
	var answer chan error
	for {
		pause := lastPause
		if crashes < 9 {
			pause = min(lastPause, firstPause<<crashes)
		}
		if answer == nil {
			timer := time.NewTimer(pause)
			select {
			case <-ctx.Done():
				timer.Stop()
				return
			case <-timer.C:
			case answer = <-s.requests:
				timer.Stop()
			}
		}
		p, err := s.begin(ctx, set)
		if answer != nil {
			if err == nil {
				s.mu.Lock()
				s.last = Change{s.active.info(), p.info()}
				s.mu.Unlock()
			}
			s.upgraded()
			answer <- err
			answer = nil
		}
		if err == nil {
			s.set(p)
			return
		}
		if ctx.Err() != nil {
			return
		}
		crashes++
		s.o.Logger.Error("the server could not be started; it is tried again", "error", err)
	}
}

// stop ends every process.
func (s *Supervisor) stop() {
	s.mu.Lock()
	all, active := slices.Clone(s.processes), s.active
	s.mu.Unlock()
	var ends sync.WaitGroup
	for _, p := range all {
		ends.Go(func() {
			if p == active {
				ctx, cancel := context.WithTimeout(context.Background(), s.o.Drain)
				defer cancel()
				if err := p.sockets.drain(ctx, 0, true); err != nil {
					s.o.Logger.Warn("drain of UDP sockets", "pid", p.pid, "error", err)
				}
			}
			s.terminate(p)
		})
	}
	ends.Wait()
	if err := active.sockets.close(); err != nil {
		s.o.Logger.Warn("close sockets", "error", err)
	}
}

// Signal sends a signal to the process that serves.
func (s *Supervisor) Signal(sig syscall.Signal) {
	s.mu.Lock()
	p := s.active
	s.mu.Unlock()
	if p != nil {
		p.signal(sig)
	}
}

func (p *process) info() Process { return Process{p.number, p.pid, p.build} }

// Status tells which processes there are.
func (s *Supervisor) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := Status{Upgrading: s.upgrading, Probation: s.probation, Last: s.last}
	for _, p := range s.processes {
		if p == s.active {
			status.Active = p.info()
		} else {
			status.Others = append(status.Others, p.info())
		}
	}
	for _, b := range s.bound {
		status.Names = append(status.Names, b.Name)
	}
	return status
}
