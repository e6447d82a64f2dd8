// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"context"
	"fmt"
	"io"
	"os"
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
	return sandbox.Play[Progress, Report](ctx, sandbox.Command{
		Self: t.Program.Self, Args: t.Program.Sandbox, Purpose: "it makes network namespaces and TUN devices", Stderr: stderr,
	}, t, progress)
}

// Sandbox is the process in the namespace of the gateway; args is what Run passes. It
// returns the exit code.
func Sandbox(ctx context.Context, args []string) int { return sandbox.Main(ctx, args, play) }

// play plays the scenario.
func play(ctx context.Context, t task, sandboxed *sandbox.Player[Progress, Report]) (*Report, error) {
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		return nil, &sandbox.EnvironmentError{Text: fmt.Sprintf("no TUN devices: %v; load the module tun, and in a container pass the device on", err)}
	}
	report := &Report{Started: time.Now(), Options: t.Options, Host: sandbox.ThisHost()}
	p := &player{Player: sandboxed, task: t, began: time.Now()}
	result, err := p.play(ctx)
	if err != nil {
		return nil, err
	}
	report.Runs = append(report.Runs, *result)
	return report, nil
}
