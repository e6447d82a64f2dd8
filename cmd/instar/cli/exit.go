// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"golang.org/x/sys/unix"

	"instar/dispatch"
	"instar/handover"
)

// The exit codes. They are part of the command's interface.
const (
	exitOK          = 0
	exitFailed      = 1
	exitUsage       = 2
	exitEnvironment = 3
	exitNotFound    = 4
	exitRefused     = 5
	exitProblem     = 6
	exitInterrupted = 130
)

const exitCodesHelp = `Exit codes of every command:

    0  done, also when there was nothing to do any more
    1  failed; for "instar demo": something was lost
    2  wrong usage: an unknown command or flag, a missing or ambiguous argument
    3  not permitted, or the machine lacks something (capability, bpffs, device,
       kernel)
    4  not found: no such group or generation, no server at the socket
    5  refused: the state of the group or server does not allow it; the message
       says what to do
    6  "instar doctor" found a problem
  130  interrupted (SIGINT or SIGTERM) before it was done

An error is one line on the standard error that starts with "instar: ".
`

// codeError is an error whose exit code is known where it arises.
type codeError struct {
	code int
	err  error
}

func (e *codeError) Error() string { return e.err.Error() }
func (e *codeError) Unwrap() error { return e.err }

// errInterrupted is how a command ends that was waiting when it was told to stop.
var errInterrupted = &codeError{exitInterrupted, errors.New("interrupted")}

// errSilent is for a process that has said already what is wrong.
var errSilent = errors.New("")

func usagef(format string, args ...any) error {
	return &codeError{exitUsage, fmt.Errorf(format, args...)}
}

func notFoundf(format string, args ...any) error {
	return &codeError{exitNotFound, fmt.Errorf(format, args...)}
}

func refusedf(format string, args ...any) error {
	return &codeError{exitRefused, fmt.Errorf(format, args...)}
}

// causes are the errors of packages dispatch and handover, and those of the system below
// them: the first that fits decides.
var causes = []struct {
	err  error
	code int
}{
	{dispatch.ErrOptions, exitUsage},
	{dispatch.ErrService, exitRefused},
	{dispatch.ErrMismatch, exitRefused},
	{dispatch.ErrOccupied, exitRefused},
	{dispatch.ErrState, exitRefused},
	{dispatch.ErrBusy, exitRefused},
	{dispatch.ErrLayout, exitRefused},
	{dispatch.ErrPermission, exitEnvironment},
	{dispatch.ErrNoBPFFS, exitEnvironment},
	{dispatch.ErrNotSupported, exitEnvironment},
	{fs.ErrPermission, exitEnvironment},
	{unix.ENODEV, exitEnvironment},
	{unix.ENOSYS, exitEnvironment},
	{unix.EOPNOTSUPP, exitEnvironment},
	{handover.ErrUpgrading, exitRefused},
	{handover.ErrTooMany, exitRefused},
	{handover.ErrNotActive, exitRefused},
	{handover.ErrPeer, exitEnvironment},
	{unix.ECONNREFUSED, exitNotFound},
	{dispatch.ErrNotExist, exitNotFound},
	{fs.ErrNotExist, exitNotFound},
}

// exitCode says what the shell is told about err.
func exitCode(err error) int {
	if err == nil {
		return exitOK
	}
	if coded, ok := errors.AsType[*codeError](err); ok {
		return coded.code
	}
	if _, full := errors.AsType[*dispatch.FullError](err); full {
		return exitRefused
	}
	for _, c := range causes {
		if errors.Is(err, c.err) {
			return c.code
		}
	}
	return exitFailed
}

// oneLine folds an error's text, which errors.Join writes on several lines.
func oneLine(err error) string { return oneLineText(err.Error()) }

func oneLineText(text string) string {
	lines := strings.FieldsFunc(text, func(r rune) bool { return r == '\n' || r == '\r' })
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(lines, "; ")
}
