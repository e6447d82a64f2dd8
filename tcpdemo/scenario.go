// SPDX-License-Identifier: Apache-2.0

package tcpdemo

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// How the time of a scenario is divided.
const (
	// leadIn is the time under load before anything happens, in which the
	// connections that stay are opened; leadOut the one after.
	leadIn  = 1500 * time.Millisecond
	leadOut = 500 * time.Millisecond
	// between is the time from one replacement to the next.
	between = 300 * time.Millisecond
	// initialising is how long a server takes to start: it is no loss where the
	// predecessor serves.
	initialising = 200 * time.Millisecond
	// slowly is the interval of a server that is slow in accepting.
	slowly = 130 * time.Millisecond
	// slowStart is how long the successor of scenario d initialises.
	slowStart = 2 * time.Second
	// longTime is the time, and longBytes the size, of the responses that are in
	// flight in scenario e, and longCount their number.
	longTime  = 2 * time.Second
	longBytes = 1 << 20
	longCount = 20
	// aloneFor is how long scenario f watches.
	aloneFor = 1500 * time.Millisecond
)

// scenario is one question of those who restart servers.
type scenario struct {
	letter string
	title  string
	// config is of each of its servers.
	config ServerConfig
	// upgrades says that it replaces the server Options.Upgrades times.
	upgrades bool
	// each is the time of a replacement, about.
	each time.Duration
	play func(ctx context.Context, p *player, first *process) error
	// shows is the loss that the scenario is to show; nil for none.
	shows func(*Counts) (int64, string)
}

var scenarios = []scenario{
	{
		letter:   "a",
		title:    "stop, then start: while nobody listens, connections are refused",
		config:   ServerConfig{Mode: ModeRestart, StartDelay: initialising},
		upgrades: true,
		each:     time.Second + between,
		play:     playRestart,
		shows:    func(c *Counts) (int64, string) { return c.Refused, "connections refused" },
	},
	{
		letter:   "b",
		title:    "plain SO_REUSEPORT: what waits in the old accept queue is reset",
		config:   ServerConfig{Mode: ModeReusePort, StartDelay: initialising, AcceptEvery: slowly},
		upgrades: true,
		each:     initialising + 2*between,
		play:     playReusePort,
		shows:    func(c *Counts) (int64, string) { return c.Reset, "connections reset" },
	},
	{
		letter:   "c",
		title:    "Instar, the same load and slowness: nothing is lost",
		config:   ServerConfig{Mode: ModeInstar, StartDelay: initialising, AcceptEvery: slowly},
		upgrades: true,
		each:     initialising + 500*time.Millisecond + between,
		play:     playInstar,
	},
	{
		letter: "d",
		title:  "Instar: while the successor initialises, the predecessor serves",
		config: ServerConfig{Mode: ModeInstar},
		each:   slowStart,
		play:   playSlowStart,
	},
	{
		letter: "e",
		title:  "Instar: the predecessor accepts nothing more, finishes what is in flight, exits with 0",
		config: ServerConfig{Mode: ModeInstar},
		each:   longTime + time.Second,
		play:   playInFlight,
	},
	{
		letter: "f",
		title:  "Instar: the successor alone serves on",
		config: ServerConfig{Mode: ModeInstar},
		each:   2*time.Second + aloneFor,
		play:   playAlone,
	},
}

// takes is how long the scenario takes, about.
func (s *scenario) takes(o Options) time.Duration {
	n := 1
	if s.upgrades {
		n = o.Upgrades
	}
	return leadIn + time.Duration(n)*s.each + leadOut
}

func playRestart(ctx context.Context, p *player, old *process) error {
	for range p.task.Options.Upgrades {
		old.Signal(unix.SIGTERM)
		if err := p.gone(ctx, old); err != nil {
			return err
		}
		p.say("generation %d is stopped", old.generation)
		next, err := p.start(ctx, nil)
		if err != nil {
			return err
		}
		p.outcome.Upgrades++
		old = next
		sleep(ctx, between)
	}
	return nil
}

func playReusePort(ctx context.Context, p *player, old *process) error {
	for range p.task.Options.Upgrades {
		next, err := p.start(ctx, nil)
		if err != nil {
			return err
		}
		sleep(ctx, between) // in which the kernel gives both their share
		old.Signal(unix.SIGTERM)
		closed, err := p.wait(ctx, old, EventClosed, readyPatience)
		if err != nil {
			return err
		}
		p.outcome.Facts["waiting_at_close"] += int64(closed.event.Waiting)
		p.say("generation %d closed its socket, with %d connections in the accept queue", old.generation, closed.event.Waiting)
		p.outcome.Upgrades++
		old = next
		sleep(ctx, between)
	}
	return nil
}

func playInstar(ctx context.Context, p *player, old *process) error {
	for range p.task.Options.Upgrades {
		next, err := p.upgrade(ctx, old, nil)
		if err != nil {
			return err
		}
		old = next
		sleep(ctx, between)
	}
	return nil
}

// upgrade starts a successor and waits until its predecessor drains: only then
// the next upgrade may begin.
func (p *player) upgrade(ctx context.Context, old *process, change func(*ServerConfig)) (*process, error) {
	next, err := p.start(ctx, change)
	if err != nil {
		return nil, err
	}
	if _, err := p.wait(ctx, old, EventDraining, readyPatience); err != nil {
		return nil, err
	}
	p.outcome.Upgrades++
	return next, nil
}

func playSlowStart(ctx context.Context, p *player, old *process) error {
	began := time.Now()
	p.say("a successor starts, and initialises for %v", slowStart)
	if _, err := p.upgrade(ctx, old, func(cfg *ServerConfig) { cfg.StartDelay = slowStart }); err != nil {
		return err
	}
	// It has initialised for no less, and was not ready before.
	until := began.Add(slowStart)
	served := p.tally(func(a Answer) bool {
		return a.Generation == old.generation && a.Began.After(began) && a.Ended.Before(until)
	})
	early := p.tally(func(a Answer) bool { return a.Generation != old.generation && a.Ended.Before(until) })
	pause := p.longestPause(began, until)
	p.outcome.Facts["served_meanwhile"] = served
	p.outcome.Facts["longest_pause_ms"] = pause.Milliseconds()
	p.say("meanwhile the predecessor answered %d requests, the longest pause was %v", served, pause.Round(time.Millisecond))
	if served == 0 {
		p.problem("the predecessor answered nothing while its successor initialised")
	}
	if early > 0 {
		p.problem("the successor answered %d requests before it was ready", early)
	}
	if pause > slowStart/2 {
		p.problem("for %v nobody answered", pause)
	}
	return nil
}

// longestPause is the longest time without the end of a response.
func (p *player) longestPause(from, until time.Time) (longest time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	last := from
	for _, a := range p.answers { // in the order of their ends, almost
		if a.Ended.Before(last) || a.Ended.After(until) {
			continue
		}
		longest = max(longest, a.Ended.Sub(last))
		last = a.Ended
	}
	return max(longest, until.Sub(last))
}

func playInFlight(ctx context.Context, p *player, old *process) error {
	done := p.load.Long(longCount, longBytes, longTime)
	p.say("%d responses of %v are in flight", longCount, longTime)
	if _, err := p.upgrade(ctx, old, nil); err != nil {
		return err
	}
	ready := p.lastReady()
	select {
	case <-done:
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := p.gone(ctx, old); err != nil {
		return err
	}
	finished := p.tally(func(a Answer) bool { return a.Kind == KindLong && a.Generation == old.generation })
	late := p.tally(func(a Answer) bool { return a.Generation == old.generation && a.Connected.After(ready) })
	p.outcome.Facts["in_flight"] = longCount
	p.outcome.Facts["finished"] = finished
	p.outcome.Facts["accepted_after_ready"] = late
	p.outcome.Facts["exit_code"] = int64(old.ExitCode())
	p.say("generation %d finished %d of %d, accepted %d connections after its successor was ready, and ended with %s",
		old.generation, finished, longCount, late, old.How())
	if finished != longCount {
		p.problem("the predecessor finished %d of %d responses", finished, longCount)
	}
	if late > 0 {
		p.problem("the predecessor accepted %d connections after its successor was ready", late)
	}
	return nil
}

// lastReady is when the last server was seen to be ready.
func (p *player) lastReady() time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.servers[len(p.servers)-1].moments[EventReady].at
}

func playAlone(ctx context.Context, p *player, old *process) error {
	next, err := p.upgrade(ctx, old, nil)
	if err != nil {
		return err
	}
	if err := p.gone(ctx, old); err != nil {
		return err
	}
	began := time.Now()
	p.say("generation %d is gone", old.generation)
	sleep(ctx, aloneFor)
	served := p.tally(func(a Answer) bool { return a.Began.After(began) && a.PID == next.PID })
	others := p.tally(func(a Answer) bool { return a.Began.After(began) && a.PID != next.PID })
	p.outcome.Facts["served_alone"] = served
	p.outcome.Facts["served_by_others"] = others
	p.say("since then generation %d answered %d requests", next.generation, served)
	if served == 0 {
		p.problem("the successor answered nothing after its predecessor was gone")
	}
	if others > 0 {
		p.problem("another process answered %d requests after it was gone", others)
	}
	return nil
}

// judge compares what happened with what the scenario is to show.
func (p *player) judge() {
	o := &p.outcome
	o.OK = len(o.Problems) == 0 && o.Requests > 0
	switch {
	case p.scenario.shows != nil:
		n, what := p.scenario.shows(&o.Counts)
		o.OK = o.OK && n > 0
		o.Verdict = fmt.Sprintf("%d %s, as expected", n, what)
		if n == 0 {
			o.Verdict = fmt.Sprintf("no %s, where some were expected", what)
		}
	case o.Lost > 0:
		o.OK = false
		o.Verdict = fmt.Sprintf("%d lost", o.Lost)
	case o.Requests == 0:
		o.Verdict = "nothing was answered"
	default:
		o.Verdict = "nothing lost"
	}
	if len(o.Problems) > 0 {
		o.Verdict += "; " + o.Problems[0]
	}
}
