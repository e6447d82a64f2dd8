// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"instar/internal/sandbox"
)

// Progress is how the demonstration is going. Text is set when something happened, and
// empty ten times a second.
type Progress struct {
	At   time.Duration `json:"at"` // since the start
	Of   time.Duration `json:"of"` // how long it takes, about
	Text string        `json:"text,omitempty"`
	// Bad marks what counts as a failure.
	Bad        bool   `json:"bad,omitempty"`
	Active     uint32 `json:"active"`
	Processes  int    `json:"processes"`
	Handshakes int64  `json:"handshakes"`
	TCPBytes   int64  `json:"tcp_bytes"`
	Lost       int64  `json:"lost"`
}

// Program is how this program is started again.
type Program struct {
	// Self is the file of this program and the name it gets as argument zero.
	Self [2]string `json:"self"`
	// Sandbox and Gateway are the arguments that lead it to [Sandbox] and to [Main];
	// more follow.
	Sandbox []string `json:"sandbox"`
	Gateway []string `json:"gateway"`
}

// message is one line from the sandbox: one field is set.
type message struct {
	Progress *Progress        `json:"progress,omitempty"`
	Report   *Report          `json:"report,omitempty"`
	Fail     *sandbox.Failure `json:"fail,omitempty"`
}

// task is what the sandbox is told.
type task struct {
	Program Program `json:"program"`
	Options Options `json:"options"`
	// Scenario is what is played, the upgrades when it is empty.
	Scenario string `json:"scenario,omitempty"`
}

// Run upgrades a gateway under load, in network namespaces of their own, and returns what
// its peers lost. Before it returns every process it started has ended. It needs root. ctx
// ends it early. stderr, if not nil, gets what a crash writes; progress, if not nil, is
// called from one goroutine.
func Run(ctx context.Context, o Options, p Program, stderr io.Writer, progress func(Progress)) (*Report, error) {
	o, err := o.WithDefaults()
	if err != nil {
		return nil, err
	}
	return run(ctx, task{Program: p, Options: o}, stderr, progress)
}

func run(ctx context.Context, t task, stderr io.Writer, progress func(Progress)) (*Report, error) {
	text, err := json.Marshal(t)
	if err != nil {
		return nil, fmt.Errorf("write options: %w", err)
	}
	var report *Report
	err = sandbox.Run(ctx, sandbox.Command{
		Self:    t.Program.Self,
		Args:    append(slices.Clone(t.Program.Sandbox), string(text)),
		Purpose: "it makes network namespaces and TUN devices",
		Stderr:  stderr,
	}, func(r io.Reader) error {
		var fail *sandbox.Failure
		err := sandbox.Receive(r, func(m message) {
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

// Sandbox is the process in the namespace of the gateway; args is what Run passes. It
// returns the exit code.
func Sandbox(ctx context.Context, args []string) int {
	var t task
	pipe, err := sandbox.Enter("net")
	if err == nil && len(args) != 1 {
		err = errors.New("cannot be started by hand")
	}
	if err == nil {
		err = json.Unmarshal([]byte(args[0]), &t)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "sandbox: %v; it is a part of the demonstration\n", err)
		return 2
	}
	out := sandbox.NewSender(pipe)
	report, err := play(ctx, t, out)
	if err != nil {
		out.Send(message{Fail: sandbox.FailureOf(err)})
		return 1
	}
	out.Send(message{Report: report})
	return 0
}

// play plays the scenario.
func play(ctx context.Context, t task, out *sandbox.Sender) (*Report, error) {
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		return nil, &sandbox.EnvironmentError{Text: fmt.Sprintf("no TUN devices: %v; load the module tun, and in a container pass the device on", err)}
	}
	if err := sandbox.LoopbackUp(); err != nil {
		return nil, err
	}
	sandbox.RaisePriority()
	starter := sandbox.NewStarter()
	defer starter.Stop()
	report := &Report{Started: time.Now(), Options: t.Options, Host: sandbox.ThisHost()}
	p := &player{task: t, starter: starter, out: out, began: time.Now()}
	result, err := p.play(ctx)
	if err != nil {
		return nil, err
	}
	report.Runs = append(report.Runs, *result)
	return report, nil
}
