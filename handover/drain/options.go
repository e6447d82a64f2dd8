// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"time"
)

// Defaults of Options.
const (
	DefaultDeadline  = 30 * time.Second
	DefaultCloseRate = 500
)

// Options say how a Drainer drains. The zero value works.
type Options struct {
	// Deadline is how long clients may stay, counted from Run. In its second
	// half idle connections are closed; at its end the rest is cut off. A
	// handler has a second then to end its work, and a client two to read it;
	// with n connections that begins for the last one after n/CloseRate seconds.
	// Default 30 s.
	Deadline time.Duration

	// CloseRate is the most connections closed in a second, and the most
	// told to go (a tenth of it at once), unless half the deadline is too short
	// to tell so few. Too high a rate makes all clients come back at the same
	// time. Default 500.
	CloseRate float64

	// KillAfter is when whoever supervises the process kills it, counted from
	// Run: TimeoutStopSec of systemd, terminationGracePeriodSeconds of
	// Kubernetes. Run refuses a Deadline that is not a second shorter, and
	// cuts off who is left just before it, whatever the CloseRate. Default 0:
	// unknown.
	KillAfter time.Duration

	// Quiet announces nothing (no "Connection: close", no GOAWAY) in the first
	// half of the deadline, for clients that take it ill. New connections
	// are stopped all the same.
	Quiet bool

	// Progress is called by Run when the drain begins, once a second, and when it
	// has ended. Run waits for it.
	Progress func(Report)

	// Logger receives what an operator should know. Default: nothing is
	// logged.
	Logger *slog.Logger
}

const (
	// linger is how long a connection whose sending side was closed is read
	// on, and how long a handler whose context was cancelled may take, before
	// the connection is closed for good.
	linger = time.Second
	// shy is how long a connection may wait with its first request before it
	// counts as idle.
	shy = time.Second
	// heed is what clients of HTTP/3 have to act on GOAWAY, and to read the
	// last response, before the connection is closed.
	heed = time.Second

	// beforeKill is what Run leaves of KillAfter.
	beforeKill = linger / 4

	tick     = 20 * time.Millisecond
	progress = time.Second
)

func (o *Options) fill() error {
	if o.Deadline == 0 {
		o.Deadline = DefaultDeadline
	}
	if o.CloseRate == 0 {
		o.CloseRate = DefaultCloseRate
	}
	switch {
	case o.Deadline < 0:
		return fmt.Errorf("check Options.Deadline of %v: %w; it is negative, end a drain at once with Hurry", o.Deadline, ErrOptions)
	case o.CloseRate < 0 || math.IsNaN(o.CloseRate):
		return fmt.Errorf("check Options.CloseRate of %v: %w; use a number above 0", o.CloseRate, ErrOptions)
	case o.KillAfter < 0:
		return fmt.Errorf("check Options.KillAfter of %v: %w; it is negative", o.KillAfter, ErrOptions)
	case o.KillAfter > 0 && o.Deadline+linger > o.KillAfter:
		return &ConflictError{"Options.Deadline, and a second to close,", "Options.KillAfter", o.Deadline + linger, o.KillAfter}
	}
	return nil
}

// fits refuses a deadline that does not end before that of ctx.
func (o *Options) fits(ctx context.Context, now time.Time) error {
	end, ok := ctx.Deadline()
	if ok && ctx.Err() == nil && !now.Add(o.Deadline).Before(end) {
		return &ConflictError{"Options.Deadline", "the context's deadline", o.Deadline, end.Sub(now).Round(time.Millisecond)}
	}
	return nil
}
