// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"instar/cmd/instar/demo"
	"instar/internal/sandbox"
	"instar/wgdemo"
)

// How the WireGuard demonstration starts this program again.
var (
	wireguardSandbox = []string{"demo", "wireguard", "sandbox"}
	wireguardGateway = []string{"demo", "wireguard", "gateway"}
)

func (a *app) demoWireGuardCommand() *cobra.Command {
	var o wgdemo.Options
	cmd := &cobra.Command{
		Use:   "wireguard",
		Short: "Upgrade a WireGuard gateway under load and count what its peers lose",
		Long: `Start a WireGuard gateway in user space, replace it several times by a new
process while peers use it, and count what they lose. The gateway and each peer
have a network namespace and a TUN device of their own, and veth pairs connect
them, half of them over IPv6: nothing of the machine is touched, and nothing is
left behind. It needs root, takes 15 s, and runs at a higher priority (nice -10)
than other processes.

The load: through each tunnel, in both directions, 100 packets a second that are
to be answered, and a TCP connection whose content is compared; and one more peer
that comes without a session, makes a handshake, and goes, again and again.

The TUN device goes from process to process, sessions do not: the new process
makes a handshake with each peer at once, and the old one serves the old
sessions until then.

Progress goes to the standard error, a table to the standard output. The exit
code is 1 when anything was lost. Ctrl-C ends it early, with exit code 130.`,
		Example: `  sudo instar demo wireguard
  sudo instar demo wireguard --upgrades 20 --peers 10 --json`,
		Args: args(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, name := range []string{"upgrades", "peers"} {
				// Zero stands for the default, which is not what somebody means
				// who writes it.
				if f := cmd.Flags().Lookup(name); f.Changed && f.Value.String() == "0" {
					return usagef("demo wireguard: --%s must not be 0", name)
				}
			}
			o, err := o.WithDefaults()
			if err != nil {
				return usagef("demo wireguard: %w", err)
			}
			return a.demoWireGuard(o)
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.Upgrades, "upgrades", wgdemo.DefaultUpgrades, "replace the gateway `n` times under load")
	f.IntVar(&o.Peers, "peers", wgdemo.DefaultPeers, "keep `n` peers; one more comes and goes")
	a.jsonFlag(cmd)
	cmd.AddCommand(
		process(wireguardSandbox[2], func(args []string) int {
			ctx, stop := a.env.Interruptible(a.env.Context)
			defer stop()
			return wgdemo.Sandbox(ctx, args)
		}),
		process(wireguardGateway[2], func(args []string) int {
			return wgdemo.Main(a.env.Context, args, wgdemo.Env{Stdout: a.env.Stdout, Stderr: a.env.Stderr})
		}),
	)
	return cmd
}

func (a *app) demoWireGuard(o wgdemo.Options) error {
	ctx, stop := a.env.Interruptible(a.env.Context)
	defer stop()
	live, shown := a.env.Terminal(a.env.Stderr), time.Duration(0)
	show := &progress{w: a.env.Stderr, live: live, colours: a.env.colours(a.env.Stderr)}
	report, err := wgdemo.Run(ctx, o, wgdemo.Program{Self: a.env.Self, Sandbox: wireguardSandbox, Gateway: wireguardGateway}, a.env.Stderr,
		func(p wgdemo.Progress) {
			switch {
			case p.Text != "":
				show.event(demo.Event{At: p.At, Text: p.Text, Bad: p.Bad})
			case live && p.At-shown >= 100*time.Millisecond:
				shown = p.At
				show.clear()
				fmt.Fprintf(a.env.Stderr, "%.0f/%.0fs  generation %d, %d processes  %d handshakes, %d TCP bytes  %d lost",
					p.At.Seconds(), p.Of.Seconds(), p.Active, p.Processes, p.Handshakes, p.TCPBytes, p.Lost)
				show.shown = true
			}
		})
	show.clear()
	switch _, environment := errors.AsType[*sandbox.EnvironmentError](err); {
	case errors.Is(err, context.Canceled):
		return fmt.Errorf("demo wireguard: %w", errInterrupted)
	case environment:
		return &codeError{exitEnvironment, fmt.Errorf("demo wireguard: %w", err)}
	case err != nil:
		return fmt.Errorf("demo wireguard: %w", err)
	}
	if a.json {
		err = a.printJSON(demoWireGuardJSON{jsonVersion, report})
	} else {
		err = wgdemo.WriteTable(a.env.Stdout, report)
	}
	if err != nil {
		return err
	}
	if run := &report.Runs[0]; !run.OK() {
		return fmt.Errorf("demo wireguard: %s", run.Failed())
	}
	if !a.json {
		fmt.Fprintln(a.env.Stdout, "\ninstar: nothing lost.")
	}
	return nil
}

// demoWireGuardJSON is a demonstration for programs.
type demoWireGuardJSON struct {
	Version int `json:"version"`
	*wgdemo.Report
}
