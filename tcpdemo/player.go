// SPDX-License-Identifier: Apache-2.0

package tcpdemo

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/sandbox"
)

// How long the parts of a scenario may take.
const (
	readyPatience = 15 * time.Second
	drainPatience = 30 * time.Second
)

// player plays one scenario.
type player struct {
	*sandbox.Player[Progress, Report]
	scenario scenario
	task     task
	port     int

	began   time.Time
	outcome Outcome
	load    *Load

	mu      sync.Mutex
	servers []*process
	active  int
	answers []Answer
}

// process is a server process. It knows when it announced what.
type process struct {
	generation int
	*sandbox.Process
	moments map[EventKind]*moment
}

// moment is when an event came.
type moment struct {
	came  chan struct{} // closed then
	once  sync.Once
	at    time.Time
	event Event
}

func (p *player) play(ctx context.Context) (*Outcome, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p.began = time.Now()
	p.outcome = Outcome{
		Scenario: p.scenario.letter, Title: p.scenario.title, Method: p.scenario.config.Mode, Facts: map[string]int64{},
	}
	defer p.killAll()
	p.say("%s", p.scenario.title)

	first, err := p.start(ctx, nil)
	if err != nil {
		return nil, err
	}
	if p.load, err = NewLoad(ctx, LoadConfig{
		Addr: p.addr(), NewPerSecond: p.task.Options.Rate, KeepAlive: p.task.Options.KeepAlive, Answered: p.answered,
	}); err != nil {
		return nil, err
	}
	loaded := true
	defer func() {
		if loaded {
			cancel() // ends the load at once
			p.load.Stop()
		}
	}()
	var reporting sync.WaitGroup
	defer reporting.Wait()
	report, stopReporting := context.WithCancel(ctx)
	defer stopReporting()
	reporting.Go(func() { p.report(report) })

	sleep(ctx, leadIn)
	if err := p.scenario.play(ctx, p, first); err != nil {
		return nil, err
	}
	sleep(ctx, leadOut)
	loaded = false
	p.outcome.Result = p.load.Stop()
	stopReporting()
	if err := p.end(ctx); err != nil {
		return nil, err
	}
	p.judge()
	return &p.outcome, nil
}

func (p *player) addr() string { return fmt.Sprintf("127.0.0.1:%d", p.port) }

// start starts the next server and waits until it is ready. change changes its
// configuration. One that does not get ready is gone when start returns.
func (p *player) start(ctx context.Context, change func(*ServerConfig)) (*process, error) {
	s, err := p.launch(change)
	if err != nil {
		return nil, err
	}
	return s, p.isReady(ctx, s)
}

// launch starts the next server.
func (p *player) launch(change func(*ServerConfig)) (*process, error) {
	cfg := p.scenario.config
	cfg.Addr = p.addr()
	// Abstract: the namespace is ours.
	cfg.Socket = "@tcpdemo-" + p.scenario.letter
	p.mu.Lock()
	cfg.Generation = len(p.servers) + 1
	p.mu.Unlock()
	if change != nil {
		change(&cfg)
	}
	text, err := json.Marshal(cfg)
	if err != nil {
		return nil, fmt.Errorf("write configuration: %w", err)
	}
	s := &process{generation: cfg.Generation, moments: map[EventKind]*moment{}}
	for _, kind := range []EventKind{EventReady, EventDraining, EventClosed, EventDrained} {
		s.moments[kind] = &moment{came: make(chan struct{})}
	}
	args := append(slices.Clone(p.task.Program.Server), string(text))
	if s.Process, err = p.Starter.Start(p.task.Program.Self, args, nil, s.line); err != nil {
		return nil, fmt.Errorf("start server %d: %w", s.generation, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.servers = append(p.servers, s)
	return s, nil
}

// line takes a line of the server's output.
func (s *process) line(line []byte) {
	var e Event
	if json.Unmarshal(line, &e) != nil {
		return
	}
	if m := s.moments[e.Kind]; m != nil {
		m.once.Do(func() {
			m.at, m.event = time.Now(), e
			close(m.came)
		})
	}
}

// isReady waits until the server is ready.
func (p *player) isReady(ctx context.Context, s *process) error {
	m, err := p.wait(ctx, s, EventReady, readyPatience)
	if err != nil {
		return err
	}
	if m.event.Generation != s.generation {
		return fmt.Errorf("server %d says that it is generation %d", s.generation, m.event.Generation)
	}
	p.mu.Lock()
	p.active = s.generation
	p.mu.Unlock()
	p.say("generation %d (pid %d) is ready", s.generation, s.PID)
	return nil
}

// wait waits until the server announces the event.
func (p *player) wait(ctx context.Context, s *process, kind EventKind, patience time.Duration) (*moment, error) {
	m := s.moments[kind]
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-m.came:
		return m, nil
	case <-s.Ended():
		select {
		case <-m.came: // both at once
			return m, nil
		default:
		}
		return nil, fmt.Errorf("server %d ended before it was %s: %s%s", s.generation, kind, s.How(), s.Tail.Because())
	case <-timer.C:
		return nil, fmt.Errorf("server %d was not %s within %v%s", s.generation, kind, patience, s.Tail.Because())
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// gone waits until the server has ended, and says how if it was not exit code 0.
func (p *player) gone(ctx context.Context, s *process) error {
	if !s.Wait(ctx, drainPatience) {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		p.problem("generation %d did not end within %v", s.generation, drainPatience)
		s.Kill()
		return nil
	}
	if s.Err() != nil {
		p.problem("generation %d ended with %s%s", s.generation, s.How(), s.Tail.Because())
	}
	return nil
}

// end waits for the servers that drain, and stops the active one.
func (p *player) end(ctx context.Context) error {
	p.mu.Lock()
	servers := slices.Clone(p.servers)
	p.mu.Unlock()
	for i, s := range servers {
		if i == len(servers)-1 {
			s.Signal(unix.SIGTERM)
		}
		if err := p.gone(ctx, s); err != nil {
			return err
		}
		p.outcome.Servers = append(p.outcome.Servers, Process{Generation: s.generation, PID: s.PID, ExitCode: s.ExitCode()})
	}
	return nil
}

// killAll makes sure that no server is left.
func (p *player) killAll() {
	p.mu.Lock()
	servers := slices.Clone(p.servers)
	p.mu.Unlock()
	for _, s := range servers {
		s.Kill()
	}
}

func (p *player) answered(a Answer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answers = append(p.answers, a)
}

// tally counts the answers for which the condition holds.
func (p *player) tally(cond func(Answer) bool) (n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.answers {
		if cond(a) {
			n++
		}
	}
	return n
}

func (p *player) say(format string, args ...any) { p.tell(false, fmt.Sprintf(format, args...)) }

// problem records what makes the scenario fail.
func (p *player) problem(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	p.outcome.Problems = append(p.outcome.Problems, text)
	p.tell(true, text)
}

// tell sends progress.
func (p *player) tell(bad bool, text string) {
	m := Progress{
		Scenario: p.scenario.letter, At: time.Since(p.began), Of: p.scenario.takes(p.task.Options), Text: text, Bad: bad,
	}
	if p.load != nil {
		m.Requests, m.Lost = p.load.rec.sums()
	}
	p.mu.Lock()
	m.Active = p.active
	for _, s := range p.servers {
		select {
		case <-s.Ended():
		default:
			m.Servers++
		}
	}
	p.mu.Unlock()
	p.Progress(m)
}

// report tells how it is going until ctx ends.
func (p *player) report(ctx context.Context) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			p.tell(false, "")
		}
	}
}
