// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"instar/internal/sandbox"
	"instar/quicdemo"
)

// How long the parts of a run may take.
const (
	readyPatience = 15 * time.Second
	drainPatience = drainDeadline + 10*time.Second
	stopPatience  = time.Second
	loadPatience  = 30 * time.Second
	// lastPatience is how long the requests under way may take when the run is
	// interrupted.
	lastPatience = 3 * time.Second
)

// listen is where the servers of the sandbox listen.
const listen = "127.0.0.1:4433"

// runner is one method under load.
type runner struct {
	method  Method
	o       Options
	root    string // the pin folder, on the bpffs
	self    [2]string
	starter *sandbox.Starter
	out     *sandbox.Sender
	load    func(context.Context, Options, func(quicdemo.Sample)) (*quicdemo.Result, error)

	mu      sync.Mutex
	begun   time.Time // of the run; times of servers count from here until result
	zero    time.Time // when the load began; zero before
	servers []*server
	info    []Process // of the server at the same index
	samples []Sample
	run     Result
	// requests and failures are the sums of samples.
	requests, failures int64

	watchers sync.WaitGroup // one for each server that was replaced
	killed   atomic.Bool    // what ends now is not the servers' doing
}

// loaded is what the load found.
type loaded struct {
	result *quicdemo.Result
	err    error
}

// runMethod replaces a server under load as often as the options say. An error
// means that there is no result, unless the result says that it was interrupted;
// losses are in the result.
func runMethod(ctx context.Context, m Method, o Options, self [2]string, root string, st *sandbox.Starter, out *sandbox.Sender) (Result, error) {
	r := &runner{method: m, o: o, root: root, self: self, starter: st, out: out, load: load}
	return r.do(ctx)
}

func (r *runner) do(ctx context.Context) (Result, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer r.killAll()
	o := r.o
	r.begun, r.run.Method = time.Now(), r.method

	r.event(false, "%d upgrades under load: %d connections, %g new ones a second, %v",
		o.Upgrades, o.Connections, o.Rate, o.Duration.Round(time.Second/10))
	current, err := r.start(ctx)
	if err != nil {
		return Result{}, err
	}

	r.mu.Lock()
	r.zero = time.Now()
	r.mu.Unlock()

	var background sync.WaitGroup
	watch, stopWatch := context.WithCancel(ctx)
	defer background.Wait()
	defer stopWatch()
	background.Go(func() { r.reportStatus(watch) })
	if r.method == MethodInstar {
		background.Go(func() { r.watchGroup(watch) })
	}

	result := make(chan loaded, 1)
	loadCtx, cancelLoad := context.WithTimeout(ctx, o.Duration+loadPatience)
	defer cancelLoad()
	// When the run is given up, so is the load: it might wait for answers that
	// do not come, and this process is about to end.
	go func() {
		found, err := r.load(loadCtx, o, r.sample)
		result <- loaded{found, err}
	}()

	for i := range o.Upgrades {
		// An upgrade that took long must not be followed by the next one at once.
		begin := r.zero.Add(o.upgradeAt(i))
		if begin.Before(time.Now()) {
			begin = time.Now().Add(shortestInterval)
		}
		if err := sleepUntil(ctx, begin); err != nil {
			return r.interrupted(ctx, result)
		}
		next, err := r.upgrade(ctx, current)
		if ctx.Err() != nil {
			return r.interrupted(ctx, result)
		}
		if err != nil {
			r.fail("upgrade %d: %v", i+1, err)
			continue
		}
		r.run.Upgrades++
		current = next
	}

	var l loaded
	select {
	case l = <-result:
	case <-ctx.Done():
		return r.interrupted(ctx, result)
	}
	if l.err != nil {
		return Result{}, fmt.Errorf("load: %w", l.err)
	}
	r.mu.Lock()
	r.run.Result = *l.result
	r.mu.Unlock()
	r.finish(ctx, current)
	stopWatch()
	background.Wait()
	if ctx.Err() != nil {
		r.run.Interrupted = true
		return r.result(), ctx.Err()
	}
	r.release()
	return r.result(), nil
}

// interrupted is the result up to here. The load makes no more requests since ctx
// ended, and the servers run on until those that are under way have ended too:
// nothing is counted as lost that would not have been.
func (r *runner) interrupted(ctx context.Context, result <-chan loaded) (Result, error) {
	select {
	case l := <-result:
		if l.err != nil {
			return Result{}, ctx.Err()
		}
		r.mu.Lock()
		r.run.Result, r.run.Interrupted = *l.result, true
		r.mu.Unlock()
		return r.result(), ctx.Err()
	case <-time.After(lastPatience):
		return Result{}, ctx.Err()
	}
}

// start starts the next server and waits until it serves. One that does not is
// gone when start returns, unless ctx ended.
func (r *runner) start(ctx context.Context) (*server, error) {
	r.mu.Lock()
	number := uint32(len(r.servers) + 1)
	r.mu.Unlock()
	began := time.Now()
	args, environ := serverArgs(r.method, number, r.o.Workers, r.root)
	s, err := startServer(r.starter, number, r.self, args, environ)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	r.servers = append(r.servers, s)
	r.info = append(r.info, Process{Number: number, PID: s.PID, Started: r.at(began)})
	r.mu.Unlock()
	if err := s.waitReady(ctx, readyPatience); err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err() // it may serve already, and is killed with the others
		}
		s.Kill()
		r.end(s)
		return nil, err
	}
	now := time.Now()
	r.mark(s, func(g *Process) { g.Active = new(r.at(now)) })
	if number == 1 {
		r.event(false, "generation 1 (pid %d) serves", s.PID)
	} else {
		r.event(false, "upgrade %d of %d: generation %d (pid %d) serves, %v after its start",
			number-1, r.o.Upgrades, number, s.PID, now.Sub(began).Round(time.Millisecond))
	}
	return s, nil
}

// upgrade replaces the server by a new one in the way of the method. It returns
// the server that is the current one then.
func (r *runner) upgrade(ctx context.Context, old *server) (*server, error) {
	switch r.method {
	case MethodRestart:
		r.replaced(old)
		old.terminate()
		if !old.Wait(ctx, stopPatience) {
			old.terminate() // at once, as a service manager would
		}
		if !old.Wait(ctx, drainPatience) {
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			r.fail("generation %d did not stop within %v", old.number, drainPatience)
			old.Kill()
		}
		r.ended(old)
		return r.start(ctx)
	default:
		next, err := r.start(ctx)
		if err != nil {
			return nil, err // the predecessor serves on as before
		}
		r.replaced(old)
		if r.method == MethodReuseport {
			old.terminate()
		}
		r.watchers.Go(func() {
			<-old.Ended()
			r.ended(old)
		})
		return next, nil
	}
}

// finish waits for the servers that drain, then stops the current one.
func (r *runner) finish(ctx context.Context, current *server) {
	r.mu.Lock()
	servers := append([]*server(nil), r.servers...)
	r.mu.Unlock()
	if r.method != MethodInstar {
		// These still wait for clients that they lost.
		for _, s := range servers {
			s.terminate()
		}
	}
	deadline := time.Now().Add(drainPatience)
	for _, s := range servers {
		if s == current {
			continue
		}
		if !s.Wait(ctx, time.Until(deadline)) && ctx.Err() == nil {
			r.fail("generation %d (pid %d) still drains %v after the load ended", s.number, s.PID, drainPatience)
			s.Kill()
		}
		r.ended(s)
	}
	current.terminate()
	if !current.Wait(ctx, drainPatience) && ctx.Err() == nil {
		r.fail("generation %d (pid %d) did not stop within %v", current.number, current.PID, drainPatience)
		current.Kill()
	}
	r.ended(current)
}

// ended records how a server ended, once.
func (r *runner) ended(s *server) {
	select {
	case <-s.Ended():
	default:
		return // we were interrupted
	}
	switch {
	case r.killed.Load():
	case !r.end(s): // it was said before
	case s.Err() != nil:
		r.fail("generation %d (pid %d) ended with %s%s", s.number, s.PID, s.How(), s.Tail.Because())
	default:
		r.event(false, "generation %d (pid %d) ended with exit code 0", s.number, s.PID)
	}
}

// end notes when and how a server ended; false when it did so before.
func (r *runner) end(s *server) (first bool) {
	r.mark(s, func(g *Process) {
		if first = g.Ended == nil; first {
			g.Ended, g.ExitCode = new(r.at(s.EndedAt())), new(s.ExitCode())
		}
	})
	return first
}

func (r *runner) replaced(s *server) {
	now := time.Now()
	r.mark(s, func(g *Process) { g.Replaced = new(r.at(now)) })
}

// mark changes what is known of a server.
func (r *runner) mark(s *server, change func(*Process)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.servers {
		if r.servers[i] == s {
			change(&r.info[i])
		}
	}
}

// at is a time in seconds from the start of the run.
func (r *runner) at(t time.Time) float64 { return t.Sub(r.begun).Seconds() }

// fail records a problem that makes the run a failure.
func (r *runner) fail(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	r.mu.Lock()
	r.run.ServerFailures++
	r.run.Problems = append(r.run.Problems, text)
	r.mu.Unlock()
	r.event(true, "%s", text)
}

func (r *runner) event(bad bool, format string, args ...any) {
	r.mu.Lock()
	var at time.Duration
	if !r.zero.IsZero() {
		at = time.Since(r.zero)
	}
	r.mu.Unlock()
	r.out.Send(message{Event: &Event{Method: r.method, At: at, Text: fmt.Sprintf(format, args...), Bad: bad}})
}

// sample takes one step of the load.
func (r *runner) sample(s quicdemo.Sample) {
	r.mu.Lock()
	defer r.mu.Unlock()
	to := r.step(s.At - step/2) // At is the end
	to.Failures += int64(s.Failures)
	r.failures += int64(s.Failures)
	for number, n := range s.Requests {
		if to.Requests == nil {
			to.Requests = map[uint32]int64{}
		}
		to.Requests[number] += int64(n)
		r.requests += int64(n)
	}
}

// step is the sample of a time since the start of the load.
func (r *runner) step(at time.Duration) *Sample {
	i := max(0, int(at/step))
	for len(r.samples) <= i {
		r.samples = append(r.samples, Sample{T: (time.Duration(len(r.samples)) * step).Seconds()})
	}
	return &r.samples[i]
}

// reportStatus tells how the run is going.
func (r *runner) reportStatus(ctx context.Context) {
	tick := time.NewTicker(step)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s := Status{Method: r.method, Of: r.o.Duration}
		r.mu.Lock()
		s.At = time.Since(r.zero)
		for _, g := range r.info {
			if g.Ended == nil {
				s.Servers++
			}
			if g.Active != nil {
				s.Active = g.Number
			}
		}
		s.Requests, s.Failures = r.requests, r.failures
		r.mu.Unlock()
		r.out.Send(message{Status: &s})
	}
}

// result puts the run together.
func (r *runner) result() Result {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.run.Servers = r.info
	r.run.Timeline = r.samples
	lead := r.at(r.zero)
	for i := range r.info {
		r.info[i].Started -= lead
		for _, at := range []*float64{r.info[i].Active, r.info[i].Replaced, r.info[i].Ended} {
			if at != nil {
				*at -= lead
			}
		}
		for _, s := range r.samples {
			r.info[i].Requests += s.Requests[r.info[i].Number]
			r.info[i].Packets += s.Packets[r.info[i].Number]
		}
	}
	return r.run
}

// killAll makes sure that no server is left.
func (r *runner) killAll() {
	r.killed.Store(true)
	r.mu.Lock()
	servers := append([]*server(nil), r.servers...)
	r.mu.Unlock()
	for _, s := range servers {
		s.Kill()
	}
	r.watchers.Wait()
}

func sleepUntil(ctx context.Context, t time.Time) error {
	timer := time.NewTimer(time.Until(t))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
