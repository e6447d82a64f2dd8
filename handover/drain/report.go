// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"
)

// Phase is how far a drain has come.
type Phase string

// The phases, in their order.
const (
	// PhaseServing: Run was not called.
	PhaseServing Phase = "serving"
	// PhaseWaiting: clients are told to go; nobody is closed.
	PhaseWaiting Phase = "waiting"
	// PhaseClosing: idle connections are closed.
	PhaseClosing Phase = "closing idle"
	// PhaseCutting: the deadline is over, and everybody is closed.
	PhaseCutting Phase = "cutting"
	// PhaseDone: nobody is left.
	PhaseDone Phase = "done"
)

// Report tells how a drain goes. Before Run it lists who would have to go.
type Report struct {
	Phase Phase
	// Elapsed is the time since Run; Left is the time to the deadline, 0 when it is
	// over.
	Elapsed, Left time.Duration
	// Hurried says that the deadline was moved to an earlier time.
	Hurried bool

	// Finished connections ended by themselves: their client closed them, or
	// they were closed after a response that said so.
	Finished int
	// ClosedIdle connections were idle and closed by the drain.
	ClosedIdle int
	// Cut connections were busy at the deadline.
	Cut int

	// Told is how many connections were told to go, by "Connection: close" or
	// GOAWAY.
	Told int
	// Crossed is how many requests came when their connection was being closed
	// as an idle one. They were not executed. See the package comment.
	Crossed int

	// Open lists who is still there, the longest first.
	Open []Open
}

// Open is one open connection, or an HTTP/3 server.
type Open struct {
	// Member is what it belongs to: "http", "http3", or the name of a
	// Conns.
	Member string
	// Remote is the client's address; empty for a server.
	Remote string
	// Since is when it was accepted or added.
	Since time.Time
	// Busy is false when it waits for its client.
	Busy bool
	// Requests are being handled on it; always 0 for plain connections.
	Requests int
	// Unread bytes have come and were not read; Unsent bytes were written, and
	// the client has not acknowledged them.
	Unread, Unsent int
	// Told says that its client was told to go.
	Told bool
	// Leaving says that it is being closed.
	Leaving bool
}

// String is one line for people.
func (o Open) String() string {
	var b strings.Builder
	b.WriteString(o.Member)
	if o.Remote != "" {
		b.WriteString(" " + o.Remote)
	}
	fmt.Fprintf(&b, " since %s", o.Since.Format(time.TimeOnly))
	switch {
	case o.Requests > 0:
		fmt.Fprintf(&b, ", %d requests", o.Requests)
	case o.Busy:
		b.WriteString(", busy")
	default:
		b.WriteString(", idle")
	}
	if o.Unsent > 0 {
		fmt.Fprintf(&b, ", %d bytes unsent", o.Unsent)
	}
	if o.Unread > 0 {
		fmt.Fprintf(&b, ", %d bytes unread", o.Unread)
	}
	if o.Leaving {
		b.WriteString(", closing")
	}
	return b.String()
}

// String is one line for people, without the list.
func (r Report) String() string {
	s := fmt.Sprintf("%s: %d open, %d finished, %d closed idle, %d cut", r.Phase, len(r.Open), r.Finished, r.ClosedIdle, r.Cut)
	if r.Phase != PhaseServing && r.Phase != PhaseDone {
		s += fmt.Sprintf(", %v left", r.Left.Round(time.Second))
	}
	return s
}

// LogValue logs the numbers.
func (r Report) LogValue() slog.Value {
	return slog.GroupValue(
		slog.String("phase", string(r.Phase)),
		slog.Duration("elapsed", r.Elapsed.Round(time.Millisecond)),
		slog.Duration("left", r.Left.Round(time.Millisecond)),
		slog.Int("open", len(r.Open)),
		slog.Int("finished", r.Finished),
		slog.Int("closed_idle", r.ClosedIdle),
		slog.Int("cut", r.Cut),
		slog.Int("told", r.Told),
		slog.Int("crossed", r.Crossed),
	)
}

// Report tells how the drain goes, at any time.
func (d *Drainer) Report() Report {
	d.mu.Lock()
	r := d.counts
	now := time.Now()
	r.Phase = d.phase(now)
	if !d.began.IsZero() {
		end := now
		if !d.ended.IsZero() {
			end = d.ended
		}
		r.Elapsed = end.Sub(d.began)
		r.Left = max(0, d.deadline.Sub(end))
	}
	entries := make([]*entry, 0, len(d.open))
	for e := range d.open {
		entries = append(entries, e)
	}
	d.mu.Unlock()

	for _, e := range entries {
		r.Open = append(r.Open, e.describe())
	}
	slices.SortFunc(r.Open, func(a, b Open) int { return a.Since.Compare(b.Since) })
	return r
}

func (d *Drainer) phase(now time.Time) Phase {
	switch {
	case !d.ended.IsZero():
		return PhaseDone
	case d.began.IsZero():
		return PhaseServing
	case !now.Before(d.deadline):
		return PhaseCutting
	case !now.Before(d.half()):
		return PhaseClosing
	}
	return PhaseWaiting
}
