// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"instar/handover"
)

func (a *app) upgradeCommand() *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "upgrade SOCKET",
		Short: "Make the server with that control socket upgrade itself",
		Long: `Ask the server that has its control socket at this path ("@NAME" for an abstract
one) to start its successor, and wait until the successor serves and has stood
its probation. Exit code 0 says that it has. Otherwise the line says why not,
and the server serves as before.

Exit code 5 is for what can be tried again later: another upgrade is under way,
or too many generations still drain. When this command is interrupted, the
upgrade goes on.

As ExecReload= of a systemd unit it makes "systemctl reload" tell the result.`,
		Args: args("SOCKET"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			if timeout < 0 {
				return usagef("upgrade: --timeout must not be negative")
			}
			if timeout > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, timeout)
				defer cancel()
			}
			status, err := handover.RequestUpgrade(ctx, args[0])
			if err != nil {
				return a.waited(cmd.Context(), err, timeout)
			}
			if a.json {
				return a.printJSON(newServerJSON(status))
			}
			if s := status.Successor; s != nil {
				a.printf("%s: generation %d (pid %d, build %s) serves; generation %d (pid %d, build %s) drains",
					s.Name, s.Generation, s.PID, s.Build, status.Generation, status.PID, status.Build)
			}
			return nil
		},
	}
	a.jsonFlag(cmd)
	cmd.Flags().DurationVar(&timeout, "timeout", 0, "wait no longer than this; the upgrade goes on (default: no limit)")
	return cmd
}

// waited words the end of a wait.
func (a *app) waited(ctx context.Context, err error, timeout time.Duration) error {
	switch {
	case ctx.Err() != nil:
		return errInterrupted
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("upgrade: no result after %v; it goes on", timeout)
	}
	return err
}

// serverJSON is a server of processes for programs.
type serverJSON struct {
	Version int `json:"version"`
	handover.Status
}

func newServerJSON(s handover.Status) serverJSON { return serverJSON{jsonVersion, s} }

func (a *app) statusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status SOCKET",
		Short: "Show the processes of the server with that control socket",
		Long: `Show the processes of the server that has its control socket at this path: the
one that serves, the ones before it that still drain, and the names of the
sockets and files that go to a successor.`,
		Args: args("SOCKET"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), 10*time.Second)
			defer cancel()
			s, err := handover.RequestStatus(ctx, args[0])
			if errors.Is(err, context.DeadlineExceeded) {
				return fmt.Errorf("status: the server at %s does not answer; it starts, hangs, or hands over", args[0])
			}
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(newServerJSON(s))
			}
			state := s.Phase
			if s.Probation {
				state += ", in its probation"
			}
			if s.Upgrading {
				state += ", upgrading"
			}
			a.printf("%s: generation %d, pid %d, build %s: %s", s.Name, s.Generation, s.PID, s.Build, state)
			for _, p := range s.Older {
				a.printf("  generation %d, pid %d, build %s: draining", p.Generation, p.PID, p.Build)
			}
			if len(s.Handed) > 0 {
				a.printf("hands over: %s", strings.Join(s.Handed, ", "))
			}
			return nil
		},
	}
	a.jsonFlag(cmd)
	return cmd
}
