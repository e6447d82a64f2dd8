// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
)

var (
	// ErrUpgrading means that another upgrade is under way, or that this process
	// is still in its probation. Try again when it has ended.
	ErrUpgrading = errors.New("another upgrade is under way; try again when it has ended")
	// ErrNotActive means that the process does not serve: it has not called
	// Ready, or it was superseded. The active one upgrades.
	ErrNotActive = errors.New("only the active process can be upgraded")
	// ErrTooMany means that as many processes are alive as Options.MaxGenerations
	// allows. Try again when one has drained.
	ErrTooMany = errors.New("too many generations are alive")
	// ErrSuperseded means a planned stop: another process serves now. An Accept
	// that ends for this reason returns an error that is both this one and
	// net.ErrClosed.
	ErrSuperseded = errors.New("superseded by another process")
	// ErrRolledBack means that the predecessor took back: this process must not
	// serve.
	ErrRolledBack = errors.New("rolled back by the predecessor")
	// ErrNotInherited means that no predecessor and no socket activation passed
	// anything of that name. It is an fs.ErrNotExist.
	ErrNotInherited error = notInherited{}
	// ErrProtocol means that the peer did not speak the protocol as this build
	// knows it.
	ErrProtocol = errors.New("handover protocol violated")
	// ErrPeer means that the process at the other end may not take part.
	ErrPeer = errors.New("peer is not allowed")
	// ErrClosed means that the Handover was closed.
	ErrClosed = errors.New("handover is closed")

	errPeerGone = errors.New("the other process is gone")
)

type notInherited struct{}

func (notInherited) Error() string        { return "nothing of that name was inherited" }
func (notInherited) Is(target error) bool { return target == fs.ErrNotExist }

// RefusedError is why the process at the other end refused.
type RefusedError struct {
	Code   string // stable, for programs
	Reason string
}

func (e *RefusedError) Error() string { return e.Reason }

// Is matches the sentinel errors of this package.
func (e *RefusedError) Is(target error) bool { return refusals[e.Code] == target && target != nil }

// Retryable says whether the same can succeed later.
func Retryable(err error) bool {
	return errors.Is(err, ErrUpgrading) || errors.Is(err, ErrTooMany)
}

// refusals are the codes of sentinel errors.
var refusals = map[string]error{
	"upgrading":   ErrUpgrading,
	"not-active":  ErrNotActive,
	"too-many":    ErrTooMany,
	"peer":        ErrPeer,
	"protocol":    ErrProtocol,
	"rolled-back": ErrRolledBack,
	"closed":      ErrClosed,
}

// refusalOf makes a refusal of an error.
func refusalOf(err error) refusal {
	for code, sentinel := range refusals {
		if errors.Is(err, sentinel) {
			return refusal{code, err.Error()}
		}
	}
	return refusal{"failed", err.Error()}
}

func (r refusal) err() error { return &RefusedError{r.Code, r.Reason} }

// plannedError is what Accept returns after a planned stop.
type plannedError struct{ addr net.Addr }

func (e *plannedError) Error() string {
	return fmt.Sprintf("accept on %v: planned stop, superseded by another process", e.addr)
}

// Planned tells package drain that this is no fault.
func (e *plannedError) Planned() bool { return true }

func (e *plannedError) Is(target error) bool {
	return target == ErrSuperseded || target == net.ErrClosed
}
