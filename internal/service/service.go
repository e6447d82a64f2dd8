// SPDX-License-Identifier: Apache-2.0

// Package service runs a server that upgrades itself as a process: its signals, and its log.
package service

import (
	"context"
	"io"
	"log/slog"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

// Server is what the process serves.
type Server interface {
	// Run serves until the server has ended.
	Run(ctx context.Context) error
	// Upgrade starts a successor and returns how that went.
	Upgrade(ctx context.Context) error
	// Stop makes Run drain and return.
	Stop()
}

// Run serves. SIGHUP and SIGUSR2 upgrade, several at the same time as well; upgraded gets
// the outcome of each. SIGTERM and SIGINT stop, the second of them at once. A reader of the
// output that left (SIGPIPE) ends nothing.
func Run(ctx context.Context, server Server, upgraded func(error)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unix.SIGHUP, unix.SIGUSR2, unix.SIGTERM, unix.SIGINT, unix.SIGPIPE)
	defer signal.Stop(signals)
	ended := make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	outcomes := make(chan error, 16)
	upgrades := 0
	finished := func(err error) {
		upgrades--
		upgraded(err)
	}
	defer func() {
		cancel()
		for upgrades > 0 {
			finished(<-outcomes)
		}
	}()
	for stops := 0; ; {
		select {
		case err := <-ended:
			return err
		case err := <-outcomes:
			finished(err)
		case sig := <-signals:
			switch sig {
			case unix.SIGHUP, unix.SIGUSR2:
				upgrades++
				go func() { outcomes <- server.Upgrade(ctx) }()
			case unix.SIGTERM, unix.SIGINT:
				if stops++; stops == 1 {
					server.Stop()
				} else {
					cancel()
				}
			}
		}
	}
}

// Logger writes text, or JSON, and with verbose debug messages too.
func Logger(w io.Writer, asJSON, verbose bool) *slog.Logger {
	options := &slog.HandlerOptions{}
	if verbose {
		options.Level = slog.LevelDebug
	}
	if asJSON {
		return slog.New(slog.NewJSONHandler(w, options))
	}
	return slog.New(slog.NewTextHandler(w, options))
}
