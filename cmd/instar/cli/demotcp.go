// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	"instar/cmd/instar/demo"
	"instar/internal/sandbox"
	"instar/tcpdemo"
)

// How the TCP demonstration starts this program again.
var (
	tcpSandbox = []string{"demo", "tcp", "sandbox"}
	tcpServer  = []string{"demo", "tcp", "server"}
)

func (a *app) demoTCPCommand() *cobra.Command {
	var o tcpdemo.Options
	cmd := &cobra.Command{
		Use:   "tcp",
		Short: "Replace a TCP server under load in three ways, and count what is lost",
		Long: `Start an HTTP/1.1 server, replace it by a new process while clients use it, and
count what they lose, in six scenarios:

  a  stop, then start: connections are refused
  b  plain SO_REUSEPORT: what waits in the old accept queue is reset
  c  Instar, under the same load: nothing is lost
  d  while the successor initialises, the predecessor serves
  e  after that the predecessor accepts nothing, finishes what is in flight,
     and exits with 0
  f  the successor alone serves on

It happens in a network namespace of its own, on real sockets and with real
processes: nothing of the machine is touched, and nothing is left behind. It
needs root, takes half a minute, and runs at a higher priority (nice -10) than
other processes.

The load: new connections all the time, each for one request, and connections
that stay, with requests now and then. Every response is checked byte by byte.
A request that meets the server's close of an idle connection, the race of
HTTP/1.1, is sent again, and is counted as "raced" and not as lost.

Progress goes to the standard error, a table to the standard output. The exit
code is 1 when c to f lost anything, or when a or b lost nothing. Ctrl-C ends it
early: the table has the scenarios that were completed, and the exit code is 130.`,
		Example: `  sudo instar demo tcp
  sudo instar demo tcp --scenario c --upgrades 20 --rate 5000 --json`,
		Args: args(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, name := range []string{"upgrades", "rate", "keepalive"} {
				// Zero stands for the default, which is not what somebody means
				// who writes it.
				if f := cmd.Flags().Lookup(name); f.Changed && f.Value.String() == "0" {
					return usagef("demo tcp: --%s must not be 0", name)
				}
			}
			o, err := o.WithDefaults()
			if err != nil {
				return usagef("demo tcp: %w", err)
			}
			return a.demoTCP(o)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&o.Scenarios, "scenario", nil, "play `letters` only, as in a,c; default: all")
	f.IntVar(&o.Upgrades, "upgrades", tcpdemo.DefaultUpgrades, "replace the server `n` times in a, b and c")
	f.Float64Var(&o.Rate, "rate", tcpdemo.DefaultRate, "open `n` new connections a second")
	f.IntVar(&o.KeepAlive, "keepalive", tcpdemo.DefaultKeepAlive, "keep `n` connections open besides")
	a.jsonFlag(cmd)
	cmd.AddCommand(
		process(tcpSandbox[2], func(args []string) int {
			ctx, stop := a.env.Interruptible(a.env.Context)
			defer stop()
			return tcpdemo.Sandbox(ctx, args)
		}),
		process(tcpServer[2], func(args []string) int {
			return tcpdemo.ServerMain(a.env.Context, args, a.env.Stdout, a.env.Stderr)
		}),
	)
	return cmd
}

func (a *app) demoTCP(o tcpdemo.Options) error {
	ctx, stop := a.env.Interruptible(a.env.Context)
	defer stop()
	show := &progress{w: a.env.Stderr, live: a.env.Terminal(a.env.Stderr), colours: a.env.colours(a.env.Stderr), several: true}
	report, err := tcpdemo.Run(ctx, o, tcpdemo.Program{Self: a.env.Self, Sandbox: tcpSandbox, Server: tcpServer}, a.env.Stderr,
		func(p tcpdemo.Progress) {
			method := demo.Method("scenario " + p.Scenario)
			if p.Text != "" {
				show.event(demo.Event{Method: method, At: p.At, Text: p.Text, Bad: p.Bad})
				return
			}
			show.status(demo.Status{
				Method: method, At: p.At, Of: p.Of, Active: uint32(p.Active), Servers: p.Servers, Requests: p.Requests, Failures: p.Lost,
			})
		})
	show.clear()
	switch _, environment := errors.AsType[*sandbox.EnvironmentError](err); {
	case errors.Is(err, context.Canceled):
		interrupted := fmt.Errorf("demo tcp: %w", errInterrupted)
		if report == nil {
			return interrupted
		}
		return errors.Join(a.printTCP(report), interrupted)
	case environment:
		return &codeError{exitEnvironment, fmt.Errorf("demo tcp: %w", err)}
	case err != nil:
		return fmt.Errorf("demo tcp: %w", err)
	}
	if err := a.printTCP(report); err != nil {
		return err
	}
	if !report.OK() {
		return fmt.Errorf("demo tcp: not as expected: %s", report.Failed())
	}
	return nil
}

func (a *app) printTCP(report *tcpdemo.Report) error {
	if a.json {
		return a.printJSON(demoTCPJSON{jsonVersion, report})
	}
	return writeTCPTable(a.env.Stdout, report, a.env.colours(a.env.Stdout))
}

// demoTCPJSON is a demonstration for programs.
type demoTCPJSON struct {
	Version int `json:"version"`
	*tcpdemo.Report
}

// writeTCPTable writes the report for people.
func writeTCPTable(w io.Writer, report *tcpdemo.Report, colours bool) error {
	var t table
	t.add(colourNone, "SCENARIO", "METHOD", "UPGRADES", "CONNECTIONS", "REQUESTS", "REFUSED", "RESET", "CUT", "TIMEOUT", "WRONG", "RACED", "VERDICT")
	for i := range report.Scenarios {
		o := &report.Scenarios[i]
		colour, mark := colourGreen, "ok: "
		if !o.OK {
			colour, mark = colourRed, "FAILED: "
		}
		cells := []string{o.Scenario, string(o.Method), strconv.Itoa(o.Upgrades)}
		for _, n := range []int64{o.Connections, o.Requests, o.Refused, o.Reset, o.Cut, o.Timeout, o.Wrong + o.Other, o.Raced} {
			cells = append(cells, strconv.FormatInt(n, 10))
		}
		t.add(colour, append(cells, mark+o.Verdict)...)
	}
	if err := t.write(w, colours); err != nil {
		return err
	}
	for i := range report.Scenarios {
		o := &report.Scenarios[i]
		if o.OK {
			continue
		}
		fmt.Fprintf(w, "\nscenario %s (%s):\n", o.Scenario, o.Title)
		for _, text := range append(o.Problems, o.Examples...) {
			fmt.Fprintf(w, "  %s\n", text)
		}
	}
	return nil
}

const colourRed = "\x1b[31m"
