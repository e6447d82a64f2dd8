// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"instar/internal/bpffs"
	"instar/internal/sockdiag"
	"instar/metrics"
)

// unixPrefix starts the address of a Unix socket.
const unixPrefix = "unix:"

func (a *app) metricsCommand() *cobra.Command {
	var listen string
	var o metrics.Options
	cmd := &cobra.Command{
		Use:   "metrics [GROUP...]",
		Short: "Tell Prometheus about groups and handovers",
		Long: `Print the metrics of the groups of this machine, or of those that are named, once,
in the text format of Prometheus. With --listen serve them at /metrics until SIGINT
or SIGTERM, which is exit code 0: everything is read anew at each scrape.

--socket adds the state of a server with that control socket; it can be given
several times. Flows of steering "flow" are counted at most every --flows-every, since
that takes a good part of a second for a million; "0s" counts at each scrape, and a
negative duration never.

docs/metrics.md lists all metrics; examples/grafana has a dashboard.`,
		RunE: func(_ *cobra.Command, names []string) error {
			for _, name := range names {
				e, err := a.resolve(name)
				if err != nil {
					return err
				}
				o.Paths = append(o.Paths, e.Path)
			}
			if o.Root = a.root; o.FlowsEvery == 0 {
				o.FlowsEvery = time.Nanosecond
			}
			o.Logger = slog.New(slog.NewTextHandler(a.env.Stderr, nil))
			if listen == "" {
				// What could not be listed is the command's error.
				return metrics.Write(a.env.Stdout, metrics.New(o))
			}
			return a.serveMetrics(listen, metrics.New(o))
		},
	}
	cmd.Flags().StringVar(&listen, "listen", "", "serve at this `address`: IP:port, :port, or unix:PATH")
	cmd.Flags().StringArrayVar(&o.Sockets, "socket", nil, "also tell of the server with this control `socket`")
	cmd.Flags().DurationVar(&o.FlowsEvery, "flows-every", metrics.DefaultFlowsEvery, "how old counts of flows may be")
	return cmd
}

func (a *app) serveMetrics(address string, c *metrics.Collector) error {
	ctx, stop := a.env.Interruptible(a.env.Context)
	defer stop()
	l, err := listenAt(ctx, address)
	if err != nil {
		return fmt.Errorf("metrics: listen at %s: %w", address, err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics.Handler(c))
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, "Instar: the metrics are at /metrics.")
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 5 * time.Minute,
		ErrorLog: slog.NewLogLogger(slog.NewTextHandler(a.env.Stderr, nil), slog.LevelWarn)}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	if strings.HasPrefix(address, unixPrefix) {
		a.printf("serving /metrics at %s", address)
	} else {
		a.printf("serving http://%s/metrics", l.Addr())
	}
	select {
	case err = <-served:
		return fmt.Errorf("metrics: serve at %s: %w", address, err)
	case <-ctx.Done():
	}
	// A scrape that is under way ends; a client that reads nothing does not keep us.
	patience, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := server.Shutdown(patience); err != nil {
		return errors.Join(fmt.Errorf("metrics: a scrape did not end: %w", err), server.Close())
	}
	return nil
}

// listenAt opens the address of "--listen". What it refuses says what to do.
func listenAt(ctx context.Context, address string) (net.Listener, error) {
	if path, ok := strings.CutPrefix(address, unixPrefix); ok {
		return listenUnix(ctx, path)
	}
	_, service, err := net.SplitHostPort(address)
	port, perr := strconv.ParseUint(service, 10, 16)
	if err != nil || perr != nil {
		return nil, usagef("want IP:port, :port or unix:PATH")
	}
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", address)
	var op *net.OpError
	if errors.As(err, &op) {
		err = op.Err // it has the address once more
	}
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return nil, refusedf("%w: %s listens on port %d; stop it, or choose another address", err, holder(uint16(port)), port)
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return nil, usagef("%w: no device of this network namespace has it", err)
	case errors.Is(err, unix.EACCES):
		return nil, &codeError{exitEnvironment, fmt.Errorf("%w: a port below net.ipv4.ip_unprivileged_port_start needs CAP_NET_BIND_SERVICE; "+
			"choose a higher one", err)}
	}
	return l, err
}

// holder names who listens on a TCP port.
func holder(port uint16) string {
	sockets, err := sockdiag.TCPListeners(port)
	if err == nil {
		for _, s := range sockets {
			for _, p := range sockdiag.Owners(s.Inode)[s.Inode] {
				return p.String()
			}
		}
	}
	return "another process"
}

// listenUnix listens at a path, in the place of a socket that a dead process left there.
func listenUnix(ctx context.Context, path string) (net.Listener, error) {
	if path == "" {
		return nil, usagef("missing the path after %q", unixPrefix)
	}
	if !strings.HasPrefix(path, "@") {
		// Who looks at what is there, and replaces it, does so alone.
		lock, err := bpffs.Acquire(ctx, filepath.Dir(path), true)
		if err != nil {
			return nil, fmt.Errorf("lock the folder: %w", err)
		}
		defer func() { _ = lock.Unlock() }()
		if err := removeStale(path); err != nil {
			return nil, err
		}
	}
	var config net.ListenConfig
	l, err := config.Listen(ctx, "unix", path)
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, refusedf("another process listens there; stop it, or choose another path")
	}
	return l, err
}

// removeStale removes a socket at which nobody listens.
func removeStale(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return refusedf("it is there and is no socket (%v); choose another path", info.Mode())
	}
	c, err := net.Dial("unix", path)
	switch {
	case err == nil:
		_ = c.Close()
		return refusedf("another process listens there; stop it, or choose another path")
	case errors.Is(err, unix.ECONNREFUSED):
		return os.Remove(path)
	case errors.Is(err, unix.EPROTOTYPE):
		return refusedf("it is a socket of another type; choose another path")
	}
	return err
}
