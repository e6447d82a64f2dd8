// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// Drainer knows everything that has clients, and sends them away. All methods
// may be called from several goroutines.
type Drainer struct {
	options Options
	invalid error // of the options
	log     *slog.Logger

	draining chan struct{} // closed when Run begins
	hurry    chan struct{} // closed by Hurry
	hurried  sync.Once
	work     sync.WaitGroup // goroutines that close connections

	mu       sync.Mutex
	members  []member
	open     map[*entry]struct{}
	ran      bool
	began    time.Time
	deadline time.Time
	ended    time.Time
	seen     int    // entries that were open when Run began, and came since
	counts   Report // numbers alone
}

// member is what was added to a Drainer.
type member interface {
	// fits refuses deadlines that contradict the Drainer's.
	fits(Options) error
	// begin stops new connections.
	begin() error
	// pending says whether a connection may be about to be added.
	pending() bool
	// finish is called when nobody is left.
	finish() error
}

// New makes a Drainer. Options out of their range are refused by Run, and by
// [Drainer.Check].
func New(o Options) *Drainer {
	d := &Drainer{
		draining: make(chan struct{}),
		hurry:    make(chan struct{}),
		open:     make(map[*entry]struct{}),
	}
	d.invalid = o.fill()
	d.options = o
	d.log = o.Logger
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	return d
}

// Draining returns a channel that is closed when the drain begins.
func (d *Drainer) Draining() <-chan struct{} { return d.draining }

// Hurry moves the deadline to now. Called before Run, it leaves the clients no
// time.
func (d *Drainer) Hurry() { d.hurried.Do(func() { close(d.hurry) }) }

// Check returns what Run would refuse, for a look when the server starts: an
// option out of its range (ErrOptions), or deadlines that contradict each
// other (*ConflictError).
func (d *Drainer) Check() error {
	if d.invalid != nil {
		return d.invalid
	}
	d.mu.Lock()
	members := slices.Clone(d.members)
	d.mu.Unlock()
	for _, m := range members {
		if err := m.fits(d.options); err != nil {
			return err
		}
	}
	return nil
}

// Run drains, and returns when nothing is open any more. It has to be called
// once; afterwards servers of net/http have ended with http.ErrServerClosed.
//
// When ctx is done before, everybody is cut off at once, and the error wraps
// the cause; when the cause is ErrHurry, it is as if Hurry was called. The same
// happens, with ErrKilled, when Options.KillAfter is about to be over. A
// deadline of ctx that is not later than that of the options is refused, as
// is what Check returns; nothing was touched then.
func (d *Drainer) Run(ctx context.Context) (Report, error) {
	if err := d.start(ctx); err != nil {
		return d.Report(), fmt.Errorf("drain: %w", err)
	}
	members := d.all()
	var errs []error
	for _, m := range members {
		errs = append(errs, m.begin())
	}
	r := d.Report()
	d.log.Info("draining", "report", r)
	d.progress(r)

	if err := d.send(ctx); err != nil {
		d.log.Warn("drain given up", "cause", err, "report", d.Report())
		d.cutAll()
		errs = append(errs, err)
	}
	d.work.Wait()
	for _, m := range members {
		errs = append(errs, m.finish())
	}
	d.cutAll() // who came through a listener that is not ours
	d.work.Wait()

	d.mu.Lock()
	d.ended = time.Now()
	d.mu.Unlock()
	r = d.Report()
	d.log.Info("drained", "report", r)
	d.progress(r)
	if err := errors.Join(errs...); err != nil {
		return r, fmt.Errorf("drain: %w", err)
	}
	return r, nil
}

// start begins the drain, unless something speaks against it.
func (d *Drainer) start(ctx context.Context) error {
	if err := d.Check(); err != nil {
		return err
	}
	now := time.Now()
	if err := d.options.fits(ctx, now); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ran {
		return ErrRan
	}
	d.ran = true
	d.began, d.deadline = now, now.Add(d.options.Deadline)
	d.seen = len(d.open)
	close(d.draining)
	return nil
}

func (d *Drainer) all() []member {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.members)
}

func (d *Drainer) join(m member) {
	d.mu.Lock()
	d.members = append(d.members, m)
	began := !d.began.IsZero()
	d.mu.Unlock()
	if began {
		_ = m.begin() // nothing was added to it yet
	}
}

func (d *Drainer) progress(r Report) {
	if d.options.Progress != nil {
		d.options.Progress(r)
	}
}

// send waits until everybody is gone, and sees to it that they are.
func (d *Drainer) send(ctx context.Context) error {
	var (
		p      = pace{budget: budget{rate: d.options.CloseRate}, idle: spread{rate: d.options.CloseRate}}
		ticker = time.NewTicker(tick)
		shown  = time.Now()
		done   = ctx.Done()
		hurry  = (<-chan struct{})(d.hurry)
		phase  = PhaseWaiting
	)
	defer ticker.Stop()
	for {
		now := time.Now()
		d.turn(&p, now)
		if d.empty(now) {
			return nil
		}
		if kill := d.options.KillAfter; kill > 0 && now.Sub(d.began) >= kill-beforeKill {
			return ErrKilled
		}
		d.mu.Lock()
		next := d.phase(now)
		d.mu.Unlock()
		if next != phase || now.Sub(shown) >= progress {
			r := d.Report()
			if next != phase {
				d.log.Info("draining", "report", r)
			}
			d.progress(r)
			phase, shown = next, now
		}
		select {
		case <-ticker.C:
		case <-hurry:
			hurry = nil
			d.moveDeadline()
		case <-done:
			if cause := context.Cause(ctx); !errors.Is(cause, ErrHurry) {
				return cause
			}
			done = nil
			d.moveDeadline()
		}
	}
}

func (d *Drainer) moveDeadline() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if now := time.Now(); now.Before(d.deadline) {
		d.deadline = now
		d.counts.Hurried = true
	}
}

// half is when idle connections begin to be closed.
func (d *Drainer) half() time.Time { return d.began.Add(d.deadline.Sub(d.began) / 2) }

// empty says whether nobody is left and nobody is about to come.
func (d *Drainer) empty(now time.Time) bool {
	d.mu.Lock()
	n := len(d.open)
	late := now.After(d.deadline.Add(linger))
	d.mu.Unlock()
	if n > 0 {
		return false
	}
	for _, m := range d.all() {
		if !late && m.pending() {
			return false
		}
	}
	// It may have been added in between.
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.open) == 0
}

// pace is the rate of a drain.
type pace struct {
	budget budget
	idle   spread
}

// candidate is an entry whose turn it may be.
type candidate struct {
	*entry
	idle time.Duration
}

// turn begins to close those whose turn it is.
func (d *Drainer) turn(p *pace, now time.Time) {
	p.budget.refill(now)
	d.mu.Lock()
	began, deadline := d.began, d.deadline
	entries := make([]*entry, 0, len(d.open))
	for e := range d.open {
		entries = append(entries, e)
	}
	d.mu.Unlock()
	quiet := min(heed, d.options.Deadline/10)

	var idle, late []candidate
	until := deadline
	for _, e := range entries {
		if w, ok := e.way.(watcher); ok {
			w.look(e)
		}
		end := deadline
		if e.limit > 0 && began.Add(e.limit).Before(end) {
			end = began.Add(e.limit)
		}
		since, is := e.idleFor(now)
		switch half := began.Add(end.Sub(began) / 2); {
		case !now.Before(end):
			if is || e.cuttable() {
				late = append(late, candidate{e, since})
			}
		case is && since >= quiet && !now.Before(half):
			idle = append(idle, candidate{e, since})
			// A tenth of the window is left for those who become idle late.
			if end = end.Add(-end.Sub(half) / 10); end.Before(until) {
				until = end
			}
		}
	}
	slices.SortFunc(late, func(a, b candidate) int { return -cmp.Compare(a.idle, b.idle) })
	for _, c := range late[:p.budget.spend(len(late))] {
		if !c.letGo(now) {
			c.cutOff(errCut, linger)
		}
	}
	slices.SortFunc(idle, func(a, b candidate) int { return -cmp.Compare(a.idle, b.idle) })
	due := p.idle.take(now, len(idle), until)
	n := p.budget.spend(due)
	p.idle.giveBack(due - n)
	for _, c := range idle[:n] {
		c.letGo(now)
	}
}

// cutAll cuts off everybody at once.
func (d *Drainer) cutAll() {
	d.mu.Lock()
	entries := make([]*entry, 0, len(d.open))
	for e := range d.open {
		entries = append(entries, e)
	}
	d.mu.Unlock()
	for _, e := range entries {
		e.cutOff(errAtOnce, 0)
	}
}

// add enters e.
func (d *Drainer) add(e *entry) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open[e] = struct{}{}
	if !d.began.IsZero() {
		d.seen++
	}
}

// end takes e out, and counts how it ended when count is set.
func (d *Drainer) end(e *entry, count bool) {
	e.mu.Lock()
	leaving := e.leaving
	e.ended = true
	e.mu.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.open[e]; !ok {
		return
	}
	delete(d.open, e)
	close(e.gone)
	if d.began.IsZero() || !count {
		return
	}
	switch leaving {
	case staying:
		d.counts.Finished++
	case leavingIdle:
		d.counts.ClosedIdle++
	case leavingCut:
		d.counts.Cut++
	}
}

// mayTell says whether one more client may be told to go, and counts it.
func (d *Drainer) mayTell() bool {
	select {
	case <-d.draining:
	default:
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	from, to := d.began, d.half()
	if d.options.Quiet {
		from, to = to, d.deadline
	}
	now := time.Now()
	if now.Before(from) || d.counts.Told >= allowed(d.seen, now.Sub(from), to.Sub(from), d.options.CloseRate) {
		return false
	}
	d.counts.Told++
	return true
}

// mustTell is for those who are told because they are closed.
func (d *Drainer) mustTell() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.counts.Told++
	return true
}

func (d *Drainer) crossed() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.counts.Crossed++
}
