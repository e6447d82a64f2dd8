// SPDX-License-Identifier: Apache-2.0

package tcpdemo

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os/signal"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/sandbox"
)

// Options say what to run. The zero value is the default demonstration.
type Options struct {
	// Scenarios are those to play, by letter. Default: all.
	Scenarios []string `json:"scenarios"`
	// Upgrades is how often the server is replaced in scenarios a, b and c.
	// Default 3, at most 50.
	Upgrades int `json:"upgrades"`
	// Rate is new connections a second. Default 1,000, at most 5,000.
	Rate float64 `json:"rate"`
	// KeepAlive is the number of connections that stay. Default 500, at most 5,000.
	KeepAlive int `json:"keepalive"`
}

// Defaults of Options.
const (
	DefaultUpgrades  = 3
	DefaultRate      = 1000
	DefaultKeepAlive = 500
)

// WithDefaults fills in what is zero and checks the rest.
func (o Options) WithDefaults() (Options, error) {
	if len(o.Scenarios) == 0 {
		for _, s := range scenarios {
			o.Scenarios = append(o.Scenarios, s.letter)
		}
	}
	o.Upgrades = cmp.Or(o.Upgrades, DefaultUpgrades)
	o.Rate = cmp.Or(o.Rate, DefaultRate)
	o.KeepAlive = cmp.Or(o.KeepAlive, DefaultKeepAlive)
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	for _, letter := range o.Scenarios {
		check(slices.ContainsFunc(scenarios, func(s scenario) bool { return s.letter == letter }),
			"scenario: %q is none of a to f", letter)
	}
	check(o.Upgrades >= 1 && o.Upgrades <= 50, "upgrades: %d is not in 1 to 50", o.Upgrades)
	check(o.Rate >= 1 && o.Rate <= maxRate, "rate: %g a second is not in 1 to %d", o.Rate, maxRate)
	check(o.KeepAlive >= 1 && o.KeepAlive <= 5000, "keepalive: %d is not in 1 to 5000", o.KeepAlive)
	return o, errors.Join(errs...)
}

// Report is what the demonstration found.
type Report struct {
	Started   time.Time    `json:"started"`
	Options   Options      `json:"options"`
	Host      sandbox.Host `json:"host"`
	Scenarios []Outcome    `json:"scenarios"`
}

// OK says that every scenario ended as it should.
func (r *Report) OK() bool {
	return !slices.ContainsFunc(r.Scenarios, func(o Outcome) bool { return !o.OK })
}

// Failed names the scenarios that did not end as they should.
func (r *Report) Failed() string {
	var failed []string
	for i := range r.Scenarios {
		if o := &r.Scenarios[i]; !o.OK {
			failed = append(failed, o.Scenario+" ("+o.Verdict+")")
		}
	}
	return strings.Join(failed, "; ")
}

// Outcome is one scenario.
type Outcome struct {
	Scenario string `json:"scenario"`
	Title    string `json:"title"`
	Method   Mode   `json:"method"`
	Upgrades int    `json:"upgrades"`
	// Result is what the clients saw.
	Result
	// Facts are further numbers of the scenario.
	Facts map[string]int64 `json:"facts,omitempty"`
	// Servers are the processes in their order.
	Servers []Process `json:"servers"`
	// OK says that the scenario showed what it is to show: a loss in a and b,
	// none in the others. Verdict says it in words.
	OK      bool   `json:"ok"`
	Verdict string `json:"verdict"`
	// Problems are what went wrong besides losses.
	Problems []string `json:"problems,omitempty"`
}

// Process is one server process.
type Process struct {
	Generation int `json:"generation"`
	PID        int `json:"pid"`
	// ExitCode is -1 when a signal ended it.
	ExitCode int `json:"exit_code"`
}

// Progress is how the demonstration is going. Text is set when something
// happened, and empty ten times a second.
type Progress struct {
	Scenario string        `json:"scenario"`
	At       time.Duration `json:"at"` // since the scenario began
	Of       time.Duration `json:"of"` // how long it takes, about
	Text     string        `json:"text,omitempty"`
	// Bad marks what counts as a failure.
	Bad      bool  `json:"bad,omitempty"`
	Active   int   `json:"active"`
	Servers  int   `json:"servers"`
	Requests int64 `json:"requests"`
	Lost     int64 `json:"lost"`
}

// Program is how this program is started again.
type Program struct {
	// Self is the file of this program and the name it gets as argument zero.
	Self [2]string `json:"self"`
	// Sandbox and Server are the arguments that lead it to [Sandbox] and to
	// [ServerMain]; one more follows.
	Sandbox []string `json:"sandbox"`
	Server  []string `json:"server"`
}

// task is what the sandbox is told.
type task struct {
	Program Program `json:"program"`
	Options Options `json:"options"`
}

// Run plays the scenarios in a network namespace of their own and returns what
// they showed. Before it returns every process it started has ended. It needs
// root. ctx ends it early: the report, if there is one, then comes with ctx's
// error, and has the scenarios that were completed. stderr, if not nil, gets what a crash writes;
// progress, if not nil, is called from one goroutine.
func Run(ctx context.Context, o Options, p Program, stderr io.Writer, progress func(Progress)) (*Report, error) {
	o, err := o.WithDefaults()
	if err != nil {
		return nil, err
	}
	return sandbox.Play[Progress, Report](ctx, sandbox.Command{
		Self: p.Self, Args: p.Sandbox, Purpose: "it makes a network namespace of its own", Stderr: stderr,
	}, task{p, o}, progress)
}

// Sandbox is the process in the namespace; args is what Run passes. It returns
// the exit code.
func Sandbox(ctx context.Context, args []string) int { return sandbox.Main(ctx, args, play) }

// play plays the scenarios. When ctx ends it returns an error and those that were
// completed.
func play(ctx context.Context, t task, sandboxed *sandbox.Player[Progress, Report]) (*Report, error) {
	report := &Report{Started: time.Now(), Options: t.Options, Host: sandbox.ThisHost()}
	for i, s := range scenarios {
		if !slices.Contains(t.Options.Scenarios, s.letter) {
			continue
		}
		p := &player{Player: sandboxed, scenario: s, task: t, port: 8001 + i}
		outcome, err := p.play(ctx)
		if err != nil {
			err = fmt.Errorf("scenario %s: %w", s.letter, err)
			if len(report.Scenarios) == 0 {
				return nil, err
			}
			return report, err
		}
		report.Scenarios = append(report.Scenarios, *outcome)
	}
	return report, nil
}

// ServerMain is a server process; args is what the sandbox passes. It writes
// events to stdout, one a line, as JSON. SIGTERM stops it. It returns the exit
// code.
func ServerMain(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if err := serverMain(ctx, args, stdout, stderr); err != nil {
		fmt.Fprintf(stderr, "server: %v\n", err)
		return 1
	}
	return 0
}

func serverMain(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var cfg ServerConfig
	if len(args) != 1 {
		return errors.New("cannot be started by hand")
	}
	if err := json.Unmarshal([]byte(args[0]), &cfg); err != nil {
		return fmt.Errorf("read configuration: %w", err)
	}
	out := sandbox.NewSender(stdout)
	cfg.Event = func(e Event) { out.Send(e) }
	cfg.Logger = slog.New(slog.NewTextHandler(stderr, nil))
	server, err := NewServer(cfg)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(ctx, unix.SIGTERM)
	defer stop()
	defer context.AfterFunc(ctx, server.Stop)()
	return server.Run(context.WithoutCancel(ctx))
}
