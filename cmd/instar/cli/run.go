// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"os/user"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"instar/internal/service"
	"instar/internal/systemd"
	"instar/run"
)

// launchCommand is the hidden command that becomes the server.
const launchCommand = "run-server"

func (a *app) runCommand() *cobra.Command {
	var (
		o         run.Options
		listen    []string
		owner     string
		printUnit bool
		asJSON    bool
		verbose   bool
	)
	cmd := &cobra.Command{
		Use:   "run [flags] -- SERVER [ARGS...]",
		Short: "Run any server so that it is upgraded with nothing lost",
		Long: `Bind sockets, start SERVER with them, and replace it when asked, while this
process stays. The server gets the sockets by socket activation (LISTEN_FDS,
LISTEN_FDNAMES) and says READY=1 at NOTIFY_SOCKET, as under systemd.

SIGHUP, "instar upgrade" at the control socket, or with --watch a new executable,
start the successor. When it has said READY=1 and stood its probation the
predecessor gets SIGTERM, and after --drain SIGKILL. When it fails, the
predecessor goes on as if nothing had happened. A server that ends by itself
is started again, after 0.1 s, 0.2 s and so on, to 30 s.

--listen NAME=tcp:IP:PORT, NAME=unix:PATH, or
         NAME=udp:IP:PORT,steering=KIND[,workers=N][,rcvbuf=BYTES][,flow-timeout=TIME]
TCP and Unix listeners are the same for all processes. With UDP each start gets
sockets of its own; KIND is stateless (each packet stands for itself) or flow (a
sender stays with its process). UDP needs root, or what "instar prepare" needs.

SIGTERM and SIGINT end all processes, with exit code 0. SIGQUIT, SIGUSR1,
SIGUSR2, SIGWINCH and real-time signals go to the server. It works as process 1
of a container.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("run: missing SERVER, the program to run and its arguments after \"--\"")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.Command, o.Root = args, a.root
			o.Launcher = []string{a.env.Self[0], a.env.Self[1], launchCommand}
			for _, text := range listen {
				l, err := run.ParseListener(text)
				if err != nil {
					return usagef("--listen: %w", err)
				}
				o.Listen = append(o.Listen, l)
			}
			if owner != "" {
				who, err := runAs(owner)
				if err != nil {
					return err
				}
				o.User = who
			}
			if cmd.Flags().Changed("probation") && o.Probation == 0 {
				o.Probation = -1
			}
			if printUnit {
				unit, err := unitOf(cmd, args, o)
				if err == nil {
					fmt.Fprint(a.env.Stdout, unit)
				}
				return err
			}
			o.Logger = service.Logger(a.env.Stderr, asJSON, verbose)
			return a.supervise(cmd.Context(), o)
		},
	}
	f := cmd.Flags()
	f.SetInterspersed(false)
	f.StringArrayVar(&listen, "listen", nil, "a `NAME=NETWORK:ADDRESS` to listen on; may be given repeatedly")
	f.StringVar(&owner, "user", "", "run the server as `USER[:GROUP]`, names or numbers; this process stays what it is")
	f.DurationVar(&o.ReadyTimeout, "ready-timeout", run.DefaultReadyTimeout, "`time` that a start may take until READY=1")
	f.DurationVar(&o.Probation, "probation", run.DefaultProbation, "`time` that the predecessor goes on beside a ready successor; 0 for none")
	f.DurationVar(&o.Drain, "drain", run.DefaultDrain, "`time` that UDP flows keep a predecessor, and then that it has from SIGTERM to SIGKILL")
	f.IntVar(&o.MaxProcesses, "max-processes", run.DefaultMaxProcesses, "refuse upgrades while `n` processes live")
	f.BoolVar(&o.NoNotify, "no-notify", false, "the server never says READY=1: it is ready as soon as it is executed")
	f.BoolVar(&o.NonBlocking, "nonblock", false, "pass non-blocking sockets, for servers that expect it")
	f.StringVar(&o.Control, "control", "", "`path` of the control socket for \"instar upgrade\" and \"instar status\"; @NAME is abstract")
	f.StringVar(&o.Service, "service", "", "`name` of the service in UDP groups and answers (default: SERVER's base name)")
	f.BoolVar(&o.Watch, "watch", false, "upgrade when SERVER's executable has changed")
	f.BoolVar(&printUnit, "print-unit", false, "print a systemd unit for this command line, and do nothing else")
	f.BoolVar(&asJSON, "log-json", false, "log in JSON")
	f.BoolVarP(&verbose, "verbose", "v", false, "log more")
	return cmd
}

// supervise runs the server until a signal ends it.
func (a *app) supervise(ctx context.Context, o run.Options) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	signals := make(chan os.Signal, 16)
	forwarded := []os.Signal{unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH}
	for n := 34; n <= 64; n++ { // SIGRTMIN to SIGRTMAX
		forwarded = append(forwarded, syscall.Signal(n))
	}
	signal.Notify(signals, append(forwarded, unix.SIGHUP, unix.SIGTERM, unix.SIGINT)...)
	defer signal.Stop(signals)
	notifier, err := systemd.NewNotifier(a.env.Getenv)
	if err != nil {
		return err
	}
	s, err := run.New(o)
	if err != nil {
		if errors.Is(err, run.ErrOptions) {
			return usagef("run: %w", err)
		}
		return err
	}
	tell := func(err error) {
		if err != nil {
			o.Logger.Warn("service manager", "error", err)
		}
	}
	var upgrades sync.WaitGroup
	defer upgrades.Wait()
	ended := make(chan error, 1)
	go func() {
		ended <- s.Run(ctx, func() { tell(notifier.Ready("")) })
	}()
	for {
		select {
		case err := <-ended:
			return err
		case sig := <-signals:
			switch sig {
			case unix.SIGTERM, unix.SIGINT:
				if ctx.Err() == nil {
					tell(notifier.Stopping())
				}
				cancel()
			case unix.SIGHUP:
				upgrades.Go(func() {
					if err := s.Upgrade(ctx); err != nil && ctx.Err() == nil {
						o.Logger.Warn("upgrade by SIGHUP", "error", err)
					}
				})
			default:
				s.Signal(sig.(syscall.Signal))
			}
		}
	}
}

// runAs reads USER[:GROUP] and finds what else belongs to the user.
func runAs(name string) (*run.User, error) {
	who, err := lookupOwner("--user", name)
	if err != nil {
		return nil, err
	}
	u := &run.User{UID: who.UID, GID: who.GID}
	if found, err := user.LookupId(strconv.Itoa(who.UID)); err == nil {
		u.Name, u.Home = found.Username, found.HomeDir
	}
	return u, nil
}

// unitOf writes a systemd unit for a command line.
func unitOf(cmd *cobra.Command, server []string, o run.Options) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	words := []string{self, "run"}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if f.Name == "print-unit" {
			return
		}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			for _, v := range list.GetSlice() {
				words = append(words, "--"+f.Name+"="+v)
			}
			return
		}
		words = append(words, "--"+f.Name+"="+f.Value.String())
	})
	words = append(append(words, "--"), server...)
	for i, w := range words {
		words[i] = unitWord(w)
	}
	reload := "/bin/kill -HUP $MAINPID"
	if o.Control != "" {
		reload = strings.Join([]string{unitWord(self), "upgrade", unitWord(o.Control)}, " ")
	}
	stop := 2*o.Drain + 10*time.Second
	return fmt.Sprintf(`[Unit]
Description=%s under instar run
After=network.target

[Service]
Type=notify
NotifyAccess=main
ExecStart=%s
ExecReload=%s
KillMode=mixed
TimeoutStartSec=%d
TimeoutStopSec=%d
Restart=on-failure

[Install]
WantedBy=multi-user.target
`, strings.ReplaceAll(server[0], "%", "%%"), strings.Join(words, " "), reload,
		int((o.ReadyTimeout + 10*time.Second).Seconds()), int(stop.Seconds())), nil
}

// unitWord quotes a word of a command line for a unit (systemd.service(5)).
func unitWord(w string) string {
	w = strings.NewReplacer("%", "%%", "$", "$$").Replace(w)
	if w != "" && !strings.ContainsAny(w, " \t\n\"'\\;") {
		return w
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`, "\t", `\t`).Replace(w) + `"`
}
