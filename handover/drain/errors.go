// SPDX-License-Identifier: Apache-2.0

package drain

import (
	"errors"
	"fmt"
	"net"
	"time"
)

var (
	// ErrPlanned is the reason of everything that a drain ends: the cause of
	// contexts, and what the errors of Accept, Read and Write match. It is
	// never a fault.
	ErrPlanned = errors.New("planned stop")
	// ErrHurry as the cause of Run's context (context.WithCancelCause), moves
	// the deadline to now instead of ending the drain with an error.
	ErrHurry = errors.New("the drain has to end now")
	// ErrRan means that Run was called before. A Drainer drains once.
	ErrRan = errors.New("the drain was run already")
	// ErrKilled means that clients were left just before Options.KillAfter, and
	// were cut off at once. A higher CloseRate or a shorter Deadline avoids it.
	ErrKilled = errors.New("the supervisor is about to kill the process")
	// ErrOptions means that an option is out of its range.
	ErrOptions = errors.New("invalid option")
)

// ConflictError refuses a drain, before anything was touched, whose deadlines
// contradict each other. It matches ErrOptions.
type ConflictError struct {
	// Inner has to be over before Outer, and is not.
	Inner, Outer         string
	InnerTime, OuterTime time.Duration
}

func (e *ConflictError) Error() string {
	return fmt.Sprintf("%s of %v does not end before %s of %v; shorten the first or lengthen the second",
		e.Inner, e.InnerTime, e.Outer, e.OuterTime)
}

// Is matches ErrOptions.
func (e *ConflictError) Is(target error) bool { return target == ErrOptions }

// plannedError is what an operation returns that the drain ended.
type plannedError struct {
	op   string
	addr net.Addr
	why  string
}

var (
	errIdle   = &plannedError{op: "drain", why: "idle connection is closed"}
	errCut    = &plannedError{op: "drain", why: "cut off at the deadline"}
	errAtOnce = &plannedError{op: "drain", why: "cut off, the drain was given up"}
)

func (e *plannedError) Error() string {
	op := e.op
	if e.addr != nil {
		op += " " + e.addr.String()
	}
	return op + ": " + e.why + " (planned stop)"
}

// Planned tells those who do not know this package.
func (e *plannedError) Planned() bool { return true }

// Is matches ErrPlanned, and net.ErrClosed for those who know nothing of
// drains.
func (e *plannedError) Is(target error) bool { return target == ErrPlanned || target == net.ErrClosed }
