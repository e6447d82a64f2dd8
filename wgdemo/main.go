// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"time"

	"github.com/spf13/cobra"

	"instar/handover"
	"instar/internal/service"
)

// Env is what Main uses of its process. Zero fields are the process's own.
type Env struct{ Stdout, Stderr io.Writer }

// Exit codes of Main.
const (
	ExitOK    = 0
	ExitError = 1 // could not do it
	ExitUsage = 2 // the command line is wrong
)

// usageError makes Main exit with ExitUsage.
type usageError struct{ error }

// Main is the command wgdemo with the arguments after its name. It returns the exit code.
func Main(ctx context.Context, args []string, env Env) int {
	if env.Stdout == nil {
		env.Stdout = os.Stdout
	}
	if env.Stderr == nil {
		env.Stderr = os.Stderr
	}
	var (
		cfg      GatewayConfig
		file     string
		addr     string
		asJSON   bool
		verbose  bool
		noArgs   = func(_ *cobra.Command, args []string) error { return usageErrorOf(cobra.NoArgs(nil, args)) }
		complete = cobra.CompletionOptions{DisableDefaultCmd: true}
	)
	root := &cobra.Command{
		Use:               "wgdemo",
		Short:             "A WireGuard gateway in user space that upgrades itself with no packet lost",
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: complete,
		Args:              noArgs,
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	serveCommand := &cobra.Command{
		Use:   "serve",
		Short: "Serve WireGuard peers",
		Long: `Serve WireGuard peers. The configuration file has the form of wg-quick(8):
[Interface] with PrivateKey, ListenPort, Address and MTU, and a [Peer] for each
peer with PublicKey, PresharedKey, AllowedIPs, Endpoint and PersistentKeepalive.
Routes to networks other than those of Address are the administrator's matter.

When new handshakes come to this process, it writes

  ready generation=N pid=P addr=A

to standard output (with --json an object), and further events as they come. Logs
go to standard error.

Signals:
  HUP, USR2   start the same command line again, which reads the configuration
              anew; leave when the successor has taken over and the peers have
              gone to it, serve on when it fails. The same happens when somebody
              else starts a second gateway with the same --control
  TERM, INT   stop; in the probation hand back to the predecessor; while leaving
              leave at once
  again       exit at once

Exit codes: 0 done, 1 could not do it, 2 wrong command line.`,
		Example: `  wgdemo serve --config /etc/wireguard/wg0.conf
  kill -HUP PID`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if file == "" {
				return usageError{errors.New("--config is missing")}
			}
			f, err := os.Open(file)
			if err != nil {
				return err
			}
			cfg.Config, err = ParseConfig(f)
			if err = errors.Join(err, f.Close()); err != nil {
				return fmt.Errorf("read configuration %s: %w", file, err)
			}
			if addr != "" {
				if cfg.Addr, err = netip.ParseAddr(addr); err != nil {
					return usageError{err}
				}
			}
			for _, d := range []*time.Duration{&cfg.Probation, &cfg.Hold} {
				if *d == 0 {
					*d = -1 // on the command line 0 means none
				}
			}
			return serve(cmd.Context(), cfg, asJSON, verbose, env)
		},
	}
	f := serveCommand.Flags()
	f.StringVar(&file, "config", "", "configuration `file`")
	f.StringVar(&cfg.Interface, "interface", "wg0", "`name` of the TUN device")
	f.StringVar(&addr, "addr", "", "`IP` address to listen on (default: all, of both families)")
	f.IntVar(&cfg.Workers, "workers", 2, "sockets")
	f.StringVar(&cfg.Root, "root", "", "`folder` on a bpffs for the group's pins (default /sys/fs/bpf/instar)")
	f.BoolVar(&cfg.Pinless, "pinless", false, "no pins: the group's maps and program go from process to process as descriptors; needs no bpffs")
	f.StringVar(&cfg.Service, "service", "wgdemo", "the group's owner; only the same service may join it")
	f.StringVar(&cfg.Control, "control", "", "`path` of the control socket, for 'instar upgrade' (default \"@wgdemo-INTERFACE\", an abstract one)")
	f.StringVar(&cfg.Build, "build", "", "`name` of the build in logs and answers (default: from the executable)")
	f.DurationVar(&cfg.Hold, "hold", 100*time.Millisecond, "longest time after an upgrade in which packets wait in the TUN device for known peers to come over")
	f.DurationVar(&cfg.Deadline, "deadline", 10*time.Second, "longest time to serve old sessions after an upgrade")
	f.DurationVar(&cfg.UpgradeTimeout, "upgrade-timeout", 30*time.Second, "time that a successor has to become ready")
	f.DurationVar(&cfg.Probation, "probation", 5*time.Second, "time after an upgrade in which the predecessor takes back from a successor that fails")
	f.BoolVar(&asJSON, "json", false, "write events and logs as JSON")
	f.BoolVarP(&verbose, "verbose", "v", false, "log debug messages")

	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(serveCommand)
	root.SetArgs(args)
	root.SetOut(env.Stdout)
	root.SetErr(env.Stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return ExitOK
	}
	fmt.Fprintln(env.Stderr, "wgdemo:", err)
	if _, ok := errors.AsType[usageError](err); ok {
		fmt.Fprintln(env.Stderr, "Run 'wgdemo --help' for usage.")
		return ExitUsage
	}
	return ExitError
}

func usageErrorOf(err error) error {
	if err == nil {
		return nil
	}
	return usageError{err}
}

// serve runs a gateway with the signals of the process.
func serve(ctx context.Context, cfg GatewayConfig, asJSON, verbose bool, env Env) error {
	cfg.Logger = service.Logger(env.Stderr, asJSON, verbose)
	cfg.Stdout, _ = env.Stdout.(*os.File)
	cfg.Stderr, _ = env.Stderr.(*os.File)
	cfg.Event = func(e Event) {
		line := fmt.Appendf(nil, "%s generation=%d pid=%d", e.Kind, e.Generation, e.PID)
		if e.Addr != "" {
			line = fmt.Appendf(line, " addr=%s", e.Addr)
		}
		line = append(line, '\n')
		if asJSON {
			line, _ = json.Marshal(e) // strings and numbers
			line = append(line, '\n')
		}
		if _, err := env.Stdout.Write(line); err != nil {
			cfg.Logger.Warn("nobody reads the events", "error", err)
		}
	}
	gateway, err := NewGateway(cfg)
	if err != nil {
		return usageError{err}
	}
	return service.Run(ctx, gateway, func(err error) {
		if errors.Is(err, handover.ErrNotActive) { // the others are in the log already
			cfg.Logger.Error("no upgrade", "error", err)
		}
	})
}
