// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
)

// Message is one line from a sandbox that is played in: progress P, a report R, or why
// there is none. One field is set.
type Message[P, R any] struct {
	Progress *P       `json:"progress,omitempty"`
	Report   *R       `json:"report,omitempty"`
	Fail     *Failure `json:"fail,omitempty"`
}

// Play starts a sandbox, whose program calls [Main], with a task as its last argument, and
// returns its report, beside an error too where it sent both. progress, if not nil, is
// called from one goroutine.
func Play[P, R any](ctx context.Context, c Command, task any, progress func(P)) (*R, error) {
	text, err := json.Marshal(task)
	if err != nil {
		return nil, fmt.Errorf("write task: %w", err)
	}
	c.Args = append(slices.Clone(c.Args), string(text))
	var report *R
	err = Run(ctx, c, func(r io.Reader) error {
		var fail *Failure
		err := Receive(r, func(m Message[P, R]) {
			switch {
			case m.Progress != nil && progress != nil:
				progress(*m.Progress)
			case m.Report != nil:
				report = m.Report
			case m.Fail != nil:
				fail = m.Fail
			}
		})
		return cmp.Or(fail.Err(), err)
	})
	if err == nil && report == nil {
		err = errors.New("sandbox ended without a report")
	}
	return report, err
}

// Main is the process in a network namespace of its own; args is what Play passes. It
// returns the exit code.
func Main[P, R, T any](ctx context.Context, args []string, play func(context.Context, T, *Player[P, R]) (*R, error)) int {
	var task T
	pipe, err := Enter("net")
	if err == nil && len(args) != 1 {
		err = errors.New("cannot be started by hand")
	}
	if err == nil {
		err = json.Unmarshal([]byte(args[0]), &task)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "sandbox: %v; it is a part of the demonstration\n", err)
		return 2
	}
	out := NewSender(pipe)
	if err := LoopbackUp(); err != nil {
		out.Send(Message[P, R]{Fail: FailureOf(err)})
		return 1
	}
	RaisePriority()
	starter := NewStarter()
	defer starter.Stop()
	report, err := play(ctx, task, &Player[P, R]{Starter: starter, out: out})
	if report != nil {
		out.Send(Message[P, R]{Report: report})
	}
	if err != nil {
		out.Send(Message[P, R]{Fail: FailureOf(err)})
		return 1
	}
	return 0
}

// Player is what a play has of its sandbox.
type Player[P, R any] struct {
	// Starter starts its processes, which end with it.
	Starter *Starter
	out     *Sender
}

// Progress tells how it is going; it may be called from several goroutines.
func (p *Player[P, R]) Progress(progress P) { p.out.Send(Message[P, R]{Progress: &progress}) }
