// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"instar/dispatch"
	"instar/internal/doctor"
)

func (a *app) doctorCommand() *cobra.Command {
	var o doctor.Options
	var all bool
	names, about := doctor.Checks()
	var list strings.Builder
	for i, name := range names {
		fmt.Fprintf(&list, "  %-13s %s\n", name, about[i])
	}
	cmd := &cobra.Command{
		Use:   "doctor [GROUP|ADDRESS]",
		Short: "Find what keeps Instar from working here",
		Long: `Look for what keeps Instar from working on this machine, or makes it lose packets,
and say what to do about it. Without an argument the groups of this network
namespace are looked at; an ADDRESS that no group has ("[NETWORK ]IP:port[ DEVICE]")
is looked at as it would be for a new one. --socket adds the handover of a server with that
control socket; it can be given several times.

It changes nothing. It needs no privilege: what it could not look at it says. Exit
code 6 means that there is a problem; warnings are exit code 0.

Checks:

` + list.String(),
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return fmt.Errorf("doctor: unexpected argument %q", args[1])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.Root = a.root
			if len(args) > 0 {
				if err := a.patient(args[0], &o); err != nil {
					return err
				}
			}
			return a.report(doctor.Examine(cmd.Context(), o), all)
		},
	}
	cmd.Flags().StringArrayVar(&o.Sockets, "socket", nil, "also look at the server with this control `socket`")
	cmd.Flags().BoolVar(&all, "all", false, "list what is fine as well")
	a.jsonFlag(cmd)
	return cmd
}

// patient finds what the command line names: a group, or an address without one.
func (a *app) patient(name string, o *doctor.Options) error {
	e, err := a.resolve(name)
	if err == nil {
		o.Paths = []string{e.Path}
		return nil
	}
	// Without a bpffs, or the right to read it, there may be a group; the doctor says so.
	address, ok := parsePatient(name)
	if code := exitCode(err); !ok || code != exitNotFound && code != exitEnvironment {
		return err
	}
	if _, _, err := dispatch.SocketsAt(address); exitCode(err) == exitUsage {
		return err
	}
	o.Address = &address
	return nil
}

// parsePatient reads "[NETWORK ]ADDRESS[ DEVICE]".
func parsePatient(name string) (o dispatch.Options, ok bool) {
	fields := strings.Fields(name)
	if len(fields) > 0 && !strings.Contains(fields[0], ":") {
		o.Network, fields = fields[0], fields[1:]
	}
	if len(fields) == 2 {
		o.Device, fields = fields[1], fields[:1]
	}
	if len(fields) != 1 || !strings.Contains(fields[0], ":") {
		return o, false
	}
	o.Address = fields[0]
	return o, true
}

// doctorJSON is the doctor's report for programs.
type doctorJSON struct {
	Version int    `json:"version"`
	Root    string `json:"root"`
	// Problems, Warnings and NotLookedAt count findings of these results.
	Problems    int `json:"problems"`
	Warnings    int `json:"warnings"`
	NotLookedAt int `json:"not_looked_at"`
	// Findings are in the order of the checks; each check has at least one.
	Findings []doctor.Finding `json:"findings"`
}

// errProblems says that the doctor found some; the report has told them.
var errProblems = &codeError{exitProblem, errSilent}

func (a *app) report(findings []doctor.Finding, all bool) error {
	counts := map[doctor.Result]int{}
	for _, f := range findings {
		counts[f.Result]++
	}
	var failed error
	if counts[doctor.Problem] > 0 {
		failed = errProblems
	}
	if a.json {
		if err := a.printJSON(doctorJSON{jsonVersion, a.root, counts[doctor.Problem], counts[doctor.Warning], counts[doctor.Unknown], findings}); err != nil {
			return err
		}
		return failed
	}
	colours := a.env.colours(a.env.Stdout)
	for _, f := range findings {
		if f.Result == doctor.OK && !all {
			continue
		}
		head := fmt.Sprintf("%-12s  %-12s", f.Result, f.Check)
		colour := map[doctor.Result]string{doctor.OK: colourGreen, doctor.Warning: colourYellow, doctor.Problem: colourRed,
			doctor.Unknown: colourFaint}[f.Result]
		if colours && colour != colourNone {
			head = colour + head + colourReset
		}
		reason := oneLineText(f.Reason)
		if f.Group != "" {
			reason = f.Group + ": " + reason
		}
		a.printf("%s  %s", head, reason)
		if f.Cure != "" {
			a.printf("%28s-> %s", "", oneLineText(f.Cure))
		}
	}
	a.printf("%s, %s, %d fine, %d not looked at", plural(counts[doctor.Problem], "problem"), plural(counts[doctor.Warning], "warning"),
		counts[doctor.OK], counts[doctor.Unknown])
	return failed
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
