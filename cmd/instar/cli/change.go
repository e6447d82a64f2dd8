// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"instar/dispatch"
)

// defaultDeadline is what "drain" grants when nobody set a deadline before.
const defaultDeadline = 30 * time.Second

// waitStep is how often "drain --wait" looks.
const waitStep = 50 * time.Millisecond

func (a *app) activateCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "activate GROUP N",
		Short: "Make generation N the one that new flows go to",
		Long: `Make generation N the one that new flows go to. The generation that was active
drains: it keeps its flows. Activating the active generation does nothing.`,
		Args: args("GROUP", "N"),
		RunE: func(_ *cobra.Command, args []string) error {
			number, err := parseNumber(args[1])
			if err != nil {
				return err
			}
			return a.change(args[0], func(g *dispatch.Group, e dispatch.Entry, s dispatch.Snapshot) error {
				info, newest, ok := find(s, number)
				if !ok {
					return missing(e, number, newest)
				}
				if info.State == dispatch.StateActive {
					a.printf("generation %d is active already", number)
					return nil
				}
				if err := g.Activate(number); err != nil {
					return err
				}
				if s.Active == 0 {
					a.printf("generation %d is active", number)
				} else {
					a.printf("generation %d is active, %d drains", number, s.Active)
				}
				return nil
			})
		},
	}
}

func (a *app) rollbackCommand() *cobra.Command {
	var from uint32
	cmd := &cobra.Command{
		Use:   "rollback GROUP",
		Short: "Make the previous generation active again",
		Long: `Make the generation that was active before active again. What is active now
drains.

Rolling back twice comes back to where it began; with --from N a script does not
need to know whether it was done already: it happens only while N is active.`,
		Args: args("GROUP"),
		RunE: func(_ *cobra.Command, args []string) error {
			return a.change(args[0], func(g *dispatch.Group, _ dispatch.Entry, s dispatch.Snapshot) error {
				if from != 0 && s.Active != from {
					a.printf("generation %d is not active (%d is): nothing to do", from, s.Active)
					return nil
				}
				number, err := g.Rollback()
				if err != nil {
					return err
				}
				a.printf("generation %d is active again, %d drains", number, s.Active)
				return nil
			})
		},
	}
	cmd.Flags().Uint32Var(&from, "from", 0, "only when generation `N` is active")
	return cmd
}

func (a *app) drainCommand() *cobra.Command {
	var deadline time.Duration
	var wait, force bool
	cmd := &cobra.Command{
		Use:   "drain GROUP N",
		Short: "Set the end of a generation that no longer gets new flows",
		Long: `Set a deadline for generation N, which drains or is staged: it keeps its flows
until they end, at the latest until then. Without --deadline one that was set
before stays; otherwise it is 30 s.

--force takes its sockets out of the kernel's map at once. Packets of its flows
then go to the active generation, which answers with a stateless reset.

The active generation cannot drain: activate another one first.`,
		Args: args("GROUP", "N"),
		RunE: func(cmd *cobra.Command, args []string) error {
			number, err := parseNumber(args[1])
			if err != nil {
				return err
			}
			if deadline < 0 {
				return usagef("--deadline %v: must not be negative", deadline)
			}
			explicit := cmd.Flags().Changed("deadline")
			if force && explicit {
				return usagef("--force ends the drain at once: it cannot have a --deadline")
			}
			return a.change(args[0], func(g *dispatch.Group, e dispatch.Entry, s dispatch.Snapshot) error {
				info, newest, ok := find(s, number)
				switch {
				case !ok && number < newest:
					a.printf("generation %d is gone already", number)
					return nil
				case !ok:
					return missing(e, number, newest)
				case info.State == dispatch.StateActive:
					return refusedf("drain generation %d: it is active; activate another generation first (instar activate %s N)",
						number, shortName(e))
				}
				if err := a.drain(g, info, force, explicit, deadline); err != nil {
					return err
				}
				if !wait {
					return nil
				}
				return a.waitGone(g, number)
			})
		},
	}
	cmd.Flags().DurationVar(&deadline, "deadline", defaultDeadline, "end the drain after this `duration` at the latest")
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until the generation is gone")
	cmd.Flags().BoolVar(&force, "force", false, "take its sockets out of the map at once")
	return cmd
}

func (a *app) drain(g *dispatch.Group, info dispatch.GenerationInfo, force, explicit bool, deadline time.Duration) error {
	if force {
		if err := g.Evict(info.Number); err != nil {
			return err
		}
		a.printf("generation %d gets no packet any more", info.Number)
		return nil
	}
	now := a.env.Now()
	end := now.Add(deadline)
	if !explicit && !info.Deadline.IsZero() {
		a.printf("generation %d drains, deadline %s (set before)", info.Number, until(now, info.Deadline))
		return nil
	}
	if err := g.SetDeadline(info.Number, end); err != nil {
		return err
	}
	a.printf("generation %d drains, deadline %s", info.Number, until(now, end))
	return nil
}

// waitGone returns once a generation holds no socket.
func (a *app) waitGone(g *dispatch.Group, number uint32) error {
	ctx, stop := a.env.Interruptible(a.env.Context)
	defer stop()
	tick := time.NewTicker(waitStep)
	defer tick.Stop()
	for {
		s, err := g.Snapshot()
		if err != nil {
			return err
		}
		info, _, ok := find(s, number)
		if !ok {
			a.printf("generation %d is gone", number)
			return nil
		}
		if info.State == dispatch.StateActive {
			return refusedf("drain generation %d: it became active again", number)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for generation %d: %w", number, errInterrupted)
		case <-tick.C:
		}
	}
}

func (a *app) forgetCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "forget GROUP",
		Short: "Remove the pins of a group that nobody uses",
		Long: `Remove the pins of a group: its maps, its program, its secret. Clients of servers
that were killed get no stateless reset afterwards.

Refused while any socket of the group lives.`,
		Args: args("GROUP"),
		RunE: func(_ *cobra.Command, args []string) error {
			e, err := a.resolve(args[0])
			if err != nil {
				return err
			}
			if err := dispatch.Forget(e.Path); err != nil {
				return err
			}
			a.printf("group %s is forgotten", shortName(e))
			return nil
		},
	}
}

func (a *app) programCommand() *cobra.Command {
	program := &cobra.Command{
		Use:   "program",
		Short: "Manage the kernel program of a group",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("program: unknown command %q", args[0])
			}
			return nil
		},
		RunE: func(*cobra.Command, []string) error {
			return usagef("program: missing command, as in: instar program upgrade GROUP")
		},
	}
	program.AddCommand(&cobra.Command{
		Use:   "upgrade GROUP",
		Short: "Replace the kernel program of a live group by this command's",
		Long: `Replace the kernel program of a live group by the one that this command was built
with, atomically: every packet meets the old program or the new one. Maps,
generations and flows stay. Refused when the layouts of the maps differ.`,
		Args: args("GROUP"),
		RunE: func(_ *cobra.Command, args []string) error {
			return a.change(args[0], func(g *dispatch.Group, _ dispatch.Entry, before dispatch.Snapshot) error {
				upgraded, err := g.UpgradeProgram()
				if err != nil {
					return err
				}
				if !upgraded {
					a.printf("program is %s already", before.Program)
					return nil
				}
				after, err := g.Snapshot()
				if err != nil {
					return err
				}
				a.printf("program is %s, was %s", after.Program, before.Program)
				return nil
			})
		},
	})
	return program
}

// change opens a group for a verb and closes it again.
func (a *app) change(name string, verb func(*dispatch.Group, dispatch.Entry, dispatch.Snapshot) error) error {
	g, e, s, err := a.open(name)
	if err != nil {
		return err
	}
	return errors.Join(verb(g, e, s), g.Close())
}

// missing is the error for a generation that is not there.
func missing(e dispatch.Entry, number, newest uint32) error {
	if number < newest {
		return notFoundf("generation %d of group %s: gone", number, shortName(e))
	}
	return notFoundf("generation %d of group %s: not found; \"instar show %s\" lists what there is",
		number, shortName(e), shortName(e))
}
