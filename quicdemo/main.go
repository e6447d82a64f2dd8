// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"instar/handover"
	"instar/internal/service"
)

// Env is what Main uses of its process. Zero fields are the process's own.
type Env struct {
	Stdout, Stderr io.Writer
	Getenv         func(string) string
}

// envGeneration is the number to answer with in modes that know none, for who
// starts several servers.
const envGeneration = "QUICDEMO_GENERATION"

// Exit codes of Main.
const (
	ExitOK    = 0
	ExitError = 1 // could not do it
	ExitUsage = 2 // the command line is wrong
	ExitLost  = 3 // load: handshakes, requests or connections were lost
)

// errLost makes load exit with ExitLost.
var errLost = errors.New("something was lost")

// usageError makes Main exit with ExitUsage.
type usageError struct{ error }

// Main is the command quicdemo with the arguments after its name. It returns
// the exit code.
func Main(ctx context.Context, args []string, env Env) int {
	if env.Stdout == nil {
		env.Stdout = os.Stdout
	}
	if env.Stderr == nil {
		env.Stderr = os.Stderr
	}
	if env.Getenv == nil {
		env.Getenv = os.Getenv
	}
	root := &cobra.Command{
		Use:   "quicdemo",
		Short: "An HTTP/3 server that upgrades itself with nothing lost, and a load client that proves it",
		Long: `quicdemo serves HTTP/3 and upgrades itself with nothing lost. Its load client
keeps connections and handshakes going and counts everything that fails.

Exit codes: 0 done, 1 could not do it, 2 wrong command line,
3 load: handshakes, requests or connections were lost.`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		Args:              noArgs,
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(serveCommand(env), loadCommand(env))
	root.SetArgs(args)
	root.SetOut(env.Stdout)
	root.SetErr(env.Stderr)
	err := root.ExecuteContext(ctx)
	switch {
	case err == nil:
		return ExitOK
	case errors.Is(err, errLost):
		return ExitLost
	}
	fmt.Fprintln(env.Stderr, "quicdemo:", err)
	if _, ok := errors.AsType[usageError](err); ok {
		fmt.Fprintln(env.Stderr, "Run 'quicdemo --help' for usage.")
		return ExitUsage
	}
	return ExitError
}

// noArgs refuses arguments as a usage error.
func noArgs(cmd *cobra.Command, args []string) error {
	if err := cobra.NoArgs(cmd, args); err != nil {
		return usageError{err}
	}
	return nil
}

func serveCommand(env Env) *cobra.Command {
	var (
		cfg     ServerConfig
		mode    string
		asJSON  bool
		verbose bool
	)
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve HTTP/3",
		Long: `Serve HTTP/3, and HTTP/1.1 and HTTP/2 at the same port. When new connections come to this process, it writes

  ready generation=N pid=P addr=A

to standard output (with --json an object with more). Logs go to standard error.

Signals:
  HUP, USR2   start the same command line again, from the file that is there now;
              leave when the successor has taken over, serve on when it fails.
              The same happens when somebody else starts a second server with the
              same --control
  TERM, INT   refuse new connections, say GOAWAY, wait for connections until the
              deadline, exit 0; with a predecessor that still drains: hand back to
              it and drain; while draining: close what is left
  again       exit at once

Pages: /  /status  /bytes/N?seed=S&ms=M  /stream?seconds=S  /slow?seconds=S`,
		Example: `  quicdemo serve --addr 127.0.0.1:4433
  quicdemo serve --addr '[::]:443' --workers 4 --cert /var/lib/quicdemo/cert.pem
  kill -HUP PID`,
		Args: noArgs,
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Addr, "addr", "127.0.0.1:4433", "`IP:port` to listen on")
	f.StringVar(&cfg.Network, "network", "udp", "udp, udp4 or udp6")
	f.StringVar(&mode, "mode", string(ModeInstar), "instar: steered generations; reuseport: bare SO_REUSEPORT, for comparison; plain: one socket")
	f.IntVar(&cfg.Workers, "workers", 2, "sockets, each with a QUIC transport")
	f.StringVar(&cfg.Root, "root", "", "`folder` on a bpffs for the group's pins (default /sys/fs/bpf/instar)")
	f.BoolVar(&cfg.Pinless, "pinless", false, "no pins: the group's maps and program go from server to server as descriptors; needs no bpffs, and 'instar show' does not see the group")
	f.StringVar(&cfg.Service, "service", "quicdemo", "the group's owner; only the same service may join it")
	f.StringVar(&cfg.CertFile, "cert", "", "PEM `file` with certificate and key, made when it does not exist (default: a certificate in memory)")
	f.StringVar(&cfg.Build, "build", "", "`name` of the build in logs and answers (default: from the executable)")
	f.DurationVar(&cfg.HandshakeGrace, "handshake-grace", 3*time.Second, "time from being superseded to GOAWAY")
	f.DurationVar(&cfg.DrainDeadline, "deadline", 30*time.Second, "longest time from GOAWAY to the end of the last connection")
	f.DurationVar(&cfg.UpgradeTimeout, "upgrade-timeout", 30*time.Second, "time that a successor has to become ready")
	f.DurationVar(&cfg.Probation, "probation", 5*time.Second, "time after an upgrade in which the predecessor takes back from a successor that fails")
	f.StringVar(&cfg.Control, "control", "", "`path` of the control socket, for 'instar upgrade' and for a server that somebody else starts to take over (default \"@quicdemo-ADDR\", an abstract one)")
	f.BoolVar(&cfg.TCP, "tcp", true, "serve HTTP/1.1 and HTTP/2 at the same port (mode instar)")
	f.BoolVar(&asJSON, "json", false, "write the ready line, and logs, as JSON")
	f.BoolVarP(&verbose, "verbose", "v", false, "log debug messages")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg.Mode = Mode(mode)
		switch cfg.Mode {
		case ModeInstar, ModeReusePort, ModePlain:
		default:
			return usageError{fmt.Errorf("unknown mode %q", mode)}
		}
		// On the command line 0 means none.
		for _, d := range []*time.Duration{&cfg.HandshakeGrace, &cfg.Probation} {
			if *d == 0 {
				*d = -1
			}
		}
		if cfg.Control == "" && cfg.Mode == ModeInstar {
			cfg.Control = "@quicdemo-" + cfg.Addr
		}
		return serve(cmd.Context(), cfg, asJSON, verbose, env)
	}
	return cmd
}

func serve(ctx context.Context, cfg ServerConfig, asJSON, verbose bool, env Env) error {
	if text := env.Getenv(envGeneration); text != "" {
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			return fmt.Errorf("read %s: %w", envGeneration, err)
		}
		cfg.Generation = uint32(n)
	}
	cfg.Logger = service.Logger(env.Stderr, asJSON, verbose)
	cfg.Stdout, _ = env.Stdout.(*os.File)
	cfg.Stderr, _ = env.Stderr.(*os.File)
	cfg.Ready = func(r Ready) {
		line := fmt.Appendf(nil, "ready generation=%d pid=%d addr=%s\n", r.Generation, r.PID, r.Addr)
		if asJSON {
			line, _ = json.Marshal(r) // strings and numbers
			line = append(line, '\n')
		}
		if _, err := env.Stdout.Write(line); err != nil {
			cfg.Logger.Warn("nobody reads the ready line", "error", err)
		}
	}
	server, err := NewServer(cfg)
	if err != nil {
		return usageError{err}
	}

	return service.Run(ctx, server, func(err error) {
		if errors.Is(err, handover.ErrNotActive) { // the others are in the log already
			cfg.Logger.Error("no upgrade", "build", server.cfg.Build, "error", err)
		}
	})
}

func loadCommand(env Env) *cobra.Command {
	var (
		cfg    LoadConfig
		cert   string
		asJSON bool
		every  time.Duration
	)
	cmd := &cobra.Command{
		Use:   "load",
		Short: "Put load on a server and count every loss",
		Long: `Put load on a server and count every loss: handshakes that failed, requests that
failed or had a wrong body, connections that broke. Acting on GOAWAY is no loss.

Persistent connections download all the time, and change their port in the
middle of downloads, by migration and as behind a NAT that forgot them. New
connections come at a rate; a part of them resumes with 0-RTT.

Ends after the duration or at the first INT or TERM, and writes a report.
Exit code 3 when something was lost.`,
		Example: `  quicdemo load --addr 127.0.0.1:4433 --duration 30s
  quicdemo load --addr 127.0.0.1:4433 --connections 20 --new 5 --json`,
		Args: noArgs,
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Addr, "addr", "127.0.0.1:4433", "`IP:port` of the server")
	f.StringVar(&cfg.ServerName, "server-name", "localhost", "TLS server `name`")
	f.StringVar(&cert, "cert", "", "PEM `file` with the certificate to trust (default: any certificate is accepted)")
	f.IntVar(&cfg.Connections, "connections", 200, "persistent connections")
	f.Float64Var(&cfg.NewPerSecond, "new", 50, "new connections a second")
	f.Float64Var(&cfg.RequestsPerSecond, "requests", 1, "requests a second on each persistent connection")
	f.Int64Var(&cfg.MinBytes, "min", 1<<10, "smallest download in bytes")
	f.Int64Var(&cfg.MaxBytes, "max", 256<<10, "largest download in bytes")
	f.Float64Var(&cfg.MigrationsPerSecond, "migrations", 5, "connection migrations a second, over all connections")
	f.Float64Var(&cfg.RebindsPerSecond, "rebinds", 5, "NAT rebindings a second, over all connections")
	f.Float64Var(&cfg.Resume, "resume", 0.5, "part of the new connections that resumes with 0-RTT")
	f.DurationVar(&cfg.Duration, "duration", 0, "how long (default: until a signal)")
	f.Uint64Var(&cfg.Seed, "seed", 0, "seed of everything random (default: random)")
	f.BoolVar(&asJSON, "json", false, "write the report as JSON, and no progress")
	f.DurationVar(&every, "progress", time.Second, "time between lines of progress on standard error, 0 for none")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		// On the command line 0 means none.
		for _, v := range []*float64{&cfg.NewPerSecond, &cfg.MigrationsPerSecond, &cfg.RebindsPerSecond, &cfg.Resume} {
			if *v == 0 {
				*v = -1
			}
		}
		if cfg.Connections == 0 {
			cfg.Connections = -1
		}
		if cert != "" {
			pair, err := readCertificate(cert)
			if err != nil {
				return err
			}
			cfg.RootCAs = rootsOf(pair)
		}
		if !asJSON && every > 0 {
			cfg.Sample = progress(env.Stderr, every)
		}
		ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		result, err := Load(ctx, cfg)
		if err != nil {
			return usageError{err}
		}
		if asJSON {
			encoder := json.NewEncoder(env.Stdout)
			encoder.SetIndent("", "  ")
			err = encoder.Encode(result)
		} else {
			_, err = io.WriteString(env.Stdout, result.String())
		}
		if err == nil && result.Lost() > 0 {
			err = errLost
		}
		return err
	}
	return cmd
}

// rootsOf trusts exactly the leaf of a self-signed certificate.
func rootsOf(cert tls.Certificate) *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(cert.Leaf)
	return pool
}

// progress returns a sample callback that writes a line now and then.
func progress(w io.Writer, every time.Duration) func(Sample) {
	var next time.Duration
	sum := Sample{Requests: map[uint32]int{}}
	return func(s Sample) {
		for g, n := range s.Requests {
			sum.Requests[g] += n
		}
		sum.Failures += s.Failures
		if s.At < next {
			return
		}
		next = s.At + every
		fmt.Fprintf(w, "%6.1fs  open %d  moved %d  failures %d  requests by generation %v\n",
			s.At.Seconds(), s.Open, s.Moved, sum.Failures, sum.Requests)
		sum = Sample{Requests: map[uint32]int{}}
	}
}
