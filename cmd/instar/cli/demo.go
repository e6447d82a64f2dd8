// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"instar/cmd/instar/demo"
	"instar/internal/sandbox"
	"instar/run"
)

// defaultPage is the file that the demo writes.
const defaultPage = "instar-demo.html"

func (a *app) demoCommand() *cobra.Command {
	var o demo.Options
	var html string
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Upgrade a QUIC server under load and count what is lost",
		Long: `Start a QUIC (HTTP/3) server, replace it several times by a new process while
clients use it, and count what they lose. It happens in a network and mount
namespace of its own, on real sockets and with real processes: nothing of the
machine is touched, and nothing is left behind. It needs root, takes half a
minute (80 s with --compare), and runs at a higher priority (nice -10) than
other processes.

The load: persistent connections with downloads that are checked byte by byte,
new connections all the time, some resumed with 0-RTT, and clients that move to
another port in mid-flow.

Progress goes to the standard error, a table to the standard output, a timeline
to an HTML page. The exit code is 1 when anything was lost; with --compare only
the run of instar counts. Ctrl-C ends it early: the table has what was measured
until then, there is no page, and the exit code is 130.`,
		Example: `  sudo instar demo
  sudo instar demo --compare
  sudo instar demo --upgrades 20 --connections 1000 --json
  sudo instar demo tcp
  sudo instar demo wireguard`,
		Args: args(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, name := range []string{"upgrades", "connections", "rate", "workers", "duration"} {
				// Zero stands for the default, which is not what somebody means
				// who writes it.
				if f := cmd.Flags().Lookup(name); f.Changed && (f.Value.String() == "0" || f.Value.String() == "0s") {
					return usagef("demo: --%s must not be 0", name)
				}
			}
			o, err := o.WithDefaults()
			if err != nil {
				return usagef("demo: %w", err)
			}
			return a.demo(o, html)
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.Upgrades, "upgrades", demo.DefaultUpgrades, "replace the server `n` times under load")
	f.IntVar(&o.Connections, "connections", demo.DefaultConnections, "keep `n` connections open")
	f.Float64Var(&o.Rate, "rate", demo.DefaultRate, "open `n` new connections a second besides")
	f.IntVar(&o.Workers, "workers", demo.DefaultWorkers, "give each server process `n` sockets")
	f.DurationVar(&o.Duration, "duration", 0, "`time` under load of each run; default: 2.5s an upgrade and 6s,\nwith --compare 1.5s and 5s")
	f.BoolVar(&o.Compare, "compare", false, "run the same load against stop-then-start and plain SO_REUSEPORT too")
	f.Uint64Var(&o.Seed, "seed", 0, "start the load's random choices from seed `n`; default: from the clock")
	f.StringVar(&html, "html", defaultPage, "write the page to this `file`; '' for none")
	a.jsonFlag(cmd)
	cmd.AddCommand(a.demoTCPCommand(), a.demoWireGuardCommand())
	return cmd
}

// hiddenCommands are the processes of the demo, and what becomes the server of "run".
func (a *app) hiddenCommands() []*cobra.Command {
	return []*cobra.Command{
		process(launchCommand, run.Launch),
		process(demo.SandboxCommand, func(args []string) int {
			ctx, stop := a.env.Interruptible(a.env.Context)
			defer stop()
			return demo.Sandbox(ctx, a.env.Self, args)
		}),
		process(demo.ServerCommand, func(args []string) int {
			return demo.Server(a.env.Context, args, a.env.Stdout, a.env.Stderr, a.env.Getenv)
		}),
	}
}

// process is a hidden command that is a process of a demonstration.
func process(name string, run func(args []string) int) *cobra.Command {
	return &cobra.Command{
		Use:                name,
		Hidden:             true,
		DisableFlagParsing: true,
		Args:               cobra.ArbitraryArgs,
		RunE: func(_ *cobra.Command, args []string) error {
			if code := run(args); code != 0 {
				return &codeError{code, errSilent}
			}
			return nil
		},
	}
}

func (a *app) demo(o demo.Options, html string) error {
	// A run of half a minute whose page cannot be written would be a pity.
	if err := probePage(html); err != nil {
		return err
	}
	ctx, stop := a.env.Interruptible(a.env.Context)
	defer stop()
	p := &progress{w: a.env.Stderr, live: a.env.Terminal(a.env.Stderr), colours: a.env.colours(a.env.Stderr), several: o.Compare}
	report, err := demo.Run(ctx, o, demo.Hooks{Self: a.env.Self, Stderr: a.env.Stderr, Event: p.event, Status: p.status})
	p.clear()
	var environment *sandbox.EnvironmentError
	switch {
	case errors.Is(err, context.Canceled):
		interrupted := fmt.Errorf("demo: %w", errInterrupted)
		if len(report.Runs) == 0 {
			return interrupted
		}
		return errors.Join(a.printReport(&report), interrupted)
	case errors.As(err, &environment):
		return &codeError{exitEnvironment, fmt.Errorf("demo: %w", err)}
	case err != nil:
		return fmt.Errorf("demo: %w", err)
	}

	if err := a.printReport(&report); err != nil {
		return err
	}
	if html != "" {
		if err := writePage(html, &report); err != nil {
			return fmt.Errorf("demo: write the page: %w", err)
		}
		fmt.Fprintf(a.env.Stderr, "timeline: %s\n", html)
	}
	run := &report.Runs[0]
	switch {
	case run.OK():
		return nil
	case run.Lost() > 0:
		return fmt.Errorf("demo: %s lost %d: %d requests, %d handshakes, %d connections", run.Method, run.Lost(),
			run.FailedRequests, run.FailedHandshakes, run.BrokenConnections)
	case run.Requests == 0:
		return fmt.Errorf("demo: %s served no request", run.Method)
	default:
		return fmt.Errorf("demo: %s: %s", run.Method, strings.Join(run.Problems, "; "))
	}
}

func (a *app) printReport(report *demo.Report) error {
	if !a.json {
		return demo.WriteTable(a.env.Stdout, report)
	}
	return a.printJSON(demoJSON{jsonVersion, report})
}

// demoJSON is a demonstration for programs.
type demoJSON struct {
	Version int `json:"version"`
	*demo.Report
}

// probePage finds out whether the page can be written, and leaves no trace.
func probePage(path string) error {
	if path == "" {
		return nil
	}
	const cure = "name another file with --html FILE, or --html '' for none"
	info, err := os.Stat(path)
	if err == nil && info.IsDir() {
		return usagef("demo: --html %s: is a folder; %s", path, cure)
	}
	var f *os.File
	if err == nil && !info.Mode().IsRegular() {
		f, err = os.OpenFile(path, os.O_WRONLY, 0)
	} else if f, err = createBeside(path); err == nil {
		err = os.Remove(f.Name())
	}
	if f != nil {
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return &codeError{exitEnvironment, fmt.Errorf("demo: the page cannot be written: %w; %s", err, cure)}
	}
	return nil
}

// createBeside creates a file in the folder of path, to be renamed to it.
func createBeside(path string) (*os.File, error) {
	return os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
}

// writePage publishes the page by rename. What is no regular file, such as a
// pipe, is written as it is.
func writePage(path string, report *demo.Report) error {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		return errors.Join(demo.WritePage(f, report), f.Close())
	}
	f, err := createBeside(path)
	if err != nil {
		return err
	}
	err = errors.Join(demo.WritePage(f, report), f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// progress shows how the demo goes: a line for each event, and on a terminal
// one that is rewritten below them.
type progress struct {
	w       io.Writer
	live    bool
	colours bool
	several bool
	shown   bool
	last    demo.Status
}

func (p *progress) event(e demo.Event) {
	p.clear()
	text := fmt.Sprintf("%6.1fs  %s", e.At.Seconds(), e.Text)
	if p.several {
		text = fmt.Sprintf("%-9s %s", e.Method, text)
	}
	if e.Bad && p.colours {
		text = "\x1b[31m" + text + colourReset
	}
	fmt.Fprintln(p.w, text)
}

func (p *progress) status(s demo.Status) {
	if !p.live {
		return
	}
	rate := int64(0)
	if s.Method == p.last.Method && s.At > p.last.At {
		rate = int64(float64(s.Requests-p.last.Requests) / (s.At - p.last.At).Seconds())
	}
	if s.Method != p.last.Method || s.At-p.last.At >= time.Second || s.At < p.last.At {
		p.last = s
	}
	p.clear()
	const width = 24
	filled := int(min(1, s.At.Seconds()/s.Of.Seconds()) * width)
	fmt.Fprintf(p.w, "%s%s %.0f/%.0fs  generation %d, %d servers  %d requests, %d/s  %d lost",
		strings.Repeat("#", filled), strings.Repeat("-", width-filled), s.At.Seconds(), s.Of.Seconds(),
		s.Active, s.Servers, s.Requests, rate, s.Failures)
	p.shown = true
}

func (p *progress) clear() {
	if p.shown {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.shown = false
	}
}
